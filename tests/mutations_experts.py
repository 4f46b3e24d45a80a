"""Faults of experts' kernels where one lane arrives for its warp, which racecheck does not tell (`mutation.py`)."""

from __future__ import annotations

from mutation import catalogue, variant

VARIANTS = {
    "moe-decode": variant("moe", "decode", "sm_90a", teams=2, inputs=9),
    "moe-stream": variant("moe", "stream", "sm_90a"),
    "moe-wgmma": variant("moe", "wgmma", "sm_90a", product="down", tile_m=128, grain=16, tile_n=128, stages=2, depth=2),
}

MUTATIONS = catalogue(VARIANTS, {
    "moe-decode": (
        ("a lane arrives before its warp has stored", "acc.total();\n    __syncwarp();", "acc.total();"),
        ("slices are not awaited", "mbarrier_wait(shared_address(&shared.part_full[state.stage]), state.parity());",
         ""),
        ("a stage is free while lanes read its slices",
         "__syncwarp();\n    if (lane == 0) mbarrier_arrive(shared_address(&shared.part_empty[state.stage]));",
         "if (lane == 0) mbarrier_arrive(shared_address(&shared.part_empty[state.stage]));"),
        ("a slice is stored over one that is not read",
         "if (round > 0) mbarrier_wait(shared_address(&shared.part_empty[stage]), (round - 1) & 1);", ""),
        ("a stage is filled before its slices are taken",
         "    if (state.round > 0) "
         "mbarrier_wait(shared_address(&shared.part_full[state.stage]), (state.round - 1) & 1);\n", ""),
        ("a stage is free before lanes have read its bias",
         "    const float low = T::widen(shared.bias[state.parity()][state.stage][g]),\n"
         "        high = T::widen(shared.bias[state.parity()][state.stage][g + 8]);\n"
         "    __syncwarp();\n    if (lane == 0) mbarrier_arrive(shared_address(&shared.part_empty[state.stage]));\n",
         "    __syncwarp();\n    if (lane == 0) mbarrier_arrive(shared_address(&shared.part_empty[state.stage]));\n"
         "    const float low = T::widen(shared.bias[state.parity()][state.stage][g]),\n"
         "        high = T::widen(shared.bias[state.parity()][state.stage][g + 8]);\n"),
    ),
    "moe-stream": (
        ("a lane arrives before its warp has stored",
         "__syncwarp();\n        if (lane == 0) mbarrier_arrive(shared_address(&shared.head_full[kDown][warp]));",
         "if (lane == 0) mbarrier_arrive(shared_address(&shared.head_full[kDown][warp]));"),
        ("a warp's part of a row is not awaited",
         "mbarrier_wait(shared_address(&shared.head_full[kDown][w]), 0u);", ""),
        ("a zero of x is waited for", "if (kDown && source[i])", "if (source[i])"),
        ("a count below zero is some of many rows", "const int counted = routed.count ? min(max(*routed.count, 0),",
         "const int counted = routed.count ? min(*routed.count,"),
        ("a count below zero is some of few rows", "(routed.count ? min(max(*routed.count, 0),",
         "(routed.count ? min(*routed.count,"),
        ("a lane behind the last is the first", "for (int i = 0; i < entries; ++i) {\n    const int other",
         "for (int i = 0; i <= entries; ++i) {\n    const int other"),
        ("an item behind the last is the first", "for (int i = 0; i < entries; ++i) item",
         "for (int i = 0; i <= entries; ++i) item"),
        ("every warp finds items", "if (threadIdx.x < 32) {\n    const int lane = threadIdx.x;",
         "if (threadIdx.x < 64) {\n    const int lane = threadIdx.x;"),
    ),
    "moe-wgmma": (
        ("a warpgroup meets where the other one does", "barrier(1 + group, 128);  // the buffer has been read",
         "barrier(2 + group, 128);  // the buffer has been read"),
        ("a warpgroup meets where the other one did", "barrier(1 + group, 128);\n", "barrier(0 + group, 128);\n"),
        ("an item is written while lanes read the one before it",
         "    __syncwarp();\n    if (lane == 0) mbarrier_arrive(shared_address(shared.done + turn.stage));",
         "    if (lane == 0) mbarrier_arrive(shared_address(shared.done + turn.stage));"),
        ("an item is written over one that is not done",
         "      mbarrier_wait(shared_address(shared.done + last.stage), last.parity());\n", ""),
        ("an item is done for a warp before its sums are stored",
         "    store(args, sums, item, item.count, shared.y[warp / 4], warp / 4);\n    __syncwarp();\n"
         "    if (lane == 0) mbarrier_arrive(shared_address(shared.done + turn.stage));",
         "    __syncwarp();\n    if (lane == 0) mbarrier_arrive(shared_address(shared.done + turn.stage));\n"
         "    store(args, sums, item, item.count, shared.y[warp / 4], warp / 4);"),
        ("a stage is filled while lanes read their tiles",
         "    __syncwarp();\n    if (lane == 0) mbarrier_arrive(empty_", "    if (lane == 0) mbarrier_arrive(empty_"),
        ("a stage does not wait for scales", "kWarps * kDepth * (kTileBytes + kScaleBytes)",
         "kWarps * kDepth * kTileBytes"),
        ("a stage is read before it is full", "        ring.wait();\n        tile = ring.tile(0);",
         "        tile = ring.tile(0);"),
        ("a fragment is decoded over products under way", "      wgmma_wait<1>();\n      products.fence",
         "      products.fence"),
    ),
})  # fmt: skip

# What no case can see, with the reason; by `Mutation.id`.
ESCAPES: tuple[tuple[str, str], ...] = ()
