"""Launches of `linear`, planned once for a weight and a number of rows."""

from __future__ import annotations

import functools
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from jitmx import settings
from jitmx.dispatch.choose import split
from jitmx.errors import KnobError
from jitmx.kernels.linear import FAMILY, LinearProblem
from jitmx.kernels.linear.arguments import LAYOUT, NO_PREFETCH
from jitmx.ops import checks, scratch
from jitmx.ops.operand import Weight
from jitmx.registry.spec import Variant
from jitmx.runtime.launch import Launcher

# Row counts vary from call to call where prompts are read: what is kept for them has a limit.
_MOST_PROBLEMS, _MOST_PLANS = 2048, 1024

# The beginning of the struct, of which calls without a prefetch give no more: for products without RMSNorm and residual
# x, words, scales, bias and y; for the others all before the numbers of rows.
_PLAIN, _BEFORE_ROWS = "@PPPP16xP", "@PPPPPPPPPf"

# Addresses of words and scales of a weight, and their bytes.
Prefetch = tuple[int, int, int, int]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def problem(weight: Weight, rows: int, dtype: torch.dtype, extras: Mapping[str, Any] | None = None) -> LinearProblem:
    """What a call with so many rows of x asks for; `extras` are further fields of the problem."""
    return LinearProblem(
        rows, weight.n, weight.k, DTYPES[dtype], encoding=weight.encoding, scale_range=weight.scale_range,
        **{"weight": weight.format, **(extras or {})},
    )  # fmt: skip


class Plan:
    """The launches of one call: everything that does not change from call to call.

    Most calls are one launch; one with more rows than its kernel takes is several.

    Attributes:
        launch: what calling the plan does. Called by itself it costs less, as a plain function.
        steps: the launches.
    """

    __slots__ = ("launch", "steps")

    def __init__(
        self,
        weight: Weight,
        rows: int,
        dtype: torch.dtype,
        device: int,
        extras: Mapping[str, Any] | None = None,
        knobs: Mapping[str, Any] | None = None,
    ) -> None:
        self.steps: tuple[Step, ...] = ()
        if rows:
            asked = problem(weight, rows, dtype, extras)
            self.steps = _steps(asked, device, tuple((knobs or {}).items()), settings.current())
            if asked.residual == "pair" and len(self.steps) > 1:
                raise KnobError(
                    f"{self.steps[0].launcher.variant.name} takes {rows} rows in {len(self.steps)} launches, and "
                    "residual='pair' is served by one: choose a kernel that takes all rows"
                )
        self.launch = _launch_of(self.steps, weight.addresses)

    def over(self, weight: Weight) -> Plan:
        """The same launches over another weight of the same shape, packed alike."""
        other = object.__new__(Plan)
        other.steps, other.launch = self.steps, _launch_of(self.steps, weight.addresses)
        return other

    def __call__(
        self, stream: int, x: int, y: int, bias: int = 0, residual: int = 0, norm: int = 0, epsilon: float = 0.0,
        lost: int = 0, prefetch: Prefetch = NO_PREFETCH,
    ) -> None:  # fmt: skip
        """Launch on the CUstream `stream`; the rest are device addresses, 0 for what the call lacks.

        Args:
            residual, lost: both tensors, where the residual is a pair; those of y lie one behind the other.
            prefetch: of a weight that a later product reads: kernels that can bring it to the L2 as they end.
        """
        self.launch(stream, x, y, bias, residual, norm, epsilon, lost, prefetch)


_Launch = Callable[[int, int, int, int, int, int, float, int, Prefetch], None]


def _launch_of(steps: tuple[Step, ...], weight: tuple[int, int]) -> _Launch:
    """Launches over the weight at these addresses, as a function of what calls differ in."""
    words, scales = weight
    if len(steps) == 1 and not steps[0].scratch:
        # As methods: quicker than calling the objects.
        whole, brief, (rows, n, k) = steps[0].launcher.__call__, steps[0].brief.__call__, steps[0].shape

        def one(
            stream: int, x: int, y: int, bias: int, residual: int, norm: int, epsilon: float, lost: int,
            prefetch: Prefetch,
        ) -> None:  # fmt: skip
            if prefetch is not NO_PREFETCH:
                whole(stream, x, words, scales, bias, residual, norm, y, 0, lost, epsilon, rows, n, k, *prefetch)
            else:
                brief(stream, x, words, scales, bias, residual, norm, y, 0, lost, epsilon)

        def plain(
            stream: int, x: int, y: int, bias: int, _residual: int, _norm: int, epsilon: float, _lost: int,
            prefetch: Prefetch,
        ) -> None:  # fmt: skip
            if prefetch is not NO_PREFETCH:
                whole(stream, x, words, scales, bias, 0, 0, y, 0, 0, epsilon, rows, n, k, *prefetch)
            else:
                brief(stream, x, words, scales, bias, y)

        return plain if steps[0].plain else one

    def several(
        stream: int, x: int, y: int, bias: int, residual: int, norm: int, epsilon: float, lost: int,
        prefetch: Prefetch,
    ) -> None:  # fmt: skip
        for number, step in enumerate(steps, 1):
            told = prefetch if number == len(steps) else NO_PREFETCH
            memory = scratch.memory(step.scratch, step.kind, step.device, stream) if step.scratch else None
            workspace = 0 if memory is None else memory.data_ptr()
            step.launcher(
                stream, x, words, scales, bias, residual, norm, y, workspace, lost, epsilon, *step.shape, *told
            )
            x += step.x_bytes
            y += step.y_bytes
            residual += step.y_bytes if residual else 0

    return several


@functools.lru_cache(maxsize=_MOST_PROBLEMS)
def _steps(
    asked: LinearProblem, device: int, knobs: tuple[tuple[str, Any], ...], _chosen_under: settings.Settings
) -> tuple[Step, ...]:
    """The launches of a problem, which all weights of a shape share: the many layers of a model plan once."""
    steps: list[Step] = []
    arch, multiprocessors = checks.device_arch(device), checks.multiprocessors(device)
    for choice, count in split("linear", asked, arch, multiprocessors=multiprocessors, knobs=dict(knobs)):
        assert isinstance(choice.problem, LinearProblem)
        steps += [Step(choice.variant, choice.problem, device, multiprocessors)] * count
    return tuple(steps)


class Planned(Protocol):
    """A weight with what was planned for calls with it."""

    @property
    def plans(self) -> dict[Any, Any]: ...


# Weights with plans: those are forgotten where settings change, so that a warm call need not ask.
_planned: weakref.WeakSet[Planned] = weakref.WeakSet()
_lock = threading.Lock()


def remember(weight: Planned, key: tuple[Any, ...], entry: Any) -> None:
    """Keep what was planned for a call with the weight, until settings change, among the plans of so many shapes."""
    with _lock:
        _planned.add(weight)
    if len(weight.plans) >= _MOST_PLANS:
        weight.plans.clear()
    weight.plans[key] = entry


def _forget() -> None:
    with _lock:
        weights = list(_planned)
    for weight in weights:
        weight.plans.clear()


settings.when_changed(_forget)


class Step:
    """One launch over some of the rows of a call.

    Attributes:
        launcher: takes the whole struct of arguments.
        brief: the same kernel for calls without a prefetch, where one launch takes all rows: it takes what differs
            between them, up to epsilon, and if `plain` only x, words, scales, bias and y.
        plain: whether the product has neither RMSNorm nor residual, and the kernel no scratch memory.
    """

    __slots__ = ("brief", "device", "kind", "launcher", "plain", "scratch", "shape", "x_bytes", "y_bytes")

    def __init__(self, variant: Variant, asked: LinearProblem, device: int, multiprocessors: int) -> None:
        rows, n, k = asked.m, asked.n, asked.k
        geometry = FAMILY.launch(variant, asked, multiprocessors)
        make = functools.partial(
            Launcher,
            variant,
            device,
            blocks=geometry.blocks,
            shared_bytes=geometry.shared_bytes,
            cluster=geometry.cluster,
            pdl=variant.knobs.pdl,
            matrix=geometry.matrix,
        )
        self.plain = not (asked.norm or asked.residual or geometry.workspace)
        given = _PLAIN if self.plain else _BEFORE_ROWS
        whole = struct.pack(LAYOUT, *[0] * 9, 0.0, rows, n, k, *NO_PREFETCH)
        self.launcher = make(layout=LAYOUT)
        self.brief = make(layout=given, rest=whole[struct.calcsize(given) :])
        self.shape = rows, n, k
        self.x_bytes = rows * k * 2
        self.y_bytes = rows * 8 if getattr(variant.knobs, "argmax", False) else rows * n * 2
        self.scratch = geometry.workspace
        self.device = device
        self.kind = variant.identity, rows, n, k
