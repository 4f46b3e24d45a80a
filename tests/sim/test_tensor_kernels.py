"""Small kernels that load fragments, convert and multiply: the tensor instructions as a kernel meets them."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jitmx.errors import SimulationError
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.swizzle import Descriptor

Array = npt.NDArray[Any]
SHARED = 1024  # where a block's first shared variable lies


def run(body: str, threads: int, inputs: list[Array], words: int, target: str = "sm_90a", shared: int = 32768) -> Array:
    """Run `body` with inputs at %in0, …, and return what it wrote to `words` 32-bit words at %out."""
    names = [f"in{i}" for i in range(len(inputs))] + ["out"]
    memory = Memory()
    addresses = [memory.upload(array, name) for array, name in zip(inputs, names, strict=False)]
    addresses.append(memory.allocate(4 * words, "out"))
    listed = ", ".join(f".param .u64 {name}" for name in names)
    text = f".version 8.7\n.target {target}\n.address_size 64\n.visible .entry k({listed})\n{{\n"
    text += ".reg .pred %p<8>;\n.reg .b16 %h<16>;\n.reg .b32 %r<64>;\n.reg .f32 %f<300>;\n.reg .b64 %x<64>;\n"
    text += f".shared .align 1024 .b8 s[{shared}];\n"
    for name in names:
        text += f".reg .b64 %{name};\nld.param.u64 %{name}, [{name}];\ncvta.to.global.u64 %{name}, %{name};\n"
    text += "mov.u32 %r0, %tid.x;\nmov.u32 %r1, s;\n" + body + "\nret;\n}\n"
    simulate(text, (1, 1, 1), (threads, 1, 1), struct.pack(f"<{len(addresses)}Q", *addresses), memory)
    return memory.download(addresses[-1], np.uint32, (words,))


def put(value: str, kind: str = "b32", at: str = "%r0", size: int = 4) -> str:
    """Store a register at word `at` of %out."""
    return f"mul.wide.u32 %x9, {at}, {size};\nadd.u64 %x9, %out, %x9;\nst.global.{kind} [%x9], {value};\n"


def fill(source: str, count: int, threads: int) -> str:
    """Copy `count` 16-byte chunks from `source` to shared memory, and meet."""
    return f"""
mov.u32 %r2, %r0;
fill_{source}:
setp.ge.u32 %p1, %r2, {count};
@%p1 bra full_{source};
mul.wide.u32 %x1, %r2, 16;
add.u64 %x2, %{source}, %x1;
ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%x2];
shl.b32 %r3, %r2, 4;
add.u32 %r3, %r1, %r3;
st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, {threads};
bra fill_{source};
full_{source}:
fence.proxy.async;
bar.sync 0;
"""


def test_conversions_write_only_active_lanes_and_extend_by_the_type() -> None:
    values = np.linspace(-3, 3, 64, dtype=np.float32)
    body = (
        "mul.wide.u32 %x1, %r0, 4;\nadd.u64 %x2, %in0, %x1;\nld.global.f32 %f1, [%x2];\nmov.u32 %r8, 77;\n"
        "setp.lt.u32 %p2, %r0, 40;\n@%p2 cvt.rzi.s8.f32 %r8, %f1;\n" + put("%r8")
    )
    got = run(body, 64, [values], 64).view(np.int32)
    np.testing.assert_array_equal(got, np.where(np.arange(64) < 40, np.trunc(values), 77))


def test_packed_conversions_put_the_first_source_into_the_upper_half() -> None:
    values = np.linspace(-8, 8, 64, dtype=np.float32)
    body = (
        "mul.wide.u32 %x1, %r0, 4;\nadd.u64 %x2, %in0, %x1;\nld.global.f32 %f1, [%x2];\n"
        "{\n.reg .b8 byte;\ncvt.rn.satfinite.e2m1x2.f32 byte, %f1, 0f40400000;\n"
        "mov.b32 %r8, {byte, byte, byte, byte};\n}\n" + put("%r8")
    )
    codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    wanted = (codes.astype(np.uint32) << 4 | 5) * 0x01010101
    np.testing.assert_array_equal(run(body, 64, [values], 64, "sm_120a"), wanted)


MMA = """
and.b32 %r10, %r0, 31;
and.b32 %r11, %r10, 15;
shr.u32 %r12, %r10, 4;
shl.b32 %r11, %r11, 5;
shl.b32 %r12, %r12, 4;
add.u32 %r13, %r1, %r11;
add.u32 %r13, %r13, %r12;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r13];
ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r24, %r25}, [%r14+512];
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r20, %r21, %r22, %r23}, {%r24, %r25},
    {0f00000000, 0f3f800000, 0f00000000, 0f3f800000};
"""
ROW_OF_B = "and.b32 %r14, %r0, 15;\nshl.b32 %r14, %r14, 4;\nadd.u32 %r14, %r1, %r14;\n"
STORE_D = """
and.b32 %r10, %r0, 31;
shr.u32 %r15, %r10, 2;
and.b32 %r16, %r10, 3;
shl.b32 %r15, %r15, 3;
shl.b32 %r16, %r16, 1;
add.u32 %r15, %r15, %r16;
mul.wide.u32 %x9, %r15, 4;
add.u64 %x9, %out, %x9;
st.global.v2.f32 [%x9], {%f0, %f1};
st.global.v2.f32 [%x9+256], {%f2, %f3};
"""


def tiles() -> tuple[Array, Array, Array]:
    """A [16, 16] and B [16, 8] in bf16, and A · B + (0, 1, 0, 1, …)."""
    rng = np.random.default_rng(1)
    a, b = (rng.normal(0, 1, shape).astype(ml_dtypes.bfloat16) for shape in ((16, 16), (16, 8)))
    wanted = a.astype(np.float64) @ b.astype(np.float64) + np.arange(8) % 2
    return np.concatenate((a.ravel(), b.ravel())).view(np.uint16), a, wanted.astype(np.float32)


@pytest.mark.parametrize("only", ["", "setp.ge.u32 %p3, %r0, 32;\n@%p3 bra done;\n"])
def test_fragments_loaded_by_ldmatrix_give_the_product(only: str) -> None:
    data, _, wanted = tiles()
    threads = 64 if only else 32
    got = run(fill("in0", 48, threads) + only + ROW_OF_B + MMA + STORE_D + "done:\n", threads, [data], 128)
    np.testing.assert_array_equal(got.view(np.float32).reshape(16, 8), wanted)


def test_half_a_warp_at_an_mma_is_an_error() -> None:
    data, _, _ = tiles()
    body = fill("in0", 48, 32) + ROW_OF_B + "setp.ge.u32 %p3, %r0, 16;\n@%p3 bra done;\n" + MMA + STORE_D + "done:\n"
    with pytest.raises(SimulationError, match=r"without lane|other lanes of their warp"):
        run(body, 32, [data], 128)


def test_ldmatrix_of_rows_that_were_never_written_is_an_error() -> None:
    data, _, _ = tiles()
    with pytest.raises(SimulationError, match="uninitialised"):
        run(fill("in0", 32, 32) + ROW_OF_B + MMA + STORE_D, 32, [data], 128)


def test_stmatrix_writes_what_ldmatrix_reads() -> None:
    data, a, _ = tiles()
    body = fill("in0", 48, 32) + ROW_OF_B + MMA
    body += "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r13+2048], {%r20, %r21, %r22, %r23};\nbar.warp.sync -1;\n"
    body += "shl.b32 %r17, %r0, 4;\nadd.u32 %r17, %r1, %r17;\nld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r17+2048];\n"
    body += put("{%r4, %r5, %r6, %r7}", "v4.b32", size=16)
    got = run(body, 32, [data], 128).view(ml_dtypes.bfloat16).reshape(16, 16)
    for i in range(2):
        for j in range(2):
            block = (slice(8 * i, 8 * i + 8), slice(8 * j, 8 * j + 8))
            np.testing.assert_array_equal(got[block], a[block].T)


def test_selectors_of_a_block_scaled_product_reach_it() -> None:
    """A is 1 everywhere, B too; row scales 2^(row - 8) in byte 2 of the lanes that thread-a 1 selects."""
    row_scale = np.full((32, 4), 0x7F, np.uint8)
    for m in range(16):
        row_scale[4 * (m % 8) + 2 + m // 8, 2] = 127 + m - 8
    body = (
        "mul.wide.u32 %x1, %r0, 4;\nadd.u64 %x2, %in0, %x1;\nld.global.u32 %r30, [%x2];\n"
        "mov.u32 %r20, 0x38383838;\nmov.u32 %r21, 0x08080808;\nmov.u32 %r31, 0x7f7f7f7f;\n"
        "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e2m1.f32.ue8m0 "
        "{%f0, %f1, %f2, %f3}, {%r20, %r20, %r20, %r20}, {%r21, %r21}, "
        "{0f00000000, 0f00000000, 0f00000000, 0f00000000}, {%r30}, {2, 1}, {%r31}, {0, 3};\n"
    )
    got = run(body + STORE_D, 32, [row_scale.view(np.uint32)], 128, "sm_121a").view(np.float32).reshape(16, 8)
    np.testing.assert_array_equal(got, np.repeat(32 * 2.0 ** (np.arange(16) - 8.0)[:, None], 8, 1))
    for wrong in ("{4, 1}", "{2, 2}"):
        with pytest.raises(SimulationError, match="selectors"):
            run(body.replace("{2, 1}", wrong), 32, [row_scale.view(np.uint32)], 128, "sm_121a")


def wgmma_body(a: str, n: int, numbers: str) -> str:
    """One wgmma of bf16 with descriptors in %x20 and %x21; D goes to %out, thread after thread."""
    count = n // 2
    d = ", ".join(f"%f{i}" for i in range(count))
    zero = "".join(f"mov.f32 %f{i}, 0f3f800000;\n" for i in range(count))
    store = "".join(f"st.global.f32 [%x9+{4 * i}], %f{i};\n" for i in range(count))
    return (
        f"{zero}wgmma.fence.sync.aligned;\nsetp.eq.u32 %p4, 0, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{d}}}, {a}, %x21, %p4, {numbers};\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
        f"mul.wide.u32 %x9, %r0, {4 * count};\nadd.u64 %x9, %out, %x9;\n{store}"
    )


def test_wgmma_reads_both_operands_through_descriptors() -> None:
    """K-major A [64, 64] with the 128-byte swizzle, second k-step; MN-major B [16, 64], 128-byte swizzle."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, 1, (64, 64)).astype(ml_dtypes.bfloat16), rng.normal(0, 1, (16, 64)).astype(ml_dtypes.bfloat16)
    image = np.zeros((80, 8, 8), np.uint16)
    for row in range(64):
        for chunk in range(8):
            image[row, chunk ^ row % 8] = a[row, 8 * chunk : 8 * chunk + 8].view(np.uint16)
    for row in range(16):
        for chunk in range(8):
            image[64 + row, chunk ^ row % 8] = b[row, 8 * chunk : 8 * chunk + 8].view(np.uint16)
    left = Descriptor(SHARED + 32, 0, 1024, 128).encode()
    right = Descriptor(SHARED + 64 * 128, 0, 1024, 128).encode()
    body = (
        fill("in0", 640, 128)
        + f"mov.u64 %x20, {left};\nmov.u64 %x21, {right};\n"
        + wgmma_body("%x20", 64, "1, 1, 0, 1")
    )
    got = run(body, 128, [image], 128 * 32).view(np.float32).reshape(4, 8, 4, 8, 2, 2)
    # Warp, g, t, column / 8, row + 8, column + 1.
    wanted = (a[:, 16:32].astype(np.float64) @ b.astype(np.float64) + 1).astype(np.float32)
    got = got.transpose(0, 4, 1, 3, 2, 5).reshape(64, 64)
    np.testing.assert_array_equal(got, wanted)


def test_wgmma_takes_a_from_registers_and_a_negated_scale() -> None:
    rng = np.random.default_rng(4)
    b = rng.normal(0, 1, (8, 16)).astype(ml_dtypes.bfloat16)  # N × K, no swizzle: chunks of 8 rows and 16 bytes
    image = np.concatenate((b[:, :8], b[:, 8:])).view(np.uint16)
    right = Descriptor(SHARED, 128, 256, 0).encode()
    body = fill("in0", 16, 128) + f"mov.u64 %x21, {right};\nmov.b32 %r20, 0x3f803f80;\n"
    body += wgmma_body("{%r20, %r20, %r20, %r20}", 8, "-1, 1, 0")
    got = run(body, 128, [image], 128 * 4).view(np.float32).reshape(4, 8, 4, 2, 2)
    wanted = (1 - b.astype(np.float64).sum(1)).astype(np.float32)
    np.testing.assert_array_equal(got.transpose(0, 3, 1, 2, 4).reshape(64, 8), np.broadcast_to(wanted, (64, 8)))


@pytest.mark.parametrize("early", [True, False])
def test_shared_memory_is_being_read_until_the_product_is_waited_for(early: bool) -> None:
    image = np.zeros((8, 16), np.uint16)
    right = Descriptor(SHARED, 128, 256, 0).encode()
    body = fill("in0", 16, 128) + f"mov.u64 %x21, {right};\nmov.b32 %r20, 0;\n"
    body += wgmma_body("{%r20, %r20, %r20, %r20}", 8, "1, 1, 0")
    write = "bar.sync 0;\nshl.b32 %r30, %r0, 1;\nadd.u32 %r30, %r1, %r30;\nst.shared.b16 [%r30], %r30;\n"
    wait = "wgmma.wait_group.sync.aligned 0;\n"
    body = body.replace(wait, write + wait if early else wait + write).replace("%r30], %r30", "%r30], %h1")
    body = "mov.b16 %h1, 0;\n" + body
    if early:
        with pytest.raises(SimulationError, match="asynchronous operation has read"):
            run(body, 128, [image], 128 * 4)
    else:
        assert (run(body, 128, [image], 128 * 4).view(np.float32) == 1.0).all()


def test_stores_reach_wgmma_only_past_a_proxy_fence() -> None:
    right = Descriptor(SHARED, 128, 256, 0).encode()
    body = fill("in0", 16, 128).replace("fence.proxy.async;", "") + f"mov.u64 %x21, {right};\nmov.b32 %r20, 0;\n"
    with pytest.raises(SimulationError, match=r"without fence\.proxy\.async"):
        run(body + wgmma_body("{%r20, %r20, %r20, %r20}", 8, "1, 1, 0"), 128, [np.zeros(128, np.uint16)], 128 * 4)


def test_wgmma_by_three_warps_is_an_error() -> None:
    body = wgmma_body("%x20", 8, "1, 1, 0, 0")
    with pytest.raises(SimulationError, match=r"wgmma|warp"):
        run("mov.u64 %x20, 64;\nmov.u64 %x21, 64;\n" + body, 96, [], 96 * 4)


@pytest.mark.parametrize(
    "text",
    [
        "cvt.rn.e9m9x2.f32 %h1, %f1, %f2;",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%x0, %x1}, {%x2}, {%x3}, {%x0, %x1};",
        "cp.async.bulk.global.global.mbarrier::complete_tx::bytes [%x1], [%x2], 16, [%r3];",
        "mbarrier.arrive.shared::cta.unheard.b64 _, [%r1];",
        "ldmatrix.sync.aligned.m8n8.x8.shared.b16 {%r1}, [%r2];",
    ],
)
def test_an_unknown_instruction_is_named_with_its_line(text: str) -> None:
    with pytest.raises(SimulationError, match=r"k, PTX line \d+: " + text.split(" ")[0].split(".")[0]):
        run(text, 32, [], 1)
