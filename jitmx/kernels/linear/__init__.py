"""`linear`: Y = X W^T (+ bias), with W in MXFP4 packed once for every batch size.

Kernels, a module and a template each:
    gemv    at most 8 rows of X; CUDA cores or m16n8k16 tensor cores
    stream  at most 32 rows: one fat block a multiprocessor streams its share of W
    tile    any number of rows, on every target
    splitk  a few dozen rows to some hundred, on sm_90a: clusters of blocks share k
    slice   at most 32 rows, of weights that fit shared memory: a warp keeps its slice of X in registers
    wgmma   many rows, on sm_90a
    wgmma_fp8  X in E4M3 with a scale a row, on sm_90a
    scaled  X quantized to an MX format on the way in; block-scaled MMA on sm_12x

Shapes: X [rows, k], W [n, k], bias [n], Y [rows, n]; k is a multiple of 32, n is any. docs/packed-layout.md draws the
layout of W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Companion, Family, Instead, fp8_rows
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel, spread
from jitmx.kernels.linear import gemv, scaled, slice, splitk, steps, stream, tile, wgmma, wgmma_fp8
from jitmx.kernels.linear.layout import packed_tiles, preferred_encoding
from jitmx.kernels.linear.limits import has_clusters
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.norm.problem import NormProblem
from jitmx.kernels.tuning import Tuning
from jitmx.models import GPT_OSS_120B, NAMED
from jitmx.registry.spec import Variant

__all__ = ["FAMILY", "GPT_OSS", "KERNELS", "LinearProblem", "candidates"]

KERNELS: dict[str, Kernel] = {
    module.KERNEL.spec.name: module.KERNEL for module in (gemv, stream, slice, splitk, tile, wgmma, wgmma_fp8, scaled)
}

# [n, k] of gpt-oss-120b, without and with a bias: QKV, O, lm_head.
GPT_OSS = tuple((n, k, (False, True) if kind != "lm_head" else (False,)) for kind, (n, k) in GPT_OSS_120B.dense.items())
TYPICAL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
EIGHT_BIT_ROWS = (1, 16, 64, 512)
QUANTIZED_ROWS = (16, 512)
FP8_ROWS = (512, 8192)
_WIDE, _MOST_LOGITS = 100_000, 512  # an output layer sees one row a sequence, not one a token

# Up to this many rows, bytes in flight count for more than products.
FEW_ROWS = 32


def usual_rows(n: int, counts: Iterable[int]) -> tuple[int, ...]:
    """Those of the row counts that a product with n output features meets."""
    return tuple(m for m in counts if n < _WIDE or m <= _MOST_LOGITS)


def _typical(arch: Arch) -> tuple[LinearProblem, ...]:
    encoding = preferred_encoding(arch)
    dense = tuple(
        LinearProblem(m, n, k, "bf16", bias, encoding)
        for n, k, biases in GPT_OSS
        for bias in biases
        for m in TYPICAL_ROWS
        if m in usual_rows(n, TYPICAL_ROWS)
    )
    # What is asked for by name: eight-bit weights for O, quantized activations.
    eight = tuple(LinearProblem(m, *GPT_OSS_120B.o, "bf16", True, encoding, weight="mxfp8") for m in EIGHT_BIT_ROWS)
    quantized = tuple(
        LinearProblem(m, *GPT_OSS_120B.qkv, "bf16", True, encoding, activation=activation)
        for activation in ("mxfp8", "mxfp6", "mxfp4")
        for m in QUANTIZED_ROWS
    )
    sizes = (GPT_OSS_120B.qkv, GPT_OSS_120B.o) if "wgmma" in arch.features else ()
    in_e4m3 = tuple(
        LinearProblem(m, *size, "bf16", True, encoding, activation="fp8") for size in sizes for m in FP8_ROWS
    )
    return dense + eight + quantized + in_e4m3


def _buckets(problem: LinearProblem) -> dict[str, tuple[int, ...]]:
    few: tuple[int, ...] = TYPICAL_ROWS if problem.weight == "mxfp4" else EIGHT_BIT_ROWS
    few = few if problem.activation == "none" else QUANTIZED_ROWS
    return {"m": (*few, *(count for count in TYPICAL_ROWS if count > few[-1]))}


def _heuristic(problem: LinearProblem, arch: Arch, multiprocessors: int) -> tuple[str, dict[str, Any]]:
    """The first kernel in order of preference for this many rows that serves the problem on the target."""
    able, reasons = FAMILY.serving(problem, arch), []
    names = _preference(problem, arch)
    if len(names) > 1 and names[0] == "stream" and _idles(problem, arch, multiprocessors):
        names = (*(("gemv", "tile") if problem.m <= gemv.MAX_ROWS else ("tile", "gemv")), "stream")
    for name in names:
        if name not in able:
            continue
        try:
            return name, KERNELS[name].heuristic(problem, arch, multiprocessors)
        except KnobError as error:  # it would not fit this shape
            reasons.append(str(error))
    raise KnobError("; ".join(dict.fromkeys(reasons)) or f"no kernel of linear serves {problem.as_dict()} on {arch}")


def _idles(problem: LinearProblem, arch: Arch, multiprocessors: int) -> bool:
    """Whether `stream` has no room for X, or leaves half of the multiprocessors idle: its warps take whole rows."""
    kernel = KERNELS["stream"]
    try:
        tuned = kernel.heuristic(problem, arch, multiprocessors)
    except KnobError:
        return True
    shares = tuned.get("share", True)
    return not shares and 2 * packed_tiles(problem.n, problem.k)[0] < multiprocessors * tuned["warps"]


def _preference(problem: LinearProblem, arch: Arch) -> tuple[str, ...]:
    if problem.activation != "none":
        return ("wgmma_fp8", "scaled")
    if problem.norm or problem.argmax or (problem.swiglu and problem.m > gemv.MAX_ROWS):
        return ("stream",)
    few = ("stream", "gemv") if has_clusters(arch) else ("gemv",)
    if problem.m <= (FEW_ROWS if len(few) > 1 else gemv.MAX_ROWS):
        return (*few, "tile")
    if problem.m <= 4 * FEW_ROWS and problem.n <= 64 * arch.multiprocessors:
        return ("splitk", "tile", "gemv")
    return ("wgmma", "tile", "gemv") if problem.m >= 2 * FEW_ROWS else ("tile", "gemv")


# Candidates of a row, at most, of each kernel: most of those that win at so many rows of X. On sm_90a, stream was
# faster than gemv wherever both were timed; wgmma takes 48 rows of X at least.
_MOST: tuple[tuple[int, dict[str, int]], ...] = (
    (gemv.MAX_ROWS, {"stream": 48, "slice": 24, "gemv": 6, "tile": 16, "wgmma": 2, "splitk": 1}),
    (FEW_ROWS, {"stream": 36, "slice": 24, "tile": 36, "wgmma": 4, "splitk": 4}),
    (4 * FEW_ROWS, {"splitk": 40, "tile": 36, "wgmma": 20}),
)
_MOST_OTHERWISE = 60
_MOST_OF_MANY = {"wgmma": 40, "tile": 50, "splitk": 10}


def candidates(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[tuple[str, dict[str, Any]]]:
    """Kernels with knobs that tuning tries, likely winners first: about a hundred that take all rows at once.

    The heuristic's knobs of each kernel open the list; where a kernel finds that nothing of it fits, it has none.
    """
    able = FAMILY.serving(problem, arch)
    first: list[tuple[str, dict[str, Any]]] = []
    parts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name in sorted(able, key=_order(problem, arch)):
        try:
            first.append((name, KERNELS[name].heuristic(problem, arch, multiprocessors)))
            parts[name] = [(name, knobs) for knobs in KERNELS[name].candidates(problem, arch, multiprocessors)]
        except KnobError:
            continue
    most = next((limits for rows, limits in _MOST if problem.m <= rows), _MOST_OF_MANY)
    if problem.m <= gemv.MAX_ROWS and not (has_clusters(arch) and parts.get("stream")):
        most = {**most, "gemv": 48, "stream": 36}
    return first + spread(*(part[: most.get(name, _MOST_OTHERWISE)] for name, part in parts.items()))


def _order(problem: LinearProblem, arch: Arch) -> Callable[[str], int]:
    """The place of a kernel in order of preference; those that the heuristic never takes come last."""
    preferred = _preference(problem, arch)
    return lambda name: preferred.index(name) if name in preferred else len(preferred)


def _require_sizes(fields: Mapping[str, Any]) -> None:
    """Raise KnobError where one of n and k is given, or k is no whole number of blocks."""
    sizes = {name: fields[name] for name in ("n", "k") if name in fields}
    if len(sizes) == 1:
        raise KnobError(f"{next(iter(sizes))} is given alone; n and k go together")
    LinearProblem(**sizes)


def _companions(problem: LinearProblem, variant: Variant) -> tuple[Companion, ...]:
    """Before a product in E4M3 the launch that makes its rows, with the RMSNorm where there is one."""
    if variant.spec.name != "wgmma_fp8":
        return ()
    return (Companion("norm", NormProblem(problem.k, problem.dtype, "e4m3", problem.norm), {}, {}),)


def _instead(problem: LinearProblem, variant: Variant) -> dict[str, Instead]:
    """Of activation=fp8, what is taken where not `wgmma_fp8` makes the product, and the rule of scales either way."""
    if problem.activation != "fp8":
        return {}
    taken = {"scale_rule": fp8_rows.RULE}
    if variant.spec.name == "wgmma_fp8":
        return taken
    why = f"linear.{variant.spec.name} was asked for"
    if not wgmma_fp8.KERNEL.runs_on(variant.arch):
        why = f"no kernel of {variant.arch} takes fp8"
    else:
        try:
            wgmma_fp8.KERNEL.fixed(replace(problem, swiglu=False))
        except KnobError as error:
            why = error.message
    return {"activation": Instead("mxfp8", why)} | taken


TUNING = Tuning(
    sizes=("n", "k"),
    values=lambda problem: {"m": usual_rows(problem.n, TYPICAL_ROWS)},
    described=lambda problem: f"[{problem.n}, {problem.k}]",
    models={name: [{"n": n, "k": k} for n, k in model.dense.values()] for name, model in NAMED.items()},
    named=("dtype", "scale_range", "weight", "activation"),
    nameless=("encoding",),
    implied={"weight": "mxfp4", "activation": "none"},
    untimed=("residual=pair",),
)

BENCHMARK = Benchmark(
    "jitmx.bench.linear",
    "medians in CUDA graphs of dependent calls over weights that rotate past the L2, beside cuBLAS in bf16 and the "
    "other libraries' MXFP4 products that are installed; gpt-oss-120b's products where n= and k= are not given",
    fields=("m", "n", "k", "activation", "encoding", "norm"),
    check=_require_sizes,
    peers=("humming", "marlin", "triton_kernels"),
    drawn=True,
)

FAMILY = Family(
    name="linear",
    summary="Y = X W^T + bias with W in MXFP4",
    kernels=tuple(KERNELS.values()),
    problem=LinearProblem,
    typical=_typical,
    heuristic=_heuristic,
    axes=("m",),
    buckets=_buckets,
    candidates=candidates,
    companions=_companions,
    decompositions=steps.decompositions,
    instead=_instead,
    steps=steps.STEPS,
    tuning=TUNING,
    benchmark=BENCHMARK,
)
