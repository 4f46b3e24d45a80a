"""`jitmx tune`: measure which kernel and knobs are fastest on the present card, and write a tuning table."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from jitmx import settings
from jitmx.cli import output, shapes
from jitmx.cli.options import json_option, quiet_option
from jitmx.errors import DriverError, KnobError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from jitmx.dispatch.tune import Outcome, Task

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MODELS = ("gpt-oss-120b", "gpt-oss-20b")


@click.command(
    "tune",
    short_help="Measure the variants on this card and write a tuning table.",
    epilog="""\b
Examples:
  jitmx tune linear --model gpt-oss-120b
  jitmx tune linear -n 4096 -k 4096 -m 1,16,64 --seconds 120
  jitmx tune linear -n 5120 -k 2880 activation=mxfp8 --out tuned.json

\b
Each candidate is timed once in CUDA graphs of dependent calls over weights that rotate past the L2; the best few again,
until one wins twice in a row at the same time. Rows for which that does not happen keep their spread.
An interrupted run goes on where it was: FILE.journal holds what it has measured.
Exit codes: 0 the table is written; 1 it cannot be, or nothing could be timed; 2 usage; 130 interrupted.
""",
)
@click.argument("op", type=click.Choice(["linear"]))
@click.argument("field", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--model", type=click.Choice(MODELS), help="The dense products of a model, instead of -n and -k.")
@click.option(
    "-m", "--m", "m", multiple=True, metavar="M,...", callback=shapes.size_list,
    help="Rows of the activations (default: powers of two up to 8192, for an output layer up to 512).",
)  # fmt: skip
@shapes.size_options
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path),
    help="The table (default: <arch>/linear.json under JITMX_TACTICS). Rows for other shapes stay in it.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), help="Time for the whole run, compiling included."
)
@quiet_option
@json_option
def command(
    op: str,
    field: tuple[str, ...],
    model: str | None,
    m: tuple[int, ...],
    n: int | None,
    k: int | None,
    out: Path | None,
    seconds: float | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Time the legal variants of OP on the present card and write a tuning table of the fastest.

    FIELD=VALUE are further fields of the calls, as `jitmx explain` takes them: dtype, activation, weight, residual.
    """
    sizes = _sizes(model, n, k)
    _require_no_override()
    _require_gpu()
    from jitmx import kernels
    from jitmx.dispatch import tactics, tune
    from jitmx.dispatch.journal import Journal
    from jitmx.ops import checks, tuning

    arch, family = checks.device_arch(0), kernels.family(op)
    asked = shapes.read(op, family.problem, field)
    given = sorted({"m", "n", "k"} & asked.keys())
    if given:
        raise click.UsageError(f"give {given[0]} as -{given[0]}")
    wanted = tune.tasks(
        [
            (family.problem.on(arch, n=size_n, k=size_k, **asked), m or shapes.usual_rows(size_n, ROWS))
            for size_n, size_k in sizes
        ]
    )  # fmt: skip
    target = out or settings.current().tactics_dir / arch.name / f"{op}.json"
    origin = tuning.origin()
    about = {"family": op, "arch": arch.name, **origin, "code": tuning.code_digest()}
    # Rows of another card are refused before hours of work, not after.
    tactics.merged(target, family, arch, origin, [])
    bench = tuning.Bench()
    path = target.with_name(f"{target.name}.journal")
    with Journal(path, about) as journal, _Shown(len(wanted), quiet=quiet) as shown:
        if journal.resumed and not quiet:
            click.echo(f"going on from {path}: {len(journal.rows)} rows are done", err=True)
        tuner = tune.Tuner(
            bench, bench.candidates, journal, prepare=tuning.prepare, seconds=seconds, step=shown.step
        )  # fmt: skip
        try:
            outcomes = tuner.run(wanted, shown.done)
        except KeyboardInterrupt:
            shown.stop()
            click.echo(
                f"interrupted: {len(journal.rows)} of {len(wanted)} rows are in {path}; the same command goes on there",
                err=True,
            )
            raise click.exceptions.Exit(130) from None
    note = "medians in CUDA graphs of dependent calls over rotating weights"
    origin |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "note": note}
    table = tactics.merged(target, family, arch, origin, [tune.row(outcome) for outcome in outcomes])
    tactics.save(target, table)
    journal.remove()
    if as_json:
        output.emit({"path": str(target), "origin": origin, "rows": [_as_json(outcome) for outcome in outcomes]})
    else:
        _show(outcomes, target)


def _sizes(model: str | None, n: int | None, k: int | None) -> list[tuple[int, int]]:
    from jitmx.kernels.linear import GPT_OSS, LinearProblem

    if (model is None) == (n is None and k is None):
        raise click.UsageError("give --model, or -n and -k")
    if model is not None:
        return [(shape[0], shape[1]) for shape in GPT_OSS]
    if n is None or k is None:
        raise click.UsageError("-n and -k go together")
    LinearProblem(n=n, k=k)
    return [(n, k)]


def _require_no_override() -> None:
    """A variable that overrides knobs would be in every timing, and then in the table."""
    for field in ("linear_knobs", "linear_tile"):
        if getattr(settings.current(), field):
            raise click.UsageError(f"{settings.origin(field)} overrides what is to be measured; unset it")


def _require_gpu() -> None:
    try:
        import torch
    except ImportError:
        raise KnobError("tune needs torch; install it with: pip install 'jitmx[torch]'") from None
    if not torch.cuda.is_available():
        raise DriverError("tune needs a GPU that torch can use, and there is none here; `jitmx doctor --gpu` says why")


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "problem": outcome.task.problem.as_dict(), "low": outcome.task.low, "kernel": outcome.kernel,
        "knobs": dict(outcome.knobs), "us": outcome.us, "spread": outcome.spread, "stable": outcome.stable,
        "tried": outcome.tried, "failed": outcome.failed,
    }  # fmt: skip


def _show(outcomes: list[Outcome], target: Path) -> None:
    problems = [outcome.task.problem.as_dict() for outcome in outcomes]
    output.table(
        ("N", "K", "M", "US", "SPREAD", "KERNEL", "KNOBS"),
        [
            (
                problem["n"], problem["k"], problem["m"], f"{outcome.us:.2f}",
                f"{outcome.spread:.1%}" + ("" if outcome.stable else " not stable"), outcome.kernel,
                ",".join(f"{name}={output.knob(value)}" for name, value in outcome.knobs.items()),
            )
            for problem, outcome in zip(problems, outcomes, strict=True)
        ],
        right=("N", "K", "M", "US"),
    )  # fmt: skip
    click.echo(f"\nwrote {target}")
    noisy = sum(not outcome.stable for outcome in outcomes)
    if noisy:
        click.echo(f"{noisy} rows did not come out the same twice in a row; tune them again on a quiet card", err=True)


class _Shown:
    """Progress on stderr: a bar with the time left on a terminal, a line a row elsewhere, nothing where quiet."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total, self._quiet, self._finished = total, quiet, 0
        self._bar: Bar | None = None

    def __enter__(self) -> _Shown:
        if not self._quiet and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._bar.add_task("Tuning", total=float(self._total))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.stop()

    def step(self, task: Task, done: int, of: int) -> None:
        """One timing of a task is done, of about so many."""
        if self._bar is not None:
            shape = task.problem.as_dict()
            text = f"[{shape['n']}, {shape['k']}] m={shape['m']}"
            self._bar.update(self._bar.task_ids[0], completed=self._finished + min(done / of, 1.0), description=text)

    def done(self, outcome: Outcome) -> None:
        """A row is done."""
        self._finished += 1
        shape = outcome.task.problem.as_dict()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=float(self._finished))
        elif not self._quiet:
            click.echo(
                f"[{self._finished}/{self._total}] [{shape['n']}, {shape['k']}] m={shape['m']}: {outcome.us:.2f} us, "
                f"{outcome.kernel}" + ("" if outcome.stable else f", not stable ({outcome.spread:.0%} apart)"),
                err=True,
            )
