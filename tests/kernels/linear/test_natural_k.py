"""mxfp4/natural_k.cuh: fragments of wgmma in the order of k that X has in memory, from packed tiles; simulated."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from jitmx import arch, formats
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS, pack
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.toolchain import nvrtc

SOURCE = """
#include "jitmx/mxfp4/natural_k.cuh"
using namespace jitmx;
extern "C" __global__ void fragments(const Vec4* words, const u32* scales, u32* out) {{
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const NaturalDecoder<{encoding}> decoder(t);
  Vec4 quad[4];
  for (int s = 0; s < 4; ++s) quad[s] = words[g * 4 + s];
  u32 a[8];
  decoder.fragments<0>(quad, scales[g], a);
  for (int i = 0; i < 8; ++i) out[lane * 16 + i] = a[i];
  decoder.fragments<1>(quad, scales[g], a);
  for (int i = 0; i < 8; ++i) out[lane * 16 + 8 + i] = a[i];
}}
"""


@pytest.mark.parametrize("encoding", ["rotated", "nibble"])
def test_fragments_of_a_tile_are_its_values_in_the_order_of_the_instruction(encoding: str) -> None:
    """All codes in every place of a word, scales of rows and blocks unlike; element by element, as the ISA draws A."""
    codes = np.arange(TILE_ROWS * TILE_K).reshape(TILE_ROWS, TILE_K)
    codes = ((codes * 7 + codes // 16) % 16).astype(np.uint8)
    scales = (100 + np.arange(TILE_ROWS * 2).reshape(TILE_ROWS, 2) % 29).astype(np.uint8)
    words, packed = pack(codes, scales, encoding)
    values = formats.dequantize(codes, scales, formats.get("mxfp4"))

    target = arch.parse("sm_90")
    memory = Memory()
    addresses = [memory.upload(words, "words"), memory.upload(packed, "scales"), memory.allocate(32 * 16 * 4, "out")]
    source = SOURCE.format(encoding=encoding.capitalize())
    simulate(
        nvrtc.compile_ptx(source, nvrtc.options(target)), (1, 1, 1), (32, 1, 1), struct.pack("PPP", *addresses), memory,
        entry="fragments", shared_bytes=0,
    )  # fmt: skip
    found = memory.download(addresses[2], np.uint16, (32, 4, 4, 2)).view(ml_dtypes.bfloat16).astype(np.float64)

    lane, step, register, half = np.ogrid[:32, :4, :4, :2]
    row = lane // 4 + register % 2 * 8
    k = step * 16 + register // 2 * 8 + lane % 4 * 2 + half
    np.testing.assert_array_equal(found, values[np.broadcast_to(row, found.shape), np.broadcast_to(k, found.shape)])
