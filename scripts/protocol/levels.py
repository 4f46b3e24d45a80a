"""Levels 1, 1.5, 3, 4 and 6: what each runs and asserts. Level 2 is in `correctness`, level 5 in `regression`."""

from __future__ import annotations

import concurrent.futures
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scripts.protocol import agreement, engines, figures, kernel_rules, metadata, profiles, worker
from scripts.protocol.configurations import Configuration
from scripts.protocol.engines import Place, Server
from scripts.protocol.report import ProtocolError, Report

# What jitmx logs for a kernel that it compiles, and for those that warm-up should have had.
_COMPILED = re.compile(r"compiled (\S+) for sm_\w+ in \d+ ms|jitmx loaded kernels for a request, .*: (.+)")
# What a log must not hold; a traceback in a warning only tells why vLLM does without something optional.
_BAD_LINE = re.compile(
    r"CUDA error|illegal (memory|instruction)"
    r"|^(?!.*\b(DEBUG|INFO|WARNING) \d\d-\d\d ).*Traceback \(most recent call last\)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Asked:
    """What every level is asked for: where, on what, and against what."""

    place: Place
    ours: Configuration
    seed: int = 0

    def report(self, level: str, **about: Any) -> Report:
        """An empty report that says what was asked."""
        return Report(
            level,
            {
                "model": self.place.model.name, "configuration": self.ours.as_dict(),
                "options": {**engines.DEFAULTS, **self.place.options}, "seed": self.seed,
                "environment": metadata.environment(self.ours.environment()), **about,
            },
        )  # fmt: skip


def smoke(asked: Asked) -> Report:
    """Level 1: a server starts, answers one request, says what it uses, and ends when told to."""
    report = asked.report("1")
    with engines.serving(asked.place, asked.ours, JITMX_LOG_LEVEL="3", JITMX_VERBOSE="1") as server:
        report.check("starts", True, f"answered after {server.ready_s:.1f} s")
        tokens = server.complete([1, 2, 3, 4], 16)
        report.check("answers", len(tokens) == 16, f"{len(tokens)} tokens of 16")
        again = server.complete([1, 2, 3, 4], 16)
        report.check("answers the same again", again == tokens, f"{agreement.shared(again, tokens)} of 16 tokens agree")
        said = server.log.read_text(errors="replace")
        for wanted in asked.ours.announced():
            report.check("says what serves", re.search(wanted, said) is not None, f"the log is to hold {wanted!r}")
        report.results = {
            "ready_s": round(server.ready_s, 3), "compiled_at_start": len(_COMPILED.findall(said)),
            "startup": engines.startup(said),
        }  # fmt: skip
        _end(report, server, said)
    return report


def kernel_path(asked: Asked, *, batches: Iterable[int] = (1, 16), prompts: Iterable[int] = (512,)) -> Report:
    """Level 1.5: the kernels that ran are those of the configuration."""
    report = asked.report("1.5")
    found = engines.run(asked.place, asked.ours, [_profile(asked, batches, prompts)])
    report.results |= {"profiles": {asked.ours.name: found["profile"]}, "startup": {asked.ours.name: found["startup"]}}
    _judge(report, asked.ours, found)
    return report


def stress(asked: Asked, *, requests: int, parallel: int, context: int) -> Report:
    """Level 3: many requests in sequence, several at a time, a long context; no crash and no compile while serving."""
    report = asked.report("3", requests=requests, parallel=parallel, context=context)
    vocab = engines.vocabulary(asked.place.model)
    distinct = worker.random_prompts(vocab, [16 + 24 * k for k in range(10)], asked.seed)
    long = worker.random_prompts(vocab, [context - 64], asked.seed)[0]
    with engines.serving(asked.place, asked.ours, JITMX_LOG_LEVEL="3", JITMX_VERBOSE="1") as server:
        started = len(server.log.read_text(errors="replace"))
        phases: list[tuple[str, Callable[[], list[list[int]]]]] = [
            ("in sequence", lambda: [server.complete(distinct[k % 10], 32) for k in range(requests)]),
            (f"{parallel} at a time", lambda: _parallel(server, distinct, requests, parallel)),
            (f"{context} tokens of context", lambda: [server.complete(long, 64)]),
        ]
        for name, phase in phases:
            begun = time.monotonic()
            try:
                answers = phase()
            except ProtocolError as error:
                report.check(name, False, str(error))
                break
            report.results[name] = {"requests": len(answers), "seconds": round(time.monotonic() - begun, 3)}
            report.check(name, True, f"{len(answers)} requests answered")
            if name == "in sequence":
                other = sum(answers[k] != answers[k % 10] for k in range(requests))
                report.check("the same prompt, the same tokens", other == 0, f"{other} of {requests} answers differ")
        report.check("still answers", server.healthy(), "health was asked for after the last request")
        said = server.log.read_text(errors="replace")
        report.check_attention(asked.ours.name, asked.ours.attention_by, engines.startup(said))
        late = ["".join(found) for found in _COMPILED.findall(said[started:])]
        report.results["compiled_while_serving"] = late
        report.check("no compile while serving", not late, f"{len(late)} kernels: {', '.join(late[:5]) or 'none'}")
        _end(report, server, said)
    return report


def _parallel(server: Server, prompts: list[list[int]], requests: int, parallel: int) -> list[list[int]]:
    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(lambda k: server.complete(prompts[k % len(prompts)], 32), range(requests)))


def benchmark(
    asked: Asked,
    stock: tuple[Configuration, ...],
    workload: figures.Workload,
    *,
    rounds: int,
    drift: float = figures.DRIFT,
    warm: bool = False,
) -> Report:
    """Level 4: stock backends and jitmx in turn, side by side; which kernels ran is checked in the same engines.

    Args:
        rounds: engines of each configuration.
        drift: how far apart decode rates of one configuration may be for the run to count.
        warm: every cache is warm already, so that the first starts count as well.
    """
    report = asked.report("4", stock=[item.name for item in stock], workload=workload.task(asked.seed))
    runs: dict[str, list[dict[str, Any]]] = {}
    starts: dict[str, list[dict[str, Any]]] = {}
    report.results |= {"profiles": {}, "startup": starts}
    for turn in range(rounds):
        # There and back, so that a card that warms up favours nobody.
        order = (*stock, asked.ours) if turn % 2 == 0 else (asked.ours, *reversed(stock))
        for item in order:
            tasks = [workload.task(asked.seed)] + ([_profile(asked, (1, 16), ())] if turn == 0 else [])
            found = engines.run(asked.place, item, tasks, label=f".{turn}")
            runs.setdefault(item.name, []).append(found["bench"])
            starts.setdefault(item.name, []).append(found["startup"])
            if turn == 0:
                report.results["profiles"][item.name] = found["profile"]
                _judge(report, item, found)
    report.results["runs"] = runs
    report.results["host_loop_ms"] = {name: [run["host_loop_ms"] for run in found] for name, found in runs.items()}
    flattened = {name: [figures.flat(run) for run in found] for name, found in runs.items()}
    metrics = {name: figures.merged(found) for name, found in flattened.items()}
    report.results["metrics"] = metrics
    for name, rows in flattened.items():
        apart = figures.drift(rows)
        seen = f"{name}: decode rates of its runs are {apart:.1%} apart, at most {drift:.0%}"
        report.check("the card is steady", apart <= drift, seen)
    if warm or rounds > 1:  # the first starts may have filled caches
        _warm_start(report, asked.ours.name, {name: found[0 if warm else 1 :] for name, found in starts.items()})
    report.results["speed_up"] = {
        key: round(value / max(metrics[item.name][key] for item in stock), 4)
        for key, value in metrics[asked.ours.name].items()
        if key.endswith("tokens_s")
    }
    return report


def _warm_start(report: Report, ours: str, starts: dict[str, list[dict[str, Any]]]) -> None:
    """What jitmx adds to a start whose kernels are in its cache."""
    compiled = sum(run["compiled"] for run in starts[ours])
    report.check("a warm start compiles nothing", compiled == 0, f"{compiled} kernels were compiled again")
    others = [runs for name, runs in starts.items() if name != ours]
    added = figures.added(starts[ours], others)
    loading = figures.added(starts[ours], others, ("plugins_s", "loading_s"))
    for what, seconds in (("startup_added_s", added), ("loading_added_s", loading)):
        report.results[what] = None if seconds is None else round(seconds, 3)
    seen = "a log does not say how long it took" if added is None else f"{added:.2f} s beside the quickest stock"
    report.check(
        "start-up", added is not None and added <= figures.STARTUP, f"{seen}; at most {figures.STARTUP:.0f} s wanted"
    )


def matrix(asked: Asked, configurations: Iterable[Configuration], workload: figures.Workload) -> Report:
    """Level 6: every combination alone: does it start, run its kernels and none of another's, and how fast.

    A combination that fails costs its own row, not the others'.
    """
    report = asked.report("6", workload=workload.task(asked.seed))
    rows: list[dict[str, Any]] = []
    report.results["rows"] = rows
    for item in configurations:
        row: dict[str, Any] = {"configuration": item.as_dict(), "metrics": None, "error": None}
        rows.append(row)
        try:
            found = engines.run(asked.place, item, [workload.task(asked.seed), _profile(asked, (1, 16), (512,))])
        except ProtocolError as error:
            row["error"] = str(error)
            report.check(item.name, False, str(error).splitlines()[0])
            continue
        row["metrics"] = figures.flat(found["bench"])
        _judge(report, item, found)
    return report


def _profile(asked: Asked, batches: Iterable[int], prompts: Iterable[int]) -> dict[str, Any]:
    return {"task": "profile", "batches": list(batches), "prompts": list(prompts), "tokens": 24, "seed": asked.seed}


def _judge(report: Report, configuration: Configuration, found: dict[str, Any]) -> None:
    """Rules over the profiles that an engine gave, and that warm-up had every kernel."""
    report.check_warm_up(f"{configuration.name}, warm-up", found["late"])
    for item in found["profile"]:
        profile = profiles.from_dict(item)
        ran = sum(kernel.launches for kernel in profile.kernels)
        if report.check(f"{configuration.name}, {profile.phase}", ran > 0, f"{ran} launches were profiled"):
            kernel_rules.check(report, profile, configuration)


def _end(report: Report, server: Server, log: str) -> None:
    """It ends when told to, and its log up to there has no failure."""
    status = server.stop()
    report.check("ends when told to", status in (0, -15), f"exit status {status}")
    lines = log.splitlines()
    bad = [line.strip() for line in lines if _BAD_LINE.search(line)]
    report.check("the log has no failure", not bad, bad[0] if bad else f"{len(lines)} lines were read")
