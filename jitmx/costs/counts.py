"""Instructions of a launch: what the simulator counts of launches of a few tiles, and what is known of that already.

`tactics/counts.json` ships what was counted (scripts/fit_cost_model.py), by the digest of the code: code that is not
there is counted when it is asked for, which takes a second or two.

    {"schema_version": 1, "counts": [{"arch", "kernel", "source_digest", "of", "unit", "block"}]}
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jitmx import costs, ledger, resources
from jitmx.cache import files
from jitmx.errors import TacticError
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim import verify
from jitmx.toolchain import nvrtc

SCHEMA_VERSION = 1
_LANES = 32
_LARGEST = 16 << 20  # bytes of a file of counts
_counted_here: dict[str, Count | None] = {}  # by this process, by their keys


@dataclass(frozen=True)
class Count:
    """Warp instructions of PTX.

    Attributes:
        unit: of a unit of work.
        block: of a block beside its units.
    """

    unit: float
    block: float


def count(variant: Variant, problem: Any, *, simulate: bool = True) -> Count | None:
    """The instructions of `variant` for a problem, or None where its family has no launches to be counted.

    Args:
        simulate: count them now where nobody has; else None.

    Raises:
        SimulationError, ToolchainError: as `jitmx verify` has them.
        TacticError: the counts that ship cannot be read.
    """
    cost = costs.of(variant.spec.family)
    if cost is None:
        return None
    name = key(variant, problem)
    known = _known().get(name)
    if known is None and simulate:
        if name not in _counted_here:
            _counted_here[name] = counted(variant, problem)
        known = _counted_here[name]
    return known


def key(variant: Variant, problem: Any) -> str:
    """What a count is known by: target, code, and what of the problem its probes depend on."""
    cost = costs.of(variant.spec.family)
    assert cost is not None
    return f"{variant.arch} {_digest(variant)} {','.join(map(str, cost.counted(variant, problem)))}"


@functools.lru_cache(maxsize=512)
def _digest(variant: Variant) -> str:
    return ledger.digest(render(variant))


def counted(variant: Variant, problem: Any) -> Count | None:
    """What the simulator counts now; raises as `count`."""
    cost = costs.of(variant.spec.family)
    probes = list(cost.probes(variant, problem)) if cost else []
    if not probes:
        return None
    ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))
    rows, totals = [], []
    for probe in probes:
        report, _, _ = verify.launch(probe.case, variant, ptx)
        rows.append((probe.units, probe.case.launch.blocks))
        totals.append(report.thread_instructions / _LANES)
    return _solved(np.array(rows, np.float64), np.array(totals))


def _solved(rows: Any, totals: Any) -> Count:
    """Unit and block from launches that differ in units; all of it is the units' where blocks grow with them."""
    units, blocks = rows.T
    if np.ptp(blocks) == 0 and np.ptp(units) > 0:
        unit = float(np.ptp(totals) / np.ptp(units))
        return Count(round(unit, 3), round(max(0.0, float((totals[0] - unit * units[0]) / blocks[0])), 3))
    return Count(round(float(totals[-1] / units[-1]), 3), 0.0)


def path() -> Path:
    """Where the counts lie that ship."""
    return resources.directory("tactics") / "counts.json"


@functools.cache
def _known() -> dict[str, Count]:
    return load(path())


def load(where: Path) -> dict[str, Count]:
    """Counts by their keys; none where there is no file.

    Raises:
        TacticError: the file cannot be read, or holds no counts.
    """
    try:
        found = files.read(where, _LARGEST, follow=True)
        if found is None:
            return {}
        document = json.loads(found[0])
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {document['schema_version']!r}; this jitmx reads {SCHEMA_VERSION}")
        read = {
            f"{row['arch']} {row['source_digest']} {row['of']}": Count(float(row["unit"]), float(row["block"]))
            for row in document["counts"]
        }
        if not all(0 <= number < math.inf for one in read.values() for number in (one.unit, one.block)):
            raise ValueError("a count is no number of at least 0")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TacticError(f"{where} holds no counts of instructions: {error}", "reinstall jitmx") from error
    return read
