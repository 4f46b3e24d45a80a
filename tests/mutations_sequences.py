"""Faults that show between launches: what one leaves to the next, and what runs beside it (`mutation.py`)."""

from __future__ import annotations

from typing import Any

from mutation import catalogue, variant

_WGMMA: dict[str, Any] = {"groups": 2, "tile_m": 48, "ring": 2, "stages": 2}
_LAYER: dict[str, Any] = {"hidden_blocks": 5, "inner_blocks": 3, "warps": 4, "chunk": 2, "stages": 2, "unroll": 1}
_PRODUCT: dict[str, Any] = {"tile_m": 128, "grain": 16, "tile_n": 128, "stages": 2, "depth": 2}

VARIANTS = {
    "then-tile": variant(
        "linear", "tile", "sm_121a", tile_n=32, tile_m=16, warps_n=2, warps_m=1, stages=3, split_k=2, bias=True,
        residual=True,
    ),
    "then-scaled": variant(
        "linear", "scaled", "sm_121a", encoding="nibble", activation="mxfp8", atom="mxf8f6f4", split_k=2
    ),
    "then-argmax": variant("linear", "stream", "sm_90a", m=16, warps=3, split_k=1, unroll=1, argmax=True, bias=True),
    "then-gemv": variant(
        "linear", "gemv", "sm_121a", m=2, engine="fma", encoding="nibble", warps=4, split_k=2, stages=2, stage_x=False,
        chunk=1, unroll=1, blocks_per_sm=1,
    ),
    "then-image": variant("linear", "wgmma", "sm_90a", **_WGMMA, x="image"),
    "then-steps": variant("linear", "wgmma", "sm_90a", **_WGMMA, schedule="stream_k"),
    "then-rest": variant("linear", "wgmma", "sm_90a", **_WGMMA, split_k=2, schedule="hybrid", residual=True),
    "then-splitk": variant(
        "linear", "splitk", "sm_90a", groups=2, tile_m=16, chunk=2, ring=2, split_k=2, residual=True
    ),
    "then-decode": variant("moe", "decode", "sm_90a", columns=2, teams=2, inputs=9),
    "then-data": variant("moe", "stream", "sm_90a", residual=True),
    "then-counters": variant("moe", "stream", "sm_90a", handshake="counters"),
    "then-token": variant("moe", "token", "sm_90a", **_LAYER, top=3),
    "then-gather": variant("moe", "gather", "sm_90a", tile_m=128),
    "then-up": variant("moe", "wgmma", "sm_90a", product="up", **_PRODUCT),
    "then-down": variant("moe", "wgmma", "sm_90a", product="down", **_PRODUCT),
    "then-grouped-up": variant("moe", "grouped", "sm_121a", product="up"),
    "then-grouped-down": variant("moe", "grouped", "sm_121a", product="down"),
    "then-combine": variant("moe", "combine", "sm_90a", residual=True),
    "then-route": variant(
        "routing", "route", "sm_121a", experts=32, k=4, tile=64, splits=4, cluster=False, depth=2, parts=2
    ),
    "then-topk": variant("routing", "topk", "sm_90a", experts=60, k=4, dtype="fp32", warps=4),
    "then-sort": variant("routing", "sort", "sm_90a", experts=100, k=2, tile=8),
    "then-quantize": variant("quantize", "quantize", "sm_90a", block=128, vectors=1),
}  # fmt: skip

_WAIT = "  wait_for_previous();\n"

MUTATIONS = catalogue(VARIANTS, {
    "then-tile": (
        ("a counter does not start again", "bool arrive_last(u32* counter, u32 blocks) {\n"
         "  return increment_acq_rel(counter, blocks) == blocks - 1u;",
         "bool arrive_last(u32* counter, u32 blocks) {\n"
         "  return increment_acq_rel(counter, 1u << 30) == blocks - 1u;"),
        ("a counter starts again an arrival late", "return increment_acq_rel(counter, blocks) == blocks - 1u;",
         "return increment_acq_rel(counter, blocks + 1u) == blocks - 1u;"),
        ("the wait is gone", _WAIT, ""),
        ("X is asked for before the wait",
         _WAIT + "#pragma unroll\n  for (int stage = 0; stage < kStages - 1; ++stage) fetch_x(stage);",
         "#pragma unroll\n  for (int stage = 0; stage < kStages - 1; ++stage) fetch_x(stage);\n" + _WAIT),
        ("only one warp waits", _WAIT, "  if (threadIdx.x < 32) wait_for_previous();\n"),
    ),
    "then-scaled": (
        ("a counter starts again an arrival late", "return increment_acq_rel(counter, blocks) == blocks - 1u;",
         "return increment_acq_rel(counter, blocks + 1u) == blocks - 1u;"),
        ("a counter goes on", "return increment_acq_rel(counter, blocks) == blocks - 1u;",
         "return increment_acq_rel(counter, ~0u) == blocks - 1u;"),
        ("the first tile of W is behind the wait, and X before it", _WAIT, ""),
    ),
    "then-argmax": (
        ("ranks stay", "atomicExch(ranks + lane, 0ull)", "atomicMax(ranks + lane, 0ull)"),
        ("the rank of the first row alone is cleared", "atomicExch(ranks + lane, 0ull)",
         "(lane == 0 ? atomicExch(ranks + lane, 0ull) : atomicMax(ranks + lane, 0ull))"),
        ("the counter goes on", "return increment_acq_rel(counter, blocks) == blocks - 1u;",
         "return increment_acq_rel(counter, 1u << 30) == blocks - 1u;"),
        ("ranks are cleared to one that is not the lowest", "atomicExch(ranks + lane, 0ull)",
         "atomicExch(ranks + lane, ~0ull)"),
        ("the wait is gone", _WAIT, ""),
    ),
    "then-gemv": (
        ("the wait is gone", _WAIT, ""),
        ("a warp alone waits", _WAIT, "  if (threadIdx.x < 32) wait_for_previous();\n"),
    ),
    "then-image": (
        ("counters of spans stay", "done_[1 + i] = 0u;", ";"),
        ("the counter of the last span stays", "i < tiles_ * kSpans; ++i) done_",
         "i < tiles_ * kSpans - 1; ++i) done_"),
        ("counters of the first tile alone are cleared", "i < tiles_ * kSpans; ++i) done_", "i < kSpans; ++i) done_"),
        ("warps that multiply do not wait", "    wait_for_previous();\n#pragma unroll 1\n"
         "    for (int unit = slot; unit < first_units; unit += 2 * all)",
         "#pragma unroll 1\n    for (int unit = slot; unit < first_units; unit += 2 * all)"),
    ),
    "then-steps": (
        ("flags stay", "if (lane == 0) *place.there = 0u;", ""),
        ("a flag is cleared for the first piece alone", "if (lane == 0) *place.there = 0u;",
         "if (lane == 0 && number == Pieces::number() + 1) *place.there = 0u;"),
        ("a flag is cleared to another than none", "*place.there = 0u;", "*place.there = 2u;"),
    ),
    "then-rest": (
        ("counters go on", "if (lane == 0) arrive_last(counter, tiles.parts + kColumns);", ""),
        ("a counter starts again a column late", "arrive_last(counter, tiles.parts + kColumns)",
         "arrive_last(counter, tiles.parts + kColumns + 1)"),
        ("those who add up do not wait", "      wait_for_previous();\n      if (warp == kGroups * 4 + 1) count_rest",
         "      if (warp == kGroups * 4 + 1) count_rest"),
    ),
    "then-splitk": (
        ("copies of X are asked for before the wait",
         "    wait_for_previous();\n    if (elected())\n      for (int i = 0; i < first; ++i) copy(i, i);",
         "    if (elected())\n      for (int i = 0; i < first; ++i) copy(i, i);"),
    ),
    "then-decode": (
        ("h is taken a row of tiles early", "< u32(shape.rows13)) {}", "< u32(shape.rows13 - 1)) {}"),
        ("rows are announced again", "        made = 0;\n", ""),
        ("the count is of pairs", "ready[here.item], u32(made))", "ready[here.item], u32(made * columns))"),
        ("counters of items stay", "counters.ready[i] = 0u;", ";"),
        ("the first counter stays", "for (int i = lane; i < shared.items.count; i += 32) counters.ready",
         "for (int i = lane + 1; i < shared.items.count; i += 32) counters.ready"),
        ("the first block clears counters that others poll",
         "if (last)\n#pragma unroll 1\n    for (int i = lane; i < shared.items.count",
         "if (blockIdx.x == 0)\n#pragma unroll 1\n    for (int i = lane; i < shared.items.count"),
        ("blocks that are done are counted on", "last = arrive_last(&counters.done, gridDim.x);",
         "last = arrive_last(&counters.done, 1u << 30);"),
        ("the wait is gone", _WAIT, ""),
        ("items are found before the wait", _WAIT + "  find_items<kColumns, kThreads>(args, shared.items);",
         "  find_items<kColumns, kThreads>(args, shared.items);\n" + _WAIT),
    ),
    "then-data": (
        ("h of the launch before stays", "others[i] = Vec4{0u, 0u, 0u, 0u};", ";"),
        ("h of this launch is cleared, not that before", "hidden_of(args, shared.odd ^ 1u)",
         "hidden_of(args, shared.odd)"),
        ("a line of h stays", "i < hidden_values(args) / 8; i += gridDim.x",
         "i < hidden_values(args) / 8 - 8; i += gridDim.x"),
        ("the last vector of h stays", "i < hidden_values(args) / 8; i += gridDim.x",
         "i < hidden_values(args) / 8 - 1; i += gridDim.x"),
        ("sums stay", "          clear(from[s]);\n        }\n        if (shares[s])",
         "        }\n        if (shares[s])"),
        ("the second half of a sum stays", "          clear(from[s] + 4);\n", ""),
        ("h of the launch before stays where there are no items", "others[i] = Vec4{0u, 0u, 0u, 0u};",
         "if (items > 0) others[i] = Vec4{0u, 0u, 0u, 0u};"),
        ("blocks that have nothing to add clear nothing", "others[i] = Vec4{0u, 0u, 0u, 0u};",
         "if (!down.empty()) others[i] = Vec4{0u, 0u, 0u, 0u};"),
        ("h is cleared as far as that of this launch goes", "i < hidden_values(args) / 8; i += gridDim.x",
         "i < u32(shared.items.start[items] * args.intermediate) / 8u; i += gridDim.x"),
        ("turns are of one launch", "return increment_relaxed(turn, 2u * blocks) >= blocks;",
         "return increment_relaxed(turn, blocks) >= blocks;"),
        ("turns are of three launches", "return increment_relaxed(turn, 2u * blocks) >= blocks;",
         "return increment_relaxed(turn, 3u * blocks) >= blocks;"),
        ("the wait is gone", _WAIT, ""),
    ),
    "then-counters": (
        ("counters of items stay", "counters.ready[i] = 0u;", ";"),
        ("the counter of the last item stays",
         "for (int i = threadIdx.x; i < items; i += kThreads) counters.ready",
         "for (int i = threadIdx.x; i < items - 1; i += kThreads) counters.ready"),
        ("the generation does not advance", "add_release(&counters.generation, 1u);",
         "if (generation == 0u) add_release(&counters.generation, 1u);"),
        ("the generation is taken to go up for ever", "while (load_acquire(&counters.generation) == generation) {}",
         "while (load_acquire(&counters.generation) <= generation) {}"),
        ("blocks meet once in a lifetime", "if (arrive_last(&counters.done, gridDim.x))",
         "if (arrive_last(&counters.done, 1u << 30))"),
    ),
    "then-token": (
        ("h of the launch before stays", "others[i] = Vec4{0u, 0u, 0u, 0u};", ";"),
        ("h of this launch is cleared, not that before", "hidden_of(args, odd ^ 1u)", "hidden_of(args, odd)"),
        ("every second vector of h stays", "others[i] = Vec4{0u, 0u, 0u, 0u};",
         "if (i % 2u) others[i] = Vec4{0u, 0u, 0u, 0u};"),
        ("ends stay", "  store_relaxed(global_address(from), 0u);\n  return __uint_as_float(bits);",
         "  return __uint_as_float(bits);"),
        ("ends that are there early stay", "  while (bits == 0u) bits = posted(from);\n",
         "  if (bits != 0u) return __uint_as_float(bits);\n  while (bits == 0u) bits = posted(from);\n"),
        ("the end that was there early counts for every block", "          early = 0u;\n", ""),
        ("ends are those of the next block alone", "split.ends_elsewhere(block); ++block) {",
         "block == blockIdx.x + 1u && split.ends_elsewhere(block); ++block) {"),
        ("what is asked for early is another feature's", "early = posted(ends_of(args, blockIdx.x + 1u) + lane);",
         "early = posted(ends_of(args, blockIdx.x + 1u) + (lane ^ 1));"),
        ("a turn counts one block less", "take_turn(&static_cast<Counters*>(args.workspace)->turn, gridDim.x)",
         "take_turn(&static_cast<Counters*>(args.workspace)->turn, max(gridDim.x - 1u, 1u))"),
        ("both launches take one turn", "  if (thread == 0) shared.odd = turn;", "  if (thread == 0) shared.odd = 0u;"),
        ("the wait is gone", _WAIT, ""),
        ("the turn is taken before the wait", _WAIT,
         "  if (thread == 0) shared.odd = take_turn(&static_cast<Counters*>(args.workspace)->turn, 1u);\n" + _WAIT),
    ),
    "then-gather": (
        ("counters stay", "args.counters[threadIdx.x] = 0u;", ";"),
        ("the counter of the second product stays", "threadIdx.x < kTileCounters) args.counters",
         "threadIdx.x < 1) args.counters"),
        ("counters are cleared before the wait",
         "  wait_for_previous();\n  launch_dependents();\n"
         "  if (blockIdx.x == 0 && threadIdx.x < kTileCounters) args.counters[threadIdx.x] = 0u;",
         "  if (blockIdx.x == 0 && threadIdx.x < kTileCounters) args.counters[threadIdx.x] = 0u;\n"
         "  wait_for_previous();\n  launch_dependents();"),
        ("the schedule is read before the wait", _WAIT + "  launch_dependents();\n",
         "  if (args.schedule[0] == -7) return;\n" + _WAIT + "  launch_dependents();\n"),
    ),
    "then-up": (
        ("the second product is let begin before the wait", _WAIT + "  launch_dependents();",
         "  launch_dependents();\n" + _WAIT),
        ("the second product is let begin by a warp that has not waited", _WAIT + "  launch_dependents();",
         "  if (warp == 0) launch_dependents();\n" + _WAIT + "  launch_dependents();"),
        ("the wait is gone", _WAIT, ""),
        ("items are taken from the second product's counter", "args.counters + 0", "args.counters + 1"),
    ),
    "then-down": (
        ("the warp that copies h does not wait", "      wait_for_previous();\n", ""),
        ("h is copied before the wait", "      wait_for_previous();\n      if (lane == 0) produce(args, shared);",
         "      if (lane == 0) produce(args, shared);\n      wait_for_previous();"),
        ("items are taken from the first product's counter", "args.counters + 1", "args.counters + 0"),
    ),
    "then-grouped-up": (
        ("the second product is let begin before the wait", _WAIT + "  launch_dependents();",
         "  launch_dependents();\n" + _WAIT),
        ("the wait is gone", _WAIT, ""),
    ),
    "then-grouped-down": (
        ("a block without rows does not wait", "    wait_for_previous();\n    return;", "    return;"),
        ("h is asked for before the wait",
         _WAIT + "#pragma unroll\n  for (int stage = 0; stage < kStages - 1; ++stage) fetch_x(stage);",
         "#pragma unroll\n  for (int stage = 0; stage < kStages - 1; ++stage) fetch_x(stage);\n" + _WAIT),
    ),
    "then-combine": (
        ("the wait is gone", _WAIT, ""),
        ("ids are read before the wait", "  wait_for_previous();\n",
         "  if (args.ids[0] == -7) return;\n" + _WAIT),
    ),
    "then-route": (
        ("the wait is gone", _WAIT, ""),
        ("a warp alone waits", _WAIT, "  if (warp == 0) wait_for_previous();\n"),
        ("counters go on", "return increment_acq_rel(counter, blocks) == blocks - 1u;",
         "return increment_acq_rel(counter, 1u << 30) == blocks - 1u;"),
        ("tiles that are done are counted by one of their blocks more", "gridDim.x / kSplits);\n    __syncthreads();",
         "gridDim.x / kSplits + 1);\n    __syncthreads();"),
    ),
    "then-topk": (
        ("the wait is gone", _WAIT, ""),
        ("a logit is read before the wait", _WAIT, "  if (load(args.x, 0) == -7.f) return;\n" + _WAIT),
    ),
    "then-sort": (("ids are read before the wait", _WAIT, "  if (args.ids[0] == -7) return;\n" + _WAIT),),
    "then-quantize": (
        ("the wait is gone", _WAIT, ""),
        ("a vector is read before the wait", _WAIT, "  if (args.x[0].x == 7u) return;\n" + _WAIT),
        ("values are read as if no kernel had written them", '"ld.global.L1::no_allocate',
         '"ld.global.nc.L1::no_allocate'),
    ),
})  # fmt: skip

# What no case can see, with the reason; by `Mutation.id`.
ESCAPES: tuple[tuple[str, str], ...] = (
    ("then-image: the counter of the last span stays", "no case has so many steps of k that the last eighth has any"),
)
