"""A bigram target and its draft by vLLM on jitmx's kernels: what the draft proposes is what the target makes."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from jitmx.vllm.attention import JitmxAttentionBackend
from jitmx.vllm.linear import JitmxLinearMethod
from scripts.protocol import bigram

COUNT, PAGES = 12, 2
ASKED = {"mxfp4_layers": "moe,qkv,o", "draft_layers": "all"}


@dataclasses.dataclass
class Run:
    """A pair in vLLM, and the context of one request of its draft.

    Attributes:
        tokens: `COUNT` of the cycle's, and three more.
        card: that simulates.
    """

    pair: bigram.Pair
    target: Any
    draft: Any
    tokens: torch.Tensor
    card: Any

    @property
    def config(self) -> Any:
        return self.target.vllm_config

    def target_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the target gives its draft of the first `COUNT` tokens, and the tokens that it makes behind each."""
        with vllm_world.world(), torch.no_grad(), set_forward_context(None, self.config, num_tokens=COUNT):
            last, aux = self.target.model(self.tokens[:COUNT], torch.arange(COUNT), None)
            return torch.cat(aux, -1), self.target.compute_logits(last).argmax(-1)

    def proposals(self, k: int, states: torch.Tensor, shift: int = 1) -> list[int]:
        """What the draft proposes behind the last token, by a prefill and k - 1 decodes with jitmx's attention."""
        attn = self.draft.model.layers[0].self_attn.attn
        with vllm_world.world(), set_current_vllm_config(self.config):
            spec = attn.get_kv_cache_spec(self.config)
            builder = JitmxAttentionBackend.get_builder_cls()(spec, [attn.layer_name], self.config, torch.device("cpu"))
        attn.kv_cache = torch.zeros(PAGES + 1, 2, 16, 2 * 64, dtype=torch.bfloat16)
        table, found = torch.tensor([[2, 1]]).int(), []
        tokens = self.tokens[shift : COUNT + shift]
        with torch.no_grad():
            hidden = self.draft.combine_hidden_states(states)
            for step in range(k):
                old = 0 if step == 0 else COUNT + step - 1
                positions = torch.arange(len(tokens)) + old
                slots = table[0][positions // 16].long() * 16 + positions % 16
                starts, lengths = torch.tensor([0, len(tokens)]).int(), torch.tensor([old + len(tokens)]).int()
                common = CommonAttentionMetadata(
                    query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=1,
                    num_actual_tokens=len(tokens), max_query_len=len(tokens), max_seq_len=int(lengths),
                    block_table_tensor=table, slot_mapping=slots,
                )  # fmt: skip
                name = attn.layer_name
                context = set_forward_context(
                    {name: builder.build(0, common)}, self.config, num_tokens=len(tokens), slot_mapping={name: slots}
                )
                with vllm_world.world(), context:
                    last, hidden = self.draft(tokens, positions, hidden)
                tokens, hidden = self.draft.get_top_tokens(last[-1:]), hidden[-1:]
                found.append(int(tokens))
        return found


def looking_back(q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of every head to the value before its own token; the first has its own."""
    before = torch.cat([v[:1], v[:-1]]).view(len(v), -1, 64)
    return before.repeat_interleave(q.shape[1] // v.shape[1], 1).view_as(q)


@pytest.fixture
def run(host: Any, tmp_path: Path) -> Iterator[Run]:
    pair = bigram.tiny()
    bigram.write(pair, tmp_path / "target", tmp_path / "draft")
    host.folder = tmp_path / "target"
    method = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    with simulated_card.on_cpu("sm_90a") as card:
        target = host.build(load=True, additional_config={"jitmx": ASKED}, speculative_config=method)
        config = target.vllm_config
        eagle3_utils.set_eagle3_aux_hidden_state_layers(target, config.speculative_config)
        speculator = SimpleNamespace(
            vllm_config=config, speculative_config=config.speculative_config, draft_logits=None, draft_watermarker=None,
            enable_adaptive_verification=False, max_num_reqs=8, use_local_argmax_reduction=False,
        )  # fmt: skip
        with vllm_world.world(), set_current_vllm_config(config):
            draft = EagleSpeculator.load_draft_model(speculator, target, set())
        for layer in (*(block.attn for block in target.model.layers), draft.model.layers[0].self_attn):
            layer.rotary_emb._forward_method = layer.rotary_emb.forward_native
        for block in target.model.layers:  # to the token before; only in one of them is O other than zeros
            block.attn.attn.forward = looking_back
        yield Run(pair, target, draft, pair.cycle[: COUNT + 3], card)


def test_every_proposal_of_a_draft_on_jitmx_is_what_the_target_makes(run: Run) -> None:
    methods = [one.quant_method for one in run.draft.modules() if hasattr(one, "quant_method")]
    assert sum(isinstance(one, JitmxLinearMethod) for one in methods) == 6 and hasattr(run.draft, "jitmx_targets")
    states, first = run.target_states()
    assert torch.equal(first[1:], run.tokens[2 : COUNT + 1])  # there is no token before the first
    run.card.launched.clear()
    assert run.proposals(2, states) == run.tokens[COUNT + 1 :].tolist()
    attention = [name for name in run.card.kernels if name.startswith("attention")]
    assert len(attention) >= 2 and "attention.decode" in attention
    # Of the token before it proposes what is there already; of states of another layer its one wrong token.
    assert run.proposals(1, states, shift=0) == [int(run.tokens[COUNT])]
    run.target.model.aux_hidden_state_layers = (1, 2, 4)
    assert run.proposals(1, run.target_states()[0]) == [int(run.pair.proposed[run.pair.refusing])]
