"""`moe`: a mixture of experts, y[t] = sum over slots of w[t, slot] (W2[e] act(W13[e] x[t] + b13[e]) + b2[e]).

Kernels, a module and a template each:
    token     one row, sm_90 and newer: both products in one persistent launch without a barrier; from logits too
    stream    at most 512 pairs of row and expert, sm_90 and newer: both products in one launch, a stream a warp
    decode    the same of at most 64 rows, on any target: a stream a block
    grouped   any number of rows, by expert: one of the two products
    scaled    the same, with x and h quantized to an MX format; block-scaled MMA on sm_12x
    gather    on sm_90a, for wgmma and fused: the rows of x by expert, in the order in which it multiplies by them
    wgmma     on sm_90a, many rows an expert: one of the two products
    fused     the same, both products in one launch
    gather_fp8, fused_fp8  on sm_90a, with x and h in E4M3 and a scale a row: the same two, however many rows there are
    wgmma_fp8  their first product where SiLU gives h no bound: h is then in bf16, and the second product that of wgmma
    combine   the sum over the experts of each row, after any of these products

Shapes: x [rows, hidden], ids and weights [rows, top], W13 [experts, 2 intermediate, hidden] with gate and up rows in
turn (without gates [experts, intermediate, hidden]), W2 [experts, hidden, intermediate]; both in MXFP4, packed expert
by expert as `linear` packs one weight. hidden and intermediate are multiples of 32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Decomposition, Family, Instead, fp8_rows
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.layout import preferred_encoding
from jitmx.kernels.moe import (
    choice,
    combine,
    decode,
    fused,
    fused_fp8,
    gather,
    gather_fp8,
    grouped,
    layer,
    scaled,
    stream,
    tiles,
    token,
    wgmma,
    wgmma_fp8,
)
from jitmx.kernels.moe.problem import MX_FORMATS, MoeProblem
from jitmx.kernels.routing.knobs import MAX_EXPERTS
from jitmx.kernels.tuning import Follow, Tuning
from jitmx.models import EXPERT_LAYERS, NAMED, ExpertLayer
from jitmx.registry.spec import Variant

__all__ = ["FAMILY", "KERNELS", "MoeProblem"]

MODULES = token, stream, decode, grouped, scaled, gather, wgmma, fused, gather_fp8, wgmma_fp8, fused_fp8, combine
KERNELS: dict[str, Kernel] = {module.KERNEL.spec.name: module.KERNEL for module in MODULES}
TYPICAL_ROWS = (1, 2, 4, 8, 16, 32, 64)
MANY_ROWS = (128, 256, 8192)
QUANTIZED_ROWS = (16, 512)
FP8_ROWS = (512, 8192)
USUAL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 65536)
TUNED_ROWS = USUAL_ROWS[:-1]
# Reads of a weight by one launch, on average, up to which that is quicker than to go by expert. On an H200 moe.stream
# takes 1.1 to 1.4 times its reads at the memory's rate, and moe.grouped 1.5 to 1.6 times one.
MOST_READS = 1.35
ROOM_FOR_STREAM = 200 << 10  # bytes of shared memory a block


def _typical(arch: Arch) -> tuple[MoeProblem, ...]:
    """Layers of gpt-oss-120b; those of 20b run the same variants, but where experts are chosen within."""
    encoding = preferred_encoding(arch)
    plain = tuple(MoeProblem(m, encoding=encoding) for m in (*TYPICAL_ROWS, *MANY_ROWS))
    chosen = tuple(MoeProblem(1, model.experts, encoding=encoding, routing="bf16") for model in NAMED.values())
    quantized = (MoeProblem(m, encoding=encoding, x_format=x_format) for x_format in MX_FORMATS for m in QUANTIZED_ROWS)
    in_e4m3: dict[str, Any] = {"encoding": preferred_encoding(arch, "fp8"), "x_format": "fp8"}
    rows = (*(MoeProblem(m, **in_e4m3) for m in FP8_ROWS), MoeProblem(FP8_ROWS[0], activation="silu", **in_e4m3))
    return (*plain, *chosen, *quantized, *(rows if "wgmma" in arch.features else ()))


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> tuple[str, dict[str, Any]]:
    name = by_expert(problem)
    if problem.product == "combine" or (problem.product == "gather" and problem.x_format == "bf16"):
        name = problem.product
    elif problem.product == "gather":
        name = "gather_fp8"
    elif problem.product == "both":
        name = name if problem.x_format == "fp8" else "fused"
    else:
        whole = in_one_launch(problem, arch, multiprocessors)
        name = whole or name
        if wgmma.serves_best(problem, arch, whole is not None) and "wgmma" in FAMILY.serving(problem, arch):
            name = "fused" if problem.product == "layer" else "wgmma"
    return name, FAMILY.tuned(problem, arch, multiprocessors, name)


def by_expert(problem: MoeProblem) -> str:
    """The kernel that makes a problem's products on every target that has some for its format."""
    if problem.x_format == "fp8":
        if problem.product in ("layer", "both") and problem.h_format == "fp8":
            return "fused_fp8"
        return "wgmma" if problem.product == "down" and problem.h_format == "bf16" else "wgmma_fp8"
    return "grouped" if problem.x_format == "bf16" else "scaled"


def _tiled(problem: MoeProblem) -> tuple[str, ...]:
    """Kernels that a tile may choose: that of every target, and that of tiles of many rows."""
    if not problem.overridable:
        return ()
    many = {"layer": "fused", "both": "fused"}.get(problem.product, "wgmma")
    first = by_expert(problem)
    return (first, many) if first == "grouped" else (first,)


def of_one_launch(arch: Arch) -> tuple[str, ...]:
    """Names of the kernels that make layers in one launch on a target, the quickest first.

    Little shared memory is better spent on one ring a block (decode) than on one a warp (token, stream).
    """
    names = ("token", "stream", "decode") if arch.shared_bytes >= ROOM_FOR_STREAM else ("decode",)
    return tuple(name for name in names if KERNELS[name].runs_on(arch))


def in_one_launch(problem: MoeProblem, arch: Arch, multiprocessors: int) -> str | None:
    """The kernel that makes the layer in one launch: few rows an expert, nothing unusual, and it fits shared memory."""
    able = FAMILY.serving(problem, arch)
    for name in of_one_launch(arch):
        if name in able:
            kernel = KERNELS[name]
            knobs = kernel.heuristic(problem, arch, multiprocessors) | kernel.fixed(problem)
            if fits(problem, kernel.spec.variant(arch, **knobs), min(multiprocessors, arch.multiprocessors)):
                return name if _reads_few(problem, knobs) else None
    return None


def _reads_few(problem: MoeProblem, knobs: Mapping[str, Any]) -> bool:
    """Whether one launch reads weights about once; by expert they are, however many rows an expert has."""
    if problem.experts > MAX_EXPERTS or "columns" not in knobs:  # of one row, or of more experts than lists have
        return True
    return layer.reads(problem, knobs["columns"]) <= MOST_READS


def fits(problem: MoeProblem, variant: Variant, multiprocessors: int) -> bool:
    """Whether a launch finds the shared memory that it needs: of fewer multiprocessors, each keeps more sums of y."""
    return FAMILY.launch(variant, problem, multiprocessors).shared_bytes <= variant.arch.shared_bytes


def _decompositions(problem: MoeProblem) -> tuple[Decomposition, ...]:
    """One: what it leaves to other launches, `companions` names."""
    begun = ("residual" if problem.residual else "zero",) if problem.adds and problem.product == "layer" else ()
    return (Decomposition(choice.launched(problem), begun),)


def _instead(problem: MoeProblem, variant: Variant) -> dict[str, Instead]:
    """Of fp8, what a target has in place of it, and the rule by which it takes a scale either way."""
    if problem.x_format != "fp8":
        return {}
    refusal = problem.refusal(variant.arch)
    return ({"x_format": Instead("mxfp8", refusal)} if refusal else {}) | {"scale_rule": fp8_rows.RULE}


def _described(problem: MoeProblem) -> str:
    product = "" if problem.product == "layer" else f" {problem.product}"
    return f"{problem.experts} x [{problem.hidden}, {problem.intermediate}] top {problem.top}{product}"


def _in_products(problem: MoeProblem, kernel: str) -> bool:
    """Whether it is a whole layer, whose products a kernel makes in a launch each."""
    return problem.product == "layer" and tiles.makes_products(KERNELS[kernel].spec)


def _second_product(problem: MoeProblem, kernel: str, knobs: Mapping[str, Any]) -> tuple[Follow, ...]:
    """The lists are of one tile: what the second product may be, the first has decided."""
    if not _in_products(problem, kernel):
        return ()
    return (Follow(replace(problem, product="down"), {"tile_m": knobs["tile_m"]}),)


def _require_experts(problem: MoeProblem) -> None:
    """Raise KnobError where rows take more experts than there are: the timed ones are all local."""
    if problem.top > problem.experts:
        raise KnobError(f"top={problem.top} is over experts={problem.experts}", f"give top={problem.experts} or less")


def _of_model(one: ExpertLayer) -> dict[str, Any]:
    """Fields of the problems of a model's layer, but those that have their defaults."""
    usual = MoeProblem().as_dict()
    return {name: value for name, value in dataclasses.asdict(one).items() if value != usual[name]}


TUNING = Tuning(
    sizes=("experts", "top", "hidden", "intermediate"),
    values=lambda problem: {"m": TUNED_ROWS},
    described=_described,
    models={name: (_of_model(one),) for name, one in EXPERT_LAYERS.items()},
    named=("activation", "scale_range", "product"),
    nameless=("encoding",),
    untimed=("residual", "routing", "scoring"),
    refused=("product",),
    follows=_second_product,
    # The row of a layer in two products is that of the first too.
    serves=lambda problem, kernel: (replace(problem, product="up"),) if _in_products(problem, kernel) else (),
    beside=("routing",),
    check=_require_experts,
)

BENCHMARK = Benchmark(
    "jitmx.bench.moe",
    "a layer of experts in CUDA graphs of dependent calls, each with a routing of its own that spreads as a trained "
    "router's and whose experts no cache holds, beside vLLM's experts that can be imported; the floor is the bytes of "
    "the experts hit at the read rate, or the operations at the matmul rate",
    fields=("m", "experts", "top", "hidden", "intermediate", "activation", "bias", "x_format"),
    models=tuple(EXPERT_LAYERS),
    peers=("humming", "triton", "marlin"),
    drawn=True,
)

FAMILY = Family(
    name="moe",
    summary="mixture of experts with weights in MXFP4",
    kernels=tuple(KERNELS.values()),
    problem=MoeProblem,
    typical=_typical,
    heuristic=_heuristic,
    axes=("m",),
    buckets=lambda problem: {"m": USUAL_ROWS},
    fits=fits,
    tiled=_tiled,
    companions=lambda problem, variant: tiles.companions(problem, variant, KERNELS[variant.spec.name].tile),
    decompositions=_decompositions,
    instead=_instead,
    steps={
        "routing": "experts are chosen from the router's logits by a launch before the layer's",
        "residual": "copied into y before parts are added to it",
        "zero": "y is zeroed before parts are added to it",
    },
    tuning=TUNING,
    benchmark=BENCHMARK,
)
