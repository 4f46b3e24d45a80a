"""Thread-block clusters: ranks, shared memory of other blocks, the barrier of a cluster, copies between blocks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from assembly import kernel, launch
from jitmx.errors import SimulationError
from jitmx.registry.arguments import Arguments, writes
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import TensorMap
from jitmx.sim.verify import run as run_case

SHARED = ".shared .align 128 .b8 tile[1024]; .shared .align 8 .b8 bar[16];"
SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
HEAD = """mov.u32 r0, %tid.x; mov.u32 r1, %cluster_ctarank; mov.u32 r2, %ctaid.x; mov.u32 r3, %ntid.x;
mad.lo.u32 r4, r2, r3, r0; mul.wide.u32 d0, r4, 4; add.s64 d0, d0, q0;
mov.u32 r5, tile; mov.u32 r6, bar; shl.b32 r7, r0, 2; add.u32 r8, r5, r7; setp.eq.u32 p0, r0, 0;
mov.u32 r9, %cluster_nctarank; add.u32 r10, r1, 1; rem.u32 r10, r10, r9;
"""
NEXT = "mapa.shared::cluster.u32 r12, r8, r10;\n"  # the thread's own word in the next block
OWN = "st.shared.u32 [r8], r4;\n"


def run(body: str, *, grid: int = 4, cluster: int = 4, block: int = 32) -> list[int]:
    memory = Memory()
    out = memory.allocate(4 * grid * block)
    launch(HEAD + body, [out], memory, grid=grid, block=block, cluster=cluster, declare=SHARED)
    values: list[int] = memory.download(out, "u4", (grid * block,)).tolist()
    return values


def shifted(grid: int, cluster: int, block: int = 32) -> list[int]:
    """What each thread finds in the next block of its cluster, where each has put its number in the grid."""
    blocks = [b // cluster * cluster + (b + 1) % cluster for b in range(grid)]
    return [b * block + t for b in blocks for t in range(block)]


@pytest.mark.parametrize(("grid", "cluster", "block"), [(4, 4, 32), (8, 2, 64), (16, 8, 32), (2, 1, 32), (32, 16, 40)])
def test_blocks_read_their_neighbours_after_the_barrier(grid: int, cluster: int, block: int) -> None:
    body = OWN + SYNC + NEXT + "ld.shared::cluster.u32 r20, [r12];\n" + SYNC + "st.global.u32 [d0], r20;"
    assert run(body, grid=grid, cluster=cluster, block=block) == shifted(grid, cluster, block)


def test_generic_addresses_reach_other_blocks() -> None:
    body = OWN + SYNC + "cvt.u64.u32 d1, r8; cvta.shared.u64 d1, d1; mapa.u64 d2, d1, r10;\n"
    body += "ld.u32 r20, [d2]; getctarank.u64 r21, d2; setp.ne.u32 p1, r21, r10; @p1 trap;\n"
    assert run(body + SYNC + "st.global.u32 [d0], r20;") == shifted(4, 4)


def test_vectors_and_atomics_reach_other_blocks() -> None:
    body = """mov.u32 r20, 0; st.shared.u32 [tile+512], r20; shl.b32 r21, r0, 4; add.u32 r21, r5, r21;
    setp.lt.u32 p1, r0, 8; """.replace("st.shared", "@p0 st.shared")
    body += SYNC + "mapa.shared::cluster.u32 r22, r21, r10; mapa.shared::cluster.u32 r23, r5, 0;\n"
    body += "@p1 st.shared::cluster.v4.u32 [r22], {r0, r1, r4, r3};\n"
    body += "atom.shared::cluster.add.u32 r24, [r23+512], r0; red.shared::cluster.cluster.add.u32 [r23+512], 1;\n"
    body += SYNC + "ld.shared.u32 r25, [tile+36]; ld.shared::cluster.u32 r26, [r23+512];\n"
    body += SYNC + "mad.lo.u32 r27, r25, 65536, r26; st.global.u32 [d0], r27;"
    total = 4 * (sum(range(32)) + 32)
    assert run(body) == [((b - 1) % 4) * 65536 + total for b in range(4) for _ in range(32)]


def test_ranks_and_sizes() -> None:
    listed = ("%cluster_ctarank", "%cluster_nctarank", "%clusterid.x", "%cluster_ctaid.x", "%cluster_nctaid.x",
              "%nclusterid.x", "%cluster_ctaid.y", "%cluster_nctaid.z")  # fmt: skip
    body = "mov.u32 r20, 0;\n" + "".join(f"mov.u32 r21, {name}; mad.lo.u32 r20, r20, 10, r21;\n" for name in listed)
    body += "mov.pred p1, %is_explicit_cluster; @p1 add.u32 r20, r20, 4;\nst.global.u32 [d0], r20;"
    want = [int(f"{b % 2}2{b // 2}{b % 2}2301") + 4 for b in range(6)]
    assert run(body, grid=6, cluster=2, block=1) == want
    assert run(body, grid=2, cluster=1, block=1) == [1001201, 1101201]


def test_the_kernel_may_require_its_cluster() -> None:
    body = HEAD + OWN + SYNC + NEXT + "ld.shared::cluster.u32 r20, [r12];\n" + SYNC + "st.global.u32 [d0], r20;"
    source = kernel(body, declare=SHARED).replace(")\n{", ")\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{", 1)
    memory = Memory()
    out = memory.allocate(4 * 64)
    simulate(source, (2, 1, 1), (32, 1, 1), out.to_bytes(8, "little"), memory)
    assert memory.download(out, "u4", (64,)).tolist() == shifted(2, 2)
    with pytest.raises(SimulationError, match="clusters of 4 blocks; the kernel requires 2"):
        simulate(source, (4, 1, 1), (32, 1, 1), out.to_bytes(8, "little"), memory, cluster=4)
    with pytest.raises(SimulationError, match="clusters of 2 blocks in a grid of 3"):
        simulate(source, (3, 1, 1), (32, 1, 1), out.to_bytes(8, "little"), memory)


def test_a_case_brings_its_cluster_and_scratch_memory() -> None:
    """Each block adds its neighbour's number to scratch memory, which is no output."""
    body = OWN + SYNC + NEXT + "ld.shared::cluster.u32 r20, [r12];\n" + SYNC + "red.global.add.u32 [q1], r20;\n"
    body += "st.global.u32 [d0], r20;"
    values = {"out": Buffer(np.zeros(128, "u4"), output=True), "counter": Buffer(np.zeros(1, "u4"), scratch=True)}
    case = Case("", Launch(4, cluster=4), values, lambda outputs: float((outputs[0] != shifted(4, 4)).sum()), 0)
    fields = Arguments("Fields", writes("out", "[128]"), writes("counter", "[1]"))
    variant: Any = SimpleNamespace(spec=SimpleNamespace(entry="k"), threads=32, arguments=fields, knobs=None)
    source = kernel(HEAD + body, 2, declare=SHARED)
    assert run_case(case, variant, source)[0] == 0
    fixed = replace(case, values=values | {"counter": Buffer(np.zeros(1, "u4"))})
    with pytest.raises(SimulationError, match="read-only"):
        run_case(fixed, variant, source)


# Faults


def test_reading_another_block_without_the_barrier_is_a_race() -> None:
    body = OWN + "bar.sync 0;\n" + NEXT + "ld.shared::cluster.u32 r20, [r12];\n" + SYNC + "st.global.u32 [d0], r20;"
    with pytest.raises(SimulationError, match=r"reads shared memory at 0x400 of block 1, which thread 0 of"):
        run(body)


def test_writing_to_another_block_while_it_reads_is_a_race() -> None:
    body = OWN + SYNC + "ld.shared.u32 r20, [r8];\n" + NEXT + "st.shared::cluster.u32 [r12], r4;\n" + SYNC
    with pytest.raises(SimulationError, match=r"shared memory at 0x400 .*thread 0 of block \d has (read|written)"):
        run(body + "st.global.u32 [d0], r20;")
    apart = body.replace(NEXT, SYNC + NEXT)
    assert run(apart + "st.global.u32 [d0], r20;") == list(range(128))


def test_a_relaxed_arrival_orders_only_what_was_fenced() -> None:
    relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;\n"
    body = OWN + "{fence}" + relaxed + NEXT + "ld.shared::cluster.u32 r20, [r12];\n" + SYNC + "st.global.u32 [d0], r20;"
    assert run(body.replace("{fence}", "fence.acq_rel.cluster;\n")) == shifted(4, 4)
    with pytest.raises(SimulationError, match="nothing between them that orders the two"):
        run(body.replace("{fence}", ""))


def test_what_lies_between_arrival_and_wait_is_not_ordered() -> None:
    body = "barrier.cluster.arrive.aligned;\n" + OWN + "barrier.cluster.wait.aligned;\n" + NEXT
    body += "ld.shared::cluster.u32 r20, [r12];\n" + SYNC + "st.global.u32 [d0], r20;"
    with pytest.raises(SimulationError, match="nothing between them that orders the two"):
        run(body)


def test_a_block_that_ends_before_others_have_used_its_memory_is_an_error() -> None:
    body = OWN + SYNC + NEXT + "ld.shared::cluster.u32 r20, [r12];\nst.global.u32 [d0], r20;"
    with pytest.raises(SimulationError, match=r"uses shared memory of block \d, which (ends without|has ended)"):
        run(body)
    late = OWN + SYNC + "setp.eq.u32 p1, r1, 1; @p1 ret;\nadd.u32 r20, r0, 0;\n" + NEXT
    late += "$again: add.u32 r20, r20, 1; setp.lt.u32 p2, r20, 100; @p2 bra $again;\n"
    late += "ld.shared::cluster.u32 r20, [r12];\n"
    with pytest.raises(SimulationError, match="shared memory of block 1, which has ended"):
        run(late)


def test_a_relaxed_last_barrier_keeps_blocks_alive() -> None:
    relaxed = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;\n"
    body = OWN + SYNC + NEXT + "ld.shared::cluster.u32 r20, [r12];\nst.global.u32 [d0], r20;\n" + relaxed
    assert run(body) == shifted(4, 4)


def test_a_cluster_barrier_that_some_threads_never_reach_is_an_error() -> None:
    body = "setp.lt.u32 p2, r0, 32; setp.eq.and.u32 p1, r1, 2, p2; @p1 bra $other;\n" + SYNC
    body += "bra $end;\n$other: bar.sync 3, 64;\n$end:"
    with pytest.raises(
        SimulationError,
        match=r"threads 0-63 of block 0 wait at PTX line \d+ at the barrier of their cluster for threads 0-31 of block",
    ):
        run(body, block=64)


def test_threads_that_have_ended_count_as_arrived() -> None:
    body = "st.global.u32 [d0], r4; setp.ge.u32 p1, r0, 32; @p1 ret;\nbarrier.cluster.arrive; barrier.cluster.wait;\n"
    assert run(body, block=64) == list(range(256))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("barrier.cluster.arrive;\nbarrier.cluster.arrive;\n", "again without barrier.cluster.wait"),
        ("barrier.cluster.wait;\n", "without barrier.cluster.arrive before"),
        ("mapa.shared::cluster.u32 r20, r8, 4;\n", "rank 4 in a cluster of 4 blocks"),
        (NEXT + "ld.shared.u32 r20, [r12];\n", "reads 4 bytes of shared memory outside of it"),
        ("ld.shared::cluster.u32 r20, [r8+134217728];\n", "lies in no block of the cluster"),
        (NEXT + "ld.shared::cluster.u32 r20, [r12];\n", "4 bytes of shared memory at 0x400 of block 1, of which"),
        (NEXT + "ld.shared::cluster.u32 r20, [r12+65536];\n", "outside of it"),
    ],
)
def test_misuse_is_an_error(body: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        run(body)


# Asynchronous writes and mbarriers

START = "@p0 mbarrier.init.shared::cta.b64 [r6], {count}; @p0 fence.mbarrier_init.release.cluster;\n"
WAIT = "$w{n}: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p2, [r6], {n}; @!p2 bra $w{n};\n"
BAR = "mapa.shared::cluster.u32 r13, r6, r10;\n"
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;\n"
EXPECT = "@p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [r6], {bytes};\n"


def start(count: int = 1) -> str:
    return START.replace("{count}", str(count)) + RELAXED


def wait(phase: int = 0) -> str:
    return WAIT.replace("{n}", str(phase))


def test_st_async_brings_words_and_reports_them() -> None:
    body = start() + EXPECT.replace("{bytes}", "128") + NEXT + BAR
    body += "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [r12], r4, [r13];\n"
    body += wait() + "ld.shared.u32 r20, [r8]; st.global.u32 [d0], r20;\n"
    want = [(b - 1) % 4 * 32 + t for b in range(4) for t in range(32)]
    assert run(body) == want
    with pytest.raises(SimulationError, match=r"an asynchronous operation of block 3 has written|uninitialised"):
        run(body.replace(wait(), "barrier.cluster.arrive; barrier.cluster.wait;\n"))
    with pytest.raises(SimulationError, match="of a block other than that of the mbarrier"):
        run(body.replace(", [r13];", ", [r6];"))


def test_two_threads_that_send_to_one_word_are_an_error() -> None:
    body = start() + EXPECT.replace("{bytes}", "128") + BAR + "mapa.shared::cluster.u32 r12, r5, r10;\n"
    body += "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [r12], r4, [r13];\n"
    with pytest.raises(SimulationError, match=r"thread 1: writes 0x.*, as another thread does with it"):
        run(body + wait())


@pytest.mark.parametrize(("form", "values", "words"), [
    ("b64", "d5", 2), ("v2.b32", "{r4, r3}", 2), ("v4.b32", "{r4, r3, r4, r3}", 4), ("v2.b64", "{d5, d5}", 4),
    ("f32", "r4", 1),
])  # fmt: skip
def test_forms_of_st_async(form: str, values: str, words: int) -> None:
    body = start() + EXPECT.replace("{bytes}", str(4 * words * 32)) + BAR + "mov.b64 d5, {r4, r3};\n"
    body += f"mad.lo.u32 r14, r0, {4 * words}, r5; mapa.shared::cluster.u32 r12, r14, r10;\n"
    body += f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{form} [r12], {values}, [r13];\n"
    body += wait() + f"ld.shared.u32 r20, [r14]; ld.shared.u32 r21, [r14+{4 * words - 4}];\n"
    body += "mad.lo.u32 r20, r20, 1000, r21; st.global.u32 [d0], r20;\n"
    sent = [(b - 1) % 4 * 32 + t for b in range(4) for t in range(32)]
    assert run(body) == [1000 * s + (32 if words > 1 else s) for s in sent]


def test_red_async_adds_what_all_blocks_send() -> None:
    body = "@p0 mov.u32 r20, 5; @p0 st.shared.u32 [tile], r20; @p0 fence.acq_rel.cluster;\n" + start()
    body += EXPECT.replace("{bytes}", "512") + "mov.u32 r15, 0;\n"
    body += """$send: mapa.shared::cluster.u32 r12, r5, r15; mapa.shared::cluster.u32 r13, r6, r15;
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [r12], r4, [r13];
    add.u32 r15, r15, 1; setp.lt.u32 p3, r15, 4; @p3 bra $send;\n"""
    body += wait() + "ld.shared.u32 r20, [tile]; st.global.u32 [d0], r20;\n"
    assert run(body) == [5 + sum(range(128))] * 128


def test_remote_arrivals_order_what_was_done_before() -> None:
    """Each block writes into the next and tells its mbarrier; the next reads after its wait."""
    body = start(32) + NEXT + BAR + "st.shared::cluster.u32 [r12], r4;\n"
    body += "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r13];\n" + wait()
    body += "ld.shared.u32 r20, [r8]; st.global.u32 [d0], r20;\n"
    assert run(body) == [(b - 1) % 4 * 32 + t for b in range(4) for t in range(32)]
    store = "st.shared::cluster.u32 [r12], r4;\n"
    early = body.replace(store, "").replace(wait(), store + wait())
    with pytest.raises(SimulationError, match=r"nothing between them that orders the two|uninitialised"):
        run(early)


def test_an_mbarrier_of_another_block_must_have_been_made_before() -> None:
    body = START.replace("{count}", "1") + "bar.sync 0;\n" + BAR
    body += "@p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r13];\n" + wait()
    with pytest.raises(SimulationError, match=r"uses the mbarrier at .*, which thread 0 initialised|no mbarrier"):
        run(body)


def test_a_block_must_wait_for_arrivals_at_its_mbarrier_before_it_ends() -> None:
    body = start(2) + BAR + "@p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r13];\nst.global.u32 [d0], r4;"
    with pytest.raises(SimulationError, match=r"uses shared memory of block \d, which (ends without|has ended)"):
        run(body)


# Bulk copies

BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def bulk(body: str, data: np.ndarray, grid: int = 4) -> list[int]:
    memory = Memory()
    out = memory.allocate(4 * grid * 32)
    source = memory.upload(data)
    launch(HEAD + body, [out, source], memory, grid=grid, cluster=grid, declare=SHARED)
    values: list[int] = memory.download(out, "u4", (grid * 32,)).tolist()
    return values


READ = "ld.shared.u32 r20, [r8]; st.global.u32 [d0], r20;\n"


def test_a_bulk_copy_may_go_to_another_block() -> None:
    data = np.arange(128, dtype="u4") * 3
    body = start() + EXPECT.replace("{bytes}", "128") + BAR + "mapa.shared::cluster.u32 r12, r5, r10;\n"
    body += "mul.wide.u32 d1, r1, 128; add.s64 d1, d1, q1;\n@p0 " + BULK + " [r12], [d1], 128, [r13];\n" + wait() + READ
    assert bulk(body, data) == [3 * ((b - 1) % 4 * 32 + t) for b in range(4) for t in range(32)]


def test_multicast_brings_a_part_from_each_block_to_all() -> None:
    data = np.arange(32, dtype="u4") + 7
    body = start() + EXPECT.replace("{bytes}", "128") + "mad.lo.u32 r12, r1, 32, r5; mov.u16 h0, 15;\n"
    body += "mul.wide.u32 d1, r1, 32; add.s64 d1, d1, q1;\n"
    body += "@p0 " + BULK + ".multicast::cluster [r12], [d1], 32, [r6], h0;\n"
    assert bulk(body + wait() + READ, data) == list(range(7, 39)) * 4
    with pytest.raises(SimulationError, match="a copy to the blocks 0x1f of a cluster of 4"):
        bulk(body.replace("h0, 15", "h0, 31") + wait() + READ, data)
    with pytest.raises(SimulationError, match=r"nothing between them that orders the two|uninitialised"):
        bulk(body + READ + wait(), data)


def test_a_tensor_copy_may_go_to_several_blocks() -> None:
    """Block 1 of 4 sends a box to blocks 0, 1 and 3; block 2 waits for nothing."""
    data = np.arange(64, dtype="u4").reshape(8, 8)
    memory = Memory()
    out = memory.allocate(4 * 128)
    box = TensorMap(memory.upload(data), 4, (8, 8), (32,), (8, 4))
    where = memory.upload(np.frombuffer(box.encode(), np.uint8))
    body = start() + "setp.eq.u32 p3, r1, 2; st.shared.u32 [r8+512], r4; @p3 bra $end;\n"
    body += EXPECT.replace("{bytes}", "128") + "setp.eq.and.u32 p4, r1, 1, p0; mov.u16 h0, 11; mov.u32 r15, 2;\n"
    body += "@p4 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
    body += "[r5], [q1, {r17, r15}], [r6], h0;\n" + wait() + "$end:\n" + SYNC
    body += "@p3 add.u32 r8, r8, 512;\n" + READ
    launch(HEAD + "mov.u32 r17, 0;\n" + body, [out, where], memory, grid=4, cluster=4, declare=SHARED)
    got = memory.download(out, "u4", (4, 32))
    np.testing.assert_array_equal(got[[0, 1, 3]], np.tile(np.arange(16, 48), (3, 1)))
    np.testing.assert_array_equal(got[2], 64 + np.arange(32))


def test_a_copy_from_shared_memory_to_another_block() -> None:
    body = start() + EXPECT.replace("{bytes}", "128") + BAR + "mapa.shared::cluster.u32 r12, r5, r10;\n"
    body += "st.shared.u32 [r8+512], r4; {fence} bar.sync 0;\nadd.u32 r14, r5, 512;\n"
    body += "@p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [r12], [r14], 128, [r13];\n"
    body += wait() + READ
    want = [(b - 1) % 4 * 32 + t for b in range(4) for t in range(32)]
    assert run(body.replace("{fence}", "fence.proxy.async.shared::cta;")) == want
    with pytest.raises(SimulationError, match="through the asynchronous proxy"):
        run(body.replace("{fence}", ""))
