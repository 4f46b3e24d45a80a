"""The plugin in vLLM's registries: what it takes the place of, and when it is disabled."""

# ruff: noqa: E402

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

vllm_world = pytest.importorskip("vllm_world")

import vllm.plugins
from vllm.model_executor import custom_op
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config, mxfp4
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gpt_oss import TransformerBlock

import jitmx.vllm
from jitmx.vllm import hooks, plugin, quantization, versions
from jitmx.vllm.hooks import Hook


def configuration() -> Any:
    """What vLLM makes of a gpt-oss checkpoint's own quantization config."""
    return get_quantization_config("gpt_oss_mxfp4").from_config({"quant_method": "mxfp4"})


def test_everything_of_vllm_that_is_relied_on_is_there() -> None:
    assert hooks.moved() == []
    assert len(hooks.HOOKS) > 30


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (Hook("vllm.gone", "x"), "vllm.gone.x is gone"),
        (Hook("vllm.config", "VllmConfig.gone"), "vllm.config.VllmConfig.gone is gone"),
        (Hook("vllm.model_executor.utils", "replace_parameter", ("layer", "other")), "without other"),
    ],
)
def test_a_hook_that_has_moved_is_named(hook: Hook, said: str) -> None:
    assert said in hook.problem()


def test_registering_takes_the_place_of_one_configuration_and_again_changes_nothing(host: Any) -> None:
    assert get_quantization_config("gpt_oss_mxfp4") is plugin.GptOssOnJitmx
    jitmx.vllm.register()
    assert get_quantization_config("gpt_oss_mxfp4") is plugin.GptOssOnJitmx
    assert get_quantization_config("mxfp4").__module__.startswith("vllm.")
    assert isinstance(configuration(), quantization.JitmxGptOssConfig)
    configuration()
    assert host.said == []


def test_a_checkpoint_of_another_model_is_not_claimed(host: Any) -> None:
    claim = plugin.GptOssOnJitmx.override_quantization_method
    assert claim({"quant_method": "mxfp4"}, None, SimpleNamespace(model_type="gpt_oss")) == "gpt_oss_mxfp4"
    assert claim({"quant_method": "mxfp4"}, None, SimpleNamespace(model_type="other")) is None
    assert plugin.GptOssOnJitmx.get_min_capability() == GptOssMxfp4Config.get_min_capability()
    assert plugin.GptOssOnJitmx.get_config_filenames() == GptOssMxfp4Config.get_config_filenames()
    assert plugin.GptOssOnJitmx.get_supported_act_dtypes() == GptOssMxfp4Config.get_supported_act_dtypes()
    assert plugin.GptOssOnJitmx.get_name() == GptOssMxfp4Config.get_name()


def test_another_release_of_vllm_is_left_alone_with_one_line(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import quantization as registry

    registry._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.clear()
    monkeypatch.setattr(metadata, "version", lambda name: "0.35.0")
    jitmx.vllm.register()
    jitmx.vllm.register()
    assert get_quantization_config("gpt_oss_mxfp4") is GptOssMxfp4Config
    refused = "vLLM 0.35.0 is not one of vllm>=0.33,<0.34, which this jitmx is for"
    assert host.said == [("WARNING", f"jitmx is disabled, and vLLM serves every layer: {refused}")]


def test_the_release_under_test_is_a_supported_one() -> None:
    assert versions.refusal() is None


def test_a_moved_hook_is_an_error_in_the_log_and_vllm_serves(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS, Hook("vllm.config", "VllmConfig.gone")))
    monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda *_, **__: (mxfp4.Mxfp4MoeBackend.NONE, None))
    monkeypatch.setattr(GptOssMxfp4MoEMethod, "is_monolithic", False)
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    for _ in range(2):
        model = host.build(additional_config={"jitmx": {"mxfp4_layers": "all"}})
        block = model.model.layers[0]
        assert type(block) is TransformerBlock and type(model.lm_head) is ParallelLMHead
        assert type(block.mlp.experts.routed_experts.quant_method) is GptOssMxfp4MoEMethod
        assert type(block.attn.qkv_proj.quant_method) is UnquantizedLinearMethod
    ((level, message),) = host.said
    assert (
        level == "ERROR"
        and "incompatible vLLM internals" in message
        and "vllm.config.VllmConfig.gone is gone" in message
    )


def test_vllm_finds_and_calls_the_entry_point(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import quantization as registry

    registry._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.clear()
    point = metadata.EntryPoint("jitmx", "jitmx.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    assert get_quantization_config("gpt_oss_mxfp4") is plugin.GptOssOnJitmx


# Each half is a process of its own that has imported nothing of jitmx before, forked from one that has imported of vLLM
# what both need, which takes many times what they do.
_HALVES = """
import os, pickle, sys
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
from vllm.engine.arg_utils import EngineArgs
assert not any(name.partition(".")[0] == "jitmx" for name in sys.modules)
assert "vllm.model_executor.models.gpt_oss" not in sys.modules
given = sys.stdin.buffer.read()

def configuration():
    import jitmx.vllm
    jitmx.vllm.register()
    config = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_engine_config()
    print(type(config.quant_config).__name__, "vllm.model_executor.models.gpt_oss" in sys.modules)

def worker():
    from vllm.model_executor.model_loader.utils import configure_quant_config
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
    configure_quant_config(pickle.loads(given), GptOssForCausalLM)
    from vllm.model_executor.custom_op import op_registry_oot
    print(sorted((name, made.__module__) for name, made in op_registry_oot.items()))

for half in configuration, worker:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        half()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, half.__name__
"""


def test_who_makes_the_configuration_does_not_import_the_model_and_a_worker_with_it_has_jitmxs_classes(
    host: Any,
) -> None:
    command = [sys.executable, "-c", _HALVES, str(host.folder)]
    done = subprocess.run(command, input=pickle.dumps(configuration()), capture_output=True, check=True)
    *_, made, classes = done.stdout.decode().strip().splitlines()
    assert made == "JitmxGptOssConfig False"
    assert classes == str([("GateLinear", "jitmx.vllm.router"), ("ParallelLMHead", "jitmx.vllm.lm_head")])
