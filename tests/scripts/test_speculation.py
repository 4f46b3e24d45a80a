"""Which engines a benchmark of speculation starts, what it makes of their figures, and how one that fails is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.protocol import speculation
from scripts.protocol.configurations import Configuration
from scripts.protocol.replay import Record
from scripts.protocol.report import ProtocolError
from scripts.protocol.speculation import Asked, engine

HERE, DRAFT = Path("/a/target"), Path("/a/draft")

# As much of vLLM as an engine is asked for: it accepts every other draft, and its texts count up from the last token.
FAKE = """
import types
class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(given)
class LLM:
    def __init__(self, **options):
        self.k = options.get("speculative_config", {}).get("num_speculative_tokens", 0)
        self.drafts = self.accepted = 0
        self.asked = []
    def apply_model(self, function):
        pass
    def collective_rpc(self, name, args=()):
        self.asked.append((name, args))
        return [[{"graph": "target", "tokens": 1, "requests": 1, "ms": 1.5}]]
    def get_metrics(self):
        counts = {"vllm:spec_decode_num_drafts": self.drafts, "vllm:spec_decode_num_accepted_tokens": self.accepted}
        return [types.SimpleNamespace(name=name, value=value) for name, value in counts.items()]
    def generate(self, prompts, sampling, use_tqdm):
        found = []
        for prompt in prompts:
            last, count = prompt["prompt_token_ids"][-1], sampling.max_tokens
            self.drafts += bool(self.k) * count // 2
            self.accepted += bool(self.k) * count // 4
            text = [last + 1 + i for i in range(count)]
            if self.k and count > 300:
                text[300] += 7
            best = {text[0]: types.SimpleNamespace(logprob=-1.0), text[0] + 7: types.SimpleNamespace(logprob=-1.25)}
            found.append(types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=text, logprobs=[best])]))
        return found
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target whose engines are `FAKE`."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(FAKE)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_engines_of_both_sides_differ_in_what_serves_them_alone() -> None:
    ours, stock = (engine(side, HERE, DRAFT, 2) for side in speculation.SIDES)
    assert ours.options.pop("additional_config") == {"jitmx": {"mxfp4_layers": "all", "draft_layers": "all"}}
    assert stock.options.pop("attention_config") == {"backend": "FLASH_ATTN"}
    assert ours.options == stock.options
    said = ours.options["speculative_config"]
    assert (said["model"], said["num_speculative_tokens"]) == ("/a/draft", 2)


def test_an_engine_without_speculation_has_no_draft() -> None:
    alone = engine("jitmx", HERE, DRAFT, 0, layers="moe", more={"seed": 3})
    assert "speculative_config" not in alone.options and alone.options["seed"] == 3
    assert alone.options["additional_config"] == {"jitmx": {"mxfp4_layers": "moe"}} and alone.name == "jitmx k=0"


def test_a_real_target_has_its_own_weights_and_standard_rejection() -> None:
    said = engine("stock", HERE, DRAFT, 1, real=True).options
    assert said["load_format"] == "auto" and "rejection_sample_method" not in said["speculative_config"]


def test_gains_are_over_the_same_side_without_speculation() -> None:
    rows = [
        {"side": side, "k": k, "batch": 1, "tok_s": speed, "what": "plain"}
        for side, k, speed in (("jitmx", 0, 500.0), ("jitmx", 1, 600.0), ("stock", 0, 250.0), ("stock", 1, 200.0))
    ]
    found = speculation.with_gains([*rows, {"side": "jitmx", "k": 1, "what": "graph", "ms": 1.0}])
    assert [row["gain"] for row in found] == [1.0, 1.2, 1.0, 0.8]
    assert speculation.with_gains(rows[1:2])[0]["gain"] is None


def test_texts_part_where_they_differ_for_the_first_time() -> None:
    assert speculation.parted([[1, 2], [3, 4, 5], [6]], [[1, 2], [3, 9, 9], [7]]) == [(1, 1), (2, 0)]


def test_every_figure_of_an_engine_is_a_line_as_soon_as_it_is_known(fake: Path) -> None:
    target = fake / "target"
    prompts = speculation.prompts(target, 2)
    assert len({prompt[0] for prompt in prompts}) == 2 and prompts == speculation.prompts(target, 2)
    alone = speculation.run(engine("jitmx", target, DRAFT, 0), Asked(plain=True, prompts=prompts), fake / "out")
    assert [row["what"] for row in alone] == ["start", "plain", "texts"] and alone[1]["tokens_step"] == 1.0
    asked = Asked(
        (1, 2), rates=((0.5,), (0.6, 0.3)), replay=(0.7,), graphs=True, prompts=prompts, known=alone[2]["texts"]
    )
    found = speculation.run(engine("jitmx", target, DRAFT, 1), asked, fake / "out")
    lines = (fake / "out" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [*alone, *found]
    kinds = [row["what"] for row in found]
    assert kinds == ["start", "graph", *["synthetic"] * 4, "texts", "agreement", "replay", "replay"]
    assert [row["rates"] for row in found if row["what"] == "synthetic"] == [[0.5], [0.5], [0.6], [0.6]]
    timed = [row for row in found if "tok_s" in row]
    assert all(row["tokens_step"] == 1.5 and row["tok_s"] > 0 for row in timed)
    agreement = found[kinds.index("agreement")]
    assert agreement["parted"] == 2 and agreement["compared"] == 2 * 301 and agreement["logits_apart"] == [0.25, 0.25]
    assert "right 0.7" in speculation.words(found[-1])


def test_an_engine_that_fails_says_the_end_of_its_log(fake: Path) -> None:
    failing = "SamplingParams = None\ndef LLM(**given):\n    raise SystemExit('no card')"
    (fake / "vllm" / "__init__.py").write_text(failing)
    with pytest.raises(ProtocolError, match=r"stock k=0 ended with 1; .*stock-k0\.log:\nno card"):
        speculation.run(engine("stock", HERE, DRAFT, 0), Asked(), fake / "logs")


def test_replayed_drafts_are_the_recorded_tokens_and_so_many_are_wrong() -> None:
    runs = [[5, 1, 2, 3, 4, 6, 7, 8], [9, 11, 12, 13, 14, 15, 16]]
    record = Record(runs, 20, torch.device("cpu"))
    firsts, known = torch.tensor([9, 5]), torch.tensor([3, 5])
    draw = torch.Generator().manual_seed(0)
    assert record.drafts(firsts, known, 3, 1.0, draw).tolist() == [[13, 14, 15], [6, 7, 8]]
    assert record.drafts(firsts, known, 2, 0.0, draw).tolist() == [[14, 15], [7, 8]]
    at_end = record.drafts(firsts, known + 10, 2, 1.0, draw)  # behind the record any token will do
    assert at_end.shape == (2, 2) and int(at_end.max()) < 20
    drawn = torch.cat([record.drafts(firsts, known, 2, 0.7, draw) for _ in range(2000)])
    right = torch.tensor([[13, 14], [6, 7]]).repeat(2000, 1)
    assert abs(float((drawn == right).double().mean()) - 0.7) < 0.02
    with pytest.raises(ValueError, match="same token"):
        Record([[1, 2], [1, 3]], 20, torch.device("cpu"))


def test_engines_of_the_levels_draft_where_they_are_asked_to() -> None:
    plain = Configuration(("moe",))
    drafting = Configuration(("moe",), draft="all", speculate="/a/draft", drafts=3)
    assert "speculative_config" not in plain.engine()
    assert drafting.engine()["speculative_config"] == {
        "method": "eagle3", "model": "/a/draft", "num_speculative_tokens": 3,
    }  # fmt: skip
    assert drafting.engine()["additional_config"]["jitmx"]["draft_layers"] == "all"
    assert drafting.name != plain.name and "k:3" in drafting.name
    with pytest.raises(ProtocolError, match="layers of a draft are jitmx's"):
        Configuration(draft="all")


def test_the_script_explains_itself_and_refuses_what_cannot_be(run: Any, tmp_path: Path) -> None:
    assert "acceptance" in run("speculation_bench.py", "--help").stdout
    assert "results.jsonl" in run("speculation_bench.py", "speed", "--help").stdout
    assert "are no rates" in run("speculation_bench.py", "speed", tmp_path, "--rates", "many", code=2).stderr
    said = run("speculation_bench.py", "acceptance", tmp_path, "--draft-vocab", 9000, code=1).stderr
    assert "draft_vocab=9000 tokens of 8192" in said
    assert not (tmp_path / "draft").exists()
