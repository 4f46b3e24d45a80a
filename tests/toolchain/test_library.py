"""Which NVRTC a process has, and how that is remembered."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
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
    assert library.files(small.path) == (small.path, companion)
    digests = set()
    for text in (b"built-in", b"built-out"):
        companion.write_bytes(text)
        digests.add(library.identify(library.files(small.path), dict, None)["digest"])
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
        library.preload(small.path)


def test_without_the_wheel_the_error_says_which_package_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", lambda name: None)
    monkeypatch.setattr(wheels, "roots", lambda: ())
    with pytest.raises(ToolchainError, match=r"libnvrtc\.so\.13 is missing, .*pip install nvidia-cuda-nvrtc"):
        library.locate()


def test_the_identity_is_that_of_the_installed_wheel(cache: Path) -> None:
    identity = nvrtc.identity()
    assert identity.path.name.startswith("libnvrtc.so.13")
    assert identity.version.startswith("13.")
    assert {80, 90, 100, 120, 121} <= set(identity.targets)
    assert len(identity.digest) == 64
    assert identity.digest == library._digest(library.files(identity.path))


def test_a_remembered_identity_takes_less_than_5_ms_and_loads_nothing(python: Callable[..., str], cache: Path) -> None:
    code = """
        import sys, time
        from jitmx.toolchain import nvrtc
        taken = []
        for _ in range(5):
            nvrtc.identity.cache_clear()
            started = time.perf_counter()
            identity = nvrtc.identity()
            taken.append(time.perf_counter() - started)
        print(identity.digest, min(taken) * 1e3, "libnvrtc" in open("/proc/self/maps").read(), "cupy" in sys.modules)
    """
    digest, milliseconds, loaded, cupy = python(code).split()
    assert (digest, loaded, cupy) == (nvrtc.identity().digest, "False", "False")
    assert float(milliseconds) < 5


def test_mode_off_leaves_no_memo(python: Callable[..., str], tmp_path: Path) -> None:
    code = "from jitmx.toolchain import nvrtc; print(nvrtc.identity().digest)"
    assert python(code, JITMX_MODE="off", JITMX_CACHE_DIR=str(tmp_path / "none")) == nvrtc.identity().digest
    assert not (tmp_path / "none").exists()


_COMPILE = """
    import ctypes
    from jitmx import arch
    from jitmx.toolchain import nvrtc
    from jitmx.errors import ToolchainError
    {first}
    identity = nvrtc.identity()
    {then}
    options = nvrtc.options(arch.parse("sm_90a"))
    try:
        image = nvrtc.compile('extern "C" __global__ void k(int* a) {{ *a = 1; }}', options).image
        print(identity.path, len(image) > 0, identity.digest)
    except ToolchainError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of NVRTC outside of the wheel, as a second installation of CUDA would bring."""
    directory = tmp_path_factory.mktemp("cuda") / "lib"
    directory.mkdir()
    for file in library.files(nvrtc.identity().path):
        shutil.copy(file, directory)
    return directory / nvrtc.identity().path.name


def test_a_library_loaded_before_is_the_one_that_keys_tell_of(python: Callable[..., str], copied: Path) -> None:
    printed = python(_COMPILE.format(first=f"other = ctypes.CDLL({str(copied)!r})", then=""))
    assert printed == f"{copied} True {nvrtc.identity().digest}"


def test_a_second_library_in_the_process_is_an_error_and_no_wrong_key(python: Callable[..., str], copied: Path) -> None:
    printed = python(_COMPILE.format(first="", then=f"other = ctypes.CDLL({str(copied)!r})"))
    assert str(copied) in printed
    assert "under the digest of the other" in printed
    assert "import jitmx first" in printed


def test_a_second_library_that_comes_in_with_cupy_is_noticed_too(python: Callable[..., str], copied: Path) -> None:
    # What CuPy does just before it opens NVRTC stands in for CuPy opening another one.
    load = f"nvrtc.cupy_cache.ensure = lambda: globals().update(other=ctypes.CDLL({str(copied)!r}))"
    assert "under the digest of the other" in python(_COMPILE.format(first="", then=load))


def test_library_paths_in_the_environment_do_not_decide(python: Callable[..., str], copied: Path) -> None:
    root = copied.parent.parent
    env = {"LD_LIBRARY_PATH": str(copied.parent), "CUDA_PATH": str(root), "CUDA_HOME": str(root)}
    identity = nvrtc.identity()
    assert python(_COMPILE.format(first="", then=""), **env) == f"{identity.path} True {identity.digest}"
