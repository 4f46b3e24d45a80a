"""Who signed a bundle, and whose signatures are taken."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jitmx import settings
from jitmx.cache import archive, bundle, bundle_layer, importing, keys
from jitmx.cache.manifest import seal, unseal
from jitmx.cache.store import Store
from jitmx.errors import BundleError, SettingError, SignatureError

Pack = Callable[..., bytes]
Pair = Callable[[str], tuple[Any, Path]]


def signatures(data: bytes) -> list[dict[str, str]]:
    found = archive.Archive(archive.Memory(data))
    found.expect(bundle.of_bytes("test", data).members)
    assert found.signatures is not None
    listed: list[dict[str, str]] = unseal(found.signatures)["signatures"]
    return listed


def test_a_bundle_signed_by_a_trusted_key_is_taken(pack: Pack, keypair: Pair) -> None:
    key, public = keypair("own")
    found = bundle.of_bytes("test", pack("a", key=key), trusted=keys.public_keys([public]))
    assert [keys.fingerprint(signer) for signer in found.signers] == [keys.fingerprint(*keys.public_keys([public]))]


def test_a_bundle_signed_by_nobody_or_by_another_key_is_refused_and_nothing_is_written(
    tmp_path: Path, pack: Pack, keypair: Pair
) -> None:
    _, public = keypair("own")
    other, _ = keypair("other")
    trusted = keys.public_keys([public])
    for name, data, said in (("none", pack("a"), "by nobody"), ("other", pack("a", key=other), "only by ")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(SignatureError, match=f"{path} is refused: it is signed {said}"):
            importing.take_in(bundle.open_(path, trusted=trusted), Store(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_the_signature_of_another_bundle_is_refused(pack: Pack, keypair: Pair) -> None:
    key, public = keypair("own")
    theirs = pack("b", key=key)
    listed = bundle.of_bytes("test", pack("a"))
    taken = seal({"signatures": signatures(theirs)})
    members = [(name, listed._archive.read(name)) for name in listed.members]
    forged = archive.pack(listed._archive.manifest, members, taken)
    for trusted in (None, keys.public_keys([public])):
        with pytest.raises(BundleError, match="is not one of its list"):
            bundle.of_bytes("test", forged, trusted=trusted)


def test_a_signature_that_says_another_key_is_refused(pack: Pack, keypair: Pair) -> None:
    data = pack("a", key=keypair("own")[0])
    other = next(iter(keys.public_keys([keypair("other")[1]])))
    listed = bundle.of_bytes("test", data)
    members = [(name, listed._archive.read(name)) for name in listed.members]
    for change in (
        {"key": base64.b64encode(other).decode()},
        {"signature": base64.b64encode(bytes(64)).decode()},
        {"signature": "AAAA"},
        {"signature": signatures(data)[0]["signature"].rstrip("=")},
        {"key": 5},
    ):
        forged = seal({"signatures": [signatures(data)[0] | change]})
        with pytest.raises(BundleError):
            bundle.of_bytes("test", archive.pack(listed._archive.manifest, members, forged))
    for forged in (seal({"signatures": []}), seal({"signatures": signatures(data) * 2}), seal({}), b"{}", b"x" * 5):
        with pytest.raises(BundleError):
            bundle.of_bytes("test", archive.pack(listed._archive.manifest, members, forged))


def test_signing_again_changes_nothing_and_several_may_sign(pack: Pack, keypair: Pair) -> None:
    (one, first), (two, second) = keypair("one"), keypair("two")
    data = pack("a", key=one)
    assert bundle.of_bytes("test", pack("a")).signed_by(one) == data
    assert bundle.of_bytes("test", data).signed_by(one) == data
    both = bundle.of_bytes("test", data).signed_by(two)
    assert both == bundle.of_bytes("test", pack("a", key=two)).signed_by(one)
    for public in (first, second):
        assert len(bundle.of_bytes("test", both, trusted=keys.public_keys([public])).signers) == 2
    assert bundle.of_bytes("test", both).digest == bundle.of_bytes("test", pack("a")).digest


def test_openssl_agrees_with_a_signature_and_makes_keys_that_sign(tmp_path: Path, pack: Pack) -> None:
    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=tmp_path)

    openssl("genpkey", "-algorithm", "ed25519", "-out", "made.key")
    openssl("pkey", "-in", "made.key", "-pubout", "-out", "made.pub")
    (tmp_path / "made.key").chmod(0o600)
    data = pack("a", key=keys.private_key(tmp_path / "made.key"))
    bundle.of_bytes("test", data, trusted=keys.public_keys([tmp_path / "made.pub"]))
    manifest = archive.Archive(archive.Memory(data)).manifest
    (tmp_path / "signed").write_bytes(b"jitmx bundle 1\0" + hashlib.sha256(manifest).digest())
    (tmp_path / "signature").write_bytes(base64.b64decode(signatures(data)[0]["signature"]))
    openssl(
        "pkeyutl", "-verify", "-pubin", "-inkey", "made.pub", "-rawin", "-in", "signed", "-sigfile", "signature"
    )  # fmt: skip


def test_a_directory_of_keys_is_all_that_end_like_one(tmp_path: Path, keypair: Pair) -> None:
    (_, one), (_, two) = keypair("one"), keypair("two")
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "a.pem").write_bytes(one.read_bytes())
    (folder / "README").write_text("no key")
    # As orchestrators mount them.
    (folder / "..data").mkdir()
    (folder / "..data" / "b.pub").write_bytes(two.read_bytes())
    (folder / "b.pub").symlink_to("..data/b.pub")
    assert set(keys.public_keys([folder])) == set(keys.public_keys([one, two]))


def test_keys_that_cannot_be_relied_on_are_an_error_that_names_them(tmp_path: Path, keypair: Pair) -> None:
    _, public = keypair("own")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no key")
    (tmp_path / "shared.pub").write_bytes(public.read_bytes())
    (tmp_path / "shared.pub").chmod(0o666)
    subprocess.run(["openssl", "genrsa", "-out", tmp_path / "rsa.key"], check=True, capture_output=True)
    rsa = ["openssl", "rsa", "-in", tmp_path / "rsa.key", "-pubout", "-out", tmp_path / "rsa.pub"]
    subprocess.run(rsa, check=True, capture_output=True)
    for name, said in (
        ("absent", "^there is no public key"), ("empty", "no file that ends in .pem or .pub"),
        ("text", "holds no public key"), ("rsa.pub", "not one of Ed25519"),
        ("shared.pub", r"^the public key .* can be written by others \(mode 0666\); give it to yourself or root"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=said) as raised:
            keys.public_keys([public, tmp_path / name])
        assert str(tmp_path / name) in str(raised.value)
    private = public.with_name("own.key")
    private.chmod(0o640)
    with pytest.raises(SettingError, match="can be read by others"):
        keys.private_key(private)
    for path, said in (("rsa.key", "not one of Ed25519"), ("text", "holds no private key"), ("absent", "there is no")):
        (tmp_path / path).chmod(0o600) if path != "absent" else None
        with pytest.raises(SettingError, match=said):
            keys.private_key(tmp_path / path)


def test_a_required_signature_that_cannot_be_checked_is_no_signature(
    tmp_path: Path, pack: Pack, keypair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key, public = keypair("own")
    path = tmp_path / "made"
    path.write_bytes(pack("a", key=key))
    monkeypatch.setenv("JITMX_BUNDLE_KEYS", str(tmp_path / "absent"))
    settings.current.cache_clear()
    assert list(Store(tmp_path / "cache", layers=[path]).records()) == []
    assert "there is no public key" in caplog.text
    monkeypatch.setenv("JITMX_BUNDLE_KEYS", str(public))
    settings.current.cache_clear()
    assert len(list(Store(tmp_path / "cache", layers=[path]).records())) == 1
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives", None)
    assert list(Store(tmp_path / "cache", layers=[path]).records()) == []
    assert "pip install 'jitmx[sign]'" in caplog.text
    monkeypatch.delenv("JITMX_BUNDLE_KEYS")
    settings.current.cache_clear()
    assert bundle_layer.trusted() is None
    found = bundle.open_(path)
    assert found.signed and found.signers == [], "who signed it cannot be told"


@pytest.fixture(autouse=True)
def _settings() -> Any:
    yield
    settings.current.cache_clear()


def test_a_key_that_another_user_owns_is_refused(tmp_path: Path, keypair: Pair) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    _, public = keypair("own")
    os.chown(public, 12345, -1)
    with pytest.raises(SettingError, match="belongs to user id 12345"):
        keys.public_keys([public])
