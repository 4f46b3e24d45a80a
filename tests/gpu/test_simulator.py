"""The simulator against the card: kinds of instructions one by one, and every kernel, from the same source."""

from __future__ import annotations

import ctypes
import gc
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu import exchanges, snippets
from gpu.comparison import beyond_one_place
from gpu.launching import TARGET, launch_on_card
from gpu.snippets import ENTRY, Snippet, inputs
from jitmx import kernels
from jitmx.dispatch.choose import default_variants
from jitmx.registry import tensor_map
from jitmx.registry.case import Case, chains
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.runtime import driver, trial
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import TensorMap
from jitmx.sim.verify import launch
from jitmx.toolchain import nvrtc

Array = npt.NDArray[Any]
Evidence = Callable[[Variant, float | None, str], None]

VARIANTS = {
    f"{variant.name}-{number}": variant
    for family in kernels.families()
    for number, variant in enumerate(default_variants(family, TARGET))
    if variant.spec.family == family
}
# One variant of each kernel.
FAR = {f"{variant.spec.family}.{variant.spec.name}": variant for variant in VARIANTS.values()}
SNIPPETS = snippets.SNIPPETS | exchanges.SNIPPETS
POISON = 0xA5
FLOATS: dict[str, Any] = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16,
}  # fmt: skip
WORDS = {"f32": "u4", "f64": "u8", "f16": "u2", "bf16": "u2", "f16x2": "u4", "bf16x2": "u4", "bits": "u8"}


def on_card(data: Array) -> torch.Tensor:
    """A copy of the bytes of an array in device memory."""
    return torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy()).cuda()


def simulated(snippet: Snippet, words: Sequence[Array], shape: tuple[int, int]) -> Array:
    ptx = nvrtc.compile_ptx(snippet.source, nvrtc.options(TARGET))
    memory = Memory()
    addresses = [memory.upload(array, f"input {k}") for k, array in enumerate(words)]
    out = memory.allocate(shape[0] * shape[1] * 8, "output")
    arguments = struct.pack("@4P", *addresses, out)
    simulate(ptx, (snippet.blocks, 1, 1), (snippet.threads, 1, 1), arguments, memory, entry=ENTRY)
    return memory.download(out, np.dtype(np.uint64), shape)


def launched(snippet: Snippet, words: Sequence[Array], shape: tuple[int, int]) -> Array:
    tensors = [on_card(array) for array in words]
    out = torch.full((shape[0] * shape[1] * 8,), POISON, dtype=torch.uint8, device="cuda")
    values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, out)]
    launch_on_card(snippet.source, ENTRY, snippet.blocks, snippet.threads, values)
    return out.cpu().numpy().view(np.uint64).reshape(shape)


def differences(found: Array, wanted: Array, compare: str, tolerance: float) -> Array:
    """Flags of the words that differ; the bits above the format's width must be zero in both."""
    differ = found != wanted
    if compare == "bits":
        return differ
    x, y = (np.ascontiguousarray(a.astype(WORDS[compare])).view(FLOATS[compare]) for a in (found, wanted))
    width = np.dtype(WORDS[compare]).itemsize * 8
    beyond = (found >> np.uint64(width)) != 0 if width < 64 else np.zeros(found.shape, bool)
    with np.errstate(invalid="ignore"):
        nan = np.isnan(x) & np.isnan(y)
    if tolerance:
        with np.errstate(invalid="ignore"):
            same = (x == y) | (np.abs(x.astype(np.float64) - y.astype(np.float64)) <= tolerance)
    else:
        bits = f"u{x.itemsize}"
        same = x.view(bits) == y.view(bits)
    flags: Array = beyond | ~(nan | same).reshape(len(found), -1).all(1)
    return flags


def report(snippet: Snippet, words: Sequence[Array], found: Array, wanted: Array) -> list[str]:
    """A line for each result that differs, with the first thread where it does."""
    out = []
    for (name, compare), card, simulator in zip(snippet.results, found, wanted, strict=True):
        differ = differences(card, simulator, compare, snippet.tolerance)
        if differ.any():
            at = int(differ.argmax())
            given = ", ".join(f"{int(array[at]):#018x}" for array in words)
            out.append(
                f"{name}: {int(differ.sum())} of {len(differ)} words differ; thread {at} of ({given}) has "
                f"{int(card[at]):#018x} on the card and {int(simulator[at]):#018x} simulated"
            )
    return out


@pytest.mark.parametrize("name", SNIPPETS)
def test_an_instruction_does_in_the_simulator_what_it_does_on_the_card(name: str) -> None:
    snippet = SNIPPETS[name]
    count = snippet.threads * snippet.blocks
    words = inputs(snippet.inputs, count, np.random.default_rng())
    shape = (len(snippet.results), count)
    failures = report(snippet, words, launched(snippet, words, shape), simulated(snippet, words, shape))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_gives_in_the_simulator_what_it_gives_on_the_card(name: str, evidence: Evidence) -> None:
    error = compare(VARIANTS[name], far=False)
    evidence(VARIANTS[name], error, "its cases, launched one after another, alike in the simulator")


@pytest.mark.alone  # tens of GB, which tests beside it would miss
@pytest.mark.parametrize("name", FAR)
def test_far_buffers_are_on_the_card_what_they_are_in_the_simulator(name: str) -> None:
    gc.collect()  # what the test before it held is most of a card
    torch.cuda.empty_cache()
    compare(FAR[name], far=True)


def compare(variant: Variant, *, far: bool) -> float:
    """Launches of all cases whose buffers lie so, on the card and in the simulator; the largest error on the card."""
    worst = 0.0
    ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(TARGET))
    cases = [case for case in kernels.family(variant.spec.family).cases(variant) if case.sparse == far]
    assert cases or far
    for chain in chains(cases):
        if lack := trial.lacks(chain[0], variant):
            warnings.warn(lack, stacklevel=1)
            continue
        simulated_outputs: dict[int, list[Array]] = {}  # of each case once: a launch leaves the same each time
        for number, (case, card) in enumerate(zip(chain, trial.sequence(chain, variant), strict=True), 1):
            name = f"launch {number} of {len(chain)}, {case.name}"
            if id(case) not in simulated_outputs:
                simulated_outputs[id(case)] = outputs_of(case, variant, ptx)
            simulator = simulated_outputs[id(case)]
            errors = [case.check(found) for found in (card, simulator)]
            assert all(error <= case.gate for error in errors), (
                f"{name}: errors {errors} are over the gate of {case.gate:g}"
            )
            worst = max(worst, errors[0])
            for k, (found, wanted) in enumerate(zip(card, simulator, strict=True)):
                if case.gate == 0:
                    assert found.tobytes() == wanted.tobytes(), f"{name}: output {k} differs"
                elif found.dtype.kind in "fV" and not variant.spec.name.endswith("_fp8"):
                    # Codes of rounded sums, and sums of which the tensor cores keep 14 bits, the case alone judges.
                    difference = beyond_one_place(found, wanted)
                    assert difference <= 1e-3, f"{name}: output {k} differs by {difference:.3g}"
    return worst


def outputs_of(case: Case, variant: Variant, ptx: str) -> list[Array]:
    """What one launch leaves in the simulator."""
    _, memory, addresses = launch(case, variant, ptx)
    return [
        memory.download(addresses[name], item.data.dtype, item.data.shape, item.at)
        for name, item in case.buffers(variant.arguments).items()
        if item.output
    ]


# Tensor copies, through maps of the driver on the card and of the simulator's own in the simulator

TENSOR_COPY = """
typedef unsigned u32; typedef unsigned long long u64;
struct __align__(128) Map {{ u64 words[16]; }};
extern "C" __global__ void __launch_bounds__(128) tensor_copy(
    const __grid_constant__ Map source, const __grid_constant__ Map target, u32* out, int x, int y, int z, int u, int v,
    int w) {{
  __shared__ __align__(1024) u32 tile[{words}];
  __shared__ __align__(8) u64 barrier;
  const u32 at = (u32)__cvta_generic_to_shared(tile), bar = (u32)__cvta_generic_to_shared(&barrier);
  for (u32 i = threadIdx.x; i < {words}u; i += 128u) tile[i] = 0x5a5a5a5au;
  if (threadIdx.x == 0u) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }}
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0u) {{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], {size};" :: "r"(bar) : "memory");
    asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {{{load}}}], [%2];" :: "r"(at), "l"(&source), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory");
  }}
  asm volatile("{{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again; }}"
    :: "r"(bar) : "memory");
  for (u32 i = threadIdx.x; i < {words}u; i += 128u) out[i] = tile[i];
  __syncthreads();
  if (threadIdx.x == 0u) {{
    asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%0, {{{store}}}], [%1];"
      :: "l"(&target), "r"(at), "r"(u), "r"(v), "r"(w) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
  }}
}}
"""


@dataclass(frozen=True)
class Box:
    """A tensor and a box of it: elements along each dimension, bytes of an element, swizzle."""

    sizes: tuple[int, ...]
    box: tuple[int, ...]
    item: int
    span: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between rows and planes, which have gaps after them."""
        row = -(-self.sizes[0] * self.item // 16) * 16 + 16
        return (row, row * (self.sizes[1] + 1))[: len(self.sizes) - 1]

    @property
    def extent(self) -> int:
        """Bytes of the tensor, gaps included."""
        return self.strides[-1] * (self.sizes[-1] + 1)

    @property
    def source(self) -> str:
        rank, size = len(self.sizes), int(np.prod(self.box)) * self.item
        load, store = (", ".join(f"%{first + k}" for k in range(rank)) for first in (3, 2))
        return TENSOR_COPY.format(words=size // 4 + 64, size=size, rank=rank, load=load, store=store)

    def coordinates(self, read: tuple[int, ...], written: tuple[int, ...]) -> tuple[int, ...]:
        """Of the two boxes of a corner: a box that is written starts inside the tensor."""
        last = (*(size - 1 for size in self.sizes), 0)
        chunk = 16 // self.item
        return (read[0] * chunk, *read[1:], written[0] * chunk, *map(min, written[1:], last[1:]))

    def map(self, address: int) -> TensorMap:
        """The simulator's map."""
        return TensorMap(address, self.item, self.sizes, self.strides, self.box, self.span)

    def encoded(self, address: int) -> Any:
        """The driver's map, 128-byte aligned as that of CUDA 13 demands."""
        room = ctypes.create_string_buffer(256)
        aligned = (ctypes.c_uint64 * 16).from_buffer(room, -ctypes.addressof(room) % 128)
        rank = len(self.sizes)
        code = driver.library().cuTensorMapEncodeTiled(
            ctypes.byref(aligned),
            ctypes.c_int({1: 0, 2: 1, 4: 2, 8: 4}[self.item]),  # unsigned integers of that size
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*self.sizes),
            (ctypes.c_uint64 * (rank - 1))(*self.strides),
            (ctypes.c_uint32 * rank)(*self.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),
            ctypes.c_int({0: 0, 32: 1, 64: 2, 128: 3}[self.span]),
            ctypes.c_int(0),
            ctypes.c_int(0),
        )
        driver.check(code, "cuTensorMapEncodeTiled")
        return aligned


BOXES = {
    **{f"2d-{span}-{item}": Box((100, 50), ((span or 96) // item, 24), item, span)
       for span in (0, 32, 64, 128) for item in (1, 2)},
    **{f"3d-{span}-{item}": Box((70, 9, 5), ((span or 48) // item, 5, 3), item, span)
       for span in (0, 32, 64, 128) for item in (2, 4)},
    "2d-64-8": Box((33, 20), (8, 16), 8, 64),
}  # fmt: skip
# Where a box is read from and where it is then written to, the first coordinates in 16 bytes, of which a copy starts at
# a multiple: inside the tensor, across its edges, and for reads also before it and past its end.
CORNERS = (
    ((0, 0, 0), (1, 2, 0)),
    ((1, 3, 1), (0, 0, 0)),
    ((-1, -2, -1), (5, 30, 4)),
    ((5, 40, 3), (6, 1, 3)),
    ((6, 6, 4), (2, 40, 1)),
    ((300, 0, 0), (0, 5, 2)),
    ((0, -40, 0), (3, 4, 2)),
)


@pytest.mark.parametrize("name", BOXES)
def test_a_tensor_copy_moves_in_the_simulator_what_it_moves_on_the_card(name: str) -> None:
    box = BOXES[name]
    rng = np.random.default_rng()
    content = rng.integers(0, 256, box.extent, np.uint8)
    words = int(np.prod(box.box)) * box.item // 4 + 64
    ptx = nvrtc.compile_ptx(box.source, nvrtc.options(TARGET))
    for corner in CORNERS:
        coordinates = box.coordinates(*corner)
        numbers = [ctypes.c_int(value) for value in coordinates]
        held = on_card(content)
        written = torch.full((box.extent,), POISON, dtype=torch.uint8, device="cuda")
        out = torch.full((words * 4,), POISON, dtype=torch.uint8, device="cuda")
        maps = [box.encoded(tensor.data_ptr()) for tensor in (held, written)]
        launch_on_card(box.source, "tensor_copy", 1, 128, [*maps, ctypes.c_void_p(out.data_ptr()), *numbers])
        memory = Memory()
        source = memory.upload(content, "source")
        target = memory.upload(np.full(box.extent, POISON, np.uint8), "target", writable=True)
        place = memory.allocate(words * 4, "out")
        arguments = box.map(source).encode() + box.map(target).encode() + struct.pack("@P6i", place, *coordinates)
        simulate(ptx, (1, 1, 1), (128, 1, 1), arguments, memory)
        for what, card, simulator in (
            ("shared memory", out, memory.download(place, np.uint8, (words * 4,))),
            ("the tensor", written, memory.download(target, np.uint8, (box.extent,))),
        ):
            found = card.cpu().numpy()
            differ = np.flatnonzero(found != simulator)
            assert not differ.size, f"at {corner}: {differ.size} bytes of {what} differ, the first at {differ[0]}"


MAPS = (
    tensor_map.TensorMap("u8", (64,), (16,)),
    tensor_map.TensorMap("fp16", (64, 8), (16, 8), swizzle=64, promotion=0),
    tensor_map.TensorMap("e4m3", (48, 5, 4), (32, 256, 2), strides=(64, 512), promotion=128),
    tensor_map.TensorMap("bf16", (64, 5, 4, 3), (64, 1, 2, 1), swizzle=128, promotion=64),
    tensor_map.TensorMap("u8", (32, 5, 4, 3, 2), (32, 3, 2, 1, 1), swizzle=32),
)


@pytest.mark.parametrize("shown", MAPS, ids=str)
def test_the_driver_takes_the_tensor_maps_that_a_launch_may_have(shown: tensor_map.TensorMap) -> None:
    buffer = driver.aligned_buffer(tensor_map.BYTES)
    place = driver.encode_tensor_map(buffer, 0, shown)
    before = bytes(buffer)
    driver.move_tensor_map(place, torch.empty(4096, dtype=torch.uint8, device="cuda").data_ptr())
    assert any(before) and bytes(buffer) != before
