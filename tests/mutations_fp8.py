"""Faults of experts in E4M3 (`mutation.py`)."""

from __future__ import annotations

from mutation import catalogue, variant

SMALL = {"tile_m": 64, "tile_n": 128, "stages": 2, "ring": 2}
VARIANTS = {
    "gather-fp8": variant("moe", "gather_fp8", "sm_90a", tile_m=64, rows=8, warps=4),
    "fp8-up": variant("moe", "wgmma_fp8", "sm_90a", encoding="nibble", **{**SMALL, "ring": 4}),
    "fp8-swizzle": variant("moe", "wgmma_fp8", "sm_90a", encoding="swizzle", **SMALL),
    "fp8-down": variant("moe", "wgmma_fp8", "sm_90a", product="down", encoding="nibble", **SMALL),
    "fp8-wide": variant("moe", "wgmma_fp8", "sm_90a", product="down", encoding="nibble", rows="wide", **SMALL),
}

MUTATIONS = catalogue(VARIANTS, {
    "gather-fp8": (
        ("a magnitude of 1.75 times a power of two takes the next one", "bits + 0x1Fu >> 7", "bits + 0x20u >> 7"),
        ("one just above it does not", "bits + 0x1Fu >> 7", "bits + 0x1Eu >> 7"),
        ("a scale may be a subnormal", "max(int(bits + 0x1Fu >> 7) - 8, 1)", "max(int(bits + 0x1Fu >> 7) - 8, 0)"),
        ("a NaN becomes a number", "finite ? bits_to_float(scale << 23) : bits_to_float(0x7FFFFFFFu)",
         "bits_to_float(scale << 23)"),
        ("an infinity counts as finite", "bits < 0x7F80u", "bits <= 0x7F80u"),
        ("a row of zeros has a scale of zero's", "bits == 0u ? 127u :", "bits == 0u ? 1u :"),
        ("signs count as magnitudes", "__vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu)", "__vmaxu2(a, b)"),
        ("odd k lie first", "to.vector(i / 16, place, vector) +", "to.vector(i / 16, place, vector ^ 1) +"),
        ("what is past k is not zero", "i < vectors && finite ?", "finite ?"),
        ("half a line is left out", "i < to.steps * 16;", "i < vectors;"),
        ("a row is taken for its pair", "u64(u32(pair) / u32(args.top)) * vectors", "u64(u32(pair)) * vectors"),
        ("x is read before the previous kernel ends", "  wait_for_previous();\n", ""),
        ("counters are not cleared", "threadIdx.x < 2) args.counters", "threadIdx.x < 1) args.counters"),
    ),
    "fp8-up": (
        ("signs of even k are those of odd k", "even = permute(w << 4, w, 0xD9C8u);",
         "even = permute(w << 4, w, 0xFBEAu);"),
        ("codes of odd k are those of even k", "permute(low, high, selectors.codes >> 16)",
         "permute(low, high, selectors.codes)"),
        ("1.5 is looked up as 2", "low_(0x14100800u", "low_(0x18100800u"),
        ("6 is looked up as 4", "high_(0x24201C18u", "high_(0x20201C18u"),
        ("scales of the second block are those of the first",
         "high.template under<I + 2, Wide>", "high.template under<2, Wide>"),
        ("rows g + 8 have the base of rows g", "tables(item.base[mine], item.base[mine + 8])",
         "tables(item.base[mine], item.base[mine])"),
        ("the second tile of a stage is multiplied by the first's k", "stages.matrix() + i % 2 * 4",
         "stages.matrix()"),
        ("a stage is not awaited", "    if (i % 2 == 0) stages.wait();\n", ""),
        ("a stage is released with a tile of it under way", "    if (left % 2) stages.next();\n", ""),
        ("a fragment is decoded while products read it", "      wgmma_wait<1>();\n      fence_operand",
         "      fence_operand"),
        ("what is decoded is not fenced from the products", "    wgmma_fence();\n    wgmma_steps<E4M3, N, 2>",
         "    wgmma_steps<E4M3, N, 2>"),
        ("the scale of another row of X is taken", "item.factor + lane % 4 * 2;", "item.factor + lane % 4 * 2 + 1;"),
        ("x has no scale", "fmaf(sum * scale, factor, bias)", "fmaf(sum, factor, bias)"),
        ("features of a word are in order", "permute(own, other, 0x5140u)", "permute(own, other, 0x5410u)"),
        ("h is not scaled", "to_e4m3x2(first * scale, second * scale)", "to_e4m3x2(first, second)"),
        ("the last line keeps what lay there", "rest < 8; rest += 2", "rest < 8 - 2; rest += 2"),
        ("h may overflow", "(limit + 1.f) * fmaxf", "limit * fmaxf"),
    ),
    "fp8-swizzle": (
        ("pair 2 is taken for pair 3", "codes |= w << 8 & 0x07000700u;", "codes |= w >> 1 & 0x07000700u;"),
        ("signs of pairs 2 and 3 change places", "permute(w << 1, w << 2, 0xFBD9u)",
         "permute(w << 2, w << 1, 0xFBD9u)"),
        ("signs of odd k are those of even k", "permute(first, second, 0x7632u)", "permute(first, second, 0x5410u)"),
    ),
    "fp8-down": (
        ("h keeps its scale", "1.f / hidden_multiplier(args.alpha, args.limit)", "1.f"),
        ("h has another scale than it was left with", "(limit + 1.f) * fmaxf(limit, __fdiv_rn(0.2785f, alpha))",
         "(limit + 1.f) * fmaxf(limit, __fdiv_rn(8.f, alpha))"),
        ("the base is a binade off", "(base + 5u) << 23", "(base + 4u) << 23"),
        ("the bias has the row's factor", "fmaf(sum, factor, bias) * scale", "(sum + bias) * factor * scale"),
        ("a pair has another's place", "item.place[i] = pair;", "item.place[i] = pair ^ 1;"),
    ),
    "fp8-wide": (
        ("there is one pass", "passes = max(passes, int(base >> 8));", ""),
        ("sums of smaller scales are not scaled down", "sums[i] *= 1.f / (1 << kBinades);", "sums[i] *= 1.f;"),
        ("the second pass is over the same scales", "const u32 up = u32(pass) * kBinades;", "const u32 up = 0u;"),
        ("scales of other passes count", "if (Wide && byte - base >= kBinades)", "if (false)"),
        ("a pass takes a binade more", "byte - base >= kBinades", "byte - base > kBinades"),
        ("X is brought once", "for (int pass = 0; pass < passes; ++pass, from = first)",
         "for (int pass = 0; pass < 1; ++pass, from = first)"),
        ("X goes on where the first pass ended", "++pass, from = first)", "++pass)"),
        ("weights are read once", "if (++pass_ < passes_) return;", ""),
    ),
})  # fmt: skip

# What no case can see, with the reason; by `Mutation.id`.
ESCAPES: tuple[tuple[str, str], ...] = ()
