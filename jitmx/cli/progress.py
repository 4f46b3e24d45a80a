"""Progress on stderr: a bar on a terminal, a line a step elsewhere, nothing where quiet is asked for."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from jitmx.cli import output
from jitmx.quoting import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class Progress:
    """Counts `total` steps; each step says in a few words what was done."""

    def __init__(self, total: int, title: str, *, quiet: bool) -> None:
        self._total = total
        self._title = title
        self._done = 0
        self._quiet = quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            # rich costs 0.1 s to import; only a terminal gets it.
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[last]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, last="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str) -> None:
        """One step is done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, last=printable(what))
        elif not self._quiet:
            output.say(f"[{self._done}/{self._total}] {what}", err=True)
