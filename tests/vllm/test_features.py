"""What servers turn on around gpt-oss: weights put to sleep and loaded again, draft models, offloading, pooling."""

# ruff: noqa: E402

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoeBackend
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from jitmx import settings
from jitmx.runtime import load
from jitmx.serving.linear import Packer
from jitmx.vllm import monitor, warmup
from jitmx.vllm.linear import JitmxLinearMethod
from jitmx.vllm.moe import JitmxMoEMethod

Checkpoint = tuple[Path, dict[str, torch.Tensor]]
ALL = {"jitmx": {"mxfp4_layers": "all"}}
APART = {"jitmx": {"mxfp4_layers": "all", "fuse_norm": False}}


class Attention(torch.nn.Module):
    """In the place of vLLM's attention, which has no kernel here; each token sees itself only, wherever it is."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + torch.cat([k, v], -1)


def build(host: Any, **options: Any) -> Any:
    """A model with its weights, whose attention needs no kernel of vLLM's."""
    model = host.build(load=True, **{"additional_config": ALL} | options)
    for layer in model.model.layers:
        layer.attn.attn = Attention()
        layer.attn.rotary_emb._forward_method = lambda positions, q, k: (q, k)
    return model


def run(model: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of some tokens."""
    config = model.vllm_config
    with vllm_world.world(), torch.no_grad(), set_forward_context(None, config, num_tokens=len(tokens)):
        states = model.model(torch.tensor(tokens, dtype=torch.int64), torch.arange(len(tokens)), None)
        return states, model.compute_logits(states)


@pytest.mark.parametrize("options", [ALL, pytest.param(APART, marks=pytest.mark.nightly)])
def test_a_batch_without_tokens_is_served(host: Any, options: Any) -> None:
    with simulated_card.on_cpu("sm_90a"):
        states, logits = run(build(host, additional_config=options), [])
    assert states.shape == (0, 64) and logits.shape == (0, 100)


@pytest.mark.parametrize("options", [ALL, pytest.param(APART, marks=pytest.mark.nightly)])
def test_random_weights_in_the_place_of_a_checkpoint_are_served(host: Any, options: Any) -> None:
    with simulated_card.on_cpu("sm_90a"):
        states, logits = run(build(host, additional_config=options, load_format="dummy"), [3, 14])
    assert bool(torch.isfinite(states).all()) and bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("options", [ALL, pytest.param(APART, marks=pytest.mark.nightly)])
def test_weights_that_sleep_threw_away_are_back_in_their_places_once_reloaded(
    host: Any, checkpoint: Checkpoint, tmp_path: Path, options: Any
) -> None:
    with simulated_card.on_cpu("sm_90a"):
        model = build(host, additional_config=options)
        before, places = run(model, [3, 14, 15]), {name: p.data_ptr() for name, p in model.named_parameters()}
        for parameter in model.parameters():  # as level 2 leaves them
            parameter.data.view(torch.uint8).fill_(0x5A)
        assert not torch.equal(run(model, [3, 14, 15])[0], before[0])

        def reload(path: Path | None = None) -> None:
            config = model.vllm_config
            with vllm_world.world(), set_current_vllm_config(config), torch.no_grad():
                reload_weights(config, model, None, None if path is None else str(path), True)

        reload()
        again = run(model, [3, 14, 15])
        # And weights that training has changed.
        shutil.copy(checkpoint[0] / "config.json", tmp_path)
        changed = {name: -t if name.endswith(("_proj.weight", "lm_head.weight")) else t
                   for name, t in checkpoint[1].items()}  # fmt: skip
        save_file(changed, str(tmp_path / "model.safetensors"))
        reload(tmp_path)
        trained = run(model, [3, 14, 15])
        fresh = run(build_of(host, tmp_path, additional_config=options), [3, 14, 15])
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert all(map(torch.equal, again, before)) and not torch.equal(trained[0], before[0])
    assert all(map(torch.equal, trained, fresh))


def build_of(host: Any, folder: Path, **options: Any) -> Any:
    """A model of another folder."""
    first, host.folder = host.folder, folder
    try:
        return build(host, **options)
    finally:
        host.folder = first


def drafter(folder: Path, *, head: bool) -> Path:
    """An EAGLE3 draft model for the small gpt-oss, with a head of its own or without."""
    generator = torch.Generator().manual_seed(0)

    def bf16(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.1).bfloat16()

    about = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64,
             "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32, "vocab_size": 100, "draft_vocab_size": 100, "torch_dtype": "bfloat16",
             "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 512,
             "hidden_act": "silu"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))
    sizes = {"fc": (64, 192), "midlayer.self_attn.q_proj": (128, 128), "midlayer.self_attn.k_proj": (64, 128),
             "midlayer.self_attn.v_proj": (64, 128), "midlayer.self_attn.o_proj": (64, 128),
             "midlayer.mlp.gate_proj": (96, 64), "midlayer.mlp.up_proj": (96, 64),
             "midlayer.mlp.down_proj": (64, 96)}  # fmt: skip
    tensors = {f"{name}.weight": bf16(*shape) for name, shape in sizes.items()}
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    tensors |= {f"{name}.weight": bf16(64) + 1 for name in norms} | ({"lm_head.weight": bf16(100, 64)} if head else {})
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize("head", [False, True])
def test_an_eagle3_draft_reads_the_targets_states_and_has_its_head_or_its_own_in_bf16(
    host: Any, tmp_path: Path, head: bool
) -> None:
    draft_of = {"method": "eagle3", "model": str(drafter(tmp_path, head=head)), "num_speculative_tokens": 2}
    with simulated_card.on_cpu("sm_90a"):
        model = build(host, speculative_config=draft_of)
        with vllm_world.world(), set_current_vllm_config(model.vllm_config):
            draft = load_eagle_model(model, model.vllm_config)
        model.model.aux_hidden_state_layers = (0, 1, 2)
        (states, aux), logits = run_with_states(model, [3, 14, 15])
        with vllm_world.world(), torch.no_grad():
            mixed = draft.combine_hidden_states(torch.cat(aux, -1))
            drafted = draft.compute_logits(states)
    assert all(layer.jitmx_fused for layer in model.model.layers) and isinstance(
        model.lm_head.quant_method, JitmxLinearMethod
    )
    assert len(aux) == 3 and mixed.shape == (3, 64) and bool(torch.isfinite(mixed).all())
    assert (draft.lm_head is model.lm_head) != head and torch.equal(drafted, logits) != head
    if head:
        assert type(draft.lm_head.quant_method) is UnquantizedEmbeddingMethod
    own = "vLLM serves the draft model's own lm_head; jitmx serves layers of the target model only"
    assert [line for line in host.said if "draft" in line[1]] == [("INFO", own)]
    assert model.vllm_config.additional_config["jitmx_serves"]["lm_head"] == "mxfp4"


def run_with_states(model: Any, tokens: list[int]) -> tuple[Any, torch.Tensor]:
    """What a model that gives its draft states between blocks makes of some tokens, and its logits."""
    config = model.vllm_config
    with vllm_world.world(), torch.no_grad(), set_forward_context(None, config, num_tokens=len(tokens)):
        found = model.model(torch.tensor(tokens), torch.arange(len(tokens)), None)
        return found, model.compute_logits(found[0])


@pytest.mark.parametrize(
    "how", [{"cpu_offload_gb": 1}, {"offload_group_size": 2, "offload_num_in_group": 1}], ids=["uva", "prefetch"]
)
def test_layers_whose_weights_are_offloaded_to_the_host_stay_with_vllm(
    host: Any, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda *_, **__: (Mxfp4MoeBackend.NONE, None))
    monkeypatch.setattr(GptOssMxfp4MoEMethod, "is_monolithic", False)
    model = host.build(additional_config=ALL, **how)
    block = model.model.layers[1]
    assert not isinstance(block.mlp.experts.routed_experts.quant_method, JitmxMoEMethod)
    assert not any(isinstance(layer.quant_method, JitmxLinearMethod) for layer in (block.attn.qkv_proj,
                                                                                   block.attn.o_proj))  # fmt: skip
    assert isinstance(model.lm_head.quant_method, JitmxLinearMethod)  # of which nothing is offloaded
    said = [message for level, message in host.said if level == "WARNING"]
    assert len(said) == 3 and all("offloads weights to the host (--cpu-offload-gb or" in message for message in said)


def test_of_a_head_that_vllm_needs_in_bf16_nothing_else_is_said(host: Any) -> None:
    with simulated_card.on_cpu("sm_90a"):
        model = host.build(runner="pooling", convert="embed", additional_config=ALL)
    serves = model.vllm_config.additional_config["jitmx_serves"]
    (said,) = (line for line in host.said if "lm_head" in line[1])
    assert said[0] == "WARNING" and "vLLM serves lm_head, jitmx is disabled for it: head_dtype=torch.float32" in said[1]
    assert serves["lm_head"] == "" and serves["moe"] == "mxfp4"


def test_how_weights_are_packed_is_part_of_vllms_key_for_compiled_code(
    host: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    shutil.copy(checkpoint[0] / "config.json", tmp_path)
    experts = "model.layers.0.mlp.experts.gate_up_proj_scales"
    o, keys, told = "model.layers.1.self_attn.o_proj.weight", [], []
    large = {o: checkpoint[1][o] * 1000}, {experts: checkpoint[1][experts] | 255}, {}
    for changed in ({}, *large):
        save_file(checkpoint[1] | changed, str(tmp_path / "model.safetensors"))
        with simulated_card.on_cpu("sm_90a"):
            config = build_of(host, tmp_path).vllm_config
        told.append(config.additional_config["jitmx_serves"].get("full_scales"))
        keys.append(config.compute_hash())
    assert told == [None, ["model.layers.1.attn.o_proj"], ["model.layers.0.mlp.experts.w13"], None]
    assert keys[0] == keys[3] and len(set(keys)) == 3


def test_kernels_of_an_engine_that_starts_beside_another_do_not_come_late(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: dict[tuple[str, int], Any] = {("first's", 0): None}
    monkeypatch.setattr(load, "_functions", modules)
    monkeypatch.setattr(load, "function", lambda _, device, built: modules.setdefault((built.variant.name, device)))
    monkeypatch.setattr(monitor, "_sealed", None)
    monkeypatch.setattr(monitor, "_seen", 0)
    monkeypatch.setattr(warmup, "_ready", set())
    monitor.seal()
    modules["late", 0] = None
    kernels = warmup.KERNELS.get_warmup_keys(Packer("sm_90a", None, 1, "mxfp4", "rotated"))
    warmup._prepare([warmup.Kernel(kernel.identity, 0, kernel.variant) for kernel in kernels], 0.0)
    monitor.look()
    assert monitor.late() == ("late",) and ("pack.pack", 0) in modules
    assert [message for level, message in host.said if level == "WARNING"] == [
        "jitmx loaded kernels for a request, which warm-up should have had: late"
    ]


def test_an_engine_that_asks_for_no_kernel_is_not_steered_by_one_before_it(host: Any) -> None:
    host.build(additional_config={"jitmx": {"moe_kernel": "gemm"}})
    assert settings.current().value("moe_knobs") == (("kernel", "grouped"),)
    host.build()
    assert settings.current().value("moe_knobs") == () and settings.origin("moe_knobs") == "default"
