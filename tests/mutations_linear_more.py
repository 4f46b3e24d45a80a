"""More faults of linear products, packing, quantization and the bandwidth kernel: slips of a hand (`mutation.py`)."""

from __future__ import annotations

from mutation import catalogue, variant

VARIANTS = {
    "more-gemv": variant(
        "linear", "gemv", "sm_121a", m=4, bias=True, encoding="nibble", warps=8, split_k=4, chunk=2, stages=2, unroll=2,
        blocks_per_sm=1,
    ),
    "more-gemv-m8": variant(
        "linear", "gemv", "sm_121a", m=8, encoding="nibble", warps=4, split_k=1, chunk=3, stages=1, unroll=2,
        blocks_per_sm=1,
    ),
    "more-gemv-halves": variant(
        "linear", "gemv", "sm_80", m=4, dtype="fp16", bias=True, copy="async", warps=2, split_k=1, chunk=1, stages=2,
        unroll=1, blocks_per_sm=1, pdl=False,
    ),
    "more-whole": variant(
        "linear", "stream", "sm_90a", m=4, scaling="bare", share=False, whole=True, warps=2, chunk=3, tile_rows=2,
        unroll=3,
    ),
    "more-ring": variant(
        "linear", "stream", "sm_90a", m=2, scaling="post", share=False, warps=4, chunk=3, tile_rows=2, argmax=True,
    ),
    "more-share": variant(
        "linear", "stream", "sm_90a", m=2, scaling="bare", warps=4, split_k=2, cluster=2, unroll=1, predecode=1,
        norm=True, bias=True, residual=True,
    ),
    "more-share-block": variant(
        "linear", "stream", "sm_90a", m=4, scaling="halves", warps=4, split_k=2, cluster=4, sums="block", unroll=1,
        residual="pair",
    ),
    "more-slice": variant(
        "linear", "slice", "sm_90a", m=4, scaling="bare", warps=4, tiles=2, cluster=2, predecode=2, chains=2,
        residual="pair",
    ),
    "more-slice-pieces": variant(
        "linear", "slice", "sm_90a", m=16, cluster=2, warps=4, tiles=2, window=1, pieces=2, bias=True,
    ),
    "more-tile": variant(
        "linear", "tile", "sm_121a", encoding="nibble", tile_n=32, tile_m=16, tile_k=128, warps_n=2, warps_m=1,
        stages=3, bias=True,
    ),
    "more-tile-late": variant(
        "linear", "tile", "sm_121a", encoding="nibble", tile_n=64, tile_m=16, warps_n=2, warps_m=1, stages=4,
        fetch="late", split_k=3, residual="pair",
    ),
    "more-tile-mxfp8": variant(
        "linear", "tile", "sm_121a", weight="mxfp8", tile_n=64, tile_m=8, tile_k=256, warps_n=4, warps_m=1, stages=3,
        bias=True,
    ),
    "more-scaled": variant(
        "linear", "scaled", "sm_121a", encoding="nibble", activation="mxfp6", atom="mxf8f6f4", tile_n=64, tile_m=16,
        warps_n=4, warps_m=1, split_k=3, bias=True,
    ),
    "more-twin": variant(
        "linear", "scaled", "sm_80", encoding="rotated", activation="mxfp4", atom="twin", residual=True, pdl=False,
    ),
    "more-splitk": variant(
        "linear", "splitk", "sm_90a", groups=2, tile_m=16, chunk=2, ring=2, split_k=3, bias=True, residual="pair",
    ),
    "more-wgmma": variant(
        "linear", "wgmma", "sm_90a", groups=2, tile_m=32, ring=3, stages=3, split_k=2, buffers=3, bias=True,
        residual="pair",
    ),
    "more-wgmma-deep": variant("linear", "wgmma", "sm_90a", groups=2, tile_m=32, ring=2, stages=8),
    "more-image": variant("linear", "wgmma", "sm_90a", groups=2, tile_m=32, ring=4, stages=2, x="image"),
    "more-pack": variant("pack", "pack", "sm_121a", encoding="nibble"),
    "more-quantize": variant("quantize", "quantize", "sm_121a", dtype="fp16", block=128, vectors=2),
    "more-quantize-mxfp6": variant("quantize", "quantize", "sm_121a", format="mxfp6e3m2", block=128, vectors=1),
    "more-dequantize": variant("quantize", "dequantize", "sm_121a", block=128, vectors=2),
    "more-read": variant("bandwidth", "read", "sm_121a", block=128, unroll=4),
}  # fmt: skip

MUTATIONS = catalogue(
    VARIANTS,
    {
        "more-gemv": (
            ("whole packed tiles are one more", "tile_rows = (args.n + 15) / 16;", "tile_rows = (args.n + 16) / 16;"),
            ("values are cut off, not rounded", "cvt.rn.bf16.f32", "cvt.rz.bf16.f32"),
            (
                "bias is added to what is rounded already",
                "value += T::widen(static_cast<const u16*>(args.bias)[n]);",
                "value = T::widen(T::round(value)) + T::widen(static_cast<const u16*>(args.bias)[n]);",
            ),
            ("the last piece of the next weight is brought whole", "min(bytes - at, kPiece)", "kPiece"),
            ("the parity is the round itself", "return round & 1;", "return round;"),
            (
                "partial sums of the last row of X go to the row before",
                "partial[part][m * 16 + r] = value;",
                "partial[part][min(m, kM - 2) * 16 + r] = value;",
            ),
        ),
        "more-gemv-m8": (
            (
                "a stage is filled before the last lane has read it",
                "__syncwarp();\n      stream.fetch(state.stage);",
                "if (lane < 16) __syncwarp(0xFFFFu);\n      stream.fetch(state.stage);",
            ),
            (
                "the last warp skips its last row",
                "for (; row < row_end; ++row) {",
                "for (; row + (warp == kWarps - 1 && row_end > 1) < row_end; ++row) {",
            ),
            (
                "X of a ragged chunk is counted from its own start",
                "activation(m, base + i, 0), activation",
                "activation(m, i, 0), activation",
            ),
        ),
        "more-gemv-halves": (
            ("Y ends where fp16 does", "return to_fp16(value);", "return to_fp16(value > 65504.f ? 65504.f : value);"),
            (
                "Y begins where fp16 does",
                "return to_fp16(value);",
                "return to_fp16(value < -65504.f ? -65504.f : value);",
            ),
            ("no value of Y is NaN", "return to_fp16(value);", "return to_fp16(fmaxf(value, -3e38f));"),
        ),
        "more-whole": (
            ("rows of a pair count as one", "row_ += kRows;\n        next +=", "row_ += 1;\n        next +="),
            ("the second row of tiles keeps its sums", "sums[r] = Sums();", "if (r == 0) sums[r] = Sums();"),
        ),
        "more-ring": (
            (
                "the best of the last warp does not count",
                "for (int i = 0; i < kWarps; ++i) best",
                "for (int i = 0; i < kWarps - 1; ++i) best",
            ),
            (
                "only half a class is asked for its best",
                "for (int step = 16; step >= Classes; step /= 2)",
                "for (int step = 8; step >= Classes; step /= 2)",
            ),
            ("ranks are stored, not merged", "atomicMax(ranks + lane, found)", "atomicExch(ranks + lane, found)"),
            (
                "a chunk crosses two rows of tiles by one tile",
                "const int run = min(left_, tiles - at);",
                "const int run = tiles - at;",
            ),
        ),
        "more-share": (
            (
                "groups beyond the lanes of a warp have no barrier",
                "for (int i = lane; i < group_count; i += 32) {",
                "if (int i = lane; i < group_count) {",
            ),
            (
                "quotients are cut off a place early",
                "__fdividef(float(a) + 0.5f, float(b))",
                "__fdividef(float(a), float(b))",
            ),
            ("epsilon is a constant", "float(args.k)) + args.epsilon", "float(args.k)) + 1e-6f"),
            ("bias comes before the norm", "fmaf(sum.x, factor, extra.x)", "(sum.x + extra.x) * factor"),
            ("squares of a slice are sent to all of the cluster", "to < min(kCluster, group_count)", "to < kCluster"),
            ("fewer arrivals are awaited than warps arrive", "1 + mine * kSplit", "1 + mine * (kSplit - 1)"),
            ("decoded tiles count for the second group too", "    done = 0;\n", ""),
        ),
        "more-share-block": (
            (
                "sets share a barrier",
                "    barrier(1 + set, kSplit * 32);  // the codes have been read\n",
                "    barrier(1, kSplit * 32);\n",
            ),
            (
                "sums of the lower and higher blocks share a slot",
                "+ rank - (rank > owner)) * kSums + i;",
                "+ 0) * kSums + i;",
            ),
        ),
        "more-slice": (
            (
                "sums that come round to a thread again are left out",
                "i < mine * kSlot; i += kThreads",
                "i < mine * kSlot; i += 2 * kThreads",
            ),
            ("shares of sums are as of all warps", "i += parts * 32)", "i += kThreads)"),
            (
                "the last tile is not read again but what lies past it",
                "const int at = min(i, run - 1);\n    words",
                "const int at = i;\n    words",
            ),
            (
                "sums that others complete are told a row early",
                "if (r != others - 1) return;",
                "if (r != max(others - 2, 0)) return;",
            ),
        ),
        "more-slice-pieces": (
            ("a piece without tiles is asked for", "    if (count == 0) return;\n", ""),
            (
                "halves of X are swapped in the upper columns",
                "Source::arrange(x[i], g < 4);",
                "Source::arrange(x[i], g < 2);",
            ),
        ),
        "more-tile": (
            (
                "a tile with a lone feature is none",
                "tiles_n = (args.n + kTileN - 1) / kTileN",
                "tiles_n = (args.n + kTileN - 2) / kTileN",
            ),
            (
                "a tile with a lone token is none",
                "tiles_m = (args.rows + kTileM - 1) / kTileM;",
                "tiles_m = (args.rows + kTileM - 2) / kTileM;",
            ),
            (
                "a packed tile with a lone feature is none",
                "row_tiles = (args.n + 15) / 16",
                "row_tiles = (args.n + 14) / 16",
            ),
            ("whole packed tiles are one more", "row_tiles = (args.n + 15) / 16", "row_tiles = (args.n + 16) / 16"),
            (
                "no value of Y is NaN",
                "return to_bf16x2(first, second);",
                "return to_bf16x2(fmaxf(first, -3e38f), fmaxf(second, -3e38f));",
            ),
            (
                "later groups of tiles take the tokens of the first",
                "(group * kGroup + in_group % group_size) * kTileM",
                "(in_group % group_size) * kTileM",
            ),
            (
                "the last group of tiles is as wide as the others",
                "min(kGroup, tiles_m - group * kGroup)",
                "min(kGroup, tiles_m)",
            ),
            (
                "whole tiles of tokens are one more",
                "tiles_m = (args.rows + kTileM - 1) / kTileM;",
                "tiles_m = (args.rows + kTileM) / kTileM;",
            ),
            (
                "whole tiles of k are one more",
                "tiles_k = (args.k + 63) / 64;",
                "tiles_k = (args.k + 64) / 64;",
            ),
            (
                "the last stage takes the tiles behind the end of k",
                "min(count * kTilesK, tiles_k - begin * kTilesK)",
                "count * kTilesK",
            ),
            (
                "rows of Y are vectors where n is a multiple of four",
                "const bool whole = args.n % 8 == 0;",
                "const bool whole = args.n % 4 == 0;",
            ),
            (
                "Y takes the place of a stage that others read",
                "  u8* const y_tile = shared_bytes;\n  __syncthreads();",
                "  u8* const y_tile = shared_bytes;",
            ),
        ),
        "more-tile-late": (
            (
                "parts are added from that of the last block on",
                "load_once(parts + (p * kVectors + v) * kThreads)",
                "load_once(parts + ((p + part) % kSplitK * kVectors + v) * kThreads)",
            ),
            (
                "slices begin at whole shares of the steps",
                "begin = steps * part / kSplitK,",
                "begin = steps / kSplitK * part,",
            ),
            (
                "whether it is the last is read before it is known",
                "kSplitK);\n  __syncthreads();\n  if (!*last)",
                "kSplitK);\n  if (!*last)",
            ),
            (
                "the low part is copied in over what is read",
                "s[3] += T::high(high);\n    });\n    __syncthreads();\n  };",
                "s[3] += T::high(high);\n    });\n  };",
            ),
        ),
        "more-tile-mxfp8": (
            (
                "whole tiles of features are one more",
                "tiles_n = (args.n + kTileN - 1) / kTileN",
                "tiles_n = (args.n + kTileN) / kTileN",
            ),
            (
                "a group of tiles is as wide as all that are left",
                "min(kGroup, tiles_m - group * kGroup)",
                "(tiles_m - group * kGroup)",
            ),
            (
                "a bit of the lower byte is lost",
                "word << F::left, F::magnitude",
                "word << F::left, F::magnitude & ~0x00100010u",
            ),
        ),
        "more-scaled": (
            (
                "parts are added from that of the last block on",
                "partial[(p * kSums + i) * kThreads]",
                "partial[((p + slice) % kSplitK * kSums + i) * kThreads]",
            ),
            (
                "slices begin at whole shares of the chunks",
                "int chunk = chunks * slice / kSplitK;",
                "int chunk = chunks / kSplitK * slice;",
            ),
            (
                "a tile with a lone feature is none",
                "row_blocks = (args.n + kTileN - 1) / kTileN",
                "row_blocks = (args.n + kTileN - 2) / kTileN",
            ),
            ("whole packed tiles are one more", "(args.n + 15) / 16, row,", "(args.n + 16) / 16, row,"),
            (
                "a pair of features past the last is stored where their number is even",
                "const bool first = m < args.rows && n < args.n",
                "const bool first = m < args.rows && n <= args.n",
            ),
            (
                "a group of tiles is as wide as all that are left",
                "min(kGroup, column_blocks - group * kGroup)",
                "(column_blocks - group * kGroup)",
            ),
            (
                "later groups of tiles take the tokens of the first",
                "(group * kGroup + within % width) * kTileM",
                "(within % width) * kTileM",
            ),
            (
                "lanes past the last feature leave the transposition",
                "if (feature >= args.n) continue;",
                "if (feature + g >= args.n) continue;",
            ),
            ("weights of the next chunk are those of this", "weights.read(chunk + 1);", "weights.read(chunk);"),
        ),
        "more-twin": (
            ("ties go up", "+ 0x00FF00FFu + ((magnitude >> 9) & 0x00010001u)", "+ 0x01000100u"),
            ("large scales lose their subnormal", "0x00400000u >> (scale - 240u)", "0x00800000u >> (scale - 240u)"),
        ),
        "more-splitk": (
            (
                "what is there is awaited by one parity from the second round on",
                "mbarrier_wait(there_ + now.stage * 8, now.parity());",
                "mbarrier_wait(there_ + now.stage * 8, now.round != 0u);",
            ),
            (
                "a stage is given back by one parity from the second round on",
                "mbarrier_wait(empty + old.stage * 8, old.parity());",
                "mbarrier_wait(empty + old.stage * 8, old.round != 0u);",
            ),
            ("the round stays at one", "      if (next == 0) round ^= 1;", "      if (next == 0) round = 1;"),
            (
                "a tile with a lone token is none",
                "(args.rows + kTokens - 1) / kTokens",
                "(args.rows + kTokens - 2) / kTokens",
            ),
            ("a packed tile with a lone feature is none", "(args.n + 15) / 16 - 1)", "(args.n + 14) / 16 - 1)"),
            ("whole packed tiles are one more", "(args.n + 15) / 16 - 1)", "(args.n + 16) / 16 - 1)"),
            (
                "no value of Y is NaN",
                "return to_bf16x2(first, second);",
                "return to_bf16x2(fmaxf(first, -3e38f), fmaxf(second, -3e38f));",
            ),
            ("rows of Y are vectors where n is even", "    if (args_.n % 4 == 0) {\n", "    if (args_.n % 2 == 0) {\n"),
            (
                "stages are given back by one warp too few",
                "kWarps);\n      }\n      mbarrier_init_fence();",
                "kWarps - 1);\n      }\n      mbarrier_init_fence();",
            ),
            (
                "one mover is not awaited",
                "mbarrier_init(shared_address(shared_.full + i), kMovers);",
                "mbarrier_init(shared_address(shared_.full + i), kMovers - 1);",
            ),
            ("registers are not given up", "setmaxnreg_dec<56>();", ""),
            (
                "a step of X too many is asked for",
                "step >= kLag && next < tile_.count",
                "step >= kLag && next <= tile_.count",
            ),
            (
                "whole tiles of rows are one more",
                "(args.rows + kTokens - 1) / kTokens",
                "(args.rows + kTokens) / kTokens",
            ),
        ),
        "more-wgmma-deep": (("a ring of many stages never begins anew", "if (full_ == end_) {", "if (false) {"),),
        "more-wgmma": (
            ("a tile with a lone feature is none", "(args.n + kRows - 1) / kRows", "(args.n + kRows - 2) / kRows"),
            ("a packed tile with a lone feature is none", "(args_.n + 15) / 16 - 1)", "(args_.n + 14) / 16 - 1)"),
            ("whole packed tiles are one more", "(args_.n + 15) / 16 - 1)", "(args_.n + 16) / 16 - 1)"),
            (
                "slots past the last tile are not counted",
                "      else weights.load(i);\n",
                "      else weights.advance();\n",
            ),
            (
                "one warp of the other block is not awaited",
                "mbarrier_init(shared_address(shared.taken + i), 4);",
                "mbarrier_init(shared_address(shared.taken + i), 3);",
            ),
            ("the descriptor's atoms are 512 bytes apart", "u64(1024 / 16) << 32", "u64(512 / 16) << 32"),
        ),
        "more-image": (
            (
                "tiles past the 64th are not awaited",
                "token < 64 && (ready >> token & 1)",
                "(ready >> (token % 64) & 1)",
            ),
            ("only the first span is awaited", "image.opens_span(step))", "step == 0)"),
        ),
        "more-pack": (
            (
                "scales end in the next row",
                "if (start + j * 32 < tiles * 2) staged_scales",
                "if (start + j * 32 <= tiles * 2) staged_scales",
            ),
            (
                "only the last tile's scales are looked at",
                "beyond |= value - 2u > 126u;",
                "beyond = value - 2u > 126u;",
            ),
            ("votes of half a quad", ">> (lane & ~3u) & 15u", ">> (lane & ~3u) & 7u"),
            (
                "scales of later rounds are the first's",
                "scales[i][start + j * 32] :",
                "scales[i][start % 32 + j * 32] :",
            ),
        ),
        "more-quantize": (
            ("infinity is the largest number", "bits >= 0x7F800000u ? 255u", "bits > 0x7F800000u ? 255u"),
        ),
        "more-quantize-mxfp6": (("signs are a bit low", "& 0x80008000u) >> 10)", "& 0x80008000u) >> 11)"),),
        "more-dequantize": (
            (
                "minus zero loses its sign",
                "return code >> 3 & 1u ? -v : v;",
                "return code >> 3 & 1u && magnitude ? -v : v;",
            ),
        ),
        "more-read": (
            (
                "every second vector of the rest is read",
                "for (; i < args.vectors; i += stride)",
                "for (; i < args.vectors; i += 2 * stride)",
            ),
            (
                "the last words of vectors are not needed",
                "seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;",
                "seen ^= v[j].x ^ v[j].y ^ v[j].z;",
            ),
        ),
    },
)

# What no case can see, with the reason; by `Mutation.id`.
ESCAPES = (
    (
        "more-share: quotients are cut off a place early",
        "a whole quotient that comes out one less leaves a whole round over: every cluster has the share it had",
    ),
)
