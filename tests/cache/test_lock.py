"""The lock of a key: one holder at a time, gone with its holder, and never a reason to wait for ever."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clock import AGAIN, within
from jitmx.cache import layout
from jitmx.cache.manifest import Record
from jitmx.cache.store import Store

pytestmark = AGAIN

Make = Callable[..., tuple[Record, bytes, str]]
KEY = "abc" + "0" * 61

HOLDER = """
import sys, time
from pathlib import Path
from jitmx.cache.store import Store
with Store(Path(sys.argv[1])).lock(sys.argv[2], 10) as held:
    print(held, flush=True)
    time.sleep(120)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts processes that hold the lock of KEY until they are killed."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "cache"), KEY]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_lock_ends_with_a_holder_that_is_killed(store: Store, holder: Callable[[], subprocess.Popen[str]]) -> None:
    process = holder()
    with store.lock(KEY, 0.2) as held:
        assert not held
    process.send_signal(signal.SIGKILL)
    process.wait()
    with store.lock(KEY, 5) as held:
        assert held


def test_a_lock_that_cannot_be_had_in_time_is_told_and_done_without(
    store: Store, holder: Callable[[], subprocess.Popen[str]], caplog: pytest.LogCaptureFixture
) -> None:
    holder().send_signal(signal.SIGSTOP)
    with within(5, least=0.4), store.lock(KEY, 0.5) as held:
        assert not held
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 1 and "held by another process for 0.5 s" in messages[0]


def test_waiting_ends_when_the_entry_comes_by_another_way(
    store: Store, make: Make, holder: Callable[[], subprocess.Popen[str]]
) -> None:
    holder()
    record, image, source = make("a", key=KEY)
    threading.Timer(0.3, Store(store.root).publish, (record, image, source)).start()
    with within(5), store.lock(KEY, 60, until=lambda: store.lookup(KEY) is not None) as held:
        assert not held
    assert store.lookup(KEY).image == image


def test_the_lock_file_is_never_removed(store: Store) -> None:
    path = layout.lock(store.root, KEY)
    inodes = set()
    for _ in range(3):
        with store.lock(KEY, 1) as held:
            assert held
            inodes.add(path.stat().st_ino)
        inodes.add(path.stat().st_ino)
    assert len(inodes) == 1
    assert path.stat().st_size == 0


def test_a_lock_left_by_an_older_process_does_not_matter(store: Store) -> None:
    path = layout.lock(store.root, KEY)
    path.parent.mkdir(parents=True, mode=0o700)
    store.root.chmod(0o700)
    (store.root / "v1").chmod(0o700)
    path.write_text("whatever a crashed process wrote: pid 4711")
    with store.lock(KEY, 1) as held:
        assert held


def test_threads_exclude_each_other(store: Store) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with store.lock(KEY, 30) as held:
            assert held
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_keys_of_different_locks_do_not_wait_for_each_other(store: Store) -> None:
    with store.lock(KEY, 1) as one, store.lock("abd" + "0" * 61, 1) as other:
        assert one and other


def test_a_child_forked_while_the_lock_is_held_neither_holds_nor_keeps_it(store: Store) -> None:
    with store.lock(KEY, 1) as held:
        assert held
        child = os.fork()
        if child == 0:
            with store.lock(KEY, 0.3) as had:
                pass
            if had:
                os._exit(1)
            time.sleep(30)
            os._exit(0)
        time.sleep(0.6)
    try:
        with store.lock(KEY, 1) as held:
            assert held, "the child, still alive, must not hold it"
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_child_that_outlives_a_killed_holder_does_not_keep_the_lock(tmp_path: Path, store: Store) -> None:
    script = HOLDER.replace("time.sleep(120)", "child = os.fork(); print(child or '', flush=True); time.sleep(120)")
    command = [sys.executable, "-c", "import os\n" + script, str(tmp_path / "cache"), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        child = int(next(line for line in lines if line.strip().isdigit()))
        process.kill()
        process.wait()
        try:
            os.kill(child, 0)
            with store.lock(KEY, 5) as held:
                assert held
        finally:
            os.kill(child, signal.SIGKILL)


def test_where_the_file_system_has_no_locks_one_goes_on_without(
    store: Store, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    import fcntl

    def missing(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with within(5), store.lock(KEY, 30) as held:
        assert not held
    assert layout.lock(store.root, KEY).stat().st_size == 0, "no existence lock may be left, which nobody would remove"
    assert store.publish(*make("a"))


@pytest.mark.parametrize("state", ["directory", "link", "fifo"])
def test_something_else_in_the_place_of_a_lock_does_not_stop_anyone(store: Store, tmp_path: Path, state: str) -> None:
    path = layout.lock(store.root, KEY)
    path.parent.mkdir(parents=True, mode=0o700)
    store.root.chmod(0o700)
    (store.root / "v1").chmod(0o700)
    match state:
        case "directory":
            path.mkdir()
        case "link":
            (tmp_path / "precious").write_text("precious")
            path.symlink_to(tmp_path / "precious")
        case "fifo":
            os.mkfifo(path)
    with within(5), store.lock(KEY, 1):
        pass
    if state == "link":
        assert (tmp_path / "precious").read_text() == "precious"


def test_with_no_patience_at_all_a_lock_is_had_at_once_or_not(
    store: Store, holder: Callable[[], subprocess.Popen[str]]
) -> None:
    with store.lock(KEY, 0) as held:
        assert held
    holder()
    with store.lock(KEY, 0) as held:
        assert not held


SIBLING = KEY[:3] + "1" * 61


def test_a_key_waits_for_another_that_shares_its_lock_no_longer_than_that_takes(store: Store) -> None:
    assert layout.lock(store.root, KEY) == layout.lock(store.root, SIBLING)
    inside, released = threading.Event(), []

    def work() -> None:
        with Store(store.root).lock(KEY, 5) as held:
            assert held
            inside.set()
            time.sleep(0.4)
        released.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    with store.lock(SIBLING, 60) as held:
        had = time.monotonic()
        assert held
    thread.join()
    assert had - released[0] < 0.5


def test_a_key_whose_lock_another_key_keeps_is_served_as_soon_as_it_is_there(
    store: Store, make: Make, holder: Callable[[], subprocess.Popen[str]]
) -> None:
    holder()
    record, image, source = make("a", key=SIBLING)
    threading.Timer(0.3, Store(store.root).publish, (record, image, source)).start()
    with within(5), store.lock(SIBLING, 60, until=lambda: store.lookup(SIBLING) is not None):
        assert store.lookup(SIBLING).image == image


def test_a_link_in_the_place_of_a_lock_is_neither_followed_nor_written_through(store: Store, tmp_path: Path) -> None:
    path = layout.lock(store.root, KEY)
    path.parent.mkdir(parents=True, mode=0o700)
    store.root.chmod(0o700)
    (store.root / "v1").chmod(0o700)
    target = tmp_path / "not there yet"
    path.symlink_to(target)
    with store.lock(KEY, 1) as held:
        assert not held
    assert not target.exists() and path.is_symlink()
    target.write_text("precious")
    before = target.stat()
    with store.lock(KEY, 1) as held:
        assert not held
    after = target.stat()
    assert target.read_text() == "precious"
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
