"""What the ELF says of a kernel, against what NVIDIA's own tools say: cuobjdump, ptxas and nvdisasm."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jitmx import arch
from jitmx.errors import ToolchainError
from jitmx.toolchain import cubin, nvrtc, wheels

TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120f", "sm_121a")
KERNELS = {
    "plain", "static_shared", "dynamic_shared", "both_shared", "local_array", "spills", "spills_with_array",
    "spills_wide", "many_registers", "calls", "_Z8instanceILi96EEvPf",
}  # fmt: skip


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request: pytest.FixtureRequest, resources_source: str) -> nvrtc.Compiled:
    """The kernels of `RESOURCES`, with what ptxas says of them in the log."""
    return nvrtc.compile(resources_source, (*nvrtc.options(arch.parse(request.param)), "--ptxas-options=-v"))


@pytest.fixture(scope="module")
def small() -> bytes:
    """A small cubin with a kernel that spills."""
    source = """
    extern "C" __global__ void __launch_bounds__(1024) k(const float* a, float* o) {
        __shared__ float s[10];
        float r[90];
    #pragma unroll
        for (int i = 0; i < 90; i++) r[i] = a[i * 1024 + threadIdx.x];
        s[threadIdx.x % 10] = a[0];
        __syncthreads();
    #pragma unroll
        for (int i = 0; i < 90; i++) o[i * 1024 + threadIdx.x] = r[i] * r[(i + 40) % 90] + s[i % 10];
    }
    """
    image = nvrtc.compile(source, nvrtc.options(arch.parse("sm_121"))).image
    assert cubin.read(image).kernel("k").spill_bytes > 0
    return image


def _dumped(image: bytes, directory: Path) -> dict[str, dict[str, str]]:
    """What `cuobjdump --dump-resource-usage` prints: kernel to REG, STACK, SHARED, LOCAL."""
    path = directory / "image.cubin"
    path.write_bytes(image)
    program = wheels.find("bin/cuobjdump", wheel="nvidia-cuda-cuobjdump", purpose="as the tests' second opinion")
    done = subprocess.run([program, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    found = re.findall(r"Function (\S+):\s+(REG:.*)", done.stdout)
    return {name: dict(pair.split(":") for pair in line.split()) for name, line in found}


def _reported(log: str) -> dict[str, tuple[int, int]]:
    """What `ptxas -v` prints: kernel to bytes of spill stores, with those of its functions, and of shared memory."""
    found: dict[str, tuple[int, int]] = {}
    for part in log.split("Compiling entry function ")[1:]:
        shared = re.search(r"(\d+) bytes smem", part)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", part)))
        found[part.split("'")[1]] = spills, int(shared[1]) if shared else 0
    return found


def test_registers_stack_shared_and_local_memory_agree_with_cuobjdump(compiled: nvrtc.Compiled, tmp_path: Path) -> None:
    info = cubin.read(compiled.image)
    dumped = _dumped(compiled.image, tmp_path)
    assert {kernel.name for kernel in info.kernels} == dumped.keys() == KERNELS
    for kernel in info.kernels:
        expected = dumped[kernel.name]
        assert kernel.registers == int(expected["REG"]), kernel
        assert kernel.stack_bytes == int(expected["STACK"]), kernel
        assert kernel.shared_bytes + kernel.reserved_shared_bytes == int(expected["SHARED"]), kernel
        assert kernel.local_bytes == int(expected["LOCAL"]), kernel


def test_spills_and_declared_shared_memory_agree_with_ptxas(compiled: nvrtc.Compiled) -> None:
    info = cubin.read(compiled.image)
    reported = _reported(compiled.log)
    assert {kernel.name: (kernel.spill_bytes, kernel.shared_bytes) for kernel in info.kernels} == reported
    assert info.kernel("spills").spill_bytes > 0
    assert info.kernel("spills_with_array").spill_bytes > 0
    assert info.kernel("spills_wide").spill_bytes > 0
    assert any(re.search(r"\bSTL\.(64|128)\b", line) for line in cubin.sass(compiled.image))


def test_a_local_array_is_stack_and_no_spill(compiled: nvrtc.Compiled) -> None:
    kernel = cubin.read(compiled.image).kernel("local_array")
    assert (kernel.stack_bytes, kernel.spill_bytes) == (400, 0)


def test_a_kernel_without_a_stack_frame_has_no_spills(compiled: nvrtc.Compiled) -> None:
    info = cubin.read(compiled.image)
    assert info.kernel("plain").stack_bytes == 0
    assert all(kernel.spill_bytes == 0 for kernel in info.kernels if kernel.stack_bytes == 0)
    assert all(kernel.stack_bytes > 0 for kernel in info.kernels if kernel.spill_bytes > 0)


def test_shared_memory_is_what_the_source_declares_and_the_system_s_share_is_apart(compiled: nvrtc.Compiled) -> None:
    info = cubin.read(compiled.image)
    declared = {kernel.name: kernel.shared_bytes for kernel in info.kernels}
    assert (declared["plain"], declared["static_shared"], declared["dynamic_shared"]) == (0, 4000, 0)
    # The dynamic part is aligned to 16 B, so what stands before it may be padded.
    assert 56 <= declared["both_shared"] <= 64
    reserved = {kernel.reserved_shared_bytes for kernel in info.kernels}
    assert reserved == ({0} if info.arch in ("sm_80", "sm_89") else {1024})


def test_launch_bounds_are_read(compiled: nvrtc.Compiled) -> None:
    info = cubin.read(compiled.image)
    bounds = {kernel.name: kernel.max_threads for kernel in info.kernels}
    assert bounds["plain"] is None
    assert (bounds["static_shared"], bounds["spills"], bounds["_Z8instanceILi96EEvPf"]) == (256, 1024, 96)


def test_an_unknown_kernel_is_an_error_that_lists_those_there(compiled: nvrtc.Compiled) -> None:
    with pytest.raises(ToolchainError, match=r"no kernel 'nope' in this cubin; it has: _Z8instance.*, plain, "):
        cubin.read(compiled.image).kernel("nope")


def test_recursion_has_no_bound_and_reads_as_the_frame_alone() -> None:
    source = """
    __device__ __noinline__ int down(int* a, int n) { return n <= 0 ? a[0] : down(a + 1, n - 1) * 3 + a[n] * n; }
    extern "C" __global__ void k(int* a, int n) { a[0] = down(a, n) + down(a + 1, n); }
    """
    for name in ("sm_80", "sm_90a"):
        kernel = cubin.read(nvrtc.compile(source, nvrtc.options(arch.parse(name))).image).kernel("k")
        assert kernel.stack_bytes < 1024


def test_sass_is_one_instruction_a_line_without_offsets(small: bytes) -> None:
    lines = cubin.sass(small)
    assert sum("STG.E" in line for line in lines) == 90
    assert sum(re.match(r"(@!?U?P\d+ )?STL", line) is not None for line in lines) > 0
    assert all(re.match(r"(@!?U?P[\dT]+ )?[A-Z][A-Z0-9_.]*( |$)", line) for line in lines), lines[:5]
    assert len(lines) * 16 == cubin.read(small).kernel("k").code_bytes


@pytest.mark.nightly(by_day=("sm_121a",))
@pytest.mark.parametrize("compiled", ["sm_90a", "sm_121a"], indirect=True)
def test_many_cubins_are_listed_by_one_run_as_each_by_itself(
    compiled: nvrtc.Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = cubin.read(compiled.image).target
    assert target is not None
    tiny = nvrtc.compile('extern "C" __global__ void k(int* o) { *o = 7; }', nvrtc.options(arch.parse(target))).image
    images = [tiny, compiled.image, tiny]
    runs, run = [], subprocess.run

    def counted(*arguments: Any, **more: Any) -> Any:
        runs.append(arguments)
        return run(*arguments, **more)

    monkeypatch.setattr(subprocess, "run", counted)
    found = cubin.sass_of(images, target)
    assert len(runs) == 1

    def opcodes(lines: list[str]) -> list[str]:
        # Branches name offsets here and labels there, and functions of one cubin may come in another order.
        return sorted(re.match(r"(@\S+ )?\S+", line)[0] for line in lines)  # type: ignore[index]

    for image, lines in zip(images, found, strict=True):
        assert opcodes(lines) == opcodes(cubin.sass(image))
    assert cubin.sass_of([], target) == []


def test_a_cubin_cut_short_and_an_unknown_target_are_refused_among_many(small: bytes) -> None:
    with pytest.raises(ToolchainError, match=f"the file has {len(small) - 1} B"):
        cubin.sass_of([small, small[:-1]], "sm_121a")
    with pytest.raises(ToolchainError, match="nvdisasm refuses"):
        cubin.sass_of([small], "sm_999")


def test_a_listing_has_offsets_and_names(small: bytes) -> None:
    listing = cubin.disassemble(small)
    assert ".text.k" in listing
    assert "/*0010*/" in listing


def test_the_missing_last_byte_is_noticed_by_reader_and_disassembler(small: bytes) -> None:
    with pytest.raises(ToolchainError, match=rf"end at {len(small)} B, but the file has {len(small) - 1} B"):
        cubin.read(small[:-1])
    with pytest.raises(ToolchainError, match=r"nvdisasm refuses the image of \d+ B: .*pip install -U nvidia"):
        cubin.sass(small[:-1])


def test_without_nvdisasm_the_error_says_which_package_has_it(small: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "roots", lambda: ())
    with pytest.raises(ToolchainError, match=r"nvdisasm is missing, .*pip install nvidia-cuda-nvdisasm"):
        cubin.sass(small)


def test_an_nvdisasm_that_does_not_run_is_an_error_with_a_remedy(
    small: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "nvdisasm"
    program.parent.mkdir()
    program.write_text("not a program")
    monkeypatch.setattr(wheels, "roots", lambda: (tmp_path,))
    with pytest.raises(ToolchainError, match=r"nvdisasm does not run: .*--force-reinstall nvidia-cuda-nvdisasm"):
        cubin.sass(small)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"", "not an ELF file: 0 B that start with nothing"),
        (b"\x7fELF", "not an ELF file: 4 B"),
        (b"MZ" + b"\0" * 100, "not an ELF file: 102 B that start with 4d5a0000"),
        (b"\x7fELF\x01\x01" + b"\0" * 100, "not a 64-bit little-endian ELF file"),
        (Path("/bin/sh").read_bytes(), "not a cubin: an ELF file for machine "),
    ],
)
def test_what_is_no_cubin_is_refused_by_what_it_is(image: bytes, message: str) -> None:
    with pytest.raises(ToolchainError, match=message):
        cubin.read(image)


def test_a_note_that_is_cut_off_is_refused(small: bytes) -> None:
    image = bytearray(small)
    place = image.index(b"NVIDIA Corp\0") - 8
    image[place : place + 4] = (100_000).to_bytes(4, "little")
    with pytest.raises(ToolchainError, match=r"a note in \.note\.nv.* is cut off"):
        cubin.read(bytes(image))


def test_a_cubin_without_the_note_of_ptxas_has_no_target(small: bytes) -> None:
    info = cubin.read(small.replace(b"-arch sm_121a", b"-else sm_121a"))
    assert (info.arch, info.target) == ("sm_121", None)


def _reads_or_refuses(image: bytes) -> None:
    try:
        info = cubin.read(image)
    except ToolchainError:
        return
    assert isinstance(info, cubin.CubinInfo)


_QUICK = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_QUICK
@given(st.data())
def test_flipped_bytes_are_read_or_refused(small: bytes, data: st.DataObject) -> None:
    image = bytearray(small)
    for _ in range(data.draw(st.integers(1, 6))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    _reads_or_refuses(bytes(image))


@_QUICK
@given(st.data())
def test_flipped_bytes_in_the_tables_are_read_or_refused(small: bytes, data: st.DataObject) -> None:
    # The header, the section headers at the end, and the names at the start: where a byte decides where others are.
    image = bytearray(small)
    table = int.from_bytes(small[40:48], "little")
    places = st.one_of(st.integers(0, 63), st.integers(table, len(small) - 1), st.integers(64, 4096))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(places)
        image[place : place + 4] = data.draw(st.binary(min_size=1, max_size=8))[: len(image) - place]
    _reads_or_refuses(bytes(image))


@_QUICK
@given(st.data())
def test_cut_doubled_and_shifted_images_are_read_or_refused(small: bytes, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(small)))
    second = data.draw(st.integers(0, len(small)))
    _reads_or_refuses(small[:first] + small[second:])


@_QUICK
@given(st.binary(max_size=400))
def test_any_bytes_after_a_cubin_s_first_are_read_or_refused(small: bytes, data: bytes) -> None:
    _reads_or_refuses(small[:18] + data)
    _reads_or_refuses(data)


def test_every_image_cut_short_is_refused(small: bytes) -> None:
    for size in [*range(0, len(small), 997), *range(len(small) - 70, len(small))]:
        with pytest.raises(ToolchainError):
            cubin.read(small[:size])


def test_disassembling_needs_no_place_for_temporary_files(small: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    assert any("EXIT" in line for line in cubin.sass(small))


def test_where_even_memory_cannot_be_had_disassembling_is_an_error_of_the_toolchain(
    small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.memfd_create", refuse)
    with pytest.raises(ToolchainError, match=r"nvdisasm does not run: .*Too many open files"):
        cubin.sass(small)
