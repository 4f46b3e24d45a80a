"""A bundle: kernels of a cache in one file, with a list that binds every byte of it and says where it comes from.

Below `v1/` it has the layout of a cache (`layout`), so that unpacking it by `tar` makes one; before that lies the list,
behind it the signatures. Nothing in it tells of the time, the machine or the user: what was made from the same inputs
is the same file. Records therefore have no date, and no time that compiling took.
"""

from __future__ import annotations

import hashlib
import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jitmx.cache import archive, files, keys, layout
from jitmx.cache.archive import Archive, Descriptor, Member, Memory, Source
from jitmx.cache.manifest import HEX64, NewerSchemaError, Record, Scan, check_values, seal, unseal
from jitmx.errors import BundleError, CacheError

SUFFIX = ".jitmx"
_SCHEMA = 1
_MOST_MEMBERS = 1 << 17
_FORMS = {
    "record": re.compile(rf"{layout.VERSION}/actions/([0-9a-f]{{64}})\.json"),
    "object": re.compile(rf"{layout.VERSION}/objects/[0-9a-f]{{2}}/([0-9a-f]{{64}})\.cubin"),
    "scan": re.compile(rf"{layout.VERSION}/scans/([0-9a-f]{{64}})\.json"),
    "source": re.compile(rf"{layout.VERSION}/sources/([0-9a-f]{{64}})\.cu"),
}
_NOWHERE = Path()
_AGAIN = "copy it again from where it is sound, or make it again: jitmx bundle create"


def name_of(kind: str, digest: str) -> str:
    """Where a record, object, scan or source lies in the archive."""
    place = {"record": layout.action, "object": layout.object_, "scan": layout.scan, "source": layout.source}[kind]
    return str(place(_NOWHERE, digest))


@dataclass(frozen=True)
class Kernel:
    """An entry of a cache, whole: its record, machine code and rendered source."""

    record: Record
    image: bytes
    source: str

    def undated(self, release: str) -> Kernel:
        """As any machine makes it with this release of jitmx, at any time."""
        outputs = {**self.record.outputs, "compile_ms": 0.0}
        record = replace(self.record, created=0.0, jitmx=release, outputs=outputs)  # type: ignore[arg-type]
        return replace(self, record=record)


def make(kernels: list[Kernel], scans: list[Scan], made: Mapping[str, Any], key: Any = None) -> bytes:
    """A bundle of these.

    Args:
        made: where they come from, as JSON.
        key: a private key (`keys.private_key`) that signs it, or None.
    """
    contents: dict[str, bytes] = {}
    for kernel in kernels:
        record = kernel.record
        contents[name_of("record", record.key)] = record.to_json()
        contents[name_of("object", record.outputs["object"])] = kernel.image
        contents[name_of("source", record.inputs["source_digest"])] = kernel.source.encode()
    for scan in scans:
        contents[name_of("scan", scan.digest)] = scan.to_json()
    members = sorted(contents.items())
    listed = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in members}
    manifest = seal({"bundle": _SCHEMA, "made": dict(made), "members": listed})
    return archive.pack(manifest, members, keys.sign(manifest, key) if key else None)


class Bundle:
    """A bundle, whose list and signatures are sound; what it lists is checked as it is read.

    Args:
        remedy: what to do about one that is damaged.

    Attributes:
        name: of the file, or of where its bytes are from.
        made: where it comes from: members as `make` was given them.
        members: size and SHA-256 of each file in it, by its name.
        signers: raw public keys whose signatures are right; empty where `cryptography` is not installed.

    Raises:
        BundleError: it is none, or damaged.
        SignatureError: none of the keys that are trusted has signed it.
    """

    def __init__(
        self, name: str, source: Source, *, trusted: Mapping[bytes, Path] | None = None, remedy: str = ""
    ) -> None:
        self.name = name
        self._remedy = remedy
        try:
            self._archive = Archive(source)
            self.made, self.members = _listed(self._archive.manifest)
            self._archive.expect(self.members)
            self.signers = keys.signers(self._archive.manifest, self._archive.signatures)
            if trusted is not None:
                keys.require(trusted, self.signers)
        except BundleError as error:
            raise type(error)(f"the bundle {name} is refused: {error.message}", error.remedy or remedy) from None
        self.signed = self._archive.signatures is not None

    @property
    def digest(self) -> str:
        """SHA-256 of its list, and so of all that it holds but the signatures."""
        return hashlib.sha256(self._archive.manifest).hexdigest()

    def of(self, kind: str) -> list[str]:
        """Digests by which its members of a kind (record, object, scan or source) are named, in order."""
        return [match[1] for match in map(_FORMS[kind].fullmatch, self.members) if match]

    def has(self, kind: str, digest: str) -> bool:
        """Whether it lists such a member."""
        return HEX64.fullmatch(digest) is not None and name_of(kind, digest) in self.members

    def record(self, key: str) -> Record:
        """A record that it lists.

        Raises:
            BundleError: it is damaged, or of a newer jitmx.
        """
        try:
            return Record.of(key, self._read("record", key))
        except NewerSchemaError as error:
            raise self._refusal(f"its record {key[:12]} is of a newer jitmx ({error})", "install that") from None
        except ValueError as error:
            raise self._refusal(f"its record {key[:12]} is damaged ({error})") from None

    def scan(self, digest: str) -> Scan:
        """A scan that it lists; raises as `record`."""
        try:
            return Scan.of(digest, self._read("scan", digest))
        except ValueError as error:
            raise self._refusal(f"its scan {digest[:12]} is damaged ({error})") from None

    def image(self, record: Record) -> bytes:
        """Machine code of a record that it lists; raises as `record`."""
        image = self.object_(record.outputs["object"])
        if len(image) != record.outputs["size"]:
            raise self._refusal(f"the machine code of {record.name} has not the size of its record")
        return image

    def source(self, digest: str) -> str:
        """A source that it lists; raises as `record`."""
        try:
            return self._read("source", digest).decode()
        except UnicodeDecodeError:
            raise self._refusal(f"its source {digest[:12]} is no text") from None

    def object_(self, digest: str) -> bytes:
        """Machine code that it lists; raises as `record`."""
        return self._read("object", digest)

    def kernel(self, key: str) -> Kernel:
        """An entry; raises as `record`, and where its code or source is missing."""
        record = self.record(key)
        for kind, digest in (("object", record.outputs["object"]), ("source", record.inputs["source_digest"])):
            if not self.has(kind, digest):
                raise self._refusal(f"the {kind} of {record.name} is not in it")
        return Kernel(record, self.image(record), self.source(record.inputs["source_digest"]))

    def check(self) -> None:
        """Check every byte of it, and that nothing in it is of no use.

        Raises:
            BundleError: as it says.
        """
        needed: set[str] = set()
        for key in self.of("record"):
            needed |= self.kernel(key).record.parts
        scanned = {self.scan(digest).source_digest for digest in self.of("scan")} - needed
        for digest in scanned & set(self.of("source")):
            self.source(digest)
        needed |= scanned
        for kind in ("object", "source"):
            for digest in self.of(kind):
                if digest not in needed:
                    raise self._refusal(f"no record in it points to its {kind} {digest[:12]}")

    def signed_by(self, key: Any) -> bytes:
        """The whole bundle with the signature of a private key; raises as `check`."""
        self.check()
        signatures = keys.sign(self._archive.manifest, key, self._archive.signatures)
        return archive.pack(
            self._archive.manifest, [(name, self._archive.read(name)) for name in self.members], signatures
        )

    def _read(self, kind: str, digest: str) -> bytes:
        try:
            return self._archive.read(name_of(kind, digest))
        except BundleError as error:
            raise self._refusal(error.message) from None

    def _refusal(self, what: str, remedy: str = "") -> BundleError:
        return BundleError(f"the bundle {self.name} is refused: {what}", remedy or self._remedy)


def open_(path: Path, *, trusted: Mapping[bytes, Path] | None = None, own: bool = False) -> Bundle:
    """The bundle in a file, which stays open for as long as the bundle is used.

    Args:
        trusted: raw public keys, one of which must have signed it; None takes it as it is.
        own: refuse a file that other users own or can write to.

    Raises:
        BundleError, SignatureError: as for `Bundle`; there is no such file.
        CacheError: others own it or can write to it while `own`.
    """
    try:
        with files.opened(path, 1 << 50, follow=True) as (descriptor, info):
            if own and (fault := files.distrust(info)):
                raise CacheError(
                    f"{path} {fault}, and code that somebody else put there would run as user id {os.geteuid()}",
                    f"chmod go-w {path} if nobody else ever wrote to it, or set JITMX_ALLOW_SHARED_CACHE=1 if you "
                    "trust everyone who can",
                )
            kept = os.dup(descriptor)
    except OSError as error:
        remedy = "name a file that is there and that you may read; `jitmx bundle list` has those of wheels"
        raise BundleError(f"the bundle {path} cannot be read ({error.strerror})", remedy) from None
    try:
        bundle = Bundle(str(path), Descriptor(kept, info.st_size), trusted=trusted, remedy=_AGAIN)
    except BaseException:
        os.close(kept)
        raise
    weakref.finalize(bundle, os.close, kept)
    return bundle


def of_bytes(name: str, data: bytes, *, trusted: Mapping[bytes, Path] | None = None) -> Bundle:
    """The bundle that `data` is; raises as `Bundle`."""
    return Bundle(name, Memory(data), trusted=trusted)


def _listed(data: bytes) -> tuple[dict[str, Any], dict[str, Member]]:
    """What a list says: where the bundle comes from, and its members."""
    try:
        values = unseal(data)
        schema, made, members = values["bundle"], values["made"], values["members"]
        if isinstance(schema, int) and schema > _SCHEMA:
            raise BundleError(f"it is of a newer form ({schema}) than this jitmx knows ({_SCHEMA})", "upgrade jitmx")
        if schema != _SCHEMA or isinstance(schema, bool) or values.keys() != {"bundle", "made", "members"}:
            raise ValueError("members missing or unknown")
        check_values(made)
        if not isinstance(made, dict) or not isinstance(members, dict) or len(members) > _MOST_MEMBERS:
            raise ValueError("made and members are no objects, or too large")
        found = {name: _member(name, about) for name, about in members.items()}
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"its list is damaged ({error})") from None
    if list(found) != sorted(found) or seal(values) != data:
        raise BundleError("its list is not written as it is to be")
    return made, found


def _member(name: str, about: Any) -> Member:
    kind, match = next(((kind, match) for kind, form in _FORMS.items() if (match := form.fullmatch(name))), ("", None))
    if match is None or name != name_of(kind, match[1]):
        raise ValueError(f"{name[:80]!a} is the name of nothing that a bundle holds")
    size, digest = about
    if type(size) is not int or not 0 <= size <= layout.LIMITS[kind]:
        raise ValueError(f"{name} has a size that no {kind} has")
    if not isinstance(digest, str) or not HEX64.fullmatch(digest):
        raise ValueError(f"{name} has no SHA-256")
    if kind in ("object", "source") and digest != match[1]:
        raise ValueError(f"{name} is not named by its SHA-256")
    return Member(size, digest)
