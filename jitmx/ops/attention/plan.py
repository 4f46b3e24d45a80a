"""Launches of `attention`, planned once for each kind of call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jitmx.dispatch.choice import Choice
from jitmx.dispatch.choose import choose, companions
from jitmx.kernels.attention import FAMILY, wgmma
from jitmx.kernels.attention.problem import ORDER, AttentionProblem, short_queries
from jitmx.ops.attention.checks import RARE, Call
from jitmx.registry.spec import Variant
from jitmx.runtime import card, plan
from jitmx.runtime.plan import Step

# What calls give, in the order of the struct.
ADDRESSES = (
    "q", "k", "v", "k_cache", "v_cache", "block_table", "seq_lens", "query_start", "slots", "positions", "sinks",
    "rope", "mask", "k_scale", "v_scale", "out",
)  # fmt: skip
# What is the same in all calls of a plan.
NUMBERS = (
    "block_stride", "token_stride", "head_stride", "table_stride", "q_stride", "k_stride", "v_stride", "out_stride",
    "scale", "soft_cap", "window",
)  # fmt: skip

_MOST_CACHES = 256  # whose addresses a plan knows: a layer each
_PACKED_AFTER = 16  # calls with the same addresses: packing takes 10 us, and saves 0.3 of each to come
Last = tuple[tuple[int, ...], Callable[[], None] | None, int]


class Plan(plan.Plan):
    """Launches of one kind of call.

    Attributes:
        run: all launches, with the addresses of the tensors in `ADDRESSES`; None where there is nothing to launch.
        rare: whether these are all, or only those not in `RARE`.
        last: addresses of the last call with a cache, what launches with them if they are packed, and how many calls in
            a row had them; by the cache's address, as a layer's tensors mostly lie where they lay in the step before.
        least, most: tokens of a request, at most, that it is for, where calls say how many.
        shape: of the output.
    """

    def __init__(self, call: Call, only_append: bool = False) -> None:
        problem = call.problem
        self.least, self.most = call.contexts
        self.rare = call.rare
        self.shape = call.tokens, problem.kv_heads * problem.group, problem.head_dim
        if call.tokens and call.requests:
            made = [(append_only(call), problem)] if only_append else variants(call)
            # What launches behind the first read early none of those before them writes.
            self.steps = tuple(_step(*one, call, dependent=call.early or i > 0) for i, one in enumerate(made))
        self.run = _in_order(tuple(step.run for step in self.steps))
        *_, q, k, v, out = call.strides
        heads, kv_heads = self.shape[1] * self.shape[2], problem.kv_heads * self.shape[2]
        self._q_bytes, self._out_bytes = ((call.tokens - 1) * stride * 2 + heads * 2 for stride in (q, out))
        self._k_bytes, self._v_bytes = ((call.tokens - 1) * stride * 2 + kv_heads * 2 for stride in (k, v))
        self.last: dict[int, Last] = {}

    def may_overlap(self, out: int, q: int, k: int, v: int) -> bool:
        """Whether memory from the first value of out to its last meets that of q, or of new keys and values."""
        end = out + self._out_bytes
        return (
            (q < end and out < q + self._q_bytes)
            or (k < end and out < k + self._k_bytes)
            or (v < end and out < v + self._v_bytes)
        )

    def make_room(self) -> None:
        """There is room for another cache in `last`."""
        if len(self.last) >= _MOST_CACHES:
            self.last.clear()

    def again(self, k_cache: int, last: Last) -> None:
        """All launches, with the addresses of the last call, which many calls in a row have packed."""
        assert self.run is not None
        addresses, _, calls = last
        packed = self.steps[0].packed(*addresses) if calls == _PACKED_AFTER and len(self.steps) == 1 else None
        self.last[k_cache] = addresses, packed, calls + 1
        self.run(*addresses)


def _in_order(runs: tuple[Callable[..., None], ...]) -> Callable[..., None] | None:
    """Launches as one function."""
    if len(runs) < 2:
        return runs[0] if runs else None

    def run(*addresses: int) -> None:
        for each in runs:
            each(*addresses)

    return run


def append_only(call: Call) -> Variant:
    """The kernel that writes new keys and values to the cache.

    Raises:
        KnobError: no variant serves the call.
    """
    return _chosen(call, replace(call.problem, step="append"), call.knobs).variant


def variants(call: Call) -> list[tuple[Variant, AttentionProblem]]:
    """Kernels of a call, in order, each with what it is asked: one launch where `decode` takes all new tokens.

    Else a kernel of many tokens finds new keys in the cache, where its companion writes them first, and of a mixed
    batch the short requests are left to another companion, `decode`.

    Raises:
        KnobError: no kernel serves the problem.
    """
    chosen = _chosen(call, call.problem, call.knobs)
    made = [(one.variant, one.problem) for one in (chosen, *companions(chosen))]
    asked = [(variant, problem) for variant, problem in made if isinstance(problem, AttentionProblem)]
    return sorted(asked, key=lambda one: ORDER.index(one[1].step))


def _chosen(call: Call, problem: AttentionProblem, knobs: tuple[tuple[str, Any], ...] = ()) -> Choice:
    arch, multiprocessors = card.arch(call.device), card.multiprocessors(call.device)
    return choose("attention", problem, arch, multiprocessors=multiprocessors, knobs=dict(knobs) or None)


def _step(variant: Variant, problem: AttentionProblem, call: Call, *, dependent: bool) -> Step:
    fixed: dict[str, Any] = {
        "requests": problem.batch, "kv_heads": problem.kv_heads, "scale_stride": call.scale_stride,
    }  # fmt: skip
    if variant.spec.name not in ("decode", "append"):
        fixed["least_queries"] = short_queries(problem.group) + 1 if problem.batch > 1 else 1
    fixed |= dict(zip(NUMBERS, (*call.strides, call.scale, call.soft_cap, problem.window), strict=True))
    geometry = FAMILY.launch(variant, problem, card.multiprocessors(call.device))
    if variant.arguments.maps:
        geometry = replace(geometry, maps=wgmma.maps(variant.knobs, fixed))
    takes = [name for name in ADDRESSES if call.rare or name not in RARE]
    return Step(variant, call.device, geometry, fixed, takes, dependent=dependent)
