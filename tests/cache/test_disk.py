"""Disks that are full, and directories that cannot be written."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmx.cache import files
from jitmx.cache.manifest import Record
from jitmx.cache.store import Store
from jitmx.cache.verify import verify

Make = Callable[..., tuple[Record, bytes, str]]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("free", [0, 4096, 8192, 12288, 20480, 28672, 36864, 49152, 65536])
def test_a_disk_that_fills_up_at_any_point_costs_the_disk_and_one_warning(
    full_disk: Callable[[int], Path], make: Make, free: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(full_disk(free) / "cache")
    entries = [make(str(number), image=bytes([number]) * 6000) for number in range(8)]
    for record, image, source in entries:
        with store.lock(record.key, 0.1):
            store.keep_scan(record.key, {}, record.key)
            store.publish(record, image, source)
    assert store.keep_failed("a", "x" * 100_000) is None
    for record, image, _ in entries:
        entry = store.lookup(record.key)
        assert entry is not None and entry.image == image
    assert len(warnings(caplog)) == 1
    assert "cannot be written" in warnings(caplog)[0] and "JITMX_CACHE_DIR" in warnings(caplog)[0]
    assert not list(store.root.rglob("*.tmp"))
    assert {finding.kind for finding in verify(Store(store.root)).findings} == set()
    later = Store(store.root)
    served = [later.lookup(record.key) for record, _, _ in entries]
    assert all(entry is None or entry.image == image for entry, (_, image, _) in zip(served, entries, strict=True))


def test_once_there_is_space_again_the_disk_is_used_again(
    full_disk: Callable[[int], Path], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(full_disk(65536) / "cache")
    record, image, source = make("a")

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    assert not store.publish(record, image, source)
    monkeypatch.undo()
    assert store.publish(record, image, source)
    assert Store(store.root).lookup(record.key).image == image


READER = """
import sys
from pathlib import Path
from jitmx.cache.manifest import Record
from jitmx.cache.prune import prune
from jitmx.cache.store import Store
from jitmx.cache.verify import verify

store = Store(Path(sys.argv[1]))
known, = store.records()
assert store.lookup(known.key).root == store.root
from dataclasses import replace
image = b"new"
import hashlib
new = replace(known, key="f" * 64, outputs={**known.outputs, "object": hashlib.sha256(image).hexdigest()})
with store.lock(new.key, 5) as held:
    assert not held
    assert not store.publish(new, image, "source")
assert store.lookup(new.key).image == image
store.keep_scan("a" * 64, {}, "b" * 64)
assert store.keep_failed("a", "b") is None
assert store.clock() > 1e9
report = verify(store, repair=True, grace=-1e9)
assert [finding.kind for finding in report.unmended] == ["stray-temporary"], report
assert report.unmended[0].obstacle
pruned = prune(store, max_bytes=0, grace=-1e9)
assert pruned.removals == () and pruned.refused, pruned
"""


@pytest.mark.parametrize("how", ["mount", "permissions"])
def test_a_directory_that_cannot_be_written_serves_and_costs_one_warning(
    tmp_path: Path, make: Make, read_only: Callable[[Path, str], str], how: str
) -> None:
    Store(tmp_path / "cache").publish(*make("a"))
    (tmp_path / "cache" / "v1" / "actions" / ".x.tmp").write_bytes(b"")
    preamble = read_only(tmp_path / "cache", how)
    done = subprocess.run(
        [sys.executable, "-c", preamble + READER, str(tmp_path / "cache")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "cannot be written" in done.stderr


def test_a_cache_that_cannot_be_made_costs_the_disk_and_one_warning(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "cache")
    for text in "abc":
        assert not store.publish(*make(text))
        assert store.lookup(make(text)[0].key).image == make(text)[1]
    assert len(warnings(caplog)) == 1


BLIND = """
import sys
from pathlib import Path
from jitmx.cache import stats
from jitmx.cache.prune import prune
from jitmx.cache.store import Store
from jitmx.cache.verify import verify
from jitmx.errors import CacheError

def look(store):
    assert store.lookup("a" * 64) is None and store.scan("a" * 64) is None and store.source("a" * 64) is None
    assert store.source_path("a" * 64) is None and store.by_source("a" * 64, "sm_121a", [], lambda name: None) is None
    stats.measure(store), prune(store, max_bytes=0, grace=1e9), store.clock()
    try:
        verify(store, repair=True)
        raise AssertionError("what nobody can look into is taken for sound")
    except CacheError as error:
        assert "cannot be looked into (Permission denied)" in str(error)

maker = Store(Path(sys.argv[2]))
record, = maker.records()
image, source = maker.lookup(record.key).image, maker.source(record.inputs["source_digest"])
store = Store(Path(sys.argv[1]))
look(store)
with store.lock(record.key, 1):
    assert not store.publish(record, image, source)
store.keep_scan("c" * 64, {}, "b" * 64)
store.keep_failed("a", "b")
assert store.lookup(record.key).image == image
look(store)
"""


@pytest.mark.parametrize("which", ["..", ".", "v1", "v1/actions"])
def test_a_directory_that_lets_nobody_in_costs_the_disk_and_one_warning(
    tmp_path: Path, make: Make, shut: Callable[[Path], str], which: str
) -> None:
    Store(tmp_path / "other").publish(*make("a"))
    cache = tmp_path / "above" / "cache"
    Store(cache).publish(*make("b"))
    preamble = shut(cache / which if which != ".." else cache.parent)
    done = subprocess.run(
        [sys.executable, "-c", preamble + BLIND, str(cache), str(tmp_path / "other")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert str(cache) in done.stderr and "Permission denied" in done.stderr and "JITMX_CACHE_DIR" in done.stderr


def test_a_site_cache_that_lets_nobody_in_is_told_once_and_done_without(
    tmp_path: Path, make: Make, shut: Callable[[Path], str]
) -> None:
    Store(tmp_path / "site").publish(*make("a"))
    script = """
import sys
from pathlib import Path
from jitmx.cache.store import Store
store = Store(Path(sys.argv[1]), layers=[Path(sys.argv[2])])
assert list(store.records()) == [] and store.lookup("a" * 64) is None and store.scan("a" * 64) is None
"""
    preamble = shut(tmp_path / "site")
    command = [sys.executable, "-c", preamble + script, str(tmp_path / "own"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "site" in done.stderr


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_system_that_knows_no_new_names_costs_the_disk_and_one_warning(
    make: Make, caplog: pytest.LogCaptureFixture, below: str
) -> None:
    store = Store(Path("/proc/jitmx-no-such-name") / below)
    record, image, source = make("a")
    with store.lock(record.key, 1) as held:
        assert not held
    assert not store.publish(record, image, source)
    assert store.lookup(record.key).image == image
    assert len(warnings(caplog)) == 1 and "cannot be written" in warnings(caplog)[0]
