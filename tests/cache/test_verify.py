"""Each kind of finding is found, told from what is fine, and mended without harm to anyone at work."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitmx.cache import files, layout, sweep
from jitmx.cache.manifest import Record, seal
from jitmx.cache.store import Store
from jitmx.cache.verify import Recompiled, Report, verify
from jitmx.errors import CacheError, CompileError

Make = Callable[..., tuple[Record, bytes, str]]
OLD = 2 * sweep.GRACE


def age(path: Path, seconds: float = OLD) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def kinds(report: Report) -> list[str]:
    return sorted(finding.kind for finding in report.findings)


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


@pytest.fixture
def entries(store: Store, make: Make) -> list[tuple[Record, bytes, str]]:
    """Three entries, old enough for everything about them to count as settled."""
    made = [make(text) for text in "abc"]
    for number, entry in enumerate(made):
        store.publish(*entry)
        store.keep_scan(str(number) * 64, {}, entry[0].inputs["source_digest"])
    for path in store.root.rglob("*.*"):
        age(path)
    return made


def damage_record(store: Store, record: Record) -> None:
    layout.action(store.root, record.key).write_bytes(b"{}")


def swap_record(store: Store, record: Record) -> None:
    other = next(other for other in store.records() if other.key != record.key)
    shutil.copy(layout.action(store.root, other.key), layout.action(store.root, record.key))


def damage_object(store: Store, record: Record) -> None:
    layout.object_(store.root, record.outputs["object"]).write_bytes(b"x")


def lose_object(store: Store, record: Record) -> None:
    layout.object_(store.root, record.outputs["object"]).unlink()


def lose_record(store: Store, record: Record) -> None:
    layout.action(store.root, record.key).unlink()


def damage_source(store: Store, record: Record) -> None:
    layout.source(store.root, record.inputs["source_digest"]).write_bytes(b"x")


def damage_scan(store: Store, record: Record) -> None:
    layout.scan(store.root, "0" * 64).write_bytes(b"x")


def cut_off_a_write(store: Store, record: Record) -> None:
    path = files.temporary_beside(layout.action(store.root, record.key))
    path.write_bytes(b"half")


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on all files that there are are old, also by the time that no program can set."""
    really = Store.clock
    monkeypatch.setattr(Store, "clock", lambda store: really(store) + OLD)


DAMAGE: dict[Callable[[Store, Record], None], list[str]] = {
    damage_record: ["corrupt-record", "orphan-object", "orphan-source"],
    swap_record: ["corrupt-record", "orphan-object", "orphan-source"],
    damage_object: ["corrupt-object", "dangling-record"],
    lose_object: ["dangling-record"],
    lose_record: ["orphan-object", "orphan-source"],
    damage_source: ["corrupt-source"],
    damage_scan: ["corrupt-scan"],
    cut_off_a_write: ["stray-temporary"],
}


def test_a_sound_cache_has_no_findings(store: Store, entries: list[Any]) -> None:
    report = verify(store, recompile=lambda record, source: None)
    assert report == Report((), records=3, objects=3, skipped=3)
    assert verify(Store(None)) == verify(Store(store.root / "nowhere")) == Report((), 0, 0)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_found_and_looking_changes_nothing(
    store: Store, entries: list[Any], damage: Callable[[Store, Record], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(store, entries[0][0])
    later(monkeypatch)
    before = tree(store.root)
    for _ in range(2):
        report = verify(store)
        assert kinds(report) == DAMAGE[damage]
        assert report.unmended == report.findings
    assert tree(store.root) == before


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_repair_mends_what_is_found_and_leaves_the_rest(
    store: Store, entries: list[Any], damage: Callable[[Store, Record], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(store, entries[0][0])
    later(monkeypatch)
    report = verify(store, repair=True)
    assert set(DAMAGE[damage]) <= set(kinds(report)), "and what only the removed records needed"
    assert report.unmended == ()
    assert verify(store).findings == ()
    for record, image, _ in entries[1:]:
        assert store.lookup(record.key).image == image
    record, image, source = entries[0]
    store.publish(record, image, source)
    assert store.lookup(record.key).image == image
    assert verify(store).findings == ()


def test_repair_mends_all_damage_at_once(store: Store, make: Make) -> None:
    for number, damage in enumerate(DAMAGE):
        entry = make(f"entry{number}")
        store.publish(*entry)
        if damage is not swap_record:
            store.keep_scan("0" * 64, {}, entry[0].inputs["source_digest"])
            damage(store, entry[0])
    assert verify(store, repair=True, grace=-60).unmended == ()
    assert verify(store, grace=-60).findings == ()


def test_a_file_of_a_publish_under_way_is_no_finding(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    layout.action(store.root, record.key).unlink()
    store.keep_scan("0" * 64, {}, "1" * 64)
    files.temporary_beside(layout.action(store.root, record.key)).write_bytes(b"half")
    before = tree(store.root)
    assert verify(store, repair=True).findings == ()
    assert tree(store.root) == before
    assert kinds(verify(store, grace=-60)) == ["orphan-object", "orphan-source", "stray-temporary"]


def test_an_old_object_that_is_published_again_meanwhile_is_put_back(
    store: Store, entries: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, image, source = entries[0]
    layout.action(store.root, record.key).unlink()
    really = sweep.move_aside

    def publish_between(*arguments: Any) -> Any:
        moved = really(*arguments)
        path = layout.object_(store.root, record.outputs["object"])
        if path in moved[0]:
            Store(store.root).publish(record, image, source)
            # As if the publisher had looked for its object before it was moved.
            path.unlink()
        return moved

    monkeypatch.setattr(sweep, "move_aside", publish_between)
    verify(store, repair=True)
    assert store.lookup(record.key).image == image
    assert verify(store, grace=-60).findings == ()


@pytest.mark.parametrize("damage", [damage_record, damage_object, lose_object, damage_source])
def test_a_damaged_entry_that_is_published_again_meanwhile_stays(
    store: Store, entries: list[Any], damage: Callable[[Store, Record], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, image, source = entries[0]
    damage(store, record)
    really = sweep.move_aside

    def publish_before(*arguments: Any) -> Any:
        if damage is damage_source:
            layout.source(store.root, record.inputs["source_digest"]).write_text(source)
        Store(store.root).publish(record, image, source)
        return really(*arguments)

    monkeypatch.setattr(sweep, "move_aside", publish_before)
    verify(store, repair=True)
    assert store.lookup(record.key).image == image
    assert store.source(record.inputs["source_digest"]) == source


def test_putting_back_never_replaces_a_newer_file(store: Store, entries: list[Any]) -> None:
    record, image, source = entries[0]
    path = layout.action(store.root, record.key)
    moved, refused = sweep.move_aside(store.own, [path, store.root / "gone"])
    assert list(moved) == [path] and not refused
    later = replace(record, created=2e9)
    store.publish(later, image, source)
    assert sweep.settle(store.own, moved, lambda path, aside: True) == set()
    assert store.lookup(record.key).record == later
    assert not list(store.root.rglob("*.tmp"))


def test_a_file_is_put_back_where_the_file_system_has_no_hard_links(
    store: Store, entries: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object, **more: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", missing)
    record, image, _ = entries[0]
    moved, _ = sweep.move_aside(store.own, [layout.action(store.root, record.key)])
    assert store.lookup(record.key) is None
    assert sweep.settle(store.own, moved, lambda path, aside: True) == set()
    assert store.lookup(record.key).image == image


def test_foreign_files_are_listed_and_left_alone(store: Store, entries: list[Any]) -> None:
    for path in ("v1/README", "v1/objects/x.cubin", "v1/actions/notes.json", "v1/objects/zz"):
        (store.root / path).write_bytes(b"mine")
        age(store.root / path)
    (store.root / "v1/actions/link").symlink_to("/nowhere")
    (store.root / "notes").write_text("not even looked at")
    before = tree(store.root)
    report = verify(store, repair=True)
    assert report.findings == ()
    assert sorted(path.name for path in report.foreign) == ["README", "link", "notes.json", "x.cubin", "zz"]
    assert tree(store.root) == before


def test_a_record_of_a_newer_schema_and_all_that_it_mentions_is_left_alone(store: Store, entries: list[Any]) -> None:
    record = entries[0][0]
    path = layout.action(store.root, record.key)
    path.write_bytes(seal(record.as_dict() | {"schema_version": 9, "object": "elsewhere"}))
    age(path)
    before = tree(store.root)
    report = verify(store, repair=True)
    assert report.findings == () and report.newer == (path,)
    assert tree(store.root) == before


def test_an_unmet_contract_is_a_finding_that_repair_does_not_hide(store: Store, make: Make) -> None:
    store.publish(*make("a", outputs={"breaches": ["9 registers a thread, over the 8 promised"]}))
    for repair in (False, True):
        report = verify(store, repair=repair)
        assert kinds(report) == ["unmet-contract"]
        assert "over the 8 promised" in report.unmended[0].what
    assert store.lookup(make("a")[0].key) is not None


def test_compiling_again_finds_code_that_differs_and_a_key_that_does_not_fit(store: Store, entries: list[Any]) -> None:
    by_key = {record.key: (image, source) for record, image, source in entries}
    one, two, three = (record.key for record, _, _ in entries)
    asked = []

    def recompile(record: Record, source: str) -> Recompiled | None:
        assert source == by_key[record.key][1]
        if record.key == one:
            return Recompiled(one, b"other code")
        if record.key == two:
            return Recompiled("f" * 64, by_key[two][0])
        return Recompiled(three, by_key[three][0])

    report = verify(store, recompile=recompile, progress=asked.append)
    assert {finding.key: finding.kind for finding in report.findings} == {one: "unreproducible", two: "wrong-key"}
    assert (report.recompiled, report.skipped) == (3, 0)
    assert sorted(asked) == ["probe.scale.a", "probe.scale.b", "probe.scale.c"]
    assert verify(store, recompile=recompile, repair=True).unmended == ()
    assert [record.key for record in store.records()] == [three]


def test_a_source_that_no_longer_compiles_is_a_finding(store: Store, entries: list[Any]) -> None:
    def recompile(record: Record, source: str) -> Recompiled | None:
        raise CompileError("identifier undefined")

    report = verify(store, recompile=recompile)
    assert kinds(report) == ["unreproducible"] * 3
    assert "identifier undefined" in report.findings[0].what


def test_an_entry_whose_source_is_lost_is_not_compiled_again(store: Store, entries: list[Any]) -> None:
    for record, _, _ in entries:
        layout.source(store.root, record.inputs["source_digest"]).unlink()
    report = verify(store, recompile=lambda record, source: pytest.fail("there is nothing to compile"))
    assert (report.findings, report.recompiled, report.skipped) == ((), 0, 3)


def test_a_clock_that_is_off_does_not_make_young_files_old(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.make_directory(store.root / "v1" / "actions")
    files.temporary_beside(layout.action(store.root, "a" * 64)).write_bytes(b"half")
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert verify(store, repair=True).findings == ()
    assert len(tree(store.root)) == 1


def test_a_cache_that_cannot_be_opened_is_no_sound_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CacheError, match=r"loop cannot be looked into \(Too many levels of symbolic links\)"):
        verify(Store(tmp_path / "loop"))
    assert verify(Store(tmp_path / "none")) == Report((), 0, 0)


def test_a_ledger_that_a_sound_one_replaces_during_the_repair_stays(store: Store) -> None:
    assert store.root is not None
    store.root.mkdir(0o700)
    path = store.root / "ledger.json"
    path.write_text("sound")
    told = iter(["damaged", None])
    (found,) = verify(store, repair=True, ledger=lambda _path: next(told)).findings
    assert found.kind == "corrupt-ledger" and path.read_text() == "sound"
    assert verify(store, repair=True, ledger=lambda _path: "damaged").unmended == () and not path.exists()
    assert list(store.root.iterdir()) == []
