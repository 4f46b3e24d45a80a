"""Packing a weight keeps every value and puts it where docs/packed-layout.md says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitmx
from jitmx.errors import InputError
from jitmx.kernels.linear.layout import packed_tiles
from jitmx.kernels.linear.mxfp8 import pack_mxfp8
from strategies import examples


def unpack(weight: jitmx.PackedWeight) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, k] and scales [rows, k / 32] of a packed weight, padding included, read off the drawing."""
    tile_rows, tiles_k = packed_tiles(weight.n, weight.k)
    words = (
        weight.words.numpy().view(np.uint32).reshape(tile_rows, tiles_k, 8, 4, 2, 2)
    )  # g, t, block, half of the rows
    codes = np.zeros((tile_rows, 2, 8, tiles_k, 2, 4, 8), np.uint8)  # tile row, half, g, tile, block, t, k
    wide = words.astype(np.uint64)
    # Of each pair a word that has its magnitude and its sign at these bits of each half.
    if weight.encoding == "nibble":
        places = [(wide, 4 * pair, 4 * pair + 3) for pair in range(4)]
    else:
        rotated = [wide << rotation | wide >> 32 - rotation for rotation in (4, 10, 14)]
        places = [(word, 6, 15) for word in (wide ^ wide << 8, *rotated)]
    for pair, (word, magnitude, sign) in enumerate(places):
        for odd in (0, 1):
            half = word >> 16 * odd
            code = half >> magnitude & 7 | (half >> sign & 1) << 3
            codes[..., 2 * pair + odd] = code.transpose(0, 5, 2, 1, 4, 3)
    scales = weight.scales.numpy().view(np.uint8).reshape(tile_rows, tiles_k, 8, 2, 2)  # g, half of the rows, block
    return (
        codes.reshape(tile_rows * 16, tiles_k * 64),
        scales.transpose(0, 3, 2, 1, 4).reshape(tile_rows * 16, tiles_k * 2),
    )


def random_weight(n: int, k: int, seed: int = 0, low: int = 1, high: int = 255) -> jitmx.MXTensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    return jitmx.MXTensor(codes, torch.randint(low, high, (n, k // 32), dtype=torch.uint8, generator=generator))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@settings(deadline=None, max_examples=examples(25))
@given(
    n=st.integers(1, 50),
    blocks=st.integers(1, 7),
    seed=st.integers(0, 99),
    encoding=st.sampled_from(["rotated", "nibble"]),
)
def test_every_code_and_scale_is_found_where_the_layout_has_it(n: int, blocks: int, seed: int, encoding: str) -> None:
    weight = random_weight(n, 32 * blocks, seed)
    codes, scales = unpack(jitmx.pack_weight(weight, encoding=encoding))
    wanted = torch.stack([weight.codes & 15, weight.codes >> 4], -1).reshape(n, -1).numpy()
    np.testing.assert_array_equal(codes[:n, : 32 * blocks], wanted)
    empty = (wanted.reshape(n, blocks, 32) & 7).max(-1) == 0
    np.testing.assert_array_equal(scales[:n, :blocks], np.where(empty, 127, weight.scales.numpy()))
    assert not codes[n:].any() and not codes[:, 32 * blocks :].any()


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(2, 129, "normal"), (1, 2, "full"), (129, 130, "full"), (255, 256, "full"), (0, 1, "full")],
)
def test_scales_beyond_what_decoding_folds_in_are_marked(low: int, high: int, wanted: str) -> None:
    assert jitmx.pack_weight(random_weight(16, 64, low=low, high=high)).scale_range == wanted


def test_a_block_of_zeros_does_not_cost_the_fast_path() -> None:
    codes = torch.full((4, 32), 0x80, dtype=torch.uint8)  # zeros and negative zeros
    packed = jitmx.pack_weight((codes, torch.zeros((4, 2), dtype=torch.uint8)))
    assert packed.scale_range == "normal"
    assert jitmx.pack_weight((codes, torch.full((4, 2), 255, dtype=torch.uint8))).scale_range == "full"


def test_hugging_face_blocks_are_taken_as_they_are() -> None:
    weight = random_weight(24, 96)
    blocks = weight.codes.view(24, 3, 16)
    assert torch.equal(jitmx.pack_weight((blocks, weight.scales)).words, jitmx.pack_weight(weight).words)


def test_packing_pads_to_whole_tiles_only() -> None:
    packed = jitmx.pack_weight(random_weight(5120, 2880))
    assert packed.shape == (5120, 2880) and packed.nbytes == 5120 * 2880 * 17 // 32
    assert jitmx.pack_weight(random_weight(1, 32)).words.shape == (1, 1, 32, 4)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda: jitmx.MXTensor(zeros(4, 32), zeros(4, 1), "mxfp6e2m3"), "linear kernels take mxfp4 and mxfp8 weights"),
        (lambda: jitmx.MXTensor(zeros(2, 4, 16), zeros(2, 4, 1)), r"\[2, 4, 32\]; a linear weight is \[n, k\]"),
        (lambda: jitmx.MXTensor(zeros(0, 16), zeros(0, 1)), "n and k must be 1 or more"),
        (lambda: (zeros(4, 16), zeros(4, 2)), "do not fit"),
        (
            lambda: (torch.zeros(4, 16), torch.zeros(4, 1)),
            r"codes is float32 \[4, 16\] on cpu; it must be a uint8 tensor",
        ),
        (
            lambda: (zeros(4, 16).to(torch.int8), zeros(4, 1)),
            r"codes is int8 \[4, 16\] on cpu; .*; view float8_e8m0fnu",
        ),
        (lambda: (zeros(4, 16), None), "scales is a NoneType; it must be a uint8 tensor of at least one dimension"),
        (lambda: (torch.zeros((), dtype=torch.uint8), zeros(4, 1)), r"codes is uint8 \[\] on cpu; it must be"),
    ],
)
def test_a_weight_that_is_none_is_refused_with_the_reason(weight: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        jitmx.pack_weight(weight())  # type: ignore[operator]


def test_an_mxfp8_weight_is_packed_as_the_reference_packs_it() -> None:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (40, 96), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 130, (40, 3), dtype=torch.uint8, generator=generator)
    packed = jitmx.pack_weight(jitmx.MXTensor(codes, scales, "mxfp8"))
    assert (packed.shape, packed.format, packed.encoding) == ((40, 96), "mxfp8", "rotated")
    words, bytes_of_scales = pack_mxfp8(codes.numpy(), scales.numpy())
    np.testing.assert_array_equal(packed.words.numpy().view(np.uint32), words)
    np.testing.assert_array_equal(packed.scales.numpy().view(np.uint32), bytes_of_scales)


def weight_of(n: int = 48, k: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(120, 130, (n, k // 32), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("shape", [(48, 128), (40, 96)], ids=["whole tiles", "padded"])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_codes_and_scales_whose_columns_lie_apart_are_packed_as_those_side_by_side(
    format: str, shape: tuple[int, int]
) -> None:
    codes, scales = weight_of(*shape)
    codes = codes.repeat(1, 2) if format == "mxfp8" else codes
    apart = jitmx.MXTensor(codes.t().contiguous().t(), scales.t().contiguous().t(), format)
    packed, wanted = jitmx.pack_weight(apart), jitmx.pack_weight(jitmx.MXTensor(codes, scales, format))
    assert torch.equal(packed.words, wanted.words) and torch.equal(packed.scales, wanted.scales)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (lambda c, s: (c.to("meta"), s.to("meta")), "codes and scales are on meta, and have no data to pack"),
        (lambda c, s: (c.to_sparse(), s), r"codes is uint8 \[48, 64\] on cpu, torch.sparse_coo; pass codes.to_dense"),
        (lambda c, s: (c, s.to_sparse()), r"scales is uint8 \[48, 4\] on cpu, torch.sparse_coo; pass scales.to_dense"),
    ],
)
def test_codes_that_cannot_be_read_are_refused_with_the_remedy(weight: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        jitmx.pack_weight(weight(*weight_of()))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (("40", 96), "n='40' is not a whole number; pass n as an int"),
        ((40.0, 96), "n=40.0 is not a whole number"),
        ((40, None), "k=None is not a whole number"),
        ((-40, 96), "n=-40 and k=96: n must be 1 or more, and k a multiple of 32"),
        ((40, 97), "n=40 and k=97: n must be 1 or more, and k a multiple of 32"),
    ],
)
def test_packed_words_are_of_numbers_of_features(sizes: tuple[Any, Any], said: str) -> None:
    packed = jitmx.pack_weight(weight_of())
    with pytest.raises(InputError, match=said):
        jitmx.PackedWeight(packed.words, packed.scales, *sizes, "rotated", "normal")
    with pytest.raises(InputError, match=said):
        jitmx.PackedExperts(packed.words[None], packed.scales[None], *sizes, "rotated", "normal")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"words": None}, r"words of a packed weight \[48, 128\] is a NoneType; it must be int32 \[3, 2, 32, 4\]; use"),
        (
            {"scales": torch.zeros(3, 2, 8)},
            r"scales of a packed weight .* is float32 \[3, 2, 8\] on cpu; it must be int32",
        ),
        ({"n": 64}, r"words of a packed weight \[64, 128\] is int32 \[3, 2, 32, 4\] on cpu; .*\[4, 2, 32, 4\]"),
    ],
)
def test_words_that_are_of_no_packed_weight_are_named_as_they_are(change: dict[str, Any], said: str) -> None:
    packed = jitmx.pack_weight(weight_of())
    given = {"words": packed.words, "scales": packed.scales, "n": 48, "k": 128}
    with pytest.raises(InputError, match=said):
        jitmx.PackedWeight(**given | change, encoding="rotated", scale_range="normal")


@pytest.mark.parametrize("weight", [None, 5, [[1.0]]])
def test_rows_to_interleave_are_a_tensor(weight: Any) -> None:
    with pytest.raises(InputError, match=f"weight is a {type(weight).__name__}, not a torch tensor"):
        jitmx.interleave_gate_up(weight)


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(InputError, match="encoding='zigzag' is not one of rotated, nibble"):
        jitmx.pack_weight(random_weight(4, 32), encoding="zigzag")


def test_a_tensor_on_the_cpu_is_refused_before_anything_runs() -> None:
    packed = jitmx.pack_weight(random_weight(16, 64))
    with pytest.raises(InputError, match=r"x is bfloat16 \[1, 64\] on cpu; jitmx runs on CUDA tensors"):
        jitmx.linear(torch.zeros(1, 64, dtype=torch.bfloat16), packed)
    with pytest.raises(InputError, match="jitmx runs on CUDA tensors"):
        jitmx.quantize(torch.zeros(1, 64))
    with pytest.raises(InputError, match=r"pack it once with jitmx\.pack_weight"):
        jitmx.linear(torch.zeros(1, 64), torch.zeros(64, 64))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="codes is uint8"):
        jitmx.dequantize(random_weight(4, 32))
