"""Every kernel of this card under one tool of compute-sanitizer: a process, a log and a line for each of its ways.

    python -m scripts.protocol.sanitize memcheck|racecheck|synccheck [--out FOLDER] [FAMILY.KERNEL]…

A kernel's ways are those of `scripts.protocol.launches`; its name stands for all of them. Each is launched on its
largest case, or on its smallest where a tool can tell nothing from more (`hazards.SMALLEST`). What a tool says of one
ends that one's process at worst, so that every other has its verdict. Ends with 1 where one is not clean.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from jitmx import arch, machine
from jitmx.runtime import driver
from scripts.protocol import engines, hazards, launches

SANITIZER = "compute-sanitizer"
FOUND = 9  # exit status that the sanitizer is asked for where it reports anything
SECONDS = 240.0  # that one kernel may take
_AT_ONCE = 8
_LAUNCHED = re.compile(r"^\S.*: error \S+, gate \S+$", re.MULTILINE)
_ERRORS = re.compile(r"^========= ERROR SUMMARY: (\d+) errors?$", re.MULTILINE)
_SAID = re.compile(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY)(\S.*)$", re.MULTILINE)


def silent(log: str) -> str | None:
    """Why the log of memcheck or synccheck is not that of a clean kernel, or None."""
    counts = _ERRORS.findall(log)
    if len(counts) != 1:
        return f"the log has {len(counts)} summaries of errors; it should have one"
    if counts[0] == "0":
        return None
    said = _SAID.search(log)
    return f"{counts[0]} errors, the first: {said[1] if said else 'not told'}"


@dataclass(frozen=True)
class Tool:
    """A tool of compute-sanitizer.

    Attributes:
        environment: variables that it reads.
        judge: gives why a log is not that of a clean kernel, or None.
        smallest: kernels that it watches on their smallest case, others on their largest.
    """

    environment: tuple[tuple[str, str], ...] = ()
    judge: Callable[[str], str | None] = silent
    smallest: frozenset[str] = frozenset()


TOOLS: dict[str, Tool] = {
    "memcheck": Tool(),
    "racecheck": Tool(hazards.ENVIRONMENT, hazards.judge, hazards.SMALLEST),
    "synccheck": Tool(),
}


@dataclass(frozen=True)
class Verdict:
    """What a tool says of one kernel.

    Attributes:
        kernel: FAMILY.KERNEL, or another way of it.
        reason: why it is not clean, or None.
        launched: what was launched, and how far it is from its reference.
    """

    kernel: str
    reason: str | None
    launched: str
    seconds: float

    def __str__(self) -> str:
        said = self.launched if self.reason is None else self.reason
        return f"{'clean' if self.reason is None else 'FAULT'}  {self.kernel:<16} {self.seconds:5.1f} s  {said}"


def command(tool: str, kernel: str) -> list[str]:
    """What runs one kernel under a tool."""
    size = ("--smallest",) if launches.kernel_of(kernel) in TOOLS[tool].smallest else ()
    watched = (sys.executable, "-m", "scripts.protocol.launches", *size, kernel)
    return [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), *watched]


def verdict(tool: str, status: int, log: str) -> str | None:
    """Why a kernel that was run under `tool` with this exit status and log is not clean, or None."""
    if status not in (0, FOUND):
        return f"exit status {status}"
    bad = TOOLS[tool].judge(log)
    if bad is None and not _LAUNCHED.search(log):
        return "nothing was launched"
    return bad


def sanitize(tool: str, kernel: str, folder: Path, seconds: float = SECONDS) -> Verdict:
    """Run one kernel under a tool; the log is FOLDER/KERNEL.log."""
    log = folder / f"{kernel}.log"
    # Without torch's pool each array is an allocation of its own, and what lies past its end is nobody's.
    over = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **dict(TOOLS[tool].environment)}
    begun, launched = time.monotonic(), "nothing"
    try:
        with engines.started(command(tool, kernel), engines.with_checkout(over), log, cwd=engines.ROOT) as process:
            status = process.wait(seconds)
        text = log.read_text(errors="replace")
        reason = verdict(tool, status, text)
        launched = next(iter(_LAUNCHED.findall(text)), launched)
    except subprocess.TimeoutExpired:
        reason = f"not done in {seconds:.0f} s"
    except OSError as error:
        reason = str(error)
    return Verdict(kernel, reason, launched, time.monotonic() - begun)


@click.command()
@click.argument("tool", type=click.Choice(list(TOOLS)))
@click.argument("only", nargs=-1, metavar="[FAMILY.KERNEL]…")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="protocol-out/sanitizer", help="Folder for logs."
)
@click.option("--seconds", type=float, default=SECONDS, show_default=True, help="Time limit of one kernel.")
@click.option("--at-once", type=int, default=min(_AT_ONCE, machine.compiles_at_once()), help="Kernels at a time.")
def main(tool: str, only: tuple[str, ...], out: Path, seconds: float, at_once: int) -> None:
    """A line a kernel of this card: what TOOL of compute-sanitizer says of one launch."""
    device = driver.devices()[0]
    target = arch.of_device(device.major, device.minor)
    known = [way for way, _ in launches.ways(target)]
    if unknown := sorted(set(only) - set(known)):
        raise click.UsageError(f"{', '.join(unknown)}: no kernel of {target}; its kernels: {', '.join(known)}")
    wanted = [way for way in known if not only or {way, launches.kernel_of(way)} & set(only)]
    folder = out.resolve() / tool
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda kernel: sanitize(tool, kernel, folder, seconds), wanted))
    for each in found:
        click.echo(str(each))
    bad = [each.kernel for each in found if each.reason is not None]
    click.echo(f"{tool}: {len(found) - len(bad)} of {len(found)} kernels are clean; logs are in {folder}")
    sys.exit(1 if bad or not found else 0)


if __name__ == "__main__":
    main()
