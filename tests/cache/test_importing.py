"""An import brings in whole entries, leaves sound ones alone, and can be cut off anywhere."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmx.cache import bundle, files, importing, layout
from jitmx.cache.manifest import Record, seal
from jitmx.cache.store import Store
from jitmx.cache.verify import verify
from jitmx.errors import BundleError, CacheError

Make = Callable[..., tuple[Record, bytes, str]]
Pack = Callable[..., bytes]
TEXTS = tuple(f"kernel{number}" for number in range(24))


def stamps(root: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in root.rglob("*") if path.is_file()}


def test_sound_entries_stay_as_they_are_and_damaged_ones_are_replaced(tmp_path: Path, make: Make, pack: Pack) -> None:
    store = Store(tmp_path / "cache")
    for text in ("a", "b", "c"):
        store.publish(*make(text, created=5.0))
    objects = {text: layout.object_(store.root, make(text)[0].outputs["object"]) for text in "abc"}
    objects["b"].write_bytes(b"damaged")
    layout.action(store.root, make("c")[0].key).write_bytes(b"damaged")
    before = stamps(tmp_path / "cache")
    done = importing.take_in(bundle.of_bytes("test", pack("a", "b", "c", "d")), store)
    assert set(done.kept) == {make("a")[0].key}
    assert set(done.added) == {make(text)[0].key for text in "bcd"}
    own = layout.action(store.root, make("a")[0].key)
    assert (
        stamps(tmp_path / "cache")[own] == before[own]
        and stamps(tmp_path / "cache")[objects["a"]] == before[objects["a"]]
    )
    assert Store(store.root).lookup(make("a")[0].key).record.created == 5.0
    assert all(Store(store.root).lookup(make(text)[0].key) for text in "abcd")
    assert verify(store, grace=-60).findings == ()


def test_a_record_of_a_newer_jitmx_stays(tmp_path: Path, make: Make, pack: Pack) -> None:
    store = Store(tmp_path / "cache")
    record, image, source = make("a")
    store.publish(record, image, source)
    newer = seal(record.as_dict() | {"schema_version": 2})
    layout.action(store.root, record.key).write_bytes(newer)
    done = importing.take_in(bundle.of_bytes("test", pack("a")), store)
    assert (done.newer, done.added) == ((record.key,), ())
    assert layout.action(store.root, record.key).read_bytes() == newer


def test_a_damaged_bundle_brings_in_nothing(tmp_path: Path, make: Make, pack: Pack) -> None:
    data = pack("a", "b")
    last = make("b")[2].encode()
    with pytest.raises(BundleError):
        importing.take_in(bundle.of_bytes("test", data.replace(last, last[:-2] + b"?\n")), Store(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_an_error_that_says_what_to_do(
    tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match="JITMX_SITE_CACHE"):
        importing.take_in(bundle.of_bytes("test", pack("a")), Store(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match="JITMX_MODE=off"):
        importing.take_in(bundle.of_bytes("test", pack("a")), Store(None))


def test_on_a_full_disk_no_entry_comes_in_and_those_there_stay(
    make: Make, pack: Pack, full_disk: Callable[[int], Path]
) -> None:
    place = full_disk(300_000)
    store = Store(place / "cache")
    store.publish(*make("own"))
    large = [bundle.Kernel(*make(text, image=os.urandom(90_000))).undated("1") for text in TEXTS[:8]]
    with pytest.raises(CacheError, match=r"free some space there|File too large"):
        importing.take_in(bundle.of_bytes("test", bundle.make(large, [], {})), store)
    assert [record.key for record in store.records()] == [make("own")[0].key]
    assert store.lookup(make("own")[0].key) is not None
    assert verify(store, repair=True, grace=-60).unmended == ()


def test_an_import_killed_at_any_moment_leaves_a_sound_cache(
    tmp_path: Path, make: Make, pack: Pack, nightly: bool
) -> None:
    path = tmp_path / "made"
    path.write_bytes(pack(*TEXTS))
    store = Store(tmp_path / "cache")
    store.publish(*make(TEXTS[0], created=5.0))
    own = stamps(store.root)
    keys = [make(text)[0].key for text in TEXTS]
    began = time.monotonic()
    importing.take_in(bundle.open_(path), Store(tmp_path / "timed"))
    took = time.monotonic() - began
    moments, counts = random.Random(20240607), set()
    for _ in range(300 if nightly else 30):
        child = os.fork()
        if child == 0:
            importing.take_in(bundle.open_(path), Store(tmp_path / "cache"))
            os._exit(0)
        time.sleep(moments.uniform(0, 1.2 * took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        there = [key for key in keys if os.path.lexists(layout.action(store.root, key))]
        reader = Store(store.root)
        assert all(reader.lookup(key) for key in there), "a record is there and its code is not"
        counts.add(len(there))
        kinds = {finding.kind for finding in verify(reader, grace=-60).findings}
        assert kinds <= {"stray-temporary", "orphan-object", "orphan-source"}
        for key in there[1:]:
            layout.action(store.root, key).unlink()
        for found in store.root.rglob("*.cubin"):
            if found not in own:
                found.unlink()
    assert 1 in counts and len(counts) > 1, "some were killed before the first record, some after"
    assert {path: stamp for path, stamp in stamps(store.root).items() if path in own} == own
    importing.take_in(bundle.open_(path), store)
    assert all(Store(store.root).lookup(key) for key in keys)
    assert verify(store, repair=True, grace=-60).unmended == ()


def test_two_imports_at_once_bring_in_the_same(tmp_path: Path, make: Make, pack: Pack) -> None:
    path = tmp_path / "made"
    path.write_bytes(pack(*TEXTS))
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            importing.take_in(bundle.open_(path), Store(tmp_path / "cache"))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    store = Store(tmp_path / "cache")
    assert all(store.lookup(make(text)[0].key) for text in TEXTS)
    assert verify(store, grace=-60).findings == ()


def test_the_rules_of_caches_hold_for_where_it_goes(
    tmp_path: Path, make: Make, pack: Pack, as_user: Callable[..., None], commons: Path
) -> None:
    found, other = bundle.of_bytes("test", pack("a")), bundle.of_bytes("test", pack("b"))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(CacheError, match="can be written by others"):
        importing.take_in(found, Store(shared))
    assert not list(shared.iterdir())
    site = commons / "site"
    site.mkdir(mode=0o755)
    importing.take_in(found, Store(site))
    modes = {path.stat().st_mode & 0o777 for path in site.rglob("*") if path.is_file() and "locks" not in path.parts}
    assert modes == {0o644}

    def read() -> None:
        assert Store(commons / "own", layers=[site]).lookup(make("a")[0].key) is not None
        with pytest.raises(CacheError):
            importing.take_in(other, Store(site))

    as_user(12345, read)
    assert files.distrust(site.stat()) is None
