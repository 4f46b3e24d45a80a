"""No file in the cache stops it, whatever its size, its kind or its date."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmx.cache import layout, stats, sweep
from jitmx.cache.manifest import Record
from jitmx.cache.prune import prune
from jitmx.cache.store import Store
from jitmx.cache.verify import verify

Make = Callable[..., tuple[Record, bytes, str]]
KINDS = ["record", "object", "source", "scan"]
DAY = 86400.0


@pytest.fixture
def entry(store: Store, make: Make) -> dict[str, Path]:
    """One entry with its scan: where each kind of file lies."""
    record, image, source = make("a")
    store.publish(record, image, source)
    store.keep_scan(record.key, {}, record.inputs["source_digest"])
    return {
        "record": layout.action(store.root, record.key),
        "object": layout.object_(store.root, record.outputs["object"]),
        "source": layout.source(store.root, record.inputs["source_digest"]),
        "scan": layout.scan(store.root, record.key),
    }


def put(path: Path, what: str) -> None:
    """Something that is no file of the cache in the place of one."""
    path.unlink()
    match what:
        case "directory":
            (path / "below").mkdir(parents=True)
            (path / "below" / "file").write_bytes(b"x")
        case "fifo":
            os.mkfifo(path)
        case "socket":
            here = Path.cwd()
            # The name of a socket is short: it is made from within its directory.
            os.chdir(path.parent)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
            os.chdir(here)
        case "link":
            path.symlink_to("/etc/passwd")
        case "device":
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))


LOOKING = """
import resource, sys
from pathlib import Path
from jitmx.cache import stats
from jitmx.cache.prune import prune
from jitmx.cache.store import Store
from jitmx.cache.verify import verify
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
store, key, source = Store(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
assert store.lookup(key) is None or sys.argv[4] not in ("record", "object")
assert store.source(source) is None or sys.argv[4] != "source"
assert store.scan(key) is None or sys.argv[4] != "scan"
list(store.listing()), stats.measure(store), prune(store, max_bytes=1 << 30), verify(store)
report = verify(store, repair=True)
assert f"corrupt-{sys.argv[4]}" in [finding.kind for finding in report.findings], report
assert "larger than" in str(report) and not report.unmended
assert not verify(store).findings
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_terabyte_is_a_miss_and_is_mended_in_little_memory(
    store: Store, make: Make, entry: dict[str, Path], kind: str
) -> None:
    os.truncate(entry[kind], 1 << 40)
    record, image, source = make("a")
    arguments = [str(store.root), record.key, record.inputs["source_digest"], kind]
    done = subprocess.run([sys.executable, "-c", LOOKING, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not entry[kind].exists()
    assert store.publish(record, image, source) and store.lookup(record.key).image == image


def test_an_object_is_read_as_far_as_its_record_says(
    store: Store, make: Make, entry: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, image, _ = make("a")
    really, had = os.read, []
    monkeypatch.setattr(os, "read", lambda *arguments: had.append(really(*arguments)) or had[-1])
    assert store.lookup(record.key).image == image
    had.clear()
    with entry["object"].open("ab") as stream:
        stream.write(b"\0")
    assert store.lookup(record.key) is None
    assert had == [entry["record"].read_bytes(), b""], "not a byte of the longer object"


def test_a_large_object_is_verified_piece_by_piece(
    store: Store, make: Make, entry: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(*make("large", image=bytes(8 << 20)))
    really, longest = os.read, 0

    def read(descriptor: int, count: int) -> bytes:
        nonlocal longest
        longest = max(longest, count)
        return really(descriptor, count)

    monkeypatch.setattr(os, "read", read)
    assert verify(store).findings == ()
    assert longest <= 1 << 20


@pytest.mark.parametrize("what", ["directory", "fifo", "socket", "link", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_a_miss_is_found_and_taken_out(
    store: Store, make: Make, entry: dict[str, Path], kind: str, what: str
) -> None:
    if what == "device" and os.geteuid() != 0:
        pytest.skip("only root can make a device")
    put(entry[kind], what)
    record, image, source = make("a")
    assert (store.lookup(record.key) is None) == (kind in ("record", "object"))
    assert f"corrupt-{kind}" in [finding.kind for finding in verify(store).findings]
    prune(store), stats.measure(store), list(store.listing())
    assert verify(store, repair=True).unmended == ()
    assert not os.path.lexists(entry[kind])
    assert verify(store).findings == () and not list(store.root.rglob("*.tmp"))
    fresh = Store(store.root)
    assert fresh.publish(record, image, source)
    assert fresh.lookup(record.key).image == image and fresh.source(record.inputs["source_digest"]) == source


@pytest.mark.parametrize("below", ["v1", "v1/actions", "v1/objects", "v1/objects/ab"])
def test_a_file_in_the_place_of_a_directory_is_found_and_taken_out(store: Store, below: str) -> None:
    place = store.root / below
    place.parent.mkdir(mode=0o700, parents=True)
    for folder in (store.root, *store.root.rglob("*")):
        folder.chmod(0o700)
    place.write_bytes(b"")
    report = verify(store, repair=True)
    assert [finding.kind for finding in report.findings] == ["corrupt-folder"] and report.unmended == ()
    assert not place.exists()


@pytest.mark.parametrize(
    ("number", "advice"),
    [(28, "free some space"), (122, "quota"), (30, "mount it writable"), (13, "chmod u+rwx"), (21, "verify --repair")],
)
def test_the_warning_advises_what_mends_its_error(
    store: Store,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    advice: str,
) -> None:
    def refuse(*_arguments: object, **_more: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    assert not store.publish(*make("a"))
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert os.strerror(number) in said and advice in said
    assert ("space" in said) == (number == 28)


def test_the_warning_of_a_directory_in_an_objects_place_advises_what_mends_it(
    store: Store, make: Make, entry: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    put(entry["object"], "directory")
    assert not store.publish(*make("a"))
    assert "`jitmx cache verify --repair`" in caplog.text and "space" not in caplog.text


# Stamps.

FUTURE = 4102444800.0  # 2100


def test_a_look_up_takes_back_a_date_in_the_future(store: Store, make: Make, entry: dict[str, Path]) -> None:
    os.utime(entry["record"], (FUTURE, FUTURE))
    assert store.lookup(make("a")[0].key) is not None
    assert abs(entry["record"].stat().st_mtime - time.time()) < 60


def test_what_is_dated_in_the_future_counts_as_old(store: Store, make: Make) -> None:
    for text in ("future", "today", "old"):
        store.publish(*make(text, image=os.urandom(10_000)))
    stamps = {"future": FUTURE, "today": time.time(), "old": time.time() - 20 * DAY}
    for text, stamp in stamps.items():
        os.utime(layout.action(store.root, make(text)[0].key), (stamp, stamp))
    failed = Path(store.keep_failed("a", "source") or "")
    os.utime(failed, (FUTURE, FUTURE))
    total = sum(item.size for item in store.own.walk())
    by_size = prune(store, max_bytes=total - 100, dry_run=True).removals
    assert [removal.kind for removal in by_size] == ["failed"] or by_size[0].name == "probe.scale.future"
    done = prune(store, older_than=30 * DAY)
    assert [removal.name for removal in done.removals if removal.kind == "record"] == ["probe.scale.future"]
    assert "dated in the future" in str(done) and not failed.exists()
    assert len(list(store.records())) == 2


def test_the_least_recently_used_is_what_is_dated_in_the_future(store: Store, make: Make) -> None:
    for text in ("future", "old"):
        store.publish(*make(text, image=os.urandom(10_000)))
    for text, stamp in (("future", FUTURE), ("old", time.time() - 20 * DAY)):
        os.utime(layout.action(store.root, make(text)[0].key), (stamp, stamp))
    total = sum(item.size for item in store.own.walk())
    done = prune(store, max_bytes=total - 1000)
    assert [removal.name for removal in done.removals if removal.kind == "record"] == ["probe.scale.future"]


def test_an_orphan_dated_in_the_future_is_left_over(store: Store, make: Make, entry: dict[str, Path]) -> None:
    entry["record"].unlink()
    for kind in ("object", "source"):
        os.utime(entry[kind], (FUTURE, FUTURE))
    assert {finding.kind for finding in verify(store).findings} == {"orphan-object", "orphan-source"}
    assert {removal.kind for removal in prune(store).removals} == {"object", "source"}


def test_publishing_what_is_there_keeps_a_sweeper_away_from_its_object(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    layout.action(store.root, record.key).unlink()
    place = layout.object_(store.root, record.outputs["object"])
    then = time.time() - 2 * sweep.GRACE
    os.utime(place, (then, then))
    inode = place.stat().st_ino
    store.publish(record, image, source)
    assert place.stat().st_ino == inode, "it is not written again"
    assert time.time() - place.stat().st_mtime < 60
    layout.action(store.root, record.key).unlink()
    assert [finding.path for finding in verify(store).findings if finding.kind == "orphan-object"] == []


def test_nothing_is_read_or_stamped_through_a_link(
    store: Store, tmp_path: Path, make: Make, entry: dict[str, Path]
) -> None:
    record, image, source = make("a")
    then = time.time() - 2 * DAY
    for kind, path in entry.items():
        target = tmp_path / kind
        path.rename(target)
        path.symlink_to(target)
        os.utime(target, (then, then))
    fresh = Store(store.root)
    assert fresh.lookup(record.key) is None and fresh.scan(record.key) is None
    assert fresh.source(record.inputs["source_digest"]) is None
    assert fresh.publish(record, image, source)
    for kind in entry:
        assert (tmp_path / kind).stat().st_mtime == pytest.approx(then), kind
    assert fresh.lookup(record.key).image == image


def test_a_record_that_becomes_a_link_between_reading_and_stamping_is_not_stamped_through(
    store: Store, tmp_path: Path, make: Make, entry: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    then = time.time() - 2 * DAY
    os.utime(entry["record"], (then, then))
    really = store.own.image

    def swap(record: Record) -> bytes | None:
        entry["record"].rename(tmp_path / "target")
        entry["record"].symlink_to(tmp_path / "target")
        return really(record)

    monkeypatch.setattr(store.own, "image", swap)
    assert store.lookup(make("a")[0].key) is not None
    assert (tmp_path / "target").stat().st_mtime == pytest.approx(then)
