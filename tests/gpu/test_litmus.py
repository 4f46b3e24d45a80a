"""Litmus tests on the card, 10^6 tries of each: nothing is seen that PTX's memory model calls impossible.

`pytest -s` shows how often the outcome that a test is about was seen, and how many of all that are allowed.
"""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from gpu.launching import launch_on_card
from gpu.litmus_kernels import ENTRY, LANES, source
from jitmx.runtime import card
from litmus import Program
from litmus_ptx import UNSET, shape
from litmus_shapes import TABLE
from ptx_model import Outcome, judge

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="clusters came with 9.0"
)

TRIES = 1 << 18  # of each way to run: 2^20 in all
# Words between those of neighbouring instances, and whether the lines are read before: 32 bytes are a sector of a line.
WAYS = ((1, 0), (1, 1), (8, 0), (8, 1))


def run(made: Program, spread: int, warm: int) -> dict[Outcome, int]:
    """How often each outcome was seen in at least TRIES tries."""
    span, threads = shape(made)
    # A block for each multiprocessor, so that all are there at a time: they wait for each other.
    groups = max(1, torch.cuda.get_device_properties(0).multi_processor_count // span)
    rounds = -(-TRIES // (groups * LANES))
    tries = rounds * groups * LANES
    words = torch.zeros(len(made.locations), tries, spread, dtype=torch.int32, device="cuda")
    results = torch.zeros(len(made.registers), tries, dtype=torch.int32, device="cuda")
    meeting = torch.zeros(groups * 32, dtype=torch.int32, device="cuda")
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (words, results, meeting)]
    numbers = [ctypes.c_uint32(value) for value in (rounds, spread, warm, random.getrandbits(32))]
    launch_on_card(source(made), ENTRY, groups * span, threads, [*pointers, *numbers], card.arch(0))
    assert int(meeting.view(groups, 32)[:, 0].min()) == rounds * len(made.threads)
    last = [words[made.locations.index(name), :, 0] for name in made.final]
    kinds, counts = torch.unique(torch.stack([*results, *last]), dim=1, return_counts=True)
    unset = UNSET - (1 << 32)  # as a signed word
    return {
        tuple(None if value == unset else value for value in kind): count
        for kind, count in zip(kinds.T.tolist(), counts.tolist(), strict=True)
    }


@pytest.mark.parametrize("name", TABLE)
def test_the_card_shows_nothing_that_the_model_forbids(name: str) -> None:
    row = TABLE[name]
    verdict = judge(row.program)
    seen: dict[Outcome, int] = {}
    for spread, warm in WAYS:
        for outcome, count in run(row.program, spread, warm).items():
            seen[outcome] = seen.get(outcome, 0) + count
    wanted = [(verdict.names.index(register), value) for register, value in row.outcome]
    about = sum(count for outcome, count in seen.items() if all(outcome[k] == value for k, value in wanted))
    ends = ", ".join(f"{register}={value}" for register, value in row.outcome)
    print(
        f"\n{name}: {ends} {about} times in {sum(seen.values())}, {'allowed' if row.allowed else 'forbidden'}; "
        f"{len(seen)} of {len(verdict.outcomes)} outcomes seen"
    )
    impossible = {outcome: count for outcome, count in seen.items() if outcome not in verdict.outcomes}
    assert not impossible, f"{row.program}\n{verdict.names} ended as {impossible}, which PTX does not allow"
