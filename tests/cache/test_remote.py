"""What comes from a remote cache is what was put there, or is not taken; a remote that fails costs one warning."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from clock import AGAIN, TooSlow, within
from jitmx import settings
from jitmx.cache import answers, bundle, claim, keys, remote
from jitmx.cache.answers import Answers, Circuit, Unanswered
from jitmx.cache.bundle import Kernel
from jitmx.cache.manifest import Record, Scan
from jitmx.cache.remote import Remote

pytestmark = AGAIN

Make = Callable[..., tuple[Record, bytes, str]]
Pair = Callable[[str], tuple[Any, Path]]

pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    settings.current.cache_clear()
    remote._remotes.clear()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def opened(url: str, *, writes: bool = True, timeout: float = 5.0, **more: Any) -> Remote:
    return Remote(url, timeout=timeout, trusted=more.pop("trusted", None), writes=writes, **more)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote" if request.param == "file" else f"memory://{tmp_path}"


def test_what_is_put_is_found_by_others(url: str, make: Make) -> None:
    kernel, scan = Kernel(*make("a")), Scan("c" * 64, "d" * 64, {"x.h": "e" * 64})
    one = opened(url)
    assert one.entry(kernel.record.key) is None and one.scan(scan.digest) is None
    one.put(kernel)
    one.put_scan(scan)
    other = opened(url, writes=False)
    assert other.entry(kernel.record.key) == kernel and other.scan(scan.digest) == scan


def test_a_remote_that_is_only_read_is_not_written(url: str, make: Make) -> None:
    kernel = Kernel(*make("a"))
    reader = opened(url, writes=False)
    reader.put(kernel)
    reader.put_scan(Scan("c" * 64, "d" * 64, {}))
    with reader.alone(kernel.record.key, 5) as found:
        assert found is None
    assert opened(url).entry(kernel.record.key) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def file_of(folder: Path, key: str) -> Path:
    return folder / "v1" / "entries" / key[:2] / f"{key}.jitmx"


def test_whatever_else_lies_there_is_a_miss_and_one_warning(
    folder: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(*make("a"))
    shared = opened(f"file://{folder}")
    shared.put(kernel)
    path, key = file_of(folder, kernel.record.key), kernel.record.key
    data = path.read_bytes()
    other = bundle.make([Kernel(*make("b"))], [], {})
    both = bundle.make([kernel, Kernel(*make("b"))], [], {})
    none = bundle.make([], [], {})
    flipped = data.replace(kernel.image, kernel.image[:-1] + b"?")
    beside = bundle.make([kernel], [Scan("c" * 64, "d" * 64, {"x.h": "e" * 64})], {}).replace(b'"x.h"', b'"y.h"')
    for odd in (b"", b"x", data[:700], data[:-1], data + b"x", other, both, none, flipped, beside, bytes(len(data))):
        path.write_bytes(odd)
        assert shared.entry(key) is None
    assert len(warnings(caplog)) == 1 and "taken for absent" in caplog.text
    path.write_bytes(data)
    assert shared.entry(key) == kernel, "what is damaged does not stop it from being asked"
    os.truncate(path, 10 << 30)
    assert opened(f"file://{folder}").entry(key) is None
    path.unlink()
    path.mkdir()
    assert shared.entry(key) is None
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert shared.entry(key) is None
    path.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"a file")
    assert shared.entry(key) is None
    assert len([said for said in warnings(caplog) if "does not work" in said]) == 0


def test_a_fifo_in_the_place_of_an_entry_does_not_hold_the_reader(
    folder: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of(folder, make("a")[0].key)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with within(2):
        shared = opened(f"file://{folder}", timeout=0.2)
        assert shared.entry(make("a")[0].key) is None and shared.entry(make("a")[0].key) is None
    assert "no answer within 0.2 s" in caplog.text
    with path.open("wb"):
        pass  # lets the thread that waits go


def test_only_what_a_trusted_key_signed_is_taken(
    folder: Path, make: Make, keypair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    key, public = keypair("own")
    other, _ = keypair("other")
    kernel, scan = Kernel(*make("a")), Scan("c" * 64, "d" * 64, {})
    reader = opened(f"file://{folder}", trusted=keys.public_keys([public]), writes=False)
    for signs, taken in ((None, False), (other, False), (key, True)):
        writer = opened(f"file://{folder}", key=signs)
        writer.put(kernel)
        writer.put_scan(scan)
        assert (reader.entry(kernel.record.key) == kernel) is taken
        assert (reader.scan(scan.digest) == scan) is taken
    assert "signed by nobody" in caplog.text
    # The right signature of another entry.
    opened(f"file://{folder}", key=key).put(Kernel(*make("b")))
    file_of(folder, make("b")[0].key).replace(file_of(folder, kernel.record.key))
    assert reader.entry(kernel.record.key) is None


def test_settings_decide_what_is_asked_and_a_wrong_one_costs_a_warning(
    folder: Path, keypair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def now(**variables: str) -> Remote | None:
        for name in ("REMOTE_CACHE", "REMOTE_WRITE", "BUNDLE_KEYS", "SIGNING_KEY", "MODE"):
            monkeypatch.delenv(f"JITMX_{name}", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"JITMX_{name}", value)
        settings.current.cache_clear()
        caplog.clear()
        return remote.current()

    _, public = keypair("own")
    url, private = f"file://{folder}", str(public.with_name("own.key"))
    assert now() is None
    assert now(REMOTE_CACHE=url, MODE="off") is None
    found = now(REMOTE_CACHE=url)
    assert found is not None and not found.writes and found is remote.current()
    found = now(REMOTE_CACHE=url, REMOTE_WRITE="1")
    assert found is not None and found.writes and not warnings(caplog)
    found = now(REMOTE_CACHE=url, REMOTE_WRITE="1", BUNDLE_KEYS=str(public))
    assert found is not None and not found.writes and "JITMX_SIGNING_KEY names no key" in warnings(caplog)[0]
    found = now(REMOTE_CACHE=url, REMOTE_WRITE="1", BUNDLE_KEYS=str(public), SIGNING_KEY=private)
    assert found is not None and found.writes and not warnings(caplog)
    found = now(REMOTE_CACHE=url, REMOTE_WRITE="1", SIGNING_KEY=str(tmp_path / "absent"))
    assert found is not None and not found.writes and "there is no private key" in warnings(caplog)[0]
    assert now(REMOTE_CACHE=url, BUNDLE_KEYS=str(tmp_path / "absent")) is None, "nothing unsigned is taken"
    assert "going on without the remote cache" in warnings(caplog)[0]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/x", "Cannot connect|Refused|refused"),
        ("file:///proc/nowhere", ""),
    ],
)  # fmt: skip
def test_a_remote_that_is_none_costs_one_warning(
    url: str, said: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    shared = opened(url)
    kernel = Kernel(*make("a"))
    with within(4):
        for _ in range(5):
            assert shared.entry(kernel.record.key) is None
            shared.put(kernel)
            with shared.alone(kernel.record.key, 5) as found:
                assert found is None
    assert len([one for one in warnings(caplog) if "reading" in one]) == (1 if said else 0)
    assert len(warnings(caplog)) == 1 + bool(said) and "going on without" in caplog.text
    assert any(word in caplog.text for word in said.split("|"))


def test_a_url_that_no_driver_opens_is_tried_once_and_costs_one_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []
    really = fsspec.core.url_to_fs
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: tried.append(url) or really(url))
    monkeypatch.setattr(answers, "_FIRST", 0.0)  # of what may answer later, the next question would be asked
    shared = opened("nosuchprotocol://bucket")
    kernel = Kernel(*make("a"))
    for _ in range(3):
        assert shared.entry(kernel.record.key) is None
        shared.put(kernel)
        with shared.alone(kernel.record.key, 5) as found:
            assert found is None
    (said,) = warnings(caplog)
    assert "nosuchprotocol" in said and "unset JITMX_REMOTE_CACHE" in said
    assert tried == ["nosuchprotocol://bucket"]


def test_a_driver_that_is_not_installed_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert opened("file:///tmp").entry(make("a")[0].key) is None
    assert "pip install 'jitmx[remote]'" in warnings(caplog)[0]


def test_a_server_that_never_answers_is_waited_for_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        shared = opened(f"http://127.0.0.1:{silent.getsockname()[1]}/cache", timeout=0.3, writes=False)
        with within(3, least=0.3):
            for _ in range(20):
                assert shared.entry(make("a")[0].key) is None
    assert len(warnings(caplog)) == 1


def test_pauses_double_and_end_with_the_first_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(answers.time, "monotonic", lambda: clock[0])
    circuit = Circuit("it")
    assert circuit.closed()
    for _ in range(8):
        circuit.failed("a crowd that had asked before")
    pauses = []
    for _ in range(8):
        began = clock[0]
        while not circuit.closed():
            clock[0] += 1.0
        assert not circuit.closed(), "one looks whether it is back"
        pauses.append(clock[0] - began)
        circuit.failed("still")
    assert pauses == [15, 30, 60, 120, 240, 480, 600, 600]
    clock[0] += 600
    assert circuit.closed()
    circuit.answered()
    assert circuit.closed() and circuit.closed()
    assert len(warnings(caplog)) == 1


def test_a_remote_that_is_back_is_asked_again(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answers, "_FIRST", 0.05)
    kernel = Kernel(*make("a"))
    opened(f"file://{folder}").put(kernel)
    path = file_of(folder, kernel.record.key)
    path.rename(path.with_name("away"))
    os.mkfifo(path)
    shared = opened(f"file://{folder}", timeout=0.1)
    assert shared.entry(kernel.record.key) is None
    with path.open("wb"):
        pass
    path.with_name("away").replace(path)
    assert shared.entry(kernel.record.key) is None, "not yet"
    time.sleep(0.06)
    assert shared.entry(kernel.record.key) == kernel


SPOIL = """
import os, random, sys, time
from pathlib import Path
folder, turn = Path(sys.argv[1]), random.Random(5)
print("there", flush=True)
while True:
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        try:
            fate = turn.randrange(5)
            if fate == 0:
                os.truncate(path, turn.randrange(path.stat().st_size + 1))
            elif fate == 1:
                path.write_bytes(turn.randbytes(turn.randrange(30_000)))
            elif fate == 2:
                path.unlink()
            elif fate == 3:
                others = list(folder.rglob("*.jitmx"))
                path.write_bytes(turn.choice(others).read_bytes())
            else:
                with path.open("r+b") as stream:
                    stream.seek(turn.randrange(path.stat().st_size + 1))
                    stream.write(b"?")
        except OSError:
            pass
    time.sleep(0.001)
"""


def test_of_a_folder_that_another_process_truncates_and_replaces_nothing_bad_is_taken(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_FIRST", 0.01)
    kernels = [Kernel(*make(f"k{number}")) for number in range(12)]
    shared = opened(f"file://{folder}")
    for kernel in kernels:
        shared.put(kernel)
    spoiler = subprocess.Popen([sys.executable, "-c", SPOIL, folder], stdout=subprocess.PIPE)
    assert spoiler.stdout is not None and spoiler.stdout.readline()
    taken = missed = 0
    try:
        until = time.monotonic() + 2
        turn = random.Random(7)
        while time.monotonic() < until:
            kernel = turn.choice(kernels)
            found = shared.entry(kernel.record.key)
            assert found is None or found == kernel
            taken, missed = taken + (found is not None), missed + (found is None)
            shared.put(kernel)
    finally:
        spoiler.kill()
        spoiler.wait()
        spoiler.stdout.close()
    if not (taken and missed):
        raise TooSlow(f"{taken} entries were had and {missed} not")


def test_one_of_many_compiles_and_the_others_wait_for_it(folder: Path, make: Make) -> None:
    kernel = Kernel(*make("a"))
    made, got = [], []

    def ask() -> None:
        shared = opened(f"file://{folder}")
        with shared.alone(kernel.record.key, 30) as found:
            if found is None:
                made.append(1)
                time.sleep(0.3)
                shared.put(kernel)
            got.append(found or kernel)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and got == [kernel] * 8
    assert not [path for path in (folder / "v1" / "claims").iterdir() if path.is_file()]


HOLD = """
import sys, time
from jitmx.cache import claim
from jitmx.cache.answers import Answers
claim.LEASE = float(sys.argv[3])
with claim.alone(Answers(sys.argv[1], 5.0), sys.argv[2], 30.0, lambda: None) as found:
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_claim_of_a_killed_holder_is_taken_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "LEASE", 0.8)
    url = f"file://{folder}"
    for _ in range(2):  # a second one dies in the place of the first
        holder = subprocess.Popen([sys.executable, "-c", HOLD, url, "v1/claims/k", "0.8"], stdout=subprocess.PIPE)
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        time.sleep(1.2)  # longer than a lease: while it lives it says so
        with claim.alone(Answers(url, 5.0), "v1/claims/k", 0.3, lambda: None) as found:
            assert found is None
        assert (folder / "v1" / "claims" / "k.0").exists(), "that was not for this one to remove"
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with within(8), claim.alone(Answers(url, 5.0), "v1/claims/k", 30, lambda: None) as found:
        assert found is None and (folder / "v1" / "claims" / "k.2").exists()
    assert not list((folder / "v1" / "claims").iterdir())


def test_a_claim_that_is_kept_for_ever_costs_patience_and_no_more(folder: Path) -> None:
    answering = Answers(f"file://{folder}", 5.0)
    assert answering.create("v1/claims/k.0", b"1")
    with within(3, least=0.4), claim.alone(answering, "v1/claims/k", 0.5, lambda: None) as found:
        assert found is None


def test_an_entry_that_came_between_look_and_claim_is_seen(folder: Path) -> None:
    looks = iter([None, "there"])
    with claim.alone(Answers(f"file://{folder}", 5.0), "v1/claims/k", 5, lambda: next(looks)) as found:
        assert found == "there"


def test_a_claim_whose_answer_was_lost_is_known_for_one_s_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering, really = Answers(f"file://{folder}", 5.0), Answers.create

    def create(self: Answers, path: str, data: bytes) -> bool:
        return really(self, path, data) and really(self, path, data)  # asked again by a driver that heard nothing

    monkeypatch.setattr(Answers, "create", create)
    with within(2), claim.alone(answering, "v1/claims/k", 30, lambda: None) as found:
        assert found is None and (folder / "v1" / "claims" / "k.0").exists()
    assert not list((folder / "v1" / "claims").iterdir())


def test_where_no_claim_can_be_made_everybody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.implementations.memory

    def pipe_file(self: object, path: str, value: bytes) -> None:
        raise AssertionError("it has no mode")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "pipe_file", pipe_file)
    for _ in range(2):
        with claim.alone(Answers("memory://none", 5.0), "v1/claims/k", 5, lambda: None) as found:
            assert found is None
    with pytest.raises(Unanswered):
        Answers("http://127.0.0.1:9/x", 1.0).write("a", b"b")


def test_a_forked_child_asks_by_itself(folder: Path, make: Make) -> None:
    kernel = Kernel(*make("a"))
    shared = opened(f"file://{folder}")
    shared.put(kernel)
    child = os.fork()
    if child == 0:
        os._exit(0 if shared.entry(kernel.record.key) == kernel else 1)
    assert os.waitpid(child, 0)[1] == 0
