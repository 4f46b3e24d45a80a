"""Which headers a kernel includes: exactly those, and from nowhere but the pool."""

from __future__ import annotations

import hashlib
import importlib.metadata
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jitmx import arch
from jitmx.errors import CompileError, ToolchainError
from jitmx.registry.render import render
from jitmx.registry.spec import KernelSpec
from jitmx.toolchain import headers, nvrtc
from strategies import SPEC_NAMES, SPECS, arches_of, examples, usual

Include = Callable[[str, str], Path]
SM90 = nvrtc.options(arch.parse("sm_90a"))
KERNEL = 'extern "C" __global__ void k(int* a) { *a = 1; }\n'


def test_a_kernel_without_headers_includes_none() -> None:
    assert nvrtc.scan(KERNEL, SM90) == {}


def test_nested_headers_are_listed_by_the_digest_of_their_files(include: Include) -> None:
    paths = {
        "jitmx/a.cuh": include("jitmx/a.cuh", '#pragma once\n#include "jitmx/b.cuh"\n'),
        "jitmx/b.cuh": include("jitmx/b.cuh", '#ifndef B\n#define B\n#include "c.cuh"\n#endif\n'),
        "jitmx/c.cuh": include("jitmx/c.cuh", "__device__ inline int c() { return 3; }\n"),
    }
    include("jitmx/unused.cuh", "#error unused\n")
    source = '#include "jitmx/a.cuh"\n#include <jitmx/b.cuh>\nextern "C" __global__ void k(int* a) { *a = c(); }\n'
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    assert nvrtc.scan(source, SM90) == digests
    assert list(nvrtc.scan(source, SM90)) == sorted(digests)
    assert nvrtc.compile(source, SM90).image


def test_a_header_in_a_branch_not_taken_is_not_listed(include: Include) -> None:
    for name in ("old", "new", "never"):
        include(f"jitmx/{name}.cuh", f"#define {name.upper()} 1\n")
    source = f"""
        #if __CUDA_ARCH__ >= 900
        #include "jitmx/new.cuh"
        #else
        #include "jitmx/old.cuh"
        #endif
        #if 0
        #include "jitmx/never.cuh"
        #include <no_such_header>
        #endif
        {KERNEL}"""
    assert list(nvrtc.scan(source, SM90)) == ["jitmx/new.cuh"]
    assert list(nvrtc.scan(source, nvrtc.options(arch.parse("sm_80")))) == ["jitmx/old.cuh"]
    assert list(nvrtc.scan(source, (*SM90, "-DOTHER"))) == ["jitmx/new.cuh"]


def test_an_option_decides_a_branch(include: Include) -> None:
    include("jitmx/wide.cuh", "")
    source = f'#ifdef WIDE\n#include "jitmx/wide.cuh"\n#endif\n{KERNEL}'
    assert list(nvrtc.scan(source, SM90)) == []
    assert list(nvrtc.scan(source, (*SM90, "-DWIDE"))) == ["jitmx/wide.cuh"]


def test_a_cuda_header_brings_its_own() -> None:
    found = nvrtc.scan(f"#include <cuda_fp8.h>\n{KERNEL}", SM90)
    assert {"cuda_fp8.h", "cuda_fp8.hpp", "cuda_fp16.h", "cuda_bf16.h"} <= set(found)
    assert "vector_types.h" not in found
    assert all(digest == headers.pool().digest(name) for name, digest in found.items())


@pytest.mark.parametrize(
    "name", ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_fp6.h", "cuda_fp4.h", "math_constants.h"]
)
def test_the_headers_of_small_floats_need_no_wheel_but_the_one_required(name: str) -> None:
    source = f"#include <{name}>\n{KERNEL}"
    found = nvrtc.scan(source, SM90)
    assert name in found
    shipped = {str(file) for file in importlib.metadata.files("nvidia-cuda-runtime") or ()}
    assert {f"nvidia/cu13/include/{header}" for header in found} <= shipped
    assert nvrtc.compile(source, SM90).image


def test_line_and_file_macros_are_the_same_in_scan_and_compile(include: Include) -> None:
    include("jitmx/a.cuh", '#pragma once\nstatic_assert(__LINE__ == 2, "");\n')
    assert nvrtc.compile(f'#include "jitmx/a.cuh"\n{KERNEL}', SM90).image


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('\n#include "jitmx/no.cuh"\n', r"no header 'jitmx/no\.cuh', which the rendered source includes on line 2"),
        ("#include <vector>\n", r"no header 'vector'.*no C\+\+ standard library"),
        ('#include "jitmx/outer.cuh"\n', r"no header 'inner\.cuh', which jitmx/outer\.cuh includes on line 3"),
    ],
)
def test_a_header_that_is_nowhere_is_an_error_that_names_who_includes_it(
    include: Include, source: str, message: str
) -> None:
    include("jitmx/outer.cuh", '#pragma once\n\n#include "inner.cuh"\n')
    for call in (nvrtc.scan, nvrtc.compile):
        with pytest.raises(ToolchainError, match=message) as caught:
            call(source + KERNEL, SM90)
        assert not isinstance(caught.value, CompileError)


def test_a_file_in_the_working_directory_is_never_taken_for_a_header(
    include: Include, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    (work / "jitmx").mkdir(parents=True)
    for name in ("stray.h", "jitmx/stray.cuh", "inner.cuh", "cuda_bf16.h"):
        (work / name).write_text("#define STRAY 1\n#error taken from the working directory\n")
    include("jitmx/outer.cuh", '#include "inner.cuh"\n')
    monkeypatch.chdir(work)
    for directive in ('"stray.h"', "<stray.h>", '"jitmx/stray.cuh"', '"jitmx/outer.cuh"'):
        with pytest.raises(ToolchainError, match="there is no header"):
            nvrtc.compile(f"#include {directive}\n{KERNEL}", SM90)
    source = f'#include "cuda_bf16.h"\n{KERNEL}'
    assert nvrtc.compile(source, SM90).image
    assert nvrtc.scan(source, SM90)["cuda_bf16.h"] == headers.pool().digest("cuda_bf16.h")


def test_environment_variables_bring_in_no_headers(python: Callable[..., str], tmp_path: Path) -> None:
    poison = tmp_path / "poison"
    for directory in (poison, poison / "include", poison / "targets/x86_64-linux/include"):
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("cuda_bf16.h", "cuda_fp16.h", "extra.h"):
            (directory / name).write_text("#error taken from the environment\n")
    code = """
        import hashlib
        from jitmx import arch
        from jitmx.errors import ToolchainError
        from jitmx.toolchain import nvrtc
        options = nvrtc.options(arch.parse("sm_90a"))
        source = '#include <cuda_bf16.h>\\nextern "C" __global__ void k(int* a) { *a = 1; }'
        print(nvrtc.scan(source, options), hashlib.sha256(nvrtc.compile(source, options).image).hexdigest())
        try:
            nvrtc.scan("#include <extra.h>", options)
        except ToolchainError:
            print("refused")
    """
    names = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "INCLUDE")
    clean = python(code)
    assert clean.endswith("refused")
    assert python(code, cwd=poison, **dict.fromkeys(names, str(poison)), NVCC_APPEND_FLAGS=f"-I{poison}") == clean


def test_a_source_cannot_claim_headers_that_it_does_not_include(include: Include) -> None:
    include("jitmx/a.cuh", "")
    source = f'#pragma message("jitmx-include:cuda_fp8.h")\n#include "jitmx/a.cuh"\n{KERNEL}'
    assert list(nvrtc.scan(source, SM90)) == ["jitmx/a.cuh"]


PIECES = (
    '#include "jitmx/{}.cuh"', "#include <jitmx/{}.cuh>", "#if {} > 1", "#ifdef __CUDA_ARCH__", "#else", "#endif",
    "/* {}", "*/", "// #if", "#pragma once", '#if 0\n#include "jitmx/{}.cuh"\n#endif', "# \\\nendif", "int x{};",
)  # fmt: skip


@given(st.lists(st.lists(st.tuples(st.sampled_from(PIECES), st.integers(0, 3)), max_size=6), min_size=4, max_size=4))
@settings(max_examples=examples(60), deadline=None)
def test_where_the_text_tells_what_is_included_nvrtc_says_the_same(texts: list[list[tuple[str, int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (place := Path(folder) / "jitmx").mkdir()
        for name, pieces in enumerate(texts):
            body = "\n".join(piece.format(number) for piece, number in pieces)
            (place / f"{name}.cuh").write_text(f"#pragma once\n{body}\n")
        pool, source = headers.HeaderPool(Path(folder)), f'#include "jitmx/0.cuh"\n{KERNEL}'
        told = pool.included(source)
        assume(told is not None)
        try:
            assert nvrtc._reported(pool, source, SM90, pool.closure(source)) == told
        except (CompileError, ToolchainError):
            return  # no compile has other headers: there is none


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
def test_of_a_kernel_the_text_tells_what_nvrtc_includes(spec: KernelSpec) -> None:
    target = arches_of(spec)[-1]
    pool, source, options = headers.pool(), render(usual(spec, target)), nvrtc.options(target)
    assert pool.included(source) == nvrtc._reported(pool, source, options, pool.closure(source))


def processor_time() -> float:
    """Seconds that this process and those that compile for it have been at work."""
    children = [child.cpu_times() for child in psutil.Process().children()]
    return time.process_time() + sum(times.user + times.system for times in children)


def test_scanning_a_kernel_of_200_lines_takes_less_than_100_ms(include: Include) -> None:
    include("jitmx/a.cuh", "#pragma once\n#include <cuda_bf16.h>\n" + "__device__ inline float f(float x);\n" * 100)
    body = "".join(f"    a[{line}] = a[{line + 1}] * {line}.f;\n" for line in range(200))
    taken = []
    for attempt in range(8):
        source = f'#include "jitmx/a.cuh"\nextern "C" __global__ void k{attempt}(float* a) {{\n{body}}}\n'
        started = processor_time()
        nvrtc.scan(source, SM90)
        taken.append(processor_time() - started)
    # Time on the processor, and the best of several: others may be using the machine.
    assert min(taken) < 0.100, statistics.median(taken)
