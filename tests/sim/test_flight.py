"""Registers and shared memory of products under way: what is touched too early, or not fenced, is found."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jitmx import arch
from jitmx.errors import SimulationError
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.toolchain import nvrtc

N = 8
_WIDE = ", ".join(f"%{j}" for j in range(4))
_OUT = ", ".join(f'"+f"(d[{j}])' for j in range(4))
KERNEL = f"""
typedef unsigned u32; typedef unsigned long long u64;
__device__ __forceinline__ void product(float (&d)[4], const u32 (&a)[4], u64 b) {{
  asm volatile("{{ .reg .pred p; setp.ne.u32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{{{_WIDE}}}, {{%4, %5, %6, %7}}, %8, p, 1, 1, 0; }}" : {_OUT}
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}}
#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned " #n ";" ::: "memory")
extern "C" __global__ void k(const u32* a, const u64* b, float* out, long long steps) {{
  __shared__ __align__(128) u64 tile[2][32];
  float d[4] = {{}};
  for (int step = 0; step < steps; ++step) {{
    u32 x[4];
    if (threadIdx.x < 32) tile[step % 2][threadIdx.x] = b[step * 32 + threadIdx.x];
    for (int i = 0; i < 4; ++i) x[i] = a[(step * 128 + threadIdx.x) * 4 + i] ^ 0x80008000u;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    FENCE;
    const u64 place = (u64)(128u >> 4) << 16 | (u64)(256u >> 4) << 32
      | ((u32)__cvta_generic_to_shared(tile[step % 2]) & 0x3ffffu) >> 4;
    product(d, x, place);
    COMMIT;
    /* looped */ WAIT(0);
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[i]));
    __syncthreads();
  }}
  /* last */ WAIT(0);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i] * 0.5f;
}}
"""


def run(source: str, steps: int = 3) -> np.ndarray:
    rng = np.random.default_rng(2)
    a = rng.integers(-4, 5, (steps, 128, 8)).astype(ml_dtypes.bfloat16)
    b = rng.integers(-4, 5, (steps, 128)).astype(ml_dtypes.bfloat16)
    memory = Memory()
    out = memory.allocate(128 * 16)
    arguments = b"".join(x.to_bytes(8, "little") for x in (memory.upload(a), memory.upload(b), out, steps))
    simulate(nvrtc.compile_ptx(source, nvrtc.options(arch.parse("sm_90a"))), (1, 1, 1), (128, 1, 1), arguments, memory)
    # Rows g and g + 8 of each warp's 16, columns 2 t and 2 t + 1; a register holds two of k, 8 apart in pairs.
    lane = np.arange(128)
    left = np.zeros((steps, 64, 16))
    for r in range(4):
        for half in range(2):
            row = lane // 32 * 16 + lane % 32 // 4 + 8 * (r % 2)
            left[:, row, lane % 4 * 2 + half + 8 * (r // 2)] = -a[:, lane, 2 * r + half].astype(np.float64)
    right = b.astype(np.float64).reshape(steps, 2, 8, 8).transpose(0, 2, 1, 3).reshape(steps, 8, 16)
    wanted = 0.5 * np.einsum("smk,snk->mn", left, right)
    got = memory.download(out, "f4", (128, 4))
    for r in range(4):
        row = lane // 32 * 16 + lane % 32 // 4 + 8 * (r // 2)
        np.testing.assert_array_equal(got[:, r], wanted[row, lane % 4 * 2 + r % 2])
    return got


def test_products_that_are_fenced_and_waited_for_pass() -> None:
    run(KERNEL)


FAULTS = {
    "the last wait is gone": ("/* last */ WAIT(0);", "", "/* looped */ WAIT(0);", "", "still (reads|writes)|has read"),
    "the last wait leaves a group": (
        "/* last */ WAIT(0)", "WAIT(1)", "/* looped */ WAIT(0)", "WAIT(1)", "still (reads|writes)|has read",
    ),
    "the group is not committed": ("COMMIT;\n", "", "", "", "still (reads|writes)|has read"),
    "A is overwritten while it is read": ("/* looped */ WAIT(0);", "", "", "", "still reads|has read"),
    "the fence is gone": ("    FENCE;\n", "", "", "", r"wgmma of register .* without wgmma\.fence between"),
    "only the first product is fenced": (
        "    FENCE;\n", "", "float d[4] = {};\n", "float d[4] = {}; FENCE;\n", r"without wgmma\.fence between",
    ),
    "accumulators are changed in between": (
        "/* looped */ WAIT(0);", "d[0] += 1.f; d[1] += 1.f;", "", "", "still writes",
    ),
    "accumulators are changed after the fence": (
        "    FENCE;\n", "    FENCE; for (int i = 0; i < 4; ++i) d[i] *= 2.f;\n", "", "", r"without wgmma\.fence",
    ),
    "stores are not fenced for the other proxy": (
        'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "", "", "", r"without fence\.proxy\.async",
    ),
    "the barrier before the product is gone": ("    __syncthreads();\n    FENCE", "    FENCE", "", "", "the two"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_order_of_products_is_caught(name: str) -> None:
    old, new, other, instead, message = FAULTS[name]
    assert KERNEL.count(old) == 1 and (not other or KERNEL.count(other) == 1)
    source = KERNEL.replace(old, new)
    with pytest.raises(SimulationError, match=message):
        run(source.replace(other, instead) if other else source)


HEAD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
.reg .b32 r<8>; .reg .f32 f<16>; .reg .b64 d<4>; .reg .pred p<2>;
.shared .align 128 .b8 s[256];
ld.param.u64 d0, [out]; mov.u32 r0, %tid.x; mov.u32 r1, s; shl.b32 r2, r0, 1; add.u32 r2, r2, r1;
.reg .b16 h; mov.u16 h, 0; st.shared.u16 [r2], h; fence.proxy.async; bar.sync 0;
shr.u32 r1, r1, 4; cvt.u64.u32 d1, r1; or.b64 d1, d1, 0x1000080000;
mov.f32 f0, 0f00000000; mov.f32 f1, f0; mov.f32 f2, f0; mov.f32 f3, f0; mov.b32 r4, 0; add.u32 r4, r4, 0;
wgmma.fence.sync.aligned;
"""
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {f0, f1, f2, f3}, {r4, r4, r4, r4}, d1, 1, 1, 1, 0;\n"
DONE = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
UNPACKED = ".reg .b16 low, high; mov.b32 {{low, high}}, {};\n"
STORE = "mul.wide.u32 d2, r0, 4; add.u64 d2, d0, d2; st.global.f32 [d2], f{n};\nret;\n}}\n"


def assemble(body: str, n: int = 0, head: str = HEAD) -> None:
    memory = Memory()
    out = memory.allocate(512)
    simulate(head + body + STORE.format(n=n), (1, 1, 1), (128, 1, 1), out.to_bytes(8, "little"), memory)


@pytest.mark.parametrize(
    "body",
    [
        PRODUCT + PRODUCT + DONE,  # products may share accumulators
        PRODUCT + "mov.f32 f8, f1; mov.f32 f1, f8;\n" + DONE,  # a copy and back is no use
        "add.u32 r4, r4, 1;\n" + PRODUCT + DONE,  # what makes A may come after the fence
        "mov.f32 f1, 0f3F800000; mov.f32 f9, f2; mov.f32 f2, f9;\n" + PRODUCT + DONE,  # constants need no fence
        PRODUCT + DONE + "add.f32 f0, f0, f1;\nwgmma.fence.sync.aligned;\n" + PRODUCT + DONE,
        PRODUCT + UNPACKED.format("r0") + DONE,  # a move into halves is none of the plain ones
    ],
)
def test_what_compilers_do_to_accumulators_passes(body: str) -> None:
    assemble(body)


def test_the_first_product_of_a_warpgroup_needs_a_fence_before_it() -> None:
    bare = HEAD.replace("mov.f32 f0, 0f00000000; mov.f32 f1, f0; mov.f32 f2, f0; mov.f32 f3, f0;", "").replace(
        "mov.b32 r4, 0; add.u32 r4, r4, 0;", "mov.b32 r4, 0;"
    )
    first = PRODUCT.replace("d1, 1, 1,", "d1, 0, 1,")  # which takes no accumulators
    assemble(first + DONE, head=bare)
    with pytest.raises(SimulationError, match="the first wgmma of its warpgroup, without"):
        assemble(first + DONE, head=bare.replace("wgmma.fence.sync.aligned;\n", ""))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (PRODUCT + "add.f32 f9, f2, f2;\n" + DONE, r"reads register f2, which the wgmma at PTX line 13 still writes"),
        (PRODUCT + UNPACKED.format("f2") + DONE, r"reads register f2, which the wgmma at PTX line 13 still writes"),
        (PRODUCT + "mov.f32 f3, 0f00000000;\n" + DONE, r"overwrites register f3, which the wgmma .* still writes"),
        (PRODUCT + "add.u32 r4, r4, 1;\n" + DONE, r"overwrites register r4, which the wgmma .* still reads"),
        (PRODUCT + "mov.f32 f8, f1; add.f32 f9, f8, f8;\n" + DONE, r"reads register f8, .* still writes"),
        ("add.f32 f1, f1, f1;\n" + PRODUCT + DONE, r"wgmma of register f1, which PTX line 13 has written"),
        ("add.f32 f8, f1, f1; mov.f32 f1, f8;\n" + PRODUCT + DONE, r"wgmma of register f1, .* without wgmma\.fence"),
        ("setp.eq.u32 p0, r0, 0; @p0 add.f32 f1, f1, f1;\n" + PRODUCT + DONE, r"without wgmma\.fence between"),
        (PRODUCT + DONE + "add.f32 f0, f0, f1;\n" + PRODUCT + DONE, r"wgmma of register f0, .* without wgmma\.fence"),
        (PRODUCT + DONE + "add.u32 r4, r4, 1;\n" + PRODUCT + DONE, r"wgmma of register r4, which PTX line 16 has"),
        (PRODUCT, r"reads register f0, .* still writes"),
    ],
)
def test_registers_under_way_are_off_limits(body: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        assemble(body)
