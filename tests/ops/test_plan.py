"""Plans: which launches a call becomes, what each is handed, and what the layers of a model share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import jitmx
import simulated_card
from jitmx.errors import KnobError
from jitmx.kernels import Family
from jitmx.ops.linear.packed import PackedWeight
from jitmx.ops.linear.plan import Plan
from jitmx.registry.launch import Launch
from jitmx.runtime import card as cards
from jitmx.runtime import driver, scratch
from jitmx.runtime.plan import Plans
from simulated_card import Simulated, on_cpu


class Noting(Simulated):
    """Notes what is bound, and the fields of each launch."""

    def __init__(self, target: Any) -> None:
        super().__init__(target, device=0)
        self.bound = 0
        self.calls: list[dict[str, Any]] = []

    def multiprocessors(self, _device: int) -> int:
        return 132

    def bind(self, variant: Any, device: int, launch: Launch, takes: Any, fixed: Any, *, dependent: bool = True) -> Any:
        self.bound += 1
        return super().bind(variant, device, launch, takes, fixed, dependent=dependent)

    def launch(self, _variant: Any, _launch: Launch, values: dict[str, Any]) -> None:
        self.calls.append(values)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, only_gemv: None) -> Iterator[Noting]:
    """An sm_90a card that launches nothing, and scratch memory of its own."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(scratch, "_zeroed", lambda size, _device: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(scratch, "_lay_in", lambda _device: None)
    for name in ("_of_streams", "_of_captures", "_pieces"):
        monkeypatch.setattr(scratch, name, {})
    with on_cpu("sm_90", Noting) as found:
        assert isinstance(found, Noting)
        yield found


def weight(n: int = 48, k: int = 96) -> PackedWeight:
    codes, scales = torch.zeros(n, k // 2, dtype=torch.uint8), torch.full((n, k // 32), 127, dtype=torch.uint8)
    return jitmx.pack_weight((codes, scales))


def make(packed: PackedWeight, rows: int, **more: Any) -> Plan:
    return Plan(packed, rows, torch.bfloat16, 0, **more)


PREFETCH = "next_words", "next_scales", "next_word_bytes", "next_scale_bytes"


def test_rows_beyond_what_a_kernel_takes_are_launches_that_follow_one_another_through_memory(card: Noting) -> None:
    packed = weight()
    prefetch = (21, 22, 23, 24)
    make(packed, 19)(1000, 5000, 11, 9000, 13, 1e-5, 0, prefetch)
    words, scales = packed.addresses
    x_step, y_step = 8 * 96 * 2, 8 * 48 * 2
    assert card.calls == [
        {
            "x": 1000 + i * x_step, "weight": words, "scales": scales, "bias": 11, "residual": 9000 + i * y_step,
            "norm": 13, "y": 5000 + i * y_step, "residual_lo": 0, "epsilon": 1e-5, "rows": rows, "n": 48, "k": 96,
            **dict(zip(PREFETCH, prefetch if i == 2 else (0, 0, 0, 0), strict=True)),  # once, by the last launch
        }
        for i, rows in enumerate((8, 8, 3))
    ]  # fmt: skip


def test_what_a_call_lacks_stays_null_in_every_launch(card: Noting) -> None:
    make(weight(), 17)(1000, 5000)
    assert len(card.calls) == 3
    assert not any(call[name] for call in card.calls for name in ("bias", "residual", "norm", "residual_lo"))


def test_no_rows_are_no_launch(card: Noting) -> None:
    make(weight(), 0)(1000, 5000)
    assert not card.bound and not card.calls


def test_the_layers_of_a_model_share_launches_and_read_their_own_weights(card: Noting) -> None:
    first, second = weight(), weight()
    plans = [make(first, 4), make(second, 4), make(first, 4).over(second)]
    assert card.bound == 2  # for calls with a prefetch, and for those without
    assert plans[0].parts is plans[1].parts is plans[2].parts
    for each in plans:
        each(1000, 5000)
    read = [(call["weight"], call["scales"]) for call in card.calls]
    assert read == [first.addresses, second.addresses, second.addresses]
    assert make(weight(), 4, knobs={"stages": 1}).parts is not plans[0].parts
    assert make(weight(64), 4).parts is not plans[0].parts
    assert make(weight(), 4, extras={"bias": True}).parts is not plans[0].parts


def test_what_is_kept_for_row_counts_is_bounded() -> None:
    plans = Plans(3)
    for key in range(5):
        assert plans.remember((key,), key) == key
    assert plans == {(3,): 3, (4,): 4}


def test_plans_are_forgotten_where_another_card_is_used() -> None:
    packed = weight()
    packed.plans.remember("a call", "its plan")
    with on_cpu("sm_121"):
        assert not packed.plans


def test_a_kernel_that_needs_more_shared_memory_than_a_block_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Family, "launch", lambda *_asked: Launch(1, 232449))
    with pytest.raises(KnobError, match="needs 232449 B of shared memory for this call; a block on sm_90a has at most"):
        make(weight(), 4)


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
    simulated_card.STREAM = stream
    card = cards.current()
    assert isinstance(card, Noting)
    made(1000, 5000)
    return int(card.calls[-1]["workspace"])


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
        used(each, 1)
    assert [key[2][3] for key in scratch._of_streams] == [2, 4]  # rows


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
