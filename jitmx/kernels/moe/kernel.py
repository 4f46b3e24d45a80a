"""The form that every kernel of `moe` fills in, so that dispatch and launch need not know which it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.linear.kernel import anywhere
from jitmx.kernels.moe.problem import ACTIVATIONS, REDUCTIONS, WEIGHT_ON, X_FORMATS, MoeProblem
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Variant

# What every kernel takes.
USUAL = {
    "activation": ACTIVATIONS, "x_format": X_FORMATS[:1], "weight_on": WEIGHT_ON[:1], "reduction": REDUCTIONS[:1],
}  # fmt: skip


@dataclass(frozen=True)
class MoeKernel:
    """What the family needs of one kernel.

    Attributes:
        spec: the kernel.
        max_rows: rows of x that one launch takes at most, or None.
        fixed: knobs that a problem decides; KnobError where the kernel cannot serve it.
        launch: geometry, from knobs, problem and the multiprocessors of the device.
        heuristic: tuned knobs where no table has a row.
        cases: launches with known results, small and ragged.
        check: KnobError where a legal variant cannot serve a problem on so many multiprocessors.
        candidates: knobs that tuning tries, best guesses first.
        tile: knobs for a tile M x N (x K) with so many stages, where they are not those of moe/tiles.py.
        beyond: fields of a problem that it takes with any value; others of USUAL only with the usual ones.
        runs_on: whether the kernel has variants for a target.
    """

    spec: KernelSpec
    max_rows: int | None
    fixed: Callable[[MoeProblem], dict[str, Any]]
    launch: Callable[[Any, MoeProblem, int], Launch]
    heuristic: Callable[[MoeProblem, Arch, int], dict[str, Any]]
    cases: Callable[[Variant], Iterable[Case]]
    check: Callable[[MoeProblem, Variant], None]
    candidates: Callable[[MoeProblem, Arch, int], list[dict[str, Any]]]
    tile: Callable[[int, int, int | None, int | None], dict[str, Any]] | None = None
    beyond: tuple[str, ...] = ()
    runs_on: Callable[[Arch], bool] = anywhere

    def require_usual(self, problem: MoeProblem) -> None:
        """Raise KnobError where the problem asks for something that the kernel lacks."""
        for name, usual in USUAL.items():
            value = getattr(problem, name)
            if name not in self.beyond and value not in usual:
                raise KnobError(f"moe.{self.spec.name} does not take {name}={value!r}, only {' or '.join(usual)}")
