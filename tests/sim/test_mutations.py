"""Faults planted in real kernels: the simulator and the kernels' own cases catch them (`mutation.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from mutation import Mutation, fault, source, variant

_SMALL: dict[str, Any] = {"chunk": 1, "unroll": 1, "blocks_per_sm": 1}
_STREAMING: dict[str, Any] = {"stages": 2, "warps": 2, "split_k": 1} | _SMALL

VARIANTS = {
    "mma-bulk": variant("linear", "gemv", "sm_90a", m=2, bias=True, **_STREAMING | {"chunk": 2}),
    "mma-async": variant(
        "linear", "gemv", "sm_80", m=2, dtype="fp16", encoding="nibble", copy="async", pdl=False, **_STREAMING
    ),
    "mma-split": variant(
        "linear", "gemv", "sm_90a", m=2, warps=8, split_k=8, scale_range="full", encoding="nibble", **_SMALL
    ),
    "fma-bulk": variant(
        "linear", "gemv", "sm_121a", m=2, engine="fma", encoding="nibble", bias=True,
        warps=4, split_k=2, stages=2, stage_x=False, **_SMALL,
    ),
    "fma-async": variant(
        "linear", "gemv", "sm_90a", m=1, engine="fma", dtype="fp16", scale_range="full", copy="async",
        **_STREAMING | {"stages": 3},
    ),
    "quantize-mxfp4": variant("quantize", "quantize", "sm_90a", block=128, vectors=1),
    "quantize-mxfp4-fp32": variant("quantize", "quantize", "sm_80", dtype="fp32", block=128, vectors=2, pdl=False),
    "quantize-mxfp6": variant(
        "quantize", "quantize", "sm_90a", format="mxfp6e2m3", dtype="fp16", scale_rule="ceil", block=128, vectors=1
    ),
    "quantize-mxfp8": variant(
        "quantize", "quantize", "sm_90a", format="mxfp8", scale_rule="even", block=128, vectors=1
    ),
    "dequantize-mxfp4": variant("quantize", "dequantize", "sm_90a", block=128, vectors=1),
    "dequantize-mxfp6": variant(
        "quantize", "dequantize", "sm_121a", format="mxfp6e3m2", dtype="fp32", block=128, vectors=1
    ),
    "dequantize-mxfp8": variant(
        "quantize", "dequantize", "sm_80", format="mxfp8", dtype="fp16", block=128, vectors=2, pdl=False
    ),
    "read": variant("bandwidth", "read", "sm_90a", block=128, unroll=2),
    "stream-cluster": variant(
        "linear", "stream", "sm_90a", scaling="bare", warps=4, split_k=2, cluster=2, unroll=1, predecode=1
    ),
    "moe-decode": variant("moe", "decode", "sm_90a", teams=2, inputs=9),
}  # fmt: skip


MUTATIONS = tuple(
    Mutation(where, VARIANTS[where], name, old, new)
    for where, faults in {
        "mma-bulk": (
            ("the wait for a chunk is gone", "stream.wait(stage, round);", ""),
            ("the wait has the other parity", "round & 1)", "~round & 1)"),
            ("the round is never counted", "++round;", ""),
            ("the round is counted twice", "++round;", "round += 2;"),
            ("the ring is a stage short", "if (++stage == kStages)", "if (++stage == kStages - 1)"),
            ("the ring is a stage long", "if (++stage == kStages)", "if (++stage == kStages + 1)"),
            ("a stage too few is filled", "i < kStages; ++i) stream.fetch(i)", "i < kStages - 1; ++i) stream.fetch(i)"),
            ("fewer bytes are expected than come", "tiles * (kTileBytes + kScaleBytes))", "tiles * kTileBytes)"),
            ("more bytes are expected than come", "tiles * (kTileBytes + kScaleBytes))",
             "kChunk * (kTileBytes + kScaleBytes) + 16)"),
            ("two arrivals are awaited", "mbarrier_init(full_ + 8 * i, 1)", "mbarrier_init(full_ + 8 * i, 2)"),
            ("the last chunk is copied whole", "const int tiles = min(left_, kChunk);", "const int tiles = kChunk;"),
            ("initialised mbarriers are not fenced", "mbarrier_init_fence();\n    }", "}"),
            ("warps share a ring", "Stream stream(args, shared.ring[warp]", "Stream stream(args, shared.ring[0]"),
            ("warps share an mbarrier", "shared.full[warp],", "shared.full[0],"),
            ("a chunk is read from the wrong stage", "shared.ring[warp] + stage * kChunkBytes;", "shared.ring[warp];"),
            ("scales land on codes", "to + kChunk * kTileBytes, scales_", "to + kTileBytes, scales_"),
            ("no chunk follows the first ones", "stream.fetch(stage);", ""),
            ("the ragged tile of k is dropped", "(args.k + 63) / 64;", "args.k / 64;"),
            ("the ragged tile of n is dropped", "(args.n + 15) / 16;", "args.n / 16;"),
            ("the ragged last chunk is consumed whole", "if (base + kChunk <= length)", "if (true)"),
            ("a stage is filled while lanes read it", "__syncwarp();\n      stream.fetch(stage);",
             "stream.fetch(stage);"),
            ("every lane copies", "if (lane_ == 0) {\n        const u32 barrier", "{\n        const u32 barrier"),
            ("mbarriers of stages overlap", "const u32 barrier = full_ + 8 * stage;",
             "const u32 barrier = full_ + 4 * stage;"),
            ("X is read before its copies end", "copy_wait<0>();\n", ""),
            ("X is read before the other warps' copies end", "__syncthreads();\n  const auto activation",
             "const auto activation"),
            ("the tail of X is read", "(inside ? (u64)m * filled + from + v : 0), inside);",
             "((u64)m * filled + from + v), true);"),
            ("X is guarded one vector too late", "from + v < filled;", "from + v <= filled;"),
            ("X has the pitch of a padded row in memory", "(u64)m * filled + from", "(u64)m * (filled + 4) + from"),
            ("rows of X past the last are read", "min(g, args.rows - 1)", "g"),
            ("the last row of X is dropped", "min(g, args.rows - 1)", "max(min(g, args.rows - 2), 0)"),
            ("the tail of n is not masked", "n < args.n && m < args.rows", "m < args.rows"),
            ("the tail of rows is not masked", "n < args.n && m < args.rows", "n < args.n"),
            ("the tail of n is masked one too late", "n < args.n && m", "n <= args.n && m"),
            ("bias is shifted by one", "(args.bias)[n]", "(args.bias)[n + 1]"),
            ("bias is dropped", "value += T::widen(static_cast<const u16*>(args.bias)[n]);", ""),
            ("Y is shifted by one", "args.n + n] =", "args.n + n + 1] ="),
            ("accumulators start anywhere", "float sum_[2][4] = {};", "float sum_[2][4];"),
            ("one chain is never added", "sum_[0][i] += sum_[1][i];", "sum_[0][i] += 0.f;"),
            ("lanes take g for t", "g = lane / 4, t = lane % 4;", "t = lane / 4, g = lane % 4;"),
            ("a lane reads its neighbour's codes", "[i * 32 + lane];", "[i * 32 + (lane ^ 1)];"),
            ("scale bytes of both rows are swapped", "folded_scale<I>(scales)", "folded_scale<I ^ 1>(scales)"),
            ("scales are shifted by a bit", "* 128u + 126u", "* 64u + 126u"),
            ("scales have the wrong bias", "126u * 0x00800080u", "125u * 0x00800080u"),
            ("signs of pair 1 are dropped", "p[1] = (w << 3) & (m | kSigns);\n    p[2] = merge(w << 1, kSigns, w << 6",
             "p[1] = (w << 3) & m;\n    p[2] = merge(w << 1, kSigns, w << 6"),
            ("the operands of an MMA are swapped", "x.z, x.w);", "x.w, x.z);"),
            ("scales are read from the next group", "[i * 8 + g];", "[i * 8 + (g ^ 1)];"),
            ("a worker skips its first row", "int row = int((long long)tile_rows * worker / workers);",
             "int row = int((long long)tile_rows * worker / workers) + 1;"),
            ("a worker does its neighbour's first row", "(worker + 1) / workers);", "(worker + 1) / workers) + 1;"),
            ("shared memory of X overlaps", "tiles_k * 8 + kPad;", "tiles_k * 8 - kPad;"),
        ),
        "mma-async": (
            ("one group too many may be under way", "copy_wait<kStages - 1>();", "copy_wait<kStages>();"),
            ("lanes do not await each other's copies", "copy_wait<kStages - 1>();\n    __syncwarp();",
             "copy_wait<kStages - 1>();"),
            ("a stage is filled while lanes read it", "__syncwarp();\n      stream.fetch(stage);",
             "stream.fetch(stage);"),
            ("copies are never committed", "    copy_commit();\n  }\n\n  // Waits", "  }\n\n  // Waits"),
            ("scales are copied by too few lanes", "if (i * 2 + lane_ < tiles * 2)", "if (i * 2 + lane_ < tiles)"),
            ("scales are copied by too many lanes", "if (i * 2 + lane_ < tiles * 2)", "if (i * 2 + lane_ < tiles * 4)"),
            ("copies are shifted by a lane",
             "to + i * kTileBytes + lane_ * 16,", "to + i * kTileBytes + lane_ * 16 + 16,"),
            ("copies are misaligned", "to + i * kTileBytes + lane_ * 16,", "to + i * kTileBytes + lane_ * 8,"),
            ("a chunk starts a tile late", "codes_ + ((u64)tile_ + i) *", "codes_ + ((u64)tile_ + i + 1) *"),
            ("a nibble is shifted wrongly", "w << 8, kSigns, w << 5, m", "w << 8, kSigns, w << 6, m"),
            ("sign and magnitude overlap",
             "p[3] = merge(w, kSigns, w >> 3, m);", "p[3] = merge(w, kSigns, w >> 3, ~0u);"),
            ("odd scale indices are off by a bit", "bytes >> 1 :", "bytes >> 2 :"),
            ("the scales of high rows are the low ones'", "high_scale = scale<I + 2>(scales);",
             "high_scale = scale<I>(scales);"),
            ("fields are restored wrongly", "restore = 0x74007400u", "restore = 0x78007800u"),
        ),
        "mma-split": (
            ("the barrier of a group is gone", "barrier(1 + group, kSplitK * 32);", ""),
            ("the barrier awaits fewer threads", "barrier(1 + group, kSplitK * 32);",
             "barrier(1 + group, kSplitK * 32 - 32);"),
            ("the barrier awaits more threads", "barrier(1 + group, kSplitK * 32);",
             "barrier(1 + group, kSplitK * 32 + 32);"),
            ("one warp misses the barrier", "barrier(1 + group, kSplitK * 32);",
             "if (part) barrier(1 + group, kSplitK * 32);"),
            ("partial sums have one buffer", "parity ^= 1;", ""),
            ("one slice is never added", "p < kSplitK; ++p)", "p < kSplitK - 1; ++p)"),
            ("slices overlap", "const int first = tiles_k * part / kSplitK;",
             "const int first = max(tiles_k * part / kSplitK - 1, 0);"),
            ("the sum starts anywhere", "float value = 0.f;", "float value;"),
            ("X is read before the other lanes' copies end", "copy_wait<0>();\n  __syncwarp();", "copy_wait<0>();"),
            ("the NaN scale is a number", "bits == 0x7F800000u ? 0x7FFFFFFFu : bits", "bits"),
            ("the accumulator of a block starts anywhere", "float d[4] = {};", "float d[4];"),
            ("rows and columns of partial sums are swapped",
             "store(j % 16, j / 16, value);", "store(j / 2, j % 2, value);"),
            ("the last partial sum is left out", "j < 16 * kM; j +=", "j < 16 * kM - 1; j +="),
        ),
        "fma-bulk": (
            ("a warp overtakes its initialised mbarriers", "mbarrier_init_fence();\n    }\n    __syncwarp();",
             "mbarrier_init_fence();\n    }"),
            ("both groups share one barrier", "barrier(1 + group,", "barrier(1,"),
            ("the shuffle has the wrong distance", "__shfl_xor_sync(0xFFFFFFFFu, value, 2);",
             "__shfl_xor_sync(0xFFFFFFFFu, value, 4);"),
            ("a shuffle is left out", "value += __shfl_xor_sync(0xFFFFFFFFu, value, 1);", ""),
            ("the tail of X in memory is read", "return v < filled ?", "return true ?"),
            ("rows of X past the last are read", "min(m, args.rows - 1)", "m"),
            ("the wrong lane stores", "if (m % 4 != t) continue;", "if (m % 4 != t + 1) continue;"),
            ("halves of a pair are swapped", "fmaf(T::low(a[i]), T::low(pair[i]), d0)",
             "fmaf(T::low(a[i]), T::high(pair[i]), d0)"),
            ("accumulators start anywhere", "float sum_[kM][2] = {};", "float sum_[kM][2];"),
            ("slices of X start at the first", "const int v = (first + tile) * 8", "const int v = tile * 8"),
            ("nibbles lose their signs", "p[2] = merge(w << 4, kSigns, w >> 2, m);", "p[2] = (w >> 2) & m;"),
        ),
        "fma-async": (
            ("one group too many may be under way", "copy_wait<kStages - 1>();", "copy_wait<kStages>();"),
            ("a stage is filled while lanes read it", "__syncwarp();\n      stream.fetch(stage);",
             "stream.fetch(stage);"),
            ("rows of tiles are not skipped to", "tile_ += skip_;", "tile_ += 1;"),
            ("a row too many is fetched", "rows_(length > 0 ? row_end - row : 0)",
             "rows_(length > 0 ? row_end - row + 1 : 0)"),
            ("a row too few is fetched", "rows_(length > 0 ? row_end - row : 0)",
             "rows_(length > 0 ? row_end - row - 1 : 0)"),
            ("low rows take the scale of high ones",
             "fmaf(low_scale, d0, sum_[m][0])", "fmaf(high_scale, d0, sum_[m][0])"),
            ("the tail of n is not masked", "n < args.n && m < args.rows", "m < args.rows"),
        ),
        "quantize-mxfp4": (
            ("the tail of vectors is stored", "if (Whole || threadIdx.x + i * 128 < count) {", "{"),
            ("the tail of vectors is loaded", "Whole || threadIdx.x + i * 128 < count ? load_once", "true ? load_once"),
            ("one vector is not stored", "if (Whole || threadIdx.x + i * 128 < count) {",
             "if (Whole || threadIdx.x + i * 128 + 1 < count) {"),
            ("a part is taken for the whole", "args.vectors - first >= kBlockVectors",
             "args.vectors - first + 4 >= kBlockVectors"),
            ("the maximum leaves out a lane", "largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2)",
             "largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1)"),
            ("the maximum crosses blocks", "largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1)",
             "largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 4)"),
            ("signs enter the maximum", "__vmaxu2(p.x & 0x7FFF7FFFu,", "__vmaxu2(p.x,"),
            ("NaN has no scale of its own", "bits >= 0x7F800000u ? 255u : bits == 0u", "bits == 0u"),
            ("zero has no scale of its own", "bits == 0u ? 127u : byte", "byte"),
            ("codes under the NaN scale are kept", "scale == 255u ? 0u : word", "word"),
            ("scales of small blocks wrap", "max(exponent - 2, 0)", "exponent - 2"),
            ("ties go up", "multiply(magnitudes, multiplier)", "multiply(magnitudes + kBoth, multiplier)"),
            ("the steepest line is left out", "for (int binade = 0;", "for (int binade = 1;"),
            ("the flattest line is left out", "binade < 3;", "binade < 2;"),
            ("lines start a code late", "binade * 2u)", "binade * 2u + 1u)"),
            ("lines are too steep", "u32(127 + 1 - binade)", "u32(128 + 1 - binade)"),
            ("saturation is a step low", "(k128 + 7u)", "(k128 + 6u)"),
            ("saturation is gone", "(k128 + 7u)", "(k128 + 15u)"),
            ("signs are dropped", " + ((values[j] & 0x80008000u) >> 12)", ""),
            ("signs lie a bit low", "& 0x80008000u) >> 12", "& 0x80008000u) >> 13"),
            ("signs enter the codes", "encode_pair(values[j] & 0x7FFF7FFFu,", "encode_pair(values[j],"),
            ("nibbles are swapped", "0x5410) | __byte_perm(first, second, 0x7632)",
             "0x7632) | __byte_perm(first, second, 0x5410)"),
            ("the multiplier is off by a bit", "(254u - scale)", "(253u - scale)"),
            ("one half of a pair is not scaled", "* 0x00800080u;", "* 0x00800000u;"),
            ("scales are stored one place on", "scales[i * 32] =", "scales[i * 32 + 1] ="),
            ("every second scale is not stored", "if (threadIdx.x % 4 == 0)", "if (threadIdx.x % 8 == 0)"),
            ("the grid does not wait for the previous kernel", "  wait_for_previous();\n", ""),
        ),
        "quantize-mxfp4-fp32": (
            ("the maximum starts anywhere", "u32 largest = 0u;", "u32 largest;"),
            ("signs enter the maximum", "& 0x7FFFFFFFu);", ");"),
            ("saturation is gone", "fminf(magnitude, largest)", "magnitude"),
            ("ties go up", "((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift;\n    // Sub",
             "(1u << (kShift - 1))) >> kShift;\n    // Sub"),
            ("subnormals are taken for normal", "? subnormal : normal", "? normal : normal"),
            ("the second vector of 16 bytes is the first", "load_once(x + i * 256 + j)", "load_once(x + i * 256)"),
        ),
        "quantize-mxfp6": (
            ("the scale is rounded down", "(bits + 0x007FFFFFu) >> 23", "bits >> 23"),
            ("the scale is rounded up at powers of two", "(bits + 0x007FFFFFu) >> 23", "(bits + 0x00800000u) >> 23"),
            ("signs lie a bit low", "(__float_as_uint(x[j]) >> 31) << 5", "(__float_as_uint(x[j]) >> 31) << 4"),
            ("halves of a pair are swapped", "Fp16::high(pairs[i])", "Fp16::low(pairs[i])"),
        ),
        "quantize-mxfp8": (
            ("signs are dropped", "u32(pair) << 8 * (j % 4)", "(u32(pair) & 0x7F7Fu) << 8 * (j % 4)"),
            ("rounding of the scale is a bit off", "(1u << 19)", "(1u << 20)"),
            ("halves of a word are swapped", "(u64)words[1] << 32 | words[0]", "(u64)words[0] << 32 | words[1]"),
        ),
        "dequantize-mxfp4": (
            ("the tail of vectors is stored", "if (!Whole && v >= count) continue;", ""),
            ("the tail of codes is loaded", "Whole || v < count ? codes[v]", "true ? codes[v]"),
            ("the tail of scales is loaded", "Whole || v < count ? scales[v / 4] : 0u",
             "*(volatile const u8*)(scales + v / 4)"),
            ("scale 0 is zero", "bytes[i] == 0u ? 0x00400000u : bytes[i] == 255u", "bytes[i] == 255u"),
            ("scale 255 is infinite", "bytes[i] == 255u ? 0x7FFFFFFFu : bytes[i] << 23", "bytes[i] << 23"),
            ("the sign is dropped", "return code >> 3 & 1u ? -v : v;", "return v;"),
            ("the magnitude keeps its sign", "code & 7u", "code & 15u"),
            ("the two values of a pair are swapped", "T::round(x[2 * j]) | u32(T::round(x[2 * j + 1])) << 16",
             "T::round(x[2 * j + 1]) | u32(T::round(x[2 * j])) << 16"),
        ),
        "dequantize-mxfp6": (
            ("the second half is stored over the first", "y[2 * v + 1] =", "y[2 * v] ="),
            ("the exponent's bias is off by one", "u32(254 - Bias) << 23", "u32(255 - Bias) << 23"),
            ("scales come from the next block", "scales[v / 4] : 0u", "scales[v / 4 + 1] : 0u"),
        ),
        "dequantize-mxfp8": (
            ("NaN codes are numbers", "if (magnitude == 127u) v = bits_to_float(0x7FFFFFFFu);", ""),
            ("the second vector of a thread is the first", "codes[v] : Codes(0)", "codes[threadIdx.x] : Codes(0)"),
            ("blocks overlap", "(u64)blockIdx.x * kBlockVectors", "(u64)blockIdx.x * (kBlockVectors / 2)"),
        ),
        "read": (
            ("a round is begun without its last vector", "i + 1 * stride < args.vectors", "i < args.vectors"),
            ("the tail reads a vector too many", "i < args.vectors; i += stride", "i <= args.vectors; i += stride"),
            ("what is seen is not stored", "*args.sink = seen;", ";"),
            ("a word is left out", "seen ^= v.x ^ v.y ^ v.z ^ v.w;", "seen ^= v.y ^ v.z ^ v.w;"),
            ("vectors are misaligned", "load_stream(args.data + i);",
             "load_stream(reinterpret_cast<const Vec4*>(reinterpret_cast<const u32*>(args.data) + i));"),
        ),
        # Both hand sums over by one lane's arrival, which speaks for its warp behind the warp's barrier.
        "stream-cluster": (
            ("a lane arrives before its warp has stored", "__syncwarp();\n    if (owner == rank && elected())",
             "if (owner == rank && elected())"),
            ("every lane arrives", "if (owner == rank && elected()) mbarrier_arrive",
             "if (owner == rank) mbarrier_arrive"),
            ("sums are not awaited", "mbarrier_wait(arrived, 0);\n", ""),
            ("an arrival too few is awaited", "mbarrier_init(arrived, 1 + mine * kSplit)",
             "mbarrier_init(arrived, mine * kSplit)"),
        ),
        "moe-decode": (
            ("a lane arrives before its warp has stored", "acc.total();\n    __syncwarp();", "acc.total();"),
            ("slices are not awaited", "await(shared_address(&shared.part_full[stage]), round & 1);", ""),
            ("a stage is free while lanes read its slices",
             "__syncwarp();\n    if (lane == 0) signal(shared_address(&shared.part_empty[stage]));",
             "if (lane == 0) signal(shared_address(&shared.part_empty[stage]));"),
            ("a slice is stored over one that is not read",
             "if (round > 0) await(shared_address(&shared.part_empty[stage]), (round - 1) & 1);", ""),
        ),
    }.items()
    for name, old, new in faults
)  # fmt: skip

# What no case can see, with the reason; by `Mutation.id`.
KNOWN_ESCAPES: tuple[tuple[str, str], ...] = ()

_ESCAPED = {name for name, _ in KNOWN_ESCAPES}


@pytest.mark.parametrize("where", VARIANTS)
def test_without_a_fault_every_case_passes(where: str) -> None:
    assert fault(VARIANTS[where], source(VARIANTS[where])) is None


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.id not in _ESCAPED], ids=lambda m: m.id)
def test_a_planted_fault_is_caught(mutation: Mutation) -> None:
    said = mutation.fault()
    assert said is not None
    assert "not know" not in said, "the simulator lacks an instruction, which is no catch"


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.id in _ESCAPED], ids=lambda m: m.id)
def test_a_known_escape_is_still_one(mutation: Mutation) -> None:
    assert mutation.fault() is None, "it is caught now: take it off KNOWN_ESCAPES"


def test_there_are_many_mutations_and_few_escape() -> None:
    names = [mutation.id for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 60
    assert set(names) >= _ESCAPED, "an escape names no mutation"
    assert len(_ESCAPED) <= 0.05 * len(names)
