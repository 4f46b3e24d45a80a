"""What tests see of kernels: evidence that they note, and that of earlier runs, which they need not see again.

With TEST_EVIDENCE set to a path, what passed is written there as a ledger, for scripts/record_evidence.py to add to
those that are kept; beside pytest-xdist each worker writes a ledger of its own, with its name behind the path's.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from pathlib import Path
from typing import Any

from jitmx import ledger
from jitmx.ledger import Entry
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict

# Evidence of variants that no table and no heuristic chooses, and only tests take.
OF_TESTS = Path(__file__).with_name("ledger.json")

_noted: list[Entry] = []


def note(variant: Variant, evidence: str, **fields: Any) -> None:
    """Have an entry written at the end of the run."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    digest = ledger.digest(render(variant))
    _noted.append(Entry(digest, variant.arch.name, variant.name, evidence, date=today, **fields))


def write() -> None:
    """Write what was noted, where TEST_EVIDENCE says."""
    path, worker = os.environ.get("TEST_EVIDENCE"), os.environ.get("PYTEST_XDIST_WORKER")
    if path and _noted:
        ledger.save(_noted, Path(f"{path}.{worker}" if worker else path))


@functools.cache
def kept() -> ledger.Ledger:
    """The evidence that ships and that of tests."""
    return ledger.Ledger([*ledger.load().entries, *ledger.load(OF_TESTS).entries])


class Verdicts:
    """Verdicts of the simulator by what they rest on: those of ledgers, and those of this run's processes.

    Args:
        folder: where the processes of a run tell one another.
        known: the ledgers' evidence; None where nothing of earlier runs counts.
    """

    def __init__(self, folder: Path, known: ledger.Ledger | None) -> None:
        self._folder, self._known = folder, known
        folder.mkdir(exist_ok=True)

    def find(self, proof: str) -> Verdict | None:
        """The verdict that was given on this proof before, or None."""
        entry = self._known.proven(proof) if self._known else None
        if entry is not None:
            return Verdict(None, entry.error or 0.0, entry.cases, entry.coverage or 0.0, proof=proof)
        path = self._folder / proof
        return Verdict(**json.loads(path.read_text()), proof=proof) if path.is_file() else None

    def keep(self, variant: Variant, verdict: Verdict) -> None:
        """Tell the others of this run, and note it as evidence, where it passed."""
        if verdict.passed:
            found = {"error": verdict.error, "cases": verdict.cases, "coverage": verdict.coverage}
            scratch = self._folder / f"{verdict.proof}.{os.getpid()}"
            scratch.write_text(json.dumps({"failure": None, **found}))
            scratch.replace(self._folder / verdict.proof)
            note(variant, "simulated", proof=verdict.proof, **{**found, "error": verdict.error or None})
