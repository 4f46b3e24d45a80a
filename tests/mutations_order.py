"""Faults of memory order: orders and scopes too weak for what a kernel lets its blocks know (`mutation.py`)."""

from __future__ import annotations

from mutation import Mutation, variant

_STORED = dict.fromkeys(("bias", "residual"), True)

VARIANTS = {
    "order-gemv": variant("linear", "stream", "sm_90a", argmax=True),
    "order-tile": variant(
        "linear", "tile", "sm_121a", tile_n=32, tile_m=16, warps_n=2, warps_m=1, stages=3, split_k=2, **_STORED
    ),
    "order-tile-cluster": variant(
        "linear", "tile", "sm_90a", tile_n=32, tile_m=16, warps_n=1, warps_m=1, stages=3, split_k=2,
        exchange="cluster",
    ),
    "order-scaled": variant(
        "linear", "scaled", "sm_121a", encoding="nibble", activation="mxfp4", atom="mxf4", split_k=2
    ),
    "order-steps": variant("linear", "wgmma", "sm_90a", groups=2, tile_m=48, ring=2, stages=2, schedule="stream_k"),
    "order-rest": variant(
        "linear", "wgmma", "sm_90a", groups=2, tile_m=48, ring=2, stages=2, split_k=2, schedule="hybrid", **_STORED
    ),
    "order-image": variant("linear", "wgmma", "sm_90a", groups=2, tile_m=48, ring=2, stages=2, x="image"),
    "order-pair": variant("linear", "wgmma", "sm_90a", groups=2, tile_m=64, ring=2, stages=2, split_k=2),
    "order-decode": variant("moe", "decode", "sm_90a", teams=2, inputs=9),
    "order-stream": variant("moe", "stream", "sm_90a"),
    "order-stream-counters": variant("moe", "stream", "sm_90a", handshake="counters"),
    "order-route": variant("routing", "route", "sm_121a", bias="bias_bf16", splits=16, cluster=False, depth=2),
    "order-many": variant("routing", "many", "sm_90a", tokens=256, splits=4, stages=4),
}  # fmt: skip

_ACQUIRE = (
    ("what is polled is not acquired", "ld.acquire.gpu.global.u32", "ld.relaxed.gpu.global.u32"),
    ("what is polled is acquired for the block", "ld.acquire.gpu.global.u32", "ld.acquire.cta.global.u32"),
    ("what is polled is a plain load", "ld.acquire.gpu.global.u32", "ld.volatile.global.u32"),
)
_RELEASE = (
    ("what is counted is not released", "red.release.gpu.global.add", "red.relaxed.gpu.global.add"),
    ("what is counted is released to the block", "red.release.gpu.global.add", "red.release.cta.global.add"),
)
_COUNTER = tuple(
    (f"the last arrival is told by .{order}", "atom.acq_rel.gpu.global.inc", f"atom.{order}.global.inc")
    for order in ("relaxed.gpu", "acquire.gpu", "release.gpu", "acq_rel.cta")
)
_CLUSTER = (
    ("what the cluster is to know is not released", "barrier.cluster.arrive.release.aligned",
     "barrier.cluster.arrive.relaxed.aligned"),
)  # fmt: skip
_REMOTE = (
    ("another block's stage is freed for the own block", "mbarrier.arrive.release.cluster.shared::cluster",
     "mbarrier.arrive.release.cta.shared::cluster"),
    ("another block's stage is freed before it was read", "mbarrier.arrive.release.cluster.shared::cluster",
     "mbarrier.arrive.relaxed.cluster.shared::cluster"),
)  # fmt: skip
_POSTED = (
    ("values are posted to the block", "st.relaxed.gpu.global.u16", "st.relaxed.cta.global.u16"),
    ("values are posted by plain stores", "st.relaxed.gpu.global.u16", "st.global.u16"),
)
_LOOKED_FOR = (
    ("posted values are looked for in the block", "ld.relaxed.gpu.global.v4.b32", "ld.relaxed.cta.global.v4.b32"),
    ("posted values are looked for by plain loads", "ld.relaxed.gpu.global.v4.b32", "ld.global.v4.b32"),
)
_INITIALISED = (
    ("mbarriers are initialised in an order that there is not", "fence.mbarrier_init.release.cluster",
     "fence.mbarrier_init.relaxed.cluster"),
)  # fmt: skip
# Of what is read at once some may be there and some not.
_LACKING = (
    ("the first pair of a vector is not looked for", "((x | y | z | w) & 0x80008000u)", "((y | z | w) & 0x80008000u)"),
    ("the last pair of a vector is not looked for", "((x | y | z | w) & 0x80008000u)", "((x | y | z) & 0x80008000u)"),
    ("first values of pairs are not looked for", "((x | y | z | w) & 0x80008000u)", "((x | y | z | w) & 0x80000000u)"),
    ("last values of pairs are not looked for", "((x | y | z | w) & 0x80008000u)", "((x | y | z | w) & 0x00008000u)"),
    ("the last word of a vector is not looked for", " || v.z == 0u || v.w == 0u;", " || v.z == 0u;"),
    ("the first word of a vector is not looked for", "return v.x == 0u || v.y == 0u", "return v.y == 0u"),
)

_FAULTS = {
    "order-gemv": _COUNTER,
    "order-tile": _COUNTER,
    "order-tile-cluster": _CLUSTER,
    "order-scaled": _COUNTER,
    "order-steps": (*_ACQUIRE, *_RELEASE),
    "order-rest": (*_ACQUIRE, *_RELEASE),
    "order-image": (*_ACQUIRE, *_RELEASE),
    "order-pair": _REMOTE,
    "order-decode": (*_ACQUIRE, *_RELEASE, *_COUNTER),
    "order-stream": (*_POSTED, *_LOOKED_FOR, *_LACKING, *_INITIALISED),
    "order-stream-counters": (*_ACQUIRE, *_RELEASE),
    "order-route": _COUNTER,
    "order-many": _CLUSTER,
}
MUTATIONS = tuple(Mutation(where, VARIANTS[where], *fault) for where, faults in _FAULTS.items() for fault in faults)

ESCAPES: tuple[tuple[str, str], ...] = ()
