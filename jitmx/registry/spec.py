"""Kernel specifications and their variants.

A `KernelSpec` is one template with its knobs; a `Variant` is a spec with every knob and the target fixed. Knobs are
frozen dataclasses whose fields carry their choices, so that a variant which exists is a legal one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jitmx import setting_text
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.quoting import short
from jitmx.registry.arguments import Arguments
from jitmx.registry.contract import Contract

# What a size can be: an int of a kernel's arguments holds it, and it is whole blocks of 32.
MAX_SIZE = (1 << 31) - 32


def knob(
    default: Any, *, choices: tuple[Any, ...] | None = None, low: int | None = None, high: int | None = None, doc: str
) -> Any:
    """A dataclass field for one knob: its default, its choices or bounds, and one line of documentation.

    A flag (a bool by default) may have words among its choices, for a third way of doing what it turns on.
    """
    return field(default=default, metadata={"choices": choices, "low": low, "high": high, "doc": doc})


# Knobs that mean the same in every kernel; a target may lack what they ask for (`_check_features`).
COPY: Any = knob("bulk", choices=("bulk", "async"), doc="bulk copies on an mbarrier (sm_90 and newer), or cp.async")
PDL: Any = knob(
    True, doc="programmatic dependent launch: what takes nothing of the previous kernel is done before it ends"
)


@dataclass(frozen=True)
class Fields:
    """Base of what is chosen or asked for. Making one checks every field against its type, choices and bounds.

    Attributes:
        owner: what errors call it: the kernel of knobs, the family of a problem.
    """

    owner: ClassVar[str] = "knobs"

    def __post_init__(self) -> None:
        values = vars(self)
        made: Any = type(self)
        for item, name, kind, choices, low, high in _rules(made):
            value = values[name]
            if (
                type(value) is not kind
                or (choices is not None and value not in choices)
                or (low is not None and value < low)
                or (high is not None and value > high)
            ):
                _check(self.owner, item, value)

    def pick(self, *names: str) -> dict[str, Any]:
        """Name to value of these fields."""
        return {name: getattr(self, name) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """Name to value, in declaration order."""
        made: Any = type(self)
        return {name: getattr(self, name) for _, name, *_ in _rules(made)}


@dataclass(frozen=True)
class Knobs(Fields):
    """Base of a kernel's knobs."""

    @classmethod
    def from_text(cls, pairs: Mapping[str, str], base: Knobs | None = None) -> Knobs:
        """Knobs from `name=text` pairs, over `base` or the defaults.

        Raises:
            KnobError: an unknown name, or a text that is no value of its knob.
        """
        items = {item.name: item for item in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, text in pairs.items():
            if name not in items:
                raise KnobError(f"{cls.owner} has no knob {short(name)}; its knobs: {', '.join(items)}")
            values[name] = _read(cls.owner, items[name], text)
        return dataclasses.replace(base, **values) if base is not None else cls(**values)


def flags(item: dataclasses.Field[Any]) -> dict[str, bool | str]:
    """Texts of the values of a flag, to these."""
    words = [choice for choice in item.metadata["choices"] or () if isinstance(choice, str)]
    return {"0": False, "1": True, **{word: word for word in words}}


def read_flag(item: dataclasses.Field[Any], text: str) -> bool | str | None:
    """The value of a flag that a text says, or None where it says none."""
    return flags(item).get({"false": "0", "true": "1"}.get(text.lower(), text))


def _read(owner: str, item: dataclasses.Field[Any], text: str) -> Any:
    if isinstance(item.default, bool):
        value = read_flag(item, text)
        if value is None:
            raise KnobError(f"{owner}.{item.name}={short(text)} is not {' or '.join(flags(item))}")
        return value
    if isinstance(item.default, int):
        try:
            return setting_text.whole(text, -MAX_SIZE, MAX_SIZE)
        except ValueError:
            said = f"is over {MAX_SIZE}" if text.strip().isdecimal() else "is not a whole number"
            raise KnobError(f"{owner}.{item.name}={short(text)} {said}") from None
    return text


def said_kind(item: dataclasses.Field[Any]) -> str:
    """What a value of a field is, in words."""
    if isinstance(item.default, bool):
        return " or ".join(("true", "false", *(word for word in flags(item).values() if isinstance(word, str))))
    return "a whole number" if isinstance(item.default, int) else "text"


@functools.cache
def _rules(fields: Any) -> tuple[tuple[dataclasses.Field[Any], str, type[Any], Any, Any, Any], ...]:
    """Fields with name, type, choices and bounds, taken apart once: a heuristic makes hundreds of knobs a call."""
    return tuple(
        (item, item.name, type(item.default), item.metadata.get("choices"), item.metadata.get("low"),
         item.metadata.get("high"))
        for item in dataclasses.fields(fields)
    )  # fmt: skip


def _check(owner: str, item: dataclasses.Field[Any], value: Any) -> None:
    if isinstance(item.default, bool) and isinstance(value, str) and value in flags(item).values():
        return
    if isinstance(item.default, bool) != isinstance(value, bool) or not isinstance(value, type(item.default)):
        raise KnobError(f"{owner}.{item.name}={short(value)} is not {said_kind(item)}")
    choices, low, high = (item.metadata.get(part) for part in ("choices", "low", "high"))
    if choices is not None and value not in choices:
        listed = ", ".join(map(str, choices))
        if isinstance(value, int) and not isinstance(value, bool):
            nearest = min(choices, key=lambda choice: abs(choice - value))
            raise KnobError(f"{owner}.{item.name}={short(value)} is not one of {listed}", f"the nearest is {nearest}")
        raise KnobError(f"{owner}.{item.name}={short(value)} is not one of {listed}")
    if low is not None and value < low:
        raise KnobError(f"{owner}.{item.name}={short(value)} is below its limit", f"the nearest legal value is {low}")
    if high is not None and value > high:
        raise KnobError(f"{owner}.{item.name}={short(value)} is above its limit", f"the nearest legal value is {high}")


def fitting(knobs: Knobs, shared_bytes: Callable[[Any], int], arch: Arch) -> str:
    """In words: the largest `stages` with which these knobs fit the shared memory of a block, or that none does.

    Args:
        shared_bytes: bytes that a block needs with given knobs.
    """
    stages = _fitting_stages(knobs, shared_bytes, arch)
    if stages:
        return f"the nearest legal value is stages={stages}"
    return (
        "choose knobs that need less" if stages is None else "with the other knobs as they are, not even stages=1 fits"
    )


def _fitting_stages(knobs: Knobs, shared_bytes: Callable[[Any], int], arch: Arch) -> int | None:
    """That many stages, 0 where none do; None for knobs without."""
    values = knobs.as_dict()
    if "stages" not in values:
        return None
    for stages in range(values["stages"] - 1, 0, -1):
        try:
            fewer = dataclasses.replace(knobs, stages=stages)  # type: ignore[call-arg]
        except KnobError:
            continue
        if shared_bytes(fewer) <= arch.shared_bytes:
            return stages
    return 0


@dataclass(frozen=True)
class KernelSpec:
    """One template and what may be made of it.

    Attributes:
        family: the operator that it serves; also the template's folder.
        name: the kernel within its family; `<family>/<name>.cu.j2` is its template.
        knobs: the dataclass of its knobs.
        contract: what the machine code of every variant must be, given knobs and target.
        threads: threads a block.
        arguments: the struct that it is launched with.
        shared_bytes: shared memory that a block of the variant needs, bytes; 0 where the ELF tells all.
        entry: name of the `extern "C"` function in the source; jitmx_<family>_<name> where none is given.
        check: raises KnobError where knobs do not fit each other or the target. `copy` and `pdl` mean the same in every
            kernel and are checked with the variant.
    """

    family: str
    name: str
    knobs: type[Knobs]
    contract: Callable[[Any, Arch], Contract]
    threads: Callable[[Any], int]
    arguments: Callable[[Any], Arguments]
    shared_bytes: Callable[[Any], int] = lambda knobs: 0
    entry: str = ""
    check: Callable[[Any, Arch], None] = lambda knobs, arch: None

    def __post_init__(self) -> None:
        if not self.entry:
            object.__setattr__(self, "entry", f"jitmx_{self.family}_{self.name}")
        self.knobs.owner = f"{self.family}.{self.name}"

    @property
    def template(self) -> str:
        """Path of the template below `templates/`."""
        return f"{self.family}/{self.name}.cu.j2"

    def variant(self, arch: Arch, **knobs: Any) -> Variant:
        """The variant with these knobs (others at their defaults) on `arch`.

        Raises:
            KnobError: an unknown knob, a value outside its choices, or a need beyond the chip's limits.
        """
        try:
            return _variant(self, arch, tuple(knobs), *knobs.values())
        except TypeError:  # a value that cannot be hashed, of a table say, which is no knob's
            return _variant.__wrapped__(self, arch, tuple(knobs), *knobs.values())

    def own(self, **knobs: Any) -> Knobs:
        """Its knobs with these values, others at their defaults: each legal by itself, for some target.

        Raises:
            KnobError: an unknown knob, or a value outside its choices.
        """
        names = [item.name for item in dataclasses.fields(self.knobs)]
        for name in knobs:
            if name not in names:
                raise KnobError(f"{self.family}.{self.name} has no knob {short(name)}; its knobs: {', '.join(names)}")
        return self.knobs(**knobs)

    def legal(self, arch: Arch, **knobs: Any) -> Variant | None:
        """The variant with these knobs on `arch`, or None where there is none."""
        try:
            return self.variant(arch, **knobs)
        except KnobError:
            return None


@functools.lru_cache(maxsize=4096, typed=True)
def _variant(spec: KernelSpec, arch: Arch, given: tuple[str, ...], *values: Any) -> Variant:
    """One object for each: a layer's warm-up chooses the same few some thousand times. True is another value than 1."""
    return Variant(spec, spec.own(**dict(zip(given, values, strict=True))), arch)


def _check_features(knobs: Any, arch: Arch) -> None:
    """Refuse what a target lacks, for knobs that mean the same in every kernel: `copy` and `pdl`."""
    if getattr(knobs, "copy", None) == "bulk" and "tma" not in arch.features:
        raise KnobError("copy='bulk' needs sm_90 or newer", f"on {arch} use copy='async'")
    if getattr(knobs, "pdl", False) and "pdl" not in arch.features:
        raise KnobError(f"pdl=True needs sm_90 or newer; {arch} has no programmatic dependent launch", "use pdl=False")


@dataclass(frozen=True)
class Variant:
    """A kernel with every knob and its target fixed. Made only if legal."""

    spec: KernelSpec
    knobs: Any
    arch: Arch

    def __post_init__(self) -> None:
        _check_features(self.knobs, self.arch)
        self.spec.check(self.knobs, self.arch)
        need = self.spec.shared_bytes(self.knobs)
        if need > self.arch.shared_bytes:
            said = (
                f"{self.name} needs {need} B of shared memory; a block on {self.arch} has at most "
                f"{self.arch.shared_bytes} B"
            )
            raise KnobError(said, fitting(self.knobs, self.spec.shared_bytes, self.arch))

    @functools.cached_property
    def name(self) -> str:
        """Readable and unique among the variants of one target: `linear.gemv.m4-fp16-chunk2`.

        Knobs at their defaults are left out. No two knobs of a kernel share a text, so that each can be told apart.
        """
        parts = []
        for item in dataclasses.fields(self.knobs):
            value = getattr(self.knobs, item.name)
            if value == item.default:
                continue
            if isinstance(value, bool):
                parts.append(item.name if value else f"no_{item.name}")
            else:
                parts.append(f"{item.name}{value}" if isinstance(value, int) else str(value))
        return f"{self.spec.family}.{self.spec.name}" + (f".{'-'.join(parts)}" if parts else "")

    @property
    def arguments(self) -> Arguments:
        """The struct that it is launched with."""
        return self.spec.arguments(self.knobs)

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.spec.threads(self.knobs)

    @property
    def warm_up_command(self) -> str:
        """The command that compiles just this variant ahead of time: kernel, and every knob not at its default."""
        words = [f"jitmx warmup --arch {self.arch} --variant {self.spec.family}.{self.spec.name}"]
        for item in dataclasses.fields(self.knobs):
            value = getattr(self.knobs, item.name)
            if value != item.default:
                words.append(f"{item.name}={int(value) if isinstance(value, bool) else value}")
        return " ".join(words)

    @property
    def identity(self) -> str:
        """Hexadecimal digest of family, name, knobs and target: the same wherever it is computed."""
        text = json.dumps([self.spec.family, self.spec.name, self.knobs.as_dict(), self.arch.name], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
