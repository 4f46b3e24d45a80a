"""What is no longer wanted goes; everything else stays and works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jitmx.cache import files, layout, sweep
from jitmx.cache.manifest import Record, seal
from jitmx.cache.prune import prune
from jitmx.cache.stats import measure
from jitmx.cache.store import Store
from jitmx.cache.verify import verify

Make = Callable[..., tuple[Record, bytes, str]]
DAY = 86400.0


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def alive(store: Store) -> set[str]:
    return {record.name.rpartition(".")[2] for record in store.records() if store.lookup(record.key)}


@pytest.fixture
def fill(store: Store, make: Make) -> Callable[..., Record]:
    """Publishes an entry that was last used so many days ago."""

    def add(text: str, days: float = 0.0, **members: Any) -> Record:
        entry = make(text, **members)
        store.publish(*entry)
        age(layout.action(store.root, entry[0].key), days * DAY)
        age(layout.object_(store.root, entry[0].outputs["object"]), days * DAY)
        age(layout.source(store.root, entry[0].inputs["source_digest"]), days * DAY)
        return entry[0]

    return add


def test_entries_go_by_age_of_their_last_use(store: Store, fill: Callable[..., Record]) -> None:
    for text, days in (("old", 40.0), ("older", 60.0), ("young", 3.0)):
        fill(text, days)
    done = prune(store, older_than=30 * DAY)
    assert alive(store) == {"young"}
    assert {removal.reason for removal in done.removals if removal.name == "probe.scale.old"} == {
        "not used for 40.0 days"
    }
    assert verify(store, grace=-60).findings == ()


def test_entries_go_by_target(store: Store, fill: Callable[..., Record]) -> None:
    fill("a", arch="sm_90a")
    fill("b", arch="sm_120a")
    fill("c", arch="sm_121a")
    prune(store, arches=["sm_90a", "sm_120a"])
    assert alive(store) == {"c"}
    assert verify(store, grace=-60).findings == ()


def test_entries_go_by_reach(store: Store, fill: Callable[..., Record]) -> None:
    for text in "abc":
        fill(text)
    done = prune(store, reachable=lambda record: record.name.endswith(".b"))
    assert alive(store) == {"b"}
    assert all("unreachable" in removal.reason for removal in done.removals if removal.kind == "record")


def test_entries_go_by_size_least_recently_used_first(store: Store, fill: Callable[..., Record]) -> None:
    for number in range(6):
        fill(str(number), days=number + 1, image=os.urandom(10_000))
    limit = size(store.root) // 2
    done = prune(store, max_bytes=limit)
    assert alive(store) == {"0", "1", "2"}
    assert size(store.root) <= limit
    assert done.kept == size(store.root)
    assert prune(store, max_bytes=limit).removals == ()
    prune(store, max_bytes=0)
    assert alive(store) == set()


def test_a_look_up_counts_as_a_use(store: Store, fill: Callable[..., Record]) -> None:
    used, unused = fill("used", 40.0), fill("unused", 40.0)
    assert store.lookup(used.key) and unused
    prune(store, older_than=30 * DAY)
    assert alive(store) == {"used"}


def test_a_dry_run_says_the_same_and_changes_nothing(store: Store, fill: Callable[..., Record]) -> None:
    for number in range(4):
        fill(str(number), days=number * 20)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    planned = prune(store, older_than=30 * DAY, dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()} == before
    done = prune(store, older_than=30 * DAY)
    assert done == planned
    assert before.keys() - {removal.path for removal in done.removals} == {
        path for path in store.root.rglob("*") if path.is_file()
    }


def test_code_and_source_that_another_entry_needs_stay(store: Store, fill: Callable[..., Record]) -> None:
    fill("gone", 40.0, image=b"same", source="same")
    fill("stays", 1.0, image=b"same", source="same")
    done = prune(store, older_than=30 * DAY)
    assert [removal.kind for removal in done.removals] == ["record"]
    assert alive(store) == {"stays"}


def test_old_orphans_and_cut_off_writes_go_in_any_case_and_young_ones_stay(
    store: Store, fill: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = fill("a", 1.0)
    store.keep_scan("1" * 64, {}, record.inputs["source_digest"])
    store.keep_scan("2" * 64, {}, "e" * 64)
    (store.root / "v1" / "actions" / ".cut.tmp").write_bytes(b"half")
    for name, seconds in (("old", 2 * sweep.GRACE), ("young", 0.0)):
        orphan = layout.object_(store.root, ("aa" if name == "old" else "bb") + "0" * 62)
        files.make_directory(orphan.parent)
        orphan.write_bytes(b"orphan")
        age(orphan, seconds)
    age(layout.scan(store.root, "2" * 64), 2 * sweep.GRACE)
    done = prune(store)
    assert sorted(removal.kind for removal in done.removals) == ["object", "scan"]
    assert (store.root / "v1" / "actions" / ".cut.tmp").exists()
    assert layout.object_(store.root, "bb" + "0" * 62).exists()
    assert store.scan("1" * 64) == {}
    assert alive(store) == {"a"}
    monkeypatch.setattr(Store, "clock", lambda store: time.time() + 2 * sweep.GRACE)
    assert sorted(removal.kind for removal in prune(store).removals) == ["object", "temporary"]


def test_scans_and_failed_sources_go_with_what_they_belong_to(store: Store, fill: Callable[..., Record]) -> None:
    record = fill("a", 40.0)
    store.keep_scan("1" * 64, {}, record.inputs["source_digest"])
    old, young = store.keep_failed("old", "x"), store.keep_failed("young", "y")
    age(Path(old or ""), 40 * DAY)
    prune(store, older_than=30 * DAY)
    assert store.scan("1" * 64) is None
    assert [Path(path or "").exists() for path in (old, young)] == [False, True]
    prune(store, max_bytes=0)
    assert size(store.root) == 0


def test_foreign_files_locks_and_newer_records_stay(store: Store, fill: Callable[..., Record]) -> None:
    record = fill("newer", 400.0)
    fill("a", 400.0)
    path = layout.action(store.root, record.key)
    path.write_bytes(seal(record.as_dict() | {"schema_version": 2}))
    age(path, 400 * DAY)
    (store.root / "v1" / "notes").write_text("mine")
    with store.lock("abc" + "0" * 61, 1):
        pass
    prune(store, older_than=DAY, max_bytes=0)
    left = {path.name for path in store.root.rglob("*") if path.is_file()}
    digest = record.outputs["object"]
    assert left == {path.name, "notes", "abc.lock", f"{digest}.cubin", f"{record.inputs['source_digest']}.cu"}


def test_an_entry_that_is_used_while_pruning_stays(
    store: Store, fill: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = fill("a", 40.0)
    really = sweep.move_aside

    def use_before(*arguments: Any) -> Any:
        Store(store.root).lookup(record.key)
        return really(*arguments)

    monkeypatch.setattr(sweep, "move_aside", use_before)
    done = prune(store, older_than=30 * DAY)
    monkeypatch.undo()
    assert done.removals == ()
    assert alive(store) == {"a"}
    assert verify(store, grace=-60).findings == ()


def test_an_entry_that_is_published_while_its_code_is_pruned_keeps_it(
    store: Store, fill: Callable[..., Record], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("a", 40.0, image=b"same")
    really, calls = sweep.move_aside, 0

    def publish_between(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            Store(store.root).publish(*make("b", image=b"same"))
        return really(*arguments)

    monkeypatch.setattr(sweep, "move_aside", publish_between)
    prune(store, older_than=30 * DAY)
    assert calls == 2
    assert alive(store) == {"b"}


def test_an_unreadable_scan_or_record_does_not_stop_pruning(store: Store, fill: Callable[..., Record]) -> None:
    fill("a", 40.0)
    fill("b", 1.0)
    layout.action(store.root, "d" * 64).write_bytes(b"damaged")
    store.keep_scan("1" * 64, {}, "e" * 64)
    layout.scan(store.root, "1" * 64).write_bytes(b"damaged")
    prune(store, older_than=30 * DAY)
    assert alive(store) == {"b"}


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_pruned_the_rest_is_sound_and_within_the_limit(
    data: st.DataObject, make: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.mktemp("prune") / "cache")
    count = data.draw(st.integers(0, 6))
    for number in range(count):
        image = data.draw(st.sampled_from([b"one", b"two" * 900, b"three" * 300]))
        entry = make(str(number), image=image, source=data.draw(st.sampled_from(["s", "t" * 500])))
        store.publish(*entry)
        age(layout.action(store.root, entry[0].key), data.draw(st.integers(0, 100)) * DAY)
    limit = data.draw(st.none() | st.integers(0, 20_000))
    older = data.draw(st.none() | st.integers(1, 100).map(lambda days: (days - 0.5) * DAY))
    total = size(store.root)
    planned = prune(store, max_bytes=limit, older_than=older, dry_run=True)
    done = prune(store, max_bytes=limit, older_than=older)
    assert done == planned
    assert verify(store, grace=-60).findings == ()
    assert limit is None or size(store.root) <= limit
    assert (done.freed, done.kept) == (total - size(store.root), size(store.root))
    if limit is None and older is None:
        assert len(alive(store)) == count


def test_a_store_in_memory_and_an_empty_one_have_nothing_to_prune(tmp_path: Path) -> None:
    for store in (Store(None), Store(tmp_path / "nowhere")):
        assert prune(store, max_bytes=0).removals == ()


def test_the_measure_of_a_cache_is_that_of_its_files(tmp_path: Path, make: Make) -> None:
    Store(tmp_path / "site").publish(*make("s"))
    store = Store(tmp_path / "cache", layers=[tmp_path / "site"])
    assert measure(store)["entries"]["count"] == 0
    for text, target in (("a", "sm_90a"), ("b", "sm_121a"), ("c", "sm_121a")):
        store.publish(*make(text, arch=target))
    store.keep_failed("x", "source")
    measured = measure(store)
    assert measured["bytes"] == size(store.root)
    assert measured["path"] == str(store.root)
    assert measured["files"]["record"]["count"] == measured["files"]["object"]["count"] == 3
    assert measured["entries"] == {"count": 3, "by_family": {"probe": 3}, "by_arch": {"sm_121a": 2, "sm_90a": 1}}
    assert measured["layers"] == {str(tmp_path / "site"): 1}
    assert measure(Store(None))["bytes"] == 0
