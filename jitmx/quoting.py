"""How text that jitmx did not write stands in what it says: names and paths from disk, values of options."""

from __future__ import annotations

_LONGEST = 160  # characters of a value that are shown whole
_BEGINNING = 24


def printable(text: str) -> str:
    """`text` with what a terminal would act on, or could not show, escaped; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )


def short(value: object) -> str:
    """`value` as Python writes it; of a long one the beginning, and how long it is."""
    if isinstance(value, int) and value.bit_length() > _LONGEST:
        # Python refuses to write out numbers of some thousand digits.
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[:_BEGINNING]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 2 * _LONGEST else f"{text[:_BEGINNING]}... ({len(text)} characters)"
