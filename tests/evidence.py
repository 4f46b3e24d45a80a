"""What tests see of kernels: evidence that they note, and that of earlier runs, which they need not see again.

A verdict of the simulator is found by the kernel's PTX, or without a compile by all that the PTX is made from: source,
headers, options and NVRTC itself. Contracts that machine code keeps, what else tests look for in it or in PTX, and
cases that tests make themselves are found by the same.

With TEST_EVIDENCE set to a path, what passed is written there as a ledger, for scripts/record_evidence.py to add to
those that are kept; beside pytest-xdist each worker writes a ledger of its own, with its name behind the path's.
"""

from __future__ import annotations

import dataclasses
import datetime
import dis
import functools
import importlib.metadata
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from jitmx import kernels, ledger
from jitmx.ledger import Entry
from jitmx.registry import contract
from jitmx.registry.case import Case
from jitmx.registry.key import frame
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim import proof as proving
from jitmx.sim.proof import proof
from jitmx.sim.verify import Verdict
from jitmx.toolchain import cubin, nvrtc
from kept_ptx import inputs

# Evidence of variants that no table and no heuristic chooses, and only tests take.
OF_TESTS = Path(__file__).with_name("ledger.json")

_noted: list[Entry] = []
anew = False  # whether evidence of earlier runs does not count


def note(variant: Variant, evidence: str, source: str = "", **fields: Any) -> None:
    """Have an entry written at the end of the run; `source`: what was made of the variant's, where it is not that."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    digest = ledger.digest(source or render(variant))
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


def compiled_from(variant: Variant, compiler: str = "", source: str = "") -> str:
    """A digest of all that NVRTC's answer for a variant follows from.

    Args:
        compiler: the digest of another NVRTC than this process's.
        source: what was made of the variant's, where it is not that.
    """
    asked = inputs(source or render(variant), nvrtc.options(variant.arch))
    return frame([("compiler", (compiler or nvrtc.identity().digest).encode()), *asked])


def made_from(variant: Variant, source: str = "") -> str:
    """What the simulator's verdict on a variant rests on, by what its PTX is made from in place of the PTX."""
    compiled = compiled_from(variant, source=source)
    return frame([("compiled", compiled.encode()), ("simulated", judged(variant).encode())])


@functools.cache
def judged(variant: Variant) -> str:
    """What the simulator's verdict on any PTX of a variant rests on beside the PTX."""
    return proof(variant, "", kernels.family(variant.spec.family).cases(variant))


def keeps(variant: Variant, look: Callable[..., None] | None = None, compiler: str = "") -> str:
    """What it rests on that the machine code of a variant keeps its contract, and that `look` finds no fault with it.

    Args:
        compiler: the digest of another NVRTC than this process's.
    """
    promised = dataclasses.asdict(variant.spec.contract(variant.knobs, variant.arch))
    seen = [("knobs", repr(sorted(variant.knobs.as_dict().items())).encode()), *_text(look)] if look else []
    return frame(
        [
            ("compiled", compiled_from(variant, compiler).encode()),
            ("contract", json.dumps(promised).encode()),
            ("nvdisasm", importlib.metadata.version("nvidia-cuda-nvdisasm").encode()),
            *((module.__name__, Path(module.__file__ or "").read_bytes()) for module in (contract, cubin)),
            *seen,
        ]
    )


def seen_in_ptx(variant: Variant, look: Callable[[str], None]) -> str:
    """What it rests on that `look` finds no fault with the PTX of a variant."""
    return frame([("ptx of", compiled_from(variant).encode()), *_text(look)])


def given(variant: Variant, case: Case, source: str = "") -> str:
    """What it rests on how a launch that a test makes ends, by what its PTX is made from.

    Args:
        source: what was made of the variant's, where it is not that.
    """
    judge = proving._home(case.check)
    assert judge.startswith("jitmx."), f"{case.name} is judged by {judge}, which evidence would not know of"
    return frame(
        [
            ("compiled", compiled_from(variant, source=source).encode()),
            ("launched", proof(variant, "", [case]).encode()),
            ("judge", proving._code((judge,))),
        ]
    )


def drawn(variants: Iterable[Variant]) -> str:
    """What the cases of variants follow from, by the code that makes them: none is made to tell."""
    looked_up = ((name, proving._file(name)) for name in proving._LOOKS_UP)
    makers = [(name, proving._meaning(path)) for name, path in looked_up if path]
    versions = [(name, importlib.metadata.version(name).encode()) for name in ("numpy", "ml_dtypes")]
    each = [(f"{one.arch} {one.name}", proof(one, "", []).encode()) for one in variants]
    return frame([*makers, *versions, *each])


def said(look: Callable[..., None] | None) -> str:
    """What is noted of a look at machine code: its name, which is a claim."""
    return look.__name__.strip("_").replace("_", " ") if look else ""


def _text(look: Callable[..., None]) -> Iterator[tuple[str, bytes]]:
    """The text of a function, and of jitmx's modules that it names. Of its own module it may name nothing else."""
    yield "look", inspect.getsource(look).encode()
    assert look.__closure__ is None, f"{look.__name__} takes names from around it, which evidence would not know of"
    for name in sorted(_names(look.__code__) & look.__globals__.keys()):
        found = look.__globals__[name]
        assert isinstance(found, ModuleType), f"{look.__name__} names {name}, which evidence would not know of"
        if found.__name__.startswith("jitmx"):
            yield found.__name__, Path(found.__file__ or "").read_bytes()


def _names(code: CodeType) -> set[str]:
    """What a function and those within it look up among the names of their module."""
    within = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    own = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return own.union(*within)


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
        """The verdict that was given on this proof before, or where this is what it was made from, or None."""
        entry = self._known.proven(proof) if self._known else None
        if entry is not None:
            return Verdict(None, entry.error or 0.0, entry.cases, entry.coverage or 0.0, proof=entry.proof)
        path = self._folder / proof
        return Verdict(**json.loads(path.read_text())) if path.is_file() else None

    def keep(self, variant: Variant, verdict: Verdict, made: str = "") -> None:
        """Tell the others of this run, and note it as evidence, where it passed; `made`: what it was made from."""
        if verdict.passed:
            found = {"error": verdict.error, "cases": verdict.cases, "coverage": verdict.coverage}
            for name in filter(None, (verdict.proof, made)):
                scratch = self._folder / f"{name}.{os.getpid()}"
                scratch.write_text(json.dumps({"failure": None, "proof": verdict.proof, **found}))
                scratch.replace(self._folder / name)
            note(variant, "simulated", proof=verdict.proof, made=made, **{**found, "error": verdict.error or None})
