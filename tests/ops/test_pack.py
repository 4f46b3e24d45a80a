"""Packing by the kernel is packing by torch, which is packing by the reference; into other memory, and into its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitmx
from jitmx import formats
from jitmx.kernels import pack as kernel
from jitmx.kernels.linear.layout import packed_tiles
from jitmx.ops import pack
from jitmx.ops.pack import in_place, into, room, scale_range, watch
from jitmx.ops.pack import reference as pack_torch
from simulated_card import Simulated, on_cpu
from strategies import examples

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Weights:
    """What is packed, and how.

    Attributes:
        low, high: its scales, the last of them excluded.
        apart: 16-byte vectors between rows of codes, and bytes between rows of scales, that belong to nothing.
    """

    experts: int
    n: int
    blocks: int
    format: str
    encoding: str
    halves: bool = False
    low: int = 0
    high: int = 256
    apart: int = 0
    seed: int = 0
    made: tuple[torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        per_block = 16 if self.format == "mxfp4" else 32

        def bytes_(low: int, high: int, width: int) -> torch.Tensor:
            shape = self.experts, self.n, width
            return torch.randint(low, high, shape, dtype=torch.uint8, generator=random)

        codes = bytes_(0, 256, self.blocks * per_block + 16 * self.apart)
        scales = bytes_(self.low, self.high, self.blocks + self.apart)
        codes, scales = codes[..., : self.blocks * per_block], scales[..., : self.blocks]
        of_zeros = torch.rand((self.experts, self.n, self.blocks, 1), generator=random) < 0.3
        zeros = 0x88 if self.format == "mxfp4" else 0x80  # of either sign
        codes[:] = torch.where(of_zeros, codes.unflatten(-1, (self.blocks, -1)) & zeros, codes.unflatten(
            -1, (self.blocks, -1))).flatten(-2)  # fmt: skip
        object.__setattr__(self, "made", (codes, scales))

    @property
    def k(self) -> int:
        return self.blocks * formats.BLOCK

    def by_torch(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        return pack_torch.pack(*self.made, self.format, self.encoding, halves=self.halves)


@st.composite
def weights(draw: st.DrawFn) -> Weights:
    """Ragged weights of both formats, whose scales are all folded in, or any."""
    format, encoding = draw(st.sampled_from([("mxfp4", "rotated"), ("mxfp4", "nibble"), ("mxfp8", "rotated")]))
    low, high = draw(st.sampled_from([(10, 129), (0, 256), (2, 11), (128, 136), (255, 256)]))
    n, halves = draw(st.integers(1, 40)), draw(st.booleans())
    n += n % 2 if halves else 0
    return Weights(
        draw(st.integers(1, 3)), n, draw(st.integers(1, 9)), format, encoding, halves, low, high,
        draw(st.integers(0, 3)), draw(st.integers(0, 99)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def card() -> Iterator[Simulated]:
    """Tensors in host memory are a simulated card's, and are packed by its kernel."""
    with on_cpu("sm_90a") as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_by_kernel", lambda codes: True)
        yield found


def same(found: tuple[torch.Tensor, torch.Tensor], seen: torch.Tensor, wanted: tuple[object, ...]) -> bool:
    words, scales, full = wanted
    return (
        torch.equal(found[0], words) and torch.equal(found[1], scales)  # type: ignore[arg-type]
        and scale_range(seen) == ("full" if full else "normal")
    )  # fmt: skip


@settings(deadline=None, max_examples=examples(40))
@given(weights())
def test_torch_packs_to_what_the_reference_does(given: Weights) -> None:
    codes, scales = (tensor.numpy() for tensor in given.made)
    codes = formats.unpack_nibbles(codes) if given.format == "mxfp4" else codes
    if given.halves:
        codes, scales = (np.stack(np.split(rows, 2, axis=1), axis=2).reshape(rows.shape) for rows in (codes, scales))
    words, packed, full = given.by_torch()
    wanted = [kernel.reference(*expert, given.format, given.encoding) for expert in zip(codes, scales, strict=True)]
    np.testing.assert_array_equal(words.numpy().view(np.uint32), [expert[0] for expert in wanted])
    np.testing.assert_array_equal(packed.numpy().view(np.uint32), [expert[1] for expert in wanted])
    assert full == any(expert[2] for expert in wanted)


@settings(deadline=None, max_examples=examples(30))
@given(weights())
def test_the_kernel_packs_to_the_bits_that_torch_does(card: Simulated, given: Weights) -> None:
    found, seen = room(given.experts, given.n, given.k, given.format, HOST), watch(HOST)
    card.launched.clear()
    into(*given.made, *found, seen, given.format, given.encoding, halves=given.halves)
    assert same(found, seen, given.by_torch()) and card.kernels == ["pack.pack"]


@settings(deadline=None, max_examples=examples(20))
@given(weights())
def test_the_kernel_packs_into_the_memory_that_weights_lie_in(card: Simulated, given: Weights) -> None:
    rows, tiles = packed_tiles(given.n, given.k)
    codes, scales = given.made
    per_block = codes.shape[2] // given.blocks
    # Memory for whole tiles, as make_room gives a shard; what is beyond the weight holds anything.
    whole = torch.randint(0, 256, (given.experts, rows * 16, tiles * 2 * per_block), dtype=torch.uint8)
    whole_scales = torch.randint(0, 256, (given.experts, rows * 16, tiles * 2), dtype=torch.uint8)
    lie = whole[:, : given.n, : codes.shape[2]], whole_scales[:, : given.n, : given.blocks]
    for place, tensor in zip(lie, (codes, scales), strict=True):
        place.copy_(tensor)
    shapes = [tensor.shape for tensor in room(given.experts, given.n, given.k, given.format, HOST)]
    found = tuple(memory.view(-1).view(torch.int32).view(shape)
                  for memory, shape in zip((whole, whole_scales), shapes, strict=True))  # fmt: skip
    one = given.experts == 1 or given.n == 1  # strides of such a dimension say nothing
    assert one or in_place(*lie, *found, given.format)
    seen = watch(HOST)
    into(*lie, *found, seen, given.format, given.encoding)
    wanted = pack_torch.pack(codes, scales, given.format, given.encoding)
    assert same(found, seen, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_rows_that_no_block_holds_are_packed_in_parts_and_by_way_of_a_copy(card: Simulated, format: str) -> None:
    given = Weights(1, 16, 2 * 220 if format == "mxfp8" else 2 * 430, format, "rotated", low=20, high=100)
    in_parts = kernel.geometry(format, 1, 16, given.k, whole=False)
    assert kernel.shared_bytes(format, given.k // 64) > 227 * 1024 > in_parts.shared_bytes and in_parts.blocks > 1
    words, scales = room(1, 16, given.k, format, HOST)
    seen = watch(HOST)
    into(*given.made, words, scales, seen, format, "rotated")
    assert same((words, scales), seen, given.by_torch())
    codes, own_scales = (tensor.clone() for tensor in given.made)
    found = codes.view(torch.int32).view(words.shape), own_scales.view(torch.int32).view(scales.shape)
    assert not in_place(codes, own_scales, *found, format)
    into(codes, own_scales, *found, seen, format, "rotated")
    assert same(found, seen, given.by_torch())


def test_in_its_own_memory_a_row_is_one_blocks_where_elsewhere_it_is_several(card: Simulated) -> None:
    given = Weights(1, 16, 2 * 70, "mxfp4", "rotated")
    assert kernel.geometry("mxfp4", 1, 16, given.k, whole=False).blocks == 2
    codes, scales = (tensor.clone() for tensor in given.made)
    words, packed = codes.view(torch.int32).view(1, 1, 70, 32, 4), scales.view(torch.int32).view(1, 1, 70, 8)
    assert in_place(codes, scales, words, packed, "mxfp4")
    seen = watch(HOST)
    into(codes, scales, words, packed, seen, "mxfp4", "rotated")
    assert same((words, packed), seen, given.by_torch())


def test_memory_that_weights_lie_in_otherwise_is_no_place_to_pack_them_at_once(card: Simulated) -> None:
    given = Weights(2, 20, 2, "mxfp4", "rotated")  # rows of 20 fill no tile: experts lie elsewhere when packed
    codes, scales = (torch.cat([tensor.flatten(), tensor.flatten()])[: tensor.numel()] for tensor in given.made)
    memory, scale_memory = torch.zeros(2 * 32 * 32, dtype=torch.uint8), torch.zeros(2 * 32 * 2, dtype=torch.uint8)
    memory[: codes.numel()], scale_memory[: scales.numel()] = codes, scales
    lie = memory[: codes.numel()].view(2, 20, 32), scale_memory[: scales.numel()].view(2, 20, 2)
    found = memory.view(torch.int32).view(2, 2, 1, 32, 4), scale_memory.view(torch.int32).view(2, 2, 1, 8)
    assert not in_place(*lie, *found, "mxfp4")
    seen = watch(HOST)
    into(*lie, *found, seen, "mxfp4", "rotated")
    assert same(found, seen, given.by_torch())


def test_in_host_memory_experts_that_lie_closer_than_packed_are_read_before_they_are_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pack, "_AT_ONCE", 1)  # an expert at a time
    given = Weights(3, 20, 2, "mxfp4", "rotated")
    memory, scale_memory = (torch.zeros(3 * 32 * size, dtype=torch.uint8) for size in (32, 2))
    for place, tensor in zip((memory, scale_memory), given.made, strict=True):
        place[: tensor.numel()] = tensor.flatten()
    lie = memory[: 3 * 20 * 32].view(3, 20, 32), scale_memory[: 3 * 20 * 2].view(3, 20, 2)
    found = memory.view(torch.int32).view(3, 2, 1, 32, 4), scale_memory.view(torch.int32).view(3, 2, 1, 8)
    seen = watch(HOST)
    into(*lie, *found, seen, "mxfp4", "rotated")
    assert same(found, seen, given.by_torch())


@pytest.mark.parametrize("start", [1, 4, 16])
def test_codes_and_scales_at_any_address_are_taken(card: Simulated, start: int) -> None:
    given = Weights(1, 18, 3, "mxfp4", "rotated")
    placed = []
    for tensor in given.made:
        memory = torch.zeros(start + tensor.numel(), dtype=torch.uint8)
        memory[start:] = tensor.flatten()
        placed.append(memory[start:].view(tensor.shape))
    found, seen = room(1, 18, 96, "mxfp4", HOST), watch(HOST)
    into(*placed, *found, seen, "mxfp4", "rotated")  # type: ignore[arg-type]
    assert same(found, seen, given.by_torch())


def test_a_weight_and_all_experts_of_a_layer_are_one_launch_each(card: Simulated) -> None:
    given = Weights(3, 40, 3, "mxfp4", "rotated", halves=True)
    words, scales, full = given.by_torch()
    card.launched.clear()
    experts = jitmx.pack_experts(given.made, rows="halves", encoding="rotated")
    assert torch.equal(experts.words, words) and torch.equal(experts.scales, scales) and full
    assert experts.scale_range == "full" and card.kernels == ["pack.pack"]
    codes, own = given.made[0][1], given.made[1][1]
    weight = jitmx.pack_weight((codes, own), encoding="nibble")
    assert card.kernels == ["pack.pack"] * 2 and card.launched[1].knobs.encoding == "nibble"
    wanted = pack_torch.pack(codes[None], own[None], "mxfp4", "nibble")
    assert torch.equal(weight.words, wanted[0][0]) and torch.equal(weight.scales, wanted[1][0])
