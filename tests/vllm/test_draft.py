"""Eagle3 drafts of gpt-oss on jitmx: loaded and built by vLLM, run on simulated kernels, beside plain torch."""

# ruff: noqa: E402

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models import llama_eagle3, registry
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils, utils
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from jitmx import drafts
from jitmx.draft_kernels import TopTokens, of_draft
from jitmx.drafts import Draft
from jitmx.errors import InputError
from jitmx.model_kernels import Linear, variants
from jitmx.vllm import draft as ours
from jitmx.vllm import hooks, speculation
from jitmx.vllm.attention import JitmxAttentionBackend, JitmxAttentionImpl
from jitmx.vllm.linear import JitmxLinearMethod
from scripts.protocol import drafts as checkpoints
from scripts.protocol.checkpoint import round_to_grid
from scripts.protocol.drafts import Bigram
from vllm_world import error

# For the small gpt-oss of these tests: two layers, 64 features, 100 tokens.
SMALL = Draft(
    hidden=64, intermediate=96, layers=1, states=3, target_hidden=64, heads=4, kv_heads=2, head_dim=64,
    vocabulary=100, target_vocabulary=100,
)  # fmt: skip
ALL = {"mxfp4_layers": "moe,lm_head", "draft_layers": "all"}
IDS = (0, 1, 2)


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own classes and functions come back after a test."""
    registry._try_load_model_cls.cache_clear()
    for module, names in (
        (llama_eagle3, ("LlamaDecoderLayer", "Eagle3LlamaForCausalLM", "get_draft_quant_config")),
        (eagle3_utils, ("get_eagle3_aux_layers_from_config",)), (utils, ("_should_share",)),
        (EagleSpeculator, ("load_draft_model",)),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))


def written(folder: Path, sizes: Draft = SMALL, **more: Any) -> Path:
    return checkpoints.write(folder / "draft", sizes, IDS, **more).folder


def speculative(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2, **more}


def built(host: Any, folder: Path, options: dict[str, Any] | None = None, **more: Any) -> tuple[Any, Any]:
    """A target and its draft, as vLLM's speculator loads it."""
    asked = {"additional_config": {"jitmx": ALL | (options or {})}, "speculative_config": speculative(folder, **more)}
    model = host.build(load=True, **asked)
    config = model.vllm_config
    speculator = SimpleNamespace(
        vllm_config=config, speculative_config=config.speculative_config, use_acceptance_estimator=False,
        draft_watermarker=None, use_local_argmax_reduction=False,
    )  # fmt: skip
    with vllm_world.world(), set_current_vllm_config(config):
        draft = EagleSpeculator.load_draft_model(speculator, model, set())
    draft.taken = speculator.use_local_argmax_reduction
    for layer in draft.model.layers:
        rope = layer.self_attn.rotary_emb
        rope._forward_method = rope.forward_native
    draft.config_of_engine = config
    return model, draft


class Causal(torch.nn.Module):
    """Attention of one prompt in float32, in the place of vLLM's."""

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.head, self.scaling = attn.head_dim, attn.scaling

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.float().unflatten(-1, (-1, self.head)).transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) * self.scaling).masked_fill(torch.ones(2 * q.shape[1:2]).triu(1).bool(), -1e30)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1).bfloat16()


def plain(tensors: dict[str, torch.Tensor], embeds: torch.Tensor, states: torch.Tensor, sizes: Draft = SMALL) -> Any:
    """Logits and stream of a draft with these weights, rounded to MXFP4, in float64: by torch and transformers."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    def w(name: str) -> torch.Tensor:
        return round_to_grid(tensors[f"{name}.weight"]).double()

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = tensors[f"{name}.weight"].double()
        return torch.nn.functional.rms_norm(x, scale.shape, scale, 1e-5)

    head, layer = sizes.head_dim, "midlayer"
    x = states.double() @ w("fc").T
    joined = torch.cat([rms(embeds.double(), f"{layer}.input_layernorm"), rms(x, f"{layer}.hidden_norm")], -1)
    q, k, v = ((joined @ w(f"{layer}.self_attn.{name}_proj").T).unflatten(-1, (-1, head)).transpose(0, 1)[None]
               for name in "qkv")  # fmt: skip
    rope = LlamaRotaryEmbedding(LlamaConfig(head_dim=head, rope_theta=150000.0, max_position_embeddings=512))
    cos, sin = rope(x.double(), torch.arange(len(x))[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = (t.repeat_interleave(sizes.heads // sizes.kv_heads, 1) for t in (k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
    x = x + attended @ w(f"{layer}.self_attn.o_proj").T
    y = rms(x, f"{layer}.post_attention_layernorm")
    gated = torch.nn.functional.silu(y @ w(f"{layer}.mlp.gate_proj").T) * (y @ w(f"{layer}.mlp.up_proj").T)
    x = x + gated @ w(f"{layer}.mlp.down_proj").T
    return rms(x, "norm") @ w("lm_head").T, x


def run(draft: Any, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a draft makes of a prompt: as vLLM hands it on to its head, and to the next step."""
    for layer in draft.model.layers:
        layer.self_attn.attn = Causal(layer.self_attn)
    context = set_forward_context(None, draft.config_of_engine, num_tokens=len(tokens))
    with vllm_world.world(), torch.no_grad(), context:
        mixed = draft.combine_hidden_states(states)
        found: tuple[torch.Tensor, torch.Tensor] = draft(tokens, torch.arange(len(tokens)), mixed)
        return found


def methods(draft: Any) -> dict[str, Any]:
    layer = draft.model.layers[0]
    return {
        "qkv": layer.self_attn.qkv_proj.quant_method, "o": layer.self_attn.o_proj.quant_method,
        "gate_up": layer.mlp.gate_up_proj.quant_method, "down": layer.mlp.down_proj.quant_method,
        "fc": draft.model.fc.quant_method, "lm_head": draft.lm_head.quant_method,
    }  # fmt: skip


TOKENS = torch.tensor([3, 14, 15, 92, 65])


def states_of(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 192, generator=torch.Generator().manual_seed(4)).bfloat16()


def test_all_that_is_relied_on_is_as_it_was() -> None:
    assert hooks.moved(hooks.SPECULATION_HOOKS) == [] and len(hooks.SPECULATION_HOOKS) > 8
    assert ours.changed() == ()


@pytest.mark.parametrize("rows", [5, 1])
def test_a_draft_makes_what_torch_makes_of_its_weights(host: Any, tmp_path: Path, rows: int) -> None:
    folder = written(tmp_path)
    with simulated_card.on_cpu("sm_90a") as card:
        model, draft = built(host, folder)
        assert {name: method.format for name, method in methods(draft).items()} == dict.fromkeys(
            methods(draft), "mxfp4"
        )
        assert draft.taken and draft.model.layers[0].jitmx_fused and draft.jitmx_norm is not None
        card.launched.clear()
        last, following = run(draft, TOKENS[:rows], states_of(rows))
        # fc, QKV, O, gate-up, down: no norm in a launch of its own where there is one row
        assert [name.partition(".")[0] for name in card.kernels].count("linear") == 5
        assert card.kernels.count("norm.rms") == (rows > 1)
        card.launched.clear()
        tokens = draft.get_top_tokens(last[-1:])
        assert [variant.knobs.as_dict().get("argmax") for variant in card.launched] == [True]
        logits = draft.compute_logits(last)
    embeds = model.model.embedding.weight.data[TOKENS[:rows]]
    wanted, stream = plain(load_file(folder / "model.safetensors"), embeds, states_of(rows))
    assert error(logits, wanted) < 0.02 and error(following, stream) < 0.02
    assert tokens.tolist() == wanted[-1:].argmax(-1).tolist() and tokens.dtype is torch.int64
    said = [text for level, text in host.said if "draft" in text]
    assert "jitmx serves the draft's fc in mxfp4 on sm_90a (by additional_config's draft_layers)" in said
    assert "jitmx takes the draft's tokens from its head, without logits" in said


def test_fused_and_stock_layers_make_the_same(host: Any, tmp_path: Path) -> None:
    folder, found = written(tmp_path), {}
    for fuse in (True, False):
        with simulated_card.on_cpu("sm_90a"):
            _, draft = built(host, folder, {"fuse_norm": fuse})
            assert draft.model.layers[0].jitmx_fused is fuse and (draft.jitmx_norm is not None) is fuse
            last, _ = run(draft, TOKENS, states_of())
            found[fuse] = draft.compute_logits(last), draft.get_top_tokens(last)
    assert error(found[True][0], found[False][0].double()) < 0.02
    assert torch.equal(found[True][1], found[True][0].argmax(-1))


def test_the_tokens_of_a_reduced_vocabulary_are_the_targets(host: Any, tmp_path: Path) -> None:
    folder = written(tmp_path, replace(SMALL, vocabulary=72))
    d2t = load_file(folder / "model.safetensors")["d2t"]
    with simulated_card.on_cpu("sm_90a"):
        _, draft = built(host, folder)
        last, _ = run(draft, TOKENS, states_of())
        tokens, logits = draft.get_top_tokens(last), draft.compute_logits(last)
        own = draft.lm_head.quant_method.apply(draft.lm_head, draft._normed(last))[:, :72].argmax(-1)
    assert torch.equal(tokens, own + d2t[own]) and int(d2t.abs().max()) > 0
    assert logits.shape == (5, 100) and torch.equal(logits.argmax(-1), tokens)


def test_rows_of_padding_are_no_tokens(host: Any, tmp_path: Path) -> None:
    # Of a head with 100 rows 28 are padding, whose logits are zeros: larger than any here.
    folder = written(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = -torch.ones_like(tensors["lm_head.weight"])
    tensors["norm.weight"] = torch.ones_like(tensors["norm.weight"])
    save_file(tensors, folder / "model.safetensors")
    with simulated_card.on_cpu("sm_90a"):
        _, draft = built(host, folder)
        found = draft.get_top_tokens(torch.ones(3, 64, dtype=torch.bfloat16))
    assert draft.lm_head.jitmx_packed[0] == 128 and found.tolist() == [0, 0, 0]


@pytest.mark.parametrize("layers", ["all", "qkv,o"])
def test_a_head_that_repeats_the_targets_is_kept_once(host: Any, tmp_path: Path, checkpoint: Any, layers: str) -> None:
    folder = written(tmp_path)
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": checkpoint[1]["lm_head.weight"]}
    save_file(tensors, folder / "model.safetensors")
    with simulated_card.on_cpu("sm_90a"):
        model, draft = built(host, folder, {"draft_layers": layers})
    assert draft.has_own_lm_head and draft.lm_head is model.lm_head and draft.taken
    assert ("INFO", "the draft's lm_head is the target's: it is kept once, packed") in host.said


def test_a_head_of_other_values_stays_the_drafts(host: Any, tmp_path: Path) -> None:
    with simulated_card.on_cpu("sm_90a"):
        model, draft = built(host, written(tmp_path), {"draft_layers": "fc"})
    assert draft.lm_head is not model.lm_head and not draft.taken
    assert not isinstance(draft.lm_head.quant_method, JitmxLinearMethod)


def test_a_draft_without_a_head_has_the_targets_packed_where_that_is_in_bf16(host: Any, tmp_path: Path) -> None:
    folder = written(tmp_path, head=False)
    with simulated_card.on_cpu("sm_90a"):
        model, draft = built(host, folder, {"mxfp4_layers": "moe"})
        last, _ = run(draft, TOKENS, states_of())
        tokens, logits = draft.get_top_tokens(last), draft.compute_logits(last)
    assert draft.lm_head is not model.lm_head and draft.taken
    assert isinstance(draft.lm_head.quant_method, JitmxLinearMethod)
    assert not isinstance(model.lm_head.quant_method, JitmxLinearMethod) and model.lm_head.weight.shape == (128, 64)
    assert torch.equal(tokens, logits.argmax(-1))


def test_a_draft_that_nobody_asked_for_stays_with_vllm(host: Any, tmp_path: Path) -> None:
    with simulated_card.on_cpu("sm_90a"):
        _, draft = built(host, written(tmp_path), {"draft_layers": "none"})
    assert not any(isinstance(method, JitmxLinearMethod) for method in methods(draft).values()) and not draft.taken
    assert isinstance(methods(draft)["fc"], UnquantizedLinearMethod)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method=probabilistic"),
    ],
)
def test_logits_that_something_asks_for_are_written(host: Any, tmp_path: Path, more: dict[str, Any], why: str) -> None:
    with simulated_card.on_cpu("sm_90a"):
        _, draft = built(host, written(tmp_path), **more)
    assert not draft.taken and ("INFO", f"the draft's logits are written: {why}") in host.said


def test_the_kernels_of_a_draft_that_vllm_asks_for_are_those_of_warm_up(host: Any, tmp_path: Path) -> None:
    folder = written(tmp_path)
    with simulated_card.on_cpu("sm_90a"):
        _, draft = built(host, folder)
    config = draft.config_of_engine
    from jitmx import arch

    served = dict.fromkeys(methods(draft), "mxfp4")
    tokens, requests = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
    made = of_draft(drafts.find(str(folder)), arch.parse("sm_90"), served, tokens=tokens, requests=requests)
    products = {replace(item, device=None) for item in host.warmed if isinstance(item, Linear | TopTokens)}
    assert {item for item in made if isinstance(item, Linear | TopTokens)} <= products
    (own,) = (item for item in made if isinstance(item, TopTokens))
    assert own.norm and {variant.spec.family for variant in variants(own)} == {"linear", "norm"}


class Ring:
    """The bigram pair served as vLLM serves it: the draft's states are the target's, its attention jitmx's."""

    def __init__(self, pair: Bigram, host: Any, folder: Path, **more: Any) -> None:
        pair.write(folder / "target", folder / "draft", **more)
        host.folder = folder / "target"
        self.pair = pair
        self.target, self.draft = built(host, folder / "draft", {"attention": True})
        (self.layer,) = self.draft.model.layers
        self.config = self.draft.config_of_engine
        attn = self.layer.self_attn.attn
        with vllm_world.world(), set_current_vllm_config(self.config):
            spec = attn.get_kv_cache_spec(self.config)
            self.builder = JitmxAttentionBackend.get_builder_cls()(
                spec, [attn.layer_name], self.config, torch.device("cpu")
            )
        attn.kv_cache = torch.zeros(4, attn.num_kv_heads, 16, 2 * 64, dtype=torch.bfloat16)

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of the target, which the draft was made for: a feature a token, one of all, and one of each layer passed."""
        pair, wide = self.pair, torch.zeros(len(tokens), 3, self.pair.hidden)
        for place, layer in enumerate(pair.layer_ids):
            wide[range(len(tokens)), place, tokens] = 1
            wide[:, place, pair.one : pair.one + 1 + layer] = 1
        return wide.flatten(1).bfloat16()

    def step(self, tokens: torch.Tensor, hidden: torch.Tensor, old: int) -> tuple[torch.Tensor, torch.Tensor]:
        attn, count = self.layer.self_attn.attn, len(tokens)
        positions = torch.arange(old, old + count)
        starts, lengths = torch.tensor([0, count]).int(), torch.tensor([old + count]).int()
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=1, num_actual_tokens=count,
            max_query_len=count, max_seq_len=old + count, block_table_tensor=torch.tensor([[1, 2]]).int(),
            slot_mapping=16 + positions,
        )  # fmt: skip
        metadata = {attn.layer_name: self.builder.build(0, common)}
        slots = {attn.layer_name: 16 + positions}
        context = set_forward_context(metadata, self.config, num_tokens=count, slot_mapping=slots)
        with vllm_world.world(), torch.no_grad(), context:
            found: tuple[torch.Tensor, torch.Tensor] = self.draft(tokens, positions, hidden)
            return found

    def drafted(self, ids: torch.Tensor, states: torch.Tensor, steps: int = 2) -> list[int]:
        """Tokens that follow `ids`, of which the last was sampled: by the loop of vLLM's speculator."""
        with torch.no_grad():
            last, following = self.step(ids[1:], self.draft.combine_hidden_states(states), 0)
        tokens = [self.draft.get_top_tokens(last[-1:])]
        for number in range(1, steps):
            last, following = self.step(tokens[-1], following[-1:], len(ids) - 2 + number)
            tokens.append(self.draft.get_top_tokens(last))
        return [int(token) for token in tokens]


PAIR = Bigram(tokens=80, vocabulary=96, layers=4)


@pytest.fixture
def ring(host: Any, tmp_path: Path) -> Callable[..., Ring]:
    return lambda **more: Ring(PAIR, host, tmp_path / "pair", **more)


def test_a_draft_that_knows_the_target_says_what_follows_and_wrong_states_spoil_it(ring: Callable[..., Ring]) -> None:
    with simulated_card.on_cpu("sm_90a") as card:
        made = ring(reduced_vocabulary=True)
        assert isinstance(made.layer.self_attn.attn.impl, JitmxAttentionImpl) and made.layer.jitmx_rotates
        order = torch.from_numpy(PAIR.ring)
        ids = order[:5]
        card.launched.clear()
        found = made.drafted(ids, made.states(ids[:-1]), steps=3)
        assert card.kernels.count("attention.decode") == 3
        assert found == order[5:8].tolist()
        # Behind another token than the one whose states they are; and in front of other layers.
        late = made.states(ids[:-1])
        late = late.roll(PAIR.hidden, 1)
        assert made.drafted(ids, late, steps=1) != order[5:6].tolist()
    assert made.draft.taken


def test_wrong_rows_of_d2t_are_so_many_wrong_tokens(ring: Callable[..., Ring]) -> None:
    with simulated_card.on_cpu("sm_90a"):
        made = ring(reduced_vocabulary=True, wrong=0.25)
        order = torch.from_numpy(PAIR.ring)
        states = torch.zeros(80, PAIR.hidden, dtype=torch.bfloat16)
        states[range(80), order] = 4
        right = made.draft.get_top_tokens(states) == order.roll(-1)
    assert int(right.sum()) == 60


def test_the_target_of_the_pair_goes_round_its_ring() -> None:
    tensors, order = PAIR.target_tensors(), torch.from_numpy(PAIR.ring)
    state = tensors["model.embed_tokens.weight"][order].float()
    for layer in range(PAIR.layers):
        state += tensors[f"model.layers.{layer}.self_attn.o_proj.bias"].float()
    logits = state @ tensors["lm_head.weight"].float().T
    assert torch.equal(logits.argmax(-1), order.roll(-1))
    top = logits.topk(2, -1).values
    assert bool((top[:, 0] - top[:, 1] >= 1).all())


NESTED = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (NESTED, (1, 17, 32)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}, (1, 17, 32)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 17, 32], **NESTED}, (1, 17, 32)),
        ({"eagle_aux_hidden_state_layer_ids": [32], "num_aux_hidden_states": 1}, (32,)),
        ({}, None),
        ({"eagle_config": None}, None),
    ],
)
def test_aux_layers_are_read_where_checkpoints_have_them(said: dict[str, Any], wanted: Any) -> None:
    assert speculation.aux_layers(SimpleNamespace(**said), 36) == wanted


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 17, 37]}, "0 to 36"),
        ({"eagle_aux_hidden_state_layer_ids": [17, 1, 32]}, "in order"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 32]}, "in order"),
        ({"eagle_aux_hidden_state_layer_ids": "1,17,32"}, "must be numbers"),
        ({"eagle_aux_hidden_state_layer_ids": []}, "must be numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [True, 2, 3]}, "must be numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33], **NESTED}, "two choices"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18]}, "fc reads the states of 3"),
    ],
)
def test_aux_layers_that_cannot_be_right_are_refused(said: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        speculation.aux_layers(SimpleNamespace(**said), 36)


@pytest.mark.parametrize("nested", [True, False])
def test_vllm_takes_the_layers_that_a_checkpoint_names(host: Any, tmp_path: Path, nested: bool) -> None:
    model = host.build(speculative_config=speculative(written(tmp_path, nested=nested)))
    eagle3_utils.set_eagle3_aux_hidden_state_layers(model, model.vllm_config.speculative_config)
    assert model.model.aux_hidden_state_layers == IDS


def test_a_draft_that_names_no_layers_gets_vllms_with_a_warning(host: Any, tmp_path: Path) -> None:
    folder = written(tmp_path)
    about = json.loads((folder / "config.json").read_text())
    del about["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(about))
    model = host.build(speculative_config=speculative(folder))
    found = eagle3_utils.get_eagle3_aux_layers_from_config(model.vllm_config.speculative_config)
    assert found is None and any(level == "WARNING" and "names no eagle_aux" in text for level, text in host.said)


def test_where_a_hook_has_moved_vllm_serves_the_draft(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = hooks.Hook("vllm.model_executor.models.llama_eagle3", "Eagle3LlamaForCausalLM.gone")
    monkeypatch.setattr(hooks, "SPECULATION_HOOKS", (*hooks.SPECULATION_HOOKS, gone))
    asked = speculative(written(tmp_path))
    with simulated_card.on_cpu("sm_90a"):
        model = host.build(load=True, additional_config={"jitmx": ALL}, speculative_config=asked)
        with vllm_world.world(), set_current_vllm_config(model.vllm_config):
            draft = load_eagle_model(model, model.vllm_config)
    assert type(draft) is llama_eagle3.Eagle3LlamaForCausalLM and get_draft_quant_config(model.vllm_config) is None
    assert any(level == "WARNING" and "gone is gone" in text for level, text in host.said)
