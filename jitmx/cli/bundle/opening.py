"""Which bundle a verb is about, whose signature it needs, and what is said of one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jitmx.cache import bundle, bundle_layer, files, keys
from jitmx.cache.bundle import Bundle
from jitmx.cli import output


def path_of(text: str) -> Path:
    """The file that a path, or the name of a bundle in an installed wheel, means."""
    path = Path(text)
    return path if files.exists(path) else dict(bundle_layer.installed()).get(text, path)


def trusted(places: tuple[Path, ...]) -> dict[bytes, Path] | None:
    """The public keys in these places, or else those of JITMX_BUNDLE_KEYS; None where no signature is required.

    Raises:
        SettingError: as `keys.public_keys`.
    """
    return keys.public_keys(places) if places else bundle_layer.trusted()


def opened(text: str, places: tuple[Path, ...]) -> Bundle:
    """The bundle that `text` means, signed as it must be; raises as `bundle.open_`, and for keys as `trusted`."""
    return bundle.open_(path_of(text), trusted=trusted(places))


def described(found: Bundle) -> dict[str, Any]:
    """What is said of a bundle, as JSON."""
    return {
        "file": found.name,
        "digest": found.digest,
        "made": found.made,
        "signed_by": [keys.fingerprint(key) for key in found.signers],
        "kernels": len(found.of("record")),
        "bytes": sum(member.size for member in found.members.values()),
    }


def signed(found: Bundle) -> str:
    """Who signed a bundle, in words."""
    if found.signers:
        return f"signed by {', '.join(map(keys.fingerprint, found.signers))}"
    return "signed, by whom takes cryptography to tell (pip install 'jitmx[sign]')" if found.signed else "not signed"


def made(values: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Where a bundle comes from, in words: a title and a text each."""
    compilers = values.get("nvrtc")
    known = [one for one in compilers if isinstance(one, dict)] if isinstance(compilers, list) else []
    if known:
        yield "compiler", ", ".join(f"NVRTC {one.get('release')} ({str(one.get('digest'))[:12]})" for one in known)
    yield "made by", f"jitmx {values.get('jitmx')}"
    if isinstance(arches := values.get("arches"), list):
        yield "targets", ", ".join(map(str, arches))
    asked = values.get("for")
    for name, value in asked.items() if isinstance(asked, dict) else ():
        yield name.replace("_", " "), _words(value)


def _words(value: Any) -> str:
    """A JSON value on a line, without the brackets and quotes of a program's text."""
    if isinstance(value, dict):
        return " ".join(f"{name}={_words(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ",".join(map(_words, value))
    return "none" if value is None else output.knob(value)
