"""Experts' weights in vLLM's loader: whose memory they take, how ranks split them, and what they are packed to."""

# ruff: noqa: E402

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

vllm_world = pytest.importorskip("vllm_world")

from hypothesis import given
from hypothesis import strategies as st

import jitmx
import simulated_card
from jitmx.errors import InputError
from jitmx.ops.moe.experts import PackedExperts
from jitmx.serving.experts import Experts
from jitmx.serving.linear import Linear, Packer
from jitmx.vllm import moe, packing
from jitmx.vllm.packing import make_room, pack_layer
from vllm_ranks import TESTS, Ranks

Checkpoint = tuple[Path, dict[str, torch.Tensor]]


def raw(tensors: dict[str, torch.Tensor], layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a checkpoint's experts."""
    prefix = f"model.layers.{layer}.mlp.experts.{name}"
    return tensors[f"{prefix}_blocks"].flatten(2), tensors[f"{prefix}_scales"]


def same(found: PackedExperts, wanted: PackedExperts) -> bool:
    return (
        torch.equal(found.words, wanted.words)
        and torch.equal(found.scales, wanted.scales)
        and (found.n, found.k, found.encoding, found.scale_range)
        == (wanted.n, wanted.k, wanted.encoding, wanted.scale_range)
    )


def test_a_checkpoint_is_loaded_and_packed(host: Any, checkpoint: Checkpoint) -> None:
    model = host.build(load=True)
    for index, block in enumerate(model.model.layers):
        layer = block.mlp.experts.routed_experts
        for packed, name, parameter in zip(
            layer.quant_method._experts(layer), ("gate_up_proj", "down_proj"), ("w13", "w2"), strict=True
        ):
            assert same(packed, jitmx.pack_experts(raw(checkpoint[1], index, name), encoding="rotated"))
            assert packed.words.data_ptr() == getattr(layer, f"{parameter}_weight").data_ptr()
        assert torch.equal(layer.w13_bias, checkpoint[1][f"model.layers.{index}.mlp.experts.gate_up_proj_bias"])
    # Of each layer, what packs it and what serves it.
    assert [type(asked) for asked in host.warmed] == [Packer, Experts] * 2 and len(set(host.warmed)) == 2


def reloaded(model: Any, changed: dict[str, torch.Tensor]) -> None:
    """Weights loaded into a model that serves, layer by layer, as vLLM does."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    with vllm_world.world(), set_current_vllm_config(model.vllm_config), torch.no_grad():
        reload.initialize_layerwise_reload(model)
        model.load_weights(iter(changed.items()))
        reload.finalize_layerwise_reload(model, model.vllm_config.model_config)


def test_reloaded_experts_take_the_places_of_the_first_and_leave_no_copy(
    host: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = host.build(load=True)
    made: list[Any] = []
    layers = [block.mlp.experts.routed_experts for block in model.model.layers]
    names = [f"{name}_{part}" for name in ("w13", "w2") for part in ("weight", "weight_scale")]
    before = [[getattr(layer, name).data_ptr() for name in names] for layer in layers]

    def pack(layer: Any, name: str, encoding: str) -> PackedExperts:
        packed = pack_layer(layer, name, encoding)
        made.extend(weakref.ref(tensor.untyped_storage()) for tensor in (packed.words, packed.scales))
        return packed

    monkeypatch.setattr(moe, "pack_layer", pack)
    changed = {name: t ^ 5 if name.endswith("_blocks") else t for name, t in checkpoint[1].items()}
    reloaded(model, changed)
    gc.collect()
    assert len(made) == 8 and not any(storage() is not None for storage in made)
    assert [[getattr(layer, name).data_ptr() for name in names] for layer in layers] == before
    for index, layer in enumerate(layers):
        for packed, name in zip(layer.quant_method._experts(layer), ("gate_up_proj", "down_proj"), strict=True):
            assert same(packed, jitmx.pack_experts(raw(changed, index, name), encoding="rotated"))


def test_reloaded_experts_beyond_what_the_kernels_in_use_take_are_refused(host: Any, checkpoint: Checkpoint) -> None:
    model = host.build(load=True)
    changed = {name: t.index_fill(0, torch.tensor(1), 255) if name.endswith("_scales") else t
               for name, t in checkpoint[1].items()}  # fmt: skip
    with pytest.raises(InputError, match=r"layers.0.mlp.experts.*: a reloaded weight has scales outside 2 to 128"):
        reloaded(model, changed)


def test_layers_with_kernels_for_all_scales_are_reloaded_with_any_weights(host: Any, checkpoint: Checkpoint) -> None:
    changed = {name: t.index_fill(0, torch.tensor(1), 255) if name.endswith("_scales") else t
               for name, t in checkpoint[1].items()}  # fmt: skip
    with simulated_card.on_cpu("sm_90a"):
        model = host.build(load=True, additional_config={"jitmx": {"mxfp4_layers": "all", "all_scales": True}})
        layers = [block.mlp.experts.routed_experts for block in model.model.layers]
        before = [layer.w13_weight.data_ptr() for layer in layers]
        # Every layer tells kernels and compiled code that scales may be any, from the first weights on.
        dense = [block.attn.qkv_proj for block in model.model.layers] + [model.lm_head]
        layouts = [layout for layer in layers for layout in layer.jitmx_packed[2:]]
        layouts += [layer.jitmx_packed[2] for layer in dense]
        assert len(layouts) == 7 and all(layout.endswith("/full") for layout in layouts)
        asked = [one.scale_range for one in host.warmed if isinstance(one, Experts | Linear)]
        assert set(asked) == {"full"}
        reloaded(model, changed)
    assert [layer.w13_weight.data_ptr() for layer in layers] == before
    for index, layer in enumerate(layers):
        for packed, name in zip(layer.quant_method._experts(layer), ("gate_up_proj", "down_proj"), strict=True):
            assert same(packed, jitmx.pack_experts(raw(changed, index, name), encoding="rotated"))


class Layer(torch.nn.Module):
    """Parameters of a layer as vLLM's loader leaves them."""

    def __init__(self, experts: int, n: int, k: int, low: int = 120) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(experts * n + k)

        def parameter(least: int, most: int, width: int) -> torch.nn.Parameter:
            values = torch.randint(least, most, (experts, n, width), generator=generator, dtype=torch.uint8)
            return torch.nn.Parameter(values, requires_grad=False)

        self.w2_weight, self.w2_weight_scale = parameter(0, 256, k // 2), parameter(low, 128, k // 32)

    def with_room(self) -> Layer:
        """The same, in the memory that it takes when packed."""
        loaded = self.w2_weight.data, self.w2_weight_scale.data
        self.w2_weight.weight_loader = "vLLM's"
        make_room(self, "w2")
        assert self.w2_weight.weight_loader == "vLLM's"
        for parameter, values in zip((self.w2_weight, self.w2_weight_scale), loaded, strict=True):
            parameter.data.copy_(values)
        return self


@given(
    st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.sampled_from(["rotated", "nibble"]), st.integers(1, 3)
)
def test_packing_in_place_is_packing(experts: int, n: int, blocks: int, encoding: str, at_once: int) -> None:
    layer = Layer(experts, n, 32 * blocks).with_room()
    where = layer.w2_weight.data_ptr(), layer.w2_weight_scale.data_ptr()
    wanted = jitmx.pack_experts((layer.w2_weight.data.clone(), layer.w2_weight_scale.data.clone()), encoding=encoding)
    before = packing._AT_ONCE
    packing._AT_ONCE = at_once * n * 16 * blocks  # so many experts at a time
    try:
        assert same(pack_layer(layer, "w2", encoding), wanted)
    finally:
        packing._AT_ONCE = before
    assert torch.equal(layer.w2_weight, wanted.words) and torch.equal(layer.w2_weight_scale, wanted.scales)
    assert (layer.w2_weight.data_ptr(), layer.w2_weight_scale.data_ptr()) == where


def test_parameters_without_room_are_packed_into_new_memory() -> None:
    whole, ragged = Layer(3, 32, 128), Layer(3, 33, 96)
    where = whole.w2_weight.data_ptr(), ragged.w2_weight.data_ptr()
    wanted = jitmx.pack_experts((ragged.w2_weight.data.clone(), ragged.w2_weight_scale.data.clone()))
    pack_layer(whole, "w2", "rotated")
    assert same(pack_layer(ragged, "w2", "rotated"), wanted)
    assert whole.w2_weight.data_ptr() == where[0] and ragged.w2_weight.data_ptr() != where[1]


def test_scales_of_every_size_are_seen_in_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_AT_ONCE", 1)
    assert pack_layer(Layer(3, 32, 64), "w2", "rotated").scale_range == "normal"
    layer = Layer(3, 32, 64)
    layer.w2_weight_scale.data[0, 0, 0] = 0
    assert pack_layer(layer, "w2", "rotated").scale_range == "full"


_RANK = """
import os, sys
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
sys.path.insert(0, sys.argv[1])
rank, meeting, folder = int(sys.argv[2]), sys.argv[3], sys.argv[4]
import torch, vllm_world
torch.accelerator.empty_cache = lambda: None
import jitmx.vllm
from jitmx import arch
from jitmx.vllm import ahead, facts, moe, warmup
facts.target = lambda: (arch.parse("sm_90"), "")
warmup.prepare = ahead.begin = lambda needed: None
jitmx.vllm.register()
kept, pack = {}, moe.pack_layer
def keep(layer, name, encoding):
    kept[name] = getattr(layer, name + "_weight").data.clone(), getattr(layer, name + "_weight_scale").data.clone()
    packed = pack(layer, name, encoding)
    kept[name + "_range"] = packed.scale_range
    return packed
moe.pack_layer = keep
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
config = EngineArgs(model=folder, dtype="bfloat16", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True,
                    tensor_parallel_size=2, distributed_executor_backend="mp").create_engine_config()
config.parallel_config.rank = rank
with vllm_world.world(rank, 2, meeting), set_current_vllm_config(config):
    model = get_model(vllm_config=config)
    layer = model.model.layers[1].mlp.experts.routed_experts
    def save(name):
        kept["biases"] = layer.w13_bias.data, layer.w2_bias.data
        torch.save(kept, f"{folder}/{name}{rank}.pt")
    save("loaded")
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload import meta
    empty = meta.materialize_meta_tensor
    meta.materialize_meta_tensor = lambda like: empty(like).fill_(85)  # memory that was another's
    with torch.no_grad():
        reload.initialize_layerwise_reload(model)
        model.load_weights(iter(load_file(f"{folder}/model.safetensors").items()))
        reload.finalize_layerwise_reload(model, config.model_config)
    save("reloaded")
"""


def test_two_ranks_split_the_experts_by_whole_blocks_whenever_they_are_loaded(
    host: Any, ranks: Ranks, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, tensors = checkpoint
    meeting = str(tmp_path / "meeting")
    ranks.run(_RANK, [[str(TESTS), str(rank), meeting, str(folder)] for rank in range(2)], tmp_path)
    for name in ("loaded", "reloaded"):
        check_shards([torch.load(folder / f"{name}{rank}.pt") for rank in range(2)], tensors)


def check_shards(found: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> None:
    """What two ranks have of the second layer is the checkpoint's, and nothing past its end."""
    (up, up_scales), (down, down_scales) = (raw(tensors, 1, name) for name in ("gate_up_proj", "down_proj"))
    bias = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"]
    # 96 pairs are three blocks: two for the first rank and one for the second, whose last 32 pairs are nothing.
    for rank, start, pairs in ((0, 0, 64), (1, 64, 32)):
        (w13, scales13), (w2, scales2) = found[rank]["w13"], found[rank]["w2"]
        assert w13.shape[1] == 128 and w2.shape[2] == 32
        rows, columns = slice(2 * start, 2 * (start + pairs)), slice(start // 2, (start + pairs) // 2)
        assert torch.equal(w13[:, : 2 * pairs], up[:, rows]) and not w13[:, 2 * pairs :].any()
        assert torch.equal(scales13[:, : 2 * pairs], up_scales[:, rows]) and (scales13[:, 2 * pairs :] == 127).all()
        assert torch.equal(w2[..., : pairs // 2], down[..., columns]) and not w2[..., pairs // 2 :].any()
        blocks = slice(start // 32, (start + pairs) // 32)
        assert torch.equal(scales2[..., : pairs // 32], down_scales[..., blocks])
        assert (scales2[..., pairs // 32 :] == 127).all()
        assert found[rank]["w13_range"] == found[rank]["w2_range"] == "normal"
        b13, b2 = found[rank]["biases"]
        assert torch.equal(b13[:, : 2 * pairs], bias[:, rows]) and not b13[:, 2 * pairs :].any()
        whole = tensors["model.layers.1.mlp.experts.down_proj_bias"]
        assert torch.equal(b2, whole if rank == 0 else torch.zeros_like(whole))
