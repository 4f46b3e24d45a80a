"""Which NVRTC a process has, and how that is remembered."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jitmx.errors import ToolchainError
from jitmx.toolchain import library, nvrtc, wheels


class Library:
    """A small file in the place of NVRTC, a memo for it, and a count of how often it was really read."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "libnvrtc.so.13"
        self.path.write_bytes(b"first contents")
        self.memo = directory / "memo" / "toolchain.json"
        self.reads = 0

    def identify(self, memo: Path | None = None) -> dict[str, Any]:
        def describe() -> dict[str, Any]:
            self.reads += 1
            return {"version": "13.5", "targets": [90, 121]}

        return library.identify([self.path], describe, memo or self.memo)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    # A file just written is not remembered; here it may be.
    monkeypatch.setattr(library, "_SETTLED_NS", 0)
    return Library(tmp_path)


def test_a_library_is_read_once_and_remembered(small: Library) -> None:
    first = small.identify()
    assert first == {"version": "13.5", "targets": [90, 121], "digest": hashlib.sha256(b"first contents").hexdigest()}
    assert (small.identify(), small.identify(), small.reads) == (first, first, 1)
    assert small.memo.parent.stat().st_mode & 0o777 == 0o700


def test_a_library_is_read_while_another_process_describes_it(small: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = threading.Event()
    really = library.digest

    def read(paths: Sequence[Path]) -> str:
        reading.set()
        return really(paths)

    def describe() -> dict[str, Any]:
        assert reading.wait(10)
        return {"version": "13.5", "targets": [121]}

    monkeypatch.setattr(library, "digest", read)
    assert library.identify([small.path], describe, None)["digest"] == hashlib.sha256(b"first contents").hexdigest()


def test_touching_the_library_does_not_change_its_digest(small: Library) -> None:
    first = small.identify()
    os.utime(small.path, (1, 1))
    assert small.identify() == first
    assert small.reads == 2


def test_a_changed_library_is_noticed_although_size_and_modification_time_stay(small: Library) -> None:
    first = small.identify()
    before = small.path.stat()
    time.sleep(0.02)
    small.path.write_bytes(b"other contents")
    os.utime(small.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert small.path.stat().st_size == before.st_size
    assert small.path.stat().st_mtime_ns == before.st_mtime_ns
    assert small.identify()["digest"] != first["digest"]


def test_a_library_replaced_by_a_rename_is_noticed(small: Library) -> None:
    first = small.identify()
    before = small.path.stat()
    other = small.path.with_name("other")
    other.write_bytes(b"other contents")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(small.path)
    assert small.identify()["digest"] != first["digest"]


def test_a_link_that_points_elsewhere_is_noticed_and_back_again_is_remembered(small: Library) -> None:
    one, two, link = small.path, small.path.with_name("two"), small.path.with_name("link")
    two.write_bytes(b"second contents")
    link.symlink_to(one)
    small.path = link
    first = small.identify()
    link.unlink()
    link.symlink_to(two)
    second = small.identify()
    assert second["digest"] != first["digest"]
    link.unlink()
    link.symlink_to(one)
    assert small.identify() == first
    assert small.reads == 2


def test_a_copy_in_another_place_has_the_same_digest(small: Library, tmp_path: Path) -> None:
    first = small.identify()
    (tmp_path / "elsewhere").mkdir()
    small.path = Path(shutil.copy(small.path, tmp_path / "elsewhere"))
    assert small.identify()["digest"] == first["digest"]


def test_the_companion_library_is_part_of_the_digest(small: Library) -> None:
    companion = small.path.with_name("libnvrtc-builtins.so.13.5")
    companion.write_bytes(b"built-in")
    assert library.parts(small.path) == (small.path, companion)
    digests = set()
    for text in (b"built-in", b"built-out"):
        companion.write_bytes(text)
        digests.add(library.identify(library.parts(small.path), dict, None)["digest"])
    assert len(digests) == 2


def test_a_library_changed_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    small = Library(tmp_path)
    small.identify()
    small.identify()
    assert small.reads == 2
    assert not small.memo.exists()


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema_version": 1}', b'{"schema_version": 1, "libraries": [1, null]}',
     b'{"schema_version": 2, "libraries": []}', b'{"schema_version": 1, "libraries": {"a": 1}}', b"[" * 100_000],
)  # fmt: skip
def test_a_damaged_memo_is_done_without_and_mended(small: Library, damage: bytes) -> None:
    first = small.identify()
    small.memo.write_bytes(damage)
    assert small.identify() == first
    assert small.reads == 2
    assert small.identify() == first
    assert small.reads == 2


def test_every_changed_character_of_a_memo_is_noticed(small: Library) -> None:
    first = small.identify()
    whole = small.memo.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        small.memo.write_bytes(damaged)
        assert small.identify() == first


def test_a_memo_that_others_could_write_is_neither_believed_nor_written(small: Library) -> None:
    first = small.identify()
    document = json.loads(small.memo.read_bytes())
    small.memo.parent.chmod(0o777)
    assert small.identify() == first
    assert small.reads == 2
    small.memo.unlink()
    assert small.identify() == first
    assert not small.memo.exists()
    small.memo.parent.chmod(0o700)
    small.memo.write_text(json.dumps(document))
    assert small.identify() == first
    assert small.reads == 3


def test_a_memo_that_cannot_be_written_is_done_without(small: Library, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first = small.identify(tmp_path / "file" / "memo.json")
    assert small.identify(tmp_path / "file" / "memo.json") == first
    assert small.reads == 2


def put(path: Path, what: str) -> None:
    """Something in the place of a memo that none could be."""
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)


@pytest.mark.parametrize("what", ["fifo", "directory", "link", "a terabyte"])
def test_what_cannot_be_a_memo_is_done_without_at_once(small: Library, what: str) -> None:
    first = small.identify()
    put(small.memo, what)
    assert small.identify() == first
    assert small.reads == 2
    assert [path.name for path in small.memo.parent.glob("*") if not path.name.startswith(".")] == ["toolchain.json"]


@pytest.mark.parametrize("entry", [{}, [], None, {"version": 13.5}, {"targets": 90}, {"targets": ["9"]}, {"digest": 1}])
def test_a_whole_memo_with_odd_values_is_done_without(small: Library, entry: Any) -> None:
    first = small.identify()
    document = json.loads(small.memo.read_bytes())
    (kept,) = document["libraries"]
    kept["entry"] = {**first, **entry} if entry else entry
    kept["check"] = library._check(kept["signature"], kept["entry"])
    small.memo.write_text(json.dumps(document))
    assert small.identify() == first
    assert small.reads == 2


def test_a_memo_of_another_user_is_not_believed(small: Library) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    first = small.identify()
    os.chown(small.memo, 65534, -1)
    assert small.identify() == first
    assert small.reads == 2


def test_a_memo_stays_small_and_leaves_no_temporary_files(small: Library) -> None:
    for number in range(40):
        small.path.write_bytes(f"contents {number}".encode())
        small.identify()
    assert len(json.loads(small.memo.read_bytes())["libraries"]) == library._KEPT
    assert [path.name for path in small.memo.parent.iterdir()] == ["toolchain.json"]


def test_a_library_that_is_not_there_is_an_error_with_a_remedy(small: Library) -> None:
    small.path.unlink()
    with pytest.raises(ToolchainError, match=r"NVRTC cannot be read: .*--force-reinstall nvidia-cuda-nvrtc"):
        small.identify()


def test_a_library_that_does_not_load_is_an_error_with_a_remedy(small: Library) -> None:
    with pytest.raises(ToolchainError, match=r"NVRTC does not load: .*--force-reinstall nvidia-cuda-nvrtc"):
        library.load(small.path)


def test_without_the_wheel_the_error_says_which_package_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "roots", lambda: ())
    with pytest.raises(ToolchainError, match=r"libnvrtc\.so\.13 is missing, .*pip install nvidia-cuda-nvrtc"):
        library.locate()


def test_the_identity_is_that_of_the_installed_wheel(cache: Path) -> None:
    identity = nvrtc.identity()
    assert identity.path.name.startswith("libnvrtc.so.13")
    assert identity.version.startswith("13.")
    assert {80, 90, 100, 120, 121} <= set(identity.targets)
    assert len(identity.digest) == 64
    assert identity.digest == library.digest(library.parts(identity.path))


def test_a_remembered_identity_takes_a_hundredth_of_reading_the_library_and_loads_nothing(
    python: Callable[..., str], cache: Path
) -> None:
    code = """
        import sys, time
        from jitmx.toolchain import library, nvrtc
        path = library.locate()
        remembered, read = [], []
        for _ in range(5):
            nvrtc.identity.cache_clear()
            started = time.process_time()
            identity = nvrtc.identity()
            known = time.process_time()
            library.digest(library.parts(path))
            remembered.append(known - started)
            read.append(time.process_time() - known)
        loaded = "libnvrtc" in open("/proc/self/maps").read()
        print(identity.digest, min(remembered) / min(read), loaded, "cupy" in sys.modules)
    """
    digest, ratio, loaded, cupy = python(code).split()
    assert (digest, loaded, cupy) == (nvrtc.identity().digest, "False", "False")
    assert float(ratio) < 0.01


def test_mode_off_leaves_no_memo(python: Callable[..., str], tmp_path: Path) -> None:
    code = "from jitmx.toolchain import nvrtc; print(nvrtc.identity().digest)"
    assert python(code, JITMX_MODE="off", JITMX_CACHE_DIR=str(tmp_path / "none")) == nvrtc.identity().digest
    assert not (tmp_path / "none").exists()


_COMPILE = """
    import ctypes, os, re, shutil
    from jitmx import arch
    from jitmx.toolchain import nvrtc
    from jitmx.errors import ToolchainError
    source, options = 'extern "C" __global__ void k(int* a) {{ *a = 1; }}', nvrtc.options(arch.parse("sm_90a"))
    {first}
    identity = nvrtc.identity()
    {then}
    try:
        built = re.search(r"V13[.0-9]+", nvrtc.compile_ptx(source, options))[0]
        print(identity.path, built, len(nvrtc.compile(source, options).image) > 0, identity.digest)
    except ToolchainError as error:
        print(error)
"""
_CUPY = "from cupy_backends.cuda.libs import nvrtc as cupys; cupys.getVersion()"


def _release(path: Path) -> bytes:
    """What the library at `path` writes into PTX for its release."""
    found = re.search(rb"V13\.\d+\.\d+", path.read_bytes())
    assert found is not None
    return found[0]


@pytest.fixture(scope="module")
def release() -> str:
    return _release(nvrtc.identity().path).decode()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, release: str) -> Path:
    """A copy of NVRTC that says of itself, in the code that it makes, that it is another release."""
    path = tmp_path_factory.mktemp("other") / nvrtc.identity().path.name
    mark = f"V13.9{release[5:]}"
    path.write_bytes(nvrtc.identity().path.read_bytes().replace(release.encode(), mark.encode()))
    return path


@pytest.mark.parametrize(
    ("first", "then"), [("{load}", ""), ("{load}; {cupy}", ""), ("", "nvrtc.compile(source, options); {load}; {cupy}")]
)
def test_another_library_in_the_process_compiles_nothing_of_jitmx_s(
    python: Callable[..., str], other: Path, release: str, first: str, then: str
) -> None:
    words = {"load": f"loaded = ctypes.CDLL({str(other)!r})", "cupy": _CUPY}
    identity = nvrtc.identity()
    printed = python(_COMPILE.format(first=first.format(**words), then=then.format(**words)))
    assert printed == f"{identity.path} {release} True {identity.digest}"


@pytest.mark.parametrize("libraries", ["{other}", "{builtins}"])
def test_library_paths_in_the_environment_do_not_decide(
    python: Callable[..., str], other: Path, release: str, tmp_path: Path, libraries: str
) -> None:
    builtins = tmp_path / "builtins"
    builtins.mkdir()
    companion = library.parts(nvrtc.identity().path)[1]
    (builtins / companion.name).write_bytes(b"no library")
    place = libraries.format(other=other.parent, builtins=builtins)
    env = dict.fromkeys(("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME"), place)
    identity = nvrtc.identity()
    printed = python(_COMPILE.format(first="", then=""), **env)
    assert printed == f"{identity.path} {release} True {identity.digest}"


def _wheel(folder: Path) -> str:
    """Code by which a process takes a copy of NVRTC in `folder` for the wheel's."""
    return f"""
    from pathlib import Path
    from jitmx.toolchain import library, wheels
    for file in library.parts(library.locate()):
        shutil.copy(file, {str(folder)!r})
    wheels.find = lambda *_, **__: Path({str(folder)!r}) / wheels.NVRTC"""


# The process that has the old contents loaded goes on with them: only one that is started later meets the new ones.
_REPLACE = (
    "from jitmx.toolchain import workers; workers._retire_all(); "
    "shutil.copy(identity.path, 'new'); {change}; os.replace('new', identity.path)"
)


def test_a_library_replaced_since_its_digest_was_taken_is_an_error(python: Callable[..., str], tmp_path: Path) -> None:
    change = "open('new', 'ab').write(b'changed')"
    printed = python(_COMPILE.format(first=_wheel(tmp_path), then=_REPLACE.format(change=change)), cwd=tmp_path)
    path = tmp_path / nvrtc.identity().path.name
    assert printed.startswith(f"{path} was replaced on disk") and "start the process again" in printed


def test_a_library_replaced_while_it_is_loaded_still_makes_the_code_that_keys_tell_of(
    python: Callable[..., str], tmp_path: Path, release: str
) -> None:
    then = "nvrtc.compile(source, options); open('new', 'wb').write(b'no'); os.replace('new', identity.path)"
    printed = python(_COMPILE.format(first=_wheel(tmp_path), then=then), cwd=tmp_path)
    path = tmp_path / nvrtc.identity().path.name
    assert printed == f"{path} {release} True {nvrtc.identity().digest}"


def test_a_library_replaced_by_one_with_the_same_contents_goes_on(
    python: Callable[..., str], tmp_path: Path, release: str
) -> None:
    printed = python(_COMPILE.format(first=_wheel(tmp_path), then=_REPLACE.format(change="pass")), cwd=tmp_path)
    path = tmp_path / nvrtc.identity().path.name
    assert printed == f"{path} {release} True {nvrtc.identity().digest}"
