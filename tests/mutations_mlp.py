"""Faults of the products of a dense MLP: gates and ups, and few rows with a residual (`mutation.py`)."""

from __future__ import annotations

from mutation import catalogue, variant

VARIANTS = {
    "swiglu-gemv": variant(
        "linear", "gemv", "sm_121a", m=4, swiglu=True, encoding="nibble", warps=2, split_k=1, chunk=2, stages=1,
        unroll=2, blocks_per_sm=1,
    ),
    "swiglu-gemv-split": variant(
        "linear", "gemv", "sm_121a", m=2, swiglu=True, encoding="nibble", warps=4, split_k=2, chunk=2, stages=1,
        unroll=2, blocks_per_sm=1,
    ),
    "gemv-pair": variant(
        "linear", "gemv", "sm_121a", m=4, residual="pair", encoding="nibble", warps=4, split_k=2, chunk=2, stages=1,
        unroll=2, blocks_per_sm=1,
    ),
    "swiglu-stream": variant(
        "linear", "stream", "sm_90a", m=2, swiglu=True, norm=True, scaling="post", share=False, warps=2, chunk=3,
    ),
    "swiglu-stream-wide": variant(
        "linear", "stream", "sm_90a", m=16, swiglu=True, share=False, warps=2, chunk=2, tile_rows=2,
    ),
}  # fmt: skip

_AT = "n / 16 * 8 + n % 16;"

MUTATIONS = catalogue(
    VARIANTS,
    {
        "swiglu-gemv": (
            ("gates and ups change places", "put(g, m, sum_[0][0], sum_[0][2]);", "put(g, m, sum_[0][2], sum_[0][0]);"),
            ("the second row of X gets the first one's ups", "sum_[0][1], sum_[0][3]", "sum_[0][1], sum_[0][2]"),
            ("a row of Y is as long as one of the product", "m * (args.n / 2)", "m * args.n"),
            ("the gate counts twice", "return up * swish(gate, 1.f);", "return up * gate * swish(gate, 1.f);"),
            ("the gate is left out", "return up * swish(gate, 1.f);", "return up;"),
            ("the sigmoid is that of gpt-oss", "swish(gate, 1.f)", "swish(gate, 1.702f)"),
            ("a sigmoid falls", "exp2_fast(-1.4426950408889634f", "exp2_fast(1.4426950408889634f"),
            ("the power is of e", "exp2_fast(-1.4426950408889634f", "exp2_fast(-1.f"),
            ("values are cut off, not rounded", "cvt.rn.bf16.f32", "cvt.rz.bf16.f32"),
            (
                "a gate whose power is infinite is no number",
                "return __fdividef(x, 1.f + exp2_fast(-1.4426950408889634f * a * x));",
                "const float e = exp2_fast(1.4426950408889634f * a * x);\n  return x * __fdividef(e, 1.f + e);",
            ),
            (
                "gates far below zero count as one that is less far",
                "exp2_fast(-1.4426950408889634f * a * x)",
                "exp2_fast(fminf(-1.4426950408889634f * a * x, 20.f))",
            ),
        ),
        "swiglu-gemv-split": (
            ("ups are gates once more", "partial[p][j / 8 * 16 + 8 + j % 8]", "partial[p][j / 8 * 16 + j % 8]"),
            ("gates of the first warp alone count", "gate += partial[p]", "gate = partial[0]"),
            ("gates of all rows of X are those of the first", "gate += partial[p][j / 8 * 16", "gate += partial[p][0"),
            ("half of the features are stored", "j < 8 * kM", "j < 4 * kM"),
        ),
        "gemv-pair": (
            (
                "the low part of the residual is not read",
                "value += T::widen(static_cast<const u16*>(args.residual_lo)[at]);",
                "",
            ),
            ("the low part of Y is what was kept", "T::round(value - T::widen(kept))", "T::round(0.f * value)"),
            (
                "the low part of Y is cut",
                "T::round(value - T::widen(kept))",
                "u16(__float_as_uint(value - T::widen(kept)) >> 16)",
            ),
            ("low parts lie behind eight rows", "(u64)args.rows * args.n + at", "(u64)kM * args.n + at"),
            ("every row gets the first one's residual", "(args.residual)[at]", "(args.residual)[n]"),
        ),
        "swiglu-stream": (
            ("ups are not normalised", "up *= factor;", ""),
            ("gates are not normalised", "gate *= factor;", ""),
            (
                "gates and ups change places",
                "one(n, m, sum.x, sum.z, normalizer);",
                "one(n, m, sum.z, sum.x, normalizer);",
            ),
            ("the second row of X is not stored", "one(n, m + 1, sum.y, sum.w, normalizer);", "{}"),
            ("features keep the places of gates", _AT, "n;"),
            ("every row of tiles is the first", _AT, "n % 16;"),
        ),
        "swiglu-stream-wide": (
            ("a row of Y is as long as one of the product", "m * (out.n / 2)", "m * out.n"),
            ("the second row of X gets the first one's gates", "sum.y, sum.w, normalizer", "sum.x, sum.w, normalizer"),
        ),
    },
)

# Faults that no case can show.
ESCAPES: tuple[tuple[str, str], ...] = ()
