"""Progress on stderr: a bar on a terminal, a line a step elsewhere, nothing where quiet is asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from jitmx.cli import output
from jitmx.quoting import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn


class Progress:
    """Counts `total` steps; each step says in a few words what was done."""

    def __init__(self, total: int, title: str, *, quiet: bool) -> None:
        self._total = total
        self._title = title
        self._done = 0
        self._quiet = quiet
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            # rich costs 0.1 s to import; only a terminal gets it.
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                *self._columns(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(self._title, total=float(self._total), last="")
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _columns(self) -> list[ProgressColumn]:
        """What stands behind the bar."""
        from rich import progress

        last = progress.TextColumn("{task.fields[last]}", markup=False)
        return [progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), last]

    def stop(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str) -> None:
        """One step is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=float(self._done), last=printable(what))
        elif not self._quiet:
            output.say(f"[{self._done}/{self._total}] {what}", err=True)
