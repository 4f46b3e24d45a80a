"""The simulator against the card: kinds of instructions one by one, and every kernel, from the same source."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu import exchanges, snippets
from gpu.snippets import ENTRY, Snippet, inputs
from jitmx import arch, kernels
from jitmx.dispatch.choose import default_variants
from jitmx.registry.case import Buffer, Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.runtime import driver
from jitmx.runtime.launch import Launcher
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.toolchain import nvrtc

Array = npt.NDArray[Any]

TARGET = arch.parse("sm_90a")
VARIANTS = {
    f"{variant.name}-{number}": variant
    for family in ("linear", "quantize", "bandwidth")
    for number, variant in enumerate(default_variants(family, TARGET))
}
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
    from jitmx.toolchain import cupy_cache

    cupy_cache.ensure()
    from cupy.cuda.function import Module

    tensors = [on_card(array) for array in words]
    out = torch.full((shape[0] * shape[1] * 8,), POISON, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    module = Module()
    module.load(nvrtc.compile(snippet.source, nvrtc.options(TARGET)).image)
    function = module.get_function(ENTRY)
    values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, out)]
    parameters = (ctypes.c_void_p * 4)(*map(ctypes.addressof, values))
    config = driver.LaunchConfig(snippet.blocks, 1, 1, snippet.threads, 1, 1, 0, None, None, 0)
    code = driver.library().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(int(function.ptr)), ctypes.byref(parameters), None
    )
    driver.check(code, f"launching {snippet.name}")
    torch.cuda.synchronize()
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


def outputs_on_card(case: Case, variant: Variant) -> list[Array]:
    tensors = [
        torch.full((item.data.nbytes,), POISON, dtype=torch.uint8, device="cuda") if item.output else on_card(item.data)
        for item in case.arguments
        if isinstance(item, Buffer)
    ]
    remaining = iter(tensors)
    arguments = [next(remaining).data_ptr() if isinstance(item, Buffer) else item for item in case.arguments]
    launcher = Launcher(variant, 0, blocks=case.grid, shared_bytes=case.shared_bytes, layout=case.layout, pdl=False)
    torch.cuda.synchronize()
    launcher(torch.cuda.current_stream().cuda_stream, *arguments)
    torch.cuda.synchronize()
    buffers = [item for item in case.arguments if isinstance(item, Buffer)]
    return [
        tensor.cpu().numpy().view(buffer.data.dtype).reshape(buffer.data.shape)
        for tensor, buffer in zip(tensors, buffers, strict=True)
        if buffer.output
    ]


def outputs_simulated(case: Case, variant: Variant, ptx: str) -> list[Array]:
    memory = Memory()
    buffers = [item for item in case.arguments if isinstance(item, Buffer)]
    addresses = [
        memory.allocate(item.data.nbytes, f"argument {k}") if item.output else memory.upload(item.data, f"argument {k}")
        for k, item in enumerate(buffers)
    ]
    simulate(
        ptx,
        (case.grid, 1, 1),
        (variant.spec.threads(variant.knobs), 1, 1),
        case.pack(addresses),
        memory,
        entry=variant.spec.entry,
        shared_bytes=case.shared_bytes,
    )
    return [
        memory.download(address, buffer.data.dtype, buffer.data.shape)
        for address, buffer in zip(addresses, buffers, strict=True)
        if buffer.output
    ]


def beyond_one_place(found: Array, wanted: Array) -> float:
    """Relative L2 difference, after one unit in the last place is allowed to each element."""
    x, y = found.astype(np.float64), wanted.astype(np.float64)
    _, exponent = np.frexp(np.maximum(np.abs(x), np.abs(y)))
    place = np.ldexp(float(ml_dtypes.finfo(found.dtype).eps), exponent - 1)
    excess = np.maximum(np.abs(x - y) - place, 0)
    return float(np.linalg.norm(excess)) / max(float(np.linalg.norm(y)), 1e-30)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_gives_in_the_simulator_what_it_gives_on_the_card(name: str) -> None:
    variant = VARIANTS[name]
    ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(TARGET))
    cases = list(kernels.family(variant.spec.family).cases(variant))
    assert cases
    for case in cases:
        card, simulator = outputs_on_card(case, variant), outputs_simulated(case, variant, ptx)
        for found in (card, simulator):
            error = case.check(found)
            assert error <= case.gate, f"{case.name}: error {error:.3g} is over the gate of {case.gate:g}"
        for k, (found, wanted) in enumerate(zip(card, simulator, strict=True)):
            if case.gate == 0:
                assert found.tobytes() == wanted.tobytes(), f"{case.name}: output {k} differs"
            else:
                difference = beyond_one_place(found, wanted)
                assert difference <= 1e-3, f"{case.name}: output {k} differs by {difference:.3g}"
