"""What others reported against their caches: pickles that run code, lock files with holes, stale file handles."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import pickle
import re
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import jitmx
from clock import AGAIN, within
from jitmx.cache import layout
from jitmx.cache.manifest import Record
from jitmx.cache.store import Store

pytestmark = AGAIN

Make = Callable[..., tuple[Record, bytes, str]]
RUN_CODE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def test_no_module_of_jitmx_imports_what_could_run_code_from_a_file() -> None:
    found = set()
    for path in Path(jitmx.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    assert "json" in found and found & RUN_CODE == set()


class Payload:
    """Makes the directory `path` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("place", ["record", "object", "scan", "source"])
def test_a_pickle_planted_in_the_cache_is_a_miss_and_is_never_unpickled(
    store: Store, make: Make, tmp_path: Path, place: str, protocol: int
) -> None:
    record, image, source = make("a")
    store.publish(record, image, source)
    store.keep_scan(record.key, {"a.h": "b" * 64}, record.inputs["source_digest"])
    path = {
        "record": layout.action(store.root, record.key),
        "object": layout.object_(store.root, record.outputs["object"]),
        "scan": layout.scan(store.root, record.key),
        "source": layout.source(store.root, record.inputs["source_digest"]),
    }[place]
    assert path.is_file()
    planted = pickle.dumps(Payload(tmp_path / "ran"), protocol)
    path.write_bytes(planted)
    fresh = Store(store.root)
    found = {
        "record": fresh.lookup(record.key),
        "object": fresh.lookup(record.key),
        "scan": fresh.scan(record.key),
        "source": fresh.source(record.inputs["source_digest"]),
    }
    assert found[place] is None
    assert not (tmp_path / "ran").exists()
    pickle.loads(planted)
    assert (tmp_path / "ran").exists(), "the payload would have shown"


def test_the_filelock_here_and_the_oldest_allowed_have_no_known_hole() -> None:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (pinned,) = [text for text in project["dependencies"] if text.startswith("filelock")]
    oldest = numbers(pinned)
    # CVE-2025-68146 ended with 3.20.1, CVE-2026-22701 with 3.20.3.
    assert re.fullmatch(r"filelock>=[\d.]+", pinned) and oldest >= (3, 20, 3)
    assert numbers(metadata.version("filelock")) >= oldest


def stale(*_arguments: object, **_more: object) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("where", ["open", "flock"])
def test_a_stale_file_handle_is_a_miss_or_a_lock_not_had_and_passes(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    record, image, source = make("a")
    other, other_image, other_source = make("b")
    store.publish(record, image, source)
    really = os.open

    def open_stale(path: Any, *arguments: Any, **more: Any) -> int:
        return stale() if str(path).startswith(str(store.root)) else really(path, *arguments, **more)

    monkeypatch.setattr(*((os, "open", open_stale) if where == "open" else (fcntl, "flock", stale)))
    fresh = Store(store.root)
    with within(5), fresh.lock(other.key, 60) as held:
        assert not held
        assert (fresh.lookup(record.key) is None) == (where == "open")
        assert fresh.publish(other, other_image, other_source) == (where == "flock")
    assert fresh.lookup(other.key).image == other_image
    monkeypatch.undo()
    assert fresh.lookup(record.key).image == image
    assert fresh.publish(other, other_image, other_source)
    with fresh.lock(other.key, 1) as held:
        assert held
