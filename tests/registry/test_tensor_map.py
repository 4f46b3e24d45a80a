"""Tensor maps are what the driver takes: what it would refuse is an error that names the value and the rule."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx.errors import InputError, SimulationError
from jitmx.registry.tensor_map import ITEM_BYTES, PROMOTIONS, SWIZZLES, TensorMap
from jitmx.sim import tensormap


@st.composite
def maps(draw: st.DrawFn) -> TensorMap:
    """Any legal map."""
    dtype, rank = draw(st.sampled_from(list(ITEM_BYTES))), draw(st.integers(1, 5))
    chunk = 16 // ITEM_BYTES[dtype]
    swizzle = draw(st.sampled_from(SWIZZLES))
    first = chunk * draw(st.integers(1, swizzle // 16 if swizzle else 256 // chunk))
    sizes = [draw(st.integers(1, 1 << 32)) for _ in range(rank)]
    strides = [16 * draw(st.integers(0, (1 << 36) - 1)) for _ in range(rank - 1)]
    box = [first, *(draw(st.integers(1, 256)) for _ in range(rank - 1))]
    return TensorMap(dtype, tuple(sizes), tuple(box), tuple(strides), swizzle, draw(st.sampled_from(PROMOTIONS)))


@given(shown=maps(), chunk=st.integers(0, 1 << 40))
def test_what_a_map_may_be_the_simulator_takes_but_for_rows_narrower_than_the_swizzle(
    shown: TensorMap, chunk: int
) -> None:
    if shown.box[0] * shown.item_bytes < shown.swizzle:
        with pytest.raises(SimulationError, match="narrower than the swizzle"):
            tensormap.encode(shown, 16 * chunk)
        return
    found = tensormap.TensorMap.decode(tensormap.encode(shown, 16 * chunk))
    assert found == tensormap.TensorMap(
        16 * chunk, shown.item_bytes, shown.sizes, shown.strides, shown.box, shown.swizzle
    )


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("dtype", "size"), ITEM_BYTES.items())
def test_by_default_there_are_no_gaps(dtype: str, size: int, rank: int) -> None:
    sizes = (48, 5, 3, 7, 2)[:rank]
    found = TensorMap(dtype, sizes, (16,) + (1,) * (rank - 1))
    assert found.item_bytes == size
    assert found.strides == tuple(size * pitch for pitch in (48, 240, 720, 5040)[: rank - 1])
    assert found == TensorMap(dtype, sizes, found.box, found.strides)


GOOD: dict[str, Any] = {"dtype": "bf16", "sizes": (64, 8), "box": (64, 8)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "fp32"}, "a tensor map of 'fp32'; its elements must be bf16, fp16, e4m3, u8"),
        ({"sizes": (), "box": ()}, "rank 0 must be 1 to 5"),
        ({"sizes": (64,) * 6, "box": (8,) * 6}, "rank 6 must be 1 to 5"),
        ({"box": (64,)}, "sizes (64, 8), box (64,) and strides (128,) must fit one another"),
        ({"strides": (128, 128)}, "sizes (64, 8), box (64, 8) and strides (128, 128) must fit one another"),
        ({"sizes": (64, 0)}, "sizes (64, 0) must be 1 to 2^32"),
        ({"sizes": (64, (1 << 32) + 1)}, "sizes (64, 4294967297) must be 1 to 2^32"),
        ({"box": (64, 0)}, "box (64, 0) must be 1 to 256 along each dimension"),
        ({"box": (64, 257)}, "box (64, 257) must be 1 to 256 along each dimension"),
        ({"strides": (136,)}, "strides (136,) must be multiples of 16 below 2^40"),
        ({"strides": (1 << 40,)}, "strides (1099511627776,) must be multiples of 16 below 2^40"),
        ({"sizes": (63, 8)}, "strides (126,) must be multiples of 16 below 2^40"),
        ({"box": (60, 8)}, "a box row of 120 bytes must be a multiple of 16"),
        ({"dtype": "e4m3", "box": (24, 8)}, "a box row of 24 bytes must be a multiple of 16"),
        ({"swizzle": 16}, "swizzle 16 must be 0, 32, 64, 128"),
        ({"swizzle": 64}, "a box row of 128 bytes must not exceed the swizzle of 64"),
        ({"promotion": 32}, "promotion 32 must be 0, 64, 128, 256"),
    ],
    ids=str,
)
def test_what_the_driver_would_refuse_is_refused_by_value_and_rule(changes: dict[str, Any], said: str) -> None:
    TensorMap(**GOOD)
    with pytest.raises(InputError, match=re.escape(said) + "$"):
        TensorMap(**GOOD | changes)


def test_what_lies_on_a_limit_is_taken() -> None:
    TensorMap("u8", (1 << 32, 1 << 32), (256, 256), ((1 << 40) - 16,))
    for swizzle in SWIZZLES:
        TensorMap("fp16", (64, 8), (swizzle // 2 or 256, 8), swizzle=swizzle)
