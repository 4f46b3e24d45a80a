"""`moe.decode` finds its items whatever the routing, and leaves its counters as it found them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmx import arch
from jitmx.kernels.moe import MoeProblem
from jitmx.kernels.moe.arguments import Routing, make_case
from jitmx.kernels.moe.decode import COUNTER_BYTES, ENTRIES, SPEC, launch
from jitmx.registry.case import Buffer, Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.verify import run
from jitmx.toolchain import nvrtc

SMALL = {"warps": 2, "chunk": 1, "stages": 2, "columns": 2, "inputs": 3}


@functools.cache
def compiled(**knobs: object) -> tuple[Variant, str]:
    variant = SPEC.variant(arch.parse("sm_90"), **{**SMALL, **knobs})
    return variant, nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))


def case_of(variant: Variant, experts: int, routing: Routing, blocks: int = 3, seed: int = 0) -> Case:
    rows, top = routing.ids.shape
    problem = MoeProblem(rows, experts, top, 64, 32)
    return make_case(variant, launch(variant.knobs, problem, blocks), problem, routing, seed)


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, Routing]:
    experts, rows, top = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    ids = draw(st.lists(st.integers(-2, experts), min_size=rows * top, max_size=rows * top))
    to = draw(st.none() | st.lists(st.integers(-1, experts - 1), min_size=1, max_size=experts + 1))
    count = draw(st.none() | st.integers(-1, rows + 1))
    mapped = None if to is None else np.array(to, np.int32)
    return experts, Routing(np.array(ids, np.int32).reshape(rows, top), mapped, count)


@settings(max_examples=12)
@given(drawn=routings())
def test_any_routing_gives_the_layer(drawn: tuple[int, Routing]) -> None:
    variant, ptx = compiled()
    case = case_of(variant, *drawn)
    assert run(case, variant, ptx)[0] <= case.gate


@pytest.mark.parametrize("experts", [1, 300])
def test_as_many_pairs_as_there_may_be_are_sorted(experts: int) -> None:
    variant, ptx = compiled(columns=8, inputs=8)
    ids = np.random.default_rng(0).integers(0, experts, (ENTRIES // 8, 8)).astype(np.int32)
    if experts > 1:
        ids = ids % 7 * 43  # few of many experts, so that it stays a small launch
    case = case_of(variant, experts, Routing(ids))
    assert run(case, variant, ptx)[0] <= case.gate


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_launch_leaves_its_counters_zero_and_the_next_computes_the_same(cluster: int) -> None:
    variant, ptx = compiled(cluster=cluster)
    routing = Routing(np.array([[0, 1], [1, 2], [1, -1], [1, 0], [1, 1]], np.int32))
    case = case_of(variant, 3, routing, blocks=4)
    memory = Memory()
    buffers = [item for item in case.arguments if isinstance(item, Buffer)]
    addresses = [
        memory.allocate(buffer.data.nbytes, "y")
        if buffer.output
        else memory.upload(buffer.data, "in", writable=buffer.scratch)
        for buffer in buffers
    ]
    found = []
    for _ in range(2):
        simulate(
            ptx, (case.grid, 1, 1), (SPEC.threads(variant.knobs), 1, 1), case.pack(addresses), memory,
            entry=SPEC.entry, shared_bytes=case.shared_bytes, cluster=case.cluster,
        )  # fmt: skip
        for buffer, address in zip(buffers, addresses, strict=True):
            if buffer.scratch:
                assert not memory.download(address, np.dtype(np.uint8), (COUNTER_BYTES,)).any()
            if buffer.output:
                found.append(memory.download(address, buffer.data.dtype, buffer.data.shape).copy())
    assert case.check(found[:1]) <= case.gate
    assert np.array_equal(found[0].view(np.uint16), found[1].view(np.uint16))
