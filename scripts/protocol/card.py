"""Everything that someone with a card can show, as stages with a time limit and an exit status each."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitmx import kernels
from scripts.protocol import engines, sanitize
from scripts.protocol.report import ProtocolError, Report

ROOT = engines.ROOT
_SIMULATOR = "test_simulator.py"
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_JITMX = (sys.executable, "-m", "jitmx.cli")


@dataclass(frozen=True)
class Step:
    """One command of a stage.

    Attributes:
        name: of its log.
        command: words; `{out}` is the folder.
        seconds: its time limit.
        environment: variables over this process's own; `{out}` likewise.
        stdout: a file in the folder for what it prints to stdout; the log gets all of it otherwise.
        makes: files in the folder that it must have written.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    stdout: str | None = None
    makes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Steps that show one thing, and what must be there for them.

    Attributes:
        needs: gives why the stage cannot be run here, or None.
    """

    name: str
    what: str
    steps: tuple[Step, ...]
    needs: Callable[[], str | None] = lambda: None


def _needs_sanitizer() -> str | None:
    name = sanitize.SANITIZER
    return None if shutil.which(name) else f"{name} is not on PATH; it comes with the CUDA toolkit"


def _sanitize(tool: str) -> Step:
    return Step(tool, (sys.executable, "-m", "scripts.protocol.sanitize", tool, "--out", "{out}"), 900)


def _pytest(name: str, seconds: float, *arguments: str) -> Step:
    """Tests of tests/gpu, with a report and evidence under the step's name."""
    return Step(
        name, (*_PYTEST, *arguments, f"--junitxml={{out}}/{name}.xml"), seconds,
        {"TEST_EVIDENCE": f"{{out}}/evidence/{name}.json"}, makes=(f"{name}.xml",),
    )  # fmt: skip


def tests(workers: bool) -> tuple[Step, ...]:
    """All tests but those of the simulator.

    Args:
        workers: pytest-xdist is here: several processes share out the tests that bear company, and those that time
            something follow by themselves. Otherwise a step a file: evidence is written when pytest ends, and a step
            that is cut short loses no other's.
    """
    files = [f"tests/gpu/{path.name}" for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    files.remove(f"tests/gpu/{_SIMULATOR}")
    if not workers:
        return tuple(_pytest(Path(file).stem, 600, file) for file in files)
    return (
        _pytest("together", 1800, "-n", "auto", "--dist", "worksteal", "-m", "not alone", *files),
        _pytest("alone", 600, "-m", "alone", *files),
    )


def _tune() -> tuple[Step, ...]:
    """A step an operator that can be tuned."""
    return tuple(
        Step(
            f"tune-{op}",
            (*_JITMX, "tune", op, "--model", "gpt-oss-120b", "--seconds", "1200", "--json", "--out",
             f"{{out}}/tactics/{op}.json", "--timings", f"{{out}}/tune-{op}.jsonl"),
            1500, stdout=f"tune-{op}.json", makes=(f"tune-{op}.json", f"tactics/{op}.json", f"tune-{op}.jsonl"),
        )
        for op, family in kernels.families().items()
        if family.tuning
    )  # fmt: skip


def _benchmark(name: str, *what: str) -> Step:
    return Step(
        name, (*_JITMX, "bench", *what, "--json", "--plot", f"{{out}}/{name}.png"), 1200, stdout=f"{name}.json",
        makes=(f"{name}.json", f"{name}.png"),
    )  # fmt: skip


STAGES: tuple[Stage, ...] = (
    Stage(
        "simulator", "the simulator does what the card does",
        (Step("simulator", (*_PYTEST, f"tests/gpu/{_SIMULATOR}", "--junitxml={out}/simulator.xml"), 900,
              makes=("simulator.xml",)),),
    ),
    Stage(
        "tests", "kernels and operators against their references; evidence for the ledger",
        tests(workers=importlib.util.find_spec("xdist") is not None),
    ),
    Stage(
        "sanitizer", "no kernel touches memory that is not its own, races, or misuses a barrier",
        tuple(map(_sanitize, sanitize.TOOLS)), _needs_sanitizer,
    ),
    Stage("tune", "tuning tables of this card", _tune()),
    Stage(
        "bench", "what the kernels reach beside cuBLAS and other libraries, with a plot",
        (_benchmark("bench", "linear", "routing", "quantize", "norm", "topk", "tree", "launch", "attention", "block"),),
    ),
    Stage(
        "moe", "experts of gpt-oss beside other libraries, with a plot", (_benchmark("moe", "moe"),),
    ),
)  # fmt: skip


def choose(names: str | None) -> tuple[Stage, ...]:
    """Stages by name, separated by commas, in the order of `STAGES`; None: all.

    Raises:
        ProtocolError: no such stage.
    """
    if names is None:
        return STAGES
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ProtocolError(f"--stages {names}: give some of {', '.join(known)}")
    return tuple(stage for stage in STAGES if stage.name in wanted)


def run(
    stages: tuple[Stage, ...],
    out: Path,
    *,
    scale: float = 1.0,
    without_card: bool = False,
    all_of_them: bool = False,
) -> Report:
    """Run stages in order, whatever becomes of each.

    Args:
        scale: multiplies every time limit.
        without_card: go on where no GPU is found.
        all_of_them: a stage that cannot be run here is a failure, not left out.

    Raises:
        ProtocolError: there is no GPU.
    """
    if not without_card:
        _require_card()
    report = Report("card", {"stages": [stage.name for stage in stages], "scale": scale})
    rows: dict[str, Any] = {}
    report.results["stages"] = rows
    for stage in stages:
        missing = stage.needs()
        if missing is not None:
            rows[stage.name] = {"status": "skipped", "reason": missing, "steps": []}
            print(f"skip  {stage.name}: {missing}", file=sys.stderr, flush=True)
            if all_of_them:
                report.check(stage.name, False, missing)
            continue
        steps = [_step(step, out, scale) for step in stage.steps]
        worst = next((step["status"] for step in steps if step["status"] != "passed"), "passed")
        rows[stage.name] = {"status": worst, "reason": None, "steps": steps}
        said = "; ".join(f"{step['name']} {step['status']} in {step['seconds']:.0f} s" for step in steps)
        report.check(stage.name, worst == "passed", f"{stage.what}: {said}")
    return report


def _step(step: Step, out: Path, scale: float) -> dict[str, Any]:
    for folder in ("tactics", "evidence"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    log = out / f"{step.name}.log"
    made = [out / name for name in step.makes]
    for path in made:
        path.unlink(missing_ok=True)
    command = [word.replace("{out}", str(out)) for word in step.command]
    environment = engines.with_checkout(
        {name: value.replace("{out}", str(out)) for name, value in step.environment.items()}
    )
    begun = time.monotonic()
    status, code, reason = "passed", None, None
    try:
        sink = None if step.stdout is None else out / step.stdout
        with engines.started(command, environment, log, cwd=ROOT, stdout=sink) as process:
            code = process.wait(step.seconds * scale)
        absent = [path.name for path in made if not path.is_file() or not path.stat().st_size]
        if code:
            status, reason = "failed", f"exit status {code}; {log.name} says why"
        elif absent:
            status, reason = "failed", f"it ended well but did not write {', '.join(absent)}"
    except subprocess.TimeoutExpired:
        status, reason = "timed out", f"not done in {step.seconds * scale:.0f} s; what it wrote until then is kept"
    except OSError as error:
        status, reason = "failed", str(error)
    return {
        "name": step.name, "command": command, "status": status, "exit_status": code, "reason": reason,
        "seconds": round(time.monotonic() - begun, 3), "log": log.name,
        "files": [path.name for path in made if path.is_file() and path.stat().st_size],
    }  # fmt: skip


def _require_card() -> None:
    from jitmx.errors import DriverError
    from jitmx.runtime import driver

    try:
        found = driver.devices()
    except DriverError as error:
        raise ProtocolError(f"no GPU can be used here: {error}") from None
    if not found:
        raise ProtocolError("no GPU here; run on a machine with one (`jitmx doctor --gpu` says what is missing)")
