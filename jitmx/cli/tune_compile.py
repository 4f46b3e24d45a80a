"""`jitmx tune --compile-only`: the candidates of a run on a card, compiled where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from jitmx import settings
from jitmx.cli import output
from jitmx.cli.progress import Progress

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.dispatch.tune import Task


def require_together(compile_only: bool, targets_asked: tuple[Arch, ...], measuring: Mapping[str, Any]) -> None:
    """Options of measuring and of compiling alone do not mix."""
    if not compile_only and targets_asked:
        raise click.UsageError("--arch is for --compile-only; what is measured is the card here")
    if len(targets_asked) > 1:
        raise click.UsageError("--compile-only takes one --arch; run it once for each target")
    given = [name for name, value in measuring.items() if value is not None]
    if compile_only and given:
        raise click.UsageError(f"{given[0]} is of a run that measures; leave it out beside --compile-only")
    if compile_only and settings.current().mode == "off":
        raise click.UsageError("JITMX_MODE=off keeps nothing on disk, so there is nothing to compile for; unset it")


def run(op: str, wanted: list[Task], arch: Arch, jobs: int | None, *, quiet: bool, as_json: bool) -> None:
    """Compile all candidates of the rows, and of what may follow from them, into the cache."""
    from jitmx.bench.tuning_builds import Background
    from jitmx.dispatch import offers

    rows = offers.everything(op, wanted, arch, arch.multiprocessors)
    candidates = {
        tuple(variant.identity for variant in one.variants): one for _, offered in rows for one in offered
    }.values()
    counts = {"candidates": len(candidates), "fit": 0, "breaches": 0, "failed": 0}
    errors = []
    title = f"Compiling candidates for {arch}"
    with Background(jobs, idle=0) as builds, Progress(len(candidates), title, quiet=quiet) as progress:
        builds.ask(list(candidates))
        for candidate in candidates:
            found = builds.first([candidate], None)
            fault = found[1] if found else None
            reason = fault.reason if fault else ""
            counts["fit" if fault is None else "breaches" if fault.breach else "failed"] += 1
            if fault and not fault.breach:
                errors.append(reason)
            progress.step(": ".join([f"{candidate.variants[0].name} for {arch}", *reason.splitlines()[:1]]))
    if as_json:
        output.emit({"arch": arch.name, "rows": len(rows), **counts, "cache": str(settings.current().cache_dir)})
    else:
        output.say(
            f"{arch}: {counts['candidates']} candidates of {len(rows)} rows: {counts['fit']} can be timed, "
            f"{counts['breaches']} break their contract, {counts['failed']} do not compile; "
            f"cache {settings.current().cache_dir}"
        )
    if errors:
        output.say(f"Error: {errors[0]}", err=True)
    if not counts["fit"]:
        raise click.exceptions.Exit(3)
