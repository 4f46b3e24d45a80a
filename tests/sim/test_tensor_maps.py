"""Tensor maps of three ranks among a kernel's arguments: boxes that a compiled kernel copies by them, against NumPy."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jitmx import arch
from jitmx.errors import SimulationError
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.tensor_map import TensorMap
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import encode
from jitmx.toolchain import nvrtc
from strategies import examples

Array = npt.NDArray[Any]

# Arrays from the outermost dimension, as NumPy has them; their maps count from the innermost. None is whole boxes.
GENERATOR = np.random.default_rng(5)
ARRAYS: dict[str, Array] = {
    "matrix": GENERATOR.standard_normal((21, 136)).astype(ml_dtypes.bfloat16),
    "cube": GENERATOR.integers(0, 256, (5, 9, 48), np.uint8),
    "codes": GENERATOR.integers(0, 256, (2, 3, 4, 5, 32), np.uint8).view(ml_dtypes.float8_e4m3fn),
}
MAPS = {
    "matrix_map": TensorMap("bf16", (136, 21), (64, 8), swizzle=128),
    "cube_map": TensorMap("u8", (48, 9, 5), (32, 5, 2), swizzle=32),
    "codes_map": TensorMap("e4m3", (32, 5, 4, 3, 2), (16, 3, 2, 2, 2)),
}
BYTES = {name: int(np.prod(shown.box)) * shown.item_bytes for name, shown in MAPS.items()}
FIELDS = Arguments(
    "CopyArguments",
    number("count", "int", "of the launch, between maps and addresses"),
    reads("cube", "[5, 9, 48]"),
    reads("matrix", "[21, 136]"),
    reads("codes", "[2, 3, 4, 5, 32]"),
    writes("out", "boxes as they lie in shared memory", "unsigned char"),
    *(number(f"{letter}{axis}", "int") for letter, rank in (("m", 2), ("c", 3), ("e", 5)) for axis in range(rank)),
).with_maps(matrix_map="matrix", cube_map="cube", codes_map="codes")
SOURCE = """
#include "jitmx/math/vector.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/mbarrier.cuh"
#include "jitmx/ptx/tensor_copy.cuh"
using namespace jitmx;
extern "C" __global__ void copies(const __grid_constant__ CopyArguments args) {
  __shared__ alignas(1024) u8 matrix[1024];
  __shared__ alignas(1024) u8 cube[320];
  __shared__ alignas(1024) u8 codes[384];
  __shared__ alignas(8) u64 place;
  const u32 barrier = shared_address(&place);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_expect(barrier, 1024 + 320 + 384);
    tensor_copy(shared_address(matrix), args.matrix_map, args.m0, args.m1, barrier);
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(shared_address(cube)), "l"(&args.cube_map), "r"(args.c0), "r"(args.c1), "r"(args.c2), "r"(barrier)
                 : "memory");
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                 :: "r"(shared_address(codes)), "l"(&args.codes_map), "r"(args.e0), "r"(args.e1), "r"(args.e2), "r"(args.e3),
                    "r"(args.e4), "r"(barrier) : "memory");
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < args.count; i += 32)
    args.out[i] = i < 1024 ? matrix[i] : i < 1344 ? cube[i - 1024] : codes[i - 1344];
}
"""  # noqa: E501
STARTS = st.tuples(
    *(
        st.tuples(st.integers(-2, 3).map(lambda chunk, width=width: chunk * width), *[st.integers(-3, 6)] * (rank - 1))
        for width, rank in ((8, 2), (16, 3), (16, 5))
    )
)


@functools.cache
def compiled() -> str:
    return nvrtc.compile_ptx(FIELDS.source + SOURCE, nvrtc.options(arch.parse("sm_90")))


def copied(*starts: tuple[int, ...]) -> list[Array]:
    """The bytes of a box of each map, in the order of `MAPS`, from its first element, innermost first."""
    memory = Memory()
    values = {name: memory.upload(array, name) for name, array in ARRAYS.items()}
    values |= {"out": memory.allocate(sum(BYTES.values()), "out"), "count": sum(BYTES.values())}
    values |= {f"{letter}{axis}": at for letter, start in zip("mce", starts, strict=True)
               for axis, at in enumerate(start)}  # fmt: skip
    simulate(compiled(), (1, 1, 1), (32, 1, 1), FIELDS.pack(values, MAPS, encode), memory)
    found = memory.download(values["out"], np.uint8, (sum(BYTES.values()),))
    return np.split(found, np.cumsum(list(BYTES.values()))[:-1])


def box(array: Array, shown: TensorMap, start: tuple[int, ...]) -> Array:
    """The bytes of a box in shared memory: zeros outside the array, 16-byte chunks permuted by the swizzle."""
    held = np.zeros(shown.box[::-1], array.dtype)
    for place in np.ndindex(held.shape):
        at = tuple(first + step for first, step in zip(start[::-1], place, strict=True))
        if all(0 <= index < size for index, size in zip(at, array.shape, strict=True)):
            held[place] = array[at]
    plain = held.reshape(-1).view(np.uint8)
    offsets = np.arange(plain.size)
    mask = shown.swizzle // 16 - 1 if shown.swizzle else 0
    found = np.empty_like(plain)
    found[offsets ^ ((offsets >> 7 & mask) << 4)] = plain
    return found


@settings(max_examples=examples(25))
@given(starts=STARTS)
@example(starts=((0, 0), (0, 0, 0), (0, 0, 0, 0, 0)))
@example(starts=((64, 16), (16, 7, 4), (16, 3, 2, 1, 1)))
def test_boxes_of_rank_two_three_and_five_come_as_numpy_cuts_them(starts: tuple[tuple[int, ...], ...]) -> None:
    for found, shown, array, start in zip(copied(*starts), MAPS.values(), ARRAYS.values(), starts, strict=True):
        np.testing.assert_array_equal(found, box(array, shown, start), err_msg=str(shown))


def test_a_copy_by_fewer_coordinates_than_the_map_has_is_an_error() -> None:
    maps = MAPS | {"matrix_map": TensorMap("bf16", (136, 7, 3), (64, 8, 1), swizzle=128)}
    memory = Memory()
    values = {name: memory.upload(array, name) for name, array in ARRAYS.items()}
    values["out"] = memory.allocate(16, "out")
    with pytest.raises(SimulationError, match="2 coordinates for a tensor map of 3 dimensions"):
        simulate(compiled(), (1, 1, 1), (32, 1, 1), FIELDS.pack(values, maps, encode), memory)
