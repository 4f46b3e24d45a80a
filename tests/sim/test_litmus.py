"""The simulator finds the data races that PTX's memory model has, and no others.

The simulator takes one execution of a program; whether that one has a race is what it must tell.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assembly import launch
from jitmx.errors import SimulationError
from jitmx.sim.memory import Memory
from litmus import ORDERS, SCOPES, Op, Program, check, program
from litmus_ptx import STRIDE, UNSET, body, shape
from litmus_shapes import TABLE, place
from ptx_model import Outcome, judge
from strategies import examples

PLACES = ("block", "cluster", "apart")
UNORDERED = "with nothing between them that orders the two"


def simulate(made: Program, *, old_reads: bool) -> tuple[Outcome | None, str]:
    """What the simulator ends with, or None and the race that it reports."""
    memory = Memory()
    shared = memory.upload(np.zeros(STRIDE // 4 * len(made.locations), "u4"), "locations", writable=True)
    results = memory.upload(np.full(max(len(made.registers), 1), UNSET, "u4"), "results", writable=True)
    grid, threads = shape(made)
    try:
        launch(
            body(made), [shared, results], memory, grid=grid, block=threads, cluster=made.cluster, old_reads=old_reads
        )
    except SimulationError as error:
        assert UNORDERED in str(error), error
        return None, str(error)
    found = memory.download(results, "u4", (max(len(made.registers), 1),))[: len(made.registers)].tolist()
    ends = memory.download(shared, "u4", (len(made.locations), STRIDE // 4))[:, 0].tolist()
    last = [ends[made.locations.index(name)] for name in made.final]
    return (*(None if value == UNSET else value for value in found), *last), ""


def polling(made: Program, **ends: int) -> Program:
    """The program with loads that poll until these registers hold what is given."""

    def polled(op: Op) -> Op:
        return dataclasses.replace(op, until=ends[op.register]) if op.kind == "ld" and op.register in ends else op

    return dataclasses.replace(made, threads=tuple(tuple(map(polled, thread)) for thread in made.threads))


def disagreement(made: Program, **seen: int) -> str:
    """How simulator and model differ on a program some of whose registers end so; empty where they do not."""
    outcome, error = simulate(made, old_reads=False)
    verdict = judge(made)
    if outcome is None:
        return "" if verdict.races(**seen) else f"{made}\nhas no race: {error}"
    ended = dict(zip(verdict.names, outcome, strict=True))
    if any(ended[name] != value for name, value in seen.items()):
        return f"{made}\nended with {ended}, so that {seen} was not tried"
    return "" if outcome in verdict.calm else f"{made}\nhas a race that was not seen; ended with {ended}"


def differences(programs: list[Program], **seen: int) -> str:
    """`disagreement` of each program."""
    return "\n".join(filter(None, (disagreement(made, **seen) for made in programs)))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("load", ORDERS["ld"][1:])
@pytest.mark.parametrize("store", ORDERS["st"][1:])
def test_a_message_by_a_flag_races_unless_released_and_acquired_in_scopes_that_include_both(
    store: str, load: str, where: str
) -> None:
    blocks, cluster = place(where, 2)
    threads = "st.weak [x], 7; st.{0}.{1} [f], 1", "ld.{2}.{3} r0, [f]; @r0=1 ld.weak r1, [x]"
    programs = [
        program(*(text.format(store, a, load, b) for text in threads), blocks=blocks, cluster=cluster)
        for a, b in itertools.product(SCOPES, repeat=2)
    ]
    assert not differences(programs, r0=1)
    assert not differences([polling(made, r0=1) for made in programs], r0=1)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("acquire", ORDERS["fence"])
@pytest.mark.parametrize("release", ORDERS["fence"])
def test_a_message_by_fences_races_unless_fences_and_flag_have_scopes_that_include_both(
    release: str, acquire: str, where: str
) -> None:
    blocks, cluster = place(where, 2)
    threads = (
        "st.weak [x], 7; fence.{0}.{1}; st.relaxed.{2} [f], 1",
        "ld.relaxed.{2} r0, [f]; fence.{3}.{4}; @r0=1 ld.weak r1, [x]",
    )
    some = ("cta", "cluster", "gpu")
    scopes = [(a, "gpu", b) for a in some for b in some] + [("gpu", "cta", "gpu"), ("gpu", "cluster", "gpu")]
    programs = [
        program(*(text.format(release, a, flag, acquire, b) for text in threads), blocks=blocks, cluster=cluster)
        for a, flag, b in scopes
    ]
    assert not differences(programs, r0=1)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("second", ORDERS["atom"])
@pytest.mark.parametrize("first", ORDERS["atom"])
def test_a_message_by_a_counter_races_unless_one_half_releases_and_the_other_acquires(
    first: str, second: str, where: str
) -> None:
    blocks, cluster = place(where, 2)
    threads = "st.weak [x], 7; atom.{0}.{1}.add r2, [f], 1", "atom.{2}.{3}.add r0, [f], 1; @r0=1 ld.weak r1, [x]"
    programs = [
        program(*(text.format(first, a, second, b) for text in threads), blocks=blocks, cluster=cluster)
        for a, b in itertools.product(("cta", "cluster" if where == "cluster" else "gpu"), repeat=2)
    ]
    assert not differences(programs, r0=1)


LINKS = (
    "atom.relaxed.{0}.add r0, [f], 1",
    "atom.acquire.{0}.cas r0, [f], 1, 2",
    "atom.acq_rel.{0}.exch r0, [f], 2",
    "red.relaxed.{0}.add [f], 1",
    "red.release.{0}.add [f], 1",
    "ld.relaxed.{0} r0, [f] until 1; st.relaxed.{0} [f], 2",
    "ld.acquire.{0} r0, [f] until 1; st.relaxed.{0} [f], 2",
    "ld.relaxed.{0} r0, [f] until 1; st.release.{0} [f], 2",
    "ld.acquire.{0} r0, [f] until 1; st.release.{0} [f], 2",
    "ld.relaxed.{0} r0, [f] until 1; fence.acq_rel.{0}; st.relaxed.{0} [f], 2",
)


@pytest.mark.parametrize("where", [*PLACES, (0, 0, 1), (0, 1, 1), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("link", LINKS)
def test_a_message_through_a_third_thread_races_unless_each_link_holds(link: str, where: str | tuple[int, ...]) -> None:
    """The last thread reads the flag once, when the second is done: it never acquires what the first one wrote."""
    blocks, cluster = place(where, 3)
    threads = (
        "st.weak [x], 7; st.release.{1} [f], 1",
        f"{link}; st.relaxed.gpu [done], 1",
        "ld.relaxed.gpu r3, [done] until 1; ld.acquire.{2} r1, [f]; @r1=2 ld.weak r2, [x]",
    )
    programs = [
        program(*(text.format(*scopes) for text in threads), blocks=blocks, cluster=cluster)
        for scopes in itertools.product(("cta", "gpu"), repeat=3)
    ]
    assert not differences(programs, r1=2, **({"r0": 1} if "r0" in link else {}))


# What makes a pattern, and what travels on: threads, their blocks, the registers that count.
PATTERNS: dict[str, tuple[tuple[str, ...], tuple[int, ...], dict[str, int]]] = {
    "a release at the flag, and more writes of that thread, another's between": (
        ("st.weak [x], 7; st.release.gpu [f], 1; ld.relaxed.gpu r4, [g] until 1; ld.relaxed.gpu r6, [f] until 2; "
         "st.relaxed.gpu [f], 3; st.relaxed.gpu [done], 1",
         "ld.relaxed.gpu r0, [f] until 1; st.relaxed.gpu [f], 2; st.relaxed.gpu [g], 1",
         "ld.relaxed.gpu r5, [done] until 1; ld.acquire.gpu r1, [f]; ld.weak r2, [x]"), (0, 1, 2), {"r1": 3}),
    "a relaxed read, and an acquire at the flag when it is another's": (
        ("st.weak [x], 7; st.release.gpu [f], 1",
         "ld.relaxed.gpu r6, [g] until 1; ld.relaxed.gpu r7, [f] until 1; st.relaxed.gpu [f], 3; "
         "st.relaxed.gpu [done], 1",
         "ld.relaxed.gpu r0, [f] until 1; st.relaxed.gpu [g], 1; ld.relaxed.gpu r5, [done] until 1; "
         "ld.acquire.gpu r1, [f]; ld.weak r2, [x]"), (0, 1, 2), {"r1": 3}),
    "a relaxed read, and a fence when the flag is another's": (
        ("st.weak [x], 7; st.release.gpu [f], 1",
         "ld.relaxed.gpu r6, [g] until 1; ld.relaxed.gpu r7, [f] until 1; st.relaxed.gpu [f], 3; "
         "st.relaxed.gpu [done], 1",
         "ld.relaxed.gpu r0, [f] until 1; st.relaxed.gpu [g], 1; ld.relaxed.gpu r5, [done] until 1; "
         "fence.acquire.gpu; ld.weak r2, [x]"), (0, 1, 2), {"r0": 1}),
    "a fence of the card, and one of the block behind it": (
        ("st.weak [x], 7; fence.acq_rel.gpu; fence.acq_rel.cta; st.relaxed.gpu [f], 1",
         "ld.acquire.gpu r0, [f] until 1; ld.weak r2, [x]"), (0, 1), {"r0": 1}),
    "data between a fence of the card and one of the block": (
        ("fence.acq_rel.gpu; st.weak [x], 7; fence.acq_rel.cta; st.relaxed.gpu [f], 1",
         "ld.acquire.gpu r0, [f] until 1; ld.weak r2, [x]"), (0, 1), {"r0": 1}),
    "data behind the release": (
        ("st.release.gpu [f], 1; st.weak [x], 7; st.relaxed.gpu [f], 2",
         "ld.acquire.gpu r0, [f] until 2; ld.weak r2, [x]"), (0, 1), {"r0": 2}),
    "data read before the release": (
        ("ld.weak r9, [x]; st.release.gpu [f], 1", "ld.acquire.gpu r0, [f] until 1; st.weak [x], 1"), (0, 1),
        {"r0": 1}),
    "data read before a relaxed flag": (
        ("ld.weak r9, [x]; st.relaxed.gpu [f], 1", "ld.acquire.gpu r0, [f] until 1; st.weak [x], 1"), (0, 1),
        {"r0": 1}),
    "a barrier, and the release of another": (
        ("st.weak [x], 1; bar.sync", "bar.sync; st.release.gpu [f], 1",
         "ld.acquire.gpu r0, [f] until 1; ld.weak r1, [x]"), (0, 0, 1), {"r0": 1}),
    "a barrier, and the fence of another": (
        ("st.weak [x], 1; bar.sync", "bar.sync; fence.acq_rel.gpu; st.relaxed.gpu [f], 1",
         "ld.acquire.gpu r0, [f] until 1; ld.weak r1, [x]"), (0, 0, 1), {"r0": 1}),
    "a fence, a barrier, and the flag of another": (
        ("st.weak [x], 1; fence.acq_rel.gpu; bar.sync", "bar.sync; st.relaxed.gpu [f], 1",
         "ld.acquire.gpu r0, [f] until 1; ld.weak r1, [x]"), (0, 0, 1), {"r0": 1}),
    "an acquire, and a barrier": (
        ("st.weak [x], 1; st.release.gpu [f], 1", "ld.acquire.gpu r0, [f] until 1; bar.sync",
         "bar.sync; ld.weak r1, [x]"), (0, 1, 1), {"r0": 1}),
    "a relaxed read, and a barrier": (
        ("st.weak [x], 1; st.release.gpu [f], 1", "ld.relaxed.gpu r0, [f] until 1; bar.sync",
         "bar.sync; ld.weak r1, [x]"), (0, 1, 1), {"r0": 1}),
    "a relaxed read, a barrier, and the fence of another": (
        ("st.weak [x], 1; st.release.gpu [f], 1", "ld.relaxed.gpu r0, [f] until 1; bar.sync",
         "bar.sync; fence.acq_rel.gpu; ld.weak r1, [x]"), (0, 1, 1), {"r0": 1}),
    "strong data of a block's scope": (
        ("st.relaxed.cta [x], 1; st.release.gpu [f], 1", "ld.acquire.gpu r0, [f] until 1; ld.relaxed.cta r1, [x]"),
        (0, 1), {"r0": 1}),
    "a counter that the last one finds full": (
        ("st.weak [x], 1; red.release.gpu.add [f], 1", "st.weak [y], 1; red.release.gpu.add [f], 1",
         "atom.acq_rel.gpu.add r2, [f], 1; @r2=2 ld.weak r3, [x]; @r2=2 ld.weak r4, [y]"), (0, 1, 2), {"r2": 2}),
    "a counter that the last one finds full, and fences": (
        ("st.weak [x], 1; red.release.gpu.add [f], 1", "st.weak [y], 1; red.release.gpu.add [f], 1",
         "atom.relaxed.gpu.add r2, [f], 1; fence.acquire.gpu; @r2=2 ld.weak r3, [x]; @r2=2 ld.weak r4, [y]"),
        (0, 1, 2), {"r2": 2}),
    "a counter acquired in the scope of a block": (
        ("st.weak [x], 1; red.release.gpu.add [f], 1", "st.weak [y], 1; red.release.gpu.add [f], 1",
         "atom.acquire.cta.add r2, [f], 1; @r2=2 ld.weak r3, [x]; @r2=2 ld.weak r4, [y]"), (0, 1, 1), {"r2": 2}),
    "a counter one of whose halves is released in the scope of a block": (
        ("st.weak [x], 1; red.release.gpu.add [f], 1", "st.weak [y], 1; red.release.cta.add [f], 1",
         "atom.acquire.gpu.add r2, [f], 1; @r2=2 ld.weak r3, [x]; @r2=2 ld.weak r4, [y]"), (0, 1, 1), {"r2": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_of_synchronisation_orders_in_the_simulator_what_it_orders_in_ptx(name: str) -> None:
    threads, blocks, seen = PATTERNS[name]
    assert not disagreement(program(*threads, blocks=blocks), **seen)


def passes_on(name: str) -> bool:
    """Whether a row's outcome is about data that some flag tells of."""
    # In a chain, a poll may acquire from the first thread what the second would not hand on: tested above.
    chain = name.startswith("MP chain")
    if name == "WRC seen at the scope of a block":
        return (
            False  # causality through a strong read of the data itself orders it; the simulator has scopes alone there
        )
    return name.startswith(("MP ", "ISA2", "WRC")) and not chain and "[x]" in str(TABLE[name].program.threads[-1][-1])


@pytest.mark.parametrize("name", [name for name in TABLE if passes_on(name)])
def test_a_litmus_test_that_passes_a_message_races_in_the_simulator_where_it_does_in_ptx(name: str) -> None:
    row = TABLE[name]
    data = row.program.threads[-1][-1].register
    seen = {name: value for name, value in row.outcome if name != data}
    assert not disagreement(polling(row.program, **seen), **seen)


def loses(made: Program) -> bool:
    """Whether a strong store or exchange may replace what another thread has written.

    PTX has nothing against that where both are strong; the simulator takes it for a mistake if neither knows the other.
    """
    writes = [(t, op) for t, thread in enumerate(made.threads) for op in thread if op.writes]
    return any(
        t != other and op.location == last.location and op.strong and (op.kind == "st" or op.action == "exch")
        for t, op in writes for other, last in writes
    )  # fmt: skip


def disagrees(made: Program) -> str:
    """How the simulator's run of a program is none that the model has; empty where it is."""
    outcome, error = simulate(made, old_reads=True)
    verdict = judge(made)
    if outcome is not None:
        return "" if outcome in verdict.calm else f"{made}\nended as {outcome}, which takes a race"
    fits = loses(made) if " replaces " in error else verdict.racy
    return "" if fits else f"{made}\nhas no race: {error}"


@pytest.mark.parametrize("name", TABLE)
def test_the_simulator_ends_as_an_execution_without_a_race_or_names_one_that_there_is(name: str) -> None:
    assert not disagrees(TABLE[name].program)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Two or three threads with weak data and strong flags, all of one scope, many of them behind guards.

    Neither cas nor red: the simulator takes a cas that fails for a write, and a red with a fence for an acquire.
    """
    scope = draw(st.sampled_from(SCOPES))
    number = itertools.count()

    def one(known: list[str]) -> Op:
        guards = st.tuples(st.sampled_from(known), st.integers(0, 2)) if known else st.none()
        guard = draw(st.one_of(st.none(), guards))
        kind = draw(st.sampled_from(["data", "data", "ld", "ld", "st", "st", "atom", "atom", "fence"]))
        if kind == "data":
            kind, order, reach, location = draw(st.sampled_from(["ld", "st"])), "weak", "", "x"
        else:
            order = draw(st.sampled_from([order for order in ORDERS[kind] if order != "weak"]))
            reach, location = scope, draw(st.sampled_from("fg"))
        if kind == "fence":
            return Op(kind, order, reach)
        register = "" if kind == "st" else f"r{next(number)}"
        if register and order != "weak":
            known.append(register)
        values = () if kind == "ld" else (draw(st.integers(1, 2)),)
        action = draw(st.sampled_from(["add", "add", "exch"])) if kind == "atom" else ""
        return Op(kind, order, reach, location, register, action, values, guard)

    threads = []
    for length in draw(st.sampled_from([(2, 3), (3, 3), (2, 2, 2), (3, 2, 3), (2, 3, 2)])):
        known: list[str] = []
        threads.append(tuple(one(known) for _ in range(length)))
    blocks = tuple(draw(st.integers(0, 2)) for _ in threads)
    made = Program(tuple(threads), blocks, draw(st.sampled_from([1, 2])))
    check(made)
    return made


@settings(max_examples=examples(120))
@given(programs())
def test_so_does_any_program(made: Program) -> None:
    assert not disagrees(made)
