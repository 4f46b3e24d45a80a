"""Which entry a name or the start of a key means."""

from __future__ import annotations

import difflib

import click

from jitmx.arch import Arch
from jitmx.cache.manifest import Record
from jitmx.cache.store import Store

_SHOWN = 12


def short(key: str) -> str:
    """As much of a key as people read."""
    return key[:_SHOWN]


def select(store: Store, text: str, targets: tuple[Arch, ...]) -> Record:
    """The one entry that `text` names among those of `targets` (of all targets where there are none).

    A name means the latest of the entries that one variant has had.

    Raises:
        click.UsageError: no entry, or entries of several kernels; the message lists them.
    """
    names = {target.name for target in targets}
    everywhere = store.find(text)
    found = [record for record in everywhere if not names or record.arch in names]
    if not found:
        of = f" for {', '.join(sorted(names))}" if names else ""
        if everywhere:
            others = " and ".join(sorted({record.arch for record in everywhere}))
            raise click.UsageError(
                f"no entry has the name or key {text!r}{of}; there is one for {others}: name that by --arch"
            )
        close = difflib.get_close_matches(text, {record.name for record in store.records()}, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise click.UsageError(f"no entry has the name or key {text!r}{of}; {hint}`jitmx cache ls` lists all.")
    found.sort(key=lambda record: (record.name, record.arch, -record.created))
    by_name = not any(record.key.startswith(text) for record in found)
    if len({record.identity for record in found} if by_name else found) == 1:
        return found[0]
    listed = "\n".join(f"  {short(record.key)}  {record.name}  {record.arch}" for record in found[:_SHOWN])
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    how = "give one's key, or one --arch" if len({record.arch for record in found}) > 1 else "give one's key"
    raise click.UsageError(f"{text!r} names {len(found)} entries; {how}:\n{listed}{more}")
