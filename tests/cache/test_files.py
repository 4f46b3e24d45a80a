"""Reading and writing in a directory that others may have prepared."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from pathlib import Path

import pytest

from jitmx.cache import files
from jitmx.errors import CacheError


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (b"", b"x", os.urandom(3 << 20)):
        files.write(path, data)
        found = files.read(path, 4 << 20)
        assert found is not None and found[0] == data
    assert names(tmp_path) == ["a"]


def test_a_file_is_private_unless_told_otherwise(tmp_path: Path) -> None:
    files.write(tmp_path / "a", b"x")
    files.write(tmp_path / "b", b"x", permissions=0o644)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o600, 0o644]


def test_permissions_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        files.write(tmp_path / "b", b"x", permissions=0o664)
        files.make_directory(tmp_path / "c" / "d", 0o775)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o664
    assert stat.S_IMODE((tmp_path / "c" / "d").stat().st_mode) == 0o775


def test_nothing_is_there_reads_as_none(tmp_path: Path) -> None:
    assert files.read(tmp_path / "a", 100) is None
    (tmp_path / "file").write_text("")
    assert files.read(tmp_path / "file" / "a", 100) is None


def test_a_file_over_the_limit_is_refused_by_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    found = files.read(path, 100)
    assert found is not None and found[0] == b"x" * 100
    os.truncate(path, 1 << 40)
    monkeypatch.setattr(os, "read", lambda *arguments: pytest.fail("it was read"))
    with pytest.raises(OSError, match="larger than") as raised:
        files.read(path, 100)
    assert raised.value.errno == errno.EFBIG


def test_a_file_that_grows_is_read_one_byte_beyond_the_limit_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    really, had = os.read, []

    def growing(descriptor: int, count: int) -> bytes:
        os.truncate(path, 1 << 20)
        had.append(really(descriptor, count))
        return had[-1]

    monkeypatch.setattr(os, "read", growing)
    with pytest.raises(OSError, match="larger than"):
        files.read(path, 1000)
    assert sum(map(len, had)) == 1001


def test_a_symbolic_link_is_not_read_unless_asked_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "a").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        files.read(tmp_path / "a", 100)
    found = files.read(tmp_path / "a", 100, follow=True)
    assert found is not None and found[0] == b"x"


def test_a_fifo_does_not_hold_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(OSError, match="regular"):
        files.read(tmp_path / "a", 100)


def test_a_directory_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        files.read(tmp_path, 100)


def test_writing_replaces_a_symbolic_link_and_leaves_its_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "a").symlink_to(target)
    files.write(tmp_path / "a", b"new")
    assert target.read_bytes() == b"precious"
    assert not (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("there", [True, False])
def test_what_a_user_names_is_written_where_links_lead(tmp_path: Path, there: bool) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    if there:
        target.write_bytes(b"old")
        target.chmod(0o640)
    (tmp_path / "a").symlink_to("folder/target")
    files.write_named(tmp_path / "a", b"new", permissions=0o600)
    assert (tmp_path / "a").is_symlink() and target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == (0o640 if there else 0o600)
    assert names(tmp_path / "folder") == ["target"]


def test_a_new_file_that_a_user_names_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_named(tmp_path / "a", b"new")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_pipe_that_a_user_names_takes_the_data_and_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    reader = os.open(tmp_path / "a", os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_named(tmp_path / "a", b"new")
        assert os.read(reader, 100) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "a").stat().st_mode) and names(tmp_path) == ["a"]


def test_a_loop_of_links_or_a_directory_that_a_user_names_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    (tmp_path / "b").mkdir()
    for name in "ab":
        with pytest.raises(OSError):
            files.write_named(tmp_path / name, b"new")
    assert names(tmp_path) == ["a", "b"] and (tmp_path / "a").is_symlink()


def test_a_planted_temporary_name_is_never_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    planted = tmp_path / ".a.planted.tmp"
    planted.symlink_to(target)
    monkeypatch.setattr(files, "temporary_beside", lambda path: planted)
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "a", b"new")
    assert target.read_bytes() == b"precious" and planted.is_symlink()


def test_temporary_names_are_fresh_hidden_and_recognized(tmp_path: Path) -> None:
    made = [files.temporary_beside(tmp_path / "a.json").name for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(name.startswith(".") and files.is_temporary(name) for name in made)
    assert not files.is_temporary("a.json")
    assert len(files.temporary_beside(tmp_path / ("n" * 250)).name) < 255


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):
        files.write(tmp_path / "a", b"x")
    with pytest.raises(FileNotFoundError):
        files.write(tmp_path / "missing" / "a", b"x")
    assert names(tmp_path) == ["a"]


def test_an_interrupt_in_the_middle_of_a_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "a", b"x")
    assert names(tmp_path) == []


def test_readers_see_the_old_bytes_or_the_new_and_never_a_part(tmp_path: Path) -> None:
    path = tmp_path / "a"
    versions = [bytes([value]) * 200_000 for value in range(8)]
    files.write(path, versions[0])
    done = threading.Event()

    def writer() -> None:
        for turn in range(200):
            files.write(path, versions[turn % 8], sync=False)
        done.set()

    thread = threading.Thread(target=writer)
    thread.start()
    seen = set()
    while not done.is_set():
        found = files.read(path, 4 << 20)
        assert found is not None
        seen.add(found[0])
    thread.join()
    assert seen <= set(versions)


def test_directories_that_are_made_are_private(tmp_path: Path) -> None:
    files.make_directory(tmp_path / "a" / "b" / "c")
    for below in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / below).stat().st_mode) == 0o700
    files.make_directory(tmp_path / "a" / "b")


def test_a_file_in_the_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(OSError):
        files.make_directory(tmp_path / "a")
    with pytest.raises(OSError):
        files.make_directory(tmp_path / "a" / "b")


def is_own(path: Path, *, allow_shared: bool) -> bool:
    """Whether there is a directory that can be opened; one that somebody else could write to is an error."""
    try:
        with files.open_directory(path, allow_shared=allow_shared):
            pass
    except OSError:
        return False
    return True


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_can_write_is_refused_unless_allowed(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(CacheError, match=r"written by others.*JITMX_CACHE_DIR.*JITMX_ALLOW_SHARED_CACHE=1"):
        is_own(tmp_path, allow_shared=False)
    assert is_own(tmp_path, allow_shared=True)


@pytest.mark.parametrize(
    ("mode", "made", "commands"),
    [
        (0o777, False, ["chmod go-w {0}"]),
        (0o777, True, ["rm -r {0}/v1 && chmod go-w {0}", "chmod -R go-w {0}"]),
        (0o1777, False, []),
        (0o1777, True, []),
    ],
)
def test_nothing_but_what_jitmx_keeps_is_ever_to_be_removed_and_what_is_shared_on_purpose_stays(
    tmp_path: Path, mode: int, made: bool, commands: list[str]
) -> None:
    if made:
        (tmp_path / "v1").mkdir()
    tmp_path.chmod(mode)
    with pytest.raises(CacheError) as raised:
        is_own(tmp_path, allow_shared=False)
    assert raised.value.remedy.startswith("name another directory (JITMX_CACHE_DIR")
    assert re.findall(r"\(((?:rm|chmod) [^;)]+)", raised.value.remedy) == [one.format(tmp_path) for one in commands]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o555])
def test_a_directory_that_only_its_owner_can_write_is_fine(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert is_own(tmp_path, allow_shared=False)


def test_a_directory_of_another_user_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.chown(tmp_path, 12345, -1)
    except PermissionError:
        # Only root may give a directory away: for others, its status says that somebody did.
        given = os.stat_result((*tmp_path.stat()[:4], 12345, *tmp_path.stat()[5:]))
        monkeypatch.setattr(os, "fstat", lambda descriptor: given)
    with pytest.raises(CacheError, match=r"belongs to user id .*JITMX_CACHE_DIR"):
        is_own(tmp_path, allow_shared=False)
    assert is_own(tmp_path, allow_shared=True)


def test_a_link_to_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert is_own(tmp_path / "link", allow_shared=False)
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(CacheError):
        is_own(tmp_path / "link", allow_shared=False)


def test_a_file_where_the_cache_should_be_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(CacheError, match=r"a is not a directory; name one in JITMX_CACHE_DIR"):
        is_own(tmp_path / "a", allow_shared=True)


def test_a_directory_that_does_not_exist_passes(tmp_path: Path) -> None:
    assert not is_own(tmp_path / "a" / "b", allow_shared=False)


def test_making_a_directory_where_none_can_be_made_ends_in_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        files.make_directory(Path("/proc/jitmx-no-such-name/deeper/still"))


@pytest.mark.parametrize("ask", [files.exists, files.is_directory])
def test_what_cannot_be_looked_at_is_taken_for_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask) -> None:
    (tmp_path / "file").write_text("")
    assert ask(tmp_path / "file") == (ask is not files.is_directory)
    assert ask(tmp_path)
    assert not ask(tmp_path / "nothing") and not ask(tmp_path / "file" / "below")

    def refuse(*_arguments: object, **_more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    assert not ask(tmp_path)
