"""The argument struct of every kernel of `linear`, and cases made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels.linear.layout import pack, reference
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, pair_l2, relative_l2
from jitmx.registry.spec import Variant

if TYPE_CHECKING:
    from jitmx.registry.launch import Launch

ARGUMENTS = Arguments(
    "LinearArguments",
    reads("x", "[rows, k]"),
    reads("weight", "packed words"),
    reads("scales", "packed scales"),
    reads("bias", "[n]"),
    reads("residual", "[rows, n]"),
    reads("norm", "[k]"),
    writes("y", "[rows, n]; residual_lo: [2, rows, n], the values and their low parts; argmax: int64 [rows]"),
    writes("workspace", "zero before the first launch"),
    reads("residual_lo", "[rows, n]: what rounding the residual to its type has lost"),
    number("epsilon", "float", "of the norm"),
    number("rows", "int"),
    number("n", "int"),
    number("k", "int"),
    reads("next_words", "of a weight that a later product reads, for the L2"),
    reads("next_scales", "of that weight"),
    number("next_word_bytes", "unsigned int", "0: there is no such weight"),
    number("next_scale_bytes", "unsigned int"),
)
MAPPED = ARGUMENTS.with_maps(x_map="x")  # for kernels that copy X by a tensor map
PREFETCH = tuple(ARGUMENTS.fields)[-4:]
NO_PREFETCH = 0, 0, 0, 0
EPSILON = 1e-5
GATE = 0.005  # relative L2 against float64, rounding of a 16-bit output included
PAIR_GATE = 1e-4  # of a pair, where X is not rounded on its way

_STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
X_FORMATS = {"mxfp8": "mxfp8", "mxfp6": "mxfp6e2m3", "mxfp4": "mxfp4"}


def make_case(variant: Variant, launch: Launch, rows: int, n: int, k: int, seed: int) -> Case:
    """A launch of `variant` on random inputs, with the product in float64.

    What the variant's knobs say (dtype, bias, encoding, scale_range, weight, activation, scale_rule, norm, residual,
    argmax; absent ones count as plain) decides inputs and reference. A quantized activation counts as what its codes
    stand for: the gate is then as tight as without, and the quantizer is under test too.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)

    def has(name: str) -> bool:
        return bool(getattr(knobs, name, False))

    stored = _STORED[knobs.dtype]
    x = generator.standard_normal((rows, k)).astype(stored)
    bias, norm = generator.standard_normal(n).astype(stored), generator.uniform(0.5, 1.5, k).astype(stored)
    residual = generator.standard_normal((rows, n)).astype(stored)
    words, packed, weight = _weight(variant, n, k, generator)
    pair = getattr(knobs, "residual", False) == "pair"
    low = (residual.astype(np.float64) * generator.uniform(-(2.0**-9), 2.0**-9, (rows, n))).astype(stored)
    wide = activations(x.astype(np.float64), norm.astype(np.float64) if has("norm") else None, variant)
    wanted = reference(wide, weight, bias.astype(np.float64) if has("bias") else None)
    if has("residual"):
        wanted = wanted + residual.astype(np.float64) + (low.astype(np.float64) if pair else 0)
    output = np.empty(rows, np.int64) if has("argmax") else np.empty((2, rows, n) if pair else (rows, n), stored)
    optional = {"bias": bias, "residual": residual, "norm": norm}
    # Pieces for some lanes of some blocks, a short one last; kernels that bring nothing leave it alone.
    later = [generator.integers(0, 256, size).astype(np.uint8) for size in (5 * 4096 + 512, 1056)]

    def check(outputs: Any) -> float:
        if has("argmax"):
            return _shortfall(outputs[0], wanted)
        return (pair_l2 if pair else relative_l2)(outputs[0], wanted)

    return Case(
        name=f"rows={rows} n={n} k={k} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(x), "weight": Buffer(words), "scales": Buffer(packed), "y": Buffer(output, output=True),
            **{name: Buffer(array) for name, array in optional.items() if has(name)},
            **({"residual_lo": Buffer(low)} if pair else {}),
            **({"workspace": Buffer(np.zeros(launch.workspace, np.uint8), scratch=True)} if launch.workspace else {}),
            "epsilon": EPSILON, "rows": rows, "n": n, "k": k,
            "next_words": Buffer(later[0]), "next_word_bytes": len(later[0]),
            "next_scales": Buffer(later[1]), "next_scale_bytes": len(later[1]),
        },
        check=check,
        gate=PAIR_GATE if pair and not has("norm") else GATE,
    )  # fmt: skip


def activations(
    x: npt.NDArray[np.float64], norm: npt.NDArray[np.float64] | None, variant: Variant
) -> npt.NDArray[np.float64]:
    """X as the product sees it: normalised where `norm` is given, what its codes stand for where it is quantized."""
    if norm is not None:
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * norm
    name = getattr(variant.knobs, "activation", "none")
    if name == "none":
        return x
    item = formats.get(X_FORMATS[name])
    return formats.dequantize(*formats.quantize(x, item, getattr(variant.knobs, "scale_rule", "floor")), item)


def _weight(
    variant: Variant, n: int, k: int, generator: np.random.Generator
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.float64]]:
    """Packed words and scales of a random weight, and its values."""
    knobs = variant.knobs
    item = formats.get(getattr(knobs, "weight", "mxfp4"))
    centre = formats.SCALE_ONE - 4 - item.emax
    scales = generator.integers(centre - 3, centre + 4, (n, k // 32)).astype(np.uint8)
    if knobs.scale_range == "full":
        scales[0, 0], scales[-1, -1] = 0, formats.SCALE_NAN
    if item.name == "mxfp4":
        codes = generator.integers(0, 16, (n, k)).astype(np.uint8)
        return *pack(codes, scales, knobs.encoding), formats.dequantize(codes, scales, item)
    from jitmx.kernels.linear.mxfp8 import pack_mxfp8

    codes = formats.encode(generator.standard_normal((n, k)) * 2.0**item.emax / 4, item)
    return *pack_mxfp8(codes, scales), formats.dequantize(codes, scales, item)


def _shortfall(found: npt.NDArray[np.int64], wanted: npt.NDArray[np.float64]) -> float:
    """How far the values at the indices found are below the largest, relative to them; a NaN is never the largest.

    Where a row is all NaN, the index must be 0.
    """
    lost = np.isnan(wanted).all(axis=1)
    if ((found < 0) | (found >= wanted.shape[1])).any() or found[lost].any():
        return float("inf")
    if lost.all():
        return 0.0
    found, wanted = found[~lost], wanted[~lost]
    best = np.nanmax(wanted, axis=1)
    chosen = np.take_along_axis(wanted, found[:, None], axis=1)[:, 0]
    spread = np.maximum(np.abs(best), np.nanstd(wanted, axis=1))
    return float(np.nan_to_num((best - chosen) / spread, nan=np.inf).max())
