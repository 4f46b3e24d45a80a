"""Faults of arithmetic that only values on an edge show: clamps, ends of scales, ties, NaN (`mutation.py`)."""

from __future__ import annotations

from mutation import catalogue, variant

_TILE = {"tile_n": 32, "tile_m": 16, "warps_n": 1, "warps_m": 1, "stages": 3}
_NATIVE = {"reduction": "atomic", "tile_n": 64, "tile_m": 16, "warps_n": 4, "stages": 3}
_OWN = "  if (lane < rows) atomicMax(ranks + lane, found);\n"

VARIANTS = {
    "values-gemv": variant("linear", "gemv", "sm_121a", m=4, bias=True, encoding="nibble", warps=4, split_k=2),
    "values-gemv-full": variant(
        "linear", "gemv", "sm_121a", m=4, encoding="nibble", scale_range="full", warps=4, split_k=2
    ),
    "values-stream-norm": variant(
        "linear", "stream", "sm_121a", m=4, norm=True, bias=True, scaling="post", warps=3, share=False, chunk=3
    ),
    "values-stream-argmax": variant(
        "linear", "stream", "sm_121a", m=4, argmax=True, bias=True, scaling="post", warps=2, share=False, chunk=3
    ),
    "values-stream-pair": variant(
        "linear", "stream", "sm_121a", m=4, residual="pair", bias=True, scaling="post", warps=4, split_k=2
    ),
    "values-slice": variant("linear", "slice", "sm_90a", m=4, bias=True),
    "values-tile": variant("linear", "tile", "sm_121a", bias=True, **_TILE),
    "values-tile-mxfp8": variant("linear", "tile", "sm_121a", weight="mxfp8", **_TILE),
    "values-scaled": variant(
        "linear", "scaled", "sm_80", bias=True, encoding="rotated", tile_n=64, tile_m=16, pdl=False
    ),
    "values-scaled-mxfp4": variant(
        "linear", "scaled", "sm_80", bias=True, encoding="rotated", activation="mxfp4", tile_n=64, tile_m=16, pdl=False
    ),
    "values-decode": variant("moe", "decode", "sm_121a", columns=2, encoding="nibble"),
    "values-decode-silu": variant("moe", "decode", "sm_121a", columns=2, encoding="nibble", activation="silu"),
    "values-grouped": variant("moe", "grouped", "sm_121a", **_TILE),
    "values-grouped-relu2": variant("moe", "grouped", "sm_121a", activation="relu2", weight_on="input", **_TILE),
    "values-grouped-down": variant("moe", "grouped", "sm_121a", product="down", **_TILE),
    "values-moe-scaled": variant("moe", "scaled", "sm_80", encoding="rotated", tile_m=8, pdl=False),
    "values-moe-native": variant(
        "moe", "scaled", "sm_121a", encoding="nibble", atom="mxf8f6f4", tile_n=64, tile_m=16, warps_n=4
    ),
    "values-moe-native-down": variant(
        "moe", "scaled", "sm_121a", product="down", encoding="nibble", x_format="mxfp4", atom="mxf4", **_NATIVE
    ),
    "values-moe-mxfp4": variant(
        "moe", "scaled", "sm_121a", encoding="nibble", x_format="mxfp4", atom="mxf4", tile_n=64, warps_n=4
    ),
    "values-token": variant("moe", "token", "sm_90a", hidden_blocks=5, inner_blocks=3, warps=4, chunk=3),
    "values-moe-stream": variant("moe", "stream", "sm_90a", columns=2, warps=4, chunk=3),
    "values-moe-wgmma": variant("moe", "wgmma", "sm_90a", tile_m=128, grain=16, tile_n=128, stages=2, depth=2),
    "values-moe-wgmma-down": variant(
        "moe", "wgmma", "sm_90a", product="down", tile_m=128, grain=16, tile_n=128, stages=2, depth=2
    ),
    "values-gather": variant("moe", "gather", "sm_90a", tile_m=64),
    "values-splitk": variant("linear", "splitk", "sm_90a", bias=True, tile_m=32),
    "values-wgmma": variant("linear", "wgmma", "sm_90a", bias=True),
    "values-many": variant("routing", "many", "sm_121a", tokens=64, warps_t=2, warps_e=4),
    "values-combine": variant("moe", "combine", "sm_121a", residual=True),
    "values-combine-pair": variant("moe", "combine", "sm_121a", residual="pair"),
    "values-route": variant("routing", "route", "sm_121a", norm=True, normalized=True, depth=1),
    "values-route-warps": variant(
        "routing", "route", "sm_90a", experts=32, norm=True, normalized=True, splits=2, cluster=False, parts=1, depth=2
    ),
    "values-topk": variant("routing", "topk", "sm_121a", dtype="fp32"),
    "values-topk-all": variant("routing", "topk", "sm_121a", scoring="softmax_all"),
    "values-sort": variant("routing", "sort", "sm_121a"),
    "values-quantize": variant("quantize", "quantize", "sm_80", format="mxfp8", pdl=False),
    "values-quantize-even": variant(
        "quantize", "quantize", "sm_80", format="mxfp6e2m3", dtype="fp32", scale_rule="even", pdl=False
    ),
    "values-dequantize": variant("quantize", "dequantize", "sm_121a", format="mxfp8", dtype="fp32"),
    "values-pack": variant("pack", "pack", "sm_121a", encoding="nibble"),
    "values-pack-mxfp8": variant("pack", "pack", "sm_121a", format="mxfp8"),
}

_CLAMP = "(max_nan(min_nan(up, limit), -limit) + 1.f) * swish(min_nan(gate, limit), alpha)"
_SWIGLU = (
    ("the gate is not clamped", _CLAMP, "(max_nan(min_nan(up, limit), -limit) + 1.f) * swish(gate, alpha)"),
    (
        "the gate is clamped below too",
        _CLAMP,
        "(max_nan(min_nan(up, limit), -limit) + 1.f) * swish(max_nan(min_nan(gate, limit), -limit), alpha)",
    ),
    ("up is not clamped below", _CLAMP, "(min_nan(up, limit) + 1.f) * swish(min_nan(gate, limit), alpha)"),
    ("up is not clamped above", _CLAMP, "(max_nan(up, -limit) + 1.f) * swish(min_nan(gate, limit), alpha)"),
    ("alpha is a constant", _CLAMP, _CLAMP.replace("alpha", "1.702f")),
    ("the limit is a constant", _CLAMP, _CLAMP.replace("limit", "7.f")),
    (
        "a clamp turns NaN into the limit",
        _CLAMP,
        "(fmaxf(fminf(up, limit), -limit) + 1.f) * swish(fminf(gate, limit), alpha)",
    ),
    (
        "an up that alone is NaN becomes the limit",
        _CLAMP,
        "(fmaxf(fminf(up, limit), -limit) + 1.f) * swish(min_nan(gate, limit), alpha)",
    ),
    (
        "a gate that alone is NaN becomes the limit",
        _CLAMP,
        "(max_nan(min_nan(up, limit), -limit) + 1.f) * swish(fminf(gate, limit), alpha)",
    ),
)
_ID_BITS = (
    ("ids have 16 bits", "found.id[i] = u32(id) < u32(routed.experts) ? id : -1;",
     "found.id[i] = id >= 0 && u16(id) < u32(routed.experts) ? u16(id) : -1;"),
    ("ids of the map have 16 bits", "routed.map[id] : -1;\n    found", "u16(routed.map[id]) : -1;\n    found"),
)  # fmt: skip
_SCALE = "bits == 0u ? 0x00400000u : bits == 0x7F800000u ? 0x7FFFFFFFu : bits"

# Scales of blocks as small as there are.
_LEAST = (
    ("the least scale is one too large", "max(int((bits + kUp) >> 23) - Emax, 0)",
     "max(int((bits + kUp) >> 23) - Emax, 1)"),
    ("a scale below the least goes round", "max(int((bits + kUp) >> 23) - Emax, 0)",
     "int((bits + kUp) >> 23) - Emax"),
    ("what has the least scale is zero", "return bits_to_float((254u - scale) << 23);",
     "return scale == 0u ? 0.f : bits_to_float((254u - scale) << 23);"),
    ("a scale of x of byte 0 is taken for one", "Atom::tokens(now.scales[token])",
     "Atom::tokens(__vcmpeq4(now.scales[token], 0u) & 0x7F7F7F7Fu | now.scales[token])"),
)  # fmt: skip

MUTATIONS = catalogue(VARIANTS, {
    "values-moe-native": (
        ("a neighbour's bits lie above a code in its byte", "words[i] << 2 & 0x3C3C3C3Cu",
         "words[i] << 2 & 0xFCFCFCFCu"),
        ("a neighbour's bits lie below a code in its byte", "words[i] >> 2 & 0x3C3C3C3Cu",
         "words[i] >> 2 & 0x3F3F3F3Fu"),
        ("an infinity is the largest number", "bits >= 0x7F800000u ? 255u", "bits > 0x7F800000u ? 255u"),
        ("scales of h are found in 32 bits", "(u64(row) * chunks_ + chunk) * kBlocks;",
         "u32((row * chunks_ + chunk) * kBlocks);"),
        ("the last lanes take the scale of half a block",
         "largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));",
         "largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, threadIdx.x % 32 < 28 ? 2 : 1));"),
        ("a row behind the tile is written", "if (row < tile.count && feature", "if (row <= tile.count && feature"),
        *_LEAST,
    ),
    "values-moe-mxfp4": (
        *_LEAST,
        ("what is below normal counts as zero", "__float_as_uint(T::widen(u16(largest)))",
         "(largest < 128u ? 0u : __float_as_uint(T::widen(u16(largest))))"),
    ),
    "values-moe-native-down": (
        ("rows of sums are found in 32 bits", "(out_.y) + place * features() + n;",
         "(out_.y) + u32(place * features() + n);"),
        ("scales of h are found in 32 bits", "(u64(row) * chunks_ + chunk) * kBlocks;",
         "u32((row * chunks_ + chunk) * kBlocks);"),
        ("the scale of a row behind the tile is read", "threadIdx.x < count_ ? min(max(left, 0), kBlocks) : 0",
         "threadIdx.x <= count_ ? min(max(left, 0), kBlocks) : 0"),
        ("a scale of h of byte 0 is taken for one", "Atom::tokens(now.scales[token])",
         "Atom::tokens(__vcmpeq4(now.scales[token], 0u) & 0x7F7F7F7Fu | now.scales[token])"),
        ("a block behind the last is read", "const int left = blocks_ - chunk * kBlocks;",
         "const int left = (blocks_ + 1) / 2 * 2 - chunk * kBlocks;"),
    ),
    "values-gemv": (
        ("x past its k is its first", "filled + from + v : 0), inside);", "filled + from + v : 0), true);"),
        ("x past its k is the next row's",
         "x + (inside ? (u64)m * filled + from + v : 0), inside);",
         "x + (m + 1 < args.rows || inside ? (u64)m * filled + from + v : 0), m + 1 < args.rows || inside);"),
        ("the largest scale is the next smaller", "__byte_perm(bytes, 0u, 0x4040 + Index * 0x0101) * 128u",
         "min(__byte_perm(bytes, 0u, 0x4040 + Index * 0x0101), 0x007F007Fu) * 128u"),
        ("the smallest scale is zero", "__byte_perm(bytes, 0u, 0x4040 + Index * 0x0101) * 128u + 126u * 0x00800080u",
         "((bytes >> 8 * Index & 255u) == 2u ? 0u : __byte_perm(bytes, 0u, 0x4040 + Index * 0x0101) * 128u"
         " + 126u * 0x00800080u)"),
        ("one column is off by a little", "value += T::widen(static_cast<const u16*>(args.bias)[n]);",
         "value += T::widen(static_cast<const u16*>(args.bias)[n]) * (n == 21 ? 0.9f : 1.f);"),
    ),
    "values-gemv-full": (
        ("scale byte 0 is zero", _SCALE, "bits == 0x7F800000u ? 0x7FFFFFFFu : bits"),
        ("scale byte 0 is byte 1", _SCALE,
         "bits == 0u ? 0x00800000u : bits == 0x7F800000u ? 0x7FFFFFFFu : bits"),
        ("scale byte 255 is infinite", _SCALE, "bits == 0u ? 0x00400000u : bits"),
        ("scale byte 254 is NaN", _SCALE,
         "bits == 0u ? 0x00400000u : bits >= 0x7F000000u ? 0x7FFFFFFFu : bits"),
        ("scale byte 1 counts as 0", _SCALE,
         "bits <= 0x00800000u ? 0x00400000u : bits == 0x7F800000u ? 0x7FFFFFFFu : bits"),
    ),
    "values-stream-norm": (
        ("X times its weight is cut", "u32(T::round(T::low(x) * T::low(g)))",
         "(__float_as_uint(T::low(x) * T::low(g)) >> 16)"),
        ("the inverse root is rounded", "return square_sums[m];", "return T::widen(T::round(square_sums[m]));"),
        ("epsilon is a constant",
         "__fdividef(sum, float(args.k)) + args.epsilon",
         "__fdividef(sum, float(args.k)) + 1e-5f"),
        ("epsilon is left out",
         "__fdividef(sum, float(args.k)) + args.epsilon",
         "__fdividef(sum, float(args.k)) + 1e-30f"),
        ("epsilon is added to the root", "rsqrtf(__fdividef(sum, float(args.k)) + args.epsilon)",
         "(1.f / (sqrtf(__fdividef(sum, float(args.k))) + args.epsilon))"),
    ),
    "values-stream-argmax": (
        ("of equal values the last wins", "u64(key) << 32 | (0xFFFFFFFFu - index)", "u64(key) << 32 | (index + 1u)"),
        ("a NaN is the largest", "value != value ? 0u :", "value != value ? 0xFFFFFFFFu :"),
        ("numbers below zero are in reverse", "bits >> 31 ? 0xFFFFFFFFu : 0x80000000u", "0x80000000u"),
        ("zeros have signs", "__float_as_uint(value + 0.f)", "__float_as_uint(value)"),
        *(
            (f"the last block has a rank that it found before it came, by {look}", _OWN,
             f"{_OWN}  const u64 seen = lane < rows ? {look} : 0ull;\n"
             "#define atomicExch(address, zero) (atomicExch(address, zero), seen)\n")
            for look in ("*(volatile u64*)(ranks + lane)", "atomicMax(ranks + lane, 0ull)")
        ),
    ),
    "values-stream-pair": (
        ("the low part of the residual is not read",
         "value += T::widen(static_cast<const u16*>(args.residual_lo)[u64(m) * args.n + n]);",
         ""),
        ("the low part of Y is what was kept", "T::round(value - T::widen(kept))", "T::round(0.f * value)"),
    ),
    "values-slice": (
        ("biases of the upper rows are those of the lower",
         "high = biases[r * 16 + row + 8]",
         "high = biases[r * 16 + row]"),
    ),
    "values-tile": (
        ("a long row has a tile of k less", "tiles_k = (args.k + 63) / 64", "tiles_k = (args.k + 63) / 65"),
        ("the last column's bias is left out",
         "high = n + 8 < args.n ? T::widen(bias[n + 8]) : 0.f", "high = n + 9 < args.n ? T::widen(bias[n + 8]) : 0.f"),
    ),
    "values-tile-mxfp8": (
        ("the largest scale is the next smaller", "__byte_perm(bytes, 0u, 0x4040 + Index * 0x0101) * 128u + 120u",
         "min(__byte_perm(bytes, 0u, 0x4040 + Index * 0x0101), 0x00850085u) * 128u + 120u"),
    ),
    "values-scaled": (
        ("the last feature has the bias of the one before", "[min(feature + g, args.n - 1)]",
         "[max(min(feature + g, args.n - 2), 0)]"),
        ("blocks of zeros are NaN", "bits == 0u ? 127u : byte", "bits == 0u ? 255u : byte"),
        ("a scale below the range wraps",
         "max(int((bits + kUp) >> 23) - Emax, 0)",
         "(int((bits + kUp) >> 23) - Emax) & 255"),
        ("a NaN is quantized as a number", "bits >= 0x7F800000u ? 255u :", "bits > 0x7FFFFFFFu ? 255u :"),
        ("codes do not saturate",
         "min((bits + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift, LargestCode)",
         "(bits + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift"),
        ("ties go away from zero", "((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift, LargestCode",
         "(1u << (kShift - 1))) >> kShift, LargestCode"),
        ("the scale rule is another", "Rule == ScaleRule::Floor ? 0u", "Rule == ScaleRule::Floor ? 0x007FFFFFu"),
    ),
    "values-scaled-mxfp4": (
        ("ties go away from zero",
         "magnitude + 0x00FF00FFu + ((magnitude >> 9) & 0x00010001u)",
         "magnitude + 0x01000100u"),
        ("codes do not saturate", "__vminu2(both & 0x7FFF7FFFu, 0x0E000E00u)", "(both & 0x7FFF7FFFu)"),
    ),
    "values-decode": (
        *_SWIGLU,
        *_ID_BITS,
        ("the count is ignored",
         "routed.count ? min(max(*routed.count, 0), routed.rows) * routed.top : entries;",
         "entries;"),
        ("the map is not bounded by the experts", "found.id[i] = u32(id) < u32(routed.experts) ? id : -1;",
         "found.id[i] = u32(id) < u32(routed.experts) || routed.map ? min(id, routed.experts - 1) : -1;"),
        ("a weight below zero counts as zero", "found.weight[i] = routed.weights[i];",
         "found.weight[i] = fmaxf(routed.weights[i], 0.f);"),
        ("weights end at one",
         "found.weight[i] = routed.weights[i];",
         "found.weight[i] = fminf(routed.weights[i], 1.f);"),
    ),
    "values-decode-silu": (
        ("the gate's sign is lost", "return up * swish(gate, 1.f);", "return up * swish(fabsf(gate), 1.f);"),
        ("the power overflows to NaN", "return __fdividef(x, 1.f + exp2_fast(-1.4426950408889634f * a * x));",
         "const float power = exp2_fast(1.4426950408889634f * a * -x);\n"
         "  return x * (1.f / power) / (1.f / power + 1.f);"),
        ("silu is clamped", "return up * swish(gate, 1.f);", "return up * swish(min_nan(gate, 7.f), 1.f);"),
    ),
    "values-grouped": _SWIGLU,
    "values-grouped-relu2": (
        ("what is below zero is squared", "up < 0.f ? 0.f : up * up", "up * up"),
        ("the weight is on the sum", "if constexpr (kOnProduct) y[i] *= weights[i % 2];", ""),
        ("a NaN counts as zero", "up < 0.f ? 0.f : up * up", "up > 0.f ? up * up : 0.f"),
    ),
    "values-grouped-down": (
        ("the bias is not weighted", "if constexpr (kOnSum) y[i] *= weights[i % 2];",
         "if constexpr (kOnSum) y[i] = sums[r][c][i] * weights[i % 2] + y[i] - sums[r][c][i];"),
        ("weights have no sign", "if constexpr (kOnSum) y[i] *= weights[i % 2];",
         "if constexpr (kOnSum) y[i] *= fabsf(weights[i % 2]);"),
    ),
    "values-moe-scaled": (
        ("a scale of byte 0 is zero", "first = byte == 255u ?", "first = byte == 0u ? 0.f : byte == 255u ?"),
        ("alpha is a constant", _CLAMP, _CLAMP.replace("alpha", "1.702f")),
        ("codes do not saturate",
         "min((bits + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift, LargestCode)",
         "(bits + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift"),
    ),
    "values-token": (
        *(fault for fault in _SWIGLU if fault[0] in ("the gate is not clamped", "alpha is a constant")),
        ("the count is ignored", "lane < kTop && !(args.count && *args.count <= 0);", "lane < kTop;"),
        ("a count below zero counts", "lane < kTop && !(args.count && *args.count <= 0);",
         "lane < kTop && !(args.count && *args.count == 0);"),
        ("an id past the experts is the last one",
         "return {u32(id) < u32(args.experts) ? id : -1, weight};",
         "return {id < 0 ? -1 : min(id, args.experts - 1), weight};"),
    ),
    "values-moe-stream": (
        ("long rows of W13 have a tile less", "layer.intermediate / 8, (layer.hidden + 63) / 64,",
         "layer.intermediate / 8, (layer.hidden + 63) / 65,"),
        ("long rows of W2 have a tile less", "(layer.intermediate + 63) / 64, layer.intermediate}",
         "(layer.intermediate + 63) / 65, layer.intermediate}"),
        *_ID_BITS,
        ("ids of few pairs have 16 bits", "few.valid = u32(id) < u32(routed.experts);",
         "few.valid = u16(id) < u32(routed.experts);\n  id = u16(id);"),
        *(fault for fault in _SWIGLU if fault[0] in ("up is not clamped below", "the limit is a constant")),
        *_SWIGLU[-2:],
        ("weights end at one",
         "found.weight[i] = routed.weights[i];",
         "found.weight[i] = fminf(routed.weights[i], 1.f);"),
    ),
    "values-moe-wgmma": (
        *(fault for fault in _SWIGLU if fault[0] in ("up is not clamped above", "alpha is a constant")),
        ("results are cut, not rounded", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"),
    ),
    "values-moe-wgmma-down": (
        ("weights have no sign", "item.factor[i] = args.weights[pair];", "item.factor[i] = fabsf(args.weights[pair]);"),
    ),
    "values-gather": (
        ("a warp's items of a second unit of rows are left out", "  while (item < end) {", "  if (item < end) {"),
        ("rows are their neighbours",
         "args.pairs[first + min(row + 4 * i, count - 1)];",
         "args.pairs[first + min(row + 4 * i, count - 1)] ^ 2;"),
    ),
    "values-splitk": (
        ("one feature's bias is another's",
         "low_ = first < args.n ? Bf16::widen(bias[first]) : 0.f;",
         "low_ = first < args.n ? Bf16::widen(bias[first == 33 ? 32 : first]) : 0.f;"),
    ),
    "values-wgmma": (
        ("one feature's bias is another's",
         "const float low = first < args.n ? Bf16::widen(bias[first]) : 0.f;",
         "const float low = first < args.n ? Bf16::widen(bias[first == 33 ? 32 : first]) : 0.f;"),
    ),
    "values-many": (
        ("of equal logits the last wins",
         "__reduce_min_sync(kFullWarp, best == most ? u32(lane * N + at) : kFullWarp)",
         "__reduce_max_sync(kFullWarp, best == most ? u32(lane * N + at) : 0u)"),
        ("a NaN is the largest",
         "return value != value ? kNanKey : key;",
         "return value != value ? 0xFFFFFFFEu : key;"),
    ),
    "values-combine": (
        ("ids have 16 bits", "u32 id = slots.id[slot];", "u32 id = u16(slots.id[slot]);"),
        ("ids of the map have 16 bits", "? u32(args.map[id]) :", "? u32(u16(args.map[id])) :"),
        ("slots are added from the last",
         "for (int slot = 0; slot < kTop; ++slot) {\n        const u32 pair[4] = {part[slot].x",
         "for (int slot = kTop - 1; slot >= 0; --slot) {\n        const u32 pair[4] = {part[slot].x"),
        ("the residual is added twice as the first slot", "    float sum[8] = {};",
         "    float sum[8] = {Bf16::low(residual.x)};"),
        ("an id past the experts has a part",
         "there[slot] = id < u32(args.experts);",
         "there[slot] = id <= u32(args.experts);"),
    ),
    "values-combine-pair": (
        ("the low part is lost", "sum[2 * i + 1] += Bf16::high(lo[i]);", ""),
    ),
    "values-route-warps": (
        ("as many warps as tokens are more",
         "const int writers = (kWarps > tokens ? kWarps - tokens : kWarps) * 32,\n      writer = kWarps > tokens ?",
         "const int writers = (kWarps >= tokens ? kWarps - tokens : kWarps) * 32,\n      writer = kWarps >= tokens ?"),
    ),
    "values-route": (
        ("epsilon is a constant",
         "__fdiv_rn(square, float(args.h)) + args.epsilon",
         "__fdiv_rn(square, float(args.h)) + 1e-5f"),
        ("what is normalized in a second round by warps without a token is left out",
         "(kWarps > tokens ? kWarps - tokens : kWarps) * 32", "(kWarps > tokens ? kWarps + tokens : kWarps) * 32"),
    ),
    "values-topk": (
        ("keys are of the next number", "const u32 bits = __float_as_uint(value + 0.f);",
         "const u32 bits = __float_as_uint(value + 0.f) + 1u;"),
        ("of equal logits the last wins", "__reduce_min_sync(kFullWarp, best == most ? u32(lane * N + at) : kFullWarp)",
         "__reduce_max_sync(kFullWarp, best == most ? u32(lane * N + at) : 0u)"),
        ("in a lane the last of equal logits wins", "if (keys[j] > best) {", "if (keys[j] >= best) {"),
        ("zeros have signs", "__float_as_uint(value + 0.f)", "__float_as_uint(value)"),
        ("a NaN is the largest",
         "return value != value ? kNanKey : key;",
         "return value != value ? 0xFFFFFFFEu : key;"),
        ("a NaN counts as zero", "bits_to_float(0xFF800000u) : value", "0.f : value"),
    ),
    "values-topk-all": (
        ("NaN have a share of all", "&& logits[j] == logits[j] ?", "?"),
    ),
    "values-sort": (
        ("rows of an expert are added up in 16 bits", "[&](int e) {\n    u32 sum = 0u;\n#pragma unroll 1",
         "[&](int e) {\n    u16 sum = 0u;\n#pragma unroll 1"),
        ("rows of an expert are taken for 16 bits", "const u32 here = sums[e];", "const u16 here = sums[e];"),
        ("a tile's first row has 16 bits", "row = first[low] + number * TileRows;",
         "row = u16(first[low] + number * TileRows);"),
        ("ids have 16 bits", "const u32 id = u32(args.ids[pair]);", "const u32 id = u16(args.ids[pair]);"),
        ("an id past the experts is the last",
         "return id < 128u ? id : kAbsent;",
         "return id <= 128u ? min(id, 127u) : kAbsent;"),
        ("a negative id is expert 0",
         "return id < 128u ? id : kAbsent;",
         "return id < 128u ? id : id >> 31 ? 0u : kAbsent;"),
    ),
    "values-quantize": (
        ("the least value counts as nothing", "bits == 0u ? 127u : byte", "bits <= 0x00010000u ? 127u : byte"),
        ("a NaN has the largest scale", "bits >= 0x7F800000u ? 255u", "bits > 0x7F800000u ? 254u"),
        ("an infinity is a number", "bits >= 0x7F800000u ? 255u", "bits > 0x7F800000u ? 255u"),
        ("blocks of zeros have scale byte 0", "bits == 0u ? 127u : byte", "byte"),
        ("-0 is 0", "(__float_as_uint(x[j]) >> 31) <<", "(x[j] < 0.f ? 1u : 0u) <<"),
        ("a tiny block's scale wraps", "max(exponent - 8, 0)", "(exponent - 8) & 255"),
    ),
    "values-quantize-even": (
        ("the scale goes up a value early", "(bits + (1u << 19)) >> 23", "(bits + (1u << 19) + 1u) >> 23"),
        ("the scale goes up a value late", "(bits + (1u << 19)) >> 23", "(bits + (1u << 19) - 1u) >> 23"),
        ("the scale is taken by the rule floor", "(bits + (1u << 19)) >> 23", "bits >> 23"),
        ("the scale rounds a bit too early", "(bits + (1u << 19)) >> 23", "(bits + (1u << 20)) >> 23"),
        ("subnormal codes are cut off", "return bits < (u32(128 - Bias) << 23) ? subnormal : normal;",
         "return bits < (u32(128 - Bias) << 23) ? (subnormal & ~1u) : normal;"),
    ),
    "values-dequantize": (
        ("-0 is 0", "code >> 7 & 1u ? -v : v", "code >> 7 & 1u ? 0.f - v : v"),
        ("scale byte 0 is zero", "bytes[i] == 0u ? 0x00400000u :", ""),
        ("scale byte 255 is infinite", "bytes[i] == 255u ? 0x7FFFFFFFu :", ""),
        ("a NaN code is a number", "if (magnitude == 127u) v = bits_to_float(0x7FFFFFFFu);", ""),
    ),
    "values-pack": (
        ("a bit of the last code of a block goes unseen", "& 0x77777777u) != 0u", "& 0x37777777u) != 0u"),
        ("a scale above the range goes unseen", "beyond |= value - 2u > 126u;", "beyond |= value < 2u;"),
        ("a scale below the range goes unseen", "beyond |= value - 2u > 126u;", "beyond |= value > 128u;"),
        ("the lowest scale counts as outside", "beyond |= value - 2u > 126u;", "beyond |= value - 3u > 125u;"),
        ("the highest scale counts as outside", "beyond |= value - 2u > 126u;", "beyond |= value - 2u > 125u;"),
        ("a NaN scale goes unseen", "beyond |= value - 2u > 126u;", "beyond |= value - 2u > 126u && value != 255u;"),
    ),
    "values-pack-mxfp8": (
        ("a bit of a code of a block goes unseen", "& 0x7F7F7F7Fu) != 0u);", "& 0x7F7F7D7Fu) != 0u);"),
        ("a scale above the range goes unseen", "beyond |= value - 10u > 124u;", "beyond |= value < 10u;"),
    ),
})  # fmt: skip

# What no case can see, with the reason; by `Mutation.id`.
ESCAPES: tuple[tuple[str, str], ...] = (
    ("values-stream-argmax: zeros have signs", "no product leaves -0: sums begin with +0, and -0 added to it is +0"),
)
