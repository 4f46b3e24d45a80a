"""Atomic operations: lanes come in no order that a kernel may count on, and others may overtake who has arrived."""

from __future__ import annotations

import pytest

from jitmx.registry.spec import Variant
from mutation import fault, source, variant

GREEDY = variant("sampling", "greedy", "sm_90a", cluster=False, parts=4, block=128)
ARGMAX = variant("linear", "stream", "sm_90a", m=16, warps=3, split_k=1, unroll=1, argmax=True, bias=True)

BARRIER = variant("moe", "stream", "sm_90a", handshake="counters", warps=4, chunk=1, stages=2, unroll=1)


def test_who_reads_the_generation_of_a_barrier_behind_its_arrival_waits_for_ever_where_others_overtake_it() -> None:
    text = source(BARRIER)
    old = "    else\n      while (load_acquire(&counters.generation) == generation) {}"
    assert text.count(old) == 1
    new = old.replace("else\n", "else {\n      generation = load_acquire(&counters.generation);\n") + "\n    }"
    found = fault(BARRIER, text.replace(old, new))
    assert found is not None and "polls for ever" in found


@pytest.mark.parametrize("look", ["*(volatile u64*)most", "atomicMax(most, 0ull)"], ids=["read", "atomic"])
def test_others_overtake_whoever_has_looked_before_it_arrives_at_a_counter_that_nobody_polls(look: str) -> None:
    """The last block to arrive has the rank that it saw before; another may have left a larger one since."""
    text = source(GREEDY)
    for old, new in {
        "    atomicMax(most, rank);\n": f"    atomicMax(most, rank);\n    const u64 seen = {look};\n",
        "    rank = atomicExch(most, 0ull);": "    atomicExch(most, 0ull);\n    rank = seen;",
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    found = fault(GREEDY, text)
    assert found is not None and "launch" in found


@pytest.mark.parametrize(
    ("place", "edits"),
    [
        (
            GREEDY,
            {
                "    atomicMax(most, rank);": "    rank = greater(rank, atomicMax(most, rank));",
                "    rank = atomicExch(most, 0ull);": "    atomicExch(most, 0ull);",
            },
        ),
        (
            ARGMAX,
            {
                "if (lane < rows) atomicMax(ranks + lane, found);": "if (lane < rows) found = greater(found, "
                "atomicMax(ranks + lane, found));",
                "const u64 rank = atomicExch(ranks + lane, 0ull);": "atomicExch(ranks + lane, 0ull);\n"
                "  const u64 rank = found;",
            },
        ),
    ],
    ids=["greedy", "argmax"],
)
def test_the_block_that_arrives_last_need_not_have_seen_what_all_others_left(
    place: Variant, edits: dict[str, str]
) -> None:
    """A block keeps the most that it saw when it left its own; another may have left more before it arrived."""
    text = source(place)
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert fault(place, text) is not None
