"""Hosts that share a remote cache: one compile a kernel in all, and no harm from a remote that dies at any moment."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import remote_world
from clock import AGAIN, TooSlow, assert_within, within
from jitmx.cache.answers import Answers
from jitmx.cache.remote import Remote
from jitmx.cache.store import Store
from jitmx.cache.verify import verify

pytestmark = AGAIN

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytest.importorskip("moto")

KERNELS = 5

# Forks 16 processes of 2 hosts that ask for the same kernels at once, each in an order of its own.
CROWD = """
import hashlib, os, random, sys
import counting
counting.count_in(sys.argv[1])
from jitmx import arch, build, settings
from jitmx.kernels import probe
from jitmx.toolchain import nvrtc
import fsspec, s3fs

nvrtc.identity()
gate_out, gate_in = os.pipe()
result_out, result_in = os.pipe()
children = []
for number in range(16):
    child = os.fork()
    if child == 0:
        os.close(gate_in)
        os.environ["JITMX_CACHE_DIR"] = f"{sys.argv[2]}/host{number % 2}"
        settings.reload()
        os.read(gate_out, 1)
        factors = list(range(2, 2 + int(sys.argv[3])))
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


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with remote_world.server() as found:
        yield found


@pytest.fixture
def s3(port: int, tmp_path: Path) -> dict[str, str]:
    """The variables of hosts that share a folder of the server's."""
    return {**remote_world.variables(port), "JITMX_REMOTE_CACHE": f"s3://kernels/{tmp_path.name}"}


def count(log: Path, what: str = "compile") -> int:
    return log.read_text().split().count(what) if log.exists() else 0


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_16_processes_on_2_hosts_compile_each_kernel_once_in_all(
    project: Any, tmp_path: Path, s3: dict[str, str], kind: str
) -> None:
    log = tmp_path / "log"
    where = s3 if kind == "s3" else {"JITMX_REMOTE_CACHE": f"file://{tmp_path}/shared"}
    done = project.run(CROWD, log, tmp_path, KERNELS, JITMX_REMOTE_WRITE="1", JITMX_REMOTE_TIMEOUT="30", **where)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 16 * KERNELS and done.stderr == ""
    assert count(log) == KERNELS
    assert Counter(status for _, _, status, _ in rows)["compiled"] == KERNELS
    assert len({(factor, digest) for _, factor, _, digest in rows}) == KERNELS
    for host in ("host0", "host1"):
        store = Store(tmp_path / host)
        assert len(list(store.records())) == KERNELS and verify(store, grace=-60).findings == ()


REQUIRED = """
import json, sys
import counting
counting.count_in(sys.argv[1])
from jitmx import arch, build
from jitmx.kernels import probe
for factor in range(2, 4):
    print(json.dumps(build.obtain(probe.SCALE.variant(arch.parse("sm_121a"), factor=factor)).status))
"""


def test_a_fresh_host_serves_from_the_remote_without_a_compiler_call(
    project: Any, tmp_path: Path, s3: dict[str, str]
) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    project.run(REQUIRED, first, JITMX_REMOTE_WRITE="1", **s3)
    assert count(first) == 2
    done = project.run(REQUIRED, then, JITMX_MODE="required", **s3 | {"JITMX_CACHE_DIR": str(tmp_path / "fresh")})
    assert [json.loads(line) for line in done.stdout.splitlines()] == ["hit"] * 2
    assert not then.exists(), "neither a compile nor a scan"
    # What came from there is kept: the next process needs no remote.
    alone = {"JITMX_MODE": "required", "JITMX_CACHE_DIR": str(tmp_path / "fresh")}
    assert project.run(REQUIRED, then, **alone).stdout == done.stdout


# A process that serves 24 kernels at least, and on until it is told to stop, whatever becomes of the remote; it says
# how many it has served, and how long one took.
SERVE = """
import json, os, random, sys, time
from jitmx import arch, build, settings
from jitmx.cache import answers, claim
from jitmx.kernels import probe
from jitmx.toolchain import nvrtc

answers._FIRST, answers._MOST, claim.LEASE = 0.02, 0.1, 0.3
place, number, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3]
target = arch.parse("sm_121a")
# The registers promised do not change the code, so its image is known.
known = nvrtc.compile(build.key_inputs(probe.SCALE.variant(target))[1], nvrtc.options(target))
compiled = 0
def compile(*arguments, **more):
    global compiled
    compiled += 1
    return known
nvrtc.compile = compile
turn, served, longest = random.Random(number), 0, 0.0
print("ready", flush=True)
while served < 24 or not os.path.exists(stop):
    if served % 12 == 0:  # as a host that has just started
        os.environ["JITMX_CACHE_DIR"] = f"{place}/{number}-{served}"
        settings.reload()
    began = time.monotonic()
    built = build.obtain(probe.SCALE.variant(target, registers=turn.randrange(40, 64)))
    assert built.image == known.image, "a bad image was served"
    longest, served = max(longest, time.monotonic() - began), served + 1
print(json.dumps([served, compiled, longest]), flush=True)
os._exit(0)  # threads may still wait for the dead
"""


def serving(project: Any, tmp_path: Path, processes: int, **variables: str) -> list[subprocess.Popen[str]]:
    started = [
        project.start(
            SERVE, tmp_path, number, tmp_path / "stop", JITMX_REMOTE_WRITE="1", JITMX_REMOTE_TIMEOUT="0.2",
            JITMX_LOCK_TIMEOUT="2", **variables,
        )
        for number in range(processes)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()[1]
    return started


def settle(started: list[subprocess.Popen[str]], tmp_path: Path) -> list[tuple[int, int, float]]:
    (tmp_path / "stop").touch()
    found = []
    for process in started:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert err.count("does not work") <= 2, "one warning of reading, one of writing"
        found.append(tuple(json.loads(out)))
    return found


def wait_until(done: Callable[[], bool]) -> None:
    """Wait until something is so, for a minute at most."""
    deadline = time.monotonic() + 60
    while not done():
        if time.monotonic() > deadline:
            raise TooSlow("not so within a minute")
        time.sleep(0.1)


def test_a_remote_killed_at_random_moments_stops_nobody_and_spoils_nothing(
    project: Any, tmp_path: Path, port: int, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, nightly: bool
) -> None:
    own = remote_world.free_port()
    way = remote_world.start_way(own, port)
    started = serving(project, tmp_path, 2, **s3 | remote_world.variables(own))
    moments = random.Random(20240607)
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"endpoint_url": f"http://127.0.0.1:{port}", "key": "a", "secret": "b"}
    )
    url = s3["JITMX_REMOTE_CACHE"]
    try:
        for _ in range(100 if nightly else 25):
            time.sleep(moments.uniform(0.0, 0.2))
            remote_world.stop(way)
            way = remote_world.start_way(own, port)
        wait_until(lambda: len(keys_of(url)) > 5)
    finally:
        remote_world.stop(way)
    for served, compiled, longest in settle(started, tmp_path):
        assert 0 < compiled < served
        assert_within(longest, 12)  # nobody waits for the dead for ever
    reader = Remote(url, timeout=20, trusted=None, writes=False)
    assert all(reader.entry(key) for key in keys_of(url)), "a bad entry is there"
    for place in tmp_path.glob("*-*"):
        kinds = {finding.kind for finding in verify(Store(place), grace=-60).findings}
        assert kinds == set(), place


def keys_of(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return [name.rpartition("/")[2].removesuffix(".jitmx") for name in files.find(f"{root}/v1/entries")]


def test_a_server_that_is_killed_and_comes_back_empty_is_filled_again(project: Any, tmp_path: Path) -> None:
    port = remote_world.free_port()
    server = remote_world.start_server(port)
    remote_world.make_bucket(port)
    url = "s3://kernels/again"
    started = serving(project, tmp_path, 1, JITMX_REMOTE_CACHE=url, **remote_world.variables(port))
    try:
        for _ in range(2):
            time.sleep(1)
            remote_world.stop(server)
            time.sleep(0.5)
            server = remote_world.start_server(port)
            remote_world.make_bucket(port)
        answering = Answers(f"http://127.0.0.1:{port}/kernels", 10)
        wait_until(lambda: b"<Key>again/v1/entries/" in (answering.read("", 1 << 20) or b""))  # written again
        [(_, _, longest)] = settle(started, tmp_path)
        assert_within(longest, 12)
    finally:
        remote_world.stop(server)


def test_a_remote_that_is_dead_from_the_start_costs_one_warning_and_nothing_else(project: Any, tmp_path: Path) -> None:
    dead = {"JITMX_REMOTE_CACHE": "s3://kernels/dead", "JITMX_REMOTE_WRITE": "1", "JITMX_REMOTE_TIMEOUT": "0.5"}
    with within(30):
        done = project.run(REQUIRED, tmp_path / "log", **dead, **remote_world.variables(remote_world.free_port()))
    assert done.stdout.count("compiled") == 2
    said = [line for line in done.stderr.splitlines() if line]
    assert len(said) == 2 and "reading the remote cache" in said[0] and "writing to" in said[1]
    assert os.listdir(project.cache)  # noqa: PTH208
