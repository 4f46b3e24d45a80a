"""`jitmx verify`: run kernels on the CPU, thread for thread, and compare them with their references."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitmx.cli import output, targets
from jitmx.cli.options import NamedPath, arch_option, family_option, jobs_option, json_option, quiet_option
from jitmx.cli.progress import Progress

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.registry.spec import Variant
    from jitmx.sim.verify import Verdict

    Verdicts = list[tuple[Variant, Verdict]]


def _verify(family: str, kernel: str, knobs: dict[str, Any], arch: str) -> Verdict:
    """Module level, and in plain values, for worker processes: a specification holds functions, which do not travel."""
    from jitmx import kernels
    from jitmx.arch import parse
    from jitmx.sim.verify import verify

    return verify(kernels.family(family).spec(kernel).variant(parse(arch), **knobs))


def _words(variant: Variant, verdict: Verdict) -> str:
    if not verdict.passed:
        return f"fail {variant.name} for {variant.arch}"
    found = f"error {verdict.error:.2g}" if verdict.error else "exact"
    return (
        f"pass {variant.name} for {variant.arch}: {verdict.cases} cases, {found}, "
        f"{verdict.coverage:.1%} of its PTX, {verdict.seconds:.1f} s"
    )


def _record(verdicts: Verdicts, path: Path) -> None:
    """Add what passed to the ledger at `path`."""
    from jitmx import ledger
    from jitmx.cache import files
    from jitmx.errors import TacticError
    from jitmx.registry.render import render

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entries = [
        ledger.Entry(
            ledger.digest(render(variant)),
            variant.arch.name,
            variant.name,
            "simulated",
            date=today,
            error=verdict.error or None,
            proof=verdict.proof,
            cases=verdict.cases,
            coverage=verdict.coverage,
        )
        for variant, verdict in verdicts
        if verdict.passed
    ]
    try:
        files.make_directory(path.parent)
        ledger.save([*ledger.load(path).entries, *entries], path)
    except (OSError, TacticError) as error:
        why = error.strerror if isinstance(error, OSError) else error.message
        output.say(f"Warning: what passed was not noted in {path} ({why}); --ledger names another file", err=True)


def _can_note(path: Path | None) -> bool:
    """Whether what passes can be added to the ledger at `path` (None: this machine's own), before a run of minutes.

    Raises:
        click.UsageError: it cannot be added to the one that is named.
    """
    from jitmx import ledger
    from jitmx.errors import TacticError

    try:
        ledger.load(path or ledger.own_path())
    except TacticError as error:
        if path:
            raise click.UsageError(f"{error.message}; remove it, or name another file by --ledger") from error
        output.say(f"Warning: {error.message}; what passes is not noted: {ledger.own_remedy(error)}", err=True)
        return False
    return True


@click.command(
    "verify",
    short_help="Run kernels on the CPU and compare them with references.",
    epilog="""\b
Examples:
  jitmx verify --arch sm_121
  jitmx verify --arch sm_90 --family linear --name m8 --lines
  jitmx verify --arch sm_80,sm_121 -q --json > verdicts.json

\b
Each kernel is rendered, compiled to PTX and simulated on small ragged shapes with every access checked: bounds,
alignment, uninitialised reads, races, barriers. Results are compared with a float64 reference.
What passes is noted in a ledger as "simulated"; `jitmx variants` shows it.
Exit codes: 0 all pass, 1 a kernel fails, 130 interrupted.
""",
)
@arch_option()
@family_option
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="TEXT",
    help="Only kernels with this in their name; repeatable: with all of them.",
)
@click.option("--lines", is_flag=True, help="Also show what no case reaches: PTX lines, and sides of edges.")
@click.option(
    "--ledger",
    "path",
    type=NamedPath(dir_okay=False, path_type=Path),
    help="Where to note what passed (default: ledger.json in the cache directory).",
)
@jobs_option
@quiet_option
@json_option
def command(
    targets_asked: tuple[Arch, ...],
    family_names: tuple[str, ...],
    names: tuple[str, ...],
    lines: bool,
    path: Path | None,
    jobs: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run kernels on the CPU, thread for thread, and compare them with their references."""
    from jitmx import ledger, machine, workers

    arches = targets.resolve(targets_asked)
    variants = [v for v in targets.verified_variants(arches, family_names) if all(text in v.name for text in names)]
    if not variants:
        raise click.UsageError(
            f"no kernel that is verified for {', '.join(map(str, arches))} has {' and '.join(names)} in its name; "
            "`jitmx variants` lists them"
        )
    noted = _can_note(path)
    count = min(jobs or machine.compiles_at_once(), len(variants))
    title = f"Verifying {', '.join(map(str, arches))}"
    verdicts: Verdicts = []
    with Progress(len(variants), title, quiet=quiet) as progress, workers.pool(count) as pool:
        with workers.starting():
            found = [pool.submit(_verify, v.spec.family, v.spec.name, v.knobs.as_dict(), v.arch.name) for v in variants]
        for variant, future in zip(variants, found, strict=True):
            verdict = future.result()
            verdicts.append((variant, verdict))
            progress.step(_words(variant, verdict))
    if noted:
        _record(verdicts, path or ledger.own_path())
    if as_json:
        output.emit(
            {"arch": ",".join(map(str, arches)), "kernels": [_row(*pair, len(arches) > 1) for pair in verdicts]}
        )
    else:
        _show(verdicts, lines)
    if not all(verdict.passed for _, verdict in verdicts):
        raise click.exceptions.Exit(1)


def _row(variant: Variant, verdict: Verdict, with_arch: bool) -> dict[str, Any]:
    row = {
        "name": variant.name,
        "status": "pass" if verdict.passed else "fail",
        "error": verdict.failure if verdict.failure else verdict.error,
        "coverage": round(verdict.coverage, 4),
        "untouched": list(verdict.untouched),
    }
    return row | {"arch": variant.arch.name} if with_arch else row


def _show(verdicts: Verdicts, lines: bool) -> None:
    output.table(
        ("NAME", "ARCH", "RESULT", "CASES", "ERROR", "COVERAGE", "UNTOUCHED", "THREAD-INSTRUCTIONS", "SECONDS"),
        [
            (
                variant.name,
                variant.arch.name,
                "pass" if verdict.passed else "FAIL",
                verdict.cases,
                f"{verdict.error:.2g}" if verdict.error else "exact" if verdict.passed else None,
                f"{verdict.coverage:.1%}",
                len(verdict.untouched) or None,
                verdict.report and f"{verdict.report.thread_instructions:,}",
                f"{verdict.seconds:.1f}",
            )
            for variant, verdict in verdicts
        ],
        right=("CASES", "ERROR", "COVERAGE", "UNTOUCHED", "THREAD-INSTRUCTIONS", "SECONDS"),
    )
    for variant, verdict in verdicts:
        if verdict.failure:
            output.say(f"\n{variant.name} for {variant.arch}: {verdict.failure}")
        if lines and verdict.uncovered:
            output.say(f"\n{variant.name} for {variant.arch}: these lines of its PTX are not covered by any case")
            for number, text in verdict.uncovered:
                output.say(f"  {number:6}  {text}")
        if lines and verdict.untouched:
            output.say(f"\n{variant.name} for {variant.arch}: no case's values stand on these sides of its edges")
            for side in verdict.untouched:
                output.say(f"  {side}")
