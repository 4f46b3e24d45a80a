"""Launches of `linear`, planned once for a weight and a number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from jitmx import settings
from jitmx.dispatch.choose import split
from jitmx.errors import KnobError
from jitmx.kernels.linear import FAMILY, LinearProblem
from jitmx.kernels.linear.arguments import NO_PREFETCH, PREFETCH
from jitmx.ops.linear.operand import Weight
from jitmx.registry.spec import Variant
from jitmx.runtime import card, plan
from jitmx.runtime.plan import Plans, Step

# What calls differ in. Those without RMSNorm and residual give less, and few name a weight to prefetch.
_PLAIN = "x", "weight", "scales", "bias", "y"
_WITH_RESIDUAL = "x", "weight", "scales", "bias", "residual", "norm", "y", "residual_lo", "epsilon"

# Addresses of words and scales of a weight, and their bytes.
Prefetch = tuple[int, int, int, int]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def problem(weight: Weight, rows: int, dtype: torch.dtype, extras: Mapping[str, Any] | None = None) -> LinearProblem:
    """What a call with so many rows of x asks for; `extras` are further fields of the problem."""
    return LinearProblem(
        rows, weight.n, weight.k, DTYPES[dtype], encoding=weight.encoding, scale_range=weight.scale_range,
        **{"weight": weight.format, **(extras or {})},
    )  # fmt: skip


class Part:
    """One launch over some of the rows of a call.

    Attributes:
        brief: for calls without a prefetch; it takes `_PLAIN` if `plain`, else `_WITH_RESIDUAL`.
        whole: for calls with one; it takes `_WITH_RESIDUAL`, then the fields of the prefetch.
        plain: whether the product has neither RMSNorm nor residual.
        x_bytes, y_bytes: of its rows.
    """

    __slots__ = ("brief", "plain", "whole", "x_bytes", "y_bytes")

    def __init__(self, variant: Variant, asked: LinearProblem, device: int, multiprocessors: int) -> None:
        rows, n, k = asked.m, asked.n, asked.k
        geometry = FAMILY.launch(variant, asked, multiprocessors)
        fixed = {"rows": rows, "n": n, "k": k}
        self.plain = not (asked.norm or asked.residual)
        self.brief = Step(variant, device, geometry, fixed, _PLAIN if self.plain else _WITH_RESIDUAL)
        self.whole = Step(variant, device, geometry, fixed, (*_WITH_RESIDUAL, *PREFETCH))
        self.x_bytes = rows * k * 2
        self.y_bytes = rows * 8 if asked.argmax else rows * n * (1 if asked.swiglu else 2)


class Plan(plan.Plan):
    """The launches of one call: most are one; a call with more rows than its kernel takes is several.

    Attributes:
        launch: what calling the plan does. Called by itself it costs less, as a plain function.
        parts: launches, each over the next rows.
    """

    def __init__(
        self,
        weight: Weight,
        rows: int,
        dtype: torch.dtype,
        device: int,
        extras: Mapping[str, Any] | None = None,
        knobs: Mapping[str, Any] | None = None,
    ) -> None:
        self.parts: tuple[Part, ...] = ()
        if rows:
            asked = problem(weight, rows, dtype, extras)
            self.parts = _parts(asked, device, tuple((knobs or {}).items()))
            if asked.residual == "pair" and len(self.parts) > 1:
                raise KnobError(
                    f"{self.parts[0].brief.variant.name} takes {rows} rows in {len(self.parts)} launches, "
                    "and residual='pair' is served by one",
                    "choose a kernel that takes all rows",
                )
        self.steps = tuple(part.brief for part in self.parts)
        self.launch = _launch_of(self.parts, weight.addresses)

    def over(self, weight: Weight) -> Plan:
        """The same launches over another weight of the same shape, packed alike."""
        other = object.__new__(Plan)
        other.parts, other.steps = self.parts, self.steps
        other.launch = _launch_of(self.parts, weight.addresses)
        return other

    def __call__(
        self, x: int, y: int, bias: int = 0, residual: int = 0, norm: int = 0, epsilon: float = 0.0,
        residual_lo: int = 0, prefetch: Prefetch = NO_PREFETCH,
    ) -> None:  # fmt: skip
        """Launch on torch's current stream of the device, with device addresses, 0 for what the call lacks.

        Args:
            residual, residual_lo: both tensors, where the residual is a pair; those of y lie one behind the other.
            prefetch: of a weight that a later product reads: kernels that can bring it to the L2 as they end.
        """
        self.launch(x, y, bias, residual, norm, epsilon, residual_lo, prefetch)


_Launch = Callable[[int, int, int, int, int, float, int, Prefetch], None]


def _launch_of(parts: tuple[Part, ...], weight: tuple[int, int]) -> _Launch:
    """Launches over the weight at these addresses, as a function of what calls differ in."""
    words, scales = weight
    if len(parts) == 1:
        whole, brief = parts[0].whole.run, parts[0].brief.run

        def one(
            x: int, y: int, bias: int, residual: int, norm: int, epsilon: float, residual_lo: int, prefetch: Prefetch
        ) -> None:
            if prefetch is not NO_PREFETCH:
                whole(x, words, scales, bias, residual, norm, y, residual_lo, epsilon, *prefetch)
            else:
                brief(x, words, scales, bias, residual, norm, y, residual_lo, epsilon)

        def plain(
            x: int, y: int, bias: int, _residual: int, _norm: int, epsilon: float, _residual_lo: int, prefetch: Prefetch
        ) -> None:
            if prefetch is not NO_PREFETCH:
                whole(x, words, scales, bias, 0, 0, y, 0, epsilon, *prefetch)
            else:
                brief(x, words, scales, bias, y)

        return plain if parts[0].plain else one

    def several(
        x: int, y: int, bias: int, residual: int, norm: int, epsilon: float, residual_lo: int, prefetch: Prefetch
    ) -> None:
        for number, part in enumerate(parts, 1):
            given = prefetch if number == len(parts) else NO_PREFETCH
            part.whole.run(x, words, scales, bias, residual, norm, y, residual_lo, epsilon, *given)
            x += part.x_bytes
            y += part.y_bytes
            residual += part.y_bytes if residual else 0

    return several


# The many layers of a model plan once: launches of a problem, which all weights of a shape share.
_known = Plans(2048)


def _parts(asked: LinearProblem, device: int, knobs: tuple[tuple[str, Any], ...]) -> tuple[Part, ...]:
    key = asked, device, knobs, settings.current()
    found: tuple[Part, ...] | None = _known.get(key)
    if found is None:
        made: list[Part] = []
        arch, multiprocessors = card.arch(device), card.multiprocessors(device)
        for choice, count in split("linear", asked, arch, multiprocessors=multiprocessors, knobs=dict(knobs)):
            assert isinstance(choice.problem, LinearProblem)
            made += [Part(choice.variant, choice.problem, device, multiprocessors)] * count
        found = _known.remember(key, tuple(made))
    return found
