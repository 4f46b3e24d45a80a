"""Instructions that change no value run, and only those that are known."""

from __future__ import annotations

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
cp.async.bulk.prefetch.L2.global [%out], 64;
createpolicy.fractional.L2::evict_first.b64 %x1, 0f3f800000;
setmaxnreg.inc.sync.aligned.u32 240;
st.global.L2::cache_hint.u32 [%out], 5, %x1;
"""


def run(body: str) -> int:
    memory = Memory()
    out = memory.allocate(4, "out")
    text = (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out)\n{\n"
        ".reg .pred %p<2>;\n.reg .b32 %r<4>;\n.reg .b64 %x<4>;\n.reg .b64 %out;\n"
        "ld.param.u64 %out, [out];\nmov.u32 %r1, %tid.x;\nsetp.ne.u32 %p1, %r1, 0;\n"
        + body.replace("st.global", "@!%p1 st.global")
        + "ret;\n}\n"
    )
    simulate(text, (1, 1, 1), (128, 1, 1), struct.pack("<Q", out), memory)
    return int(memory.download(out, np.uint32, (1,))[0])


def test_hints_change_no_value() -> None:
    assert run(HINTS) == 5


@pytest.mark.parametrize("text", ["fence.someday;", "griddepcontrol.hurry;", "prefetch.global.L9 [%out];"])
def test_an_unknown_hint_is_named(text: str) -> None:
    with pytest.raises(SimulationError, match=text.split(".")[0]):
        run(text + "\n")


@pytest.mark.parametrize("count", [16, 250, 264])
def test_a_register_count_that_hardware_lacks_is_an_error(count: int) -> None:
    with pytest.raises(SimulationError, match=f"setmaxnreg.* {count} registers"):
        run(f"setmaxnreg.dec.sync.aligned.u32 {count};\n")
