"""`attention`: attention of new tokens to a paged cache and to themselves, rotary embedding and cache write included.

Kernels:
    decode    few new tokens a request, one launch
    prefill   many new tokens a request, which the cache has already
    wgmma     the same by products of warpgroups
    append    rotary embedding of new keys and the cache write that come before prefill

Logits are q k times the scale, then capped, then masked; a sink joins the sum of the softmax and gives nothing. Sums
are in fp32 (`qk_fp16`: of q k in fp16). New keys are attended to as the cache keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jitmx.arch import Arch
from jitmx.kernels import Companion, Family
from jitmx.kernels.attention import append, decode, prefill, wgmma
from jitmx.kernels.attention.cases import append_cases, decode_cases, prefill_cases
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.kernel import Kernel
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant


def _decode_cases(variant: Variant) -> Iterable[Case]:
    def launch(problem: AttentionProblem, multiprocessors: int) -> Launch:
        return decode.launch(variant.knobs, problem, multiprocessors)

    return decode_cases(variant.knobs, launch, decode.most_queries(variant.knobs))


def _prefill_cases(variant: Variant) -> Iterable[Case]:
    def launch(problem: AttentionProblem) -> Launch:
        return prefill.launch(variant.knobs, replace(problem, group=variant.knobs.group), 7)

    return prefill_cases(variant.knobs, launch)


def _wgmma_cases(variant: Variant) -> Iterable[Case]:
    def launch(problem: AttentionProblem) -> Launch:
        return wgmma.launch(variant.knobs, replace(problem, group=variant.knobs.group), 7)

    return prefill_cases(variant.knobs, launch)


def _append_cases(variant: Variant) -> Iterable[Case]:
    return append_cases(variant.knobs, lambda problem: append.launch(variant.knobs, problem, 1))


def _typical(arch: Arch) -> tuple[AttentionProblem, ...]:
    """gpt-oss: a layer with a window and one without, at few and at many requests, and a long prompt."""
    common = {"sinks": "sinks_bf16", "rope": "neox"}
    return tuple(
        AttentionProblem.on(arch, batch=batch, queries=queries, window=window, **common)
        for batch, queries in ((1, 1), (16, 1), (64, 1), (1, 2048))
        for window in (0, 128)
    )


def _companions(problem: AttentionProblem, variant: Variant) -> tuple[Companion, ...]:
    """The cache write that prefill leaves to a launch before it."""
    if variant.spec not in (prefill.PREFILL, wgmma.WGMMA) or not problem.append:
        return ()
    return (Companion("attention", replace(problem, step="append"), {}, {}, "append"),)


FAMILY = Family(
    name="attention",
    summary="attention to a paged cache, with rotary embedding and cache write",
    kernels=(
        Kernel(
            decode.DECODE,
            cases=_decode_cases,
            fixed=decode.fixed,
            launch=decode.launch,
            heuristic=decode.heuristic,
            candidates=decode.candidates,
            rarer=decode.RARER,
        ),
        Kernel(
            wgmma.WGMMA,
            cases=_wgmma_cases,
            fixed=wgmma.fixed,
            launch=wgmma.launch,
            heuristic=wgmma.heuristic,
            candidates=wgmma.candidates,
            runs_on=wgmma.runs_on,
        ),
        Kernel(
            prefill.PREFILL,
            cases=_prefill_cases,
            fixed=prefill.fixed,
            launch=prefill.launch,
            heuristic=prefill.heuristic,
            candidates=prefill.candidates,
        ),
        Kernel(
            append.APPEND,
            cases=_append_cases,
            fixed=append.fixed,
            launch=append.launch,
            heuristic=append.heuristic,
        ),
    ),
    problem=AttentionProblem,
    typical=_typical,
    axes=("batch", "context", "queries"),
    companions=_companions,
    steps={"append": "new keys and values are written to the cache by a launch before that of attention"},
)
