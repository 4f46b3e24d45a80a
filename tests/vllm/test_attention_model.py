"""A whole gpt-oss by vLLM whose attention is jitmx's too, from prompts to tokens, beside transformers."""

# ruff: noqa: E402

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from click.testing import CliRunner
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import reload
from vllm.v1.attention.backend import CommonAttentionMetadata

from jitmx import settings
from jitmx.cli import main
from jitmx.toolchain import nvrtc
from jitmx.vllm import monitor, warmup
from jitmx.vllm.attention import JitmxAttentionBackend
from vllm_world import error, reference

Checkpoint = tuple[Path, dict[str, torch.Tensor]]
ASKED = {"mxfp4_layers": "moe,qkv,o", "attention": True}
TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35, 89], [79, 3, 23, 84, 62, 64, 33]])
PAGES = 8


class Steps:
    """A model with a cache of its own for each layer, and tables that differ between them, as groups of vLLM's do."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.vllm_config
        self.layers = [layer.attn.attn for layer in model.model.layers]
        with vllm_world.world(), set_current_vllm_config(self.config):
            specs = [layer.get_kv_cache_spec(self.config) for layer in self.layers]
            builder = JitmxAttentionBackend.get_builder_cls()
            self.builders = [
                builder(spec, [layer.layer_name], self.config, torch.device("cpu"))
                for spec, layer in zip(specs, self.layers, strict=True)
            ]
        for layer in self.layers:
            layer.kv_cache = torch.zeros(PAGES, 2, 16, 2 * 64, dtype=torch.bfloat16)
        self.tables = [torch.tensor([[1, 2], [3, 4]]).int(), torch.tensor([[6, 5], [7, 1]]).int()]

    def run(self, tokens: list[torch.Tensor], old: list[int]) -> list[torch.Tensor]:
        """What the model makes of new tokens of each request, before its head.

        Args:
            old: tokens of each that it has seen.
        """
        news = torch.tensor([len(own) for own in tokens])
        starts = torch.cat([torch.zeros(1), news.cumsum(0)]).int()
        lengths = (torch.tensor(old) + news).int()
        positions = torch.cat([torch.arange(len(own)) + seen for own, seen in zip(tokens, old, strict=True)])
        metadata, slots = {}, {}
        for layer, builder, table in zip(self.layers, self.builders, self.tables, strict=True):
            own = [row[at // 16].long() * 16 + at % 16
                   for row, at in zip(table, positions.split(news.tolist()), strict=True)]  # fmt: skip
            slots[layer.layer_name] = torch.cat(own)
            common = CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(tokens),
                num_actual_tokens=len(positions), max_query_len=int(news.max()), max_seq_len=int(lengths.max()),
                block_table_tensor=table, slot_mapping=slots[layer.layer_name],
            )  # fmt: skip
            metadata[layer.layer_name] = builder.build(0, common)
        context = set_forward_context(metadata, self.config, num_tokens=len(positions), slot_mapping=slots)
        with vllm_world.world(), torch.no_grad(), context:
            found: torch.Tensor = self.model.model(torch.cat(tokens), positions, None)
        return list(found.split(news.tolist()))


@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_prompts_and_tokens_after_them_come_out_as_transformers_make_them(
    host: Any, wide: Checkpoint, fuse: bool
) -> None:
    host.folder = wide[0]
    with simulated_card.on_cpu("sm_90a") as card:
        model = host.build(load=True, additional_config={"jitmx": ASKED | {"fuse_norm": fuse}})
        for layer in model.model.layers:
            assert layer.jitmx_rotates is fuse
            layer.attn.rotary_emb._forward_method = layer.attn.rotary_emb.forward_native
        steps = Steps(model)
        first = steps.run([TOKENS[0, :5], TOKENS[1, :3]], [0, 0])
        second = steps.run([TOKENS[0, 5:6], TOKENS[1, 3:6]], [5, 3])
        card.launched.clear()
        third = steps.run([TOKENS[0, 6:], TOKENS[1, 6:]], [6, 6])
        assert card.kernels.count("attention.decode") == 2
        rotated = [variant.knobs.as_dict()["rope"] for variant in card.launched if variant.spec.family == "attention"]
        assert rotated == ["neox" if fuse else "no_rope"] * 2
        right = reference(wide, TOKENS).last_hidden_state
    found = torch.stack([torch.cat(parts) for parts in zip(first, second, third, strict=True)])
    assert error(found, right) < 0.03


def test_weights_and_sinks_that_are_loaded_again_serve_in_the_places_of_the_first(host: Any, wide: Checkpoint) -> None:
    host.folder = wide[0]
    changed = {name: t + 1 if name.endswith("sinks") else t for name, t in wide[1].items()}
    with simulated_card.on_cpu("sm_90a"):
        model = host.build(load=True, additional_config={"jitmx": ASKED})
        layers = [layer.attn for layer in model.model.layers]

        def places() -> list[int]:
            tables = [layer.rotary_emb.jitmx_rope_bf16 for layer in layers]
            assert all(torch.equal(t, layers[0].rotary_emb.cos_sin_cache.bfloat16()) for t in tables)
            return [x.data_ptr() for x in (*tables, *(layer.attn.impl.sinks for layer in layers))]

        before = places()
        assert before[0] == before[1]  # layers share one table
        with vllm_world.world(), set_current_vllm_config(model.vllm_config), torch.no_grad():
            reload.initialize_layerwise_reload(model)
            model.load_weights(iter(changed.items()))
            reload.finalize_layerwise_reload(model, model.vllm_config.model_config)
        assert places() == before
        found = torch.stack(Steps(model).run([TOKENS[0, :3], TOKENS[1, :3]], [0, 0]))
        errors = [
            error(found, reference((wide[0], one), TOKENS[:, :3]).last_hidden_state) for one in (changed, wide[1])
        ]
    assert errors[0] < 0.03 and errors[1] > 2 * errors[0]


def test_one_token_is_five_launches_a_block(host: Any, wide: Checkpoint) -> None:
    host.folder = wide[0]
    with simulated_card.on_cpu("sm_90a") as card:
        steps = Steps(host.build(load=True, additional_config={"jitmx": ASKED}))
        steps.tables = [table[:1] for table in steps.tables]
        steps.run([TOKENS[0, :1]], [0])
        block = ["linear.stream", "attention.decode", "linear.stream", "routing.route", "moe.token"]
        assert card.kernels[-10:] == block * 2


def test_a_cache_that_warmup_filled_serves_attention_where_nothing_may_be_compiled(
    host: Any, wide: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.folder = wide[0]
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JITMX_ATTENTION", "on")
    monkeypatch.setenv("JITMX_GREEDY_SAMPLER", "0")  # a runner's, and there is none here
    monkeypatch.setattr(warmup, "_ready", set())
    monkeypatch.setattr(monitor, "_sealed", None)
    settings.reload()
    words = ["--model", str(wide[0]), "--layers", "none", "--tokens", "16", "--requests", "2", "--context", "64"]
    done = CliRunner().invoke(main, ["warmup", "--arch", "sm_90", *words, "--json", "-q"])
    assert done.exit_code == 0, done.output
    kernels = {one["name"] for one in json.loads(done.stdout)["kernels"]}
    assert kernels and all(name.startswith("attention.") for name in kernels)
    monkeypatch.setenv("JITMX_MODE", "required")
    settings.reload()
    for name in ("compile", "scan"):
        monkeypatch.setattr(nvrtc, name, None)
    with simulated_card.on_cpu("sm_90a"):
        model = host.build(max_num_batched_tokens=16, max_num_seqs=2, max_model_len=64)
        monkeypatch.setattr(warmup, "prepare", host.prepare)
        Steps(model)
    assert {one.variant.name for one in warmup._ready} == kernels
