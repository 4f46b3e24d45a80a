"""Ed25519 keys that sign bundles, and the public keys that are trusted to.

Keys are PEM files (PKCS #8, SubjectPublicKeyInfo), as `openssl genpkey -algorithm ed25519` makes them. What is signed
is the SHA-256 of a bundle's list, which binds all else in it. Signatures are kept as a sealed JSON document that names
the public key of each, so that a damaged one shows also to those who trust no key.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitmx.cache import files
from jitmx.cache.manifest import seal, unseal
from jitmx.errors import BundleError, SettingError, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_CONTEXT = b"jitmx bundle 1\0"
_LARGEST = 64 << 10  # bytes of a file with a key
_MOST = 64  # signatures of a bundle
_SUFFIXES = (".pem", ".pub")
_ANOTHER = "name the file of one, or make a pair: jitmx bundle keygen NAME"
_INSTALL = "install it with: pip install 'jitmx[sign]'"


def fingerprint(key: bytes) -> str:
    """What people compare: the first half of the SHA-256 of a raw public key."""
    return hashlib.sha256(key).hexdigest()[:32]


def generate() -> tuple[bytes, bytes]:
    """A new private key and its public key, as PEM.

    Raises:
        SettingError: `cryptography` is not installed.
    """
    serialization, ed25519 = _library()
    private = ed25519.Ed25519PrivateKey.generate()
    kept = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return kept, shown


def private_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a file, which nobody else may read.

    Raises:
        SettingError: there is none, others can read it, or `cryptography` is not installed.
    """
    serialization, ed25519 = _library()
    data = _read(path, "private key", secret=True)
    try:
        found = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"{path} holds no private key that can be read without a password ({error})", _ANOTHER
        ) from None
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise SettingError(f"the private key in {path} is not one of Ed25519", _ANOTHER)
    key: Ed25519PrivateKey = found
    return key


def public_keys(places: Iterable[Path]) -> dict[bytes, Path]:
    """The raw public keys in files, and in the files of directories that end in .pem or .pub, with where each is.

    Raises:
        SettingError: a place that is not there or holds no public key, one that others can write, or `cryptography` is
            not installed.
    """
    serialization, ed25519 = _library()
    found: dict[bytes, Path] = {}
    for place in places:
        listed = _listed(place)
        if not listed:
            raise SettingError(
                f"{place} has no file that ends in {' or '.join(_SUFFIXES)}", "put the public keys there"
            )
        for path in listed:
            data = _read(path, "public key")
            try:
                key = serialization.load_pem_public_key(data)
            except ValueError as error:
                raise SettingError(f"{path} holds no public key ({error})", _ANOTHER) from None
            if not isinstance(key, ed25519.Ed25519PublicKey):
                raise SettingError(f"the public key in {path} is not one of Ed25519", _ANOTHER)
            raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
            found.setdefault(raw, path)
    return found


def sign(manifest: bytes, key: Ed25519PrivateKey, before: bytes | None = None) -> bytes:
    """The signatures of a list: those of before, and that of `key`.

    Raises:
        BundleError: those of before are damaged.
    """
    serialization, _ = _library()
    public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    signatures = (_parse(before) if before else {}) | {public: key.sign(_signed(manifest))}
    if len(signatures) > _MOST:
        raise BundleError(f"it has {_MOST} signatures already, and can have no more")
    listed = [
        {"key": base64.b64encode(name).decode(), "signature": base64.b64encode(signatures[name]).decode()}
        for name in sorted(signatures)
    ]
    return seal({"signatures": listed})


def signers(manifest: bytes, signatures: bytes | None) -> list[bytes]:
    """The raw public keys whose signatures of a list are right.

    Where `cryptography` is not installed no signature can be told to be right, and nobody has signed.

    Raises:
        BundleError: the signatures are damaged, or one of them is wrong.
    """
    if signatures is None:
        return []
    found = _parse(signatures)
    try:
        _, ed25519 = _library()
    except SettingError:
        return []
    from cryptography.exceptions import InvalidSignature

    for public, signature in found.items():
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed(manifest))
        except (InvalidSignature, ValueError):
            raise BundleError(f"the signature of key {fingerprint(public)} is not one of its list") from None
    return list(found)


def require(trusted: Mapping[bytes, Path], signed: Iterable[bytes]) -> None:
    """Check that one of the trusted keys is among those that signed.

    Raises:
        SignatureError: none is.
    """
    others = list(signed)
    if any(key in trusted for key in others):
        return
    listed = ", ".join(fingerprint(key) for key in trusted)
    by = f"only by {', '.join(map(fingerprint, others))}" if others else "by nobody"
    raise SignatureError(
        f"it is signed {by}, and must be by one of the trusted keys ({listed})",
        "have it signed (jitmx bundle sign), or add the key of who signed it to JITMX_BUNDLE_KEYS",
    )


def _signed(manifest: bytes) -> bytes:
    return _CONTEXT + hashlib.sha256(manifest).digest()


def _parse(data: bytes) -> dict[bytes, bytes]:
    try:
        values = unseal(data)
        listed = values["signatures"]
        found = {_raw(item["key"], 32): _raw(item["signature"], 64) for item in listed}
        written = [item["key"] for item in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"its signatures are damaged ({error})") from None
    if not 1 <= len(found) <= _MOST or written != [base64.b64encode(key).decode() for key in sorted(found)]:
        raise BundleError("its signatures are not in the order of their keys, or too many")
    if seal(values) != data:
        raise BundleError("its signatures are not written as they are to be")
    return found


def _raw(text: Any, length: int) -> bytes:
    data = base64.b64decode(text, validate=True)
    if len(data) != length or base64.b64encode(data).decode() != text:
        raise ValueError(f"{len(data)} bytes where {length} are to be")
    return data


def _listed(place: Path) -> list[Path]:
    if not files.is_directory(place):
        return [place]
    try:
        return sorted(path for path in place.iterdir() if path.suffix in _SUFFIXES)
    except OSError as error:
        raise SettingError(f"{place} cannot be looked into ({error.strerror})") from None


def _read(path: Path, what: str, *, secret: bool = False) -> bytes:
    try:
        # A link is fine, as in volumes that orchestrators mount: what it leads to is looked at.
        found = files.read(path, _LARGEST, follow=True)
    except OSError as error:
        raise SettingError(f"the {what} {path} cannot be read ({error.strerror})", _ANOTHER) from None
    if found is None:
        raise SettingError(f"there is no {what} at {path}", _ANOTHER)
    data, info = found
    if secret and info.st_mode & 0o077:
        raise SettingError(
            f"the {what} {path} can be read by others (mode {info.st_mode & 0o777:04o})", f"chmod go= {path}"
        )
    if fault := files.distrust(info):
        raise SettingError(f"the {what} {path} {fault}", "give it to yourself or root, writable by nobody else")
    return data


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SettingError(f"signatures need the package cryptography ({error})", _INSTALL) from None
    return serialization, ed25519
