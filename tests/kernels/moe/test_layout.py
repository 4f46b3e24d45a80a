"""The reference of `moe` is the layer as its definition has it, and packing keeps experts apart."""

from __future__ import annotations

import numpy as np
import pytest

from jitmx.kernels.linear.layout import pack
from jitmx.kernels.moe.layout import activate, interleave, pack_experts, reference

RNG = np.random.default_rng(0)


def test_the_clamped_activation_is_that_of_gpt_oss() -> None:
    for gate, up in ((1.0, 2.0), (9.0, 0.5), (-3.0, 9.0), (0.25, -9.0)):
        g, u = min(gate, 7.0), max(-7.0, min(up, 7.0))
        wanted = (u + 1.0) * g / (1.0 + np.exp(-1.702 * g))
        assert activate(np.array([gate, up]), "swiglu_oai")[0] == pytest.approx(wanted, rel=1e-12)


def test_silu_has_no_limit_and_large_gates_do_not_overflow() -> None:
    assert activate(np.array([100.0, 100.0]), "silu")[0] == pytest.approx(1e4)
    assert activate(np.array([-1e4, 3.0]), "silu")[0] == 0.0


def test_a_row_is_the_weighted_sum_of_its_experts_and_ids_of_none_are_skipped() -> None:
    x = RNG.standard_normal((3, 8))
    w13, w2 = RNG.standard_normal((4, 6, 8)), RNG.standard_normal((4, 8, 3))
    b13, b2 = RNG.standard_normal((4, 6)), RNG.standard_normal((4, 8))
    ids = np.array([[0, 3], [2, -1], [4, 9]], np.int32)
    weights = RNG.uniform(size=(3, 2))

    def expert(e: int, row: np.ndarray) -> np.ndarray:
        return w2[e] @ activate(w13[e] @ row + b13[e], "swiglu_oai") + b2[e]

    y = reference(x, ids, weights, w13, w2, b13, b2)
    np.testing.assert_allclose(y[0], weights[0, 0] * expert(0, x[0]) + weights[0, 1] * expert(3, x[0]))
    np.testing.assert_allclose(y[1], weights[1, 0] * expert(2, x[1]))
    assert not y[2].any()


def test_interleaving_puts_gates_before_their_ups() -> None:
    rows = np.arange(8).reshape(1, 8, 1)
    assert interleave(rows).ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("encoding", ["rotated", "nibble"])
def test_experts_are_packed_one_after_the_other(encoding: str) -> None:
    codes = RNG.integers(0, 16, (3, 40, 96)).astype(np.uint8)
    scales = RNG.integers(0, 255, (3, 40, 3)).astype(np.uint8)
    words, packed = pack_experts(codes, scales, encoding)
    assert words.shape == (3, 3, 2, 32, 4) and packed.shape == (3, 3, 2, 8)
    for e in range(3):
        one, its = pack(codes[e], scales[e], encoding)
        np.testing.assert_array_equal(words[e], one)
        np.testing.assert_array_equal(packed[e], its)
