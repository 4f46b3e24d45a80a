"""The layers of a served model, and of its draft, that jitmx can take, and how a choice is spelled: `moe,o:mxfp8`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from jitmx.errors import SettingError
from jitmx.quoting import short

KINDS = ("moe", "qkv", "o", "lm_head")
OF_BLOCK = KINDS[:3]  # what a transformer block is made of
# Formats that a layer's weights can be kept in; the first is meant where none is named.
FORMATS = {"moe": ("mxfp4",), **dict.fromkeys(KINDS[1:], ("mxfp4", "mxfp8"))}
# Those of a draft model, and likewise: a Llama layer that reads states of the target through fc.
DRAFT_KINDS = ("qkv", "o", "gate_up", "down", "fc", "lm_head")
DRAFT_FORMATS = dict.fromkeys(DRAFT_KINDS, ("mxfp4", "mxfp8"))


def parse(text: str, formats: Mapping[str, tuple[str, ...]] = FORMATS) -> dict[str, str]:
    """The format of each layer that is named; `all` names every one and `none` none.

    Args:
        formats: of each layer that there is, `FORMATS` or `DRAFT_FORMATS`.

    Raises:
        SettingError: an unknown name or format, or two formats for a layer.
    """
    if text.strip().lower() == "none":
        return {}
    found: dict[str, str] = {}
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        name, colon, format = (word.strip() for word in part.partition(":"))
        if name not in (*formats, "all"):
            close = difflib.get_close_matches(name, (*formats, "all"), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingError(f"{short(name)} is none of {', '.join(formats)}, all{hint}")
        for kind in formats if name == "all" else (name,):
            chosen = format if colon else formats[kind][0]
            if chosen not in formats[kind]:
                remedy = "; name the layers one by one" if name == "all" else ""
                raise SettingError(f"{kind} takes {' or '.join(formats[kind])}, not {short(chosen)}{remedy}")
            if found.setdefault(kind, chosen) != chosen:
                raise SettingError(f"{kind} is given as {found[kind]} and as {chosen}", "name it once")
    if not found:
        raise SettingError("no layer is named", "to leave all of them to vLLM say none")
    return found
