"""Which engines a benchmark of speculation starts, what it makes of their figures, and how one that fails is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from jitmx.errors import InputError
from scripts import speculation_bench
from scripts.protocol import chain, speculation
from scripts.protocol.configurations import Configuration
from scripts.protocol.report import ProtocolError
from scripts.protocol.speculation import Asked, engine

HERE, DRAFT = Path("/a/target"), Path("/a/draft")

# As much of vLLM as an engine is asked for: its texts are the chain's, but that the third one has a token of its own.
FAKE = """
import os, time, types
class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(given)
class LLM:
    def __init__(self, **options):
        self.k = options.get("speculative_config", {}).get("num_speculative_tokens", 0)
        self.looked_at, self.log = 0, os.environ.get("ASKED")
        self.tokens_step = 1 + float(os.environ.get("ACCEPTS", 0))
    def collective_rpc(self, name, args=()):
        if name == "verified":
            return [[self.looked_at, self.looked_at]]
        if self.log:
            with open(self.log, "a") as file:
                print(name, *args, file=file)
        if name == "replay":
            self.tokens_step = 1 + (args[0] or float(os.environ.get("ACCEPTS", 0)))
        return [[{"graph": "target", "tokens": 1, "requests": 1, "ms": 1.5}]]
    def generate(self, prompts, sampling, use_tqdm):
        found = []
        time.sleep(sampling.max_tokens * len(prompts) * 1e-5 + float(os.environ.get("ASLEEP", 0)))
        for prompt in prompts:
            last, count = prompt["prompt_token_ids"][-1], sampling.max_tokens
            self.looked_at += bool(self.k) * round(count / self.tokens_step)
            text = [last + 1 + i for i in range(count)]
            if self.k and count > 300 and os.environ.get("PART"):
                text[300] += 7
            asked = getattr(sampling, "logprob_token_ids", [])
            best = {token: types.SimpleNamespace(logprob=-1.0 - i / 4) for i, token in enumerate(asked)}
            found.append(types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=text, logprobs=[best])]))
        return found
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target whose engines are `FAKE`."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(FAKE)
    # Nothing that they do here takes torch, whose import would be most of what a test takes.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("def inference_mode():\n    return lambda function: function\n")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The script within this process, which has torch; its engines are processes of their own."""
    monkeypatch.setattr(speculation_bench.signal, "signal", lambda *_: None)

    def call(*words: object, code: int = 0) -> Result:
        result = CliRunner().invoke(speculation_bench.main, list(map(str, words)))
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return call


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


def test_every_figure_of_an_engine_is_a_line_as_soon_as_it_is_known(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fake / "target"
    monkeypatch.setenv("ASKED", str(fake / "asked"))
    alone = list(speculation.run(engine("jitmx", target, DRAFT, 0), Asked(plain=True), fake / "out"))
    assert [row["what"] for row in alone] == ["start", "plain"] and alone[0]["host_loop_ms"] > 0
    assert alone[1]["tokens_step"] == 1.0 and alone[1]["compared"] == 352 and alone[1]["faults"] == 0
    asked = Asked((1, 2), rates=((0.5,), (0.6, 0.3)), replay=(0.7,), graphs=True)
    coming = speculation.run(engine("jitmx", target, DRAFT, 1), asked, fake / "out")
    first = next(coming)
    assert first["what"] == "start"
    found = [first, *coming]
    lines = (fake / "out" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [*alone, *found]
    assert [row["what"] for row in found] == ["start", "replay", "replay", *["synthetic"] * 4, "graph", "kernels"]
    assert [row["rates"] for row in found if row["what"] == "synthetic"] == [[0.5], [0.5], [0.6], [0.6]]
    for row in found[1:3]:
        assert row["wanted"] == 1.7 and abs(row["tokens_step"] - 1.7) < 0.02 and abs(row["chance"] - 0.7) < 0.02
        assert row["compared"] == row["batch"] * 352 and row["parted"] == 0
        assert {"tok_s", "ms_step", "ms_step_median"} < set(row)
    assert "right 0.7" in speculation.words(found[1])
    said = (fake / "asked").read_text().splitlines()
    # Graphs come last: vLLM's own may end the engine.
    rates = ["synthetic [0.5]", "synthetic [0.6]", "synthetic []"]
    assert said == ["chain", "chain", "replay None", "replay 0.7", "replay None", *rates, "graphs 8", "kernels 8"]


def test_what_a_graph_of_one_request_launches_is_listed_by_the_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.protocol import replay

    class Shape(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    def shape(requests: int, mode: str = "FULL") -> Shape:
        return Shape(cg_mode=SimpleNamespace(name=mode), num_tokens=2 * requests, num_reqs=requests, num_active_loras=0)

    def event(name: str, us: float, kind: str = "CUDA") -> Any:
        return SimpleNamespace(device_type=SimpleNamespace(name=kind), name=name, device_time_total=us)

    class Seen:
        def __init__(self, activities: Any) -> None: ...
        def __enter__(self) -> Seen:
            return self

        def __exit__(self, *error: object) -> None: ...
        def events(self) -> list[Any]:
            return [*[event("short", 2.0)] * 16, *[event("long", 80.0)] * 8, event("python", 9.0, "CPU")]

    graphs = {shape(1): "of one", shape(2): "of two", shape(1, "PIECEWISE"): "in pieces"}
    monkeypatch.setattr(replay, "_milliseconds", lambda graph, times: 0.1)
    monkeypatch.setattr("torch.profiler.profile", Seen)
    worker = replay.Replay()
    worker.model_runner = SimpleNamespace(cudagraph_manager=SimpleNamespace(graphs=graphs), speculator=None)
    assert [row["requests"] for row in worker.graphs(8)] == [1, 2]
    (row,) = worker.kernels(8)
    assert row["graph"] == "target" and row["tokens"] == 2 and row["us"] == 84.0
    assert row["launches"] == ["1 x 80.00 long", "2 x 2.00 short"]


def test_each_place_where_texts_part_is_a_near_tie_or_a_fault(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fake / "target"
    prompts = chain.prompts(5000, 2, 16, 352)
    texts = [chain.text(prompt, 352) for prompt in prompts]
    monkeypatch.setenv("PART", "1")
    drafting = engine("jitmx", target, DRAFT, 1, real=True)
    for tolerance, near in ((0.25, 2), (0.2, 0)):
        asked = Asked(prompts=prompts, known=texts, tolerance=tolerance)
        *_, own, row = speculation.run(drafting, asked, fake / "out")
        assert own["what"] == "texts" and own["tokens_step"] == 1.0
        assert row["parted"] == 2 and row["compared"] == 2 * 301 and row["logits_apart"] == [0.25, 0.25]
        assert (row["near"], row["faults"]) == (near, 2 - near)


def test_partings_that_nobody_looked_at_are_faults() -> None:
    known = [[1, 2, 3]] * 9
    found = speculation.agreement(known, [[1, 2, 4]] * 9, 1.0, lambda *_: 0.5)
    assert (found["parted"], found["near"], found["faults"], found["compared"]) == (9, 4, 5, 27)


def test_the_chance_of_a_draft_follows_from_the_tokens_of_a_step() -> None:
    for k in (1, 2, 3):
        assert [speculation.chance(sum(p**i for i in range(k + 1)), k) for p in (0.0, 0.6, 1.0)] == [0.0, 0.6, 1.0]


def test_an_engine_that_fails_says_the_end_of_its_log(fake: Path) -> None:
    failing = "SamplingParams = None\ndef LLM(**given):\n    raise SystemExit('no card')"
    (fake / "vllm" / "__init__.py").write_text(failing)
    with pytest.raises(ProtocolError, match=r"(?s)stock k=0 ended with 1; .*stock-k0\.log:.*no card"):
        list(speculation.run(engine("stock", HERE, DRAFT, 0), Asked(), fake / "logs"))


def test_an_engine_that_takes_too_long_is_ended_and_what_it_found_stays(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = "os.execvp('sleep', ['sleep', '600'])"
    slow = FAKE.replace(
        "def generate(self, ", f"def generate(self, *given, **more):\n        {asleep}\n    def never(self, "
    )
    (fake / "vllm" / "__init__.py").write_text(slow)
    coming = speculation.run(engine("jitmx", fake / "target", DRAFT, 0), Asked(plain=True), fake / "out", 3600)
    assert next(coming)["what"] == "start"
    later = time.monotonic() + 3600
    monkeypatch.setattr(speculation.time, "monotonic", lambda: later)
    with pytest.raises(ProtocolError, match=r"jitmx k=0 was not done in 3600 s; .*results\.jsonl has what it found"):
        list(coming)
    lines = (fake / "out" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines] == ["start"]


class Toy(torch.nn.Module):
    """A model with the parameters of a target: 36 random blocks, each as loud as an expert's output is."""

    def __init__(self, vocabulary: int, hidden: int, noise: float) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.noise, self.draw = noise, draw
        self.embed_tokens = torch.nn.Embedding(vocabulary, hidden, dtype=torch.bfloat16)
        self.norm = torch.nn.Parameter(torch.zeros(hidden, dtype=torch.bfloat16))
        self.router = torch.nn.Linear(hidden, 8, dtype=torch.bfloat16)
        self.lm_head = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight.data.uniform_(-1e-3, 1e-3, generator=draw)
        self.blocks = [torch.randn(hidden, hidden, generator=draw) * hidden**-0.5 for _ in range(36)]

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.lm_head.weight)

    def says(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens).float()
        for block in self.blocks:
            normed = torch.nn.functional.rms_norm(x, x.shape[1:])
            x = x + normed @ block * (1 + self.noise * torch.randn(len(x), 1, generator=self.draw))
        normed = torch.nn.functional.rms_norm(x, x.shape[1:]) * self.norm
        return self.compute_logits(normed.bfloat16()).argmax(-1)


def test_the_text_of_the_chain_is_certain_whatever_the_blocks_add() -> None:
    model = Toy(3000, 520, noise=0.5)
    tokens = torch.arange(2999)
    assert (model.says(tokens) == tokens + 1).float().mean() < 0.01
    chain.write(model)
    assert torch.equal(model.says(tokens), tokens + 1)
    assert torch.equal(model.norm, torch.ones_like(model.norm)) and not model.router.bias.any()
    assert 0.018 < float(model.router.weight.detach().float().std()) < 0.022
    size = model.embed_tokens.weight.float().pow(2).mean(1).sqrt()
    assert torch.allclose(size, torch.full_like(size, chain.LOUD), rtol=0.01)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.0, 0.6, 0.7, 0.8, 1.0])
def test_a_replay_has_the_acceptance_that_was_asked_for(rate: float, k: int) -> None:
    vocabulary, requests = 20000, 2
    prompts = chain.prompts(vocabulary, requests, 8, 999)
    own = torch.full((requests, k), -5)
    drafts = chain.Proposals(
        lambda *_, **__: own, rate, steps=k, requests=4, vocabulary=vocabulary, device="cpu", seed=3
    )  # fmt: skip
    last = torch.zeros(4, 1, dtype=torch.int64)
    batch = SimpleNamespace(num_reqs=requests, idx_mapping=torch.tensor([3, 1, 0]), num_draft_tokens=0)
    first = None
    for _ in range(2):  # behind a prompt the drafts are the same again
        last[[3, 1], 0] = torch.tensor([prompt[-1] + 1 for prompt in prompts])
        batch.num_draft_tokens, found, before = 0, [], drafts.looked_at
        proposed = drafts(batch, None, None, None, None, None, None, last)
        for _ in range(200):
            batch.num_draft_tokens = requests * k
            says = last[[3, 1]] + 1 + torch.arange(k + 1)
            right = (proposed == says[:, :k]).int().cumprod(1).sum(1)
            assert (proposed >= 0).all() and (proposed < vocabulary).all()
            found.append(right.tolist())
            last[[3, 1], 0] = says[torch.arange(requests), right]
            proposed = drafts(batch, None, None, None, None, None, None, last_sampled=last)
        first = first or found
        assert found == first and drafts.looked_at - before == 400
        assert last[[3, 1], 0].tolist() == [
            chain.text(p, 999)[sum(r[i] for r in found) + 200] for i, p in enumerate(prompts)
        ]
        for i in range(requests):
            tokens_step = 1 + sum(right[i] for right in found) / 200
            assert abs(tokens_step - sum(rate**i for i in range(k + 1))) < 0.03
    assert drafts.verified == 400


def test_without_a_rate_drafts_are_the_drafts_own_and_steps_are_counted() -> None:
    own = torch.tensor([[4, 5]])
    drafts = chain.Proposals(lambda *_, **__: own, None, steps=2, requests=1, vocabulary=9, device="cpu")
    for count in (0, 2, 2):
        batch = SimpleNamespace(num_reqs=1, idx_mapping=torch.tensor([0]), num_draft_tokens=count)
        assert drafts(batch) is own
    assert (drafts.verified, drafts.looked_at) == (2, 2)


def test_prompts_end_where_their_text_and_wrong_drafts_have_room() -> None:
    for vocabulary in (1002, 201088):
        found = chain.prompts(vocabulary, 8, 128, 500)
        assert found == chain.prompts(vocabulary, 8, 128, 500) and {len(prompt) for prompt in found} == {128}
        assert all(0 <= token < vocabulary for prompt in found for token in prompt)
        assert all(max(chain.text(prompt, 500)) < vocabulary // 2 for prompt in found)
    with pytest.raises(InputError, match=r"1001 tokens have no room for texts of 500, .*; give a model of 1002"):
        chain.prompts(1001, 1, 8, 500)


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


def test_the_script_says_each_figure_and_keeps_those_of_earlier_parts(
    bench: Callable[..., Result], fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["speed", fake / "out", "--model", "small", "--draft", "tiny", "--side", "jitmx"]
    first = bench(*words, "--part", "plain").stdout.splitlines()
    assert [line.split(":")[0] for line in first] == ["RESULT jitmx k=0", "RESULT jitmx k=0", "GAIN jitmx k=0"]
    (fake / "out" / "tiny.part").mkdir()  # of a draft that was being written
    (fake / "out" / "tiny.part" / "model.safetensors").write_bytes(b"cut")
    again = bench(*words, "--part", "replay", "--part", "graphs", "--k", 1, "--k", 2, "--replay", 0.6).stdout
    gains = [line for line in again.splitlines() if line.startswith("GAIN")]
    assert len(gains) == 3 and "right 0.6, wanted 1.6" in gains[1] and "wanted 1.96" in gains[2]
    assert all("gain " in line for line in gains)
    rows = json.loads((fake / "out" / "speculation.json").read_text())["rows"]
    assert [row["k"] for row in rows] == [0, 1, 2]
    assert (fake / "out" / "tiny" / "config.json").is_file() and not (fake / "out" / "tiny.part").exists()
    monkeypatch.setenv("ASLEEP", "100")
    late = bench(*words, "--part", "plain", "--limit", 1, code=1)
    assert "was not done in" in late.stderr or "leaves no time" in late.stderr
    assert "GAIN jitmx k=2" in late.stdout


def test_texts_that_part_at_logits_far_apart_end_a_run_with_an_error(
    bench: Callable[..., Result], fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["acceptance", fake / "pair", "--side", "jitmx", "--k", 1]
    monkeypatch.setenv("ACCEPTS", "1")
    assert "of 2816 tokens 0 are others" in bench(*words).stdout
    words[1] = fake / "again"
    monkeypatch.setenv("PART", "1")
    parted = bench(*words, code=1)
    assert "of 2408 tokens 8 are others than without speculation, 4 of these" in parted.stdout
    assert "jitmx: texts part at logits that are [0.25, 0.25, 0.25, 0.25] apart" in parted.stderr
    speed = ["speed", fake / "s", "--model", "small", "--draft", "tiny", "--part", "replay"]
    said = bench(*speed, "--k", 1, "--replay", 0.5, code=1)
    assert "1 texts part from the known one" in said.stderr and "logits_apart [0.25]" in said.stdout


def test_other_acceptance_than_the_tables_of_a_pair_have_is_an_error(
    bench: Callable[..., Result], fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["acceptance", fake / "a", "--side", "jitmx", "--k", 2, "--corrupted", 0.25, "--engine", '{"seed": 3}']
    assert "0.0000 tokens are accepted a step, wanted 1.0000" in bench(*words, code=1).stderr
    words[1] = fake / "b"
    monkeypatch.setenv("ACCEPTS", "1")
    assert "1.0000 tokens a proposal, wanted 1.0000" in bench(*words).stdout


@pytest.mark.parametrize("text", ["[1", "[1]", "3"])
def test_arguments_of_an_engine_that_are_no_object_are_refused(
    bench: Callable[..., Result], tmp_path: Path, text: str
) -> None:
    for command in ("speed", "acceptance"):
        assert "is no JSON object" in bench(command, tmp_path, "--engine", text, code=2).stderr


def test_the_script_explains_itself_and_refuses_what_cannot_be(bench: Callable[..., Result], tmp_path: Path) -> None:
    assert "acceptance" in bench("--help").stdout
    assert "results.jsonl" in bench("speed", "--help").stdout
    assert "are no rates" in bench("speed", tmp_path, "--rates", "many", code=2).stderr
    said = bench("acceptance", tmp_path, "--draft-vocab", 9000, code=1).stderr
    assert "draft_vocab=9000 tokens of 8192" in said
    assert not (tmp_path / "draft").exists()
