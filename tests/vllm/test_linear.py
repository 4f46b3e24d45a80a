"""vLLM's QKV and O projections on packed weights: loaded by vLLM's loaders, quantized, multiplied, reloaded."""

# ruff: noqa: E402

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import oracle
import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

from jitmx.errors import InputError
from jitmx.kernels.linear.layout import pack
from jitmx.kernels.linear.mxfp8 import pack_mxfp8
from jitmx.ops.linear import operand
from jitmx.serving import rounded_inputs
from jitmx.vllm import linear
from jitmx.vllm.linear import JitmxLinearMethod, refusal
from vllm_ranks import TESTS, Ranks

HIDDEN, HEAD, HEADS, KV_HEADS = 96, 32, 4, 2
ROWS = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
FORMATS = ("mxfp4", "mxfp8")
MODEL = SimpleNamespace(dtype=torch.bfloat16, quantization=None, word_embeddings_untied_by_checkpoint=False)

Floats = npt.NDArray[np.float64]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """A rank of one, and a bf16 model being built."""
    with vllm_world.world():
        yield


class Config:
    """A quantization config that gives every layer jitmx's method, or vLLM's."""

    online_quantization_config = None

    def __init__(self, format: str | None, all_scales: bool = False, activation: str = "none") -> None:
        super().__init__()
        self.format, self.all_scales, self.activation = format, all_scales, activation

    def get_quant_method(self, _layer: torch.nn.Module, prefix: str) -> Any:
        if self.format is None:
            return UnquantizedLinearMethod()
        return JitmxLinearMethod(self.format, prefix, all_scales=self.all_scales, activation=self.activation)


def qkv_proj(format: str | None, **more: Any) -> QKVParallelLinear:
    return QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, quant_config=Config(format), prefix="a.qkv_proj", **more)


def o_proj(format: str | None, k: int = HEADS * HEAD, **more: Any) -> RowParallelLinear:
    return RowParallelLinear(k, HIDDEN, quant_config=Config(format), prefix="a.o_proj", **more)


def checkpoint(seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Weights and biases by the names of a checkpoint, with blocks of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {**{name: (n, HIDDEN) for name, n in ROWS.items()}, "o": (HIDDEN, HEADS * HEAD)}
    tensors = {}
    for name, (n, k) in sizes.items():
        spread = torch.exp2(torch.randint(-6, 4, (n, k // 32, 1), generator=generator))
        values = torch.randn(n, k // 32, 32, generator=generator) * spread * scale
        tensors[f"{name}.weight"] = values.view(n, k).bfloat16()
        tensors[f"{name}.bias"] = torch.randn(n, generator=generator).bfloat16()
    return tensors


def parts(layer: torch.nn.Module) -> str:
    """What a layer is made of, as a checkpoint names it."""
    return "qkv" if isinstance(layer, QKVParallelLinear) else "o"


def load(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """As a model's load_weights does: parameters are looked up once, and loaded through their own loaders."""
    parameters = dict(layer.named_parameters())
    for name in parts(layer):
        for kind in ("weight", "bias"):
            parameter, shard = parameters[kind], () if name == "o" else (name,)
            parameter.weight_loader(parameter, tensors[f"{name}.{kind}"], *shard)


def whole(tensors: dict[str, torch.Tensor], names: str, kind: str) -> torch.Tensor:
    return torch.cat([tensors[f"{name}.{kind}"] for name in names])


def wide(tensor: torch.Tensor) -> Floats:
    return tensor.detach().float().numpy().astype(np.float64)


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str) -> Floats:
    """The product in float64, with what the codes of the weight stand for."""
    values = oracle.dequantize(*oracle.quantize(wide(weight), format), format)
    return wide(x) @ values.T + (0 if bias is None else wide(bias))


@pytest.fixture(params=["qkv", "o"])
def make(request: pytest.FixtureRequest) -> Callable[[str | None], torch.nn.Module]:
    return {"qkv": qkv_proj, "o": o_proj}[request.param]


@pytest.mark.parametrize("format", FORMATS)
def test_the_packed_weight_is_what_the_format_makes_of_the_checkpoint(format: str, make: Any) -> None:
    tensors, layer = checkpoint(0), make(format)
    with simulated_card.on_cpu():
        load(layer, tensors)
    names = parts(layer)
    codes, scales = oracle.quantize(wide(whole(tensors, names, "weight")), format)
    words, packed = pack(codes, scales, "rotated") if format == "mxfp4" else pack_mxfp8(codes, scales)
    assert np.array_equal(layer.weight_packed.numpy().view(np.uint32), words)
    assert np.array_equal(layer.weight_scale.numpy().view(np.uint32), packed)
    assert torch.equal(layer.bias, whole(tensors, names, "bias"))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_gives_the_product_of_the_quantized_weight(format: str, rows: int, make: Any) -> None:
    tensors, layer = checkpoint(1), make(format)
    names = parts(layer)
    with simulated_card.on_cpu() as card:
        load(layer, tensors)
        x = torch.randn(rows, layer.input_size, generator=torch.Generator().manual_seed(rows)).bfloat16()
        y, bias = layer(x)
    assert bias is None and y.dtype is torch.bfloat16
    wanted = expected(x, whole(tensors, names, "weight"), whole(tensors, names, "bias"), format)
    assert oracle.relative_l2(wide(y), wanted) < 0.005
    assert [variant.spec.family for variant in card.launched] == ["quantize", "linear"]


def test_rows_that_do_not_follow_one_another_are_brought_together() -> None:
    tensors, layer = checkpoint(1), o_proj("mxfp4")
    with simulated_card.on_cpu():
        load(layer, tensors)
        x = torch.randn(3, 2 * HEADS * HEAD).bfloat16()[:, ::2]
        y, _ = layer(x)
    assert oracle.relative_l2(wide(y), expected(x, tensors["o.weight"], tensors["o.bias"], "mxfp4")) < 0.005


def graph_of(module: torch.nn.Module, *inputs: torch.Tensor, **how: Any) -> list[str]:
    """Operators of the one graph that torch.compile makes of a module, which is not run."""
    found: list[str] = []

    class Seen(Exception):
        pass

    def backend(graph: Any, _inputs: Any) -> Any:
        targets = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        found.extend(target.removeprefix("torch.ops.") for target in targets)
        raise Seen

    torch.compiler.reset()
    with pytest.raises(Exception, match="Seen"):
        torch.compile(module, fullgraph=True, backend=backend, **how)(*inputs)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_layer_is_one_graph_with_one_operator(make: Any, dynamic: bool) -> None:
    layer = make("mxfp4")
    with simulated_card.on_cpu():
        load(layer, checkpoint(2))
    assert graph_of(layer, torch.zeros(3, layer.input_size), dynamic=dynamic) == ["jitmx.linear"]


def test_compiled_code_gives_what_eager_code_does(make: Any) -> None:
    layer = make("mxfp4")
    torch.compiler.reset()
    compiled = torch.compile(lambda x: layer(x)[0] * 2, fullgraph=True, backend="aot_eager")
    with simulated_card.on_cpu(), torch.inference_mode():
        load(layer, checkpoint(2))
        x = torch.randn(3, layer.input_size).bfloat16()
        assert torch.equal(compiled(x), layer(x)[0] * 2)


def test_no_bf16_weight_exists_before_loading_or_after(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = make("mxfp4"), []
    assert layer.weight.is_meta
    real = linear.pack

    def watched(weight: torch.Tensor, format: str) -> Any:
        seen.append(weakref.ref(weight.untyped_storage()))
        seen.append(weight.shape)
        return real(weight, format)

    monkeypatch.setattr(linear, "pack", watched)
    with simulated_card.on_cpu():
        load(layer, checkpoint(3))
    gc.collect()
    storage, shape = seen
    assert shape == (layer.output_size, layer.input_size) and storage() is None
    held = {name: parameter.numel() for name, parameter in layer.named_parameters() if name != "bias"}
    assert held.pop("weight") == 1
    k, n = -(-layer.input_size // 64) * 64, layer.output_size
    assert held == {"weight_packed": n * k // 8, "weight_scale": n * k // 128}


def test_a_layer_is_packed_when_its_last_tensor_has_come(make: Any) -> None:
    layer, tensors = make("mxfp4"), checkpoint(3)
    names = [name for name in tensors if name[0] in parts(layer)]
    parameters = dict(layer.named_parameters())
    with simulated_card.on_cpu():
        for name in names:
            assert not hasattr(layer, "weight_packed")
            shard, kind = name.split(".")
            parameter = parameters[kind]
            parameter.weight_loader(parameter, tensors[name], *(() if shard == "o" else (shard,)))
    assert hasattr(layer, "weight_packed")


def test_what_is_left_of_the_weight_tells_dtype_and_device_and_fails_who_uses_it(make: Any) -> None:
    layer, tensors = make("mxfp4"), checkpoint(4)
    with simulated_card.on_cpu():
        load(layer, tensors)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.bfloat16, "cpu")
    assert not torch.equal(layer.weight, layer.weight.clone())
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(torch.zeros(2, layer.input_size), layer.weight)
    with pytest.raises((RuntimeError, AssertionError)):
        load(layer, tensors)


def test_all_that_vllm_does_after_loading_leaves_a_packed_layer_alone(make: Any) -> None:
    layer = make("mxfp4")
    with simulated_card.on_cpu() as card:
        load(layer, checkpoint(5))
        before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in layer.named_parameters()}
        model = torch.nn.Sequential(layer)
        reload.finalize_layerwise_processing(model, MODEL)
        process_weights_after_loading(model, MODEL, torch.device("cpu"))
    assert [variant.spec.family for variant in card.launched] == ["quantize"]
    for name, (address, values) in before.items():
        now = getattr(layer, name)
        assert now.data_ptr() == address and (name == "weight" or torch.equal(now, values))


def reload_weights(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """As vLLM reloads a model in place."""
    model = torch.nn.Sequential(layer)
    reload.initialize_layerwise_reload(model)
    load(layer, tensors)
    reload.finalize_layerwise_reload(model, MODEL)


@pytest.mark.parametrize("format", FORMATS)
def test_reloaded_weights_take_the_places_that_cuda_graphs_know(format: str, make: Any) -> None:
    layer, first, second = make(format), checkpoint(6), checkpoint(7)
    reload.record_metadata_for_reloading(torch.nn.Sequential(layer))
    names = parts(layer)
    x = torch.randn(2, layer.input_size).bfloat16()
    with simulated_card.on_cpu():
        load(layer, first)
        before = [getattr(layer, name).data_ptr() for name in ("weight_packed", "weight_scale", "bias")]
        layer(x)
        reload_weights(layer, second)
        assert [getattr(layer, name).data_ptr() for name in ("weight_packed", "weight_scale", "bias")] == before
        y, _ = layer(x)
    wanted = expected(x, whole(second, names, "weight"), whole(second, names, "bias"), format)
    assert oracle.relative_l2(wide(y), wanted) < 0.005
    assert layer.weight.numel() == 1


def test_rows_of_reloaded_weights_are_looked_at_again_where_products_are_in_e4m3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounded_inputs, "FP8_ROWS", 2)
    config = Config("mxfp4", activation="fp8")
    layer = RowParallelLinear(HEADS * HEAD, HIDDEN, quant_config=config, prefix="a.o_proj")
    reload.record_metadata_for_reloading(torch.nn.Sequential(layer))
    x = torch.randn(3, HEADS * HEAD).bfloat16()
    with simulated_card.on_cpu("sm_90a") as card:
        for seed in (8, 9):  # scales of the second are far below those of the first
            tensors = checkpoint(seed, scale=0.1 if seed == 8 else 0.004)
            (load if seed == 8 else reload_weights)(layer, tensors)
            y, _ = layer(x)
            assert card.kernels[-2:] == ["norm.rows", "linear.wgmma_fp8"]
            wanted = expected(x, tensors["o.weight"], tensors["o.bias"], "mxfp4")
            assert oracle.relative_l2(wide(y), wanted) < 0.05
            assert torch.equal(layer(x[:1])[0], layer(x[:1])[0]) and "norm.rows" not in card.kernels[-2:]


def test_reloaded_weights_beyond_what_the_kernels_in_use_take_are_refused() -> None:
    layer = o_proj("mxfp4")
    reload.record_metadata_for_reloading(torch.nn.Sequential(layer))
    with simulated_card.on_cpu():
        load(layer, checkpoint(8))
        said = r"packed as mxfp4/rotated/full, .* for mxfp4/rotated/normal\. .*JITMX_ALL_SCALES=1"
        with pytest.raises(InputError, match=said):
            reload_weights(layer, checkpoint(8, scale=1000.0))


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_with_kernels_for_all_scales_is_reloaded_with_any_weights(format: str) -> None:
    layer = RowParallelLinear(HEADS * HEAD, HIDDEN, quant_config=Config(format, all_scales=True), prefix="a.o_proj")
    second = checkpoint(8, scale=1000.0)
    reload.record_metadata_for_reloading(torch.nn.Sequential(layer))
    x = torch.randn(2, HEADS * HEAD).bfloat16()
    with simulated_card.on_cpu():
        load(layer, checkpoint(8))
        before = layer.weight_packed.data_ptr(), layer.jitmx_packed
        assert before[1][2].endswith("/full")
        reload_weights(layer, second)
        assert (layer.weight_packed.data_ptr(), layer.jitmx_packed) == before
        y, _ = layer(x)
    assert oracle.relative_l2(wide(y), expected(x, second["o.weight"], second["o.bias"], format)) < 0.005


def test_kernels_for_all_scales_go_on_where_reloaded_weights_need_less() -> None:
    layer, second = o_proj("mxfp4"), checkpoint(8)
    reload.record_metadata_for_reloading(torch.nn.Sequential(layer))
    x = torch.randn(2, HEADS * HEAD).bfloat16()
    with simulated_card.on_cpu():
        load(layer, checkpoint(8, scale=1000.0))
        reload_weights(layer, second)
        assert layer.jitmx_packed == (HIDDEN, HEADS * HEAD, "mxfp4/rotated/full")
        y, _ = layer(x)
    assert oracle.relative_l2(wide(y), expected(x, second["o.weight"], second["o.bias"], "mxfp4")) < 0.005


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("large", [None, 0, -1])
def test_a_large_weight_packed_in_pieces_is_the_weight_packed_at_once(
    format: str, large: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = (torch.randn(90, 64) * 0.1).bfloat16()
    if large is not None:
        weight[large] = 3e5
    with simulated_card.on_cpu() as card:
        at_once = linear.pack(weight, format)
        monkeypatch.setattr(linear, "_VALUES", 32 * 64)
        pieces = linear.pack(weight, format)
    assert len(card.launched) == 1 + 3
    assert torch.equal(pieces.words, at_once.words) and torch.equal(pieces.scales, at_once.scales)
    assert (pieces.shape, operand.layout(pieces)) == (at_once.shape, operand.layout(at_once))
    assert at_once.scale_range == ("normal" if large is None else "full")


def test_random_weights_go_the_same_way(make: Any) -> None:
    layer = make("mxfp4")
    with simulated_card.on_cpu():
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(torch.nn.Sequential(layer), MODEL)
        assert layer.weight.numel() == 1
        assert torch.isfinite(layer(torch.ones(1, layer.input_size))[0]).all()


@pytest.mark.parametrize(
    ("format", "k", "dtype", "said"),
    [
        ("mxfp4", 80, torch.bfloat16, "80 input features a rank are no multiple of 32.*fewer ranks"),
        ("mxfp4", 96, torch.float32, "float32 is neither bfloat16 nor float16; pass --dtype bfloat16"),
    ],
)
def test_a_layer_that_no_kernel_serves_is_refused_as_it_is_built(
    format: str, k: int, dtype: torch.dtype, said: str
) -> None:
    with pytest.raises(InputError, match=rf"a\.o_proj \[96, {k}\]: {said}"):
        o_proj(format, k, params_dtype=dtype)


def test_a_layer_that_vllm_quantizes_itself_is_refused() -> None:
    layer = o_proj(None)
    with pytest.raises(InputError, match=r"a\.o_proj: vLLM quantizes this layer itself .* by --quantization-config"):
        JitmxLinearMethod("mxfp4", "a.o_proj").create_weights(layer, 128, [96], 128, 96, torch.bfloat16)


def test_what_no_kernel_serves_is_said_without_building_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("mxfp4", 2880, torch.bfloat16) is None and refusal("mxfp8", 4096, torch.float16) is None
    assert "is not one of mxfp4, mxfp8" in str(refusal("mxfp6", 2880, torch.bfloat16))
    with pytest.raises(InputError, match="a: format='mxfp6' is not one of mxfp4, mxfp8"):
        JitmxLinearMethod("mxfp6", "a")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT is set" in str(refusal("mxfp4", 2880, torch.bfloat16))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    monkeypatch.setattr(get_current_vllm_config().parallel_config, "enable_dbo", True)
    assert "on two streams" in str(refusal("mxfp4", 2880, torch.bfloat16))


class ModelConfig(Config, QuantizationConfig):
    """The same for a whole model, whose other layers stay as they are."""

    def get_name(self) -> str:
        return "of the test"

    get_supported_act_dtypes = get_min_capability = get_config_filenames = from_config = get_name

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return super().get_quant_method(layer, prefix) if prefix.endswith((".qkv_proj", ".o_proj")) else None


def test_gpt_oss_loads_a_checkpoint_into_packed_layers_and_is_traced_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM keeps these for the process: one of an eager model calls an operator that a machine without a GPU may lack.
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    config = VllmConfig(model_config=vllm_world.model_config(tmp_path))
    config.quant_config = ModelConfig("mxfp4")
    with set_current_vllm_config(config):
        model = GptOssForCausalLM(vllm_config=config)
        generator = torch.Generator().manual_seed(0)
        sizes = {"q_proj": (128, 64), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (64, 128)}
        tensors = {}
        for layer in range(2):
            for name, (n, k) in sizes.items():
                stem = f"model.layers.{layer}.self_attn.{name}"
                tensors[f"{stem}.weight"] = (torch.randn(n, k, generator=generator) * 0.1).bfloat16()
                tensors[f"{stem}.bias"] = torch.randn(n, generator=generator).bfloat16()
        with simulated_card.on_cpu():
            model.load_weights(iter(tensors.items()))
        for layer, block in enumerate(model.model.layers):
            stem = f"model.layers.{layer}.self_attn"
            for packed, names in ((block.attn.qkv_proj, ("q", "k", "v")), (block.attn.o_proj, ("o",))):
                weight = torch.cat([tensors[f"{stem}.{name}_proj.weight"] for name in names])
                words, scales = pack(*oracle.quantize(wide(weight), "mxfp4"), "rotated")
                assert np.array_equal(packed.weight_packed.numpy().view(np.uint32), words)
                assert np.array_equal(packed.weight_scale.numpy().view(np.uint32), scales)
                assert torch.equal(packed.bias, torch.cat([tensors[f"{stem}.{name}_proj.bias"] for name in names]))
        with set_forward_context(None, config), torch.inference_mode():
            found = graph_of(model.model.layers[0].attn, torch.zeros(4, 64), torch.arange(4))
    assert [name for name in found if name.startswith("jitmx.")] == ["jitmx.linear", "jitmx.linear"]


_RANK = """
import sys
import pathlib
import torch
sys.path[:0] = [{tests!r}, {here!r}]
import vllm_world
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
with vllm_world.world(rank, 2, str(folder / "meeting")):
    import test_linear as t
    import simulated_card
    tensors, results = t.checkpoint(9), {{}}
    x = torch.load(folder / "x.pt")
    with simulated_card.on_cpu():
        for format in t.FORMATS:
            qkv, o = t.qkv_proj(format), t.o_proj(format)
            t.load(qkv, tensors)
            t.load(o, tensors)
            results[format, "qkv"] = qkv(x)[0]
            half = t.HEADS * t.HEAD // 2
            results[format, "o"] = o(results[format, "qkv"][:, :half])[0]
    torch.save(results, folder / f"{{rank}}.pt")
"""


def test_two_ranks_share_the_heads_and_add_the_bias_once(ranks: Ranks, tmp_path: Path) -> None:
    tensors = checkpoint(9)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16()
    torch.save(x, tmp_path / "x.pt")
    script = _RANK.format(tests=str(TESTS), here=str(TESTS / "vllm"))
    ranks.run(script, [[str(rank), str(tmp_path)] for rank in range(2)], tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for format in FORMATS:
        qkv = expected(x, whole(tensors, "qkv", "weight"), whole(tensors, "qkv", "bias"), format)
        q, k, v = np.split(qkv, np.cumsum([ROWS["q"], ROWS["k"]]), axis=1)
        for rank, found in enumerate((first, second)):
            mine = [np.split(part, 2, axis=1)[rank] for part in (q, k, v)]
            assert oracle.relative_l2(wide(found[format, "qkv"]), np.concatenate(mine, axis=1)) < 0.005
        assert torch.equal(first[format, "o"], second[format, "o"])
        given = torch.cat([found[format, "qkv"][:, : ROWS["q"] // 2] for found in (first, second)], dim=1)
        wanted = expected(given, tensors["o.weight"], tensors["o.bias"], format)
        assert oracle.relative_l2(wide(first[format, "o"]), wanted) < 0.01  # a sum of two rounded products
