"""vLLM's lm_head on a packed weight: which heads get one, and what vLLM then makes of it."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
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

from vllm.compilation.backends import set_model_tag
from vllm.config import LoRAConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.online.lm_head import quantized_lm_head_copy
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share

from jitmx.vllm import linear, lm_head
from jitmx.vllm.linear import JitmxLinearMethod

VOCABULARY, PADDED, HIDDEN = 100, 128, 96
MODEL = SimpleNamespace(dtype=torch.bfloat16, quantization=None, word_embeddings_untied_by_checkpoint=False)


@dataclass
class Policy:
    """A policy that says the same of every head, and remembers what it was asked."""

    format: str | None = "mxfp4"
    reason: str = "the test says so"
    all_scales: bool = False

    def __post_init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def __call__(self, prefix: str, tied: bool, against: str) -> Policy:
        self.asked.append((prefix, tied))
        return self


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank of one, a bf16 model being built, and vLLM's registry as it was before."""
    for name, value in op_registry_oot.items():
        monkeypatch.setitem(op_registry_oot, name, value)
    monkeypatch.delitem(op_registry_oot, "ParallelLMHead", raising=False)
    monkeypatch.setattr(lm_head, "_decide", None)
    with vllm_world.world():
        yield
    op_registry_oot.pop("ParallelLMHead", None)


@pytest.fixture
def policy() -> Policy:
    """A policy that is in force."""
    policy = Policy()
    lm_head.register(policy)
    return policy


@contextlib.contextmanager
def said_at_debug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Catches what jitmx logs below vLLM's name, which vLLM keeps from the root logger."""
    linear.logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, linear.logger.name):
            yield
    finally:
        linear.logger.removeHandler(caplog.handler)


def head(**more: Any) -> ParallelLMHead:
    return ParallelLMHead(VOCABULARY, HIDDEN, **{"prefix": "lm_head", **more})


def checkpoint(seed: int = 0) -> torch.Tensor:
    return (torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.1).bfloat16()


def loaded(layer: ParallelLMHead, weight: torch.Tensor) -> ParallelLMHead:
    """The head as vLLM leaves it: padding is never loaded, so that a head is complete only at the end."""
    layer.weight.weight_loader(layer.weight, weight)
    model = torch.nn.ModuleDict({"lm_head": layer})
    reload.finalize_layerwise_processing(model, MODEL)
    process_weights_after_loading(model, MODEL, torch.device("cpu"))
    return layer


def packed(layer: ParallelLMHead) -> bool:
    return isinstance(layer.quant_method, JitmxLinearMethod)


def wide(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    return tensor.detach().float().numpy().astype(np.float64)


def expected(x: torch.Tensor, weight: torch.Tensor, format: str) -> npt.NDArray[np.float64]:
    return wide(x) @ oracle.dequantize(*oracle.quantize(wide(weight), format), format).T


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_logits_are_those_of_the_quantized_weight_without_the_padding(format: str, policy: Policy) -> None:
    policy.format, weight = format, checkpoint()
    x = torch.randn(3, HIDDEN).bfloat16()
    with simulated_card.on_cpu() as card:
        layer = loaded(head(), weight)
        logits = LogitsProcessor(VOCABULARY)(layer, x)
        raw = layer.quant_method.apply(layer, x)
    assert policy.asked == [("lm_head", False)] and packed(layer)
    assert logits.shape == (3, VOCABULARY) and oracle.relative_l2(wide(logits), expected(x, weight, format)) < 0.005
    assert raw.shape == (3, PADDED) and not raw[:, VOCABULARY:].any()
    assert [variant.spec.family for variant in card.launched] == ["quantize", "linear", "linear"]


def test_the_top_tokens_of_a_draft_are_those_of_the_logits(policy: Policy) -> None:
    x, weight = torch.randn(4, HIDDEN).bfloat16(), -checkpoint().abs()
    with simulated_card.on_cpu():
        layer, logits = loaded(head(), weight), LogitsProcessor(VOCABULARY)
        assert torch.equal(logits.get_top_tokens(layer, x.abs()), logits(layer, x.abs()).argmax(-1))
    assert policy.asked


def test_a_head_is_traced_as_one_operator(policy: Policy) -> None:
    found: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    with simulated_card.on_cpu():
        layer = loaded(head(), checkpoint())
        torch.compile(lambda x: layer.quant_method.apply(layer, x), fullgraph=True, backend=backend)(
            torch.zeros(2, HIDDEN)
        )
    assert policy.asked and found == ["jitmx.linear"]


def test_the_bf16_weight_is_gone_once_a_head_is_complete(policy: Policy) -> None:
    layer = head()
    assert policy.asked and layer.weight.is_meta and layer.weight.shape == (PADDED, HIDDEN)
    with simulated_card.on_cpu():
        loaded(layer, checkpoint())
    assert {name: tensor.nbytes for name, tensor in layer.named_parameters()} == {
        "weight": 2, "weight_packed": PADDED * 128 // 2, "weight_scale": PADDED * 128 // 32
    }  # fmt: skip
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.bfloat16, "cpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_has_its_part_of_the_vocabulary(rank: int, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_world_size", lambda: 2)
    weight, x = checkpoint(), torch.randn(2, HIDDEN).bfloat16()
    with simulated_card.on_cpu():
        layer = loaded(head(), weight)
        y = layer.quant_method.apply(layer, x)
    mine = weight[64 * rank : 64 * rank + 64]
    assert policy.asked and y.shape == (2, 64) and not y[:, len(mine) :].any()
    assert oracle.relative_l2(wide(y[:, : len(mine)]), expected(x, mine, "mxfp4")) < 0.005


def test_arguments_are_those_of_vllm_however_they_are_passed(policy: Policy) -> None:
    layer = ParallelLMHead(VOCABULARY, HIDDEN, True, torch.float16, VOCABULARY, 32, None, "model.lm_head")
    assert type(layer) is lm_head.JitmxLMHead and packed(layer) and policy.asked == [("model.lm_head", False)]
    assert (layer.bias.dtype, layer.weight.dtype) == (torch.float16, torch.float16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'vocabulary'"):
        ParallelLMHead(VOCABULARY, HIDDEN, vocabulary=3)
    assert "quant_method" in inspect.signature(ParallelLMHead.__init__).parameters


def test_a_head_that_the_policy_leaves_is_vllms(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    policy.format, policy.reason = None, "it is not named"
    with said_at_debug(caplog):
        layer = loaded(head(), checkpoint())
    assert type(layer.quant_method) is UnquantizedEmbeddingMethod and not layer.weight.is_meta
    assert "lm_head stays in bf16: it is not named" in caplog.text


def test_without_a_policy_nothing_changes() -> None:
    lm_head.register(Policy())
    lm_head._decide = None
    assert type(head().quant_method) is UnquantizedEmbeddingMethod


def test_registering_again_takes_the_new_policy() -> None:
    first, second = Policy(), Policy("mxfp8")
    lm_head.register(first)
    lm_head.register(second)
    assert head().quant_method.format == "mxfp8" and not first.asked


def test_another_plugins_head_stays(caplog: pytest.LogCaptureFixture) -> None:
    class Other(ParallelLMHead):
        pass

    ParallelLMHead.register_oot(Other)
    with said_at_debug(caplog):
        lm_head.register(Policy())
    assert type(head()) is Other and "another plugin has replaced vLLM's ParallelLMHead" in caplog.text


def test_a_draft_is_told_by_the_tag_that_it_is_built_under(policy: Policy) -> None:
    with set_model_tag("eagle_head"):
        head()
    with set_model_tag("draft_model"):
        head(prefix="draft_model.lm_head")
    head()
    assert [prefix for prefix, _ in policy.asked] == ["eagle_head.lm_head", "draft_model.lm_head", "lm_head"]


@pytest.mark.parametrize("first", ["served", "draft"])
def test_a_draft_never_takes_a_packed_head_for_its_own(first: str, policy: Policy) -> None:
    weight, eagle = checkpoint(), SimpleNamespace(has_own_lm_head=True)
    with simulated_card.on_cpu():
        served = loaded(head(), weight)
        policy.format = None if first == "served" else "mxfp4"
        draft = loaded(head(), weight)
    assert not _should_share(eagle, "has_own_lm_head", draft, served)
    assert not torch.equal(served.weight.cpu(), draft.weight.cpu())
    assert _should_share(SimpleNamespace(has_own_lm_head=False), "has_own_lm_head", draft, served)


def config_with(folder: Path, *, model: dict[str, Any] | None = None, **fields: Any) -> VllmConfig:
    """A config of vLLM's for a small gpt-oss, with some of its fields replaced."""
    config = VllmConfig(model_config=vllm_world.model_config(folder, **(model or {})))
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_a_head_of_gpt_oss_is_packed(tmp_path: Path, policy: Policy) -> None:
    with set_current_vllm_config(config_with(tmp_path)):
        assert packed(head()) and policy.asked == [("lm_head", False)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": {"tie_word_embeddings": True}}, "its config says that it shares its weight with the embedding"),
        ({"lora_config": LoRAConfig()}, "LoRA adapters may be added to it"),
        ({"model": {"head_dtype": "float32"}}, r"head_dtype=torch\.float32 asks for logits"),
        (
            {"speculative_config": SimpleNamespace(draft_lm_head_quantization="fp8", draft_model_config=None)},
            "draft_lm_head_quantization makes the draft's head of the bf16 weight",
        ),
    ],
)
def test_what_vllm_needs_in_bf16_stays_so(
    fields: dict[str, Any], said: str, tmp_path: Path, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    with set_current_vllm_config(config_with(tmp_path, **fields)), said_at_debug(caplog):
        assert not packed(head())
    assert policy.asked[0][1] == ("tie_word_embeddings" in fields.get("model", {}))
    assert caplog.messages and said.replace("\\", "") in caplog.text


def test_a_head_that_its_checkpoint_has_twice_counts_as_tied(tmp_path: Path, policy: Policy) -> None:
    config = config_with(tmp_path)
    config.model_config.word_embeddings_untied_by_checkpoint = True
    with set_current_vllm_config(config):
        assert not packed(head()) and policy.asked == [("lm_head", True)]


def test_a_draft_is_tied_where_its_own_config_says_so(tmp_path: Path, policy: Policy) -> None:
    (tmp_path / "draft").mkdir()
    draft = vllm_world.model_config(tmp_path / "draft", tie_word_embeddings=True)
    speculative = SimpleNamespace(draft_model_config=draft, draft_lm_head_quantization=None)
    with set_current_vllm_config(config_with(tmp_path, speculative_config=speculative)):
        with set_model_tag("eagle_head"):
            head()
        head()
    assert policy.asked == [("eagle_head.lm_head", True), ("lm_head", False)]


def test_a_head_with_a_quantization_config_is_left_to_that(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    class Awq:
        online_quantization_config = None

        def get_quant_method(self, _layer: Any, prefix: str) -> None:
            return None

    with said_at_debug(caplog):
        assert not packed(head(quant_config=Awq()))
    assert policy.asked and "the model has a quantization config for it, Awq" in caplog.text


@pytest.mark.parametrize(("more", "said"), [({"params_dtype": torch.float32}, "neither bfloat16 nor float16")])
def test_a_head_that_no_kernel_serves_stays_in_bf16(
    more: dict[str, Any], said: str, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    with said_at_debug(caplog):
        assert not packed(head(**more)) and not packed(ParallelLMHead(VOCABULARY, 80))
    assert policy.asked and said in caplog.text and "80 input features a rank" in caplog.text


def test_a_copy_that_vllm_quantizes_itself_keeps_its_method(policy: Policy) -> None:
    method = UnquantizedEmbeddingMethod()
    assert head(quant_method=method).quant_method is method and not policy.asked
    with simulated_card.on_cpu(), pytest.raises(ValueError, match="needs an unquantized"):
        quantized_lm_head_copy(loaded(head(), checkpoint()), "fp8")


@pytest.mark.parametrize("how", ["tie_weights", "assignment"])
def test_a_head_that_turns_out_to_be_tied_is_the_embedding(how: str, policy: Policy) -> None:
    embedding, layer, weight = VocabParallelEmbedding(VOCABULARY, HIDDEN), head(), checkpoint()
    assert packed(layer) and policy.asked
    if how == "tie_weights":
        layer = layer.tie_weights(embedding)
    else:
        layer.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "lm_head": layer})
    embedding.weight.weight_loader(embedding.weight, weight)
    reload.finalize_layerwise_processing(model, MODEL)
    process_weights_after_loading(model, MODEL, torch.device("cpu"))
    assert type(layer.quant_method) is UnquantizedEmbeddingMethod and layer.weight is embedding.weight
    x = torch.randn(2, HIDDEN).bfloat16()
    logits = LogitsProcessor(VOCABULARY)(layer, x)
    assert oracle.relative_l2(wide(logits), wide(x) @ wide(weight).T) < 0.01
    assert torch.equal(embedding(torch.tensor([7])), weight[7:8])


def test_a_reloaded_head_takes_the_place_of_the_first(policy: Policy) -> None:
    layer, second, x = head(), checkpoint(1), torch.randn(2, HIDDEN).bfloat16()
    model = torch.nn.ModuleDict({"lm_head": layer})
    reload.record_metadata_for_reloading(model)
    with simulated_card.on_cpu():
        loaded(layer, checkpoint())
        before = layer.weight_packed.data_ptr()
        reload.initialize_layerwise_reload(model)
        loaded(layer, second)
        y = LogitsProcessor(VOCABULARY)(layer, x)
    assert policy.asked and layer.weight_packed.data_ptr() == before
    assert oracle.relative_l2(wide(y), expected(x, second, "mxfp4")) < 0.005


def test_the_config_of_the_test_is_that_of_the_model_being_built() -> None:
    assert get_current_vllm_config().model_config is None
