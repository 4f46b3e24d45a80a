"""How the text of an environment variable is read: a ValueError says that it is none of its choices."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from jitmx import layers
from jitmx.errors import ArchError, SettingError
from jitmx.quoting import short

MOST_JOBS = 4096
_LONGEST_URL = 1024
_WORD = 64  # characters of a knob's name or value at most


class Unfit(ValueError):
    """A text that is none of the choices, with the reason in words.

    Attributes:
        shown: what of the text may be shown; None for all.
    """

    def __init__(self, why: str, shown: str | None = None) -> None:
        super().__init__(why)
        self.shown = shown


def whole(text: str, low: int, high: int) -> int:
    """A whole number within limits, both included.

    Raises:
        ValueError: any other text, whatever its length.
    """
    value = int(text)  # of some thousand digits Python makes no number: a ValueError too
    if not low <= value <= high:
        raise ValueError
    return value


def choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError
        return text.lower()

    return parse


def flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError


def jobs(text: str) -> int:
    return whole(text, 1, MOST_JOBS)


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e6:
        raise ValueError
    return value


def patience(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 600:
        raise ValueError
    return value


_URL = re.compile(r"[a-z][a-z0-9+.-]*(?:::[a-z][a-z0-9+.-]*)*://[^\s@]+")


def url(text: str) -> str:
    if "@" in text:
        why = "a URL is shown and logged: leave credentials to the configuration of fsspec's driver"
        raise Unfit(why, shown=f"…@{text.rpartition('@')[2]}")
    if not _URL.fullmatch(text) or not text.isprintable() or len(text) > _LONGEST_URL:
        raise ValueError
    return text


def log_level(text: str) -> int:
    return whole(text, 0, 5)


def flashinfer_log_level(text: str) -> int:
    """FlashInfer's highest is 10."""
    return 5 if text.strip() == "10" else log_level(text)


def arches(text: str) -> tuple[str, ...]:
    from jitmx import arch

    try:
        return tuple(arch.parse(word).name for word in _words(text))
    except ArchError as error:
        raise Unfit(str(error)) from error


def flashinfer_arches(text: str) -> tuple[str, ...]:
    """Those that jitmx has kernels for, of compute capabilities that FlashInfer may be built for."""
    from jitmx import arch

    def known(word: str) -> bool:
        with contextlib.suppress(ArchError):
            return bool(arch.parse(word))
        return re.fullmatch(r"\d+\.\d[af]?", word) is None

    return arches(" ".join(filter(known, _words(text))))


def _words(text: str) -> list[str]:
    return text.replace(",", " ").replace(";", " ").split()


def path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise Unfit(str(error)) from error


def paths(text: str) -> tuple[Path, ...]:
    return tuple(path(part) for part in text.split(os.pathsep) if part)


def knobs(text: str) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value) or max(len(name), len(value)) > _WORD:
            raise ValueError
        if name in pairs:
            raise Unfit(f"{short(name)} is given twice; give it once")
        pairs[name] = value
    return tuple(pairs.items())


_SIZE = r"([1-9][0-9]{0,8})"
_TILE = re.compile(f"{_SIZE}x{_SIZE}(?:x{_SIZE})?(?:s{_SIZE})?")


def tile_text(text: str) -> str:
    if not _TILE.fullmatch(text.strip().lower()):
        raise ValueError
    return text.strip().lower()


def tile_or_auto(text: str) -> str | None:
    return None if text.strip().lower() == "auto" else tile_text(text)


def tile(text: str) -> tuple[int, int, int | None, int | None]:
    """Rows of X, rows of W, columns and stages of a tile as JITMX_LINEAR_TILE and JITMX_MOE_TILE spell it."""
    found = _TILE.fullmatch(text)
    assert found is not None, text
    m, n, k, stages = (None if part is None else int(part) for part in found.groups())
    assert m is not None and n is not None
    return m, n, k, stages


def chosen_layers(text: str) -> tuple[tuple[str, str], ...]:
    return _layers(text, layers.FORMATS)


def chosen_draft_layers(text: str) -> tuple[tuple[str, str], ...]:
    return _layers(text, layers.DRAFT_FORMATS)


def _layers(text: str, formats: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, str], ...]:
    try:
        return tuple(layers.parse(text, formats).items())
    except SettingError as error:
        raise Unfit(str(error)) from error


def switch(text: str) -> bool | None:
    return None if text.lower() == "auto" else flag(text)
