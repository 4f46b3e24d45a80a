"""Bundles are served where they lie: beside a cache that cannot be written, and out of wheels that nobody imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from jitmx import settings
from jitmx.cache import bundle, bundle_layer, store
from jitmx.cache.manifest import Record, Scan
from jitmx.cache.store import Store
from jitmx.errors import CacheError

Make = Callable[..., tuple[Record, bytes, str]]
Pack = Callable[..., bytes]
OTHER = 12345


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    yield
    settings.current.cache_clear()
    store._stores.clear()


@pytest.fixture
def place(tmp_path: Path, pack: Pack, make: Make) -> Path:
    path = tmp_path / "made.jitmx"
    path.write_bytes(pack("a", "b", scans=(Scan("c" * 64, make("a")[0].inputs["source_digest"], {"x.h": "d" * 64}),)))
    return path


def test_a_bundle_is_a_site_cache(tmp_path: Path, place: Path, make: Make) -> None:
    record, image, source = make("a")
    cache = Store(tmp_path / "cache", layers=[place])
    entry = cache.lookup(record.key)
    assert entry is not None and (entry.image, entry.root) == (image, place)
    assert cache.holds(record.key) and not cache.keeps(record.key)
    assert cache.source(record.inputs["source_digest"]) == source
    assert cache.scan("c" * 64) == {"x.h": "d" * 64} and cache.scan("e" * 64) is None
    assert {one.key for one in cache.records()} == {make("a")[0].key, make("b")[0].key}
    assert cache.by_source(record.inputs["source_digest"], record.arch, record.inputs["options"], lambda _name: None)
    assert cache.source_path(record.key) is None
    cache.keep_source(source)
    assert not cache.root.exists(), "what the bundle has is not kept again"
    assert cache.layers == (place,)


def test_the_user_s_own_entries_come_first(tmp_path: Path, place: Path, make: Make) -> None:
    cache = Store(tmp_path / "cache", layers=[place])
    record, image, source = make("a", created=5.0)
    cache.publish(record, image, source)
    entry = cache.lookup(record.key)
    assert entry is not None and (entry.root, entry.record.created) == (cache.root, 5.0)


def test_a_read_only_cache_is_served_by_a_bundle_beside_it(
    tmp_path: Path, place: Path, make: Make, read_only: Callable[[Path, str], str]
) -> None:
    Store(tmp_path / "cache").publish(*make("own"))
    begin = read_only(tmp_path / "cache", "permissions")
    script = f"""{begin}
import sys
from pathlib import Path
from jitmx.cache.store import Store
cache = Store(Path(sys.argv[1]), layers=[Path(sys.argv[2])])
assert all(cache.lookup(key) for key in sys.argv[3:])
"""
    wanted = [make(text)[0].key for text in ("own", "a", "b")]
    subprocess.run([sys.executable, "-c", script, tmp_path / "cache", place, *wanted], check=True)


def test_damage_to_a_bundle_is_a_miss_with_one_warning(
    tmp_path: Path, place: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    record, image, _ = make("a")
    cache = Store(tmp_path / "cache", layers=[place])
    data = place.read_bytes()
    place.write_bytes(data.replace(image, image[:-1] + b"?"))
    assert cache.lookup(record.key) is None and cache.lookup(record.key) is None
    assert cache.lookup(make("b")[0].key) is not None, "the rest of it serves"
    place.write_bytes(b"")
    assert cache.lookup(make("b")[0].key) is None
    assert caplog.text.count("made.jitmx is refused") == 1
    place.write_bytes(data[:5000])
    assert Store(tmp_path / "cache", layers=[place]).lookup(record.key) is None
    assert "going on without the bundle" in caplog.text


def test_a_bundle_that_others_can_write_to_is_held_to_the_rule_of_site_caches(tmp_path: Path, place: Path) -> None:
    place.chmod(0o666)
    with pytest.raises(CacheError, match=r"made.jitmx can be written by others .mode 0666."):
        Store(tmp_path / "cache", layers=[place])
    assert len(list(Store(tmp_path / "cache", layers=[place], allow_shared=True).records())) == 2
    place.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(place, OTHER, -1)
        with pytest.raises(CacheError, match=f"made.jitmx belongs to user id {OTHER}"):
            Store(tmp_path / "cache", layers=[place])


def test_a_replaced_bundle_is_still_the_one_that_was_opened(
    tmp_path: Path, place: Path, make: Make, pack: Pack
) -> None:
    cache = Store(tmp_path / "cache", layers=[place])
    (tmp_path / "other").write_bytes(pack("z"))
    (tmp_path / "other").replace(place)
    assert cache.lookup(make("a")[0].key) is not None
    assert Store(tmp_path / "cache", layers=[place]).lookup(make("z")[0].key) is not None


def test_children_and_threads_read_one_bundle_at_once(tmp_path: Path, place: Path, make: Make) -> None:
    cache = Store(tmp_path / "cache", layers=[place])
    wanted = [make(text)[0].key for text in "ab"]
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os._exit(0 if all(cache.lookup(key) for _ in range(50) for key in wanted) else 1)
        children.append(child)
    assert all(cache.lookup(key) for _ in range(50) for key in wanted)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4


def wheel(site: Path, points: str, files: dict[str, bytes]) -> None:
    """A package in `site` as pip leaves it, whose import fails."""
    info = site / "acme_kernels-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{bundle_layer.GROUP}]\n{points}\n")
    for name, data in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    (site / "acme").mkdir(exist_ok=True)
    (site / "acme" / "__init__.py").write_text("raise RuntimeError('imported')")


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("JITMX_SITE_CACHE", "JITMX_BUNDLE_KEYS", "JITMX_MODE"):
        monkeypatch.delenv(name, raising=False)
    settings.current.cache_clear()
    store._stores.clear()
    return tmp_path / "site"


def test_a_bundle_in_a_wheel_is_found_and_the_wheel_is_not_imported(on_path: Path, pack: Pack, make: Make) -> None:
    wheel(on_path, "gpt-oss = acme.data", {"acme/data/gpt-oss.jitmx": pack("a")})
    assert list(bundle_layer.installed()) == [("acme-kernels:gpt-oss", on_path / "acme/data/gpt-oss.jitmx")]
    entry = store.current().lookup(make("a")[0].key)
    assert entry is not None and entry.image == make("a")[1]
    assert "acme" not in sys.modules


def test_a_bundle_in_a_wheel_needs_the_signature_that_all_do(
    on_path: Path,
    pack: Pack,
    make: Make,
    keypair: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wheel(on_path, "gpt = acme", {"acme/gpt.jitmx": pack("a")})
    _, public = keypair("own")
    monkeypatch.setenv("JITMX_BUNDLE_KEYS", str(public))
    settings.current.cache_clear()
    assert store.current().lookup(make("a")[0].key) is None
    assert "signed by nobody" in caplog.text


def test_a_wheel_cannot_point_elsewhere_and_a_bad_one_is_done_without(
    on_path: Path, pack: Pack, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    (on_path.parent / "above.jitmx").write_bytes(pack("z"))
    points = (
        "above = ..\n.. = acme\na/b = acme\nx = acme:attribute\nabsent = acme\nshared = acme\nbad = acme\ngood = acme"
    )
    files = {f"acme/{name}.jitmx": pack(name) for name in ("shared", "good")} | {"acme/bad.jitmx": b"bad"}
    wheel(on_path, points, files)
    (on_path / "acme" / "shared.jitmx").chmod(0o666)
    assert {name for name, _ in bundle_layer.installed()} == {
        f"acme-kernels:{n}" for n in ("absent", "shared", "bad", "good")
    }
    assert [record.key for record in store.current().records()] == [make("good")[0].key]
    assert all(f"acme/{name}.jitmx" in caplog.text for name in ("absent", "shared", "bad"))


def test_damaged_metadata_of_another_package_is_no_reason_to_stop(
    on_path: Path, pack: Pack, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    broken = on_path / "broken-1.dist-info"
    broken.mkdir(parents=True)
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (broken / "entry_points.txt").write_bytes(b"\xff\xfe[")
    assert list(bundle_layer.installed()) == [] and not caplog.text
    wheel(on_path, "gpt = acme", {"acme/gpt.jitmx": pack("a")})
    assert store.current().lookup(make("a")[0].key) is None
    assert "no bundle of a wheel is found" in caplog.text


def test_metadata_is_not_parsed_where_no_package_names_the_group(on_path: Path) -> None:
    wheel(on_path, "", {})
    (on_path / "acme_kernels-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\nacme = acme:main\n")
    script = "import sys; from jitmx.cache import store; store.current(); print(*sys.modules)"
    path = os.pathsep.join([str(on_path), *sys.path])
    said = subprocess.check_output([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, text=True)
    assert not {"importlib.metadata", "jitmx.cache.bundle"} & set(said.split())


@pytest.mark.parametrize("folder", ["acme_kernels-1.0.egg-info", "acme_kernels-1.0-py3.11.egg/EGG-INFO"])
def test_a_bundle_is_found_in_whatever_form_its_metadata_has(on_path: Path, folder: str, monkeypatch: Any) -> None:
    wheel(on_path, "gpt = acme", {})
    info = on_path / folder
    info.parent.mkdir(exist_ok=True)
    (on_path / "acme_kernels-1.0.dist-info").rename(info)
    (info / "METADATA").rename(info / "PKG-INFO")
    if info.parent != on_path:
        monkeypatch.syspath_prepend(info.parent)
    assert [name for name, _ in bundle_layer.installed()] == ["acme-kernels:gpt"]


def test_a_bundle_within_an_archive_is_none(on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(on_path, "gpt = acme", {})
    monkeypatch.syspath_prepend(shutil.make_archive(str(tmp_path / "acme"), "zip", on_path))
    (on_path / "acme_kernels-1.0.dist-info").rename(on_path / "other-1.0.dist-info")
    assert [place for _, place in bundle_layer.installed()] == [on_path / "acme/gpt.jitmx"]
    shutil.rmtree(on_path)
    assert list(bundle_layer.installed()) == []


def test_a_bundle_is_found_by_whatever_finds_packages(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(on_path, "gpt = acme", {})
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(on_path)])
    assert list(bundle_layer.installed()) == []

    class Finder(metadata.MetadataPathFinder):
        find_spec = None

        def find_distributions(self, _context: object) -> Any:
            return super().find_distributions(metadata.DistributionFinder.Context(path=[str(on_path)]))

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert [place for _, place in bundle_layer.installed()] == [on_path / "acme/gpt.jitmx"]


def test_opening_a_bundle_leaves_no_descriptor(place: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        bundle.open_(place)
        with pytest.raises(Exception, match="refused"):
            bundle.open_(place, trusted={b"0" * 32: Path("none")})
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
