"""Compiling: targets, whole images, refusals, threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmx import arch
from jitmx.errors import ArchError, ToolchainError
from jitmx.toolchain import cubin, nvrtc

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_120f", "sm_121a")
KERNEL = 'extern "C" __global__ void k(float4* a) { float4 v = a[threadIdx.x]; a[blockDim.x + threadIdx.x] = v; }\n'
SM90 = nvrtc.options(arch.parse("sm_90a"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_compiles_for_every_target_without_a_driver(name: str) -> None:
    target = arch.parse(name)
    nvrtc.check_target(target)
    compiled = nvrtc.compile(KERNEL, nvrtc.options(target))
    info = cubin.read(compiled.image)
    assert (info.arch, info.target) == (f"sm_{target.major}{target.minor}", name)
    assert compiled.log == ""
    assert 0 < compiled.milliseconds < 60_000


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_ends_where_its_elf_says_and_nvdisasm_reads_it(name: str) -> None:
    image = nvrtc.compile(KERNEL, nvrtc.options(arch.parse(name))).image
    assert cubin.read(image).size == len(image)
    assert any("LDG.E.128" in line for line in cubin.sass(image))


def test_every_target_of_jitmx_has_a_first_nvrtc_and_this_one_has_them_all() -> None:
    for target in arch.SUPPORTED.values():
        nvrtc.check_target(target)


def test_a_target_newer_than_nvrtc_is_an_error_that_names_the_release_needed_and_the_one_present(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = nvrtc.Identity("12.8", "0" * 64, Path("/lib/libnvrtc.so"), (75, 80, 90, 100, 120))
    monkeypatch.setattr(nvrtc, "identity", lambda: old)
    with pytest.raises(ArchError, match=r"sm_121a needs NVRTC 12\.9 or later; the one here is 12\.8") as caught:
        nvrtc.check_target(arch.parse("sm_121"))
    assert "pip install -U nvidia-cuda-nvrtc" in str(caught.value)
    with pytest.raises(ArchError, match=r"sm_120f needs NVRTC 12\.9"):
        nvrtc.check_target(arch.parse("sm_120f"))
    nvrtc.check_target(arch.parse("sm_120a"))


def test_a_target_that_nvrtc_has_dropped_is_an_error_that_lists_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    later = nvrtc.Identity("14.0", "0" * 64, Path("/lib/libnvrtc.so"), (90, 100, 120, 121))
    monkeypatch.setattr(nvrtc, "identity", lambda: later)
    with pytest.raises(ArchError, match=r"NVRTC 14\.0 .*does not compile for sm_80.* sm_90, sm_100, sm_120, sm_121;"):
        nvrtc.check_target(arch.parse("sm_80"))


@pytest.mark.parametrize("name", TARGETS)
def test_options_hold_no_paths_and_no_two_of_them_are_alike(name: str) -> None:
    options = nvrtc.options(arch.parse(name))
    assert options[0] == f"-arch={name}"
    assert "--frandom-seed=jitmx" in options
    assert len(set(options)) == len(options)
    assert not any("/" in option or option.startswith("-I") for option in options)


@pytest.mark.parametrize(
    "option",
    ["-I/usr/include", "-I", "--include-path=.", "-include=a.h", "--pre-include=a.h", "--use-bundled-headers=/tmp/h",
     "--use-pch=a.pch", "-pch", "--time=t.csv", "--fdevice-time-trace=t.json"],
)  # fmt: skip
def test_an_option_that_opens_files_is_refused(option: str) -> None:
    with pytest.raises(ToolchainError, match=f"{re.escape(option)} makes NVRTC open files"):
        nvrtc.compile(KERNEL, (*SM90, option))


def test_a_compile_that_may_look_into_the_working_directory_is_refused() -> None:
    with pytest.raises(ToolchainError, match="--no-source-include is missing"):
        nvrtc.compile(KERNEL, ("-arch=sm_90a",))


def test_a_macro_reaches_the_kernel_through_the_options() -> None:
    source = '#if VALUE != 7\n#error wrong\n#endif\nextern "C" __global__ void k(int* a) { *a = VALUE; }\n'
    assert nvrtc.compile(source, (*SM90, "-DVALUE=7")).image
    assert "VALUE=7" not in SM90


@pytest.mark.parametrize(("text", "what"), [("a\0b", "NUL"), ("// \udcff", "no Unicode text")])
def test_a_source_that_nvrtc_would_read_otherwise_than_the_key_does_is_refused(text: str, what: str) -> None:
    with pytest.raises(ToolchainError, match=what):
        nvrtc.compile(KERNEL + text, SM90)


def test_a_source_in_any_script_compiles() -> None:
    assert nvrtc.compile(f"// größer, 大きい, больше 🚀\n{KERNEL}", SM90).image == nvrtc.compile(KERNEL, SM90).image


def test_a_bad_option_is_an_error_with_what_nvrtc_says_of_it() -> None:
    with pytest.raises(ToolchainError, match="NVRTC_ERROR_INVALID_OPTION"):
        nvrtc.compile(KERNEL, (*SM90, "--no-such-option"))


def test_options_without_a_chip_are_an_error_and_not_an_empty_image() -> None:
    options = tuple(option.replace("sm_90a", "compute_90a") for option in SM90)
    with pytest.raises(ToolchainError, match="no machine code"):
        nvrtc.compile(KERNEL, options)


def test_warnings_come_back_in_the_log() -> None:
    compiled = nvrtc.compile(f"{KERNEL}static __device__ int unused_function(int a) {{ int b; return b; }}\n", SM90)
    assert "warning" in compiled.log
    assert "jitmx-include" not in compiled.log


@pytest.mark.parametrize(("name", "virtual"), [("sm_121", "sm_121a"), ("sm_90", "sm_90a"), ("sm_120f", "sm_120f")])
def test_ptx_is_of_the_same_source_and_target(name: str, virtual: str) -> None:
    ptx = nvrtc.compile_ptx(KERNEL, nvrtc.options(arch.parse(name)))
    assert f".target {virtual}\n" in ptx
    assert ".visible .entry k(" in ptx
    assert re.search(r"\bld\.global(\.nc)?\.v[24]\.", ptx)
    assert "\0" not in ptx


def test_threads_that_compile_at_once_get_what_one_thread_gets(local_symbols: str) -> None:
    sources = [f"// {number}\n{local_symbols}".replace("2.f", f"{number}.f") for number in range(6)]
    alone = [nvrtc.compile(source, SM90).image for source in sources]
    nvrtc._included.cache_clear()
    together: dict[int, bytes] = {}
    start = threading.Barrier(3)

    def work(first: int) -> None:
        start.wait()
        for number in range(first, 6, 3):
            together[number] = nvrtc.compile(sources[number], SM90).image

    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together.get(number) for number in range(6)] == alone
    assert len(set(alone)) == 6


def test_threads_may_be_the_first_to_load_nvrtc(python: Callable[..., str]) -> None:
    code = """
        import threading
        from jitmx import arch
        from jitmx.toolchain import nvrtc
        options = nvrtc.options(arch.parse("sm_90a"))
        images, start = [], threading.Barrier(8)
        def work():
            start.wait()
            images.append(nvrtc.compile('extern "C" __global__ void k(int* a) { *a = 1; }', options).image)
        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(len(images), len(set(images)))
    """
    assert python(code) == "8 1"
