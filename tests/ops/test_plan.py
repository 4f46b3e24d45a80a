"""Plans: which launches a call becomes, what each is handed, and what the layers of a model share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import jitmx
from jitmx import arch
from jitmx.kernels import Family
from jitmx.ops import checks, plan, scratch
from jitmx.ops.packed import PackedWeight
from jitmx.ops.plan import Plan
from jitmx.registry.launch import Launch
from jitmx.runtime import driver

STREAM = 7


class Launcher:
    """Notes what it is made for, and all what they launch."""

    made: list[Launcher]
    calls: list[tuple[Any, ...]]

    def __init__(self, variant: Any, device: int, **geometry: Any) -> None:
        self.variant, self.geometry = variant, geometry
        Launcher.made.append(self)

    def __call__(self, *arguments: Any) -> None:
        Launcher.calls.append(arguments)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, only_gemv: None) -> Iterator[None]:
    """An sm_90a card, scratch memory on the CPU, and no plan from before."""
    for notes in ("made", "calls"):
        monkeypatch.setattr(Launcher, notes, [], raising=False)
    monkeypatch.setattr(plan, "Launcher", Launcher)
    monkeypatch.setattr(scratch, "_zeroed", lambda size, _device: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(scratch, "_of_streams", {})
    monkeypatch.setattr(scratch, "_of_captures", {})
    monkeypatch.setattr(checks, "device_arch", lambda _device: arch.parse("sm_90"))
    monkeypatch.setattr(checks, "multiprocessors", lambda _device: 132)
    plan._steps.cache_clear()
    yield
    plan._steps.cache_clear()


def weight(n: int = 48, k: int = 96) -> PackedWeight:
    codes, scales = torch.zeros(n, k // 2, dtype=torch.uint8), torch.full((n, k // 32), 127, dtype=torch.uint8)
    return jitmx.pack_weight((codes, scales))


def make(packed: PackedWeight, rows: int, **more: Any) -> Plan:
    return Plan(packed, rows, torch.bfloat16, 0, **more)


def test_rows_beyond_what_a_kernel_takes_are_launches_that_follow_one_another_through_memory() -> None:
    packed = weight()
    prefetch = (21, 22, 23, 24)
    make(packed, 19)(STREAM, 1000, 5000, 11, 9000, 13, 1e-5, 0, prefetch)
    words, scales = packed.addresses
    x_step, y_step = 8 * 96 * 2, 8 * 48 * 2
    assert Launcher.calls == [
        (
            STREAM, 1000 + i * x_step, words, scales, 11, 9000 + i * y_step, 13, 5000 + i * y_step, 0, 0, 1e-5,
            rows, 48, 96, *(prefetch if i == 2 else (0, 0, 0, 0)),  # once, by the last launch
        )
        for i, rows in enumerate((8, 8, 3))
    ]  # fmt: skip


def test_what_a_call_lacks_stays_null_in_every_launch() -> None:
    make(weight(), 17)(STREAM, 1000, 5000)
    assert len(Launcher.calls) == 3 and all(call[4:7] == (0, 0, 0) for call in Launcher.calls)


def test_no_rows_are_no_launch() -> None:
    make(weight(), 0)(STREAM, 1000, 5000)
    assert not Launcher.made


def test_the_layers_of_a_model_share_launches_and_read_their_own_weights() -> None:
    first, second = weight(), weight()
    plans = [make(first, 4), make(second, 4), make(first, 4).over(second)]
    assert len(Launcher.made) == 2  # for calls with a prefetch, and for those without
    assert plans[0].steps is plans[1].steps is plans[2].steps
    for each in plans:
        each(STREAM, 1000, 5000)
    assert [call[2:4] for call in Launcher.calls] == [first.addresses, second.addresses, second.addresses]
    assert make(weight(), 4, knobs={"stages": 1}).steps is not plans[0].steps
    assert make(weight(64), 4).steps is not plans[0].steps
    assert make(weight(), 4, extras={"bias": True}).steps is not plans[0].steps


def test_what_is_kept_for_row_counts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST_PLANS", 3)
    packed = weight()
    for key in range(5):
        plan.remember(packed, (key,), key)
    assert packed.plans == {(3,): 3, (4,): 4}


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Kernels that want scratch memory; returns the number of the graph being captured, 0 for none."""
    state = {"capture": 0}
    launch = Family.launch
    monkeypatch.setattr(Family, "launch", lambda *asked: Launch(1, launch(*asked).shared_bytes, workspace=64))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capture"] > 0)
    monkeypatch.setattr(driver, "capture_number", lambda _stream: state["capture"])
    return state


def used(made: Plan, stream: int) -> int:
    """Address of the scratch memory of a launch."""
    made(stream, 1000, 5000)
    return int(Launcher.calls[-1][8])


def test_scratch_memory_belongs_to_a_stream_and_a_kind_of_launch(wanted: dict[str, int]) -> None:
    first = make(weight(), 4)
    at = used(first, 1)
    assert at and used(first, 1) == at
    assert used(first.over(weight()), 1) == at  # on one stream they follow one another
    assert used(first, 2) != at
    assert used(make(weight(), 2), 1) != at
    assert used(make(weight(96), 4), 1) != at


def test_the_oldest_scratch_memory_of_streams_goes_where_there_would_be_too_much(
    wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_MOST_BYTES", 150)
    first, second, third = (make(weight(), rows) for rows in (1, 2, 4))
    for each in (first, second, third, second):
        each(1, 1000, 5000)
    assert [key[2][1] for key in scratch._of_streams] == [2, 4]  # rows


def test_a_graph_has_scratch_memory_of_its_own_for_each_of_its_streams(wanted: dict[str, int]) -> None:
    made = make(weight(), 4)
    eager = used(made, 1)
    wanted["capture"] = 5
    first = used(made, 1)
    assert first != eager and used(made, 1) == first and used(made, 2) not in (first, eager)
    for later in (6, 7, 8):
        wanted["capture"] = later
        assert used(made, 1) not in (first, eager)
    wanted["capture"] = 5  # captures in several threads overlap
    assert used(made, 1) == first
    wanted["capture"] = 9
    used(made, 1)
    assert list(scratch._of_captures) == [6, 7, 8, 9]
    wanted["capture"] = 0
    assert used(made, 1) == eager


def test_a_graph_of_inductor_has_fresh_scratch_memory_for_each_launch(
    wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = ModuleType("torch._inductor.cudagraph_trees")
    stream = SimpleNamespace(cuda_stream=3)
    trees.get_manager = lambda _device, create_if_none_exists: SimpleNamespace(stream=stream)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, trees.__name__, trees)
    made, kept = make(weight(), 4), []
    monkeypatch.setattr(scratch, "_zeroed", lambda size, _device: kept.append(torch.zeros(size)) or kept[-1])
    for wanted["capture"] in (0, 5):
        assert len({used(made, 3) for _ in range(3)}) == 3
    assert not scratch._of_streams and not scratch._of_captures and len(kept) == 6
    assert used(made, 4) == used(made, 4)
