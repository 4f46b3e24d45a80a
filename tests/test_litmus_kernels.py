"""The kernels that run litmus tests on a card do so: they compile for it, and the simulator runs them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from gpu.litmus_kernels import ENTRY, LANES, source
from jitmx import arch
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.toolchain import nvrtc
from litmus import program
from litmus_ptx import UNSET, shape
from litmus_shapes import TABLE
from ptx_model import judge

OPTIONS = nvrtc.options(arch.parse("sm_90a"))
# With no race in any execution, so that the simulator has nothing to say; blocks, clusters, atomics, guards, barriers.
CALM = {
    **{name: TABLE[name].program for name in (
        "IRIW fence.sc", "SB fence.sc in a cluster", "atomicity of cas", "CoRR in a block", "LB guards",
    )},
    "barrier": program("st.weak [x], 1; bar.sync; ld.weak r0, [y]", "st.weak [y], 2; bar.sync; ld.weak r1, [x]",
                       blocks=(0, 0)),
    "message": program("st.weak [x], 7; red.release.gpu.add [f], 1",
                       "ld.acquire.gpu r0, [f]; @r0=1 ld.weak r1, [x]; @r0=1 st.weak [y], r1",
                       blocks=(0, 1), final="y"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALM)
def test_the_kernel_of_a_litmus_test_runs_every_instance_on_words_of_its_own(name: str) -> None:
    made, (span, threads), groups, rounds, spread = CALM[name], shape(CALM[name]), 2, 3, 2
    assert not judge(made).racy
    tries = groups * rounds * LANES
    memory = Memory()
    words = memory.upload(np.zeros((len(made.locations), tries, spread), "u4"), "words", writable=True)
    results = memory.upload(np.full((max(len(made.registers), 1), tries), 99, "u4"), "results", writable=True)
    meeting = memory.upload(np.zeros((groups, 32), "u4"), "meeting", writable=True)
    arguments = struct.pack("3Q4I", words, results, meeting, rounds, spread, 0, 12345)
    ptx = nvrtc.compile_ptx(source(made), OPTIONS)
    simulate(ptx, (groups * span, 1, 1), (threads, 1, 1), arguments, memory, entry=ENTRY)
    assert (memory.download(meeting, "u4", (groups, 32))[:, 0] == rounds * len(made.threads)).all()
    found = memory.download(results, "u4", (max(len(made.registers), 1), tries))[: len(made.registers)]
    ends = memory.download(words, "u4", (len(made.locations), tries, spread))[:, :, 0]
    last = [ends[made.locations.index(item)] for item in made.final]
    kinds = {tuple(None if v == UNSET else v for v in kind) for kind in np.stack([*found, *last], 1).tolist()}
    assert kinds <= judge(made).outcomes


def test_every_operation_of_the_litmus_tests_compiles_for_the_card() -> None:
    """One source of all that differ: ptxas refuses what PTX has not."""
    by_operations = {
        frozenset(op.name for thread in row.program.threads for op in thread): row for row in TABLE.values()
    }
    known: set[str] = set()
    for operations, row in sorted(by_operations.items(), key=lambda item: -len(item[0])):
        if operations - known:
            known |= operations
            nvrtc.compile(source(row.program), OPTIONS)
