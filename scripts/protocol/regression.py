"""Level 5: is a report of level 4 as good as a stored one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.protocol.report import ProtocolError, Report

# A rate may fall and a latency rise by this share; what is allocated beside the KV cache may grow by so many bytes.
TOLERANCE = 0.03
MEMORY_BYTES = 1 << 30
# Tail latencies of a score of requests are noise of the host; they may be this many times further off.
TAIL = 3.0


def compare(
    current: Mapping[str, Any], baseline: Mapping[str, Any], *, tolerance: float = TOLERANCE, anywhere: bool = False
) -> Report:
    """A check for each figure of the baseline.

    Args:
        current, baseline: reports of level 4.
        tolerance: share by which a figure may be worse.
        anywhere: compare although card, model, workload or who serves attention differ.

    Raises:
        ProtocolError: what was measured is not the same thing; the message names what differs.
    """
    differing = [
        f"{name}: {now!r} now, {then!r} in the baseline"
        for name, now, then in zip(_WHAT, _identity(current), _identity(baseline), strict=True)
        if now != then
    ]
    if differing and not anywhere:
        raise ProtocolError(
            f"the reports measure different things ({'; '.join(differing)}); take a baseline for this one, or say "
            "--anywhere"
        )
    report = Report("5", {"tolerance": tolerance, "differing": differing})
    if not current.get("passed"):
        report.check("level 4 passed", False, "the current report failed its own checks, so its figures say nothing")
    rows: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, then in baseline["results"]["metrics"].items():
        now = current["results"]["metrics"].get(name)
        if now is None:
            report.check(name, False, "the current report does not have this configuration")
            continue
        rows[name] = {}
        for figure, wanted in then.items():
            found = now.get(figure)
            rows[name][figure] = {"baseline": wanted, "current": found}
            if found is None:
                report.check(f"{name}, {figure}", False, "the current report does not have this figure")
            else:
                report.check(f"{name}, {figure}", *_judge(figure, found, wanted, tolerance))
    report.results["figures"] = rows
    return report


def _judge(figure: str, found: float, wanted: float, tolerance: float) -> tuple[bool, str]:
    if figure.endswith("_bytes"):
        more = found - wanted
        return more <= MEMORY_BYTES, f"{more / 2**20:+.0f} MiB, at most {MEMORY_BYTES / 2**20:+.0f} MiB"
    share = tolerance * (TAIL if "_p99_" in figure else 1.0)
    better_is_more = figure.endswith("tokens_s")
    change = found / wanted - 1
    worse = -change if better_is_more else change
    return worse <= share, f"{found:.4g} against {wanted:.4g}, {change:+.1%}; at most {share:.0%} worse"


_WHAT = ("card", "model", "workload", "options of the engine", "attention")


def _identity(report: Mapping[str, Any]) -> tuple[Any, ...]:
    about, metadata = report.get("about", {}), report.get("metadata", {})
    gpus = metadata.get("gpus", {}).get("value") or []
    model = metadata.get("model", {}).get("value") or {}
    names = [(gpu.get("name"), gpu.get("power.limit")) for gpu in gpus]
    digests = {key: model.get(key) for key in ("config_sha256", "headers_sha256")}
    # A report that does not say it is of a time when it was vLLM's.
    attention = about.get("configuration", {}).get("attention_by", "vLLM")
    return names, digests, about.get("workload"), about.get("options"), attention
