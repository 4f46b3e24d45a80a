"""Faults of products of many rows, block-scaled ones too, and of routing (`mutation.py`)."""

from __future__ import annotations

from mutation import Mutation, variant

VARIANTS = {
    "tile": variant(
        "linear", "tile", "sm_80", tile_n=32, tile_m=16, warps_n=2, warps_m=1, stages=3, split_k=2, bias=True,
        residual=True, pdl=False,
    ),
    "tile-cluster": variant(
        "linear", "tile", "sm_90a", tile_n=32, tile_m=16, warps_n=1, warps_m=1, stages=3, split_k=2, exchange="cluster",
    ),
    "scaled-mxf4": variant(
        "linear", "scaled", "sm_121a", encoding="nibble", activation="mxfp4", atom="mxf4", bias=True, split_k=2,
    ),
    "scaled-mxf8f6f4": variant("linear", "scaled", "sm_120a", encoding="nibble", activation="mxfp8", atom="mxf8f6f4"),
    "route": variant("routing", "topk", "sm_90a", experts=60, k=4, dtype="fp32", scoring="softmax_all", warps=4),
    "sort": variant("routing", "sort", "sm_80", experts=100, k=2, tile=8, mapped=True, pdl=False),
}  # fmt: skip

MUTATIONS = tuple(
    Mutation(where, VARIANTS[where], name, old, new)
    for where, faults in {
        "tile": (
            ("the first stage is not awaited", "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();"),
            ("a stage is read before its copies end", "copy_wait<kStages - 3>();", "copy_wait<kStages - 2>();"),
            ("a stage is read before the other warps' copies end",
             "copy_wait<kStages - 3>();\n        __syncthreads();",
             "copy_wait<kStages - 3>();"),
            ("the ring of copies is a stage short", "free_stage + 1 == kStages ?", "free_stage + 1 == kStages - 1 ?"),
            ("the ring of reads is a stage short", "at + kStageBytes == kStages * kStageBytes ?",
             "at + kStageBytes == (kStages - 1) * kStageBytes ?"),
            ("the ring of reads is a stage long", "at + kStageBytes == kStages * kStageBytes ?",
             "at + kStageBytes == (kStages + 1) * kStageBytes ?"),
            ("a stage too few is filled with X", "++stage) fetch_x(stage);", "++stage) if (stage) fetch_x(stage);"),
            ("X goes on past k", "const bool inside = place_ + across < left_;", "const bool inside = true;"),
            ("rows past the last are copied", "min(row_ + j * kStep, rows - 1)", "(row_ + j * kStep)"),
            ("sums start anywhere", "Sums sums = {};", "Sums sums;"),
            ("both blocks of a k64 take the first half of X", "place_x(row_x, t + 4)}", "place_x(row_x, t)}"),
            ("a slice ends a step late", "steps * (part + 1) / kSplitK - begin",
             "steps * (part + 1) / kSplitK + 1 - begin"),
            ("parts are not awaited", "arrive_last(reinterpret_cast<u32*>(args.workspace) + tile, kSplitK)",
             "arrive_last(reinterpret_cast<u32*>(args.workspace) + tile, 1)"),
            ("a part too many is awaited", "arrive_last(reinterpret_cast<u32*>(args.workspace) + tile, kSplitK)",
             "arrive_last(reinterpret_cast<u32*>(args.workspace) + tile, kSplitK + 1)"),
            ("every block goes on to store", "if (!*last) return;", ""),
            ("tiles share the place of their parts", "(u64)tile * kSplitK * kVectors * kThreads",
             "(u64)tile * kVectors * kThreads"),
            ("tokens past the last are stored", "if (first_token + token < args.rows && token < kTileM",
             "if (token < kTileM"),
            ("the residual is not awaited",
             "held = Vec4{pairs[0], pairs[1], pairs[2], pairs[3]};\n    }\n  });\n  __syncthreads();",
             "held = Vec4{pairs[0], pairs[1], pairs[2], pairs[3]};\n    }\n  });"),
            ("a feature has its neighbour's bias", "low = n < args.n ? T::widen(bias[n])",
             "low = n < args.n ? T::widen(bias[n ^ 1])"),
        ),
        "tile-cluster": (
            ("parts are not awaited", "cluster_release();\n  cluster_wait();\n", ""),
            ("a block ends while the other reads its parts", "  cluster_wait();\n}", "}"),
            ("a block's own part counts twice", "shared_address(parts + (v + i) * kThreads), p)",
             "shared_address(parts + (v + i) * kThreads), blockIdx.x % kSplitK)"),
            ("Y lies on the parts", "shared_bytes + kTileN * kTileM * 4;", "shared_bytes;"),
        ),
        "scaled-mxf4": (
            ("scales of the second tile of W are the first's", "step<0, Tile, 2 * Tile>(", "step<0, 0, 2 * Tile>("),
            ("scales of the second tile of X are the first's", "step<0, Tile, 2 * Tile>(", "step<0, Tile, 0>("),
            ("rows g + 8 have the scales of rows g", "lane / 4 * 4 + lane % 2 * 2", "lane / 4 * 4"),
            ("lanes of the second tile bring scales of the first", "pair_(lane % 4 / 2)", "pair_(0)"),
            ("scale bytes of X are swapped", "[token * 4 + block] = u8(scale)",
             "[token * 4 + (block ^ 1)] = u8(scale)"),
            ("lanes take codes of X of their neighbours", "Stage::place(token, First / kSegmentTiles, t)]",
             "Stage::place(token, First / kSegmentTiles, t ^ 1)]"),
            ("a chunk is read before it is made", "__syncthreads();\n\n  int parity", "int parity"),
            ("a chunk is made over one that is read", "parity ^= 1;\n    __syncthreads();", "parity ^= 1;"),
            ("stages never take turns", "parity ^= 1;", ""),
            ("a tile of W past the last is read", "min(chunk * kChunk + i, last_)", "(chunk * kChunk + i)"),
            ("rows of W past the last are read", "min(row + r, rows - 1) * tiles_k", "(row + r) * tiles_k"),
            ("X of the next slice counts", "end_(min(k / 8, last * kTokenVectors))", "end_(k / 8)"),
            ("sums start anywhere", "Product::Sums sums = {};", "Product::Sums sums;"),
            ("tokens past the last are stored", "first = m < args.rows && n < args.n,", "first = n < args.n,"),
            ("a block too few is awaited", "arrive_last(counters + tile, kSplitK)",
             "arrive_last(counters + tile, kSplitK - 1)"),
            ("every block goes on to store", "if (shared.last == 0u) return;", ""),
            ("parts are counted before all are written", "__syncthreads();\n  if (threadIdx.x == 0) shared.last",
             "if (threadIdx.x == 0) shared.last"),
            ("a block's own sums count twice", "s[j] = p == 0 ? part[j] : s[j] + part[j]", "s[j] = s[j] + part[j]"),
            ("Y is not transposed", "const u32 pair = transpose(round_pair<T>(low, high));",
             "const u32 pair = round_pair<T>(low, high);"),
        ),
        "scaled-mxf8f6f4": (
            ("the second block has the first's scales of W", "step<1, Tile, 2 * Tile + 1>",
             "step<0, Tile, 2 * Tile + 1>"),
            ("the second block has the first's scales of X", "step<1, Tile, 2 * Tile + 1>", "step<1, Tile, 2 * Tile>"),
            ("the second block has the first's codes of W", "(d, w.r + 4, x.r + 2,", "(d, w.r, x.r + 2,"),
            ("codes lie a bit low in their bytes", "words[i] << 2 & 0x3C3C3C3Cu", "words[i] << 1 & 0x1E1E1E1Eu"),
        ),
        "route": (
            ("ties go to the higher id", "if (keys[j] > best) {", "if (keys[j] >= best) {"),
            ("lanes' ties go to the higher id",
             "__reduce_min_sync(kFullWarp, best == most ? u32(lane * N + at) : kFullWarp)",
             "__reduce_max_sync(kFullWarp, best == most ? u32(lane * N + at) : 0u)"),
            ("a NaN is a number", "return value != value ? kNanKey : key;", "return key;"),
            ("-0 is less than +0", "__float_as_uint(value + 0.f)", "__float_as_uint(value)"),
            ("experts past the last are chosen from", "lane * N + j < Experts ? ordered_key(logits[j]) : kNoExpertKey",
             "ordered_key(logits[j])"),
            ("an expert is chosen twice", "keys[j] = kTakenKey;", ";"),
        ),
        "sort": (
            ("counts are not cleared", "counts[w * local + e] = 0u;", ";"),
            ("the tail of pairs is left as it is", "i < count; i += workers) lists.pairs[i] = -1;",
             "i < 0; i += workers) lists.pairs[i] = -1;"),
            ("two pairs of an expert take one place", "+ *next + earlier] = p + lane;", "+ *next] = p + lane;"),
            ("counts of a warp are not moved on", "*next += __popc(same);", ";"),
            ("a lane reads a count that another moves on", "= p + lane;\n    __syncwarp();", "= p + lane;"),
            ("tiles are rounded down", "tile += (here + TileRows - 1) / TileRows;", "tile += here / TileRows;"),
            ("an expert starts where the one before does", "first[e] = row;\n", "first[e] = 0u;\n"),
        ),
    }.items()
    for name, old, new in faults
)  # fmt: skip

# What no case can see, with the reason; by `Mutation.id`.
ESCAPES: tuple[tuple[str, str], ...] = ()
