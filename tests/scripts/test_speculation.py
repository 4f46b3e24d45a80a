"""Which engines a benchmark of speculation starts, what it makes of their figures, and how one that fails is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.protocol import speculation
from scripts.protocol.report import ProtocolError
from scripts.protocol.speculation import engine

HERE, DRAFT = Path("/a/target"), Path("/a/draft")


def test_engines_of_both_sides_differ_in_what_serves_them_alone() -> None:
    ours, stock = (engine(side, HERE, DRAFT, 2, (0.74, 0.54)) for side in speculation.SIDES)
    assert ours.options.pop("additional_config") == {"jitmx": {"mxfp4_layers": "all", "draft_layers": "all"}}
    assert stock.options.pop("attention_config") == {"backend": "FLASH_ATTN"}
    assert ours.options == stock.options
    said = ours.options["speculative_config"]
    assert said["synthetic_acceptance_rates"] == [0.74, 0.54] and said["rejection_sample_method"] == "synthetic"
    assert (said["model"], said["num_speculative_tokens"]) == ("/a/draft", 2)


def test_an_engine_without_speculation_has_no_draft() -> None:
    alone = engine("jitmx", HERE, DRAFT, 0, layers="moe", more={"seed": 3})
    assert "speculative_config" not in alone.options and alone.options["seed"] == 3
    assert alone.options["additional_config"] == {"jitmx": {"mxfp4_layers": "moe"}} and alone.name == "jitmx k=0"


def test_real_acceptance_is_that_of_standard_rejection() -> None:
    said = engine("stock", HERE, DRAFT, 1, real=True).options
    assert said["load_format"] == "auto" and "rejection_sample_method" not in said["speculative_config"]


def test_too_few_rates_are_refused() -> None:
    with pytest.raises(ProtocolError, match="1 rates for 2 tokens"):
        engine("jitmx", HERE, DRAFT, 2, (0.5,))


def test_gains_are_over_the_same_side_without_speculation() -> None:
    engines = [engine(side, HERE, DRAFT, k, (0.7,)[:k]) for side in speculation.SIDES for k in (0, 1)]
    assert len({one.name for one in engines}) == 4
    speeds = {"jitmx k=0": 500.0, "jitmx k=1 0.7": 600.0, "stock k=0": 250.0, "stock k=1 0.7": 200.0}
    found = {name: {"batches": {"1": {"tok_s": speed, "ms_step": 2.0, "tokens_step": 1.7}}}
             for name, speed in speeds.items()}  # fmt: skip
    rows = speculation.gains(found, engines, 1)
    assert [row["gain"] for row in rows] == [1.0, 1.2, 1.0, 0.8] and rows[1]["rates"] == [0.7]


def test_texts_that_part_are_counted() -> None:
    assert speculation.differing([[1, 2], [3]], [[1, 2], [4]]) == 1


def test_an_engine_that_fails_says_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "vllm"
    fake.mkdir()
    (fake / "__init__.py").write_text("SamplingParams = None\ndef LLM(**options):\n    raise SystemExit('no card')\n")
    monkeypatch.setattr(speculation, "ROOT", Path(speculation.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ProtocolError, match=r"stock k=0 ended with 1; .*engine\.log:\nno card"):
        speculation.run(engine("stock", HERE, DRAFT, 0), (1,), log=tmp_path / "logs" / "engine.log")


def test_the_script_explains_itself_and_refuses_what_cannot_be(run: Any, tmp_path: Path) -> None:
    assert "acceptance" in run("speculation_bench.py", "--help").stdout
    assert "are no rates" in run("speculation_bench.py", "speed", tmp_path, "--rates", "many", code=2).stderr
    said = run("speculation_bench.py", "acceptance", tmp_path, "--draft-vocab", 9000, code=1).stderr
    assert "draft_vocab=9000 tokens of 8192" in said
    assert not (tmp_path / "draft").exists()
