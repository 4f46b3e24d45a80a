"""The argument struct of `linear.wgmma_fp8`, and cases made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jitmx import formats
from jitmx.kernels import fp8_rows, fp8_sums
from jitmx.kernels.fp8_rows import BINADES, LINE_BYTES, LINE_K
from jitmx.kernels.linear import arguments, far
from jitmx.kernels.linear.layout import NORMAL_SCALES, TILE_K, TILE_ROWS, pack
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.arguments import Arguments, reads
from jitmx.registry.case import Buffer, Case, deviation, judged, pair_deviation, pair_l2, relative_l2, summed
from jitmx.registry.spec import Variant

if TYPE_CHECKING:
    from jitmx.registry.launch import Launch

_ALL = arguments.ARGUMENTS.fields
ARGUMENTS = Arguments(
    "Fp8LinearArguments",
    reads("x", "lines of E4M3: [steps of 128 k, rows, 128]"),
    *(field for name, field in _ALL.items() if name not in ("x", "norm", "workspace", "epsilon", *arguments.PREFETCH)),
    reads("bases", "[n]: the least scale byte of each row, and from bit 8 on its passes", "unsigned short"),
    reads("x_scales", "[rows]: what rows of x were divided by", "float"),
)
ROUNDED_GATE = 0.006  # relative L2 against the same inputs rounded alike
PAIR_GATE = 3e-4  # of a pair, whose residual is far larger than what is added to it


def make_case(variant: Variant, launch: Launch, rows: int, n: int, k: int, seed: int) -> Case:
    """A launch of `variant` on random inputs, with the product of what their codes stand for in float64.

    Of several rows one has a NaN, which must come to all of its features and to no other row.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    pair = knobs.residual == "pair"
    stored = ml_dtypes.bfloat16
    x = generator.standard_normal((rows, k)) * np.exp2(generator.integers(-3, 4, (rows, 1)))
    codes, x_scales = fp8_rows.quantize_rows(x)
    if rows > 1:
        x_scales[rows // 2] = np.nan
    seen = fp8_rows.decode(codes) * x_scales[:, None]
    weight_codes = generator.integers(0, 16, (n, k)).astype(np.uint8)
    centre = formats.SCALE_ONE - 2 - round(np.log2(k) / 2)
    scales = generator.integers(centre - 2, centre + 2, (n, k // 32)).astype(np.uint8)
    ends = _edges(knobs, weight_codes, scales, generator)
    weight = formats.dequantize(weight_codes, scales, formats.get("mxfp4"))
    words, packed = pack(weight_codes, scales, knobs.encoding)
    bases = fp8_rows.row_words(weight_codes, scales)
    bias = generator.standard_normal(n).astype(stored)
    residual = ((64 if pair else 1) * generator.standard_normal((rows, n))).astype(stored)
    bias[ends], residual[:, ends] = 0, 0  # beside nothing, what they multiply is not rounded away
    low = (residual.astype(np.float64) * generator.uniform(-(2.0**-9), 2.0**-9, (rows, n))).astype(stored)

    wanted, size = seen @ weight.T, np.abs(seen) @ np.abs(weight).T
    # Of `promote`, sums stay in the tensor cores for so many products.
    bound = fp8_sums.lost(size, min(2 * knobs.ring * fp8_sums.K, k) if knobs.promote else k)
    if knobs.bias:
        wanted, size = wanted + bias.astype(np.float64), size + np.abs(bias.astype(np.float64))
    if knobs.residual:
        wanted = wanted + residual.astype(np.float64) + (low.astype(np.float64) if pair else 0)
        size = size + np.abs(residual.astype(np.float64))
    bound = bound + summed(size, k)
    usual = np.setdiff1d(np.arange(n), ends)
    gate = PAIR_GATE if pair else ROUNDED_GATE
    passes = bases >> 8
    sides = {
        "row with a NaN": bool(np.isnan(wanted).all(axis=1).any()),
        "scales eleven binades apart": bool(np.ptp(scales[0].astype(int)) == BINADES - 1),
        "block of zeros under a scale of another pass": n > 5 and k > 32,
        **{f"scale byte {byte}": bool((scales == byte).any() and len(ends)) for byte in NORMAL_SCALES},
    }
    if knobs.rows == "wide":
        sides |= {f"row of {number} passes": bool((passes == number).any()) for number in (2, 3)}

    def check(outputs: Any) -> float:
        error = (pair_l2 if pair else relative_l2)(outputs[0][..., usual], wanted[:, usual])
        off = pair_deviation(outputs[0], wanted, bound) if pair else deviation(outputs[0], wanted, bound, 0.5)
        return judged(error, off, gate)

    return Case(
        name=f"rows={rows} n={n} k={k} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(fp8_rows.arrange(codes, np.array([0, rows], np.int32))),
            "x_scales": Buffer(x_scales),
            "weight": Buffer(words, constant=True), "scales": Buffer(packed, constant=True),
            "bases": Buffer(bases, constant=True),
            **({"bias": Buffer(bias, constant=True)} if knobs.bias else {}),
            **({"residual": Buffer(residual)} if knobs.residual else {}),
            **({"residual_lo": Buffer(low)} if pair else {}),
            "y": Buffer(np.empty((2, rows, n) if pair else (rows, n), stored), output=True),
            "rows": rows, "n": n, "k": k,
        },
        check=check,
        gate=gate,
        sides=sides,
    )  # fmt: skip


def _edges(knobs: Any, codes: Any, scales: Any, generator: np.random.Generator) -> list[int]:
    """Rows of W on edges of a pass; yields two of them that have nothing but a block whose scale is at an end."""
    n, blocks = scales.shape
    fp8_rows.spread_scales(codes, scales, knobs.rows == "wide")
    if n < 16:
        return []
    ends = [n - 6, n - 3]  # not the last, where nothing is added to what the edge of Y makes of it
    for byte, row in zip(NORMAL_SCALES, ends, strict=True):
        block = int(generator.integers(0, blocks))
        codes[row, : 32 * block] = codes[row, 32 * block + 32 :] = 0
        scales[row, block] = byte
    return ends


def far_cases(variant: Variant, launch: Any) -> Iterator[Case]:
    """The last tile of Y, of many rows and of many features: X, Y, W, scales, their bases and the bias are far."""
    knobs = variant.knobs
    k, some_rows, some = 2 * LINE_K - 32, 3, 24
    wide, tall = knobs.groups * 64, knobs.tile_m
    tiles_k = -(-k // TILE_K)
    for first_row, first in (((1 << 25) // tall * tall, 4 * wide), (0, far.far_features(tiles_k) // wide * wide)):
        rows, n = first_row + some_rows, first + some
        geometry = launch(knobs, LinearProblem(rows, n, k), 1 << 30)
        small = make_case(variant, geometry, some_rows, some, k, 9)
        values: dict[str, Any] = dict(small.values)
        places = first_row + np.arange(some_rows)
        steps = np.arange(-(-k // LINE_K))[:, None]

        def put(name: str, at: Any, size: int, values: dict[str, Any] = values) -> None:
            if name in values:
                values[name] = values[name].spread(np.asarray(at), size)

        put("x", ((steps * rows + places) * LINE_BYTES).ravel(), len(steps) * rows * LINE_BYTES)
        put("x_scales", first_row * 4, rows * 4)
        for name in ("weight", "scales"):
            row = values[name].data[0].nbytes
            put(name, first // TILE_ROWS * row, (first // TILE_ROWS + len(values[name].data)) * row)
        for name in ("bias", "bases"):
            put(name, first * 2, n * 2)
        matrix = (places * n + first) * 2
        for name in ("residual", "residual_lo"):
            put(name, matrix, rows * n * 2)
        both = values["y"].data.ndim == 3
        put("y", np.stack([matrix, matrix + rows * n * 2]) if both else matrix, (1 + both) * rows * n * 2)
        yield dataclasses.replace(
            small,
            name=f"far: rows={rows} n={n} k={k} grid={geometry.blocks}, of which the last",
            launch=geometry,
            values={**values, "rows": rows, "n": n},
            blocks=range(geometry.blocks - 1, geometry.blocks),
        )
