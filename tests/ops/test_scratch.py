"""Whose scratch memory is whose, and what of it a CUDA graph has to zero; by a stand-in for a card."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from jitmx.runtime import driver, scratch

KIND = ("kernel",)


class Card:
    """Host memory as that of a card, and how often some was zeroed on the card."""

    def __init__(self) -> None:
        self.capture, self.zeroed = 0, list[int]()

    def take(self, size: int, kind: tuple[str, ...] = KIND, stream: int = 7) -> torch.Tensor:
        return scratch.memory(size, kind, 0, stream)

    def zero(self, size: int, device: int) -> torch.Tensor:
        assert device == 0
        self.zeroed.append(size)
        return torch.zeros(size, dtype=torch.uint8)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """One without any scratch memory yet."""
    made = Card()
    for name in ("_of_streams", "_of_captures", "_pieces"):
        monkeypatch.setattr(scratch, name, {})
    monkeypatch.setattr(scratch, "_zeroed", made.zero)
    monkeypatch.setattr(driver, "capture_number", lambda stream: made.capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capture > 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return made


def places(*found: torch.Tensor) -> list[range]:
    return [range(one.data_ptr(), one.data_ptr() + one.numel()) for one in found]


def test_a_graph_zeroes_nothing_small_once_something_has_run(card: Card) -> None:
    card.take(4096)
    card.zeroed.clear()
    for card.capture in (1, 2):
        for size in (1, 16, 300, 16 << 10):
            piece = card.take(size, ("a kernel with", str(size)))
            assert piece.numel() == size and piece.data_ptr() % 256 == card.take(1, ("other",)).data_ptr() % 256
    assert not card.zeroed
    big = card.take((16 << 10) + 1)
    assert card.zeroed == [big.numel()]


def test_a_graph_zeroes_all_of_its_own_where_nothing_has_run_before(card: Card) -> None:
    card.capture = 1
    card.take(16)
    assert card.zeroed == [16]


def test_no_two_graphs_streams_or_kinds_share_a_byte(card: Card) -> None:
    found = [card.take(100, kind, stream) for kind in (KIND, ("other",)) for stream in (7, 8)]
    for card.capture in (1, 2, 3):
        found += [card.take(100, kind) for kind in (KIND, ("other",))]
    ranges = sorted(places(*found), key=lambda place: place.start)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(ranges))


def test_launches_of_a_kind_share_it_within_a_graph(card: Card) -> None:
    card.take(64)
    card.capture = 1
    assert card.take(64).data_ptr() == card.take(64).data_ptr()


def test_graphs_zero_their_own_once_all_pieces_are_given_away(card: Card) -> None:
    card.take(64)
    card.zeroed.clear()
    for card.capture in range(1, 67):
        card.take(16 << 10)
    assert card.zeroed == [16 << 10] * 2  # 64 of 16 KiB are a MiB
