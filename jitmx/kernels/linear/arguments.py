"""The argument struct of every kernel of `linear`, and cases made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels.linear import gated
from jitmx.kernels.linear.layout import NORMAL_SCALES, pack, reference
from jitmx.kernels.linear.mxfp8 import MXFP8_NORMAL_SCALES, pack_mxfp8
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import (
    Array,
    Buffer,
    Case,
    deviation,
    judged,
    pair_deviation,
    pair_l2,
    relative_l2,
    summed,
)
from jitmx.registry.spec import Variant

if TYPE_CHECKING:
    from jitmx.registry.launch import Launch

Floats = npt.NDArray[np.float64]

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
AGAIN = 1000  # added to a seed, for the same launch on other inputs
EPSILON = 1e-5
GATE = 0.005  # relative L2 against float64, rounding of a 16-bit output included
PAIR_GATE = 1e-4  # of a pair

_STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
_NORMED = 2.0**-18  # of a product, from a sum of squares in fp32, its root and quotient
X_FORMATS = {"mxfp8": "mxfp8", "mxfp6": "mxfp6e2m3", "mxfp4": "mxfp4", "fp8": "mxfp8"}


def make_case(variant: Variant, launch: Launch, rows: int, n: int, k: int, seed: int, special: str = "") -> Case:
    """A launch of `variant` on random inputs and those that stand on edges, with the product in float64.

    What the variant's knobs say (dtype, bias, encoding, scale_range, weight, activation, scale_rule, norm, residual,
    argmax, swiglu; absent ones count as plain) decides inputs and reference. A quantized activation counts as what its
    codes stand for: the gate is then as tight as without, and the quantizer is under test too.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)

    def has(name: str) -> bool:
        return bool(getattr(knobs, name, False))

    stored, swiglu = _STORED[knobs.dtype], has("swiglu")
    pair = getattr(knobs, "residual", False) == "pair"
    epsilon = EPSILON if seed % 2 == 0 else 0.25
    x = generator.standard_normal((rows, k)).astype(stored)
    if has("norm"):
        x = norm_rows(x, epsilon, seed)
    elif getattr(knobs, "activation", "none") != "none":
        x = _quantizer_rows(x, formats.get(X_FORMATS[knobs.activation]), generator)
    if rows > 2 and not (special or has("argmax") or has("norm") or getattr(knobs, "activation", "none") != "none"):
        # All of its row is, and no other: not one that goes on into the next row or begins anew behind its end.
        x[1 if swiglu else seed % 2, [0, k // 2]] = np.nan
        if stored is np.float16 and not swiglu:
            x[2] *= 2**12  # with the largest scale beyond what Y holds
            x[3:4] = -x[2]
    bias, norm = generator.standard_normal(n).astype(stored), generator.uniform(0.5, 1.5, k).astype(stored)
    # The low part of a residual shows where the residual is large.
    residual = ((64 if pair else 1) * generator.standard_normal((rows, n))).astype(stored)
    codes, scales, ends = _codes(variant, n, k, generator)
    bias[ends], residual[:, ends] = 0, 0  # beside nothing, what they multiply is not rounded away
    edges = getattr(knobs, "activation", "none") != "none" and 2 < rows <= 8  # of a quantizer, in rows up to the eighth
    if not (special or swiglu or has("argmax") or edges):
        cancelled = np.setdiff1d(np.arange(9, n - 3, 32), ends)
        _cancel(x, codes, scales, cancelled)
        bias[cancelled], residual[:, cancelled] = 0, 0
    if getattr(knobs, "activation", "none") != "none":
        bias[::3] = 0
    if special == "nan":
        x[0, k // 2] = np.nan
    elif special == "below":
        values = np.nan_to_num(_packed(codes, scales, variant)[2]) * (norm if has("norm") else 1)
        x[0] = np.linalg.lstsq(values, np.full(n, -8.0), rcond=None)[0].astype(stored)
        bias[:], residual[:] = -np.abs(bias), -np.abs(residual)
    elif special == "rising":  # from block to block, in the first row; in the second it mostly falls
        x[1:2] = -x[0]
        order = np.argsort(np.nan_to_num(_sums(x[0], bias, residual, codes, scales, variant, norm), nan=-np.inf))
        for part in (codes, scales, bias, residual.T):
            part[:] = part[order]
    elif has("argmax"):
        _tie(x, bias, residual, codes, scales, variant, seed, norm)
    words, packed, weight = _packed(codes, scales, variant)
    if swiglu and not has("norm"):
        x[0] *= gated.reach(x[0].astype(np.float64) @ np.nan_to_num(weight).T)
    low = (residual.astype(np.float64) * generator.uniform(-(2.0**-9), 2.0**-9, (rows, n))).astype(stored)
    wide = activations(x.astype(np.float64), norm.astype(np.float64) if has("norm") else None, variant, epsilon)
    wanted = reference(wide, weight, bias.astype(np.float64) if has("bias") else None)
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(wide) @ np.abs(weight).T + (np.abs(bias.astype(np.float64)) if has("bias") else 0)
    if has("residual"):
        wanted = wanted + residual.astype(np.float64) + (low.astype(np.float64) if pair else 0)
        magnitude = magnitude + np.abs(residual.astype(np.float64))
    bound = summed(magnitude, k)
    if has("norm"):
        with np.errstate(invalid="ignore"):
            bound = bound + _NORMED * np.abs(wide) @ np.abs(weight).T + 2.0**-140  # of subnormals of fp32
    sides = _scale_sides(variant, wide, weight, scales, magnitude)
    if swiglu:
        sides |= gated.sides(wanted, far=not has("norm"))
        wanted, bound = gated.reference(wanted, bound)
        ends = gated.features(ends)
    # What rounds to an infinity, or may by the order of the sum, counts for nothing in a norm.
    largest = float(ml_dtypes.finfo(stored).max)
    beyond = np.abs(wanted) > largest - bound
    either = beyond & (np.abs(wanted) < largest * (1 + 2.0**-11) + bound)
    shape = (2, rows, n) if pair else wanted.shape
    output = np.empty(rows, np.int64) if has("argmax") else np.empty(shape, stored)
    optional = {"bias": bias, "residual": residual, "norm": norm}
    # Pieces for some lanes of some blocks, a short one last; kernels that bring nothing leave it alone.
    later = [generator.integers(0, 256, size).astype(np.uint8) for size in (5 * 4096 + 512, 1056)]
    gate = PAIR_GATE if pair else GATE
    # What stands on ends of scales would hide them in a norm of all.
    usual = np.setdiff1d(np.arange(wanted.shape[1]), ends)
    if has("norm"):
        sides |= norm_sides(x, epsilon)
    if getattr(knobs, "activation", "none") != "none":
        item = formats.get(X_FORMATS[knobs.activation])
        sides |= quantizer_sides(x, item, getattr(knobs, "scale_rule", "floor"))
    if has("argmax"):
        columns = [codes, scales, *([bias[:, None]] if has("bias") else []), *([residual.T] if has("residual") else [])]
        alike = _alike(columns)
        zero = (x == 0).all(axis=1)
        below = set() if knobs.scale_range == "normal" else {"all below zero"}  # columns of scale byte 0 hardly are
        found = _argmax_sides(wanted, alike, zero, nan=has("bias") or has("residual"))
        sides |= {side: there for side, there in found.items() if side not in below}

    def check(outputs: Any) -> float:
        if has("argmax"):
            return _shortfall(outputs[0], wanted, alike, zero)
        if pair:
            error, off = pair_l2(outputs[0][..., usual], wanted[:, usual]), pair_deviation(outputs[0], wanted, bound)
        else:
            found, right = np.where(beyond, stored(0), outputs[0]), np.where(beyond, 0, wanted)
            error = relative_l2(found[:, usual], right[:, usual])
            off = deviation(np.where(either, stored(0), outputs[0]), np.where(either, 0, wanted), bound, 0.5)
        return judged(error, off, gate)

    return Case(
        name=f"rows={rows} n={n} k={k} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(x), "weight": Buffer(words, constant=True), "scales": Buffer(packed, constant=True),
            "y": Buffer(output, output=True),
            **{name: Buffer(array, constant=name != "residual") for name, array in optional.items() if has(name)},
            **({"residual_lo": Buffer(low)} if pair else {}),
            **({"workspace": Buffer(np.zeros(launch.workspace, np.uint8), scratch=True)} if launch.workspace else {}),
            "epsilon": epsilon, "rows": rows, "n": n, "k": k,
            "next_words": Buffer(later[0], constant=True), "next_word_bytes": len(later[0]),
            "next_scales": Buffer(later[1], constant=True), "next_scale_bytes": len(later[1]),
        },
        check=check,
        gate=gate,
        sides=sides,
        fixed=("rows", "n", "k"),
        again=lambda: make_case(variant, launch, rows, n, k, seed + AGAIN),
    )  # fmt: skip


def _cancel(x: Array, codes: Array, scales: Array, features: Array) -> None:
    """Makes features of the last row of X, and of one more, of two blocks at the ends of k that cancel each other.

    What lies in the middle of k is far smaller: parts of k that are added up in another order give other bits.
    """
    rows, k = x.shape
    middle = k // 64 * 32
    if k < 96 or not len(features):
        return
    for row in {rows - 1, min(rows - 1, 8)}:
        x[row, -32:] = -x[row, :32]
    kept = codes[features, middle : middle + 32].copy()
    codes[features, 32:] = 0
    codes[features, middle : middle + 32], codes[features, -32:] = kept, codes[features, :32]
    scales[features, -1] = scales[features, 0]
    scales[features, k // 64] = scales[features, 0] - 17


def activations(x: Floats, norm: Floats | None, variant: Variant, epsilon: float = EPSILON) -> Floats:
    """X as the product sees it: normalised where `norm` is given, what its codes stand for where it is quantized."""
    if norm is not None:
        weighted = (x * norm).astype(_STORED[variant.knobs.dtype]).astype(np.float64)  # as kernels round it, once
        x = weighted / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)
    name = getattr(variant.knobs, "activation", "none")
    return x if name == "none" else formats.rounded(x, formats.get(X_FORMATS[name]), variant.knobs.scale_rule)


def norm_rows(x: Array, epsilon: float, seed: int) -> Array:
    """Rows whose mean square is about one, about `epsilon`, far below it and far above, from another one on by seed."""
    factors = np.array([1.0, np.sqrt(epsilon), 2.0**-20, 2.0**8 if x.dtype == np.float16 else 2.0**20])
    return np.asarray((x * factors[(np.arange(len(x)) + seed) % 4, None]).astype(x.dtype))


def norm_sides(x: Array, epsilon: float, usual: float = EPSILON) -> dict[str, bool]:
    """Edges of RMSNorm: epsilon is an argument, and counts for rows whose mean square is not far above it."""
    share = np.mean(x.astype(np.float64) ** 2, axis=-1) / epsilon
    return {
        "epsilon usual": epsilon == usual,
        "epsilon not the usual": epsilon != usual,
        "mean square about epsilon": bool(((share > 0.2) & (share < 5)).any()),
        "mean square far below epsilon": bool((share < 1e-4).any()),
        "mean square far above epsilon": bool((share > 1e4).any()),
    }


def _quantizer_rows(x: Array, item: formats.Format, generator: np.random.Generator) -> Array:
    """X with rows whose blocks stand on edges of a quantizer, where there are eight or more."""
    rows, k = x.shape
    if rows < 8:
        return x
    blocks = x.reshape(rows, -1, formats.BLOCK)
    steps = formats.values(item)[: item.largest_code + 1]
    ties = generator.choice((steps[1:] + steps[:-1]) / 2, (k // formats.BLOCK, formats.BLOCK))
    ties[:, 0] = item.largest  # so that the scale is one
    blocks[1] = ties.astype(x.dtype)
    blocks[2, generator.random(k // formats.BLOCK) < 0.5] = 0
    blocks[2, -1] = 0
    tiny = -18 if x.dtype == np.float16 else item.emax - 129  # of the largest that scale byte 0 takes
    blocks[3] = (blocks[3].astype(np.float64) * 2.0**tiny).astype(x.dtype)
    blocks[4] = (blocks[4].astype(np.float64) * (2.0**6 if x.dtype == np.float16 else 2.0**116)).astype(x.dtype)
    blocks[5, :, 3] = -(2.0 - 2.0**-6)  # past the largest by the rule "floor", and next to it
    blocks[5, :, 4] = 1.9375
    blocks[6, 0, 5] = np.nan
    blocks[7, -1, 3] = -np.inf
    return blocks.reshape(rows, k)


def quantizer_sides(x: Array, item: formats.Format, rule: str) -> dict[str, bool]:
    """Edges of quantizing X: what is rounded where, blocks of zeros, and ends of the range of scales."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, formats.BLOCK)
    scales = formats.block_scales(blocks, item, rule)
    with np.errstate(invalid="ignore"):
        scaled = np.abs(blocks / formats.scale_values(scales)[..., None])
    steps = formats.values(item)[: item.largest_code + 1]
    some = np.abs(blocks).max(-1) > 0
    return {
        "tie to even": bool(np.isin(scaled, ((steps[1:] + steps[:-1]) / 2)[0::2]).any()),
        "tie to odd": bool(np.isin(scaled, ((steps[1:] + steps[:-1]) / 2)[1::2]).any()),
        **({"saturates": bool((scaled > item.largest).any())} if rule != "ceil" else {}),
        "block of zeros": bool((~some & np.isfinite(blocks).all(-1)).any()),
        **({"block of scale byte 0": bool((some & (scales == 0)).any())} if x.dtype != np.float16 else {}),
        "block that is not finite": bool((scales == formats.SCALE_NAN).any()),
    }


def scale_ends(variant: Variant) -> tuple[int, ...]:
    """Scale bytes at the ends of what a variant takes whose products its output type can hold, NaN among them."""
    knobs = variant.knobs
    low, high = MXFP8_NORMAL_SCALES if getattr(knobs, "weight", "mxfp4") == "mxfp8" else NORMAL_SCALES
    if (getattr(knobs, "argmax", False) or getattr(knobs, "swiglu", False)) and knobs.scale_range == "full":
        return 0, 1, formats.SCALE_NAN  # 254 would be the largest of all, and times an up no number
    if knobs.scale_range == "full":
        return (formats.SCALE_NAN,) if knobs.dtype == "fp16" else (0, 1, 254, formats.SCALE_NAN)
    return (high,) if knobs.dtype == "fp16" else (low, high)


def _codes(variant: Variant, n: int, k: int, generator: np.random.Generator) -> tuple[Array, Array, list[int]]:
    """Codes and scales of a random weight, and which rows have nothing but a block whose scale is at an end."""
    knobs = variant.knobs
    item = formats.get(getattr(knobs, "weight", "mxfp4"))
    centre = formats.SCALE_ONE - 4 - item.emax
    scales = generator.integers(centre - 3, centre + 4, (n, k // 32)).astype(np.uint8)
    full = knobs.scale_range == "full"
    if full and n > 3:  # not the last row, where a NaN would hide what the edge of Y makes of it
        scales[0, 0], scales[n - 3, -1] = 0, formats.SCALE_NAN
    if item.name == "mxfp4":
        codes = generator.integers(0, 16, (n, k)).astype(np.uint8)
    else:
        codes = formats.encode(generator.standard_normal((n, k)) * 2.0**item.emax / 4, item)
    ends: list[int] = []
    if n > 16:
        for byte, row in zip(scale_ends(variant), 1 + generator.permutation(n - (4 if full else 2)), strict=False):
            block = generator.integers(0, k // 32)
            kept = codes[row, 32 * block : 32 * block + 32].copy()
            codes[row] = 0
            if byte == 254:  # one product of an input and half of 2^127, which is no infinity
                kept[1:] = 0
                kept[0] = formats.encode(np.array([0.5]), item)[0]
            codes[row, 32 * block : 32 * block + 32] = kept
            scales[row, block] = byte
            ends.append(int(row))
    return codes, scales, ends


def _packed(codes: Array, scales: Array, variant: Variant) -> tuple[Array, Array, Floats]:
    """Packed words and scales of a weight, and its values."""
    item = formats.get(getattr(variant.knobs, "weight", "mxfp4"))
    if item.name == "mxfp4":
        return *pack(codes, scales, variant.knobs.encoding), formats.dequantize(codes, scales, item)
    return *pack_mxfp8(codes, scales), formats.dequantize(codes, scales, item)


def _scale_sides(variant: Variant, x: Floats, weight: Floats, scales: Array, magnitude: Floats) -> dict[str, bool]:
    """Whether blocks whose scale is at an end are what their outputs are made of."""
    blocks = x.reshape(len(x), -1, formats.BLOCK)
    found = {}
    for byte in scale_ends(variant):
        shows = False
        for row, block in np.argwhere(scales == byte)[:64]:
            part = np.abs(blocks[:, block]) @ np.abs(weight[row, 32 * block : 32 * block + 32])
            if byte == formats.SCALE_NAN:
                shows |= bool(np.isnan(part).all())
            else:
                shows |= bool((part > 2.0**-6 * magnitude[:, row]).any())
        found[f"scale byte {byte}"] = shows
    return found


def _tie(
    x: Array, bias: Array, residual: Array, codes: Array, scales: Array, variant: Variant, seed: int, norm: Array
) -> None:
    """Makes columns that are alike the largest of some rows, and others nowhere a number."""
    rows, n, knobs = len(x), len(codes), variant.knobs
    if n <= 16:
        return
    if rows > 1:
        x[1] = 0  # all its values are what is added, exactly
        bias[[3, n - 2]] = residual[1, 3] = residual[1, n - 2] = 4
    if rows > 2:
        x[2, x.shape[1] // 2] = np.nan
    if knobs.bias:
        bias[5] = np.nan
    elif knobs.residual:
        residual[:, 5] = np.nan
    y = _sums(x[0], bias, residual, codes, scales, variant, norm)
    if np.isnan(y).all():
        return
    best = int(np.nanargmax(y))
    # In its own row of tiles and in another; by turns the first of them is the lowest of all, or of its tiles.
    for column in {best ^ 1, best // 16 * 16 + 7, (best + 16 * (1 + seed % 2)) % n, n - 1} - {best, 3, 5, n - 2}:
        if column < n:
            codes[column], scales[column], bias[column] = codes[best], scales[best], bias[best]
            residual[:, column] = residual[:, best]


def _sums(x: Array, bias: Array, residual: Array, codes: Array, scales: Array, variant: Variant, norm: Array) -> Floats:
    """The sums of the first row of X, with all that is added to them."""
    knobs = variant.knobs
    weight = formats.dequantize(codes, scales, formats.get(getattr(knobs, "weight", "mxfp4")))
    y = x.astype(np.float64)
    if knobs.norm:
        y = y / np.sqrt(np.mean(y * y) + EPSILON) * norm.astype(np.float64)
    y = y @ weight.T
    y += (bias.astype(np.float64) if knobs.bias else 0) + (residual[0].astype(np.float64) if knobs.residual else 0)
    return np.asarray(y)


def _alike(columns: list[Array]) -> npt.NDArray[np.int64]:
    """For each column the first whose inputs are the same bits."""
    bits = np.concatenate(
        [np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in columns], axis=1
    )
    _, first, group = np.unique(bits, axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[group.ravel()])


def _argmax_sides(wanted: Floats, alike: npt.NDArray[np.int64], zero: Array, nan: bool) -> dict[str, bool]:
    """Edges of a choice: which of several largest, and what is no number."""
    near = far = below = False
    for row, values in enumerate(wanted):
        if np.isnan(values).all():
            continue
        best = int(np.nanargmax(values))
        tied = np.flatnonzero(values == values[best] if zero[row] else alike == alike[best])
        near |= bool((tied // 16 == best // 16).sum() > 1)
        far |= bool((tied // 16 != best // 16).any())
        below |= bool(values[best] < 0)
    lost = np.isnan(wanted)
    return {
        "largest twice in 16 columns": near,
        "largest in two tiles": far,
        "all below zero": below,
        "row without a number": bool(lost.all(axis=1).any()),
        **({"NaN beside numbers": bool((lost.any(axis=1) & ~lost.all(axis=1)).any())} if nan else {}),
    }


def _shortfall(found: npt.NDArray[np.int64], wanted: Floats, alike: npt.NDArray[np.int64], zero: Array) -> float:
    """How far the values at the indices found are below the largest, relative to them; a NaN is never the largest.

    Where a row is all NaN, the index must be 0; of columns that are alike, and of all where X is zero, the lowest.
    """
    lost = np.isnan(wanted).all(axis=1)
    if ((found < 0) | (found >= wanted.shape[1])).any() or found[lost].any():
        return float("inf")
    if lost.all():
        return 0.0
    if (alike[found[~lost]] != found[~lost]).any():
        return float("inf")
    exact = zero & ~lost
    if exact.any() and (found[exact] != np.nanargmax(wanted[exact], axis=1)).any():
        return float("inf")
    found, wanted = found[~lost], wanted[~lost]
    best = np.nanmax(wanted, axis=1)
    chosen = np.take_along_axis(wanted, found[:, None], axis=1)[:, 0]
    lacking = best != chosen
    spread = np.maximum(np.abs(best), np.nanstd(wanted, axis=1))[lacking]
    return float(np.nan_to_num((best - chosen)[lacking] / spread, nan=np.inf).max(initial=0.0))
