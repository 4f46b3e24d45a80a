"""What a tuning run has measured so far, on disk, so that an interrupted run goes on where it was.

JSON lines: the first says what the run is of, each further one is one outcome. A line that was cut short by a crash
ends the file: it is dropped when the run goes on. A candidate is noted before it is launched: one with which a run
ended without an outcome has failed, and is not launched again.

The file goes when the run is done; `export` writes what it says of every candidate for people to read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jitmx.cache import files
from jitmx.errors import TacticError
from jitmx.quoting import short

SCHEMA_VERSION = 3
_LARGEST = 64 << 20  # bytes
# What a finished row holds (`tune.Outcome`, but for its task).
_ROW: dict[str, Any] = {
    "kernel": str, "knobs": dict, "us": int | float, "spread": int | float, "stable": bool, "tried": int, "failed": int
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Why a candidate has no time.

    Attributes:
        reason: in words.
        breach: whether its code breaks its contract; else it does not compile, does not run or is wrong.
    """

    reason: str
    breach: bool = False


_ENDED = Fault("it ended the run")


def _of(kind: Any, entry: Mapping[str, Any], name: str) -> Any:
    """What `entry` says of `name`, which has to be of a kind; a number, finite."""
    value = entry[name]
    if (
        not isinstance(value, kind)
        or (isinstance(value, bool) and kind is not bool)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise TypeError(f"{name} is {short(value)}")
    return value


class Journal:
    """Timings and finished rows of one run, by text keys.

    Args:
        path: the file; its folder is made.
        about: what the run is of, such as family, card, driver and digest of the code. A journal about anything else is
            started anew.

    Attributes:
        timings: microseconds of the first pass, by task and candidate; None where a candidate failed.
        faults: why, of those that failed.
        rounds: microseconds of each later timing.
        rows: finished rows, by task.
        resumed: whether an earlier run's outcomes were taken over.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = {"schema_version": SCHEMA_VERSION, **about}
        self.timings: dict[tuple[str, str], float | None] = {}
        self.faults: dict[tuple[str, str], Fault] = {}
        self.rounds: dict[tuple[str, str], list[float]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.resumed = False
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._read()
            self._stream = self.path.open("ab")
            self._stream.truncate(whole)
        except OSError as error:
            raise TacticError(f"{self.path}: the journal of the run cannot be kept there ({error})") from error
        if not whole:
            self._append(self.about)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def _read(self) -> int:
        """Take over what is there, and say how many bytes of it are whole lines of this run; 0 for another run's."""
        found = files.read(self.path, _LARGEST, follow=True)
        data = b"" if found is None else found[0]
        size = 0
        for number, line in enumerate(data.splitlines(keepends=True)):
            try:
                entry = json.loads(line)
                whole = line.endswith(b"\n") and isinstance(entry, dict)
            except (ValueError, RecursionError):
                whole = False
            if not whole:
                break
            if number == 0:
                if entry != json.loads(json.dumps(self.about)):
                    return 0
            else:
                try:
                    self._take_over(entry)
                except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                    raise TacticError(
                        f"{self.path}: line {number + 1} is no outcome of a run ({type(error).__name__}: {error})",
                        "remove the journal to start the run anew",
                    ) from error
            size += len(line)
        self.resumed = bool(self.rows or self.timings)
        return size

    def _take_over(self, entry: dict[str, Any]) -> None:
        """Take over one line of an earlier run."""
        task = _of(str, entry, "task")
        low, problem = json.loads(task)
        if not (isinstance(low, dict) and isinstance(problem, dict)):
            raise TypeError("task is no pair of least values and problem")
        if "row" in entry:
            row = _of(dict, entry, "row")
            for name, kind in _ROW.items():
                _of(kind, row, name)
            self.rows[task] = {name: row[name] for name in _ROW}
            return
        key = task, _of(str, entry, "candidate")
        kernel, knobs = json.loads(key[1])
        if not (isinstance(kernel, str) and isinstance(knobs, dict)):
            raise TypeError("candidate is no pair of kernel and knobs")
        if "launching" in entry:
            if _of(bool, entry, "launching"):
                self._take(key, None, _ENDED)
            else:
                self.timings.pop(key, None)
                self.faults.pop(key, None)
        elif "round" in entry:
            self.rounds.setdefault(key, []).append(float(_of(int | float, entry, "round")))
        elif entry["us"] is None:
            breach = "breach" in entry and _of(bool, entry, "breach")
            self._take(key, None, Fault(_of(str, entry, "reason"), breach))
        else:
            self._take(key, float(_of(int | float, entry, "us")))

    @contextlib.contextmanager
    def launching(self, task: str, candidate: str) -> Iterator[None]:
        """While a candidate runs: what ends this process now is the candidate's doing, and noted as such.

        An exception is not, such as an interrupt by the user: the candidate stays what it was.
        """
        before = self.timings.get((task, candidate))
        self._append({"task": task, "candidate": candidate, "launching": True})
        try:
            yield
        except BaseException:
            self._append({"task": task, "candidate": candidate, "launching": False})
            raise
        finally:
            if before is not None:
                self.timed(task, candidate, before)

    def timed(self, task: str, candidate: str, us: float | None, fault: Fault | None = None) -> None:
        """Note a timing of the first pass; None, with the fault, where there is none."""
        self._take((task, candidate), us, fault)
        entry: dict[str, Any] = {"task": task, "candidate": candidate, "us": us}
        if fault is not None:
            entry |= {"reason": fault.reason} | ({"breach": True} if fault.breach else {})
        self._append(entry)

    def timed_again(self, task: str, candidate: str, us: float) -> None:
        """Note a timing of a later round."""
        self.rounds.setdefault((task, candidate), []).append(us)
        self._append({"task": task, "candidate": candidate, "round": us})

    def _take(self, key: tuple[str, str], us: float | None, fault: Fault | None = None) -> None:
        self.timings[key] = us
        self.faults.pop(key, None)
        if fault is not None:
            self.faults[key] = fault

    def finished(self, task: str, row: dict[str, Any]) -> None:
        """Note a finished row."""
        self.rows[task] = row
        self._append({"task": task, "row": row})

    def _append(self, entry: Mapping[str, Any]) -> None:
        assert self._stream is not None
        # One write a line: an interrupt comes between lines or not at all.
        self._stream.write(json.dumps(entry).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def export(self, path: Path) -> None:
        """Write what is known of each candidate as JSON lines, those of a row together, the fastest first.

        Raises:
            TacticError: the file cannot be written.
        """
        places = {task: place for place, task in enumerate(dict.fromkeys(task for task, _ in self.timings))}
        ordered = sorted(
            self.timings.items(), key=lambda item: (places[item[0][0]], math.inf if item[1] is None else item[1])
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{json.dumps(self._told(*key, us))}\n" for key, us in ordered))
        except OSError as error:
            raise TacticError(f"{path}: the timings cannot be written there ({error})") from error

    def _told(self, task: str, candidate: str, us: float | None) -> dict[str, Any]:
        low, problem = json.loads(task)
        kernel, knobs = json.loads(candidate)
        key = task, candidate
        told = {"problem": problem, "low": low, "kernel": kernel, "knobs": knobs, "us": us}
        return told | ({"reason": self.faults[key].reason} if us is None else {"rounds": self.rounds.get(key, [])})

    def remove(self) -> None:
        """The run is done."""
        self.path.unlink(missing_ok=True)
