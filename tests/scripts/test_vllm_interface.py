"""What the protocol asks of vLLM is there in the vLLM that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.protocol import engines, features
from scripts.protocol.configurations import Configuration
from scripts.protocol.engines import Place

CONFIGURATIONS = (
    Configuration(("moe", "o:mxfp8")), Configuration(("qkv",), "triton"), Configuration(backend="marlin", eager=True)
)  # fmt: skip


@pytest.fixture(scope="module")
def interface() -> dict[str, Any]:
    for module in ("vllm", "compressed_tensors"):
        pytest.importorskip(module, reason="needs vLLM and its dependencies", exc_type=ImportError)
    over = {"max_model_len": 4096, "attention_config": {"backend": "TRITON_ATTN"}}
    place = Place(Path("model"), Path("out"), over, 1.0)
    options = place.engine(CONFIGURATIONS[0]) | {"kernel_config": {"moe_backend": "triton"}}
    words = ["--model", options.pop("model"), *engines.flags(options)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_interface.py")), *words],
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""},
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_argument_of_an_engine_is_one_of_vllm_s(interface: dict[str, Any]) -> None:
    place = Place(Path("model"), Path("out"), {}, 1.0)
    for configuration in CONFIGURATIONS:
        assert set(place.engine(configuration) | engines._OFFLINE) <= set(interface["engine"])
    assert set(features._OPTIONS) <= set(interface["engine"])


def test_vllm_s_own_parser_reads_the_server_s_options(interface: dict[str, Any]) -> None:
    assert interface["served"]["max_model_len"] == "4096" and interface["served"]["seed"] == "0"
    assert "mxfp4_layers" in interface["served"]["additional_config"]


def test_requests_outputs_and_the_loop_have_the_names_that_are_used(interface: dict[str, Any]) -> None:
    sampling = {"temperature", "max_tokens", "ignore_eos", "detokenize", "logprobs", "flat_logprobs"}
    assert sampling <= set(interface["sampling"])
    assert {"token_ids", "logprobs"} <= set(interface["output"])
    assert "num_cached_tokens" in interface["answer"] and "lora_request" in interface["generate"]
    assert interface["adapter"] == ["lora_name", "lora_int_id", "lora_path"]
    assert {"start_indices", "end_indices", "token_ids", "logprobs"} <= set(interface["logprobs"])
    wanted = {"prompt", "max_tokens", "temperature", "ignore_eos", "return_token_ids"}
    assert wanted <= set(interface["completion"])
    assert interface["add_request"][1:4] == ["request_id", "prompt", "params"]
    assert "static_forward_context" in interface["compilation"] and interface["keeps_its_configuration"]
    assert interface["loop"] == ["step", "has_unfinished_requests"] and interface["plugins"] == []


def test_vllm_says_how_long_the_phases_of_a_start_took(interface: dict[str, Any]) -> None:
    assert interface["silent"] == []


def test_the_command_line_has_the_module_that_is_run(interface: dict[str, Any]) -> None:
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).parent.joinpath("entrypoints", "cli", "main.py").is_file()
