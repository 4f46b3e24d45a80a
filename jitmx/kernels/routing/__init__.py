"""`routing`: the k experts of each token, their weights, and lists of tokens by expert for grouped products.

Kernels:
    route   logits from hidden states and router weights (RMSNorm and bias on the way), choice, and lists if asked for
    many    the same for many tokens in bf16, without norm and lists
    topk    choice from logits that are given, and lists if asked for
    sort    lists from ids that are given

Shapes: x [m, h], W [experts, h], logits [m, experts], ids and weights [m, k]. Equal logits go by ids; a NaN is chosen
only where numbers run out, and counts as -inf in the softmax. With E the number of local experts the lists are
    pairs     [m * k]        token * k + slot, by local expert, in the order of the tokens; -1 past the last
    offsets   [E + 1]        where each expert's pairs start
    schedule  [capacity, 4]  tiles of at most `tile` rows: local expert, first row, rows, number within the expert; an
                             expert of -1 past the last
    tiles     [1]            how many tiles there are

Sums are in fp32. x in fp16 is taken as the sum of two bf16 numbers, which is exact. With the norm, x * norm is rounded
to bf16 once (in fp16: to two such numbers, 16 bits), and the product is scaled by rsqrt(mean(x^2) + epsilon).
`normalized`, where it is asked for, is x * rsqrt(mean(x^2) + epsilon) * norm, rounded once.

Floor of `route` for few tokens: bytes of W over the bandwidth, and the dependent trips of x and of the partial logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jitmx.arch import Arch
from jitmx.kernels import Decomposition, Family
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.routing import knobs as shared
from jitmx.kernels.routing import many, route, sort, topk
from jitmx.kernels.routing.problem import FEW_TOKENS, RoutingProblem, parts
from jitmx.models import NAMED
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

_MODULES: tuple[Any, ...] = (route, many, topk, sort)
_LAUNCHES = {module.SPEC.name: module.launch for module in _MODULES}


def launch(variant: Variant, m: int, local: int) -> Launch:
    """Geometry of a launch of `variant` for m tokens and so many local experts."""
    geometry: Launch = _LAUNCHES[variant.spec.name](variant.knobs, m, local)
    return geometry


def _heuristic(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> tuple[str, dict[str, Any]]:
    """Tiles in shared memory once there are enough tokens for most of the chip."""
    names = FAMILY.serving(problem, arch)
    # On an H200 clusters of routing.route with 96 tokens by 128 experts, or 192 by 32, are resident at once: 3.6 and
    # 2.7 us where routing.many takes 4.4 and 3.1, and with 128 and 256 tokens 5.5 and 3.9.
    enough = (96 if problem.experts > 64 else 192) if shared.takes_clusters(arch) else 32 * multiprocessors
    if "many" in names and problem.m > enough:
        knobs = many.tuned(problem.experts, problem.m, problem.h, arch, multiprocessors)
        if knobs is not None:
            return "many", knobs
    return names[0], FAMILY.tuned(problem, arch, multiprocessors, names[0])


def _decompositions(problem: RoutingProblem) -> tuple[Decomposition, ...]:
    """One: the lists of many tokens are a launch of their own."""
    first, *rest = parts(problem) or [problem]
    return (Decomposition(first, rest=rest[0] if rest else None),)


def _typical(arch: Arch) -> tuple[RoutingProblem, ...]:
    """gpt-oss-120b and 20b: one launch for few tokens, choice and lists apart for many."""
    found = []
    for model in NAMED.values():
        routed = partial(RoutingProblem, experts=model.experts, k=model.top, h=model.hidden)
        for tile in (0, 64):
            found.append(routed(1, bias="bias_bf16", tile=tile))
        for m in (2 * FEW_TOKENS, 8192):
            found.append(routed(m, bias="bias_bf16"))
        found.append(routed(1, source="logits", tile=64))
        found.append(routed(8192, source="ids", tile=64))
    return tuple(found)


FAMILY = Family(
    name="routing",
    summary="experts of each token, their weights, and lists by expert",
    kernels=tuple(module.KERNEL for module in _MODULES),
    problem=RoutingProblem,
    typical=_typical,
    heuristic=_heuristic,
    decompositions=_decompositions,
    axes=("m",),
    benchmark=Benchmark(
        "jitmx.bench.routing",
        "router product, top-k and softmax in CUDA graphs of dependent calls, without and with RMSNorm whose rows are "
        "written as well: over routers that rotate past the L2, over as many as the model has, and with no launch "
        "started before the last one ended; ids are checked against torch.topk and weights against float64, and the "
        "floor has no launch in it",
        fields=("m",),
        peers=("torch",),
    ),
)
