"""`linear`: Y = X W^T (+ bias), with W in MXFP4 packed once for every batch size.

Kernels, a module and a template each:
    gemv    at most 8 rows of X; CUDA cores or m16n8k16 tensor cores
    stream  at most 32 rows: one fat block a multiprocessor streams its share of W
    tile    any number of rows, on every target
    splitk  a few dozen rows to some hundred, on sm_90a: clusters of blocks share k
    slice   at most 32 rows, of weights that fit shared memory: a warp keeps its slice of X in registers
    wgmma   many rows, on sm_90a
    scaled  X quantized to an MX format on the way in; block-scaled MMA on sm_12x

Shapes: X [rows, k], W [n, k], bias [n], Y [rows, n]; k is a multiple of 32, n is any. docs/packed-layout.md draws the
layout of W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family, Problem, rounded_up, taking
from jitmx.kernels.linear import gemv, scaled, slice, splitk, steps, stream, tile, wgmma
from jitmx.kernels.linear.kernel import LinearKernel, has_clusters, spread
from jitmx.kernels.linear.layout import preferred_encoding
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.models import GPT_OSS_120B
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

__all__ = ["FAMILY", "GPT_OSS", "KERNELS", "LinearKernel", "LinearProblem", "candidates", "launch_of"]

KERNELS: dict[str, LinearKernel] = {
    module.KERNEL.spec.name: module.KERNEL for module in (gemv, stream, slice, splitk, tile, wgmma, scaled)
}

# [n, k] of gpt-oss-120b, without and with a bias: QKV, O, lm_head.
GPT_OSS = tuple((n, k, (False, True) if kind != "lm_head" else (False,)) for kind, (n, k) in GPT_OSS_120B.dense.items())
TYPICAL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
EIGHT_BIT_ROWS = (1, 16, 64, 512)
QUANTIZED_ROWS = (16, 512)
MOST_LOGITS = 512  # rows of lm_head: prompts need only their last

# Up to this many rows, bytes in flight count for more than products.
FEW_ROWS = 32


def launch_of(variant: Variant, m: int, n: int, k: int, multiprocessors: int) -> Launch:
    """Geometry of a launch of `variant` for m rows."""
    return KERNELS[variant.spec.name].launch(variant.knobs, m, n, k, multiprocessors)


def _typical(arch: Arch) -> tuple[LinearProblem, ...]:
    encoding = preferred_encoding(arch)
    dense = tuple(
        LinearProblem(m, n, k, "bf16", bias, encoding)
        for n, k, biases in GPT_OSS
        for bias in biases
        for m in TYPICAL_ROWS
        if n < 100_000 or m <= MOST_LOGITS
    )
    # What is asked for by name: eight-bit weights for O, quantized activations.
    eight = tuple(LinearProblem(m, *GPT_OSS_120B.o, "bf16", True, encoding, weight="mxfp8") for m in EIGHT_BIT_ROWS)
    quantized = tuple(
        LinearProblem(m, *GPT_OSS_120B.qkv, "bf16", True, encoding, activation=activation)
        for activation in ("mxfp8", "mxfp6", "mxfp4")
        for m in QUANTIZED_ROWS
    )
    return dense + eight + quantized


def _bucket(problem: LinearProblem) -> Problem:
    few: tuple[int, ...] = TYPICAL_ROWS if problem.weight == "mxfp4" else EIGHT_BIT_ROWS
    few = few if problem.activation == "none" else QUANTIZED_ROWS
    return rounded_up(problem, (*few, *(count for count in TYPICAL_ROWS if count > few[-1])))


def _heuristic(problem: LinearProblem, arch: Arch, multiprocessors: int) -> tuple[str, dict[str, Any]]:
    """The first kernel by falling preference for this many rows that serves the problem on the target."""
    able, reasons = serving(problem, arch), []
    for name in _preference(problem, arch):
        if name not in able:
            continue
        try:
            return name, KERNELS[name].heuristic(problem, arch, multiprocessors)
        except KnobError as error:  # it would not fit this shape
            reasons.append(str(error))
    raise KnobError("; ".join(reasons) or f"no kernel of linear serves {problem.as_dict()} on {arch}")


def _preference(problem: LinearProblem, arch: Arch) -> tuple[str, ...]:
    if problem.activation != "none":
        return ("scaled",)
    if problem.norm or problem.argmax:
        return ("stream",)
    few = ("stream", "gemv") if has_clusters(arch) else ("gemv",)
    if problem.m <= (FEW_ROWS if len(few) > 1 else gemv.MAX_ROWS):
        return (*few, "tile")
    if problem.m <= 4 * FEW_ROWS and problem.n <= 64 * arch.multiprocessors:
        return ("splitk", "tile", "gemv")
    return ("wgmma", "tile", "gemv") if problem.m >= 2 * FEW_ROWS else ("tile", "gemv")


def _fixed(problem: LinearProblem, kernel: str) -> dict[str, Any]:
    return KERNELS[kernel].fixed(problem)


def serving(problem: LinearProblem, arch: Arch) -> tuple[str, ...]:
    """Kernels that can serve the problem on a target."""
    return taking(_fixed, problem, (name for name, kernel in KERNELS.items() if kernel.runs_on(arch)))


def _cases(variant: Variant) -> Iterable[Case]:
    return KERNELS[variant.spec.name].cases(variant)


def _check(problem: LinearProblem, variant: Variant) -> None:
    KERNELS[variant.spec.name].check(problem, variant)


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
    able = serving(problem, arch)
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
    """The place of a kernel by falling preference; those that the heuristic never takes come last."""
    preferred = _preference(problem, arch)
    return lambda name: preferred.index(name) if name in preferred else len(preferred)


FAMILY = Family(
    name="linear",
    summary="Y = X W^T + bias with W in MXFP4",
    specs=tuple(kernel.spec for kernel in KERNELS.values()),
    problem=LinearProblem,
    typical=_typical,
    serving=serving,
    fixed=_fixed,
    heuristic=_heuristic,
    tuned=lambda problem, arch, multiprocessors, kernel: KERNELS[kernel].heuristic(problem, arch, multiprocessors),
    bucket=_bucket,
    cases=_cases,
    check=_check,
    max_rows=lambda kernel: KERNELS[kernel].max_rows,
    tile=lambda kernel: KERNELS[kernel].tile,
    ways=steps.ways,
    steps=steps.STEPS,
)
