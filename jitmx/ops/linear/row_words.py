"""What products in E4M3 are told of each row of a packed weight: the least of its scales, and its passes over k."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from jitmx.errors import InputError
from jitmx.formats import SCALE_ONE
from jitmx.kernels.fp8_rows import BINADES, ROW_RANGES
from jitmx.kernels.linear.layout import pairs_of
from jitmx.runtime import card
from jitmx.runtime.plan import Plans


class RowWords(NamedTuple):
    """Of a weight [experts, n, k], or [n, k], which counts as one expert.

    Attributes:
        words: int16 [experts, n], as jitmx.kernels.fp8_rows.row_words makes them.
        range: "narrow" where every row takes one pass, else "wide".
    """

    words: torch.Tensor
    range: str


def refreshed(old: RowWords, words: torch.Tensor, scales: torch.Tensor, n: int, encoding: str) -> RowWords:
    """What there is to be known of new weights in the same memory, where that of the old ones lies.

    Raises:
        InputError: rows need passes that kernels in use do not make.
    """
    new = row_words(words, scales, n, encoding)
    require_passes(old.range, new.range)
    old.words.copy_(new.words)
    return old


def require_passes(known: str, new: str) -> None:
    """Raise InputError where rows of a reloaded weight need passes that kernels in use do not make."""
    if (known, new) == ROW_RANGES:
        raise InputError(
            "a reloaded weight has rows whose scales are further apart than one pass over k takes, and kernels in use "
            "make one",
            "start a new engine on these weights",
        )


def row_words(words: torch.Tensor, scales: torch.Tensor, n: int, encoding: str) -> RowWords:
    """Look at a packed weight; waits for the device. Blocks of nothing but zeros do not count."""
    if words.dim() == 4:
        words, scales = words[None], scales[None]
    experts, tile_rows, tiles = words.shape[:3]
    found = torch.empty(experts, n, dtype=torch.int16, device=words.device)
    most = torch.ones((), dtype=torch.int32, device=words.device)
    for expert in range(experts):  # one at a time: of all of them there may be gigabytes
        # [tile rows, tiles, g, lanes of a quad, words]; words are of rows g, g + 8 of the first block, then the second.
        codes = words[expert].view(tile_rows, tiles, 8, 4, 4)
        there = (_magnitudes(codes, encoding) != 0).any(3)[..., [0, 2, 1, 3]].view(tile_rows, tiles, 8, 2, 2)
        bytes_ = scales[expert].view(torch.uint8).view(tile_rows, tiles, 8, 2, 2).int()  # row g or g + 8, block
        least = torch.where(there, bytes_, 255).amin((1, 4))
        passes = (torch.where(there, bytes_, 0).amax((1, 4)) - least).clamp(min=0) // BINADES + 1
        base = torch.where(there.any(1).any(-1), least, SCALE_ONE)
        most = torch.maximum(most, passes.amax())
        found[expert] = (base | passes << 8).transpose(1, 2).reshape(-1)[:n].short()
    return RowWords(found, ROW_RANGES[bool(most > 1)])


def _magnitudes(words: torch.Tensor, encoding: str) -> torch.Tensor:
    """Numbers that are 0 where all eight codes of a word are zeros."""
    if encoding == "nibble":
        return words & 0x77777777
    first, second, third, fourth = pairs_of(words.long() & 0xFFFFFFFF)
    return (first | second | third | fourth) & 0x01C001C0


# What was found, and of which memory.
Looked = tuple[RowWords, weakref.ref[torch.UntypedStorage]]


class PackedRows:
    """What packed words and scales know of their rows."""

    words: torch.Tensor
    scales: torch.Tensor
    n: int
    encoding: str
    _rows: list[RowWords]

    @property
    def row_words(self) -> RowWords:
        """What products in E4M3 are told of each row; the first time, it waits for the device."""
        if not self._rows:
            self._rows.append(row_words(self.words, self.scales, self.n, self.encoding))
        return self._rows[0]

    def refresh_rows(self) -> None:
        """See to it that `row_words` is of what the weight holds now, and stays where it is.

        Raises:
            InputError: rows need passes that kernels in use do not make.
        """
        if self._rows:
            refreshed(self._rows[0], self.words, self.scales, self.n, self.encoding)


class OperandRows:
    """What an operand, which has no tensors, knows of the rows of its weight."""

    n: int
    encoding: str
    plans: Plans
    _rows: list[Looked]

    def look_at(self, words: torch.Tensor, scales: torch.Tensor) -> None:
        """See to it that `row_words` is there, of these tensors and not of others that lay there before."""
        if self._rows and (self._rows[0][1]() is words.untyped_storage() or card.capturing()):
            return
        self.adopt(row_words(words, scales, self.n, self.encoding), words)

    def adopt(self, rows: RowWords, words: torch.Tensor) -> None:
        """Take what is known of the rows, of the packed weight that lies there: graphs hold its address."""
        if self._rows and self._rows[0][0].words is not rows.words:
            self.plans.clear()  # they hold that of others
        self._rows[:] = [(rows, weakref.ref(words.untyped_storage()))]

    @property
    def row_words(self) -> RowWords:
        """What products in E4M3 are told of each row."""
        return self._rows[0][0]
