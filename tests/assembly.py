"""Small PTX kernels for tests of the simulator."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.launch import Report, simulate
from jitmx.sim.memory import Memory

Array = npt.NDArray[Any]

NAMES = "abcefg"


def kernel(body: str, parameters: int = 1, *, declare: str = "", target: str = "sm_90a") -> str:
    """A kernel `k` of 64-bit parameters %p0 …, with scratch registers: r0 … (32 bits), d0 … (64), h0 … (16), p0 … ."""
    listed = ", ".join(f".param .u64 k_{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 q{i}, [k_{i}];" for i in range(parameters))
    return f"""
.version 9.0
.target {target}
.address_size 64
{declare}
.visible .entry k({listed})
{{
.reg .pred p<16>;
.reg .b16 h<32>;
.reg .b32 r<64>;
.reg .b64 d<32>;
.reg .b64 q<{max(parameters, 1)}>;
{loads}
{body}
ret;
}}
"""


def launch(
    body: str,
    arguments: list[int],
    memory: Memory,
    *,
    grid: int | tuple[int, int, int] = 1,
    block: int | tuple[int, int, int] = 32,
    declare: str = "",
    **more: Any,
) -> Report:
    """Run a kernel of `body` whose parameters are 64-bit."""
    return simulate(
        kernel(body, len(arguments), declare=declare),
        (grid, 1, 1) if isinstance(grid, int) else grid,
        (block, 1, 1) if isinstance(block, int) else block,
        struct.pack(f"{len(arguments)}Q", *arguments),
        memory,
        **more,
    )


def evaluate(body: str, *inputs: Array, result: str = "u4", threads: int | None = None) -> Array:
    """What `body` leaves in z, for each element of the inputs, which it finds in a, b, c, …

    Registers are as wide as the elements; thread i has element i.
    """
    count = threads or len(inputs[0])
    size = np.dtype(result).itemsize
    memory = Memory()
    addresses = [memory.upload(item, name) for name, item in zip(NAMES, inputs, strict=False)]
    out = memory.allocate(count * size, "out")
    text = ["mov.u32 r63, %tid.x;", "mov.u32 r62, %ctaid.x;", "mad.lo.u32 r63, r62, 256, r63;"]
    text += [f".reg .b{max(8 * size, 16)} z;", f"setp.ge.u32 p15, r63, {count};", "@p15 bra $done;"]
    for i, (name, item) in enumerate(zip(NAMES, inputs, strict=False)):
        width = item.dtype.itemsize
        text += [
            f".reg .b{max(8 * width, 16)} {name};",
            f"mul.wide.u32 d31, r63, {width};",
            f"add.s64 d31, d31, q{i};",
            f"ld.global.b{8 * width} {name}, [d31];",
        ]
    text += [body, f"mul.wide.u32 d31, r63, {size};", f"add.s64 d31, d31, q{len(inputs)};"]
    text += [f"st.global.b{8 * size} [d31], z;", "$done:"]
    launch("\n".join(text), [*addresses, out], memory, grid=-(-count // 256), block=256)
    return memory.download(out, result, (count,))
