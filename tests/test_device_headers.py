"""The code of `templates/`: its form, one wrapper an instruction, and products of a warpgroup against float64."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jitmx import arch, resources
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.toolchain import nvrtc

# Instructions that stand in several wrappers, all of one header.
SEVERAL = {
    "mbarrier.try_wait.parity.shared::cta.b64": "a thread's wait, and that of a warp that goes on together",
    "mbarrier.test_wait.parity.shared::cta.b64": "a wait where try_wait is missing, and a question",
    "ld.global.L1::no_allocate.L2::256B.v4.b32": "a load, and one that may be left out",
    "cp.async.ca.shared.global": "a copy, and one that may be cut short",
    "wgmma.wait_group.sync.aligned": "a wait, and one that compilers do not take for it",
    "cvt.rn.satfinite.e2m1x2.f32": "four in one wrapper of eight values",
}
# Auxiliaries within a wrapper of something else.
AUXILIARY = {"mov.b32", "mov.u32", "selp.u32", "setp.ne.u32", "bra.uni", "vote.sync.all.pred"}

_ASM = re.compile(r'\basm(?: volatile)?\(\s*((?:"(?:[^"\\]|\\.)*"\s*|#(?:if|else|endif)[^\n]*\n\s*)+)')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPCODE = re.compile(r"^(?:@!?%?\w+\s+)?([a-z][a-z0-9_]*(?:(?:\.|::)[A-Za-z0-9_]+)+)")


def files() -> dict[str, str]:
    """Texts of all templates and headers, by path."""
    root = resources.directory("templates")
    found = [*root.rglob("*.j2"), *root.rglob("*.cuh")]
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(found)}


def instructions(text: str) -> list[str]:
    """Opcodes with their modifiers of every inline asm statement whose text no macro puts together."""
    found = []
    for statement in _ASM.finditer(text):
        body = "".join(piece for piece in _STRING.findall(statement[1])).replace("\\n", "\n")
        for line in re.split(r"[;\n{}]", body):
            opcode = _OPCODE.match(line.strip())
            if opcode and not line.strip().endswith(":") and opcode[1] not in AUXILIARY:
                found.append(opcode[1])
    return found


def test_lines_have_at_most_120_columns() -> None:
    long = [
        f"{name}:{number}"
        for name, text in files().items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > 120
    ]
    assert long == []


def test_each_instruction_is_wrapped_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, text in files().items():
        for instruction in instructions(text):
            places[instruction].append(name)
    assert len(places) > 60 and all(name.startswith("include/jitmx/") for names in places.values() for name in names)
    twice = {instruction for instruction, names in places.items() if len(names) > 1}
    assert twice == SEVERAL.keys()
    assert {instruction for instruction in twice if len(set(places[instruction])) > 1} == set()


def test_wrappers_are_those_of_ptx_and_mma() -> None:
    folders = {name.split("/")[2] for name, text in files().items() if instructions(text)}
    assert folders == {"ptx", "mma"}


PRODUCT = """
#include "jitmx/mma/swizzle.cuh"
#include "jitmx/mma/wgmma.cuh"
#include "jitmx/mma/wgmma_product.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/fence.cuh"
#include "jitmx/ptx/shared.cuh"
using namespace jitmx;
constexpr int kN = {n};
extern "C" __global__ void product(const Vec4* a, const Vec4* b, float* d) {{
  extern __shared__ __align__(1024) u8 shared_bytes[];
  for (int v = threadIdx.x; v < (64 + kN) * 8; v += 128)
    *reinterpret_cast<Vec4*>(shared_bytes + swizzled(v / 8, v % 8)) = v < 64 * 8 ? a[v] : b[v - 64 * 8];
  async_proxy_fence();
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const u64 left = matrix_descriptor(shared_address(shared_bytes));
  const u64 right = matrix_descriptor(shared_address(shared_bytes + 64 * 128));
  float sums[kN / 2] = {{}};
  u32 held[4][4];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      held[i][j] = load_shared_word(shared_address(shared_bytes) +
                                    swizzled(warp * 16 + g + j % 2 * 8, i * 2 + j / 2) + t * 4);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {{
    if ({registers})
      Wgmma<kN>::from_registers<{type}>(sums, held[i], right + 2 * i);
    else
      Wgmma<kN>::from_shared<{type}>(sums, left + 2 * i, right + 2 * i);
  }}
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 4; ++i) fence_operand(held[i]);
  fence_operand(sums);
  for (int i = 0; i < kN / 2; ++i)
    d[(warp * 16 + g + i / 2 % 2 * 8) * kN + i / 4 * 8 + t * 2 + i % 2] = sums[i];
}}
"""
TYPES: dict[str, Any] = {"Bf16": ml_dtypes.bfloat16, "Fp16": np.float16, "E4M3": ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n", [8, 72])
def test_products_of_a_warpgroup(kind: str, n: int, registers: bool) -> None:
    """D[64, n] = A B^T, 128 bytes of k: exact, as the values are small integers."""
    rng, k = np.random.default_rng(n), 128 // np.dtype(TYPES[kind]).itemsize
    a, b = (rng.integers(-8, 9, (rows, k)).astype(TYPES[kind]) for rows in (64, n))
    memory = Memory()
    addresses = memory.upload(a, "a"), memory.upload(b, "b"), memory.allocate(64 * n * 4, "d")
    source = PRODUCT.format(n=n, type=kind, registers="true" if registers else "false")
    simulate(
        nvrtc.compile_ptx(source, nvrtc.options(arch.parse("sm_90"))), (1, 1, 1), (128, 1, 1),
        struct.pack("PPP", *addresses), memory, entry="product", shared_bytes=(64 + n) * 128,
    )  # fmt: skip
    found = memory.download(addresses[2], np.float32, (64, n))
    np.testing.assert_array_equal(found, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("kind", TYPES)
def test_every_width_assembles(kind: str) -> None:
    calls = "".join(
        f"  float d{n}[{n // 2}]; for (float& x : d{n}) x = *out;\n"
        f"  Wgmma<{n}>::from_registers<{kind}>(d{n}, a, b); Wgmma<{n}>::from_shared<{kind}>(d{n}, b, b);\n"
        f"  for (float x : d{n}) *out += x;\n"
        for n in (8, 24, 176, 256)
    )
    source = (
        '#include "jitmx/mma/wgmma_product.cuh"\nusing namespace jitmx;\n'
        f'extern "C" __global__ void k(float* out, u64 b) {{\n  const u32 a[4] = {{1, 2, 3, 4}};\n{calls}}}\n'
    )
    assert nvrtc.compile(source, nvrtc.options(arch.parse("sm_90"))).image
