"""The reference arithmetic agrees with ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import oracle
from jitmx import formats
from jitmx.errors import KnobError

FORMATS = tuple(formats.FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_has_the_value_that_ml_dtypes_gives_it(name: str) -> None:
    item = formats.get(name)
    codes = np.arange(1 << item.bits, dtype=np.uint8)
    np.testing.assert_array_equal(formats.values(item), codes.view(oracle.ELEMENT[name]).astype(np.float64))


@pytest.mark.parametrize("rule", formats.SCALE_RULES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_finite_bf16_value_quantizes_as_the_oracle_has_it(name: str, rule: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    x = np.where(np.isfinite(x), x, 0.0)[np.random.default_rng(0).permutation(1 << 16)].reshape(-1, 32)
    codes, scales = formats.quantize(x, formats.get(name), rule)
    wanted_codes, wanted_scales = oracle.quantize(x, name, rule)
    np.testing.assert_array_equal(scales.reshape(-1), wanted_scales.reshape(-1))
    np.testing.assert_array_equal(codes, wanted_codes)


@given(
    hnp.arrays(np.float32, (3, 64), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)),
    st.sampled_from(FORMATS),
    st.sampled_from(formats.SCALE_RULES),
)
def test_any_float32_blocks_quantize_as_the_oracle_has_it(x: np.ndarray, name: str, rule: str) -> None:
    codes, scales = formats.quantize(x.astype(np.float64), formats.get(name), rule)
    wanted_codes, wanted_scales = oracle.quantize(x.astype(np.float64), name, rule)
    np.testing.assert_array_equal(scales, wanted_scales)
    np.testing.assert_array_equal(codes, wanted_codes)
    values = formats.dequantize(codes, scales, formats.get(name))
    np.testing.assert_array_equal(values, oracle.dequantize(codes, scales, name))


@given(hnp.arrays(np.float32, (2, 32), elements=st.floats(-(2.0**100), 2.0**100, width=32)), st.sampled_from(FORMATS))
def test_quantizing_what_was_quantized_changes_nothing(x: np.ndarray, name: str) -> None:
    item = formats.get(name)
    once = formats.dequantize(*formats.quantize(x.astype(np.float64), item), item)
    twice = formats.dequantize(*formats.quantize(once, item), item)
    np.testing.assert_array_equal(once, twice)


def test_a_block_with_a_nan_gets_the_nan_scale_and_one_of_zeros_gets_scale_one() -> None:
    x = np.zeros((2, 32))
    x[0, 5] = np.nan
    codes, scales = formats.quantize(x, formats.get("mxfp4"))
    assert scales.tolist() == [[255], [127]] and not codes.any()


def test_nibbles_are_packed_with_even_k_low() -> None:
    codes = np.arange(16, dtype=np.uint8)
    packed = formats.pack_nibbles(codes)
    assert packed[0] == 0x10 and packed[7] == 0xFE
    np.testing.assert_array_equal(formats.unpack_nibbles(packed), codes)


def test_an_unknown_format_or_rule_is_named_with_its_choices() -> None:
    with pytest.raises(KnobError, match=r"\['mxfp4'\] is not a format; formats: mxfp4, mxfp6e2m3"):
        formats.get(["mxfp4"])
    with pytest.raises(KnobError, match=r"'mxfp5' is not a format; formats: mxfp4, mxfp6e2m3"):
        formats.get("mxfp5")
    with pytest.raises(KnobError, match="'round' is not a scale rule; rules: floor, ceil, even"):
        formats.block_scales(np.ones((1, 32)), formats.get("mxfp4"), "round")
