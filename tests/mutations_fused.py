"""Faults of both products of experts in one launch: items of the second are let go too early, or two take one."""

from __future__ import annotations

from mutation import catalogue, variant

_SMALL = {"tile_m": 64, "grain": 32, "tile_n": 128, "stages": 2, "depth": 2}
VARIANTS = {
    "moe-fused": variant("moe", "fused", "sm_90a", **_SMALL),
    "moe-gather-tiles": variant("moe", "gather", "sm_90a", tile_m=64, tile_counters=True),
}
_COUNTED = "    add_release(args.counters + kTileCounters + tile, 1u);\n"
_WAITED = "    mbarrier_wait(shared_address(shared.done + turn.stage), turn.parity());\n"
_KNOWN = "    mbarrier_arrive(shared_address(shared.done + turn.stage));\n    if (down) continue;\n"

MUTATIONS = catalogue(VARIANTS, {
    "moe-fused": (
        ("a warp has stored before its lanes have", "warp / 4);\n    __syncwarp();\n", "warp / 4);\n"),
        ("an item is counted before h is stored", _WAITED + _COUNTED, _COUNTED),
        ("an item is counted once the one before is stored", _WAITED + _COUNTED, _WAITED.replace("turn.parity()",
         "turn.parity() ^ 1u") + _COUNTED),
        ("a warp that counts may come a round late", _KNOWN, "    if (!down) mbarrier_arrive(shared_address(shared."
         "done + turn.stage));\n    if (down) continue;\n"),
        ("items of the second product are counted too", "    if (down) continue;\n", ""),
        ("what is stored is not released", '"red.release.gpu.global.add.u32 [%0], %1;"',
         '"red.relaxed.gpu.global.add.u32 [%0], %1;"'),
        ("what is stored is not acquired", '"ld.acquire.gpu.global.u32 %0, [%1];"',
         '"ld.relaxed.gpu.global.u32 %0, [%1];"'),
        ("what is stored is known to their cluster alone", '"red.release.gpu.global.add.u32 [%0], %1;"',
         '"red.release.cluster.global.add.u32 [%0], %1;"'),
        ("h is copied before the proxy of copies knows of it", "    if (down) async_proxy_fence();", "    "),
        ("an item fewer is waited for", "< u32(across13)) {}", "< u32(across13 - 1)) {}"),
        ("h of the tile before is waited for", "load_acquire(args.counters + kTileCounters + tile) <",
         "load_acquire(args.counters + kTileCounters + max(tile - 1, 0)) <"),
        ("h is not waited for", "    if (count > 0 && down)  // all", "    if (false)  // all"),
        ("two blocks take one item", "number = int(atomicAdd(args.counters + 0, 1u));",
         "number = int(*args.counters), *args.counters = u32(number + 1);"),
        ("counters are taken before they are cleared", "  wait_for_previous();\n  launch_dependents();",
         "  launch_dependents();"),
        ("weights of rows are those of the first product's items alone", "int i = down ? lane : kTokens;",
         "int i = down ? kTokens : lane;"),
        ("the counter of items is that of the first tile", "constexpr int kTileCounters = 2;",
         "constexpr int kTileCounters = 0;"),
        ("the first product reads W of the second", "down ? args.w2_codes_map : args.w13_codes_map;",
         "args.w2_codes_map;"),
        ("the second product reads scales of the first", "down ? args.w2_scales_map : args.w13_scales_map;",
         "args.w13_scales_map;"),
        ("the second product reads X", "static_cast<const u8*>(down ? args.h : args.x)",
         "static_cast<const u8*>(args.x)"),
        ("the second product has the bias of the first", "static_cast<const u16*>(down ? args.b2 : args.b13)",
         "static_cast<const u16*>(args.b13)"),
        ("the second product has as many rows of W as the first", "const int n = down ? args.hidden : 2 * "
         "args.intermediate, k =", "const int n = 2 * args.intermediate, k ="),
        ("W of the second product lies as W of the first", "const int n = down ? args.hidden : 2 * "
         "args.intermediate;", "const int n = 2 * args.intermediate;"),
        ("the second product has as many steps as the first", "k = down ? args.intermediate : args.hidden;",
         "k = args.hidden;"),
        ("the last tile that is used has no items", "return tiles - __ffs(int(some)) + 1;",
         "return tiles - __ffs(int(some));"),
        ("a tile that is not used has items", "return tiles - __ffs(int(some)) + 1;",
         "return tiles - __ffs(int(some)) + 2;"),
        ("of tiles the last 32 alone are looked at", "for (; tiles > 0; tiles -= 32) {", "if (tiles > 0) {"),
        ("an item that ends the block says more than that", "    if (count == 0) return;\n    const int steps",
         "    const int steps"),
        ("items of the second product begin a row of W early", "items13 = tiles * across13,",
         "items13 = tiles * across13 - 1,"),
        ("rows of y start at 32 bits", "u64(item.place[chunk + row]) * args.hidden",
         "u64(u32(item.place[chunk + row]) * args.hidden)"),
        ("rows of h lie where those of X do", "static_cast<const u8*>(down ? args.h : args.x) + item.rows.line(0, ",
         "static_cast<const u8*>(down ? args.h : args.x) + u32(item.rows.line(0, 0)) + kLineBytes * ("),
        ("items of the second product are stored as those of the first", "    if (down)\n      store_output",
         "    if (false)\n      store_output"),
    ),
    "moe-gather-tiles": (
        ("no tile's counter is cleared", "blockIdx.x % kSpans == 0 && threadIdx.x == 0", "false"),
        ("counters of tiles lie over that of items", "args.counters[kTileCounters + blockIdx.x / kSpans] = 0u;",
         "args.counters[blockIdx.x / kSpans] = 0u;"),
        ("a tile's counter is that of its first block", "args.counters[kTileCounters + blockIdx.x / kSpans] = 0u;",
         "args.counters[kTileCounters + blockIdx.x] = 0u;"),
    ),
})  # fmt: skip
ESCAPES = ()
