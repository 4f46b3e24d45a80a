"""Packing experts keeps every value and its expert; what `jitmx.moe` cannot take is refused before anything runs."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitmx
from jitmx import formats
from jitmx.errors import InputError
from jitmx.kernels.moe import MoeProblem, layout
from jitmx.ops.moe.grouped import GroupedPlan
from strategies import examples


def random_experts(experts: int, n: int, k: int, low: int = 110, high: int = 126) -> jitmx.MXTensor:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=generator) | 0x10
    scales = torch.randint(low, high, (experts, n, k // 32), dtype=torch.uint8, generator=generator)
    return jitmx.MXTensor(codes, scales)


def values(weight: jitmx.MXTensor) -> tuple[np.ndarray, np.ndarray]:
    """One code a byte, and the scales."""
    return formats.unpack_nibbles(weight.codes.numpy()), weight.scales.numpy()


@settings(max_examples=examples(15), deadline=None)
@given(
    experts=st.integers(1, 4),
    n=st.integers(1, 40),
    blocks=st.integers(1, 5),
    encoding=st.sampled_from(["rotated", "nibble"]),
)
def test_packed_experts_are_those_of_the_layout(experts: int, n: int, blocks: int, encoding: str) -> None:
    weight = random_experts(experts, n, 32 * blocks)
    packed = jitmx.pack_experts(weight, encoding=encoding)
    words, scales = layout.pack_experts(*values(weight), encoding)
    np.testing.assert_array_equal(packed.words.numpy().view(np.uint32), words)
    np.testing.assert_array_equal(packed.scales.numpy().view(np.uint32), scales)
    assert packed.shape == (experts, n, 32 * blocks) and packed.encoding == encoding
    assert packed.nbytes == words.nbytes + scales.nbytes


def test_packing_in_groups_of_experts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_experts(5, 16, 64)
    whole = jitmx.pack_experts(weight)
    monkeypatch.setattr("jitmx.ops.pack._AT_ONCE", 2 * 16 * 32)
    parts = jitmx.pack_experts(weight)
    assert torch.equal(whole.words, parts.words) and torch.equal(whole.scales, parts.scales)


def test_gates_and_ups_in_halves_are_put_in_turn() -> None:
    weight = random_experts(2, 32, 64)
    codes, scales = (layout.interleave(part) for part in values(weight))
    words, packed_scales = layout.pack_experts(codes, scales, "rotated")
    packed = jitmx.pack_experts(weight, rows="halves")
    np.testing.assert_array_equal(packed.words.numpy().view(np.uint32), words)
    np.testing.assert_array_equal(packed.scales.numpy().view(np.uint32), packed_scales)


def test_the_blocks_of_hugging_face_are_taken_as_they_are() -> None:
    weight = random_experts(2, 32, 96)
    blocks = weight.codes.view(2, 32, 3, 16)
    assert torch.equal(jitmx.pack_experts((blocks, weight.scales)).words, jitmx.pack_experts(weight).words)


@pytest.mark.parametrize(("low", "high", "kind"), [(2, 129, "normal"), (0, 140, "full")])
def test_a_scale_out_of_range_in_any_expert_marks_them_all(low: int, high: int, kind: str) -> None:
    weight = random_experts(3, 16, 64)
    weight.scales[1, 3, 0] = low
    weight.scales[2, 0, 1] = high - 1
    assert jitmx.pack_experts(weight).scale_range == kind


def test_copies_of_packed_experts_have_no_plans_of_the_original() -> None:
    packed = jitmx.pack_experts(random_experts(2, 16, 64))
    packed.plans["a"] = 1
    for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(again.words, packed.words) and not again.plans


@pytest.mark.parametrize(
    ("weight", "arguments", "said"),
    [
        (random_experts(2, 16, 64), {"rows": "thirds"}, "rows='thirds' is not one of as_is, halves"),
        (random_experts(2, 15, 64), {"rows": "halves"}, "n must be even"),
        (random_experts(2, 16, 64), {"encoding": "plain"}, "encoding='plain'"),
        (torch.zeros(2, 16, 32), {}, "weight is a Tensor; pass an MXTensor"),
        (jitmx.MXTensor(torch.zeros(16, 32, dtype=torch.uint8), torch.zeros(16, 2, dtype=torch.uint8)), {},
         r"shape \[16, 64\]; experts' weights are \[experts, n, k\]"),
        (jitmx.MXTensor(torch.zeros(2, 16, 64, dtype=torch.uint8), torch.zeros(2, 16, 2, dtype=torch.uint8), "mxfp8"),
         {}, "weight is mxfp8; moe kernels take mxfp4"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(weight: object, arguments: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        jitmx.pack_experts(weight, **arguments)  # type: ignore[arg-type]


def test_tensors_that_are_not_on_a_gpu_are_refused() -> None:
    w13, w2 = (jitmx.pack_experts(random_experts(2, n, k)) for n, k in ((128, 32), (32, 64)))
    x = torch.zeros(1, 32).bfloat16()
    with pytest.raises(InputError, match="jitmx runs on CUDA tensors"):
        jitmx.moe(x, (torch.zeros(1, 1).int(), torch.ones(1, 1)), w13, w2)


def test_weights_that_were_not_packed_are_refused() -> None:
    x = torch.zeros(1, 32).bfloat16()
    with pytest.raises(InputError, match=r"w13 is a MXTensor; pack it once with jitmx\.pack_experts"):
        jitmx.moe(x, (torch.zeros(1, 1).int(), torch.ones(1, 1)), random_experts(2, 128, 32), None)  # type: ignore[arg-type]


def test_rows_beyond_what_an_offset_of_32_bits_reaches_are_refused_with_how_many_may_be() -> None:
    with pytest.raises(InputError, match=r"x has 745655 rows of 2880, over 4 GiB; .* parts of at most 745654 rows"):
        GroupedPlan(MoeProblem(745_655), {}, 0)
    with pytest.raises(KeyError):  # as many as may be get as far as their launches
        GroupedPlan(MoeProblem(745_654), {}, 0)
