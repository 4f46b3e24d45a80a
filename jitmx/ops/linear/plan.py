"""Launches of `linear`, planned once for a weight and a number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from jitmx import settings
from jitmx.dispatch.choice import Choice
from jitmx.dispatch.choose import companions, split
from jitmx.errors import KnobError
from jitmx.kernels import norm
from jitmx.kernels.fp8_rows import rows_bytes
from jitmx.kernels.linear import FAMILY, LinearProblem
from jitmx.kernels.linear.arguments import NO_PREFETCH, PREFETCH
from jitmx.kernels.norm.rows import fields as rows_fields
from jitmx.ops import checks
from jitmx.ops.linear.operand import Weight
from jitmx.runtime import card, plan
from jitmx.runtime.plan import Plans, Step

# What calls differ in. Those without RMSNorm and residual give less, and few name a weight to prefetch.
_PLAIN = "x", "weight", "scales", "bias", "y"
_WITH_RESIDUAL = "x", "weight", "scales", "bias", "residual", "norm", "y", "residual_lo", "epsilon"
_ROWS = "x", "weight", "y", "scales", "epsilon"
_IN_E4M3 = "x", "weight", "scales", "bias", "residual", "y", "residual_lo", "bases", "x_scales"

# Addresses of words and scales of a weight, and their bytes.
Prefetch = tuple[int, int, int, int]


def problem(weight: Weight, rows: int, dtype: torch.dtype, extras: Mapping[str, Any] | None = None) -> LinearProblem:
    """What a call with so many rows of x asks for; `extras` are further fields of the problem."""
    more: dict[str, Any] = {"weight": weight.format, **(extras or {})}
    if reads_rows(more.get("activation"), weight, dtype):
        more["row_range"] = weight.row_words.range
    return LinearProblem(
        rows,
        weight.n,
        weight.k,
        checks.HALF_DTYPES[dtype],
        encoding=weight.encoding,
        scale_range=weight.scale_range,
        **more,
    )


def reads_rows(activation: str | None, weight: Weight, dtype: torch.dtype) -> bool:
    """Whether a product may be one in E4M3, which is told of the rows of its weight."""
    return (
        activation == "fp8"
        and dtype is torch.bfloat16
        and (weight.format, weight.scale_range) == ("mxfp4", "normal")
        and "wgmma" in card.arch(card.number(weight.device)).features
    )


class Part:
    """One launch over some of the rows of a call.

    Attributes:
        brief: for calls without a prefetch; it takes `_PLAIN` if `plain`, else `_WITH_RESIDUAL`.
        whole: for calls with one; it takes `_WITH_RESIDUAL`, then the fields of the prefetch.
        plain: whether the product has neither RMSNorm nor residual.
        rows: of a product in E4M3 the launch before it, which takes `_ROWS`; else None.
        lines_bytes: of what that makes, before the scales of the rows.
        x_bytes, y_bytes: of its rows.
    """

    __slots__ = ("brief", "lines_bytes", "plain", "rows", "whole", "x_bytes", "y_bytes")

    def __init__(self, choice: Choice, device: int, multiprocessors: int) -> None:
        variant, asked = choice.variant, choice.problem
        assert isinstance(asked, LinearProblem)
        rows, n, k = asked.m, asked.n, asked.k
        geometry = FAMILY.launch(variant, asked, multiprocessors)
        fixed = {"rows": rows, "n": n, "k": k}
        self.rows: Step | None = None
        self.lines_bytes = -(-rows_bytes(rows, k) // 16) * 16
        for before in companions(choice):
            own = norm.launch(before.variant.knobs, rows, multiprocessors)
            self.rows = Step(before.variant, device, own, rows_fields(rows, k), _ROWS)
        self.plain = not (asked.norm or asked.residual)
        takes = _PLAIN if self.plain else _WITH_RESIDUAL
        self.brief = Step(variant, device, geometry, fixed, _IN_E4M3 if self.rows else takes)
        self.whole = self.brief if self.rows else Step(variant, device, geometry, fixed, (*_WITH_RESIDUAL, *PREFETCH))
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
        self.steps = tuple(step for part in self.parts for step in (part.rows, part.brief) if step is not None)
        self.launch = _launch_of(self.parts, weight)

    def over(self, weight: Weight) -> Plan:
        """The same launches over another weight of the same shape, packed alike."""
        other = object.__new__(Plan)
        other.parts, other.steps = self.parts, self.steps
        other.launch = _launch_of(self.parts, weight)
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


def _launch_of(parts: tuple[Part, ...], weight: Weight) -> _Launch:
    """Launches over a weight, as a function of what calls differ in."""
    words, scales = weight.addresses
    if len(parts) == 1 and parts[0].rows is not None:
        return _in_e4m3(parts[0], parts[0].rows.run, weight)
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


def _in_e4m3(part: Part, make_rows: Callable[..., None], weight: Weight) -> _Launch:
    """Two launches: rows of x in E4M3, normalised where there is a norm, and the product."""
    words, scales = weight.addresses
    run, lines_bytes, rows = part.brief.run, part.lines_bytes, part.x_bytes // (2 * weight.k)
    bases = weight.row_words.words
    bases_at, device = bases.data_ptr(), bases.device

    def launch(
        x: int, y: int, bias: int, residual: int, norm: int, epsilon: float, residual_lo: int, _prefetch: Prefetch
    ) -> None:
        # Nothing of it outlives the call: what is freed now is used again behind these launches.
        memory = torch.empty(lines_bytes + 4 * rows, dtype=torch.uint8, device=device)
        lines = memory.data_ptr()
        make_rows(x, norm, lines, lines + lines_bytes, epsilon)
        run(lines, words, scales, bias, residual, y, residual_lo, bases_at, lines + lines_bytes)

    return launch


# The many layers of a model plan once: launches of a problem, which all weights of a shape share.
_known = Plans(2048)


def _parts(asked: LinearProblem, device: int, knobs: tuple[tuple[str, Any], ...]) -> tuple[Part, ...]:
    key = asked, device, knobs, settings.current()
    found: tuple[Part, ...] | None = _known.get(key)
    if found is None:
        made: list[Part] = []
        arch, multiprocessors = card.arch(device), card.multiprocessors(device)
        for choice, count in split("linear", asked, arch, multiprocessors=multiprocessors, knobs=dict(knobs)):
            made += [Part(choice, device, multiprocessors)] * count
        found = _known.remember(key, tuple(made))
    return found
