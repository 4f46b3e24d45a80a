"""Tiles by name (`JITMX_MOE_TILE=64x128s4`), and the launches of a layer that share one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jitmx.errors import KnobError
from jitmx.kernels import Companion
from jitmx.kernels.kernel import Tile
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS
from jitmx.kernels.moe import choice
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import STAGED
from jitmx.registry.spec import KernelSpec, Variant

_COLUMN = 8  # rows of x of an MMA
_SUMS = 64  # accumulators a thread, where the tile allows so few


def goes_by_expert(spec: KernelSpec) -> bool:
    """Whether a kernel reads lists by expert, in tiles, and a layer takes several launches."""
    return "tile_m" in _fields(spec)


def makes_products(spec: KernelSpec) -> bool:
    """Whether it makes one of the two products."""
    return "product" in _fields(spec)


def _fields(spec: KernelSpec) -> frozenset[str]:
    knobs: Any = spec.knobs
    return _fields_of(knobs)


@functools.cache
def _fields_of(knobs: Any) -> frozenset[str]:
    return frozenset(item.name for item in dataclasses.fields(knobs))


def first_product(problem: MoeProblem) -> MoeProblem:
    """What a kernel that makes products is asked: of a layer, the first of them."""
    return _first_product(problem) if problem.product == "layer" else problem


@functools.lru_cache(maxsize=64)
def _first_product(problem: MoeProblem) -> MoeProblem:
    return dataclasses.replace(problem, product="up")


def maker(spec: KernelSpec, staged: Mapping[int, tuple[int, int, int]] | None = None) -> Tile:
    """What gives knobs of a kernel for a tile of M rows of x by N rows of W.

    Args:
        staged: of a kernel that has them, by rows of a tile: grain, stages and depth.
    """
    return functools.partial(_knobs, spec, {item.name for item in dataclasses.fields(spec.knobs)}, staged or {})


def _knobs(
    spec: KernelSpec, names: set[str], staged: Mapping[int, tuple[int, int, int]], m: int, n: int, k: int | None,
    stages: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Warps of at least 16 rows of W, and as few beside each other over rows of x as their sums let."""
    if k is not None and "tile_k" not in names and k != TILE_K:
        raise KnobError(
            f"{spec.family}.{spec.name} takes {TILE_K} columns a step, not {k}",
            f"the nearest legal tile is {m}x{n}x{TILE_K}",
        )
    # A size outside its choices is refused first, with the nearest that is one.
    sizes = {"tile_m": m, "tile_n": n}
    spec.knobs(**sizes)
    warps_n = max(count for count in range(1, 5) if n // TILE_ROWS % count == 0)
    several = [count for count in (1, 2, 4) if m % (_COLUMN * count) == 0 and warps_n * count * 32 >= m] or [1]
    warps_m = next((count for count in several if m * n <= _SUMS * warps_n * count * 32), several[-1])
    wanted = {
        "tile_m": m, "tile_n": n, "tile_k": k, "warps_n": warps_n, "warps_m": warps_m, "blocks_per_sm": 1,
        "stages": stages or (6 if m < 64 else 4),
    }  # fmt: skip
    if m in staged:
        grain, usual, depth = staged[m]
        wanted |= {"grain": grain, "depth": depth, "stages": stages or usual}
    return {name: value for name, value in wanted.items() if name in names and value is not None}


def companions(problem: MoeProblem, variant: Variant, tile: Tile | None) -> tuple[Companion, ...]:
    """Beside the launch chosen for a layer: what chooses from logits where it does not, and what goes by expert.

    That is, after the first product: its lists, made before, the second product on the same tiles, where one launch
    does not make both, and the sum. Where the second product adds to y itself, there is no sum.
    """
    if problem.product != "layer":
        return ()
    knobs, by_expert = variant.knobs, goes_by_expert(variant.spec)
    routing = choice.routing_before(problem, variant, knobs.tile_m if by_expert else 0)
    step = "" if problem.routing == "ids" else "routing"
    found = [Companion("routing", one, {}, {}, step) for one in routing]
    if not by_expert:
        return tuple(found)
    problem = choice.launched(problem)
    otherwise = {} if tile is None else tile(knobs.tile_m, knobs.tile_n, None, None)
    both = variant.spec.name in ("fused", "fused_fp8")
    by_wgmma = variant.spec.name in ("wgmma", "wgmma_fp8")
    reads = "wgmma" if by_wgmma else variant.spec.name
    share = {"kernel": reads, "tile_m": knobs.tile_m}  # what h looks like, and the lists
    if variant.spec.name == reads == "wgmma":  # shared memory holds stages of a tile, as of the first product
        share |= {name: getattr(knobs, name) for name in ("grain", "tile_n", "stages", "depth")}
    elif reads == "wgmma":
        share |= dict(zip(("grain", "stages", "depth"), STAGED[knobs.tile_m], strict=True)) | {"tile_n": knobs.tile_n}
    if by_wgmma or both:
        gather = dataclasses.replace(problem, product="gather", residual=False)
        found.append(Companion("moe", gather, {"tile_m": knobs.tile_m, "tile_counters": both}, {}))
    if not both:
        found.append(Companion("moe", dataclasses.replace(problem, product="down", residual=False), share, otherwise))
    if problem.reduction == "ordered":
        found.append(Companion("moe", dataclasses.replace(problem, product="combine"), {}, {}))
    return tuple(found)
