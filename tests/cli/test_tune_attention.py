"""`jitmx tune attention` from the command to the table, on a card of the test's own that times by arithmetic."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jitmx import arch, settings
from jitmx.bench import tuning, tuning_builds
from jitmx.cli import tune as verb
from jitmx.dispatch import tactics, tune
from jitmx.dispatch.call import call
from jitmx.dispatch.choose import choose
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.runtime import card as cards

SM_90 = arch.parse("sm_90")
LAYER = ("kv_heads=8", "group=8", "head_dim=64")
SIZES = {"kv_heads": 8, "group": 8, "head_dim": 64}


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[AttentionProblem, tune.Candidate]]]:
    """What the card was asked: clusters of four are fastest for one request, a grid for more, few stages always."""
    asked: list[tuple[AttentionProblem, tune.Candidate]] = []

    def measure(problem: Any, candidate: tune.Candidate, repeats: int) -> float:
        asked.append((problem, candidate))
        knobs = candidate.knobs
        if candidate.kernel != "decode":
            return {"wgmma": 100.0, "prefill": 200.0}[candidate.kernel] + knobs["stages"] + knobs["keys"] / 100
        best = ("cluster", 4) if problem.batch == 1 else ("global", 1)
        return 10.0 + 5 * ((knobs["reduction"], knobs["parts"]) != best) + knobs["stages"] / 10 + knobs["warps"] / 100

    monkeypatch.setenv("JITMX_TACTICS", str(tmp_path / "tactics"))
    settings.reload()
    monkeypatch.setattr(verb.targets, "require_gpu", lambda verb: None)
    monkeypatch.setattr(cards, "arch", lambda _device: SM_90)
    monkeypatch.setattr(cards, "multiprocessors", lambda _device: 132)
    monkeypatch.setattr(tuning, "isolated", lambda _op: contextlib.nullcontext(measure))
    monkeypatch.setattr(tuning_builds, "Background", lambda _jobs: contextlib.nullcontext(tune.AtHand()))
    monkeypatch.setattr(tuning, "origin", lambda: {"kind": "measured", "card": "a card", "driver": "1.2"})
    tactics.tables.cache_clear()
    yield asked
    tactics.tables.cache_clear()


AXES = ("batch=1,16", "context=1024,8192", "queries=1,2048")


def test_rows_have_ranges_of_requests_contexts_and_new_tokens(run: Any, read: Any, timed: Any, tmp_path: Path) -> None:
    said = read("tune", "attention", *LAYER, *AXES, "-q")
    found = {tuple(row["problem"][name] for name in ("batch", "context", "queries")): row for row in said["rows"]}
    assert found.keys() == {(b, c, q) for b in (1, 16) for c in (1024, 8192) for q in (1, 2048)}
    assert {key: row["kernel"] for key, row in found.items()} == {
        key: "decode" if key[2] == 1 else "wgmma" for key in found
    }
    ways = {(key[0], row["knobs"]["reduction"], row["knobs"]["parts"]) for key, row in found.items() if key[2] == 1}
    assert ways == {(1, "cluster", 4), (16, "global", 1)}
    table = json.loads((tmp_path / "tactics" / "sm_90a" / "attention.json").read_text())
    assert len(table["rows"]) == 8
    when = table["rows"][0]["when"]
    assert (when["batch"], when["context"], when["queries"]) == ([1, 1], [1, 1024], [1, 1])
    assert (when["cache"], when["dtype"], when["append"], when["window"]) == ("same", "bf16", True, 0)
    assert not when.keys() & {"sinks", "rope", "rotary", "table", "soft_cap"}


def test_calls_find_the_rows_that_were_measured_and_no_row_is_for_the_cache_write(run: Any, timed: Any) -> None:
    run("tune", "attention", *LAYER, *AXES, "-q")
    tactics.tables.cache_clear()
    for sinks, rope in (("no_sinks", {}), ("sinks_bf16", {"rope": "neox", "rotary": 64})):
        common = {**SIZES, "sinks": sinks, **rope}
        for batch, reduction in ((1, "cluster"), (9, "global")):
            choice = choose("attention", AttentionProblem(batch=batch, context=5000, **common), SM_90)
            assert choice.decided_by.name == "user table" and choice.variant.knobs.reduction == reduction
        prompt = call("attention", AttentionProblem(batch=1, context=5000, queries=700, **common), SM_90)
        decided = {launch.choice.variant.spec.name: launch.choice.decided_by.name for launch in prompt.launches}
        assert decided == {"wgmma": "user table", "append": "heuristic"}
        for other in ({"cache": "e4m3"}, {"window": 128}, {"append": False}, {"dtype": "fp16"}, {"context": 9000}):
            asked = AttentionProblem(**{"batch": 1, "context": 5000, **common, **other})
            assert choose("attention", asked, SM_90).decided_by.name == "heuristic"
    told = run("explain", "attention", "--arch", "sm_90", *LAYER, "batch=16", "context=5000").stdout
    assert "decided by  user table: measured on a card" in told


def test_every_candidate_of_each_kernel_is_timed(run: Any, timed: Any) -> None:
    run("tune", "attention", *LAYER, "batch=1", "context=1024", "queries=1,64", "-q")
    kernels = {(problem.queries, candidate.kernel) for problem, candidate in timed}
    assert kernels == {(1, "decode"), (1, "wgmma"), (1, "prefill"), (64, "wgmma"), (64, "prefill")}
    decode = {candidate.key for problem, candidate in timed if (problem.queries, candidate.kernel) == (1, "decode")}
    assert len(decode) > 50


def test_a_model_is_its_layers_with_and_without_a_window_over_both_caches(read: Any) -> None:
    said = read("tune", "attention", "--model", "gpt-oss-120b", "batch=1", "context=4096", "queries=1", "-q")
    found = {(row["problem"]["window"], row["problem"]["cache"]) for row in said["rows"]}
    assert found == {(window, cache) for window in (0, 128) for cache in ("same", "e4m3")}
    assert {(row["problem"]["sinks"], row["problem"]["rope"]) for row in said["rows"]} == {("sinks_bf16", "neox")}


def test_what_is_measured_by_default_is_decoding_drafts_and_prompts(read: Any) -> None:
    said = read("tune", "attention", *LAYER, "window=128", "-q")
    found = {tuple(row["problem"][name] for name in ("batch", "queries")) for row in said["rows"]}
    assert found == {(batch, queries) for batch in (1, 16, 64) for queries in (1, 8, 2048)}
    assert {row["low"]["context"] for row in said["rows"]} == {1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --model, or kv_heads=, group= and head_dim="),
        (("kv_heads=8",), "give --model, or kv_heads=, group= and head_dim="),
        (("--model", "gpt-oss-20b", "group=8"), "group is that of --model gpt-oss-20b"),
        ((*LAYER, "step=append"), "step is no field to give"),
        ((*LAYER, "cache=fp8"), "cache='fp8' is not one of same, e4m3"),
        ((*LAYER, "m=4"), "'m=4' is no field=value of attention; its fields: batch, context, queries, kv_heads"),
    ],
)
def test_a_bad_argument_is_a_usage_error_that_names_the_choices(run: Any, arguments: Any, said: str) -> None:
    assert said in run("tune", "attention", *arguments, code=2).stderr
