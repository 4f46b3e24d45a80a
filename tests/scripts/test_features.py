"""LoRA, prefix caching and chunked prefill: what passes, and what does not, over a stand-in for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="an adapter is drawn with torch")
pytest.importorskip("safetensors", reason="an adapter is a safetensors file: pip install safetensors")

from scripts.protocol import features
from scripts.protocol.sizes import PRESETS

FAKE = Path(__file__).parent / "fake"


def asked(run: Any, model: Path, out: Path, *words: str, code: int = 0, **told: Any) -> dict[str, Any]:
    """The report of the script over a stand-in that behaves as it is told."""
    fake = {"FAKE_VLLM": json.dumps(told), "PYTHONPATH": str(FAKE)}
    run("test_features.sh", "--model", model, "--out", out, "--layers", "moe", "--steps", 8, *words, code=code, **fake)
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["passed"]]


def test_engines_that_differ_no_more_with_all_of_it_on_pass(run: Any, model: Path, tmp_path: Path) -> None:
    report = asked(run, model, tmp_path / "out", "--together")
    assert set(report["results"]["apart"]) == {"short", "adapter", "unknown", "known", "known, with others", "long"}
    options = report["about"]["options"]
    assert options["enable_lora"] and options["enable_prefix_caching"] and options["max_num_batched_tokens"] == 256
    assert len(report["results"]["greedy"]["shared"]) == 8


@pytest.mark.parametrize(
    ("told", "words", "wanted"),
    [
        ({"lora": False}, (), {"the adapter is applied"}),
        ({"long": {"jitmx:moe": 0.1}}, (), {"long"}),
        ({}, ("--engine", "enable_prefix_caching=false"), {"a prefix is known"}),
    ],
)
def test_what_is_wrong_is_named(
    run: Any, model: Path, tmp_path: Path, told: dict[str, Any], words: tuple[str, ...], wanted: set[str]
) -> None:
    assert set(failed(asked(run, model, tmp_path / "out", *words, code=1, **told))) == wanted


def test_the_adapter_has_the_shapes_of_the_checkpoints_output_projections(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tiny = PRESETS["tiny"]
    tensors = load_file(features.write_adapter(tmp_path / "adapter", model) / "adapter_model.safetensors")
    assert len(tensors) == 2 * tiny.layers
    stem = "base_model.model.model.layers.1.self_attn.o_proj"
    assert tensors[f"{stem}.lora_A.weight"].shape == (features.RANK, tiny.heads * tiny.head_dim)
    assert tensors[f"{stem}.lora_B.weight"].shape == (tiny.hidden, features.RANK)
