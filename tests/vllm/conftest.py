"""Small gpt-oss checkpoints, and vLLM that builds and loads models of them on a machine without a GPU.

Tests that need vLLM say so by using `host` or `pytest.importorskip("vllm_world")`. REQUIRE_VLLM=1 makes a skip an
error: CI has vLLM, and a test that is skipped there tests nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jitmx import arch, settings
from kept_ptx import kept_ptx
from vllm_ranks import Ranks

REQUIRED = bool(os.environ.get("REQUIRE_VLLM"))
EXPERTS, HIDDEN, INNER, TOP, VOCABULARY = 4, 64, 96, 2, 100
LAYERS = 2


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: Any = yield
    if REQUIRED and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped, and REQUIRE_VLLM is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if REQUIRED and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


def tensors(seed: int = 0, head_dim: int = 32) -> dict[str, Any]:
    """A checkpoint's tensors, as Hugging Face's gpt-oss names and lays them out."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def bf16(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    def u8(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    found = {"model.embed_tokens.weight": bf16(VOCABULARY, HIDDEN), "model.norm.weight": bf16(HIDDEN) + 1,
             "lm_head.weight": bf16(VOCABULARY, HIDDEN)}  # fmt: skip
    for layer in range(LAYERS):
        own: dict[str, torch.Tensor] = {}
        for name, rows in (("q", 4 * head_dim), ("k", 2 * head_dim), ("v", 2 * head_dim)):
            own |= {f"self_attn.{name}_proj.weight": bf16(rows, HIDDEN), f"self_attn.{name}_proj.bias": bf16(rows)}
        own |= {"self_attn.o_proj.weight": bf16(HIDDEN, 4 * head_dim), "self_attn.o_proj.bias": bf16(HIDDEN)}
        own |= {"self_attn.sinks": bf16(4), "input_layernorm.weight": bf16(HIDDEN) + 1}
        own |= {"post_attention_layernorm.weight": bf16(HIDDEN) + 1}
        own |= {"mlp.router.weight": bf16(EXPERTS, HIDDEN, scale=1.0), "mlp.router.bias": bf16(EXPERTS)}
        for name, n, k in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            own[f"mlp.experts.{name}_blocks"] = u8(0, 256, EXPERTS, n, k // 32, 16)
            own[f"mlp.experts.{name}_scales"] = u8(120, 125, EXPERTS, n, k // 32)
            own[f"mlp.experts.{name}_bias"] = bf16(EXPERTS, n)
        found |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    return found


@pytest.fixture(scope="module", autouse=True)
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from kept_ptx(tmp_path_factory)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks of vLLM, each a process of its own."""
    pytest.importorskip("vllm_world")
    made = Ranks()
    yield made
    made.end()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a gpt-oss in MXFP4, and its tensors."""
    pytest.importorskip("vllm_world")
    folder, found = tmp_path_factory.mktemp("gpt-oss"), tensors()
    write(folder, found)
    return folder, found


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One whose heads are as wide as those of jitmx's attention, and whose window is of four tokens."""
    pytest.importorskip("vllm_world")
    folder, found = tmp_path_factory.mktemp("gpt-oss-wide"), tensors(head_dim=64)
    write(folder, found, head_dim=64, sliding_window=4)
    return folder, found


def write(folder: Path, found: dict[str, Any], **more: Any) -> None:
    """A checkpoint of these tensors; `more` is of its config.json."""
    from safetensors.torch import save_file

    import vllm_world

    changes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS,
               "num_experts_per_tok": TOP, "experts_per_token": TOP, "num_hidden_layers": LAYERS,
               "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(vllm_world.GPT_OSS | changes | more))
    save_file(found, str(folder / "model.safetensors"))


@dataclass
class Host:
    """vLLM in this process, with the plugin registered.

    Attributes:
        folder: of the checkpoint.
        said: what the plugin logged, level and message.
        warmed: what layers asked to have warmed; they get nothing by it.
        begun: what each was taken to ask for before its weights were there.
        prepare: what would have warmed it.
    """

    folder: Path
    said: list[tuple[str, str]]
    warmed: list[Any]
    begun: list[Any]
    prepare: Callable[[Any], None]

    def config(self, **options: Any) -> Any:
        """vLLM's configuration of an engine with these options."""
        from vllm.engine.arg_utils import EngineArgs

        usual = {"max_model_len": 128, "max_num_seqs": 8, "enforce_eager": True, "skip_tokenizer_init": True}
        return EngineArgs(model=str(self.folder), dtype="bfloat16", **(usual | options)).create_engine_config()

    def build(self, *, load: bool = False, **options: Any) -> Any:
        """A model, with the checkpoint's weights if they are to be loaded."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model
        from vllm.model_executor.model_loader.utils import initialize_model

        import vllm_world

        config = self.config(**options)
        with vllm_world.world(), set_current_vllm_config(config):
            model = get_model(vllm_config=config) if load else initialize_model(config)
            model.vllm_config = config
            return model


@pytest.fixture
def host(checkpoint: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """vLLM with the plugin, in a process that takes itself for one on an H200; nothing is compiled or loaded."""
    import torch
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers import quantization as registry
    from vllm.model_executor.models import gpt_oss

    import jitmx.vllm
    from jitmx.vllm import (
        ahead,
        aux_layers,
        draft,
        facts,
        hooks,
        log,
        plugin,
        quantization,
        speculation,
        warmup,
    )

    for name in {name for setting in settings.TABLE for name in (setting.name, *setting.aliases)} & os.environ.keys():
        if name != "JITMX_CACHE_DIR":
            monkeypatch.delenv(name)
    monkeypatch.setattr(registry, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.setattr(facts, "target", lambda: (arch.parse("sm_90"), ""))
    # vLLM empties an accelerator's cache after loading, and torch without one refuses.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    classes = dict(custom_op.op_registry_oot)
    monkeypatch.setattr(gpt_oss.GptOssModel, "block_cls", gpt_oss.GptOssModel.block_cls)  # put back after the test
    for owner, name in (*draft.PATCHED, *speculation.PATCHED):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    caches: tuple[Callable[..., Any], ...] = (
        plugin._say_once, hooks.hold, quantization._announce, quantization._announce_block,
        quantization._announce_draft, quantization._announce_other, quantization._announce_sampler,
        quantization._announce_draft_block, quantization._announce_no_draft, draft.say_left, aux_layers._say_nested,
        aux_layers._say_none,
    )  # fmt: skip
    found = Host(checkpoint[0], [], [], [], warmup.prepare)
    monkeypatch.setattr(warmup, "prepare", found.warmed.append)
    monkeypatch.setattr(ahead, "begin", lambda needed, later=False: found.begun.append(needed))

    def keep(record: logging.LogRecord) -> None:
        found.said.append((record.levelname, record.getMessage()))

    monkeypatch.setattr(log.logger, "handle", keep)  # vLLM drops handlers when it configures its loggers
    for cache in caches:
        cache.cache_clear()  # type: ignore[attr-defined]
    settings.reload()
    jitmx.vllm.register()
    yield found
    custom_op.op_registry_oot.clear()
    custom_op.op_registry_oot.update(classes)
    monkeypatch.undo()
    if "get_model_state_cls" in vars(gpt_oss.GptOssForCausalLM):
        del gpt_oss.GptOssForCausalLM.get_model_state_cls
    settings.reload()
    for cache in caches:
        cache.cache_clear()  # type: ignore[attr-defined]
