"""Faults of `attention.decode`: what it fetches, weighs, merges and leaves for the next launch (`mutation.py`)."""

from __future__ import annotations

from typing import Any

from mutation import catalogue, variant

_SMALL: dict[str, Any] = {"warps": 2, "keys": 16, "stages": 2, "group": 4}

VARIANTS = {
    "attention-grid": variant(
        "attention", "decode", "sm_90a", reduction="global", sinks="sinks_fp32", windowed=True, **_SMALL
    ),
    "attention-cluster": variant(
        "attention", "decode", "sm_90a", reduction="cluster", parts=2, sinks="sinks_bf16", rope="neox", rotary=32,
        **_SMALL,
    ),
    "attention-tree": variant(
        "attention", "decode", "sm_121a", cache="e4m3", mask=32, windowed=True, rope="interleaved", rotary=24,
        page_size=48, **_SMALL,
    ),
    "attention-window": variant(
        "attention", "decode", "sm_121a", windowed=True, soft_cap=True, **_SMALL | {"stages": 3}
    ),
    "attention-four": variant("attention", "decode", "sm_121a", windowed=True, **_SMALL | {"stages": 4}),
    "attention-three": variant("attention", "decode", "sm_90a", **_SMALL | {"group": 3}),
    "attention-present": variant("attention", "decode", "sm_80", append=False, pdl=False, **_SMALL | {"keys": 32}),
    "attention-team": variant(
        "attention", "decode", "sm_120a", rows=64, reduction="global", sinks="sinks_bf16",
        **_SMALL | {"warps": 8, "keys": 64, "group": 8},
    ),
    "attention-split": variant(
        "attention", "decode", "sm_90a", rows=32, group_split=2, reduction="cluster", parts=2, rope="neox", rotary=64,
        cache="e4m3", **_SMALL | {"group": 8},
    ),
    "attention-tiles": variant(
        "attention", "decode", "sm_90a", rows=32, row_tiles=2, reduction="cluster", parts=2, rope="neox", rotary=64,
        windowed=True, **_SMALL | {"group": 8},
    ),
    "attention-parts": variant("attention", "decode", "sm_121a", reduction="cluster", parts=4, **_SMALL),
    "attention-ahead": variant(
        "attention", "decode", "sm_90a", rows=32, ahead=True, reduction="cluster", parts=2, **_SMALL | {"warps": 4}
    ),
    "attention-words": variant(
        "attention", "decode", "sm_121a", rows=64, mask=64, windowed=True, **_SMALL | {"group": 1, "warps": 4}
    ),
}  # fmt: skip

_JOIN = "merged.join(shared.sinks[row % kGroup]);"
_MASK = "bits &= __ldg(args.mask + (request.first + token) * 1LL + first / 32);"
_CAUSAL = "    if (token - first < 31) bits &= token < first ? 0u : (2u << (token - first)) - 1u;\n"
_CAPPED = "return cap * (1.0f - __fdividef(2.0f, exp2_fast(inner * s) + 1.0f));"
_LOW = " && (!kWindowed || token + key >= low[half]);"
_JOINED = (
    "column - kKeys, e);\n        const int key = column + lane % 4 * 2 + e;\n        return token + key < high[half]"
    + _LOW
)
_WAIT = "          copy_wait<kStages - 2>();"
_PART = "float* const to = partial_of(args, int(blockIdx.x), work.first) + row * kPitch;"
_QUOTIENT = "return finite ? fmaf(-off, inverse_, near) : near;"
_PAST = "    if (d >= Rotary) return;\n#pragma unroll\n    for (int i = 0; i < 4; ++i) {\n      const float a"

_FACTOR = "  const float factor = merged.factor(v_scale);\n"
_CUT_PAIR = "{ return __float_as_uint(a) >> 16 | (__float_as_uint(b) & 0xFFFF0000u); }"
_RESULTS_CUT = (
    "results are cut", _FACTOR,
    _FACTOR + "  struct T { static __device__ u32 round_pair(float a, float b) " + _CUT_PAIR + " };\n",
)  # fmt: skip
_WEIGHTS_CUT = (
    "weights are cut", "Product::round_pair(of[i % 2 * 2], of[i % 2 * 2 + 1]);",
    "[](float a, float b) " + _CUT_PAIR + "(of[i % 2 * 2], of[i % 2 * 2 + 1]);",
)  # fmt: skip
_HALVES_CUT = ("weights are cut", "cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32")

_GRID = (
    ("every block merges", "      if (shared.last) {", "      if (true) {"),
    ("nobody is told to merge but by a plain store", "      __syncthreads();\n      if (shared.last) {",
     "      if (shared.last) {"),
    ("one arrival too few is waited for", "work.first, u32(parts));", "work.first, u32(parts - 1));"),
    ("one arrival too many is waited for", "work.first, u32(parts));", "work.first, u32(parts + 1));"),
    ("the counter is not reset", "atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;",
     "atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"),
    *((f"the last arrival is told by .{order}", "atom.acq_rel.gpu.global.inc", f"atom.{order}.global.inc")
      for order in ("relaxed.gpu", "acquire.gpu", "release.gpu", "acq_rel.cta")),
    ("a block arrives before it has written",
     "    __syncthreads();  // partial results of the block are written, and its rings are free\n", ""),
    ("a block has one place for two partial results", "(u64(block) * 2u + (block == first))", "(u64(block) * 2u)"),
    ("the last part is left out", "const int parts = work.last - work.first + 1;",
     "const int parts = work.last - work.first;"),
    ("a block goes on past its end", "work.end = min(end_ - own, rounds);", "work.end = rounds;"),
    ("heads share the rounds of the first", "work.begin = at_ - own;", "work.begin = at_ - before_;"),
    ("the sink counts twice", _JOIN, _JOIN + _JOIN),
    ("the sink counts in each part", _PART, _JOIN + "\n        " + _PART),
    ("the sink is of base 2", "(args.sinks) + head) * kLog2E;", "(args.sinks) + head);"),
    ("all KV heads have the sinks of the first", "sink_of(args, work.head * kGroup + thread) : 0.0f;",
     "sink_of(args, thread) : 0.0f;"),
    ("nothing is waited for", "      wait_for_previous();\n      launch", "      launch"),
    ("a block with nothing to do ends without a wait", "  if (!waited) wait_for_previous();\n", ""),
    ("requests that are left to another launch are taken", "|| request.queries > MostQueries ? 0 :", "? 0 :"),
    ("what was merged before is not scaled",
     "      scale(exp2_fast(before - base));\n#pragma unroll\n      for (int j = 0; j < AtOnce",
     "#pragma unroll\n      for (int j = 0; j < AtOnce"),
)  # fmt: skip

_CLUSTER = (
    _RESULTS_CUT,
    _WEIGHTS_CUT,
    ("the mailbox is read before all is there", "    mbarrier_wait(arrived, 0u);\n", ""),
    ("fewer bytes are expected", "* kPitch * 4));", "* kPitch * 4 - 16));"),
    ("others' barriers are taken for ready", "    cluster_wait();\n    cluster_met", "    cluster_met"),
    ("the barrier is not seen by the cluster", "      mbarrier_init_fence();\n", ""),
    ("rows go to the block of their part", "owner = row - place * owners.count;", "owner = int(rank);"),
    ("the reciprocal that divides rows is too small", "(0xFFFFu + count) / count", "0xFFFFu / count"),
    ("new tokens are weighed as old ones", "j < kOld ? old.values : fresh.values", "old.values"),
    ("a ring that has no old token has no step either", "steps_ = max(least, ", "steps_ = max(0, "),
    ("maximum and sum change places", "merged.most, merged.sum, 0.0f, 0.0f, barrier",
     "merged.sum, merged.most, 0.0f, 0.0f, barrier"),
    ("the other half is rotated the other way", "d < kHalf ? -1.0f : 1.0f", "d < kHalf ? 1.0f : -1.0f"),
    ("sines are read where cosines lie", "found.sin.load(table, at + kHalf);",
     "found.sin.load(table, at);"),
    ("what lies behind the rotary part is rotated", "    if (d >= Rotary) return;\n    const float sign",
     "    const float sign"),
    ("a position is one late", ": request.old + token;", ": request.old + token + 1;"),
    ("the base never follows", "kSlack = 8.0f;", "kSlack = 200.0f;"),
    ("new tokens go to heads that begin at 32 bits", "work.head * args.head_stride + task.d();",
     "int(work.head * args.head_stride) + task.d();"),
)  # fmt: skip

_TREE = (
    _RESULTS_CUT,
    _HALVES_CUT,
    ("the scale of keys is forgotten", "args.scale * k_scale, args.soft_cap", "args.scale, args.soft_cap"),
    ("the scale of values is forgotten", "const float factor = merged.factor(v_scale);",
     "const float factor = merged.factor(1.0f);"),
    ("the scale of the first head serves all", "args.v_scale + work.head * args.scale_stride", "args.v_scale"),
    ("each head has a scale, whatever their stride", "args.k_scale + work.head * args.scale_stride",
     "args.k_scale + work.head"),
    ("a position has 16 bits", ": request.old + token;", ": (request.old + token & 0xFFFF);"),
    ("a given position has 16 bits", "? __ldg(args.positions + request.first + token)",
     "? __ldg(args.positions + request.first + token) & 0xFFFF"),
    ("a slot has 16 bits", "return __ldg(args.slots + token);", "return __ldg(args.slots + token) << 48 >> 48;"),
    ("a NaN is kept as the largest number", "to_e4m3x2(scale(v.x[4 * i]), scale(v.x[4 * i + 1]))",
     "to_e4m3x2(fmaxf(fminf(scale(v.x[4 * i]), 448.f), -448.f), fmaxf(fminf(scale(v.x[4 * i + 1]), 448.f), -448.f))"),
    ("a request's pages begin at 32 bits", "args.block_table + work.request.index * args.table_stride),\n        ring_",
     "args.block_table + int(work.request.index * args.table_stride)),\n        ring_"),
    ("pages of new tokens begin at 32 bits", "work.request.index * args.table_stride + at / kPage",
     "int(work.request.index * args.table_stride) + at / kPage"),
    ("the first new token sees itself, whatever the mask", _MASK, _MASK[:-1] + " | (token == first ? 1u : 0u);"),
    ("E4M3 ends at 240", "to_e4m3x2(scale(v.x[4 * i]), scale(v.x[4 * i + 1]))",
     "to_e4m3x2(fminf(scale(v.x[4 * i]), 240.f), scale(v.x[4 * i + 1]))"),
    ("what is kept is not divided by the scale", "to_e4m3x2(scale(v.x[4 * i]), scale(v.x[4 * i + 1]))",
     "to_e4m3x2(v.x[4 * i], v.x[4 * i + 1])"),
    ("bytes of a pair of values change places", "m[2 * i + half], 0u, 0x3120)", "m[2 * i + half], 0u, 0x3102)"),
    ("a query beyond fp16 is infinite", "cvt.rn.satfinite.f16x2.f32", "cvt.rn.f16x2.f32"),
    ("words of q are those of the other rows", "row % 16 / 8 * 4;", "(row % 16 / 8 ^ 1) * 4;"),
    ("q is as keys lie", "words[2] = v.y;", "words[1] = v.y;"),
    ("bits of the mask are counted from above", _MASK, "bits &= __brev(" + _MASK[8:-1] + ");"),
    ("the mask is that of the first token", "__ldg(args.mask + (request.first + token)",
     "__ldg(args.mask + (request.first + 0)"),
    ("the mask does not count", _MASK, ""),
    ("bits of the mask behind the request's tokens count", "u32 bits = there < 32 ? (1u << there) - 1u : ~0u;",
     "u32 bits = ~0u;"),
    ("quotients are products with a reciprocal", _QUOTIENT, "return near;"),
    ("a quotient without end is no number", _QUOTIENT, "return fmaf(-off, inverse_, near);"),
    ("heads of the cache begin at 32 bits", "work.head * args.head_stride * Format::kBytes",
     "int(work.head * args.head_stride) * Format::kBytes"),
    ("all lanes have the bits of the first", "low[half]) >> lane % 4 * 2;", "low[half]);"),
    ("a window counts from the place in the request", "if (position_of(args, request, other) < low)",
     "if (request.old + other < low)"),
    ("neighbours turn the other way", "v.x[2 * i] = fmaf(-b,", "v.x[2 * i] = fmaf(b,"),
    ("what lies behind the rotary part is turned", _PAST, _PAST.replace("    if (d >= Rotary) return;\n", "")),
    ("the first token of all is not written", "if (task.slot >= 0) task.what", "if (task.slot > 0) task.what"),
    ("a token without a slot is written", "if (task.slot >= 0) task.what", "if (task.slot >= -1) task.what"),
    ("a page is as large as 16 tokens", "task.slot / kPage * args.block_stride + task.slot % kPage *",
     "task.slot / 16 * args.block_stride + task.slot % 16 *"),
)  # fmt: skip

_WINDOW = (
    ("requests that are left to another launch are taken", " && request.queries <= MostQueries;", ";"),
    ("a window is one token longer", "- args.window + 1;", "- args.window;"),
    ("a window is one token shorter", "- args.window + 1;", "- args.window + 2;"),
    ("a window begins a tile late", "max(found.old - window + 1, 0) / 16", "max(found.old - window + 17, 0) / 16"),
    ("the edge of a window is not masked", " || (kWindowed && token < lowest), seen", ", seen"),
    ("the end of the tokens is not masked", "token + kKeys > request.old || (kWindowed", "(kWindowed"),
    ("a slot is read before it is there", _WAIT, "          copy_wait<kStages>();"),
    ("a slot is filled that is not read yet", "slot == 0 ? kStages - 1 : slot - 1);", "slot);"),
    ("what is not there is fetched", "const int bytes = token + 16 * run + row < end_ ? 16 : 0;",
     "const int bytes = 16;"),
    ("the new token is read in the cache", "found.end = Append || found.old < 0 ? found.old : length;",
     "found.end = found.old < 0 ? found.old : length;"),
    ("new tokens do not see themselves", _CAUSAL, _CAUSAL.replace("2u <<", "1u <<")),
    ("new tokens see those behind", _CAUSAL, ""),
    ("rows that hold no new token are not cleared", "const int missing = (kNewKeys - queries_there) * Row::kVectors;",
     "const int missing = 0;"),
    ("powers of nothing are of NaN", "return most == minus_infinity() ? 0.0f : most;", "return most;"),
    ("a row that saw nothing is divided by 0", "return sum == 0.0f ? 0.0f : __fdividef(scale, sum);",
     "return __fdividef(scale, sum);"),
    ("logits go to half the cap", "const Logit logit(args.scale * k_scale, args.soft_cap)",
     "const Logit logit(args.scale * k_scale, args.soft_cap * 0.5f)"),
    ("the cap is a quotient of powers", _CAPPED,
     "const float e = exp2_fast(inner * s);\n    return cap * __fdividef(e - 1.0f, e + 1.0f);"),
    ("the window ends nowhere in the step that has new tokens", _JOINED, _JOINED.replace(_LOW, ";")),
    ("the cap is an approximate tanh", _CAPPED,
     'float y;\n    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(inner * s * 0.34657359f));\n    return cap * y;'),
    ("a tile that lacks its last token is seen whole", "token + kKeys > request.old || (kWindowed",
     "token + kKeys > request.old + 1 || (kWindowed"),
    ("a tile whose first token has left the window is seen whole", "(kWindowed && token < lowest)",
     "(kWindowed && token + 1 < lowest)"),
    ("the cap is of one side", _CAPPED,
     "return cap * fmaxf(1.0f - __fdividef(2.0f, exp2_fast(inner * s) + 1.0f), -0.5f);"),
    ("warps meet before they have written",
     "to[kD + 1] = sum;\n        }\n      }\n    }\n    __syncthreads();\n",
     "to[kD + 1] = sum;\n        }\n      }\n    }\n"),
    ("keys start from one with a logit of 0", "base[m][0] = base[m][1] = minus_infinity();",
     "base[m][0] = base[m][1] = 0.0f;"),
    ("rows of the output are as far apart as those of q", "token * args.out_stride", "token * args.q_stride"),
    ("rows of q are as far apart as those of the output", "token * args.q_stride", "token * args.out_stride"),
    ("new values are as far apart as new keys", "token * args.v_stride", "token * args.k_stride"),
    *((f"a row of {name} starts at 32 bits", f"token * args.{name}_stride", f"int(token * args.{name}_stride)")
      for name in ("q", "k", "v", "out")),
    ("pages are counted in 8 bits", "__ldg(pages_ + token / kPage)", "__ldg(pages_ + (token / kPage & 255))"),
    ("a page has 16 bits", "__ldg(pages_ + token / kPage)", "(__ldg(pages_ + token / kPage) & 0xFFFF)"),
    ("padding attends to its new tokens", "if (length < found.queries) found.old = -1;", ""),
)  # fmt: skip

_PRESENT = (
    ("padding attends to what is there", "  if (length < found.queries) found.old = -1;", "  "),
    ("a token sees the one behind it",
     "kAppend ? request.old : request.old + token + 1;",
     "kAppend ? request.old : request.old + token + 2;"),
    ("a token does not see itself", "high[half] = kAppend ? request.old : request.old + token + 1;",
     "high[half] = request.old + token;"),
    ("pages are found past the last token", "step < steps_ && token < end_ ?", "step < steps_ ?"),
    ("a page is taken for its neighbour", "token < end_ ? __ldg(pages_ + token / kPage) : 0;",
     "token < end_ ? __ldg(pages_ + (token + 16) / kPage) : 0;"),
    ("sums are not rescaled", "        sum[m][half] *= factors[m][half];\n", ""),
    ("values are not rescaled", "      state.scale(factors);\n", "      ;\n"),
    ("each step is the first", "    if (first)\n      state.begin", "    if (true)\n      state.begin"),
    ("the first base is a lane's own", "base[m][half] = of_quad(most[m][half]);", "base[m][half] = most[m][half];"),
    ("a base grows by a lane's own", "const float largest = of_quad(most[m][half]);",
     "const float largest = most[m][half];"),
    ("all steps of a product have the first operands of q", "a[i] = operands[t][step][i];",
     "a[i] = operands[t][0][i];"),
    ("lanes' sums are not added", "quad_sum(state.sum[half / 2][half % 2]);", "state.sum[half / 2][half % 2];"),
    ("queries are read before they are there", "    __syncthreads();\n\n    State state;", "\n    State state;"),
)  # fmt: skip

_PAGES = (
    "pages are found for the first steps alone", "    find(step + 1, page_);",
    "    if (step < kStages) find(step + 1, page_);",
)  # fmt: skip

_TEAM = (
    _PAGES,
    ("warps of a ring do not meet", "    barrier(u32(1 + ring), kTeam * 32u);", "    __syncwarp();"),
    ("rings share a barrier", "    barrier(u32(1 + ring), kTeam * 32u);", "    barrier(1u, kTeam * 32u);"),
    ("all warps take the first rows", "tile = warp % kTeam * (16 * kTiles);", "tile = warp % 2 * 16;"),
    ("rings have the same tokens", "(work.begin * kRings + warp / kTeam) * kKeys", "(work.begin * kRings) * kKeys"),
    ("a team brings keys alone", "if (kTeam == 1 || is_value) copy_16_part", "if (kTeam == 1) copy_16_part"),
    ("runs of tokens are brought twice, others never", "member_ / 2 + j * kMembers;", "member_ / 2;"),
    ("copies of the others are not waited for", "        copy_wait<0>();\n      }\n      meet();\n",
     "        copy_wait<0>();\n      }\n"),
    ("the ring is written over while others read it", "    copy_wait<0>();\n    meet();", "    copy_wait<0>();"),
    ("a stage that is under way is begun again", "if (kStages > 1 && i > 0) stream", "if (kStages > 1) stream"),
    ("a stage ahead of the others is begun", "stream.start(i + kStages - 1, slot == 0 ? kStages - 1 : slot - 1);",
     "stream.start(i + kStages - 1, slot);"),
    ("results of one ring are merged", "all[e].add<kD, kRingsAtOnce>(of_ring, 0, 1, kRings,",
     "all[e].add<kD, kRingsAtOnce>(of_ring, 0, 1, 1,"),
    ("warps whose rows end before do not bring tokens", "const bool is_value = member_ % 2 != 0;",
     "const bool is_value = member_ % 2 != 0; if (member_ * 16 >= 8) { copy_commit(); return; }"),
)  # fmt: skip

_TILES = (
    ("both tiles have the queries of the first", "Format::Queries::load(rows, tile + 16 * t,",
     "Format::Queries::load(rows, tile,"),
    ("both tiles have the weights of the first", "state.out[t][4 * pair + i], p[t][0]",
     "state.out[t][4 * pair + i], p[0][0]"),
    ("the second tile has the window of the first", "if (!seen(2 * t + e / 2,", "if (!seen(e / 2,"),
    ("rows of the second tile are those of the first", "state.out[half / 2][j][half % 2 * 2 + e]",
     "state.out[0][j][half % 2 * 2 + e]"),
    ("new tokens forget old ones", "stream.steps() == 1, true,", "true, true,"),
)  # fmt: skip
_SPLIT = (
    _RESULTS_CUT,
    _HALVES_CUT,
    ("rows of cosines are found in 32 bits", "u64(position) * Rotary + u32(d < kHalf",
     "u32(position) * Rotary + u32(d < kHalf"),
    ("rows 8 to 15 are left out whatever there is", "kGroup <= 8 && rows <= 8)", "kGroup <= 8 && rows <= 16)"),
    ("a part of the query heads has a KV head of its own", "(args.k_cache) + work.head / kSplit * args.head_stride",
     "(args.k_cache) + work.head * args.head_stride"),
    ("new keys are those of the next KV head", "args.k_stride + work.head / kSplit * kD",
     "args.k_stride + work.head * kD"),
    ("new values are those of the next KV head", "args.v_stride + work.head / kSplit * kD",
     "args.v_stride + work.head * kD"),
    ("all parts have the query heads of the first", "(work.head * kGroup + place.row % kGroup) * kD",
     "(work.head / kSplit * kSplit * kGroup + place.row % kGroup) * kD"),
    ("all parts write the output of the first", "const int head = work.head * kGroup + row % kGroup;",
     "const int head = work.head / kSplit * kSplit * kGroup + row % kGroup;"),
    ("no part but the last writes the cache", "slot >= 0 && work.head % kSplit == 0)",
     "slot >= 0 && work.head % kSplit == kSplit)"),
    ("new tokens go to the cache of the next head", "work.head / kSplit * args.head_stride + task.d();",
     "work.head * args.head_stride + task.d();"),
    ("blocks count KV heads alone", "args.window, 2, args.kv_heads * kSplit, shared.work)",
     "args.window, 2, args.kv_heads, shared.work)"),
    ("a part has the scale of the next KV head's keys", "args.k_scale + work.head / kSplit * args.scale_stride",
     "args.k_scale + work.head * args.scale_stride"),
    ("a part has the scale of the next KV head's values", "args.v_scale + work.head / kSplit * args.scale_stride",
     "args.v_scale + work.head * args.scale_stride"),
)  # fmt: skip

_PARTS = (
    _RESULTS_CUT,
    _WEIGHTS_CUT,
    ("a reciprocal divides by powers of two alone", "inverse((0xFFFFu + count) / count)", "inverse(0x10000u / count)"),
    ("all blocks wait for the rows of the first", "own.rows_of(rank) * own.count", "own.rows_of(0) * own.count"),
    ("results start from a key with a logit of 0", "float most = minus_infinity(), sum", "float most = 0.0f, sum"),
)  # fmt: skip
_WORDS = (
    ("new tokens behind the first 32 have the first word of the mask", "2LL + first / 32);", "2LL);"),
    ("32 new tokens are none", "there < 32 ? (1u << there) - 1u : ~0u", "(1u << (there & 31)) - 1u"),
    ("the last token of a word is in every window", "min(request.queries, first + 32)",
     "min(request.queries, first + 31)"),
)  # fmt: skip
_FREE = "operands.load({stream.keys(slot), stream.values(slot)}, lane);\n      meet();"
_AHEAD = (
    ("operands are read before they are there", "      copy_wait<kStages - 1>();\n", "      copy_wait<kStages>();\n"),
    ("operands are read before those of the others are there", "      copy_wait<kStages - 1>();\n      meet();\n",
     "      copy_wait<kStages - 1>();\n"),
    ("a slot is filled before all have read it", _FREE, _FREE.removesuffix("\n      meet();")),
    ("a step is brought twice", "stream.start(step + kStages, slot);", "stream.start(step + kStages - 1, slot);"),
    ("all steps have the operands of the first", "      bring(i + 1);\n", ""),
)  # fmt: skip
_FAULTS = {
    "attention-ahead": _AHEAD,
    "attention-grid": _GRID,
    "attention-cluster": _CLUSTER,
    "attention-four": (_PAGES,),
    "attention-tree": _TREE,
    "attention-window": _WINDOW,
    "attention-three": (("nine rows are eight", "rows <= 8)", "rows <= 9)"),),
    "attention-present": _PRESENT,
    "attention-team": _TEAM,
    "attention-split": _SPLIT,
    "attention-tiles": _TILES,
    "attention-parts": _PARTS,
    "attention-words": _WORDS,
}
MUTATIONS = catalogue(VARIANTS, _FAULTS)

# What escapes, and why.
ESCAPES: tuple[tuple[str, str], ...] = ()
