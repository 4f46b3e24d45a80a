"""What kernels of `linear` share whose warpgroups decode weights as one operand of wgmma: problems, tiles, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.linear import far
from jitmx.kernels.linear.layout import TILE_K, packed_tiles
from jitmx.kernels.linear.limits import require_plain, require_slices
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from jitmx.registry.tensor_map import TensorMap

GROUP_ROWS = 64  # rows of W that a warpgroup multiplies
_TILE_ROWS = (128, 192, 256)  # of W, that two to four warpgroups take


class Tiled(Protocol):
    """Knobs that make a tile of Y."""

    @property
    def groups(self) -> int: ...
    @property
    def tile_m(self) -> int: ...


def runs_on(arch: Arch) -> bool:
    """Whether a target has the instructions."""
    return "wgmma" in arch.features


def require_wgmma(kernel: str, arch: Arch) -> None:
    """Raise KnobError where the target lacks the instructions that a kernel of this name needs."""
    if not runs_on(arch):
        raise KnobError(f"linear.{kernel} needs the instructions of sm_90a, which {arch} lacks", "use linear.tile")


def require_normal_scales(kernel: str, scale_range: str, other: str) -> None:
    """Raise KnobError where a weight has scales that a kernel of this name does not take, but another does."""
    if scale_range != "normal":
        raise KnobError(
            f"{kernel} does not take scale_range={scale_range!r}, only 'normal': it scales weights as it decodes them",
            f"{other} takes both",
        )


def fixed(kernel: str, problem: LinearProblem) -> dict[str, Any]:
    """What weight and tensors bring with them; KnobError where a kernel of this name does not take it."""
    require_plain(kernel, problem, "residual")
    if problem.dtype != "bf16":
        raise KnobError(f"linear.{kernel} does not take dtype={problem.dtype!r}, only 'bf16'", "linear.tile takes both")
    require_normal_scales(f"linear.{kernel}", problem.scale_range, "linear.tile")
    return problem.pick("dtype", "bias", "residual", "encoding", "scale_range")


def check_problem(problem: LinearProblem, variant: Variant) -> None:
    """Raise KnobError where slices of k are more than its steps."""
    steps = packed_tiles(problem.n, problem.k)[1]
    require_slices(variant.knobs.split_k, steps, f"{steps} steps of k={problem.k}")


def x_map(m: int, k: int, rows: int) -> TensorMap:
    """X [m, k] in boxes of so many rows by 64 k, each row of which is the span of a swizzle."""
    return TensorMap("bf16", (k, m), (TILE_K, rows), swizzle=TILE_K * 2)


def tiles(knobs: Tiled, m: int, n: int) -> int:
    """Tiles of Y."""
    return -(-n // (knobs.groups * GROUP_ROWS)) * -(-m // knobs.tile_m)


def far_cases(variant: Variant, launch: Callable[[Any, Any, int], Launch], max_rows: int, many: int) -> Iterator[Case]:
    """The last tile of Y, of many rows and of many features: Y, W, scales and bias are far; a tensor map reads X.

    Args:
        launch: geometry by knobs, problem and multiprocessors.
        many: features beside as many rows as a launch takes.
    """
    knobs = variant.knobs
    k, wide = max(2, knobs.split_k) * TILE_K - 32, knobs.groups * GROUP_ROWS
    rows = (max_rows - 3) // knobs.tile_m * knobs.tile_m
    for first_row, most in ((rows, many), (0, far.far_features(packed_tiles(1, k)[1]))):
        features = most // wide * wide
        geometry = launch(knobs, LinearProblem(first_row + 3, features + 24, k), 1 << 30)
        last = range(geometry.blocks - knobs.split_k, geometry.blocks)
        yield far.far_case(variant, geometry, (first_row, 3), (features, 24), k, last)


def tile(kernel: str, m: int, n: int, k: int | None) -> dict[str, Any]:
    """Knobs of a tile of m rows of X by n of W; steps of k are always 64."""
    if k not in (None, TILE_K):
        raise KnobError(f"linear.{kernel} takes steps of {TILE_K} k, not {k}", f"the nearest legal value is {TILE_K}")
    if n not in _TILE_ROWS:
        nearest = min(_TILE_ROWS, key=lambda legal: abs(legal - n))
        raise KnobError(
            f"linear.{kernel} takes tiles of 128, 192 or 256 rows of W, not {n}", f"the nearest is {nearest}"
        )
    return {"tile_m": m, "groups": n // GROUP_ROWS}
