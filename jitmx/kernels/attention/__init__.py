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

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jitmx.arch import Arch
from jitmx.kernels import Companion, Family
from jitmx.kernels.attention import append, decode, prefill, wgmma
from jitmx.kernels.attention.cases import append_cases, decode_cases, prefill_cases
from jitmx.kernels.attention.problem import CACHES, AttentionProblem, require_places, short_queries
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.tuning import Tuning
from jitmx.models import NAMED, Model
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import MAX_SIZE, Variant


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

    for case in prefill_cases(variant.knobs, launch):
        yield _mapped(case, variant.knobs)


def _mapped(case: Case, knobs: wgmma.WgmmaKnobs) -> Case:
    """A case whose launch shows the cache to tensor copies."""
    launch = replace(case.launch, maps=wgmma.maps(knobs, case.values))
    again = case.again
    return replace(case, launch=launch, again=(lambda: _mapped(again(), knobs)) if again else None)


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
    """The cache write that kernels of many new tokens leave to a launch before them, and the requests with few new
    tokens, which they leave to one behind them where there may be some."""
    if variant.spec not in (prefill.PREFILL, wgmma.WGMMA):
        return ()
    found = []
    if problem.append:
        found.append(Companion("attention", replace(problem, step="append"), {}, {}, "append"))
    if problem.batch > 1:
        short = replace(problem, append=False, queries=short_queries(problem.group), step="short")
        found.append(Companion("attention", short, {}, {}, "short"))
    return tuple(found)


def _whole(problem: AttentionProblem) -> AttentionProblem:
    """What `decode` is asked for short requests: attention to a cache that has the new tokens."""
    return replace(problem, step="attend") if problem.step == "short" else problem


def _values(problem: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """What is measured along the axes: of a layer with a window all contexts are alike."""
    contexts = (MAX_SIZE,) if problem.window else (1024, 8192, 65536)
    return {"batch": (1, 16, 64), "context": contexts, "queries": (1, 8, 2048)}


def _described(problem: AttentionProblem) -> str:
    heads = f"{problem.kv_heads * problem.group} heads of {problem.head_dim} on {problem.kv_heads}"
    return f"{heads}, {f'window {problem.window}' if problem.window else 'no window'}, cache {problem.cache}"


def _of_model(model: Model) -> list[dict[str, Any]]:
    """Layers with and without a window, over a cache of q's type and one in E4M3."""
    sizes = {"kv_heads": model.kv_heads, "group": model.heads // model.kv_heads, "head_dim": model.head_dim}
    common = {**sizes, "sinks": "sinks_bf16", "rope": "neox"}
    return [common | {"window": window, "cache": cache} for window in (0, model.window) for cache in CACHES]


def _require_places(fields: Mapping[str, Any]) -> None:
    """Raise KnobError where requests have fewer tokens than new ones, or a mask fewer bits."""
    queries, context = fields.get("queries", (1,)), fields.get("context", (8192,))
    require_places(min(context), max(queries), fields.get("mask", 0))


TUNING = Tuning(
    sizes=("kv_heads", "group", "head_dim"),
    values=_values,
    described=_described,
    models={name: _of_model(model) for name, model in NAMED.items()},
    named=("dtype", "cache", "qk", "append", "step"),
    nameless=("sinks", "soft_cap", "rope", "rotary", "table"),
    refused=("step",),
)

BENCHMARK = Benchmark(
    "jitmx.bench.attention",
    "a layer's attention with sinks, rotary embedding and cache write in CUDA graphs of dependent calls over caches "
    "that rotate past the L2: steps of decoding, verification of drafted tokens in a tree, prompts and a chunk of one, "
    "with and without a window, beside the attention of vLLM (FlashAttention 3, Triton), FlashInfer and torch; the "
    "floor is the bytes of keys and values that are seen at the read rate, or the operations at the matmul rate",
    fields=("batch", "context", "queries", "window", "cache", "mask"),
    check=_require_places,
    peers=("fa3", "triton", "flashinfer", "sdpa"),
)

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
            asked=_whole,
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
            rarer=wgmma.RARER,
        ),
        Kernel(
            prefill.PREFILL,
            cases=_prefill_cases,
            fixed=prefill.fixed,
            launch=prefill.launch,
            heuristic=prefill.heuristic,
            candidates=prefill.candidates,
            rarer=prefill.RARER,
        ),
        Kernel(
            append.APPEND,
            cases=_append_cases,
            fixed=append.fixed,
            launch=append.launch,
            heuristic=append.heuristic,
            rarer=append.RARER,
        ),
    ),
    problem=AttentionProblem,
    typical=_typical,
    axes=("batch", "context", "queries"),
    companions=_companions,
    tuning=TUNING,
    benchmark=BENCHMARK,
    steps={
        "append": "new keys and values are written to the cache by a launch before that of attention",
        "short": "requests of few new tokens in the batch are left to a launch of attention.decode behind it",
    },
)
