"""What speculation gains in an engine: steps and tokens of gpt-oss with an Eagle3 draft and without, jitmx and stock.

Random weights accept nothing, so that acceptance is given: vLLM's synthetic rejection takes each position of a proposal
with a stated probability, the same for every engine; or drafts are those of a recorded run (`replay`), so that what is
accepted, and the experts that its rows hit, are those of real tokens. The pair of `bigram` has acceptance of its own,
which is measured. What an engine finds is in OUT/results.jsonl as soon as it is known, a line a figure.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.protocol.replay import EXTENSION
from scripts.protocol.report import ProtocolError

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("jitmx", "stock")
_ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # in the caller's process scheduling stands in the way of the GPU
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model sends a function there
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Batches of up to eight requests, each with up to three proposed tokens.
_GRAPHS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
_COUNTERS = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}
# Tokens of the shorter run and of the longer, whose difference is decoding alone; prompts; and how often.
_SHORT, _LONG, _PROMPT, _RUNS = 96, 352, 128, 4
_GRAPH_TOKENS = 8  # of the graphs that are timed, at most


@dataclass(frozen=True)
class Engine:
    """One engine to time.

    Attributes:
        side: "jitmx" or "stock".
        k: tokens that are proposed a step, 0 without speculation.
        options: arguments of vllm.LLM.
        label: what tells it from another of the same side and k.
    """

    side: str
    k: int
    options: dict[str, Any]
    label: str = ""

    @property
    def name(self) -> str:
        """A text that no other has."""
        return f"{self.side} k={self.k}" + (f" {self.label}" if self.label else "")


@dataclass(frozen=True)
class Asked:
    """What an engine is asked for.

    Attributes:
        batches: requests at a time.
        plain: time decoding as the engine does it.
        rates: acceptance by chance: the part of proposals whose first 1, 2 ... tokens are accepted.
        replay: chances that a recorded token is right.
        graphs: time captured graphs.
        prompts: whose texts are wanted, greedily; beside `known`, texts without speculation, what parts is counted.
    """

    batches: Sequence[int] = (1,)
    plain: bool = False
    rates: Sequence[Sequence[float]] = ()
    replay: Sequence[float] = ()
    graphs: bool = False
    prompts: Sequence[Sequence[int]] = ()
    known: Sequence[Sequence[int]] = ()


def engine(
    side: str, target: Path, draft: Path, k: int, *, layers: str = "all", draft_layers: str = "all",
    real: bool = False, label: str = "", more: Mapping[str, Any] | None = None,
) -> Engine:  # fmt: skip
    """An engine of a target and its draft.

    Args:
        layers, draft_layers: that jitmx serves, where the side is its.
        real: the target's weights are its checkpoint's, not random ones.
        label: as in `Engine`.
        more: arguments of vllm.LLM, over these.
    """
    options: dict[str, Any] = {
        "model": str(target), "load_format": "auto" if real else "dummy", "skip_tokenizer_init": True,
        "max_num_seqs": 8, "max_num_batched_tokens": 8192, "max_model_len": 8192, "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False, "disable_log_stats": False, "seed": 0,
        "compilation_config": {"cudagraph_capture_sizes": _GRAPHS}, "worker_extension_cls": EXTENSION,
    }  # fmt: skip
    if side == "jitmx":
        own = {"mxfp4_layers": layers, **({"draft_layers": draft_layers} if k else {})}
        options["additional_config"] = {"jitmx": own}
    else:
        options["attention_config"] = {"backend": "FLASH_ATTN"}
    if k:
        options["speculative_config"] = {
            "method": "eagle3", "model": str(draft), "num_speculative_tokens": k,
            # Dummy weights of a draft have no d2t, and count as a draft without a head.
            "draft_load_config": {"load_format": "auto"},
        }  # fmt: skip
    return Engine(side, k, options | dict(more or {}), label)


def run(one: Engine, asked: Asked, out: Path) -> list[dict[str, Any]]:
    """What `work` finds, in a process of its own, and adds to results.jsonl in `out`; its log is beside.

    Raises:
        ProtocolError: it failed; the message has the end of its log.
    """
    environ = os.environ | _ENVIRON | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if one.side == "stock":
        environ["VLLM_PLUGINS"] = ""
    out.mkdir(parents=True, exist_ok=True)
    results, log = out / "results.jsonl", out / f"{one.name.replace(' ', '-').replace('=', '')}.log"
    before = len(results.read_text().splitlines()) if results.is_file() else 0
    with log.open("w") as output:
        given = json.dumps({"engine": asdict(one), "asked": asdict(asked)})
        words = [sys.executable, "-m", "scripts.protocol.speculation", str(results), given]
        done = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=ROOT, check=False)
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise ProtocolError(f"{one.name} ended with {done.returncode}; {log}:\n{end}")
    return [json.loads(line) for line in results.read_text().splitlines()[before:]]


def prompts(target: Path, count: int) -> list[list[int]]:
    """So many prompts for a target, the same whenever; no two begin alike, by which a recorded run is found."""
    most = int(json.loads((target / "config.json").read_text())["vocab_size"]) - 1000
    draw, ids = random.Random(0), range(min(1000, most // 2), most)
    return [[first, *(draw.choice(ids) for _ in range(_PROMPT - 1))] for first in draw.sample(ids, count)]


def with_gains(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Timed rows, each with its speed over that of its side without speculation; None where that is unknown."""
    rows = [dict(row) for row in rows if "tok_s" in row]
    alone = {(row["side"], row["batch"]): row["tok_s"] for row in rows if not row["k"]}
    for row in rows:
        base = alone.get((row["side"], row["batch"]))
        row["gain"] = None if base is None else round(row["tok_s"] / base, 3)
    return rows


def words(row: Mapping[str, Any]) -> str:
    """A line of results as text."""
    values = {key: value for key, value in row.items() if key not in ("engine", "side", "k", "texts")}
    return f"{row['engine']}: " + ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def parted(known: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Of texts that part from known ones, which and where they do so first; behind that a text is another."""
    found = []
    for number, (own, other) in enumerate(zip(known, texts, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        if at is not None:
            found.append((number, at))
    return found


def work(one: Mapping[str, Any], asked: Mapping[str, Any], results: Path) -> None:  # pragma: no cover - on a card
    """Start an engine, and write each figure to the end of `results` when it is known."""
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(**one["options"])
    name = Engine(one["side"], one["k"], {}, one["label"]).name

    def say(what: str, **figures: Any) -> None:
        row = {"engine": name, "side": one["side"], "k": one["k"], "what": what, **figures}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("RESULT", words(row), flush=True)

    say("start", s=round(time.perf_counter() - begin, 1))
    if one["options"]["load_format"] == "dummy":
        llm.apply_model(_spread_routing)
    drawn = prompts(Path(one["options"]["model"]), max(asked["batches"]))

    def count() -> dict[str, int]:
        by_name = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        return {key: int(by_name.get(counter, 0)) for key, counter in _COUNTERS.items()}

    def generate(some: Sequence[Sequence[int]], tokens: int, **more: Any) -> tuple[float, list[Any]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
        begin = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": list(each)} for each in some], sampling, use_tqdm=False)
        return time.perf_counter() - begin, [answer.outputs[0] for answer in done]

    def texts_of(some: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        return [list(answer.token_ids) for answer in generate(some, tokens)[1]]

    def timed(what: str, **about: Any) -> None:
        for batch in asked["batches"]:
            some, each = drawn[:batch], []
            generate(some, 16)
            first = count()
            for _ in range(_RUNS):
                parts = []
                for tokens in (_SHORT, _LONG):
                    before = count()["drafts"]
                    seconds = generate(some, tokens)[0]
                    parts.append((seconds, (count()["drafts"] - before) / batch if one["k"] else tokens))
                (short, few), (long, many) = parts
                each.append((long - short) / (many - few))
            drafts, accepted = (count()[key] - first[key] for key in ("drafts", "accepted"))
            step, tokens = statistics.median(each), 1 + accepted / drafts if drafts else 1.0
            say(what, **about, batch=batch, tok_s=round(batch * tokens / step, 1), ms_step=round(step * 1e3, 3),
                tokens_step=round(tokens, 3))  # fmt: skip

    def near(prompt: Sequence[int], text: Sequence[int], at: int, other: int) -> float | None:
        """How far apart the logits of two tokens are; None where one is none of the best."""
        found = generate([[*prompt, *text[:at]]], 1, logprobs=5)[1][0].logprobs[0]
        own = (found.get(text[at]), found.get(other))
        return None if None in own else round(abs(own[0].logprob - own[1].logprob), 4)

    if asked["plain"]:
        timed("plain")
    if asked["graphs"]:
        for graph in llm.collective_rpc("graphs", args=(_GRAPH_TOKENS,))[0]:
            say("graph", **graph)
    for rates in asked["rates"]:
        llm.collective_rpc("synthetic", args=(list(rates[: one["k"]]),))
        timed("synthetic", rates=list(rates[: one["k"]]))
    if asked["rates"]:
        llm.collective_rpc("synthetic", args=([],))
    if asked["prompts"]:
        before = count()
        texts = texts_of(asked["prompts"], _LONG)
        own = {key: value - before[key] for key, value in count().items()}
        say("texts", texts=texts, **own)
        if asked["known"]:
            apart = parted(asked["known"], texts)
            gaps = [near(asked["prompts"][i], asked["known"][i], at, texts[i][at]) for i, at in apart]
            compared = sum(map(len, texts)) - sum(len(texts[i]) - at - 1 for i, at in apart)
            say("agreement", compared=compared, parted=len(apart), logits_apart=gaps)
    if asked["replay"]:
        runs = [[*prompt, *text] for prompt, text in zip(drawn, texts_of(drawn, _LONG + 8), strict=True)]
        for rate in asked["replay"]:
            llm.collective_rpc("replay", args=(runs, rate))
            timed("replay", right=rate)


def _spread_routing(model: Any) -> int:  # pragma: no cover - in an engine on a card
    """Give norms, embeddings and router a trained model's scale: dummy ones send all tokens to the same experts."""
    import torch

    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            continue
        if "norm" in name:
            parameter.data.fill_(1.0)
        elif "embed" in name:
            parameter.data.normal_()
        elif "router" in name and parameter.dim() == 2:
            parameter.data.normal_(0, 0.02)
        elif "router" in name:
            parameter.data.zero_()
    return 0


if __name__ == "__main__":  # pragma: no cover - `run` starts it
    given = json.loads(sys.argv[2])
    work(given["engine"], given["asked"], Path(sys.argv[1]))
