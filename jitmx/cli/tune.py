"""`jitmx tune`: measure which kernel and knobs are fastest on the present card, and write a tuning table."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitmx import settings
from jitmx.cli import output, shapes, targets, tune_compile
from jitmx.cli.group import INTERRUPTED
from jitmx.cli.options import FieldLetters, NamedPath, arch_option, jobs_option, json_option, quiet_option, span
from jitmx.cli.progress import Progress
from jitmx.quoting import short

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from jitmx.arch import Arch
    from jitmx.dispatch.journal import Journal
    from jitmx.dispatch.tune import Builds, Candidate, Measure, Outcome, Task
    from jitmx.kernels import Family, Problem
    from jitmx.kernels.tuning import Tuning

_FIRST = 2 / 3  # of the time, where more is tuned after what was asked for


@click.command(
    "tune",
    cls=FieldLetters,
    short_help="Measure the variants on this card and write a tuning table.",
    epilog="""\b
Examples:
  jitmx tune linear --model gpt-oss-120b
  jitmx tune linear -n 4096 -k 4096 -m 1,16,64 --seconds 120
  jitmx tune linear -n 5120 -k 2880 activation=mxfp8 --out tuned.json
  jitmx tune moe --model gpt-oss-120b -m 1,16,64,512
  jitmx tune moe experts=256 top=8 hidden=2048 intermediate=512 activation=silu bias=0
  jitmx tune attention --model gpt-oss-120b batch=1,16,64 context=2048,65536 queries=1
  jitmx tune attention kv_heads=8 group=4 head_dim=128 --seconds 3600
  jitmx tune linear --model gpt-oss-120b --compile-only --arch sm_90

\b
Each candidate is timed once in CUDA graphs of dependent calls over weights that rotate past the L2; the best few again,
until one wins twice in a row at the same time. Rows for which that does not happen keep their spread.
Of a layer of experts all is timed; where it goes by expert, its second product is tuned next, on the tile of the first.
Candidates are compiled in the background, the next rows' too, and timed as soon as they are there; those whose code
breaks its contract (spills, registers) are not timed. With --compile-only nothing is: a cache made so on a machine
without a GPU, with the same NVRTC, saves the time on the card's. What a layer of experts launches beside the kernels
that are tuned is compiled on the card.
What is timed runs in a process of its own: a candidate that takes the device's context with it fails alone.
An interrupted run goes on where it was: FILE.journal holds what it has measured, and which candidate ended a run.
Rows of the table that this run does not measure stay, unless code or driver are others by now.
\b
--timings writes a JSON line for each candidate, finished run or not: "problem", "low" (the fewest rows that the row of
the table serves, {"m": 5}), "kernel", "knobs", "us" (median of the first pass, null where it failed, then with
"reason") and "rounds" (its medians among the finalists). Rows follow one another, each with its fastest candidate
first.

Exit codes: 0 the table is written; 1 it cannot be, or nothing could be timed; 2 usage; 3 nothing compiles;
130 interrupted.
""",
)
@click.argument("op")
@click.argument("field", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--model", help="The layers of a model, gpt-oss-120b say, instead of sizes.")
@click.option(
    "--out", "--output", "-o", "out", type=NamedPath(dir_okay=False, path_type=Path),
    help="The table (default: <arch>/<op>.json under JITMX_TACTICS). Rows for other shapes stay in it.",
)  # fmt: skip
@click.option("--seconds", callback=span, metavar="SECONDS", help="Time for the whole run, compiling included.")
@click.option(
    "--timings", type=NamedPath(dir_okay=False, path_type=Path),
    help="Keep the time of every candidate in this file, as JSON lines.",
)  # fmt: skip
@click.option(
    "--compile-only", is_flag=True,
    help="Compile all candidates of a run on the card of --arch into the cache, and measure nothing; needs no GPU.",
)  # fmt: skip
@arch_option("The target of --compile-only, such as sm_90 (default: the GPU here, else JITMX_ARCH).")
@jobs_option
@quiet_option
@json_option
def command(
    op: str,
    field: tuple[str, ...],
    model: str | None,
    out: Path | None,
    seconds: float | None,
    timings: Path | None,
    compile_only: bool,
    targets_asked: tuple[Arch, ...],
    jobs: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Time the legal variants of OP on the present card and write a tuning table of the fastest.

    FIELD=VALUE are sizes and further fields of the calls, as `jitmx explain` takes them: n, k, dtype, activation; -n 64
    is short for n=64. Along the axes of a table (m; of attention batch, context and queries) a field may have several
    values, -m 1,16, and a row is measured for each; by default for those that suit the family.
    """
    from jitmx import kernels

    family = kernels.family(op)
    plan = family.tuning
    if plan is None:
        there = ", ".join(name for name, one in kernels.families().items() if one.tuning)
        raise click.UsageError(f"nothing of {op} is tuned; families that are: {there}")
    _require_no_override(op)
    measuring = {"--out": out, "--seconds": seconds, "--timings": timings}
    tune_compile.require_together(compile_only, targets_asked, measuring)
    asked, values = shapes.read_values(op, family.problem, field, family.axes)
    _require_timed(plan, asked)
    sizes = _sizes(family, plan, model, asked)
    if compile_only:
        (arch,) = targets.resolve(targets_asked)[:1]
        tune_compile.run(op, _wanted(family, arch, sizes, asked, values), arch, jobs, quiet=quiet, as_json=as_json)
        return
    targets.require_gpu("tune")
    from jitmx.bench import tuning
    from jitmx.bench.tuning_builds import Background
    from jitmx.dispatch import tactics, tune
    from jitmx.dispatch.journal import Journal
    from jitmx.runtime import card

    arch = card.arch(0)
    wanted = _wanted(family, arch, sizes, asked, values)
    target = out or settings.current().tactics_dir / arch.name / f"{op}.json"
    origin = tuning.origin() | {"code": tuning.code_digest(op)}
    about = {"family": op, "arch": arch.name, **origin}
    # Rows of another card are refused before hours of work, not after.
    tactics.merged(target, family, arch, origin, [])
    path = target.with_name(f"{target.name}.journal")
    with (
        Journal(path, about) as journal,
        _Shown(family, len(wanted), quiet=quiet) as shown,
        tuning.isolated(op) as measure,
        Background(jobs) as builds,
    ):
        if timings:
            journal.export(timings)  # one that cannot be written is an error now, not after hours of work
        if journal.resumed and not quiet:
            output.say(f"going on from {path}: {len(journal.rows)} rows are done", err=True)
        run = _Run(family, measure, journal, seconds, shown, builds)
        try:
            outcomes = run(wanted)
        except KeyboardInterrupt:
            shown.stop()
            output.say(
                f"Interrupted: {len(journal.rows)} of {len(wanted)} rows are in {path}; the same command goes on there",
                err=True,
            )
            raise click.exceptions.Exit(INTERRUPTED) from None
        finally:
            if timings:
                journal.export(timings)
    if not quiet:
        _tell_failures(journal)
    note = "medians in CUDA graphs of dependent calls over rotating weights"
    origin |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "note": note}
    rows = [row for outcome in outcomes for row in tune.rows(outcome, plan)]
    table = tactics.merged(target, family, arch, origin, rows)
    tactics.save(target, table)
    journal.remove()
    if as_json:
        output.emit({"path": str(target), "origin": origin, "rows": [_as_json(outcome) for outcome in outcomes]})
    else:
        _show(family, outcomes, target)


def _wanted(
    family: Family, arch: Arch, sizes: Sequence[Mapping[str, Any]], asked: Mapping[str, Any],
    values: Mapping[str, tuple[int, ...]],
) -> list[Task]:  # fmt: skip
    """The rows to be tuned."""
    from jitmx.dispatch import tune

    assert family.tuning is not None
    problems = [family.problem.on(arch, **{**asked, **size}) for size in sizes]
    for problem in problems:
        family.tuning.check(problem)
    return tune.tasks([(problem, {**family.tuning.values(problem), **values}) for problem in problems])


def _tell_failures(journal: Journal) -> None:
    """How many candidates were not timed, in one line."""
    breaches = sum(fault.breach for fault in journal.faults.values())
    if journal.faults:
        output.say(
            f"{len(journal.faults)} of {len(journal.timings)} candidates were not timed: {breaches} break their "
            f"contract, {len(journal.faults) - breaches} do not compile, do not run or are wrong",
            err=True,
        )


class _Run:
    """All tasks of a run, and those that follow from their outcomes."""

    def __init__(
        self, family: Family, measure: Measure, journal: Journal, seconds: float | None, shown: _Shown, builds: Builds
    ) -> None:
        self._family, self._measure, self._journal, self._shown = family, measure, journal, shown
        self._builds = builds
        self._end = None if seconds is None else time.monotonic() + seconds

    def __call__(self, wanted: list[Task]) -> list[Outcome]:
        """Outcomes of the tasks, and of those that follow from them."""
        from jitmx.dispatch import offers

        assert self._family.tuning is not None
        outcomes = self._tuned(wanted, {}, _FIRST if self._family.tuning.follows else 1.0)
        follow = [
            (task, agree)
            for outcome in outcomes
            for task, agree in offers.after(self._family.name, outcome)
            if _offered(self._family.name, task, agree)
        ]
        self._shown.more(len(follow))
        for number, (task, agree) in enumerate(follow):
            outcomes += self._tuned([task], agree, 1 / (len(follow) - number))
        return outcomes

    def _tuned(self, wanted: list[Task], agree: Mapping[str, Any], share: float) -> list[Outcome]:
        from jitmx.dispatch import tune

        left = None if self._end is None else share * max(self._end - time.monotonic(), 1.0)
        tuner = tune.Tuner(
            self._measure, lambda task: _offered(self._family.name, task, agree), self._journal,
            builds=self._builds, seconds=left, step=self._shown.timed,
        )  # fmt: skip
        return tuner.run(wanted, self._shown.done)


def _offered(op: str, task: Task, agree: Mapping[str, Any]) -> list[Candidate]:
    """Candidates of a task on the device here."""
    from jitmx.dispatch import offers
    from jitmx.runtime import card

    return offers.candidates(op, task, card.arch(0), card.multiprocessors(0), agree)


def _sizes(family: Family, tuning: Tuning, model: str | None, asked: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Fields of the problems whose rows are to be tuned, of a model; none beside those that were asked for."""
    for name in tuning.refused:
        if name in asked:
            raise click.UsageError(f"{name} is no field to give: tuning sets it")
    given = [name for name in tuning.sizes if name in asked]
    if model is None:
        if len(given) < len(tuning.sizes):
            *first, last = (f"{name}=" for name in tuning.sizes)
            wanted = f"{', '.join(first)} and {last}" if first else last
            raise click.UsageError(f"give {'--model, or ' if tuning.models else ''}{wanted}")
        sizes: Sequence[Mapping[str, Any]] = ({},)
    elif given:
        raise click.UsageError(f"{given[0]} is that of --model {model}; give one of the two")
    elif model not in tuning.models:
        raise click.UsageError(f"--model {short(model)} is not one of {', '.join(tuning.models) or 'none'}")
    else:
        sizes = tuning.models[model]
    for size in sizes:
        family.problem(**{**asked, **size})
    return sizes


def _require_no_override(op: str) -> None:
    """A variable that overrides knobs would be in every timing, and then in the table."""
    for field in (f"{op}_knobs", f"{op}_tile"):
        if settings.current().value(field):
            raise click.UsageError(f"{settings.origin(field)} overrides what is to be measured; unset it")


def _require_timed(tuning: Tuning, asked: Mapping[str, Any]) -> None:
    """What no timed call has is not in its row either, which serves calls with and without it."""
    for name, value in asked.items():
        if name in tuning.untimed or f"{name}={value}" in tuning.untimed:
            raise click.UsageError(
                f"{name}={value} is not timed, and rows serve calls with and without it: leave it out"
            )


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "problem": outcome.task.problem.as_dict(), "low": dict(outcome.task.low), "kernel": outcome.kernel,
        "knobs": dict(outcome.knobs), "us": outcome.us, "spread": outcome.spread, "stable": outcome.stable,
        "tried": outcome.tried, "failed": outcome.failed,
    }  # fmt: skip


def _size(family: Family, problem: Problem) -> str:
    """What a row is of, in words, axes aside."""
    assert family.tuning is not None
    return family.tuning.described(problem)


def _whole(family: Family, problem: Problem) -> str:
    """The same with the axes."""
    along = (f" {name}={getattr(problem, name)}" for name in family.axes)
    return _size(family, problem) + "".join(along)


def _show(family: Family, outcomes: list[Outcome], target: Path) -> None:
    axes = tuple(name.upper() for name in family.axes)
    output.table(
        ("SHAPE", *axes, "US", "SPREAD", "KERNEL", "KNOBS"),
        [
            (
                _size(family, outcome.task.problem), *(getattr(outcome.task.problem, name) for name in family.axes),
                f"{outcome.us:.2f}", f"{outcome.spread:.1%}" + ("" if outcome.stable else " not stable"),
                outcome.kernel, ",".join(f"{name}={output.knob(value)}" for name, value in outcome.knobs.items()),
            )
            for outcome in outcomes
        ],
        right=(*axes, "US"),
    )  # fmt: skip
    output.say(f"\nwrote {target}")
    noisy = sum(not outcome.stable for outcome in outcomes)
    if noisy:
        output.say(f"{noisy} rows did not come out the same twice in a row; tune them again on a quiet card", err=True)


class _Shown(Progress):
    """Progress by rows of the table, whose bar also moves with the timings of a row."""

    def __init__(self, family: Family, total: int, *, quiet: bool) -> None:
        super().__init__(total, "Tuning", quiet=quiet)
        self._family = family

    def _columns(self) -> list[ProgressColumn]:
        from rich import progress

        left = progress.TextColumn("left"), progress.TimeRemainingColumn()
        return [progress.TaskProgressColumn(), progress.TimeElapsedColumn(), *left]

    def more(self, rows: int) -> None:
        """There are so many rows more than were known."""
        self._total += rows
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=float(self._total))

    def timed(self, task: Task, done: int, of: int) -> None:
        """One timing of a task is done, of about so many."""
        if self._bar is not None:
            text = _whole(self._family, task.problem)
            self._bar.update(self._bar.task_ids[0], completed=self._done + min(done / of, 1.0), description=text)

    def done(self, outcome: Outcome) -> None:
        """A row is done."""
        unstable = "" if outcome.stable else f", not stable ({outcome.spread:.0%} apart)"
        self.step(f"{_whole(self._family, outcome.task.problem)}: {outcome.us:.2f} us, {outcome.kernel}{unstable}")
