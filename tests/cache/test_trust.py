"""What other users could have put into a cache is not served, however it came there."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import filelock  # noqa: F401  (a process of another user may not be able to import it)
import pytest

from jitmx.cache import files, layout
from jitmx.cache.manifest import Record
from jitmx.cache.prune import prune
from jitmx.cache.store import Store
from jitmx.cache.verify import verify
from jitmx.cli import checks
from jitmx.errors import CacheError

Make = Callable[..., tuple[Record, bytes, str]]
OTHER, TEAM = 23456, 34567


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def follow(error: CacheError, command: str) -> None:
    """Do what the message says."""
    advice = re.search(rf"\(({command} [^;)]+)", str(error))
    assert advice is not None
    subprocess.run(["sh", "-c", advice[1]], check=True)


@pytest.mark.parametrize("below", ["", "v1", "v1/actions", "v1/objects", "v1/objects/ab", "v1/sources", "v1/scans"])
def test_every_use_refuses_a_directory_that_others_can_write_wherever_it_lies(
    tmp_path: Path, make: Make, below: str
) -> None:
    store = Store(tmp_path / "cache")
    record, image, source = make("a")
    store.publish(record, image, source)
    store.keep_scan("a" * 64, {}, "b" * 64)
    (store.root / "v1" / "objects" / "ab").mkdir(mode=0o700, exist_ok=True)
    (store.root / below).chmod(0o770)
    with pytest.raises(CacheError, match="can be written by others") as raised:
        Store(store.root)
    place = str(store.root)
    for part in (f"{store.root / below} ", "0770", f"rm -r {place}/v1", f"chmod -R go-w {place}", "JITMX_CACHE_DIR"):
        assert part in str(raised.value)
    for use in (verify, prune):
        with pytest.raises(CacheError):
            use(store)
    found = {check.name: check for check in checks.check_directory(store.root, allow_shared=False)}["cache"]
    assert found.status == "problem" and f"{found.found}; {found.remedy}" == str(raised.value)
    assert list(Store(store.root, allow_shared=True).records()) == [record]


@pytest.mark.parametrize("below", ["", "v1", "v1/actions", "v1/objects"])
def test_a_directory_that_is_opened_to_others_under_a_running_process_is_refused_at_the_next_look_up(
    store: Store, make: Make, below: str
) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    assert store.lookup(record.key) is not None
    (store.root / below).chmod(0o777)
    with pytest.raises(CacheError, match=f"{below} can be written by others"):
        store.lookup(record.key)
    with pytest.raises(CacheError, match=f"{below} can be written by others"):
        store.publish(record, image, source)


def test_the_advice_mends_a_cache_whole_that_was_shared_once(tmp_path: Path, make: Make) -> None:
    root = tmp_path / "a cache"
    root.mkdir()
    root.chmod(0o777)
    shared = Store(root, allow_shared=True)
    record, image, source = make("a")
    shared.publish(record, image, source)
    assert mode(root / "v1" / "actions") == 0o777, "as the root was"
    for place in (root, root / "v1"):
        place.chmod(0o755)
    with pytest.raises(CacheError, match="v1/actions") as raised:
        Store(root)
    follow(raised.value, "chmod -R")
    assert Store(root).lookup(record.key).image == image
    assert verify(Store(root)).findings == ()
    root.chmod(0o777)
    with pytest.raises(CacheError) as raised:
        Store(root)
    (root / "notes.txt").write_text("not jitmx's")
    follow(raised.value, "rm -r")
    assert Store(root).lookup(record.key) is None and (root / "notes.txt").exists()


@pytest.mark.parametrize("kind", ["record", "object", "source", "scan"])
def test_a_file_of_another_user_is_a_miss_with_a_warning_a_finding_and_mended(
    store: Store, make: Make, kind: str, as_user: object, caplog: pytest.LogCaptureFixture
) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    store.keep_scan("a" * 64, {}, record.inputs["source_digest"])
    path, read = {
        "record": (layout.action(store.root, record.key), lambda store: store.lookup(record.key)),
        "object": (layout.object_(store.root, record.outputs["object"]), lambda store: store.lookup(record.key)),
        "source": (
            layout.source(store.root, record.inputs["source_digest"]),
            lambda store: store.source(record.inputs["source_digest"]),
        ),
        "scan": (layout.scan(store.root, "a" * 64), lambda store: store.scan("a" * 64)),
    }[kind]
    os.chown(path, OTHER, -1)
    assert read(Store(store.root)) is None
    assert f"belongs to user id {OTHER}" in caplog.text and str(path) in caplog.text
    assert read(Store(store.root, allow_shared=True)) is not None
    found = [finding for finding in verify(store).findings if finding.path == path]
    assert [finding.kind for finding in found] == [f"corrupt-{kind}"] and f"user id {OTHER}" in found[0].what
    assert verify(store, repair=True).unmended == ()
    assert not path.exists()


def test_a_file_that_others_can_write_is_a_miss_and_publishing_replaces_it(store: Store, make: Make) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    for path in (layout.action(store.root, record.key), layout.object_(store.root, record.outputs["object"])):
        path.chmod(0o606)
        assert Store(store.root).lookup(record.key) is None
        store.publish(record, image, source)
        assert Store(store.root).lookup(record.key).image == image
        assert mode(path) == 0o600


def test_another_cache_put_in_the_place_of_this_one_is_not_served(
    commons: Path, make: Make, as_user: Callable[..., None]
) -> None:
    record, image, source = make("a")
    forged = make("a", image=b"their code")
    root = commons / "cache"
    store = Store(root)
    store.publish(record, image, source)
    assert store.lookup(record.key).image == image

    def replace() -> None:
        root.rename(commons / "away")
        assert Store(root).publish(*forged)

    as_user(OTHER, replace)
    for use in (
        lambda: store.lookup(record.key),
        lambda: list(store.records()),
        lambda: store.publish(record, image, source),
        lambda: store.scan("a" * 64),
        lambda: verify(store, repair=True),
        lambda: prune(store, max_bytes=0),
    ):
        with pytest.raises(CacheError, match=f"belongs to user id {OTHER}"):
            use()
    (layout.action(root, record.key)).lstat()


@pytest.mark.parametrize("below", ["v1", "v1/actions", "v1/objects"])
def test_a_link_in_the_place_of_a_directory_within_the_cache_is_not_followed(
    store: Store, tmp_path: Path, make: Make, below: str
) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    (store.root / below).rename(tmp_path / "moved")
    (store.root / below).symlink_to(tmp_path / "moved")
    fresh = Store(store.root)
    assert fresh.lookup(record.key) is None
    assert not fresh.publish(record, image, source)
    assert "corrupt-folder" in [finding.kind for finding in verify(fresh, repair=True).findings]
    assert list((tmp_path / "moved").iterdir()), "only the link is taken out"
    assert fresh.publish(record, image, source)
    assert Store(store.root).lookup(record.key).image == image


def is_own(path: Path, *, allow_shared: bool) -> bool:
    """Whether there is a directory that can be opened; one that somebody else could write to is an error."""
    try:
        with files.open_directory(path, allow_shared=allow_shared):
            pass
    except OSError:
        return False
    return True


def test_a_root_that_is_a_link_of_another_user_is_refused(tmp_path: Path, make: Make, as_user: object) -> None:
    Store(tmp_path / "cache").publish(*make("a"))
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    assert Store(tmp_path / "link").lookup(make("a")[0].key) is not None
    os.lchown(tmp_path / "link", OTHER, -1)
    assert is_own(tmp_path / "cache", allow_shared=False)
    for refused in (lambda: is_own(tmp_path / "link", allow_shared=False), lambda: Store(tmp_path / "link")):
        with pytest.raises(CacheError, match=rf"link belongs to user id {OTHER}"):
            refused()
    assert is_own(tmp_path / "link", allow_shared=True)


def test_a_site_cache_is_held_to_the_same(tmp_path: Path, make: Make, as_user: object) -> None:
    record, image, source = make("a")
    Store(tmp_path / "site").publish(record, image, source)
    store = Store(tmp_path / "cache", layers=[tmp_path / "site"])
    assert store.lookup(record.key).image == image
    os.chown(tmp_path / "site" / "v1" / "objects", OTHER, -1)
    with pytest.raises(CacheError, match=f"site/v1/objects belongs to user id {OTHER}"):
        store.lookup(record.key)


def test_everyone_of_a_team_fills_and_reads_its_cache(commons: Path, make: Make, as_user: Callable[..., None]) -> None:
    root = commons / "team"
    root.mkdir()
    os.chown(root, 0, TEAM)
    root.chmod(0o2770)
    entries = {user: make(str(user)) for user in (OTHER, OTHER + 1)}
    failed = []

    def warm_up() -> None:
        logging.getLogger("jitmx").addHandler(handler := logging.StreamHandler(sys.stderr))
        handler.emit = lambda message: failed.append(message.getMessage())  # type: ignore[method-assign]
        store = Store(root, allow_shared=True)
        record, image, source = entries[os.geteuid()]
        assert store.lookup(record.key) is None
        with store.lock(record.key, 5) as held, store.lock("a" * 64, 5) as common:
            assert held and common
            assert store.publish(record, image, source), failed
        store.keep_scan(record.key, {}, record.inputs["source_digest"])
        assert store.clock() > 1e9
        for other in store.records():
            assert store.lookup(other.key) is not None, failed
        assert failed == []

    for user in entries:
        as_user(user, warm_up, groups=(TEAM,))
    assert len(list(Store(root, allow_shared=True).records())) == 2
    for path in root.rglob("*"):
        assert path.stat().st_gid == TEAM, path
        assert mode(path) == (0o2770 if path.is_dir() else 0o660), path


@pytest.mark.parametrize(("shared", "directory", "file"), [(0o755, 0o700, 0o600), (0o775, 0o770, 0o660)])
def test_a_lock_can_be_opened_by_those_only_who_may_write_to_the_cache(
    tmp_path: Path, shared: int, directory: int, file: int
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(shared)
    store = Store(tmp_path / "cache", allow_shared=shared == 0o775)
    path = layout.lock(store.root, "a" * 64)
    for _ in range(2):
        with store.lock("a" * 64, 1) as held:
            assert held
        assert (mode(path.parent), mode(path)) == (directory, file)
        # As an older jitmx left them.
        path.parent.chmod(shared)
        path.chmod(shared & 0o666)


def test_another_user_cannot_hold_a_lock_of_a_cache_that_all_may_read(
    commons: Path, as_user: Callable[..., None]
) -> None:
    root = commons / "cache"
    root.mkdir(mode=0o755)
    store = Store(root)
    path = layout.lock(root, "a" * 64)
    with store.lock("a" * 64, 1) as held:
        assert held

    def hold() -> None:
        with pytest.raises(PermissionError), path.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)

    as_user(OTHER, hold)
    shutil.rmtree(root)
