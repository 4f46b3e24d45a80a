"""Level 5 tells a loss from noise, and what may not be compared from what may."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.protocol import figures
from scripts.protocol.regression import MEMORY_BYTES, TOLERANCE, compare
from scripts.protocol.report import ProtocolError

FIGURES = {
    "decode_1_tokens_s": 236.4, "decode_16_tokens_s": 1720.0, "prefill_2048_tokens_s": 31000.0, "ttft_p50_ms": 71.0,
    "ttft_p99_ms": 80.0, "itl_p50_ms": 4.2, "beside_cache_bytes": 7.1e10,
}  # fmt: skip


def level4(**changed: float) -> dict[str, Any]:
    """A report of level 4 as it is stored, with some of jitmx's figures changed."""
    return {
        "schema_version": 1, "level": "4", "passed": True,
        "about": {"workload": {"batches": [1, 16]}, "options": {}},
        "checks": [], "results": {"metrics": {"jitmx-moe": FIGURES | changed, "stock-triton": dict(FIGURES)}},
        "metadata": {
            "gpus": {"value": [{"name": "NVIDIA GB10", "power.limit": "140 W", "driver_version": "580.1"}]},
            "model": {"value": {"config_sha256": "aa", "headers_sha256": "bb", "name": "tiny"}},
        },
    }  # fmt: skip


def failed(current: dict[str, Any], **options: Any) -> list[str]:
    return [check.name for check in compare(current, level4(), **options).checks if not check.passed]


def test_the_same_figures_pass() -> None:
    report = compare(level4(), level4())
    assert report.passed and len(report.checks) == 2 * len(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_a_loss_beyond_the_tolerance_of_any_figure_is_found_and_named(name: str) -> None:
    value = FIGURES[name]
    worse = value * 0.96 if name.endswith("tokens_s") else value * 1.12 if "p99" in name else value * 1.04
    assert failed(level4(**{name: worse})) == [f"jitmx-moe, {name}"]


@given(st.sampled_from([name for name in FIGURES if not name.endswith("_bytes")]), st.floats(0.2, 5))
def test_a_figure_fails_exactly_where_it_is_worse_by_more_than_the_tolerance(name: str, factor: float) -> None:
    lost = 1 - factor if name.endswith("tokens_s") else factor - 1
    allowed = TOLERANCE * (3 if "p99" in name else 1)
    if abs(lost - allowed) > 1e-6:
        assert bool(failed(level4(**{name: FIGURES[name] * factor}))) == (lost > allowed)


def test_memory_may_grow_by_a_gibibyte_and_no_more() -> None:
    base = FIGURES["beside_cache_bytes"]
    assert failed(level4(beside_cache_bytes=base + MEMORY_BYTES)) == []
    assert failed(level4(beside_cache_bytes=base + MEMORY_BYTES + 1)) == ["jitmx-moe, beside_cache_bytes"]


def test_a_figure_or_configuration_that_is_gone_fails() -> None:
    fewer = level4()
    del fewer["results"]["metrics"]["jitmx-moe"]["decode_16_tokens_s"], fewer["results"]["metrics"]["stock-triton"]
    assert set(failed(fewer)) == {"jitmx-moe, decode_16_tokens_s", "stock-triton"}


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("metadata", "gpus", "value", 0, "name"), "NVIDIA H200", "card"),
        (("metadata", "gpus", "value", 0, "power.limit"), "100 W", "card"),
        (("metadata", "model", "value", "headers_sha256"), "cc", "model"),
        (("about", "workload", "batches"), [1, 64], "workload"),
        (("about", "options", "max_model_len"), 4096, "options"),
        (("about", "configuration"), {"name": "jitmx-moe", "attention_by": "jitmx"}, "attention: 'jitmx' now, 'vLLM'"),
    ],
)
def test_another_card_model_or_workload_is_not_compared_unless_told(path: Any, value: Any, word: str) -> None:
    other = copy.deepcopy(level4())
    *way, last = path
    place: Any = other
    for step in way:
        place = place[step]
    place[last] = value
    with pytest.raises(ProtocolError, match=word):
        compare(other, level4())
    assert compare(other, level4(), anywhere=True).passed


def test_a_new_driver_or_model_folder_is_still_compared() -> None:
    other = level4()
    other["metadata"]["gpus"]["value"][0]["driver_version"] = "590.0"
    other["metadata"]["model"]["value"]["name"] = "elsewhere"
    assert compare(other, level4()).passed


def test_figures_of_a_report_that_failed_say_nothing() -> None:
    bad = level4() | {"passed": False}
    assert failed(bad) == ["level 4 passed"]


def test_the_script_stores_a_baseline_and_exits_1_on_a_regression(run: Any, tmp_path: Path) -> None:
    run = functools.partial(run, PYTHONPATH=str(Path(__file__).parent / "without_torch"))
    baseline, good, bad = tmp_path / "kept" / "base.json", tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(level4()))
    bad.write_text(json.dumps(level4(decode_1_tokens_s=200.0)))
    run("test_level5_regression.sh", good, "--baseline", baseline, "--store")
    out = ("--baseline", baseline, "--out", tmp_path / "out.json")
    run("test_level5_regression.sh", good, *out)
    assert json.loads((tmp_path / "out.json").read_text())["passed"] is True
    run("test_level5_regression.sh", bad, *out, code=1)
    report = json.loads((tmp_path / "out.json").read_text())
    assert [check["name"] for check in report["checks"] if not check["passed"]] == ["jitmx-moe, decode_1_tokens_s"]
    run("test_level5_regression.sh", bad, *out, "--tolerance", 0.2)


def test_a_baseline_is_a_report_of_level_4_that_passed(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for value, words in (
        (level4() | {"passed": False}, "failed its own checks"),
        (level4() | {"level": "3"}, "level '3'"),
        (level4() | {"schema_version": 0}, "schema_version 0"),
    ):
        path.write_text(json.dumps(value))
        said = run("test_level5_regression.sh", path, "--baseline", tmp_path / "b.json", "--store", code=2).stderr
        assert words in said
    assert not (tmp_path / "b.json").exists()


def test_figures_have_a_name_each_and_drift_is_that_of_the_worst_batch() -> None:
    run = {
        "decode": [{"batch": 1, "ms_step": 4.0, "tokens_s": 250.0}, {"batch": 16, "ms_step": 8.0, "tokens_s": 2000.0}],
        "prefill": [{"prompt": 2048, "ms": 66.0, "tokens_s": 31030.3}],
        "latency": {"ttft_ms": {"p50": 70.0, "p99": 75.0, "count": 20}},
        "memory": {"peak_bytes": 10, "cache_bytes": 4},
    }
    flat = figures.flat(run)
    assert flat == {
        "decode_1_tokens_s": 250.0, "decode_16_tokens_s": 2000.0, "prefill_2048_tokens_s": 31030.3,
        "ttft_p50_ms": 70.0, "ttft_p99_ms": 75.0, "beside_cache_bytes": 6,
    }  # fmt: skip
    slower = flat | {"decode_16_tokens_s": 1600.0, "prefill_2048_tokens_s": 1.0}
    assert figures.drift([flat, slower]) == pytest.approx(0.25) and figures.drift([flat]) == 0
    assert figures.merged([flat, slower])["decode_16_tokens_s"] == 1800.0
    assert "beside_cache_bytes" not in figures.flat(run | {"memory": None})
