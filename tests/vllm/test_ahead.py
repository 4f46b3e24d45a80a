"""Kernels are begun before the weights are there, are waited for, and stand in nobody's way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_world")

from jitmx import batch, settings
from jitmx.errors import NotWarmedError
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.serving.attention import Attention
from jitmx.serving.linear import Packer, Quantizer
from jitmx.serving.needed import variants
from jitmx.toolchain import nvrtc
from jitmx.vllm import ahead, monitor, warmup

FIRST = Quantizer("sm_90a", None, 1, "mxfp4", "bf16")
SECOND = Packer("sm_90a", None, 1, "mxfp4", "rotated")


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with an empty cache, in which nothing was begun."""
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warmup, "_ready", set())
    monkeypatch.setattr(monitor, "_sealed", None)
    monkeypatch.setattr(ahead, "_jobs", {})
    monkeypatch.setattr(ahead, "_later", [])
    settings.reload()
    yield
    monkeypatch.undo()
    settings.reload()


def test_what_was_begun_is_compiled_in_another_thread_and_prepare_only_waits(
    cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    gate, compile_one = threading.Event(), nvrtc.compile

    def wait(*args: Any, **options: Any) -> Any:
        gate.wait(60)
        compiled.append(threading.current_thread().name)
        return compile_one(*args, **options)

    monkeypatch.setattr(nvrtc, "compile", wait)
    for needed in (FIRST, SECOND, FIRST):
        ahead.begin(needed)
    assert compiled == []  # nobody waited
    gate.set()
    built = ahead.take(FIRST)
    assert [each.name for each in variants(FIRST)] == [each.variant.name for each in built.values()]
    assert ahead._jobs[SECOND].exception(60) is None
    monkeypatch.setattr(batch, "build_all", lambda asked, **options: [pytest.fail(each.name) for each in asked])
    warmup.prepare(SECOND)
    assert len(compiled) == 2 and threading.main_thread().name not in compiled
    assert ahead.take(FIRST) == ahead.take(SECOND) == {}  # what was taken is not kept


def test_what_is_asked_for_once_weights_are_there_comes_behind_what_loading_them_waits_for(
    cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    begun = threading.Event()

    def build(asked: list[Any], **options: Any) -> list[Any]:
        begun.wait(60)
        order.append(asked[0].spec.family)
        return []

    monkeypatch.setattr(batch, "build_all", build)
    attention = Attention("sm_90a", None, 64, AttentionProblem(batch=2, context=256))
    for _ in range(2):
        ahead.begin(attention, later=True)
    ahead.begin(FIRST)
    ahead.begin(SECOND)
    begun.set()
    ahead.take(FIRST)
    ahead.take(attention)
    assert order == ["quantize", "pack", "attention"]
    ahead.begin(attention, later=True)
    ahead.take(attention)  # with nothing else in line
    assert order[3:] == ["attention"]


def test_what_nobody_began_is_compiled_by_prepare(cold: None) -> None:
    ahead.begin(FIRST)
    warmup.prepare(SECOND)
    assert {kernel.identity for kernel in warmup._ready} == {each.identity for each in variants(SECOND)}


def test_what_fails_ahead_of_the_weights_is_an_error_of_prepare(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITMX_MODE", "required")
    settings.reload()
    ahead.begin(FIRST)
    with pytest.raises(NotWarmedError, match=r"jitmx warmup --arch sm_90a --variant"):
        warmup.prepare(FIRST)
    (tmp := Path(os.environ["JITMX_CACHE_DIR"])).parent.joinpath("file").write_text("")
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp.parent / "file"))
    monkeypatch.setenv("JITMX_MODE", "auto")
    settings.reload()
    ahead.begin(SECOND)
    assert ahead.take(SECOND) == {}


@pytest.mark.parametrize("usual", [0.005, 0.00005])
@pytest.mark.parametrize("fails", [False, True])
def test_the_gil_changes_hands_soon_while_kernels_are_found_and_as_before_afterwards(
    cold: None, monkeypatch: pytest.MonkeyPatch, usual: float, fails: bool
) -> None:
    seen: list[float] = []

    def build(*args: Any, **options: Any) -> list[Any]:
        seen.append(sys.getswitchinterval())
        if fails:
            raise RuntimeError("as planned")
        return []

    monkeypatch.setattr(batch, "build_all", build)
    before = sys.getswitchinterval()
    sys.setswitchinterval(usual)
    try:
        ahead.begin(FIRST)
        assert ahead.take(FIRST) == {}
        assert seen == [pytest.approx(min(usual, 1e-4), abs=2e-6)]
        assert sys.getswitchinterval() == pytest.approx(usual, abs=2e-6)
    finally:
        sys.setswitchinterval(before)


def test_a_switch_interval_that_someone_else_sets_meanwhile_stays(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval()
    monkeypatch.setattr(batch, "build_all", lambda *args, **options: sys.setswitchinterval(0.02) or [])
    try:
        ahead.begin(FIRST)
        ahead.take(FIRST)
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(before)


# All that the module asks of vLLM is a logger, and importing vLLM takes many times what these processes do.
_STAND_IN = """
import logging, sys, types
sys.modules["vllm"], sys.modules["vllm.logger"] = types.ModuleType("vllm"), types.ModuleType("vllm.logger")
sys.modules["vllm.logger"].init_logger = logging.getLogger
"""


def _run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "JITMX_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", _STAND_IN + script]
    return subprocess.run(command, env=known, capture_output=True, text=True, timeout=240, check=False)


def test_a_forked_child_begins_anew_and_does_not_wait_for_its_parents_thread(tmp_path: Path) -> None:
    script = """
import os, sys
from jitmx.vllm import ahead
from jitmx.serving.linear import Packer, Quantizer
usual = sys.getswitchinterval()
first, second = Quantizer("sm_90a", None, 1, "mxfp4", "bf16"), Packer("sm_90a", None, 1, "mxfp4", "rotated")
ahead.begin(first)
assert len(ahead.take(first)) == 1
from jitmx import batch
from threading import Event
under_way, go_on, build_all = Event(), Event(), batch.build_all
def build(*args, **options):
    under_way.set()
    go_on.wait(60)
    return build_all(*args, **options)
batch.build_all = build
ahead.begin(first)
assert under_way.wait(60) and sys.getswitchinterval() < usual
child = os.fork()
if not child:
    assert sys.getswitchinterval() == usual
    batch.build_all = build_all
    assert ahead.take(first) == {}
    ahead.begin(second)
    os._exit(len(ahead.take(second)))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
go_on.set()
assert len(ahead.take(first)) == 1
"""
    done = _run(script, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_process_that_ends_while_kernels_are_compiled_ends_soon(tmp_path: Path) -> None:
    script = """
from jitmx.vllm import ahead
from jitmx.serving.linear import Linear
from jitmx.toolchain import nvrtc
import threading, time
compile_one = nvrtc.compile
def slow(*args, **options):
    time.sleep(3)
    print("compiled", flush=True)
    return compile_one(*args, **options)
nvrtc.compile = slow
ahead.begin(Linear("sm_90a", None, 8192, 5120, 2880, "bf16", True, "mxfp4", "rotated", "normal"))
while not any(worker.name.startswith("jitmx-build") for worker in threading.enumerate()):
    time.sleep(0.01)
raise SystemExit(7)
"""
    done = _run(f"import os; os.environ['JITMX_JOBS'] = '1'\n{script}", tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stdout.count("compiled") < 4  # what was under way, of the 15 that an empty cache lacks
