"""Many processes, killed processes, moved projects: each in processes of its own, with real compiles."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clock import AGAIN, TooSlow, assert_within
from jitmx.cache import store as stores
from jitmx.cache.verify import verify

pytestmark = AGAIN

# Forks processes that ask for the same 8 kernels at once, each in an order of its own.
CROWD = """
import hashlib, os, random, sys
import counting
counting.count_in(sys.argv[1])
from jitmx import arch, build
from jitmx.kernels import probe
from jitmx.toolchain import nvrtc

nvrtc.identity()
gate_out, gate_in = os.pipe()
result_out, result_in = os.pipe()
children = []
for number in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        os.close(gate_in)
        os.read(gate_out, 1)
        factors = list(range(2, 10))
        random.Random(number).shuffle(factors)
        for factor in factors:
            built = build.obtain(probe.SCALE.variant(arch.parse("sm_121a"), factor=factor))
            digest = hashlib.sha256(built.image).hexdigest()
            os.write(result_in, f"{number} {factor} {built.status} {digest}\\n".encode())
        os._exit(0)
    children.append(child)
os.close(result_in)
os.close(gate_in)
with open(result_out) as stream:
    sys.stdout.write(stream.read())
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""

OBTAIN = """
import hashlib, json, os, sys
import counting
counting.count_in(sys.argv[1])
from jitmx import arch, build
from jitmx.kernels import probe
for factor in sys.argv[2:]:
    built = build.obtain(probe.SCALE.variant(arch.parse("sm_121a"), factor=int(factor)))
    print(json.dumps([built.status, built.key, hashlib.sha256(built.image).hexdigest()]), flush=True)
"""


def compiles(log: Path) -> int:
    return log.read_text().split().count("compile") if log.exists() else 0


def scans(log: Path) -> int:
    return log.read_text().split().count("scan") if log.exists() else 0


def results(text: str) -> list[list[str]]:
    return [json.loads(line) for line in text.splitlines()]


def test_many_processes_that_ask_for_the_same_8_kernels_make_8_compiles(
    project: Any, tmp_path: Path, nightly: bool
) -> None:
    log, many = tmp_path / "log", 64 if nightly else 20
    rows = [line.split() for line in project.run(CROWD, log, many).stdout.splitlines()]
    assert len(rows) == many * 8
    assert compiles(log) == 8
    assert scans(log) == 8, "looking which headers a source includes takes the compiler too"
    assert Counter(status for _, _, status, _ in rows) == {"compiled": 8, "hit": many * 8 - 8}
    assert {factor: status for _, factor, status, _ in rows if status == "compiled"}.keys() == set("23456789")
    digests = {factor: digest for _, factor, _, digest in rows}
    assert len(set(digests.values())) == 8
    assert all(digests[factor] == digest for _, factor, _, digest in rows)
    store = stores.Store(project.cache)
    found = {str(record.knobs["factor"]): store.lookup(record.key) for record in store.records()}
    assert {factor: hashlib.sha256(entry.image).hexdigest() for factor, entry in found.items() if entry} == digests
    assert verify(store, grace=-60).findings == ()


def test_processes_that_share_nothing_but_the_cache_share_its_kernels(project: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    started = [project.start(OBTAIN, log, *range(2, 5)) for _ in range(5)]
    done = []
    for process in started:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        done.append(results(out))
    assert compiles(log) == 3
    assert all([row[1:] for row in rows] == [row[1:] for row in done[0]] for rows in done)


# Two processes at a time work on one cache, until each is killed at a random moment: one compiles for real, the other
# publishes as fast as it can, or verifies and prunes.
KILLS = """
import os, random, signal, sys, time, traceback
from jitmx import arch, build, settings
from jitmx.cache import store as stores
from jitmx.cache.prune import prune
from jitmx.cache.verify import verify
from jitmx.kernels import probe
from jitmx.toolchain import nvrtc, workers

errors, kills = sys.argv[1], int(sys.argv[2])
target = arch.parse("sm_121a")
compile_really = nvrtc.compile
known = compile_really(build.key_inputs(probe.SCALE.variant(target))[1], nvrtc.options(target))
good = known.image

def real(turn):
    return build.obtain(probe.SCALE.variant(target, factor=turn.randrange(3, 1_000_000)))

def quick(turn):
    # The registers promised do not change the code, so its image is known.
    nvrtc.compile = lambda *arguments, **more: known
    built = build.obtain(probe.SCALE.variant(target, registers=turn.randrange(40, 256)))
    assert built.image == good, "a bad image was served"

def sweep(turn):
    store = stores.current()
    if turn.random() < 0.5:
        verify(store, repair=True, grace=turn.choice([0.0, 3600.0]))
    else:
        prune(store, max_bytes=turn.randrange(150_000, 400_000))

def start(work, seed):
    child = os.fork()
    if child:
        return child
    try:
        turn = random.Random(seed)
        while True:
            work(turn)
    except BaseException:
        with open(errors, "a") as stream:
            stream.write(traceback.format_exc())
    os._exit(1)

workers._retire_all()  # a child has none to begin with
began = time.monotonic()
real(random.Random())
# On a busy machine everything takes longer, and so must the lives of those to be killed.
window = min(1.5, max(0.08, 1.5 * (time.monotonic() - began)))

moments = random.Random(20240607)
number = 0
def kept():
    store = stores.current()
    return sum(store.lookup(record.key) is not None for record in store.records())

# A sweep may leave next to nothing: the killing ends when something is there to be looked at.
while number < kills // 2 or (number < 2 * kills and kept() < 4):
    if number >= kills // 2:  # they get nowhere in the time that they have
        window = min(3.0, 1.5 * window)
    pair = [start(real, number), start(quick if number % 3 else sweep, number)]
    number += 1
    ends = sorted((time.monotonic() + moments.uniform(0, window), child) for child in pair)
    for end, child in ends:
        time.sleep(max(0.0, end - time.monotonic()))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.path.exists(errors)
"""

AFTER = """
import hashlib, sys, time
from jitmx import arch, build
from jitmx.kernels import probe
target = arch.parse("sm_121a")
began = time.monotonic()
images = {build.obtain(probe.SCALE.variant(target, registers=r)).image for r in range(40, 256, 8)}
factors = [int(text) for text in sys.argv[1:]]
for factor in factors:
    built = build.obtain(probe.SCALE.variant(target, factor=factor))
    print(factor, hashlib.sha256(built.image).hexdigest())
assert len(images) == 1
print(time.monotonic() - began, file=sys.stderr)
"""


def test_processes_killed_at_random_moments_leave_a_cache_that_works(
    project: Any, tmp_path: Path, nightly: bool
) -> None:
    errors = tmp_path / "errors"
    project.run(KILLS, errors, 400 if nightly else 30, JITMX_LOCK_TIMEOUT="60")
    assert not errors.exists(), errors.read_text()
    store = stores.Store(project.cache)
    sound = [record for record in store.records() if store.lookup(record.key)]
    if len(sound) <= 2:
        raise TooSlow(f"the killed processes left {len(sound)} entries")
    assert len({record.outputs["object"] for record in sound if record.knobs["registers"] != 255}) <= 1
    left = [finding.kind for finding in verify(store, grace=-60).findings]
    assert "corrupt-record" not in left and "corrupt-object" not in left, "renames are all or nothing"
    factors = sorted(record.knobs["factor"] for record in sound if record.knobs["factor"] != 2)[:12]
    after = project.run(AFTER, *factors, JITMX_LOCK_TIMEOUT="60")
    assert_within(float(after.stderr.splitlines()[-1]), 50)  # no lock was wedged
    fresh = project.run(AFTER, *factors, JITMX_MODE="off")
    assert after.stdout == fresh.stdout, "what was kept is what is compiled"
    assert verify(store, repair=True, grace=-60).unmended == ()
    assert verify(store, grace=-60).findings == ()
    kept = {record.knobs["factor"]: store.lookup(record.key) for record in store.records()}
    assert all(kept[factor] is not None for factor in factors)


HANG = """
import pathlib, time
from jitmx.toolchain import nvrtc
def hang(*arguments, **more):
    pathlib.Path({began!r}).touch()
    time.sleep(300)
nvrtc.compile = hang
"""


def test_a_process_killed_in_the_middle_of_a_compile_leaves_the_kernel_to_the_next(
    project: Any, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    hanging = OBTAIN.replace("for factor", HANG.format(began=str(began)) + "for factor")
    first = project.start(hanging, tmp_path / "log", 2)
    try:
        deadline = time.monotonic() + 60
        while not began.exists():
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.01)
        second = project.start(OBTAIN, tmp_path / "log", 2)
        time.sleep(1.5)
        assert second.poll() is None, "it waits for the first"
        first.send_signal(signal.SIGKILL)
        out, err = second.communicate(timeout=60)
        assert second.returncode == 0, err
        assert results(out)[0][0] == "compiled"
    finally:
        first.kill()
        first.communicate()


@pytest.mark.parametrize("change", ["place", "user", "everything"])
def test_a_moved_project_and_another_user_find_the_same_kernels(
    project: Any, make_project: Callable[[str], Any], tmp_path: Path, change: str
) -> None:
    log = tmp_path / "log"
    before = results(project.run(OBTAIN, log, 2, 3).stdout)
    there = project if change == "user" else make_project("a place with spaces/and ümlauts")
    elsewhere = {
        "HOME": str(tmp_path / "home"),
        "USER": "somebody",
        "LOGNAME": "somebody",
        "PATH": "/nowhere:/bin",
        "CUDA_HOME": "/nowhere/cuda",
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C",
        "TMPDIR": str(tmp_path),
        "PYTHONHASHSEED": "4711",
    }
    if change == "everything":
        for path in there.root.rglob("*"):
            os.utime(path, (4e9, 4e9))
        shutil.move(project.root, tmp_path / "gone")
    after = results(there.run(OBTAIN, log, 3, 2, **({} if change == "place" else elsewhere)).stdout)
    assert [row[0] for row in after] == ["hit", "hit"]
    assert sorted(row[1:] for row in after) == sorted(row[1:] for row in before)
    assert compiles(log) == 2


def test_code_is_the_same_from_process_to_process_and_place_to_place(
    make_project: Callable[[str], Any], tmp_path: Path
) -> None:
    outs = []
    for name in ("one", "another place"):
        there = make_project(name)
        outs.append(results(there.run(OBTAIN, tmp_path / name / "log", 2, JITMX_CACHE_DIR=str(tmp_path / name)).stdout))
    assert outs[0] == outs[1]
    assert outs[0][0][0] == "compiled"


def test_building_writes_to_the_cache_and_nowhere_else(project: Any, tmp_path: Path) -> None:
    # CuPy makes a directory for a cache of its own whenever it is imported; nothing may be put there.
    for name in ("home", "temporary", "work", "cupy"):
        (tmp_path / name).mkdir()

    def outside() -> set[tuple[str, int]]:
        found = (path for path in tmp_path.rglob("*") if not path.is_relative_to(project.cache))
        return {(str(path), path.stat().st_mtime_ns) for path in found}

    before = outside()
    places = {"HOME": "home", "TMPDIR": "temporary", "CUPY_CACHE_DIR": "cupy"}
    places = {name: str(tmp_path / place) for name, place in places.items()}
    script = f"import os; os.chdir({str(tmp_path / 'work')!r})\n" + OBTAIN.replace("counting.count_in(sys.argv[1])", "")
    project.run(script, "", 2, 3, PYTHONDONTWRITEBYTECODE="1", **places)
    assert outside() == before
    assert len(list(project.cache.rglob("*.cubin"))) == 2


SERVE = """
import logging, sys
from jitmx import arch, build
from jitmx.kernels import probe
for _ in range(2):
    for factor in (2, 3, 4):
        print(build.obtain(probe.SCALE.variant(arch.parse("sm_121a"), factor=factor)).status)
"""


@pytest.mark.parametrize("free", [0, 16384])
def test_on_a_full_disk_work_goes_on_with_one_warning(
    project: Any, full_disk: Callable[[int], Path], free: int
) -> None:
    done = project.run(SERVE, JITMX_CACHE_DIR=str(full_disk(free) / "cache"))
    assert done.stdout.split() == ["compiled"] * 3 + ["hit"] * 3
    assert len(done.stderr.splitlines()) == 1 and "cannot be written" in done.stderr


@pytest.mark.parametrize("how", ["mount", "permissions"])
def test_in_a_read_only_directory_work_goes_on_with_one_warning(
    project: Any, read_only: Callable[[Path, str], str], tmp_path: Path, how: str
) -> None:
    project.run(OBTAIN, tmp_path / "log", 2)
    preamble = read_only(project.cache, how)
    done = project.run(preamble + SERVE)
    assert done.stdout.split() == ["hit", "compiled", "compiled", "hit", "hit", "hit"]
    assert len(done.stderr.splitlines()) == 1 and "cannot be written" in done.stderr


def test_a_process_that_only_finds_kernels_does_not_load_the_compiler(project: Any, tmp_path: Path) -> None:
    project.run(OBTAIN, tmp_path / "log", 2)
    script = SERVE.replace("(2, 3, 4)", "(2,)") + "print('cupy_backends' in sys.modules, 'torch' in sys.modules)"
    assert project.run(script).stdout.split() == ["hit", "hit", "False", "False"]
