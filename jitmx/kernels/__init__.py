"""Kernel families, one file each. A module here that defines `FAMILY` is a family; nothing else registers it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

from jitmx import resources, settings
from jitmx.arch import Arch
from jitmx.errors import KnobError, SettingError
from jitmx.formats import BLOCK
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.tuning import Tuning
from jitmx.quoting import short
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Fields, KernelSpec, Variant

__path__ = resources.extended(__path__, "kernels", settings.current().families)


@dataclass(frozen=True)
class Problem(Fields):
    """Base of what one call asks of a family: its shape, and whatever else is not a matter of taste.

    Frozen dataclasses whose fields all have defaults, and limits where `knob` gives some. Choosing is a function of one
    of these, a target and its multiprocessor count.

    Attributes:
        derived: properties, numbers, that follow from the fields: tables may have ranges of them.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def on(cls, arch: Arch, **shape: Any) -> Self:
        """A problem with these fields, the others at the defaults that suit `arch`."""
        return cls(**shape)

    def require_blocks(self, *names: str) -> None:
        """Raise KnobError where a size is no whole number of blocks."""
        for name, size in self.pick(*names).items():
            if size % BLOCK:
                raise KnobError(
                    f"{self.owner}.{name}={size} is not a multiple of {BLOCK}, the values that share a scale",
                    f"the nearest legal value is {(size + BLOCK // 2) // BLOCK * BLOCK}",
                )

    def require_call(self) -> None:
        """Raise KnobError where no one call has these fields, though kernels may be chosen for them.

        Fields that bound several calls, the longest context and the most queries say, need not fit one.
        """

    @property
    def overridable(self) -> bool:
        """Whether knobs and tiles in the environment are meant for it."""
        return True


@dataclass(frozen=True)
class Companion:
    """A companion launch: one that a call makes beside the one that was chosen for it.

    Attributes:
        op: its family.
        problem: what it is asked.
        agrees: knobs that it must share with the chosen one, and under "kernel" the kernel.
        otherwise: kernel and knobs that it takes where what was chosen for it does not.
        step: the step of the call that it is, where another launch could have had that fused; else empty.
    """

    op: str
    problem: Problem
    agrees: Mapping[str, Any]
    otherwise: Mapping[str, Any]
    step: str = ""


@dataclass(frozen=True)
class Decomposition:
    """One way to make a call: what runs as steps of its own, and what is left to launch.

    Attributes:
        problem: what the launches are asked.
        unfused: names of the steps that run on their own.
        passes: how many times the launches are made, each time for the next rows.
        rest: what is asked for the rows that full passes leave; None where they leave none.
        before: launches that steps make before those of the problem.
    """

    problem: Problem
    unfused: tuple[str, ...] = ()
    passes: int = 1
    rest: Problem | None = None
    before: tuple[Companion, ...] = ()


class Instead(NamedTuple):
    """What a call takes in place of a field's value that was asked for, and why, in words."""

    value: Any
    why: str


@dataclass(frozen=True, eq=False)
class Family:
    """A set of kernels that together serve one operator.

    Attributes:
        name: the operator, and the template folder.
        summary: one line for listings.
        kernels: those that serve it, in the order in which one that serves is looked for.
        problem: the dataclass of its problems.
        typical: the problems on a target whose kernels warm-up compiles when told nothing else.
        heuristic: kernel and tuned knobs for a problem on a target with so many multiprocessors, without a table; by
            default the first kernel that serves it, and finds knobs.
        axes: fields of a problem, whole numbers, along which rows of its tables have ranges. The first is rows: along
            it a call is split where a kernel takes fewer at once (`Kernel.max_rows`).
        buckets: of a problem, usual values along axes, ascending. Its tuned knobs are those of the next larger ones, so
            that few variants are compiled; above them all those of the last, and along other axes those of the value
            itself. By default no axis has any.
        candidates: kernels with knobs that tuning tries for a problem, best guesses first; by default what the
            heuristic takes of each kernel, and then the candidates of that.
        fits: whether a variant that serves a problem does so on a card with so many multiprocessors; a table's row that
            was made for more of them, and does not, is passed over. By default all do.
        tiled: kernels that a tile in the environment may choose, of which the first that has it serves; that of the
            problem goes before them.
        companions: the launches of a call beside that of the variant chosen for it, in order; by default none.
        decompositions: how a call may be made, the best first; the last serves where no kernel takes another in one
            launch. By default there is one, without an unfused step.
        steps: what each step is that may run unfused, in words.
        instead: by field, what the call of a problem as it is asked takes in its place where it runs as a variant; by
            default every field is taken as asked.
        makes: what it is asked where it makes a step of another family's call that runs unfused, by the step's name and
            the problem of the call; None where it does not.
        tuning: what `jitmx tune` asks and measures of it; None where nothing is to be tuned.
        benchmark: what `jitmx bench` measures of it, or None.
    """

    name: str
    summary: str
    kernels: tuple[Kernel, ...]
    problem: type[Problem]
    typical: Callable[[Arch], tuple[Problem, ...]]
    heuristic: Callable[[Any, Arch, int], tuple[str, dict[str, Any]]] | None = None
    axes: tuple[str, ...] = ()
    buckets: Callable[[Any], Mapping[str, Sequence[int]]] = lambda problem: {}
    candidates: Callable[[Any, Arch, int], list[tuple[str, dict[str, Any]]]] | None = None
    fits: Callable[[Any, Variant, int], bool] = lambda problem, variant, multiprocessors: True
    tiled: Callable[[Any], Sequence[str]] = lambda problem: ()
    companions: Callable[[Any, Variant], tuple[Companion, ...]] = lambda problem, variant: ()
    decompositions: Callable[[Any], Iterable[Decomposition]] = lambda problem: (Decomposition(problem),)
    steps: Mapping[str, str] = field(default_factory=dict)
    instead: Callable[[Any, Variant], Mapping[str, Instead]] = lambda problem, variant: {}
    makes: Callable[[str, Any], Problem | None] = lambda step, problem: None
    tuning: Tuning | None = None
    benchmark: Benchmark | None = None

    def __post_init__(self) -> None:
        self.problem.owner = self.name

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The specifications of its kernels."""
        return tuple(kernel.spec for kernel in self.kernels)

    def kernel(self, name: str) -> Kernel:
        """The kernel called `name`.

        Raises:
            KnobError: there is none; the message lists those there are.
        """
        for kernel in self.kernels:
            if kernel.spec.name == name:
                return kernel
        listed = ", ".join(spec.name for spec in self.specs)
        raise KnobError(f"{short(name)} is no kernel of {self.name}; its kernels: {listed}")

    def spec(self, name: str) -> KernelSpec:
        """The specification of the kernel called `name`; KnobError as for `kernel`."""
        return self.kernel(name).spec

    def fixed(self, problem: Any, name: str) -> dict[str, Any]:
        """Knobs that a problem itself decides, for one of the kernels; KnobError where that cannot serve it."""
        kernel = self.kernel(name)
        return kernel.fixed(kernel.asked(problem))

    def serving(self, problem: Any, arch: Arch) -> tuple[str, ...]:
        """Names of the kernels that can serve a problem on a target."""
        return _serving(self, problem, arch)

    def guess(self, problem: Any, arch: Arch, multiprocessors: int) -> tuple[str, dict[str, Any]]:
        """Kernel and tuned knobs by the heuristic.

        Raises:
            KnobError: nothing fits the shape.
        """
        if self.heuristic is not None:
            return self.heuristic(problem, arch, multiprocessors)
        reasons = []
        for name in self.serving(problem, arch):
            try:
                return name, self.tuned(problem, arch, multiprocessors, name)
            except KnobError as error:
                reasons.append(str(error))
        raise KnobError(
            "; ".join(dict.fromkeys(reasons)) or f"no kernel of {self.name} serves {problem.as_dict()} on {arch}"
        )

    def tuned(self, problem: Any, arch: Arch, multiprocessors: int, name: str) -> dict[str, Any]:
        """Tuned knobs by the heuristic of one of the kernels."""
        kernel = self.kernel(name)
        return kernel.heuristic(kernel.asked(problem), arch, multiprocessors)

    def offered(self, problem: Any, arch: Arch, multiprocessors: int) -> list[tuple[str, dict[str, Any]]]:
        """Kernels with knobs that tuning tries, best guesses first: what the heuristic takes of each kernel opens."""
        if self.candidates is not None:
            return self.candidates(problem, arch, multiprocessors)
        found: list[tuple[str, dict[str, Any]]] = []
        others: list[tuple[str, dict[str, Any]]] = []
        for name in self.serving(problem, arch):
            kernel = self.kernel(name)
            with contextlib.suppress(KnobError):  # a kernel may find that nothing of it fits the shape
                found.append((name, self.tuned(problem, arch, multiprocessors, name)))
                others += [(name, knobs) for knobs in kernel.candidates(kernel.asked(problem), arch, multiprocessors)]
        return found + others

    def check(self, problem: Any, variant: Variant) -> None:
        """Raise KnobError where a legal variant cannot serve a problem, its shared memory too small for it, say."""
        self.kernel(variant.spec.name).check(problem, variant)

    def cases(self, variant: Variant) -> Iterable[Case]:
        """Launches of a variant with known results, small and ragged."""
        return self.kernel(variant.spec.name).cases(variant)

    def rarer(self, arch: Arch) -> list[Variant]:
        """Legal variants on a target that no typical problem need choose, small ones of every branch of the kernels."""
        found = [kernel.spec.legal(arch, **knobs) for kernel in self.kernels for knobs in kernel.rarer]
        return [variant for variant in found if variant is not None]

    def launch(self, variant: Variant, problem: Any, multiprocessors: int) -> Launch:
        """Geometry of a launch of `variant` for a problem on so many multiprocessors."""
        launch = self.kernel(variant.spec.name).launch
        assert launch is not None, f"{self.name}'s operator knows the geometry of its launches"
        return launch(variant.knobs, problem, multiprocessors)

    def rows(self, problem: Any) -> int:
        """How many rows a problem has: its value along the first axis; 1 where the family has none."""
        return int(getattr(problem, self.axes[0])) if self.axes else 1

    def of_rows(self, problem: Any, rows: int) -> Any:
        """The problem with another number of rows."""
        return replace(problem, **{self.axes[0]: rows})

    def bucket(self, problem: Any) -> Any:
        """The problem whose tuned knobs serve this one too."""
        next_larger = {
            name: next((value for value in usual if value >= getattr(problem, name)), usual[-1])
            for name, usual in self.buckets(problem).items()
        }
        return replace(problem, **next_larger) if next_larger else problem


@functools.lru_cache(maxsize=4096)
def _serving(family: Family, problem: Any, arch: Arch) -> tuple[str, ...]:
    found = []
    for kernel in family.kernels:
        if kernel.runs_on(arch):
            with contextlib.suppress(KnobError):
                kernel.fixed(kernel.asked(problem))
                found.append(kernel.spec.name)
    return tuple(found)


def _imported(found: pkgutil.ModuleInfo) -> ModuleType:
    """A module of this package; SettingError where one of somebody else's ends in an error."""
    folder, name = getattr(found.module_finder, "path", ""), f"{__name__}.{found.name}"
    if folder == str(Path(__file__).parent):
        return importlib.import_module(name)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
        place, line = (own[-1].filename, own[-1].lineno) if own else (f"{folder}/{found.name}", None)
        if isinstance(error, SyntaxError) and error.filename:
            place, line = error.filename, error.lineno
        where = f"{place}, line {line}" if line else place
        raise SettingError(
            f"{where}: the family {found.name} cannot be loaded ({type(error).__name__}: {error})",
            "correct it, or take its folder out of JITMX_FAMILIES",
        ) from error


@functools.cache
def families() -> dict[str, Family]:
    """Every family by name.

    Raises:
        KnobError: one has not the name of its module, by which its templates, tables and settings are found.
        SettingError: a module of a folder that JITMX_FAMILIES names cannot be imported.
    """
    found = {}
    for module in pkgutil.iter_modules(__path__):
        family = getattr(_imported(module), "FAMILY", None)
        if not isinstance(family, Family):
            continue
        if family.name != module.name:
            raise KnobError(
                f"the module {__name__}.{module.name} declares a family {family.name!r}",
                f"give the family, its module and its folder in templates/ one name: {module.name}",
            )
        found[family.name] = family
    return found


def family(name: str) -> Family:
    """The family called `name`.

    Raises:
        KnobError: there is none; the message lists those there are.
    """
    known = families()
    if name not in known:
        folders = settings.current().families
        if any(name in resources.families(folder / "kernels", folder / "templates") for folder in folders):
            raise KnobError(f"the module {__name__}.{name} declares no FAMILY", "assign a Family to that name there")
        raise KnobError(f"{short(name)} is not a kernel family; families: {', '.join(known)}")
    return known[name]
