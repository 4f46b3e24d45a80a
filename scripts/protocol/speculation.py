"""What speculation gains in an engine: steps and tokens of gpt-oss with an Eagle3 draft and without, jitmx and stock.

Random weights accept nothing, so that acceptance is given: drafts are those of a text that is known (`chain`), each
right with a stated chance, so that what is accepted, and the experts that its rows hit, are those of real tokens; or
vLLM's synthetic rejection takes each position of a proposal with a stated probability, the same for every engine. The
pair of `bigram` has acceptance of its own, which is measured. What an engine finds is in OUT/results.jsonl as soon as
it is known, a line a figure.

An engine is started and timed as a server is: a process of its own schedules, no statistics are gathered, and a step is
the difference of two lengths of text by the quickest runs, as a stall of the host only adds time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.protocol import chain, engines, worker
from scripts.protocol.replay import EXTENSION
from scripts.protocol.report import ProtocolError

SIDES = ("jitmx", "stock")
_ENVIRON = worker.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# Batches of up to eight requests, each with up to three proposed tokens.
_GRAPHS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
# Tokens of the shorter run and of the longer, whose difference is decoding alone; prompts; and how often.
_SHORT, _LONG, _PROMPT, _RUNS = 96, 352, 128, 4
_SEEDS = 4  # patterns of acceptance by chance, each of which is its own in 256 tokens
_GRAPH_TOKENS = 8  # of the graphs that are timed, at most
_SAID = 4  # places where texts part whose logits are looked at


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
        replay: chances that a draft is the token of the known text.
        graphs: time captured graphs, and the kernels of those of one request.
        prompts: whose texts are wanted, greedily; beside `known`, texts without speculation, what parts is counted.
        tolerance: of logits: two that are no further apart are nearly equal, and a text may take either.
    """

    batches: Sequence[int] = (1,)
    plain: bool = False
    rates: Sequence[Sequence[float]] = ()
    replay: Sequence[float] = ()
    graphs: bool = False
    prompts: Sequence[Sequence[int]] = ()
    known: Sequence[Sequence[int]] = ()
    tolerance: float = 0.0


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
        "max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 16384, "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False, "disable_log_stats": True, "seed": 0,
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


def run(one: Engine, asked: Asked, out: Path, seconds: float | None = None) -> Iterator[dict[str, Any]]:
    """What `work` finds, as it finds it, in a process of its own; it adds lines to results.jsonl in `out`.

    Its log is beside. When no more is asked for, or an error comes, the engine is ended.

    Args:
        seconds: that it may take; None: as long as it likes.

    Raises:
        ProtocolError: it failed, and the message has the end of its log; or it was not done in time. What was found
            before is in the file.
    """
    environ = engines.with_checkout(_ENVIRON | ({"VLLM_PLUGINS": ""} if one.side == "stock" else {}))
    out.mkdir(parents=True, exist_ok=True)
    results, log = (out / "results.jsonl").resolve(), out / f"{one.name.replace(' ', '-').replace('=', '')}.log"
    results.touch()
    given = json.dumps({"engine": asdict(one), "asked": asdict(asked)})
    command = [sys.executable, "-m", "scripts.protocol.speculation", str(results), given]
    begin = time.monotonic()
    with results.open() as found, engines.started(command, environ, log, cwd=engines.ROOT) as process:
        found.seek(0, os.SEEK_END)
        line = ""
        while True:
            ended = process.poll() is not None  # before its lines are read: none comes later
            while part := found.readline():
                line += part
                if line.endswith("\n"):
                    yield json.loads(line)
                    line = ""
            if ended:
                break
            if seconds is not None and time.monotonic() - begin > seconds:
                raise ProtocolError(f"{one.name} was not done in {seconds:.0f} s; {results} has what it found")
            time.sleep(0.1)
    if process.returncode:
        raise ProtocolError(f"{one.name} ended with {process.returncode}; {engines.tail(log)}")


def vocabulary(target: Path) -> int:
    """Tokens of a target, by its configuration."""
    return int(json.loads((target / "config.json").read_text())["vocab_size"])


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


def agreement(
    known: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], tolerance: float,
    apart: Callable[[int, int, int, int], float],
) -> dict[str, Any]:  # fmt: skip
    """How far texts agree with known ones, up to where each parts from its own.

    Args:
        texts: of the same lengths.
        tolerance: two logits that are no further apart are nearly equal.
        apart: how far apart the logits of two tokens are: of a text, behind so many of its known tokens, of the known
            token and of the other one.

    Returns:
        `compared`, tokens; `parted`, texts; of these `near`, where the two logits are nearly equal, and `faults`, where
        they are not; `logits_apart` of the first few, all of which count as faults where there are more.
    """
    places = parted(known, texts)
    gaps = [round(apart(i, at, known[i][at], texts[i][at]), 4) for i, at in places[:_SAID]]
    near = sum(gap <= tolerance for gap in gaps)
    compared = sum(map(len, texts)) - sum(len(texts[i]) - at - 1 for i, at in places)
    return {
        "compared": compared, "parted": len(places), "near": near, "faults": len(places) - near, "logits_apart": gaps,
    }  # fmt: skip


def chance(tokens_step: float, k: int) -> float:
    """The chance with which each draft is right, where those before it are, by the tokens that a step of k brings."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < tokens_step else (low, middle)
    return round((low + high) / 2, 3)


def work(one: Mapping[str, Any], asked: Mapping[str, Any], results: Path) -> None:
    """Start an engine, and write each figure to the end of `results` when it is known."""
    from vllm import LLM, SamplingParams

    host = worker.host_loop()
    begin = time.perf_counter()
    llm = LLM(**one["options"])
    name, k = Engine(one["side"], one["k"], {}, one["label"]).name, one["k"]
    certain = one["options"]["load_format"] == "dummy"  # what the target says is known

    def say(what: str, **figures: Any) -> None:
        row = {"engine": name, "side": one["side"], "k": k, "what": what, **figures}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("RESULT", words(row), flush=True)

    say("start", s=round(time.perf_counter() - begin, 1), host_loop_ms=round(host, 2))
    if certain:
        llm.collective_rpc("chain")
    drawn = chain.prompts(vocabulary(Path(one["options"]["model"])), max(asked["batches"]), _PROMPT, _LONG)

    def verified() -> tuple[int, int]:
        steps, looked_at = llm.collective_rpc("verified")[0] if k else (0, 0)
        return steps, looked_at

    def generate(some: Sequence[Sequence[int]], tokens: int, **more: Any) -> tuple[float, list[Any]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
        begin = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": list(each)} for each in some], sampling, use_tqdm=False)
        return time.perf_counter() - begin, [answer.outputs[0] for answer in done]

    def texts_of(answers: Sequence[Any]) -> list[list[int]]:
        return [list(answer.token_ids) for answer in answers]

    def compared(some: Sequence[Sequence[int]], known: Sequence[Sequence[int]], texts: Any) -> dict[str, Any]:
        def apart(number: int, at: int, own: int, other: int) -> float:
            """Asked of these two tokens alone: among the best few the other need not be, where an expert is another."""
            before = [*some[number], *known[number][:at]]
            found = generate([before], 1, logprob_token_ids=[own, other])[1][0].logprobs[0]
            return float(abs(found[own].logprob - found[other].logprob))

        return agreement(known, texts, asked["tolerance"], apart)

    def timed(what: str, seeds: Sequence[int | None] = (None,), said: bool = True, **about: Any) -> None:
        """Time decoding; the known text is what was `said` where that is so."""
        for batch in asked["batches"]:
            some = drawn[:batch]
            generate(some, 4)
            best, typical, steps, looked_at = 0.0, 0.0, 0, 0
            for seed in seeds:
                ends = []
                for tokens in (_SHORT, _LONG):
                    runs = []
                    for _ in range(_RUNS):
                        before = verified()
                        seconds, answers = generate(some, tokens, seed=seed)
                        after = verified()
                        runs.append((seconds, after[0] - before[0], after[1] - before[1]))
                    ends.append((min(runs), statistics.median(seconds for seconds, _, _ in runs)))
                (short, short_typical), (long, long_typical) = ends
                best, typical = best + long[0] - short[0], typical + long_typical - short_typical
                steps, looked_at = steps + long[1] - short[1], looked_at + long[2] - short[2]
            tokens = (_LONG - _SHORT) * batch * len(seeds)
            steps, each = (steps, tokens / looked_at) if k else (tokens // batch, 1.0)
            row = {
                "batch": batch, "tok_s": round(tokens / best, 1), "ms_step": round(best / steps * 1e3, 3),
                "ms_step_median": round(typical / steps * 1e3, 3), "tokens_step": round(each, 3),
            }  # fmt: skip
            if k:
                row["chance"] = chance(each, k)
            if said and certain:
                row |= compared(some, [chain.text(prompt, _LONG) for prompt in some], texts_of(answers))
            say(what, **about, **row)

    if k:
        llm.collective_rpc("replay", args=(None,))
    if asked["plain"]:
        timed("plain")
    for rate in asked["replay"]:
        llm.collective_rpc("replay", args=(rate,))
        timed("replay", right=rate, wanted=round(sum(rate**i for i in range(k + 1)), 3))
    if asked["replay"]:
        llm.collective_rpc("replay", args=(None,))
    for rates in asked["rates"]:
        given = list(rates[:k])
        llm.collective_rpc("synthetic", args=(given,))
        timed("synthetic", tuple(range(_SEEDS)), said=False, rates=given, wanted=round(1 + sum(given), 3))
    if asked["rates"]:
        llm.collective_rpc("synthetic", args=([],))
    if asked["graphs"]:  # behind what is timed: vLLM's own, replayed without its inputs, may end the engine
        for graph in llm.collective_rpc("graphs", args=(_GRAPH_TOKENS,))[0]:
            say("graph", **graph)
        for graph in llm.collective_rpc("kernels", args=(_GRAPH_TOKENS,))[0]:
            say("kernels", **graph)
    if asked["prompts"]:
        counts = [verified()[1]]
        for tokens in (_SHORT, _LONG):
            texts = texts_of(generate(asked["prompts"], tokens)[1])
            counts.append(verified()[1])
        start, short, long = counts
        # By the difference: the first token of a text is no draft, and drafts behind its last are cut off.
        more = (_LONG - _SHORT) * len(texts)
        say("texts", texts=texts, tokens_step=round(more / (long - 2 * short + start), 4) if k else 1.0)
        if asked["known"]:
            say("agreement", **compared(asked["prompts"], asked["known"], texts))


if __name__ == "__main__":  # pragma: no cover - `run` starts it
    given = json.loads(sys.argv[2])
    work(given["engine"], given["asked"], Path(sys.argv[1]))
