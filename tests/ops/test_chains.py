"""Launches of jitmx one behind the other, as on a stream: none uses before its wait what others may still write."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import chained_card
import jitmx
from chained_card import on_stream
from jitmx.errors import SimulationError
from jitmx.ops import norm_concat
from ops.test_linear_fp8 import Product


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activation", [None, "fp8"])
def test_products_attention_and_norms_of_a_layer_follow_one_another(rows: int, activation: str | None) -> None:
    with on_stream() as card:
        qkv, o = Product(256, 96), Product(96, 128)
        x, more = qkv.x(rows), {"activation": activation} if activation else {}
        caches = [torch.zeros(4, 16, 1, 64).bfloat16() for _ in "kv"]
        table, lengths = torch.arange(4, dtype=torch.int32)[None], torch.tensor([rows + 7], dtype=torch.int32)
        starts = torch.tensor([0, rows], dtype=torch.int32)
        if activation:
            for weight in (qkv, o):
                assert weight.packed.row_words
        torch.zeros(1)
        card.early = 0
        y = jitmx.linear(jitmx.rms_norm(x, qkv.norm), qkv.packed, qkv.bias, **more).unflatten(-1, (4, 64))
        y = jitmx.attention(
            y[:, :2], y[:, 2:3], y[:, 3:], *caches, table, lengths, starts, max_query_len=rows, early=True
        )  # fmt: skip
        jitmx.linear(y.flatten(1), o.packed, o.bias, residual=x, **more)
        assert card.early == len([name for name in card.kernels if name.split(".")[0] != "pack"])


@pytest.mark.parametrize("soon", [False, True])
def test_attention_may_read_early_what_was_written_right_before_a_draft_s_first_norms(
    soon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's loop advances lengths; two launches behind, attention reads them before its own wait."""
    if soon:  # as every other kernel may
        monkeypatch.setattr(chained_card, "_lets_go_behind_its_wait", lambda variant: False)
    with on_stream() as card:
        qkv, table = Product(256, 128), torch.randn(9, 64).bfloat16()
        x, norm, ids = torch.randn(1, 64).bfloat16(), torch.ones(64).bfloat16(), torch.tensor([4])
        caches = [torch.zeros(4, 16, 1, 64).bfloat16() for _ in "kv"]
        blocks, lengths = torch.arange(4, dtype=torch.int32)[None], torch.tensor([7], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        torch.zeros(1)
        lengths.add_(1)
        card.early = 0
        y, _ = norm_concat.run(ids, table, x, norm, norm, 1e-5)
        y = jitmx.linear(y, qkv.packed, qkv.bias).unflatten(-1, (4, 64))
        asked = y[:, :2], y[:, 2:3], y[:, 3:], *caches, blocks, lengths, starts
        with pytest.raises(SimulationError, match="seq_lens") if soon else contextlib.nullcontext():
            jitmx.attention(*asked, max_query_len=1, early=True)
        assert card.early == 3


def test_a_weight_that_a_launch_at_work_may_still_write_is_noticed() -> None:
    with on_stream() as card:
        x, norm = torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16()
        made: Any = torch.zeros(1)
        norm.mul_(2)
        with pytest.raises(SimulationError, match=r"weight of .* before griddepcontrol\.wait"):
            jitmx.rms_norm(x, norm)
        made.add_(1)
        assert not card.written & {norm.data_ptr()}
        jitmx.rms_norm(x, norm)
