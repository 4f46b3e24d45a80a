"""A bundle is the same bytes wherever it is made, and no other bytes are taken for it."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import hashlib
import io
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx.cache import archive, bundle, importing, layout
from jitmx.cache.bundle import Kernel
from jitmx.cache.manifest import Record, Scan, seal, unseal
from jitmx.cache.store import Store
from jitmx.cache.verify import verify
from jitmx.errors import BundleError

Make = Callable[..., tuple[Record, bytes, str]]
Pack = Callable[..., bytes]


def checked(data: bytes) -> bundle.Bundle:
    """A bundle, every byte of it checked."""
    found = bundle.of_bytes("test", data)
    found.check()
    return found


def refused(data: bytes) -> str:
    """Why these bytes are no bundle."""
    with pytest.raises(BundleError) as raised:
        checked(data)
    return str(raised.value)


def test_what_is_bundled_comes_out(make: Make, pack: Pack) -> None:
    scan = Scan("c" * 64, make("a")[0].inputs["source_digest"], {"cuda_fp8.h": "d" * 64})
    found = checked(pack("a", "b", scans=(scan,)))
    assert len(found.of("record")) == len(found.of("object")) == len(found.of("source")) == 2
    for text in ("a", "b"):
        record, image, source = make(text)
        kernel = found.kernel(record.key)
        assert (kernel.image, kernel.source) == (image, source)
        assert kernel.record == Kernel(record, image, source).undated("0.1.0").record
    assert found.scan("c" * 64) == scan
    assert found.made == {"jitmx": "0.1.0", "arches": ["sm_121a"]}
    assert not found.signed and found.signers == []


def test_the_order_date_and_speed_of_compiles_make_no_difference(make: Make) -> None:
    def made(*texts: str, created: float, compile_ms: float) -> bytes:
        entries = [make(text, created=created, outputs={"compile_ms": compile_ms}) for text in texts]
        return bundle.make([Kernel(*entry).undated("0.1.0") for entry in entries], [], {})

    assert made("a", "b", "c", created=1e9, compile_ms=1.0) == made("c", "a", "b", created=1.5e9, compile_ms=99.0)


SAME = """
import os, sys
os.umask(int(sys.argv[1], 8))
from pathlib import Path
from jitmx.cache import bundle
from jitmx.cache.bundle import Kernel
from jitmx.cache.store import Store
from jitmx.cli import output
store = Store(Path(sys.argv[2]))
entries = [store.lookup(key) for key in reversed([record.key for record in store.records()])]
kernels = [Kernel(e.record, e.image, store.source(e.record.inputs["source_digest"])).undated("1") for e in entries]
output.write(Path(sys.argv[3]), bundle.make(kernels, [], {"jitmx": "1"}))
"""


def test_two_caches_processes_umasks_locales_and_time_zones_make_the_same_bytes(tmp_path: Path, make: Make) -> None:
    made = []
    for number, (umask, variables) in enumerate([("022", {}), ("077", {"LC_ALL": "C", "TZ": "Asia/Tokyo"})]):
        store = Store(tmp_path / f"cache{number}")
        for text in ("ab", "ba")[number]:
            store.publish(*make(text, created=1e9 + number, outputs={"compile_ms": number + 1.0}))
        target = tmp_path / f"made{number}"
        done = [sys.executable, "-c", SAME, umask, store.root, target]
        subprocess.run(done, env=os.environ | {"PYTHONHASHSEED": str(number)} | variables, check=True)
        made.append(target.read_bytes())
        assert target.stat().st_mode & 0o777 == 0o666 & ~int(umask, 8)
    assert made[0] == made[1]


def test_the_form_is_that_of_every_release(pack: Pack) -> None:
    # A change of it makes other bundles of the same kernels, and refuses those that are out there.
    digest = "423560816667"
    assert hashlib.sha256(pack("a")).hexdigest()[:12] == digest


def test_tar_makes_a_cache_of_it(tmp_path: Path, make: Make, pack: Pack) -> None:
    (tmp_path / "made.jitmx").write_bytes(pack("a", "b"))
    (tmp_path / "site").mkdir(mode=0o755)
    subprocess.run(["tar", "-C", tmp_path / "site", "-xf", tmp_path / "made.jitmx"], check=True)
    store = Store(tmp_path / "cache", layers=[tmp_path / "site"])
    assert {entry.image for text in "ab" if (entry := store.lookup(make(text)[0].key))} == {make(t)[1] for t in "ab"}


def small(make: Make, key: Any = None) -> bytes:
    """A bundle as small as one is."""
    record, image, source = make("a", image=b"code", source="//", inputs={"headers": {}, "options": []})
    return bundle.make([Kernel(record, image, source).undated("1")], [], {}, key)


def test_every_flipped_bit_of_a_byte_is_refused(make: Make) -> None:
    data = bytearray(small(make))
    checked(bytes(data))
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        refused(bytes(data))
        data[at] ^= 1 << at % 8


def test_every_flipped_byte_of_a_signed_bundle_is_refused(make: Make, keypair: Callable[..., Any]) -> None:
    data = bytearray(small(make, keypair("own")[0]))
    assert checked(bytes(data)).signed
    for at in range(0, len(data), 1 if len(data) < 8000 else 2):
        data[at] ^= 0xFF
        refused(bytes(data))
        data[at] ^= 0xFF


def test_a_source_that_only_a_scan_names_is_checked_as_well(make: Make) -> None:
    _, _, source = make("a")
    scan = Scan("c" * 64, hashlib.sha256(source.encode()).hexdigest(), {})
    name = bundle.name_of("source", scan.source_digest)
    listed = {bundle.name_of("scan", scan.digest): scan.to_json(), name: source.encode()}
    about = {one: [len(data), hashlib.sha256(data).hexdigest()] for one, data in listed.items()}
    made = archive.pack(seal({"bundle": 1, "made": {}, "members": about}), list(listed.items()))
    checked(made)
    assert "do not match its list" in refused(made.replace(b"// a\n", b"// b\n"))


def test_a_bundle_that_ends_too_early_or_goes_on_is_refused(make: Make) -> None:
    data = small(make)
    for end in range(0, len(data), 97):
        refused(data[:end])
    for more in (b"x", bytes(1), bytes(512), bytes(10240), data):
        refused(data + more)


@given(st.data())
def test_whatever_is_spliced_into_a_bundle_is_refused(data: st.DataObject) -> None:
    whole = _SPLICED[0]
    at = data.draw(st.integers(0, len(whole)))
    taken = data.draw(st.sampled_from([0, 1, 512, 1024, 10240]))
    put = data.draw(st.one_of(st.binary(max_size=40), st.sampled_from([bytes(512), whole[:512], whole[512:1024]])))
    made = whole[:at] + put + whole[at + taken :]
    if made != whole:
        refused(made)


_SPLICED: list[bytes] = []


@pytest.fixture(autouse=True)
def _spliced(make: Make) -> None:
    _SPLICED[:] = [small(make)]


def entry(name: str, **members: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for member, value in members.items():
        setattr(info, member, value)
    return info


def members(data: bytes) -> list[tuple[str, bytes]]:
    """What a bundle lists, read by tarfile."""
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        named = [(one.name, opened.extractfile(one)) for one in opened.getmembers()[1:]]
        return [(name, stream.read()) for name, stream in named if stream]


def hostile(data: bytes, info: tarfile.TarInfo, contents: bytes = b"", *, listed: bool = True) -> bytes:
    """A bundle with one more member, in its place of the list, or behind all others and not in the list."""
    values = unseal(archive.Archive(archive.Memory(data)).manifest)
    within = [(entry(name, size=len(body)), body) for name, body in members(data)]
    within.append((info, contents))
    if listed:
        values["members"][info.name] = [len(contents), hashlib.sha256(contents).hexdigest()]
        values["members"] = dict(sorted(values["members"].items()))
        within.sort(key=lambda pair: pair[0].name)
    manifest = seal(values)
    parts = []
    for one, body in ((entry(archive.MANIFEST, size=len(manifest)), manifest), *within):
        parts += [one.tobuf(tarfile.USTAR_FORMAT), body, bytes(-len(body) % 512)]
    whole = b"".join(parts) + bytes(1024)
    return whole + bytes(-len(whole) % tarfile.RECORDSIZE)


OBJECT = f"v1/objects/ab/{'ab' * 32}.cubin"
LINKED = hashlib.sha256(b"").hexdigest()
NOTHING = f"v1/objects/{LINKED[:2]}/{LINKED}.cubin"
HOSTILE: dict[str, tarfile.TarInfo] = {
    "above": entry("../escaped", size=3),
    "above within": entry("v1/actions/../../../escaped", size=3),
    "above by an object": entry(f"v1/objects/../{LINKED}.cubin", size=3),
    "absolute": entry("/tmp/escaped", size=3),
    "home": entry("~/escaped", size=3),
    "nul": entry("v1/actions/a\0b", size=3),
    "symbolic link": entry(NOTHING, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": entry(NOTHING, type=tarfile.LNKTYPE, linkname=archive.MANIFEST),
    "character device": entry(NOTHING, type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "block device": entry(NOTHING, type=tarfile.BLKTYPE, devmajor=8, devminor=0),
    "fifo": entry(NOTHING, type=tarfile.FIFOTYPE),
    "directory": entry(NOTHING, type=tarfile.DIRTYPE),
    "set-uid": entry(NOTHING, mode=0o4755),
    "contiguous": entry(NOTHING, type=tarfile.CONTTYPE),
    "sparse": entry(NOTHING, type=tarfile.GNUTYPE_SPARSE, size=0),
    "another name": entry("notes.txt", size=3),
    "a lock": entry("v1/locks/abc.lock", size=3),
    "a toolchain": entry("toolchain.json", size=3),
}


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_member_is_refused_and_nothing_is_written(
    tmp_path: Path, pack: Pack, kind: str, listed: bool
) -> None:
    info = HOSTILE[kind]
    made = tmp_path / "made"
    made.mkdir()
    (made / "hostile").write_bytes(hostile(pack("a"), info, b"own" if info.size else b"", listed=listed))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BundleError):
        importing.take_in(bundle.open_(made / "hostile"), Store(tmp_path / "cache"))
    assert sorted(tmp_path.rglob("*")) == before and not Path("/tmp/escaped").exists()


def test_a_hostile_member_is_what_makes_the_difference(make: Make, pack: Pack) -> None:
    record, image, _source = make("b")
    scan = Scan("c" * 64, make("a")[0].inputs["source_digest"], {})
    plain = entry(bundle.name_of("scan", scan.digest), size=len(scan.to_json()))
    made = hostile(pack("a"), plain, scan.to_json())
    checked(made)
    assert made == pack("a", scans=(scan,))
    assert "points to its object" in refused(
        hostile(pack("a"), entry(bundle.name_of("object", record.outputs["object"]), size=len(image)), image)
    )


def test_a_member_that_is_there_twice_is_refused(pack: Pack) -> None:
    data = pack("a")
    names = [name for name in bundle.of_bytes("a", data).members if "objects" in name]
    twice = entry(names[0], size=len(dict(members(data))[names[0]]))
    assert "refused" in refused(hostile(data, twice, dict(members(data))[names[0]], listed=False))
    manifest = archive.Archive(archive.Memory(data)).manifest
    name = next(iter(bundle.of_bytes("a", data).members))
    doubled = manifest.replace(f'"{name}"'.encode(), f'"{name}": [1, "x"], "{name}"'.encode())
    head = doubled[: -len(b',\n "seal": "') - 64 - len(b'"\n}\n')]
    sealed = head + b',\n "seal": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'
    assert "not written as it is to be" in refused(archive.pack(sealed, members(data)))


def resealed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The bundle with another list, and the members as they were."""
    values = unseal(archive.Archive(archive.Memory(data)).manifest)
    within = members(data)
    change(values)
    return archive.pack(seal(values), within)


def test_a_list_that_tells_another_story_is_refused(pack: Pack) -> None:
    data = pack("a")
    name = next(iter(bundle.of_bytes("a", data).members))
    stories: list[Callable[[dict[str, Any]], Any]] = [
        lambda v: v["members"].pop(name),
        lambda v: v["members"].update({name: [1 << 33, "a" * 64]}),
        lambda v: v["members"].update({name: [-1, "a" * 64]}),
        lambda v: v["members"].update({name: [True, "a" * 64]}),
        lambda v: v["members"].update({name: [5, "a" * 64, 7]}),
        lambda v: v["members"].update({name: [5, "A" * 64]}),
        lambda v: v["members"].update({OBJECT: [5, "a" * 64]}),
        lambda v: v.update(members=[]),
        lambda v: v.update(made=[]),
        lambda v: v.update(made={"jitmx": "\x1b[31mred"}),
        lambda v: v.update(made={"a": {"b": [[[[[[[[1]]]]]]]]}}),
        lambda v: v.update(bundle=0),
        lambda v: v.update(bundle=True),
        lambda v: v.update(more=1),
        lambda v: v.pop("made"),
    ]
    for story in stories:
        refused(resealed(data, story))
    assert "upgrade jitmx" in refused(resealed(data, lambda v: v.update(bundle=2)))


def test_a_record_that_does_not_fit_its_bundle_is_refused(make: Make) -> None:
    record, image, source = make("a")

    def made(**changes: bytes) -> bytes:
        contents = {
            bundle.name_of("record", record.key): record.to_json(),
            bundle.name_of("object", record.outputs["object"]): image,
            bundle.name_of("source", record.inputs["source_digest"]): source.encode(),
        } | {bundle.name_of(*name.split("_")): data for name, data in changes.items()}
        within = sorted((name, data) for name, data in contents.items() if data)
        listed = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in within}
        return archive.pack(seal({"bundle": 1, "made": {}, "members": listed}), within)

    checked(made())
    assert "object of probe.scale.a is not in it" in refused(made(**{f"object_{record.outputs['object']}": b""}))
    assert "source of probe.scale.a is not in it" in refused(made(**{f"source_{record.inputs['source_digest']}": b""}))
    other = make("b")[0]
    assert "is damaged (it is the record of" in refused(made(**{f"record_{record.key}": other.to_json()}))
    assert "is damaged" in refused(made(**{f"record_{record.key}": b"{}"}))
    newer = seal(record.as_dict() | {"schema_version": 2})
    assert "newer jitmx" in refused(made(**{f"record_{record.key}": newer}))
    stray = hashlib.sha256(b"stray").hexdigest()
    for kind in ("object", "source"):
        assert f"points to its {kind}" in refused(made(**{f"{kind}_{stray}": b"stray"}))
    latin = dataclasses.replace(record, inputs={**record.inputs, "source_digest": hashlib.sha256(b"\xff").hexdigest()})
    binary = {f"source_{latin.inputs['source_digest']}": b"\xff", f"source_{record.inputs['source_digest']}": b""}
    assert "is no text" in refused(made(**binary, **{f"record_{record.key}": latin.to_json()}))


def test_ten_gigabytes_of_nothing_are_refused_at_once(tmp_path: Path, pack: Pack) -> None:
    for name, head in (("zeros", b""), ("grown", pack("a"))):
        path = tmp_path / name
        path.write_bytes(head)
        os.truncate(path, 10 << 30)
        with pytest.raises(BundleError):
            importing.take_in(bundle.open_(path), Store(tmp_path / "cache"))
    info = entry(archive.MANIFEST, size=10 << 30)
    large = info.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "large").write_bytes(large)
    os.truncate(tmp_path / "large", 10 << 30)
    with pytest.raises(BundleError):
        bundle.open_(tmp_path / "large")
    assert not (tmp_path / "cache").exists()


def test_compressed_data_is_never_unpacked(pack: Pack) -> None:
    data = pack("a")
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("manifest.json", bytes(64 << 20))
    for packed in (gzip.compress(data), bz2.compress(data), lzma.compress(data), zipped.getvalue()):
        assert "it is no bundle" in refused(packed)


def test_what_is_no_file_is_refused_and_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path, tmp_path / "fifo", tmp_path / "absent", Path("/dev/zero")):
        with pytest.raises(BundleError, match="cannot be read"):
            bundle.open_(place)


def test_a_bundle_taken_in_is_a_sound_cache(tmp_path: Path, make: Make, pack: Pack) -> None:
    (tmp_path / "made").write_bytes(pack("a", "b"))
    store = Store(tmp_path / "cache")
    done = importing.take_in(bundle.open_(tmp_path / "made"), store)
    assert len(done.added) == 2 and not done.kept
    assert verify(store, grace=-60).findings == ()
    assert layout.action(store.root, make("a")[0].key).stat().st_mode & 0o777 == 0o600
    again = importing.take_in(bundle.open_(tmp_path / "made"), store)
    assert not again.added and set(again.kept) == set(done.added)
