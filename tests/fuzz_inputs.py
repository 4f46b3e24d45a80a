"""What the properties put in: words, numbers, paths, variables, command lines, and files that are spoilt."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
from typing import Any

import click
from hypothesis import strategies as st

import fuzz_world as world
from jitmx import arch, kernels, settings
from jitmx.cache import manifest
from jitmx.cli import main
from jitmx.cli.group import LazyGroup


def _verbs(group: LazyGroup, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    found: dict[tuple[str, ...], click.Command] = {}
    for name in group.list_commands(click.Context(group)):
        verb = group.get_command(click.Context(group), name)
        assert verb is not None
        found |= _verbs(verb, (*path, name)) if isinstance(verb, LazyGroup) else {(*path, name): verb}
    return found


VERBS = _verbs(main)
del VERBS["bundle", "keygen"]  # it writes beside any name that it is given, if only in /dev

# A path of a word's own may lie anywhere: paths are those of the world, and no word has a slash. No variable has a NUL.
WORDS = st.one_of(
    st.text(st.characters(exclude_characters="/~\0", exclude_categories=["Cs"]), max_size=12),
    st.binary(max_size=8).map(lambda data: os.fsdecode(data.translate(None, b"/~\0"))),
    st.sampled_from(["\x1b[31mred", "a\nb", "\u202eabc", "%s", "[bold]x[/]", "{0}", "*", "0", "none", "all", "auto"]),
)
NUMBERS = st.one_of(
    st.integers(-3, 300).map(str),
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.sampled_from([400, 4299, 4301, 20_000]).map(lambda digits: "9" * digits),
    st.sampled_from(["nan", "inf", "-inf", "1e400", "0x10", "1_000", "٣", "²", "+5", "2147483647", "2147483648", "-0"]),
    st.tuples(st.integers(0, 10**9), st.sampled_from(["K", "G", "TiB", "d", "w", "s", ".5M"])).map(
        lambda pair: f"{pair[0]}{pair[1]}"
    ),
)
PATHS = st.sampled_from(world.HOSTILE)
TARGETS = st.sampled_from([*arch.SUPPORTED, "sm_90", "sm_121", "sm_70", "sm_90,sm_121"])
NAMES = st.sampled_from(
    [*kernels.families(), *(f"{spec.family}.{spec.name}" for one in kernels.families().values() for spec in one.specs)]
)
KNOWN = st.sampled_from(["gpt-oss-120b", "gpt-oss-20b", "moe,o:mxfp8", "kernel=tile", "64x128x128s4"])
_FORMS: list[Any] = [
    kind for one in kernels.families().values() for kind in (one.problem, *(spec.knobs for spec in one.specs))
]
_FIELDS = sorted({item.name for form in _FORMS for item in dataclasses.fields(form)})
PAIRS = st.tuples(st.sampled_from(_FIELDS), st.one_of(NUMBERS, WORDS, NAMES)).map("=".join)
VALUES = st.one_of(WORDS, NUMBERS, PATHS, TARGETS, NAMES, KNOWN, PAIRS)


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    """A command line: a verb, its options and what follows them, any of it wrong."""
    path = draw(st.sampled_from(list(VERBS)))
    switches = [option for item in VERBS[path].params if isinstance(item, click.Option) for option in item.opts]
    words = list(path) + (["--json"] if draw(st.booleans()) else [])
    if draw(st.booleans()):
        words += ["--arch", draw(TARGETS)]
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.integers(0, 9))
        if kind < 5:
            words += [draw(st.sampled_from(switches)), draw(VALUES)]
        elif kind < 9:
            words.append(draw(VALUES))
        else:
            words.append(draw(st.sampled_from([*switches, "--", "-", "--help", "--" + draw(WORDS)])))
    if draw(st.integers(0, 30)) == 0:
        words.insert(draw(st.integers(0, len(path))), draw(VALUES))
    return words


_VARIABLES = [name for setting in settings.TABLE for name in (setting.name, *setting.aliases)]
_LISTED = st.lists(VALUES, max_size=3).map(",".join)
SETTINGS = st.dictionaries(
    st.sampled_from([*_VARIABLES, "JITMX_", "JITMX_JOB", "JITMX_X\x1b[31m", "JITMX_CAF\udce9"]),
    st.one_of(VALUES, VALUES, _LISTED),
    min_size=1,
    max_size=3,
)

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=8),
        st.sampled_from([10**300, -1, "\ud800", "\x1b[31m", "a\nb", "", "f" * 64, "../../x", 1e308, 4.1e9]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip


@st.composite
def odd(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with some of its members replaced, added or taken away."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        at = value
        while isinstance(at, dict | list) and at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = draw(st.sampled_from(keys))
            if not isinstance(at[key], dict | list) or not at[key] or draw(st.integers(0, 3)) == 0:
                if draw(st.integers(0, 5)) == 0:
                    del at[key]
                else:
                    at[key] = draw(JSON)
                break
            at = at[key]
    return value


@st.composite
def spoilt(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes that were once `data`."""
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return draw(st.binary(max_size=64))
    if kind == 1:
        return b"[" * draw(st.sampled_from([500, 990, 3000])) + data
    if kind == 2:
        return b'{"schema_version": ' + b"9" * draw(st.sampled_from([20, 5000])) + b"}"
    start = draw(st.integers(0, len(data)))
    return data[:start] + draw(st.binary(max_size=4)) + data[start + draw(st.integers(0, 40)) :]


@st.composite
def documents(draw: st.DrawFn, data: bytes) -> bytes:
    """A JSON document in the place of `data`, sealed where that is: odd members, or spoilt bytes."""
    if draw(st.booleans()):
        return draw(spoilt(data))
    values = json.loads(data)
    if not isinstance(values, dict) or values.pop("seal", None) is None:
        return json.dumps(draw(odd(values))).encode()
    if draw(st.integers(0, 9)) == 0:
        head = b'{"deep": ' + b"[" * 3000 + b"]" * 3000
        return head + manifest._SEAL_OPENS + hashlib.sha256(head).hexdigest().encode() + manifest._SEAL_CLOSES
    made = draw(odd(values))
    return manifest.seal(made) if made else b"{}"
