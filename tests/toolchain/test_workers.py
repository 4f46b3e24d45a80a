"""The processes that compile: what they see of this one, how they end, and what becomes of a compile when they do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clock import AGAIN, TooSlow
from jitmx import arch
from jitmx.errors import ToolchainError
from jitmx.toolchain import nvrtc, workers

pytestmark = AGAIN

SM90 = nvrtc.options(arch.parse("sm_90a"))
KERNEL = 'extern "C" __global__ void k(float* x) { *x = 1; }\n'
# A second or more of work for NVRTC.
LONG = "".join(f"__device__ float f{n}(float x) {{ return x * {n}.f + sinf(x); }}\n" for n in range(50)) + (
    'extern "C" __global__ void k(float* x) {\n' + "".join(f"*x = f{n}(*x);\n" for n in range(50)) + "}\n"
)


@pytest.fixture(autouse=True)
def no_worker() -> None:
    """No process is left from an earlier test."""
    workers._retire_all()


def children() -> list[psutil.Process]:
    """The processes that compile for this one."""
    return [child for child in psutil.Process().children() if "jitmx.toolchain" in " ".join(child.cmdline())]


def until(said: Callable[[], object], seconds: float = 30) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not said():
        if time.monotonic() > end:
            raise TooSlow(f"not so within {seconds} s")
        time.sleep(0.01)


def test_no_variable_of_the_caller_s_reaches_the_process_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NV_ANYTHING", "LD_PRELOAD_LATER", "PYTHONSTARTUP", "HOME", "TMPDIR", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "/nowhere")
    nvrtc.compile(KERNEL, SM90)
    (child,) = children()
    assert child.environ() == {"LC_ALL": "C", "CUPY_CACHE_DIR": "/"}
    assert child.cwd() == "/"


def warm(folder: Path, cache: str, **variables: str) -> dict[str, object]:
    """Warm one kernel in a process of its own; what came of it."""
    command = [sys.executable, "-m", "jitmx.cli", "warmup", "-q", "--json", "--arch", "sm_121"]
    command += ["--variant", "linear.gemv"]
    environment = {**os.environ, "JITMX_CACHE_DIR": str(folder / cache), **variables}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    (kernel,) = json.loads(done.stdout)["kernels"]
    objects = sorted(path.name for path in (folder / cache / "v1" / "objects").glob("*/*"))
    return {name: kernel[name] for name in ("key", "status", "registers")} | {"objects": objects}


def test_warming_up_under_variables_of_the_compiler_makes_the_code_that_a_clean_machine_makes(tmp_path: Path) -> None:
    clean = warm(tmp_path, "clean")
    for number, variables in enumerate(
        [
            {"NV_NVVM_VERSION": "nvvm70", "FINALIZER_CUBIE": "cubie"},
            {"NV_NVVM_VERSION": "nvvm-next", "FINALIZER_USE_LEGACY_ELF_BUILDER": "1", "LD_BIND_NOW": "1"},
        ]
    ):
        assert warm(tmp_path, str(number), **variables) == clean
    assert warm(tmp_path, "0")["status"] == "hit"
    assert {path.name for path in tmp_path.iterdir()} == {"clean", "0", "1"}


def test_a_worker_serves_one_compile_after_another_and_is_ended_when_nobody_asks_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_LINGER", 0.2)
    nvrtc.compile(KERNEL, SM90)
    (first,) = children()
    nvrtc.compile(KERNEL, SM90)
    assert children() == [first]
    until(lambda: not first.is_running())
    assert not [thread for thread in threading.enumerate() if thread.name == "jitmx-workers"] or not workers._idle
    assert nvrtc.compile(KERNEL, SM90).image


def test_threads_that_compile_at_once_have_a_worker_each() -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(nvrtc.compile(LONG, SM90).image))) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(children()) == 2)
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(set(found)) == 1


def test_a_worker_killed_while_it_is_idle_is_replaced() -> None:
    expected = nvrtc.compile(KERNEL, SM90).image
    (child,) = children()
    child.kill()
    until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert nvrtc.compile(KERNEL, SM90).image == expected
    assert children() != [child]


def test_a_worker_killed_while_it_compiles_is_an_error_that_says_so_and_the_next_compile_has_another() -> None:
    errors: list[ToolchainError] = []

    def work() -> None:
        try:
            nvrtc.compile(LONG, SM90)
        except ToolchainError as error:
            errors.append(error)

    # What is fresh is not tried again: the compile itself may be what kills it.
    thread = threading.Thread(target=work)
    thread.start()
    until(children)
    children()[0].send_signal(signal.SIGKILL)
    thread.join(60)
    assert [str(error) for error in errors] == [
        "the process that compiles ended by signal SIGKILL; JITMX_JOBS=1 if memory is short, else pip install "
        "--force-reinstall cupy-cuda13x nvidia-cuda-nvrtc"
    ]
    assert nvrtc.compile(KERNEL, SM90).image


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_the_process_that_it_compiles_for(how: signal.Signals, tmp_path: Path) -> None:
    source = tmp_path / "long.cu"
    source.write_text(LONG)
    code = (
        "from jitmx import arch; from jitmx.toolchain import nvrtc\n"
        f"nvrtc.compile(open({str(source)!r}).read(), nvrtc.options(arch.parse('sm_90a')))"
    )
    parent = psutil.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until(lambda: [child for child in parent.children() if "jitmx.toolchain" in " ".join(child.cmdline())])
    time.sleep(0.3)
    found = parent.children()
    parent.send_signal(how)
    parent.wait(60)
    assert psutil.wait_procs(found, timeout=60)[1] == []


def test_an_interrupted_compile_leaves_no_answer_for_the_next_one() -> None:
    code = """
import os, signal, threading, time
from jitmx import arch
from jitmx.toolchain import nvrtc, workers
options = nvrtc.options(arch.parse("sm_90a"))
nvrtc.compile(SHORT, options)

def interrupt():
    while workers._idle:
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    nvrtc.compile(LONG, options)
except KeyboardInterrupt:
    print(len(nvrtc.compile(SHORT, options).image))
"""
    done = subprocess.run(
        [sys.executable, "-c", f"SHORT, LONG = {KERNEL!r}, {LONG!r}{code}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if not done.stdout and not done.stderr:
        raise TooSlow("the interrupt came when all was compiled")
    assert done.stdout == f"{len(nvrtc.compile(KERNEL, SM90).image)}\n", done.stderr


FORK = """
import os, signal, sys, threading, time
from jitmx import arch
from jitmx.toolchain import nvrtc, workers
options = nvrtc.options(arch.parse("sm_121"))
nvrtc.compile(SHORT, options)
thread = threading.Thread(target=nvrtc.compile, args=(LONG, options))
thread.start()
time.sleep(0.3)
workers._lock.acquire()  # as a thread of the parent may hold it at any moment
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if nvrtc.compile(SHORT, options).image and not workers._idle[1:] else 1)
workers._lock.release()
status = os.waitpid(child, 0)[1]
thread.join()
print(status, len(nvrtc.compile(SHORT, options).image) > 0)
"""


def test_a_child_forked_while_a_thread_compiles_has_workers_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"SHORT, LONG = {KERNEL!r}, {LONG!r}{FORK}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "0 True\n", done.stderr


def test_a_file_in_the_working_directory_takes_the_place_of_no_module(tmp_path: Path) -> None:
    for name in ("cuda", "cupy_backends", "jitmx", "ctypes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(9)\n")
    # The process itself has its modules before it gets there, and only then looks into it.
    code = (
        "import os, sys\nfrom jitmx import arch\nfrom jitmx.toolchain import nvrtc\n"
        f"os.chdir({str(tmp_path)!r})\nassert '' in sys.path\n"
        f"print(len(nvrtc.compile({KERNEL!r}, nvrtc.options(arch.parse('sm_90a'))).image) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_compiling_and_disassembling_work_whichever_standard_descriptors_are_closed(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    result = tmp_path / "result"
    code = f"""
import os
for descriptor in {closed!r}:
    os.close(descriptor)
from jitmx import arch
from jitmx.toolchain import cubin, nvrtc
found = cubin.sass(nvrtc.compile({KERNEL!r}, nvrtc.options(arch.parse("sm_90a"))).image)
with open({str(result)!r}, "w") as file:
    file.write(str(any("STG" in line for line in found)))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert result.read_text() == "True"


def test_a_python_that_cannot_be_started_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ToolchainError, match=r"no process can be started to compile in \(/nowhere/python: .*No such"):
        nvrtc.compile(KERNEL, SM90)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_what_a_worker_that_does_not_come_up_prints_is_in_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", "echo one >&2; echo two >&2; exit 3"))
    with pytest.raises(ToolchainError, match="the process that compiles ended with exit status 3: one / two; pip"):
        nvrtc.compile(KERNEL, SM90)


def test_a_python_that_needs_a_library_path_is_started_with_it_and_no_other_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    needs = f'echo "$LD_LIBRARY_PATH" >>{log}; [ -n "$LD_LIBRARY_PATH" ] || exit 127; exec {sys.executable} "$@"'
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", needs))
    with pytest.raises(ToolchainError, match="ended with exit status 127"):
        nvrtc.compile(KERNEL, SM90)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/some/where")
    assert nvrtc.compile(KERNEL, SM90).image
    assert log.read_text().split("\n") == ["", "", "/some/where", ""]


def test_a_package_that_is_missing_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    code = f"""
import sys
from jitmx import arch
from jitmx.toolchain import nvrtc, wheels
nvrtc.identity()
sys.path[:] = [path for path in sys.path if "packages" not in path]
try:
    nvrtc.compile({KERNEL!r}, nvrtc.options(arch.parse("sm_90a")))
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.search(r"CuPy's NVRTC binding cannot be used: .*pip install -U cupy-cuda13x", done.stdout), done.stderr
