"""What goes in comes out, and nothing else does."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitmx.cache import files, layout
from jitmx.cache.manifest import Record, seal
from jitmx.cache.store import Store
from jitmx.errors import CacheError

Make = Callable[..., tuple[Record, bytes, str]]


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_published_is_found_by_this_process_and_the_next(store: Store, make: Make) -> None:
    record, image, source = make("a")
    assert store.lookup(record.key) is None
    assert store.publish(record, image, source)
    for reader in (store, Store(store.root)):
        entry = reader.lookup(record.key)
        assert entry is not None
        assert (entry.record, entry.image, entry.root) == (record, image, store.root)
    assert store.source_path(record.key) == layout.source(store.own.root, record.inputs["source_digest"])
    assert store.source(record.inputs["source_digest"]) == source


def test_the_layout_on_disk_is_the_documented_one(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    digest = record.outputs["object"]
    assert sorted(tree(store.root)) == [
        f"v1/actions/{record.key}.json",
        f"v1/objects/{digest[:2]}/{digest}.cubin",
        f"v1/sources/{record.inputs['source_digest']}.cu",
    ]
    assert tree(store.root)[f"v1/objects/{digest[:2]}/{digest}.cubin"] == image


def test_everything_in_a_cache_is_private(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    with store.lock(record.key, 1):
        pass
    for path in (store.root, *store.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_directory_that_others_may_read_makes_a_cache_that_they_can_read(tmp_path: Path, make: Make) -> None:
    files.make_directory(tmp_path / "site", 0o755)
    store = Store(tmp_path / "site")
    record, image, source = make("a")
    store.publish(record, image, source)
    for path in store.root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_entries_with_the_same_code_share_one_object(store: Store, make: Make) -> None:
    one, image, source = make("a", image=b"same")
    other, _, source_too = make("b", image=b"same")
    store.publish(one, image, source)
    store.publish(other, image, source_too)
    assert sum(name.endswith(".cubin") for name in tree(store.root)) == 1
    assert store.lookup(one.key).image == store.lookup(other.key).image == b"same"


def test_publishing_again_replaces_the_record(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    later = replace(record, outputs={**record.outputs, "breaches": ["x"]})
    store.publish(later, image, source)
    assert store.lookup(record.key).record == later


def test_a_reader_finds_a_sound_entry_at_every_moment_while_it_is_published_again(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    done = threading.Event()

    def publish() -> None:
        writer = Store(store.root)
        for turn in range(100):
            writer.publish(replace(record, created=float(turn)), image, source)
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    seen = set()
    while not done.is_set():
        entry = store.lookup(record.key)
        assert entry is not None and entry.image == image
        seen.add(entry.record.created)
    thread.join()
    assert len(seen) > 1


def test_a_key_that_is_no_digest_never_becomes_a_path(store: Store) -> None:
    for text in ("", "../../etc/passwd", "a" * 63, "A" * 64, "g" * 64, "a" * 64 + "/"):
        with pytest.raises(ValueError, match="SHA-256"):
            store.lookup(text)


# Damage.


def test_a_flipped_byte_anywhere_in_an_object_is_a_miss_and_is_mended_by_publishing(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    path = layout.object_(store.root, record.outputs["object"])
    for position in range(len(image)):
        path.write_bytes(image[:position] + bytes([image[position] ^ 1]) + image[position + 1 :])
        assert store.lookup(record.key) is None, position
    store.publish(record, image, source)
    assert store.lookup(record.key).image == image


def test_a_flipped_byte_anywhere_in_a_record_is_a_miss_and_is_mended_by_publishing(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    path = layout.action(store.root, record.key)
    data = path.read_bytes()
    for position in range(len(data)):
        for bit in (0x01, 0x20):
            path.write_bytes(data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :])
            assert store.lookup(record.key) is None, position
    store.publish(record, image, source)
    assert store.lookup(record.key).record == record


def test_damage_is_told_once(store: Store, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    layout.object_(store.root, record.outputs["object"]).write_bytes(b"damaged")
    for _ in range(5):
        assert store.lookup(record.key) is None
    assert len(warnings(caplog)) == 1
    assert record.outputs["object"] in warnings(caplog)[0]


@pytest.mark.parametrize("part", ["record", "object"])
@pytest.mark.parametrize("state", ["gone", "empty", "half", "directory", "fifo", "link to nowhere", "link to itself"])
def test_an_entry_of_which_a_part_is_unusable_is_a_miss(store: Store, make: Make, part: str, state: str) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    path = (
        layout.action(store.root, record.key)
        if part == "record"
        else layout.object_(store.root, record.outputs["object"])
    )
    data = path.read_bytes()
    path.unlink()
    match state:
        case "empty":
            path.write_bytes(b"")
        case "half":
            path.write_bytes(data[: len(data) // 2])
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "link to nowhere":
            path.symlink_to(store.root / "nowhere")
        case "link to itself":
            path.symlink_to(path)
    assert store.lookup(record.key) is None
    published = store.publish(record, image, source)
    assert published == (state != "directory")
    assert store.lookup(record.key).image == image


def test_the_record_of_another_key_is_not_served(store: Store, make: Make) -> None:
    one, image, source = make("a")
    other, image_too, source_too = make("b")
    store.publish(one, image, source)
    store.publish(other, image_too, source_too)
    shutil.copy(layout.action(store.root, other.key), layout.action(store.root, one.key))
    assert store.lookup(one.key) is None
    assert store.lookup(other.key).image == image_too


def test_a_just_published_file_that_cannot_be_read_yet_is_a_miss(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    really = files.read
    for suffix in (".json", ".cubin"):
        for error in (PermissionError(13, "denied"), OSError(116, "Stale file handle"), OSError(5, "I/O error")):

            def read(path: Path, *more: Any, suffix: str = suffix, error: OSError = error, **named: Any) -> object:
                if Path(path).suffix == suffix:
                    raise error
                return really(path, *more, **named)

            monkeypatch.setattr(files, "read", read)
            assert store.lookup(record.key) is None
            assert store.find("probe.scale.a") in ([], [record])
            monkeypatch.undo()
    assert store.lookup(record.key).image == image


def test_the_loser_of_a_rename_goes_on_with_the_winners_entry(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record, image, source = make("a")
    Store(store.root).publish(record, image, source)

    def refuse(*arguments: object, **more: object) -> None:
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(files, "write", refuse)
    assert store.publish(record, image, source)
    assert store.lookup(record.key).image == image
    assert warnings(caplog) == []


def test_a_cache_that_is_removed_under_a_running_process_is_made_anew(
    store: Store, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    shutil.rmtree(store.root)
    assert store.lookup(record.key) is None
    assert store.publish(record, image, source)
    assert store.lookup(record.key).image == image
    assert warnings(caplog) == []


def test_a_temporary_file_swept_away_in_the_middle_of_a_write_is_written_again(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record, image, source = make("a")
    really, swept = os.fsync, []

    def sweep(descriptor: int) -> None:
        really(descriptor)
        if not swept:
            swept.extend(path for path in store.root.rglob("*.tmp"))
            for path in swept:
                path.unlink()

    monkeypatch.setattr(os, "fsync", sweep)
    assert store.publish(record, image, source)
    assert swept and store.lookup(record.key).image == image
    assert warnings(caplog) == []


def test_an_object_swept_away_before_its_record_is_out_is_written_again(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, image, source = make("a")
    really = files.write

    def write(path: Path, data: bytes, **more: object) -> None:
        if path.suffix == ".json":
            layout.object_(store.root, record.outputs["object"]).unlink()
        really(path, data, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write", write)
    assert store.publish(record, image, source)
    monkeypatch.undo()
    assert store.lookup(record.key).image == image


def test_foreign_files_never_stop_reading_or_writing(
    store: Store, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    for below in ("", "v1", "v1/actions", "v1/objects", "v1/sources", f"v1/objects/{record.outputs['object'][:2]}"):
        for name in ("README", ".DS_Store", "core.1234", "x.json", "y.cubin", "z" * 64 + ".json", ".nfs0001"):
            (store.root / below / name).write_bytes(b"foreign")
        os.mkfifo(store.root / below / "fifo")
        (store.root / below / "folder").mkdir()
        (store.root / below / "link").symlink_to("/nowhere")
    other, image_too, source_too = make("b")
    assert store.publish(other, image_too, source_too)
    assert store.lookup(record.key).image == image
    assert store.lookup(other.key).image == image_too
    assert {found.key for found in store.records()} == {record.key, other.key}
    assert warnings(caplog) == []


@pytest.mark.parametrize("below", ["v1", "v1/actions", "v1/objects", "v1/sources", "v1/locks"])
def test_a_file_in_the_place_of_a_folder_costs_the_disk_and_nothing_else(
    tmp_path: Path, make: Make, below: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "cache" / below
    store = Store(tmp_path / "cache")
    files.make_directory(place.parent)
    place.write_bytes(b"")
    record, image, source = make("a")
    with store.lock(record.key, 0.2):
        on_disk = store.publish(record, image, source)
    assert on_disk == (below in ("v1/sources", "v1/locks"))
    assert store.lookup(record.key).image == image
    assert len(warnings(caplog)) == (below != "v1/locks")


# Other versions.


def test_a_record_of_a_newer_schema_is_left_alone(store: Store, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    path = layout.action(store.root, record.key)
    newer = seal(record.as_dict() | {"schema_version": 2, "more": "of it"})
    path.write_bytes(newer)
    assert store.lookup(record.key) is None
    assert list(store.records()) == []
    assert not store.publish(record, image, source)
    assert path.read_bytes() == newer
    assert store.lookup(record.key).image == image, "from memory"
    assert warnings(caplog) == []


# Where others could write.


def test_a_cache_that_others_can_write_is_refused_before_anything_is_read(tmp_path: Path, make: Make) -> None:
    record, image, source = make("a")
    Store(tmp_path / "cache").publish(record, image, source)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(CacheError, match="written by others"):
        Store(tmp_path / "cache")
    assert Store(tmp_path / "cache", allow_shared=True).lookup(record.key).image == image


def test_a_cache_that_somebody_else_makes_after_the_start_is_refused(tmp_path: Path, make: Make) -> None:
    record, image, source = make("a")
    store = Store(tmp_path / "cache")
    assert store.lookup(record.key) is None
    planted = Store(tmp_path / "planted")
    planted.publish(record, image, source)
    (tmp_path / "planted").chmod(0o777)
    (tmp_path / "planted").rename(tmp_path / "cache")
    for use in (
        lambda: store.lookup(record.key),
        lambda: list(store.records()),
        lambda: store.source(record.inputs["source_digest"]),
        lambda: store.publish(record, image, source),
    ):
        with pytest.raises(CacheError):
            use()


def test_a_site_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir(mode=0o700)
    (tmp_path / "site").chmod(0o775)
    with pytest.raises(CacheError, match="site"):
        Store(tmp_path / "cache", layers=[tmp_path / "site"])


def test_a_folder_within_the_cache_that_others_can_write_is_refused(tmp_path: Path, make: Make) -> None:
    Store(tmp_path / "cache").publish(*make("a"))
    (tmp_path / "cache" / "v1").chmod(0o777)
    with pytest.raises(CacheError, match="v1"):
        Store(tmp_path / "cache")


# Layers.


def test_a_site_cache_is_served_from_and_never_written(tmp_path: Path, make: Make) -> None:
    record, image, source = make("a")
    Store(tmp_path / "site").publish(record, image, source)
    Store(tmp_path / "site").keep_scan("a" * 64, {"a.h": "b" * 64}, "c" * 64)
    long_ago = time.time() - 1e6
    for path in (tmp_path / "site").rglob("*"):
        os.utime(path, (long_ago, long_ago))

    def stamps() -> dict[Path, tuple[int, int, int]]:
        found = {path: path.stat() for path in (tmp_path / "site").rglob("*")}
        return {path: (info.st_mode, info.st_mtime_ns, info.st_ctime_ns) for path, info in found.items()}

    before = stamps()
    contents = tree(tmp_path / "site")
    store = Store(tmp_path / "cache", layers=[tmp_path / "site"])
    entry = store.lookup(record.key)
    assert (entry.image, entry.root) == (image, tmp_path / "site")
    assert store.source(record.inputs["source_digest"]) == source
    assert store.source_path(record.key).is_relative_to(tmp_path / "site")
    assert store.scan("a" * 64) == {"a.h": "b" * 64}
    other = make("b")
    store.publish(*other)
    with store.lock(record.key, 1) as held:
        assert held
    assert {record.key for record in store.records()} == {record.key, other[0].key}
    assert stamps() == before
    assert tree(tmp_path / "site") == contents


def test_the_users_own_entry_comes_before_the_sites(tmp_path: Path, make: Make) -> None:
    record, image, source = make("a")
    Store(tmp_path / "site").publish(record, image, source)
    store = Store(tmp_path / "cache", layers=[tmp_path / "site"])
    store.publish(record, image, source)
    assert store.lookup(record.key).root == tmp_path / "cache"
    assert [listed.root for listed in store.listing()] == [tmp_path / "cache"]


def test_a_damaged_entry_of_the_users_falls_through_to_the_sites(tmp_path: Path, make: Make) -> None:
    record, image, source = make("a")
    Store(tmp_path / "site").publish(record, image, source)
    store = Store(tmp_path / "cache", layers=[tmp_path / "nowhere", tmp_path / "site"])
    store.publish(record, image, source)
    layout.object_(tmp_path / "cache", record.outputs["object"]).write_bytes(b"damaged")
    assert store.lookup(record.key).root == tmp_path / "site"


def test_a_site_cache_that_is_not_there_is_told_once_and_done_without(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "cache", layers=[tmp_path / "unmounted"])
    store.publish(*make("a"))
    assert store.lookup(make("a")[0].key) is not None
    assert [message for message in warnings(caplog) if "unmounted" in message] == warnings(caplog) != []
    assert len(warnings(caplog)) == 1
    assert not (tmp_path / "unmounted").exists()


# Memory.


def test_a_store_without_a_directory_keeps_everything_in_memory(make: Make) -> None:
    store = Store(None)
    record, image, source = make("a")
    assert not store.publish(record, image, source)
    assert store.lookup(record.key).image == image
    assert store.keep_failed("a", "source") is None
    assert store.scan("a" * 64) is None
    store.keep_scan("a" * 64, {}, "b" * 64)
    with store.lock(record.key, 0) as held:
        assert not held
    assert Store(None).lookup(record.key) is None


# Finding entries.


def test_entries_are_found_by_name_by_the_start_of_a_key_and_by_the_start_of_a_name(store: Store, make: Make) -> None:
    made = [make(text) for text in ("a", "ab", "b")]
    for entry in made:
        store.publish(*entry)
    one, two, three = (record for record, _, _ in made)
    assert store.find("probe.scale.a") == [one]
    assert store.find(two.key[:10]) == [two]
    assert store.find(three.key) == [three]
    assert {record.key for record in store.find("probe.scale")} == {one.key, two.key, three.key}
    assert store.find("linear") == store.find("") == []


def test_a_damaged_record_is_left_out_of_listings(store: Store, make: Make) -> None:
    one, two = make("a"), make("b")
    store.publish(*one)
    store.publish(*two)
    layout.action(store.root, one[0].key).write_bytes(b"{}")
    assert [record.key for record in store.records()] == [two[0].key]


def test_code_of_another_compiler_is_found_by_what_it_was_made_from(store: Store, make: Make) -> None:
    old, image, source = make("a", inputs={"nvrtc": "13.0"}, created=1.0)
    new, image_too, _ = make("a", source=source, image=b"newer", inputs={"nvrtc": "13.4"}, created=2.0, key="e" * 64)
    store.publish(old, image, source)
    headers = dict(old.inputs["headers"])

    def find(**changed: object) -> object:
        asked = {
            "source_digest": old.inputs["source_digest"],
            "arch": "sm_121a",
            "options": old.inputs["options"],
            "header_digest": headers.get,
        } | changed
        return store.by_source(**asked)  # type: ignore[arg-type]

    assert find().image == image  # type: ignore[attr-defined]
    assert find(header_digest=lambda name: None) is not None, "a header that cannot be had cannot speak against it"
    assert find(source_digest="0" * 64) is None
    assert find(arch="sm_120a") is None
    assert find(options=["-std=c++20"]) is None
    assert find(header_digest=lambda name: "0" * 64) is None
    store.publish(new, image_too, source)
    assert find().image == b"newer"  # type: ignore[attr-defined]
    layout.object_(store.root, new.outputs["object"]).unlink()
    assert find().image == image  # type: ignore[attr-defined]


# Scans, sources, stamps, clocks.


def test_a_scan_comes_back_and_every_flipped_byte_of_it_is_a_miss(store: Store) -> None:
    digest, headers = "a" * 64, {"jitmx/a.cuh": "b" * 64, "cuda_fp8.h": "c" * 64}
    assert store.scan(digest) is None
    store.keep_scan(digest, headers, "d" * 64)
    assert store.scan(digest) == headers
    path = layout.scan(store.root, digest)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert store.scan(digest) is None
    path.write_bytes(data)
    shutil.copy(path, layout.scan(store.root, "e" * 64))
    assert store.scan("e" * 64) is None, "the scan of something else"


def test_a_damaged_source_is_not_shown(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    layout.source(store.root, record.inputs["source_digest"]).write_text("something else")
    assert store.source(record.inputs["source_digest"]) is None
    assert store.lookup(record.key).image == image


def test_the_source_of_a_failed_compile_is_kept_under_a_readable_name(store: Store) -> None:
    path = store.keep_failed("linear.gemv.m4/../../x y", "source")
    assert path is not None
    assert Path(path).read_text() == "source"
    assert Path(path).parent == store.root / "v1" / "failed"
    assert Path(path).name.startswith("linear.gemv.m4_.._.._x_y-")
    assert len(Path(store.keep_failed("n" * 500, "source") or "").name) < 200


def test_a_use_is_stamped_but_not_at_every_look_up(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    path = layout.action(store.root, record.key)
    for ago, stamped in ((10.0, False), (2 * 3600.0, True)):
        then = time.time() - ago
        os.utime(path, (then, then))
        store.lookup(record.key)
        assert (path.stat().st_mtime - then > 1) == stamped


def test_the_clock_is_that_of_the_file_system_and_leaves_no_trace(store: Store, make: Make) -> None:
    assert abs(store.clock() - time.time()) < 5
    store.publish(*make("a"))
    before = tree(store.root)
    assert abs(store.clock() - time.time()) < 5
    assert tree(store.root) == before
    assert abs(Store(None).clock() - time.time()) < 5


def test_a_relative_root_does_not_move_with_the_working_directory(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(Path("cache"))
    store.publish(*make("a"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.lookup(make("a")[0].key) is not None
    assert store.root == tmp_path / "cache"
