"""Layers in one launch find their items whatever the routing, and leave their counters ready for the next."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmx import arch
from jitmx.kernels.moe import FAMILY, KERNELS, MoeProblem
from jitmx.kernels.moe.arguments import Routing, make_case
from jitmx.kernels.moe.layer import COUNTER_BYTES, ENTRIES
from jitmx.registry.case import Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import encode
from jitmx.sim.verify import run
from jitmx.toolchain import nvrtc
from strategies import examples

SMALL: dict[str, dict[str, Any]] = {
    "decode": {"warps": 2, "chunk": 1, "stages": 2, "columns": 2, "inputs": 3},
    "stream": {"warps": 4, "chunk": 1, "stages": 2, "columns": 2, "unroll": 1},
}
WIDE: dict[str, dict[str, Any]] = {"decode": {"columns": 8, "inputs": 8}, "stream": {"columns": 8}}
GENERATION, TURN = ENTRIES + 1, ENTRIES + 2  # counters that no launch sets back


def variant_of(kernel: str, **knobs: object) -> Variant:
    return KERNELS[kernel].spec.variant(arch.parse("sm_90"), **{**SMALL[kernel], **knobs})


@functools.cache
def compiled(kernel: str, **knobs: object) -> tuple[Variant, str]:
    variant = variant_of(kernel, **knobs)
    return variant, nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))


def case_of(variant: Variant, experts: int, routing: Routing, blocks: int = 3, seed: int = 0) -> Case:
    rows, top = routing.ids.shape
    problem = MoeProblem(rows, experts, top, 64, 32)
    return make_case(variant, FAMILY.launch(variant, problem, blocks), problem, routing, seed)


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, Routing]:
    experts, rows, top = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    ids = draw(st.lists(st.integers(-2, experts), min_size=rows * top, max_size=rows * top))
    to = draw(st.none() | st.lists(st.integers(-1, experts - 1), min_size=1, max_size=experts + 1))
    count = draw(st.none() | st.integers(-1, rows + 1))
    mapped = None if to is None else np.array(to, np.int32)
    return experts, Routing(np.array(ids, np.int32).reshape(rows, top), mapped, count)


@pytest.mark.parametrize("kernel", SMALL)
@settings(max_examples=examples(12))
@given(drawn=routings())
def test_any_routing_gives_the_layer(kernel: str, drawn: tuple[int, Routing]) -> None:
    variant, ptx = compiled(kernel)
    case = case_of(variant, *drawn)
    assert run(case, variant, ptx)[0] <= case.gate


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("kernel", SMALL)
@pytest.mark.parametrize("experts", [1, 300])
def test_as_many_pairs_as_there_may_be_are_sorted(
    kernel: str, experts: int, passes: Callable[[Variant, Case], None]
) -> None:
    variant = variant_of(kernel, **WIDE[kernel])
    ids = np.random.default_rng(0).integers(0, experts, (ENTRIES // 8, 8)).astype(np.int32)
    if experts > 1:
        ids = ids % 7 * 43  # few of many experts, so that it stays a small launch
    passes(variant, case_of(variant, experts, Routing(ids)))


PAIRS = np.array([[0, 1], [1, 2], [1, -1], [1, 0], [1, 1]], np.int32)


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize(
    ("kernel", "knobs"),
    [
        ("decode", {"cluster": 1}),
        ("decode", {"cluster": 2}),
        ("stream", {"handshake": "counters"}),
        ("stream", {"handshake": "data"}),
    ],
    ids=["decode", "decode of clusters", "stream", "stream whose data tell"],
)
@pytest.mark.parametrize(
    "routing", [Routing(PAIRS), Routing(PAIRS, count=0), Routing(-PAIRS - 2)], ids=["some", "count=0", "none"]
)
def test_a_launch_leaves_its_counters_ready_and_the_next_computes_the_same(
    kernel: str, knobs: dict[str, Any], routing: Routing
) -> None:
    """Zero, but for the launches that `moe.stream` counts; where data tell, all of the next launch's is zero, too."""
    variant, ptx = compiled(kernel, **knobs)
    case = case_of(variant, 3, routing, blocks=4)
    memory = Memory()
    buffers = case.buffers(variant.arguments)
    addresses = {
        name: memory.allocate(buffer.data.nbytes, name)
        if buffer.output
        else memory.upload(buffer.data, name, writable=buffer.scratch)
        for name, buffer in buffers.items()
    }
    arguments, workspace, y = case.pack(variant.arguments, addresses, encode), buffers["workspace"], buffers["y"]
    found = []
    for launches in range(1, 4):
        simulate(
            ptx, (case.launch.blocks, 1, 1), (variant.threads, 1, 1), arguments, memory,
            entry=variant.spec.entry, shared_bytes=case.launch.shared_bytes, cluster=case.launch.cluster,
        )  # fmt: skip
        counters = memory.download(addresses["workspace"], "u4", (COUNTER_BYTES // 4,))
        told = knobs.get("handshake")
        assert counters[GENERATION] == (launches if told == "counters" else 0)
        assert counters[TURN] == (launches % 2 * case.launch.blocks if told == "data" else 0)
        assert not np.delete(counters, (GENERATION, TURN)).any()
        if told == "data":
            rest = memory.download(addresses["workspace"], "u1", (workspace.data.nbytes,))[COUNTER_BYTES:]
            hidden = -(-routing.ids.size * case.values["intermediate"] * 2 // 128) * 128
            next_hidden = rest[launches % 2 * hidden :][:hidden]
            assert not next_hidden.any() and not rest[2 * hidden :].any()
        found.append(memory.download(addresses["y"], y.data.dtype, y.data.shape).copy())
    assert case.check(found[:1]) <= case.gate
    for again in found[1:]:
        assert np.array_equal(found[0].view(np.uint16), again.view(np.uint16))
