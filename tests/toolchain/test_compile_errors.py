"""A refused source: the log, the lines around each error, and where the source was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jitmx import arch
from jitmx.errors import CompileError, ToolchainError
from jitmx.toolchain import diagnostics, nvrtc

Include = Callable[[str, str], Path]
Keep = Callable[[str], str | None]
SM121 = nvrtc.options(arch.parse("sm_121"))
BROKEN = """// linear.gemv for sm_121a, rendered by jitmx
extern "C" __global__ void k(float* a) {
    int fine = 1;
    int also_fine = fine;
    a[0] = no_such_name;
    a[1] = also_fine;
    a[2] = 2;
    a[3] = 3;
    a[4] = 4;
    a[5] = 5;
    a[6] = 6;
    a[7] = 7;
    a[8] = 8;
    a[9] = 9;
    a[10] = other_name;
}
"""


def _error(source: str, call: Callable[..., object] = nvrtc.compile, **keep: Keep) -> CompileError:
    with pytest.raises(CompileError) as caught:
        call(source, SM121, **keep)
    return caught.value


def test_the_message_shows_the_log_and_the_rendered_lines_around_each_error() -> None:
    message = str(_error(BROKEN))
    assert message.startswith("NVRTC ")
    assert "refuses the source for sm_121a: 2 errors" in message
    assert 'jitmx.cu(5): error: identifier "no_such_name" is undefined' in message
    excerpt = message[message.rindex("jitmx.cu:") :].splitlines()
    assert excerpt[1] == '     2 | extern "C" __global__ void k(float* a) {'
    assert excerpt[4] == "-->  5 |     a[0] = no_such_name;"
    assert excerpt[7] == "     8 |     a[3] = 3;"
    assert excerpt[8].strip() == "…"
    assert excerpt[12] == "--> 15 |     a[10] = other_name;"
    assert [line for line in excerpt if line.startswith("-->")] == [excerpt[4], excerpt[12]]


# What it includes its text does not tell, so that looking takes NVRTC.
BRANCHED = f"{BROKEN}#ifdef OTHER\n#include <cuda_fp8.h>\n#endif\n"


@pytest.mark.parametrize(("call", "source"), [(nvrtc.compile, BROKEN), (nvrtc.scan, BRANCHED)])
def test_the_refused_source_is_kept_and_the_message_says_where(
    call: Callable[..., object], source: str, tmp_path: Path
) -> None:
    path = tmp_path / "failed.cu"

    def keep(source: str) -> str:
        path.write_text(source)
        return str(path)

    error = _error(source, call, keep_source=keep)
    assert path.read_text() == source
    assert str(error).endswith(f"the rendered source is kept at {path}")
    assert error.source_path == str(path)
    assert "no_such_name" in error.log


def test_a_source_that_could_not_be_kept_is_no_second_error() -> None:
    error = _error(BROKEN, keep_source=lambda source: None)
    assert error.source_path is None
    assert str(error).endswith("the rendered source is not kept")


def test_a_source_that_compiles_is_not_kept() -> None:
    def keep(source: str) -> str | None:
        raise AssertionError(source)

    assert nvrtc.compile('extern "C" __global__ void k() {}', SM121, keep_source=keep).image


def test_an_error_in_a_header_shows_the_lines_of_the_header(include: Include) -> None:
    include("jitmx/a.cuh", '#pragma once\n#include "b.cuh"\n')
    include("jitmx/b.cuh", "#pragma once\n// two\n// three\n__device__ int broken = nowhere;\n// five\n")
    error = _error('#include "jitmx/a.cuh"\nextern "C" __global__ void k() {}\n')
    assert 'jitmx/b.cuh(4): error: identifier "nowhere" is undefined' in error.log
    assert "jitmx/b.cuh:\n    1 | #pragma once\n    2 | // two\n    3 | // three\n--> 4 | __device__" in str(error)


def test_the_log_holds_nothing_of_how_headers_are_found_out(include: Include) -> None:
    include("jitmx/a.cuh", "int a = b;\n")
    error = _error('#include "jitmx/a.cuh"\n')
    assert "jitmx-include" not in str(error) + error.log
    assert "pragma" not in error.log


def test_an_error_in_assembly_shows_the_ptx_around_it() -> None:
    error = _error('extern "C" __global__ void k() {\n    asm volatile("add.f99 %r1, %r2;");\n}\n')
    assert "ptxas" in error.log
    marked = [line for line in str(error).splitlines() if line.startswith("-->")]
    assert len(marked) == 1
    assert marked[0].endswith("add.f99 %r1, %r2;")
    assert "\nPTX:\n" in str(error)


def test_an_error_only_in_the_compile_that_counts_is_reported_too() -> None:
    error = _error('extern "C" __global__ void k(int* a) { __shared__ int s[100000]; s[a[0]] = 1; a[1] = s[a[2]]; }\n')
    assert "too much shared data" in str(error)


def test_many_errors_are_cut_to_what_can_be_read() -> None:
    lines = "".join(f"__device__ int a{number} = missing_{number};\n" for number in range(300))
    message = str(_error(f"{lines}#error last\n"))
    assert len(message.splitlines()) < 250
    assert len(message) < 40_000


def test_a_missing_header_is_told_from_other_errors() -> None:
    log = 'jitmx/a.cuh(3): catastrophic error: could not open source file "b.cuh" (no directories in search list)\n'
    assert diagnostics.missing_header(log) == diagnostics.Missing("b.cuh", "jitmx/a.cuh", 3)
    assert diagnostics.missing_header('jitmx.cu(1): error: "could not open source" is undefined') is None


def test_lines_past_the_end_and_unknown_files_are_left_out() -> None:
    log = "jitmx.cu(99): error: x\nother.h(1): error: y\n"
    assert diagnostics.explain(log, {"jitmx.cu": "one\ntwo\n"}.get) == log.strip()
    assert diagnostics.count_errors(log) == 2
    assert diagnostics.count_errors("") == 1


def test_a_status_other_than_a_refusal_is_no_compile_error() -> None:
    with pytest.raises(ToolchainError, match="fails with NVRTC_ERROR_INVALID_OPTION") as caught:
        nvrtc.compile("", (*SM121, "-std=c++98"))
    assert not isinstance(caught.value, CompileError)
