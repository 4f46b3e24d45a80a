"""Random weights whose text is known, in vLLM's gpt-oss on jitmx's kernels, and what a replay reads of vLLM."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from jitmx.vllm.linear import JitmxLinearMethod
from scripts.protocol import chain, checkpoint
from scripts.protocol.replay import Replay
from scripts.protocol.sizes import Sizes


def test_a_target_with_a_packed_head_says_the_next_number(host: Any, tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "target", Sizes(), seed=3)
    host.folder = tmp_path / "target"
    with simulated_card.on_cpu("sm_90a"):
        model = host.build(load=True, additional_config={"jitmx": {"mxfp4_layers": "moe,qkv,o,lm_head"}})
        assert isinstance(model.lm_head.quant_method, JitmxLinearMethod)
        for block in model.model.layers:
            block.attn.rotary_emb._forward_method = block.attn.rotary_emb.forward_native
            block.attn.attn.forward = lambda q, *_: q.clone()
        tokens = torch.tensor([3, 499, 77, 256, 510, 0, 128, 42])

        def says() -> torch.Tensor:
            with vllm_world.world(), torch.no_grad(), set_forward_context(None, model.vllm_config, num_tokens=8):
                hidden = model.model(tokens, torch.arange(8), None)
                return model.compute_logits(hidden).argmax(-1)

        with vllm_world.world():
            assert not torch.equal(says(), tokens + 1)
            extension = Replay()
            extension.model_runner = SimpleNamespace(model=model)
            extension.chain()
        assert torch.equal(says(), tokens + 1)


def test_a_replay_finds_the_last_tokens_where_vllm_hands_them_to_its_speculator() -> None:
    names = list(inspect.signature(EagleSpeculator.propose).parameters)
    assert names[1] == "input_batch" and names[2 + chain.Proposals.LAST_SAMPLED] == "last_sampled"
    fields = {field.name for field in dataclasses.fields(InputBatch)}
    assert {"num_reqs", "num_draft_tokens", "idx_mapping"} <= fields
