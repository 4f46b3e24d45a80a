"""Instructions that change no value run, and only those that are known."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

from jitmx.errors import SimulationError
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory

HINTS = """
fence.acq_rel.gpu;
fence.proxy.async;
fence.proxy.async.shared::cta;
fence.mbarrier_init.release.cluster;
membar.gl;
griddepcontrol.launch_dependents;
griddepcontrol.wait;
prefetch.global.L2 [%out];
prefetch.tensormap [%out];
cp.async.bulk.prefetch.L2.global [%out], 16;
createpolicy.fractional.L2::evict_first.b64 %x1, 0f3f800000;
setmaxnreg.inc.sync.aligned.u32 240;
st.global.L2::cache_hint.u32 [%out], 5, %x1;
"""


def run(body: str, *, programmatic: bool = False) -> int:
    memory = Memory()
    out = memory.upload(np.zeros(4, np.uint32), "out", writable=True)
    text = kernel(body.replace("st.global", "@!%p1 st.global"))
    simulate(text, (1, 1, 1), (128, 1, 1), struct.pack("<Q", out), memory, programmatic=programmatic)
    return int(memory.download(out, np.uint32, (1,))[0])


def kernel(body: str) -> str:
    """A kernel of one parameter; %p1 is true but in thread 0."""
    return (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out)\n{\n"
        ".reg .pred %p<2>;\n.reg .b32 %r<4>;\n.reg .b64 %x<4>;\n.reg .b64 %out;\n"
        "ld.param.u64 %out, [out];\nmov.u32 %r1, %tid.x;\nsetp.ne.u32 %p1, %r1, 0;\n" + body + "ret;\n}\n"
    )


# Thread 0 stores; the others are of another warp or of its own.
STORES = "st.global.u32 [%out], 7;\n"
WAITS = "griddepcontrol.wait;\n"
OTHER_WARP_WAITS = "setp.gt.u32 %p0, %r1, 63;\n@%p0 griddepcontrol.wait;\n"


@pytest.mark.parametrize("body", [WAITS + STORES, OTHER_WARP_WAITS + "bar.sync 0;\n" + STORES])
def test_a_programmatic_launch_may_write_behind_a_wait_of_its_own_or_of_others(body: str) -> None:
    assert run(body, programmatic=True) == 7


@pytest.mark.parametrize("body", [STORES, STORES + WAITS, OTHER_WARP_WAITS + STORES, "bar.sync 0;\n" + STORES])
def test_a_programmatic_launch_must_not_write_before_it_waits(body: str) -> None:
    with pytest.raises(SimulationError, match=r"writes 4 bytes of global memory .* before griddepcontrol\.wait"):
        run(body, programmatic=True)
    assert run(body) == 7  # nothing is at work before a plain launch


@pytest.mark.parametrize("body", ["ld.global.u32 %r2, [%out];\n", "@!%p1 atom.global.add.u32 %r2, [%out], 1;\n"])
def test_a_programmatic_launch_must_not_use_scratch_memory_before_it_waits(body: str) -> None:
    def launch(body: str, *, early: bool = False) -> None:
        memory = Memory()
        out = memory.upload(np.zeros(1, np.uint32), "counter", writable=True, early=early)
        simulate(kernel(body), (1, 1, 1), (128, 1, 1), struct.pack("<Q", out), memory, programmatic=True)

    launch(WAITS + body)
    launch(body + WAITS, early=True)  # of kernels before the previous one
    with pytest.raises(SimulationError, match=r"before griddepcontrol\.wait"):
        launch(body)


def test_hints_change_no_value() -> None:
    assert run(HINTS) == 5


@pytest.mark.parametrize("policy", ["%x2", "1360862806018621440"])
def test_a_cache_policy_is_one_that_createpolicy_made(policy: str) -> None:
    made = "mov.b64 %x2, 1;\ncreatepolicy.fractional.L2::evict_last.b64 %x1, 0f3f800000;\n"
    with pytest.raises(SimulationError, match=r"thread 0: its cache policy is none that createpolicy made"):
        run(made + f"st.global.L2::cache_hint.u32 [%out], 5, {policy};\n")


@pytest.mark.parametrize("text", ["fence.someday;", "griddepcontrol.hurry;", "prefetch.global.L9 [%out];"])
def test_an_unknown_hint_is_named(text: str) -> None:
    with pytest.raises(SimulationError, match=text.split(".")[0]):
        run(text + "\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fence.mbarrier_init.relaxed.cluster;", "mbarrier_init with .release.cluster alone"),
        ("fence.mbarrier_init.release.cta;", "mbarrier_init with .release.cluster alone"),
        ("fence.relaxed.gpu;", "fence.relaxed is no order"),
        ("fence.acq_rel;", "no scope"),
        ("fence.acq_rel.cta.gpu;", "cta, gpu"),
        ("membar.release.gl;", "membar.cta, .gl and .sys"),
        ("ld.release.gpu.global.u32 %r2, [%out];", "ld.release is no order"),
        ("ld.acquire.global.u32 %r2, [%out];", "no scope"),
        ("ld.relaxed.gpu.global.nc.u32 %r2, [%out];", "nc and .relaxed"),
        ("st.acquire.gpu.global.u32 [%out], 7;", "st.acquire is no order"),
        ("red.acquire.gpu.global.add.u32 [%out], 7;", "red.acquire is no order"),
        ("atom.sc.gpu.global.add.u32 %r2, [%out], 7;", "atom.sc is no order"),
    ],
)
def test_orders_that_ptxas_refuses_are_refused(text: str, why: str) -> None:
    with pytest.raises(SimulationError, match=re.escape(why)):
        run(text)


@pytest.mark.parametrize("count", [16, 250, 264])
def test_a_register_count_that_hardware_lacks_is_an_error(count: int) -> None:
    with pytest.raises(SimulationError, match=f"setmaxnreg.* {count} registers"):
        run(f"setmaxnreg.dec.sync.aligned.u32 {count};\n")


def test_registers_that_no_warp_gives_back_are_waited_for_for_ever() -> None:
    takes = "setmaxnreg.inc.sync.aligned.u32 {};\n"
    gives = "setp.gt.u32 %p0, %r1, 63;\n@%p0 bra $taken;\nsetmaxnreg.dec.sync.aligned.u32 240;\nbra $on;\n$taken:\n"
    run(takes.format(248))
    run(gives + takes.format(256) + "$on:\n")
    with pytest.raises(SimulationError, match="ask for 32768 registers of 31744"):
        run(takes.format(256))
