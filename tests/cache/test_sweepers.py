"""Several sweepers at once, and what a killed process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmx.cache import layout, sweep
from jitmx.cache.manifest import Record
from jitmx.cache.prune import prune
from jitmx.cache.store import Store
from jitmx.cache.verify import verify

Make = Callable[..., tuple[Record, bytes, str]]
OLD = 2 * sweep.GRACE
DAY = 86400.0


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on all files that there are are old."""
    really = Store.clock
    monkeypatch.setattr(Store, "clock", lambda store: really(store) + OLD)


SWEEPER = """
import os, sys, time
from pathlib import Path
from jitmx.cache.prune import prune
from jitmx.cache.store import Store
from jitmx.cache.verify import verify
really = os.rename
def slow(*arguments, **more):
    time.sleep(0.002)
    really(*arguments, **more)
os.rename = slow
store = Store(Path(sys.argv[1]))
print(flush=True)
sys.stdin.readline()
for turn in range(3):
    if sys.argv[2] == "prune":
        prune(store, older_than=30 * 86400)
    else:
        # Whatever is young to others is old to this one: it takes what they have moved aside.
        verify(store, repair=True, grace=-60)
"""


@pytest.mark.parametrize("pair", [("prune", "prune"), ("prune", "repair"), ("repair", "repair")], ids="-".join)
def test_two_sweepers_at_once_take_out_what_is_to_go_and_nothing_else(
    store: Store, make: Make, pair: tuple[str, str]
) -> None:
    then = time.time() - 40 * DAY
    for number in range(60):
        record, image, source = make(str(number))
        store.publish(record, image, source)
        if number % 2:
            os.utime(layout.action(store.root, record.key), (then, then))
            if "repair" in pair:
                layout.object_(store.root, record.outputs["object"]).write_bytes(b"damaged")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SWEEPER, str(store.root), what],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for what in pair
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None and process.stdout.readline()
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert {record.name for record in store.records()} == {f"probe.scale.{number}" for number in range(0, 60, 2)}
    assert all(store.lookup(record.key) for record in store.records())
    assert not list(store.root.rglob("*.tmp"))


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_gone_at_any_step_is_gone_and_no_error(store: Store, make: Make, wanted: bool) -> None:
    record = make("a")[0]
    path = layout.action(store.root, record.key)

    def lose(path: Path, aside: Path) -> bool:
        aside.unlink()
        return wanted

    store.publish(*make("a"))
    moved, refused = sweep.move_aside(store.own, [path])
    assert list(moved) == [path] and not refused
    assert sweep.settle(store.own, moved, lose) == (set() if wanted else {path})
    store.publish(*make("a"))
    moved, _ = sweep.move_aside(store.own, [path])
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    sweep.settle(store.own, moved, lambda path, aside: wanted)


def test_an_old_file_that_another_sweeper_holds_aside_is_no_cut_off_write(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    path = layout.action(store.root, record.key)
    then = time.time() - 40 * DAY
    os.utime(path, (then, then))
    moved, _ = sweep.move_aside(store.own, [path])
    assert verify(store, repair=True).findings == () and prune(store).removals == ()
    assert sweep.settle(store.own, moved, lambda path, aside: True) == set()
    assert store.lookup(record.key).image == image


def test_pruning_goes_on_where_another_has_taken_the_record_that_was_moved_aside(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    then = time.time() - 40 * DAY
    os.utime(layout.action(store.root, record.key), (then, then))
    really = sweep.move_aside

    def taken(*arguments: object) -> object:
        found = really(*arguments)  # type: ignore[arg-type]
        for aside in found[0].values():
            aside.unlink()
        return found

    monkeypatch.setattr(sweep, "move_aside", taken)
    assert {removal.kind for removal in prune(store, older_than=30 * DAY).removals} == {"record", "object", "source"}


LEFT = ["v1/.clock.123-abc.tmp", "v1/actions/.x.tmp", ".toolchain.json.12-ab.tmp", "toolchain.json.ab12.tmp",
        ".ledger.json.1-2.tmp"]  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_a_killed_write_left_is_found_once_it_is_old_and_taken_out(
    store: Store, make: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(*make("a"))
    path = store.root / name
    for mend in (lambda: verify(store, repair=True), lambda: prune(store)):
        path.write_bytes(b"half")
        assert verify(store).findings == () and prune(store).removals == () and path.exists()
        with monkeypatch.context() as patched:
            later(patched)
            assert [(finding.kind, finding.path) for finding in verify(store).findings] == [("stray-temporary", path)]
            mend()
            assert not path.exists()


def test_files_beside_v1_that_are_not_jitmx_s_are_not_looked_at(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(*make("a"))
    names = [".mine.tmp", "notes.tmp", "toolchain.json", "ledger.json", "ledger.tmp"]
    for name in names:
        (store.root / name).write_bytes(b"mine")
    later(monkeypatch)
    assert verify(store, repair=True) == verify(store) and verify(store).foreign == verify(store).findings == ()
    assert prune(store, max_bytes=0).removals and all((store.root / name).exists() for name in names)


KILLED = """
import os, signal, stat, sys
from pathlib import Path
from jitmx.cache.store import Store
from jitmx.cli import checks
really = os.fstat
def killed(descriptor):
    info = really(descriptor)
    if stat.S_ISREG(info.st_mode):
        os.kill(os.getpid(), signal.SIGKILL)
    return info
store = Store(Path(sys.argv[1]))
os.fstat = killed
store.clock() if sys.argv[2] == "clock" else list(checks.check_directory(store.root, allow_shared=False))
"""


@pytest.mark.parametrize("probe", ["clock", "doctor"])
def test_a_process_killed_while_it_asks_for_the_time_leaves_nothing(store: Store, make: Make, probe: str) -> None:
    store.publish(*make("a"))
    before = sorted(store.root.rglob("*"))
    done = subprocess.run([sys.executable, "-c", KILLED, str(store.root), probe], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(store.root.rglob("*")) == before
