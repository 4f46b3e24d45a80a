"""LoRA, prefix caching and chunked prefill: what passes, and what does not, over a stand-in for vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="an adapter is drawn with torch")
pytest.importorskip("safetensors", reason="an adapter is a safetensors file: pip install safetensors")

from scripts.protocol import __main__ as protocol
from scripts.protocol import features
from scripts.protocol.configurations import Configuration
from scripts.protocol.report import Report
from scripts.protocol.sizes import PRESETS

FAKE = Path(__file__).parent / "fake"
ROOT = Path(__file__).parents[2]
OURS = "jitmx:moe" + ("+attention" if Configuration(("moe",)).attends else "")
KNOWN = {"known", "known, with others"}
CACHED = {"unknown"} | KNOWN
SAME = "a known prefix changes nothing"


@pytest.fixture
def asked(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The report of the verb, within this process, over a stand-in that behaves as it is told."""
    monkeypatch.setattr(protocol.signal, "signal", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}{os.pathsep}{ROOT}")

    def call(*words: str, code: int = 0, **told: Any) -> dict[str, Any]:
        monkeypatch.setenv("FAKE_VLLM", json.dumps(told))
        out = tmp_path / "out"
        given = ["features", "--model", str(model), "--out", str(out), "--layers", "moe", "--steps", "8", *words]
        result = CliRunner().invoke(protocol.main, given)
        assert result.exit_code == code, (result.output, result.exception)
        report: dict[str, Any] = json.loads((out / "report.json").read_text())
        return report

    return call


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["passed"]]


def test_engines_that_differ_no_more_with_all_of_it_on_pass(asked: Any) -> None:
    report = asked("--together")
    assert set(report["results"]["apart"]) == {"short", "adapter", "unknown", "known", "known, with others", "long"}
    assert all(len(found["prompts"]) == 8 and not found["far"] for found in report["results"]["apart"].values())
    options = report["about"]["options"]
    assert options["enable_lora"] and options["enable_prefix_caching"] and options["max_num_batched_tokens"] == 256
    assert len(report["results"]["greedy"]["shared"]) == 8


def test_one_prompt_of_eight_that_is_far_passes_and_is_named(asked: Any) -> None:
    report = asked(at={OURS: {"241": 0.12}})
    found = report["results"]["apart"]
    assert {what: one["far"] for what, one in found.items() if one["far"]} == {what: [241] for what in CACHED}
    assert found["known"]["prompts"][-1] == pytest.approx(0.12, rel=0.1)
    said = {check["name"]: check["seen"] for check in report["checks"]}
    assert all("the prompt of 241 tokens (0.1" in said[what] and "may explain" in said[what] for what in CACHED)


def test_attention_is_jitmxs_with_all_of_it_on_where_that_is_asked_for(asked: Any) -> None:
    report = asked("--attention", "on")
    startup = report["results"]["startup"]
    assert {name: start["attention"] for name, start in startup.items()} == {
        "jitmx-moe-attn:on": "jitmx", "stock-marlin": "vLLM",
    }  # fmt: skip
    assert failed(asked("--attention", "on", code=1, deaf=True)) == ["attention"]


@pytest.mark.parametrize(
    ("told", "words", "wanted"),
    [
        ({"lora": False}, (), {"the adapter is applied"}),
        ({"long": {OURS: 0.1}}, (), {"long"}),
        ({"at": {OURS: dict.fromkeys(("65", "97", "145", "193", "241"), 0.1)}}, (), CACHED),
        ({"at_known": {OURS: {"241": 0.12}}}, (), KNOWN | {SAME}),
        # Which engine's own logits part does not matter: no tie explains that they do so only behind a known prefix.
        ({"at_known": {"marlin": {"241": 0.12}}}, (), KNOWN),
        ({}, ("--engine", "enable_prefix_caching=false"), {"a prefix is known"}),
    ],
)
def test_what_is_wrong_is_named(asked: Any, told: dict[str, Any], words: tuple[str, ...], wanted: set[str]) -> None:
    assert set(failed(asked(*words, code=1, **told))) == wanted


def judged(*faults: tuple[str, list[int], float], unmoved: Sequence[int] = ()) -> set[str]:
    """What fails where jitmx's logits of a set, after these of eight prompts, have a further error.

    Args:
        unmoved: prompts to which neither engine applies the adapter.
    """
    source, sets = np.random.default_rng(0), ("short", "adapter", "unknown", *sorted(KNOWN), "long")
    clean = source.standard_normal((8, 1000))
    tables = {
        (what, name): np.roll(clean, what == "adapter") + 0.003 * source.standard_normal(clean.shape)
        for what in sets
        for name in ("jitmx", "stock")
    }
    for name in ("jitmx", "stock"):
        tables["adapter", name][list(unmoved)] = tables["short", name][list(unmoved)]
    for what, prompts, error in faults:
        # The same error in all sets: what a tie does to an engine does not depend on how the prompt was read.
        tables[what, "jitmx"][prompts] += error * np.random.default_rng(1).standard_normal(clean.shape)[prompts]
    report = Report("features", {})
    features.judge(report, tables, ("jitmx", "stock"), {what: [[0] * (k + 1) for k in range(8)] for what in sets})
    return {check.name for check in report.checks if not check.passed}


def test_one_prompt_of_eight_may_be_as_far_as_another_expert_takes_it() -> None:
    for what in ("short", "adapter", "long"):
        assert not judged((what, [3], 0.12))
        assert judged((what, [3], 0.5)) == {what}, "an adapter that is not applied moves logits by as much"
    assert not judged(*((what, [7], 0.12) for what in CACHED))


@pytest.mark.parametrize("prompts", [list(range(8)), [4, 5, 6, 7], [6, 7]], ids=["all", "half", "two"])
def test_a_fault_that_reaches_two_of_eight_prompts_or_more_fails(prompts: list[int]) -> None:
    for what in ("adapter", "long"):
        assert judged((what, prompts, 0.12)) == {what}
    assert judged(*((what, prompts, 0.12) for what in CACHED)) == CACHED


def test_a_fault_that_leaves_no_prompt_far_fails_where_it_reaches_three_of_them() -> None:
    for what in ("adapter", "long"):
        assert judged((what, list(range(8)), 0.010)) == {what}
        assert judged((what, [5, 6, 7], 0.014)) == {what}
    assert judged(("known", [5, 6, 7], 0.014)) == {"known", SAME}


def test_an_adapter_that_is_not_applied_to_one_prompt_fails() -> None:
    assert judged(unmoved=[5]) == {"the adapter is applied"}


def test_a_known_prefix_may_move_no_prompt() -> None:
    assert judged(("known", [7], 0.12)) == {"known", SAME}
    assert judged(("known, with others", [0], 0.12)) == {"known, with others", SAME}
    # As far from the stock engine in all three sets, and not the same in each.
    assert judged(("unknown", [7], 0.12), *((what, [7], -0.12) for what in KNOWN)) == CACHED | {SAME}


def test_the_adapter_has_the_shapes_of_the_checkpoints_output_projections(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tiny = PRESETS["tiny"]
    tensors = load_file(features.write_adapter(tmp_path / "adapter", model) / "adapter_model.safetensors")
    assert len(tensors) == 2 * tiny.layers
    stem = "base_model.model.model.layers.1.self_attn.o_proj"
    assert tensors[f"{stem}.lora_A.weight"].shape == (features.RANK, tiny.heads * tiny.head_dim)
    assert tensors[f"{stem}.lora_B.weight"].shape == (tiny.hidden, features.RANK)
