"""Launches of `attention`, planned once for each kind of call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jitmx.dispatch.choose import choose
from jitmx.kernels.attention import FAMILY
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.ops.attention.checks import Call
from jitmx.registry.spec import Variant
from jitmx.runtime import card, plan
from jitmx.runtime.plan import Step

# What calls give, in the order of the struct.
ADDRESSES = (
    "q", "k", "v", "k_cache", "v_cache", "block_table", "seq_lens", "query_start", "slots", "positions", "sinks",
    "rope", "mask", "k_scale", "v_scale", "out",
)  # fmt: skip
NUMBERS = (
    "block_stride", "token_stride", "head_stride", "table_stride", "q_stride", "k_stride", "v_stride", "out_stride",
    "scale", "soft_cap", "window",
)  # fmt: skip
TAKES = (*ADDRESSES, *NUMBERS)


class Plan(plan.Plan):
    """Launches of one kind of call.

    Attributes:
        numbers: what `NUMBERS` are in it.
        capacity: tokens that a row of the block table has room for.
        shape: of the output.
    """

    def __init__(self, call: Call, only_append: bool = False) -> None:
        problem = call.problem
        self.numbers = (*call.strides, call.scale, call.soft_cap, problem.window)
        self.capacity = call.capacity
        self.shape = call.tokens, problem.kv_heads * problem.group, problem.head_dim
        if call.tokens:
            made = [append_only(call)] if only_append else variants(call)
            self.steps = tuple(_step(variant, asked, call) for variant, asked in made)


def append_only(call: Call) -> tuple[Variant, AttentionProblem]:
    """The kernel that writes new keys and values to the cache, and what it is asked.

    Raises:
        KnobError: there is none.
    """
    FAMILY.kernel("append")  # says which kernels there are
    asked: dict[str, Any] = {"step": "append"}
    arch, multiprocessors = card.arch(call.device), card.multiprocessors(call.device)
    problem = replace(call.problem, **asked)
    own = dict(call.knobs) or None
    return choose("attention", problem, arch, multiprocessors=multiprocessors, knobs=own).variant, problem


def variants(call: Call) -> Iterator[tuple[Variant, AttentionProblem]]:
    """Kernels of a call, in order, each with what it is asked: one launch where `decode` takes all new tokens.

    Else new keys are written to the cache first, and what attends to them finds them there.

    Raises:
        KnobError: no kernel serves the problem.
    """
    problem, own = call.problem, dict(call.knobs) or None
    arch, multiprocessors = card.arch(call.device), card.multiprocessors(call.device)
    if "decode" in FAMILY.serving(problem, arch) or not any(kernel.spec.name == "prefill" for kernel in FAMILY.kernels):
        chosen = choose("attention", problem, arch, multiprocessors=multiprocessors, knobs=own)
        yield chosen.variant, problem
        return
    if problem.append:
        yield append_only(replace(call, knobs=()))
    present = replace(problem, append=False)
    chosen = choose("attention", present, arch, multiprocessors=multiprocessors, knobs=own)
    yield chosen.variant, present
    short = replace(present, queries=short_requests(problem))
    yield choose("attention", short, arch, multiprocessors=multiprocessors).variant, short


def short_requests(problem: AttentionProblem) -> int:
    """New tokens up to which a request of a mixed batch is left to `decode`: those of its narrowest tile."""
    return max(1, 16 // problem.group)


def _step(variant: Variant, problem: AttentionProblem, call: Call) -> Step:
    fixed: dict[str, Any] = {
        "requests": problem.batch, "kv_heads": problem.kv_heads, "scale_stride": call.scale_stride,
        "parts": getattr(variant.knobs, "parts", 1),
    }  # fmt: skip
    if variant.spec.name == "prefill":
        fixed["least_queries"] = short_requests(problem) + 1
    known = variant.arguments.fields
    geometry = FAMILY.launch(variant, problem, card.multiprocessors(call.device))
    own = {name: value for name, value in fixed.items() if name in known}
    return Step(variant, call.device, geometry, own, TAKES)
