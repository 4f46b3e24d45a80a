"""A fault planted in one place of a kernel: what it is made in, and what the kernel's own cases say of it.

A mutation edits one place of a rendered source into which its headers have been written out, so that templates and
headers alike are within reach. The text to be replaced occurs exactly once, else the test fails: no mutation can turn
into a no-op as kernels change. A case catches a mutation by a simulation error or an error over its gate.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evidence import made_from
from jitmx import arch, kernels
from jitmx.errors import SimulationError
from jitmx.registry.case import Case, chains
from jitmx.registry.key import frame
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import run_chain
from jitmx.toolchain import headers, nvrtc

_INCLUDE = re.compile(r'^#include "(jitmx/[^"]+)"\n', re.MULTILINE)


def variant(family: str, name: str, target: str, **knobs: Any) -> Variant:
    """A kernel to plant faults in."""
    return kernels.family(family).spec(name).variant(arch.parse(target), **knobs)


@dataclass(frozen=True)
class Mutation:
    """One fault: in `place`, which is called `where`, `old` becomes `new`."""

    where: str
    place: Variant
    name: str
    old: str
    new: str

    @property
    def id(self) -> str:
        """What tests call it."""
        return f"{self.where}: {self.name}"

    def text(self) -> str:
        """The source with the fault in it."""
        text = source(self.place)
        count = text.count(self.old)
        assert count == 1, f"{self.old!r} occurs {count} times in {self.where}; it should occur once"
        return text.replace(self.old, self.new)

    def fault(self) -> str | None:
        """What the first case that fails says; None where all pass."""
        return fault(self.place, self.text())

    def proof(self) -> str:
        """What it rests on that the fault is caught, as a digest: source, cases, simulator, and who asks them."""
        asks = "".join(inspect.getsource(function) for function in (fault, _chains)).encode()
        return frame([("fault in", made_from(self.place, self.text()).encode()), ("asks", asks)])


def catalogue(
    places: Mapping[str, Variant], faults: Mapping[str, Iterable[tuple[str, str, str]]]
) -> tuple[Mutation, ...]:
    """Faults by the name of the place that they are planted in: what tests call each, what is replaced, and by what."""
    return tuple(Mutation(where, places[where], *fault) for where, planted in faults.items() for fault in planted)


@functools.cache
def source(place: Variant) -> str:
    """CUDA source of a variant with its headers written out in place, each once."""
    seen: set[str] = set()

    def write_out(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        text = headers.pool().text(match[1]).decode().replace("#pragma once\n", "")
        return _INCLUDE.sub(write_out, text)

    return _INCLUDE.sub(write_out, render(place))


def fault(place: Variant, text: str) -> str | None:
    """What the first case of a variant that fails with this source says, then the first chain; None where all pass."""
    ptx = nvrtc.compile_ptx(text, nvrtc.options(place.arch))
    for chain in _chains(place):
        launches = run_chain(chain, place, ptx)
        for case in chain:
            try:
                name, error, _ = next(launches)
            except SimulationError as found:
                return f"{case.name}: {found}"
            if not error <= case.gate:
                return f"{name}: error {error:.3g} is over the gate of {case.gate:g}"
    return None


def _chains(place: Variant) -> Iterator[tuple[Case, ...]]:
    """Every case by itself, made when those before it have passed; then the chains of several."""
    cases: list[Case] = []
    for case in kernels.family(place.spec.family).cases(place):
        cases.append(case)
        yield (case,)
    yield from (chain for chain in chains(cases) if len(chain) > 1)
