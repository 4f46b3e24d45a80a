"""What `jitmx explain` says of a call is what the operator does: its launches, in number too, and its unfused steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import jitmx
from jitmx import arch, settings
from jitmx.dispatch.call import Call, explain
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError
from jitmx.kernels.linear import steps
from jitmx.kernels.linear.layout import packed_tiles, preferred_encoding
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.ops import linear
from jitmx.ops.routing import calls as routing_calls
from jitmx.registry.spec import Variant
from simulated_card import Simulated, on_cpu

N, K = 64, 2880  # nine rows of so many columns are too much for the shared memory of a block on sm_121
BF16 = torch.bfloat16


@pytest.fixture(params=["sm_80", "sm_90a", "sm_121a"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    """A card that notes launches and makes none."""
    settings.reload()
    with on_cpu(request.param) as found:

        def note(self: Simulated, variant: Variant, *_rest: Any) -> None:
            self.launched.append(variant)

        monkeypatch.setattr(Simulated, "launch", note)
        yield found
    monkeypatch.undo()
    settings.reload()


def packed(card: Simulated, *experts: int, n: int = N) -> dict[str, Any]:
    rows, tiles = packed_tiles(n, K)
    words = torch.zeros(*experts, rows, tiles, 32, 4, dtype=torch.int32)
    scales = torch.full((*experts, rows, tiles, 8), 0x7F7F7F7F, dtype=torch.int32)
    encoding = preferred_encoding(card.target)
    return {"words": words, "scales": scales, "n": n, "k": K, "encoding": encoding, "scale_range": "normal"}


def launched(card: Simulated) -> Counter[Variant]:
    found = Counter(card.launched)
    card.launched.clear()
    return found


def said(found: Call) -> Counter[Variant]:
    return sum((Counter({one.choice.variant: one.times}) for one in found.launches), Counter())


ROWS = (1, 8, 9, 32, 33, 65, 200)
EXTRAS: list[dict[str, Any]] = [
    {}, {"norm": True}, {"residual": True}, {"norm": True, "residual": True}, {"activation": "mxfp8"},
    {"norm": True, "activation": "mxfp6"}, {"norm": True, "residual": True, "activation": "mxfp4"},
    {"residual": "pair"}, {"norm": True, "residual": "pair"},
]  # fmt: skip


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_a_product_launches_what_is_said_and_has_apart_what_is_said(extras: dict[str, Any], card: Simulated) -> None:
    for m in ROWS:
        weight = jitmx.PackedWeight(**packed(card))
        x, norm, residual = (torch.zeros(size).bfloat16() for size in ((m, K), (K,), (m, N)))
        linear.run(
            x, weight, None, None, residual if extras.get("residual") else None, norm if extras.get("norm") else None,
            activation=extras.get("activation"), residual_lo=residual if extras.get("residual") == "pair" else None,
        )  # fmt: skip
        found = explain("linear", card.target, multiprocessors=4, m=m, n=N, k=K, **extras)
        assert launched(card) == said(found)
        ((_, _, unfused),) = weight.plans.values()
        assert tuple(found.unfused) == unfused


@pytest.mark.parametrize("norm", [False, True])
def test_gates_and_ups_of_some_rows_are_read_once(norm: bool, card: Simulated) -> None:
    for m in (1, 8, 9, 17, 32, 33):
        weight = jitmx.PackedWeight(**packed(card))
        jitmx.linear_swiglu(torch.zeros(m, K).bfloat16(), weight, norm=torch.ones(K).bfloat16() if norm else None)
        found = explain("linear", card.target, multiprocessors=4, m=m, n=N, k=K, norm=norm, swiglu=True)
        assert launched(card) == said(found)
        assert [one.times for one in found.launches if one.choice.variant.spec.family == "linear"] == [1]


@pytest.mark.parametrize("tile", [None, 8, 64])
@pytest.mark.parametrize("m", [0, 1, 64, 65, 3000])
def test_a_routing_launches_what_is_said(m: int, tile: int | None, card: Simulated) -> None:
    logits = torch.zeros(m, 128).bfloat16()
    jitmx.route(logits, k=4, tile=tile)
    found = explain("routing", card.target, multiprocessors=4, m=m, source="logits", k=4, tile=tile or 0)
    assert launched(card) == (said(found) if m or tile else Counter())
    routing_calls._plans.clear()


def test_rmsnorm_of_many_rows_is_said_to_run_apart_from_a_kernel_without_it(card: Simulated) -> None:
    found = explain("linear", card.target, m=65, n=5120, k=2880, norm=True)
    launch, norm = found.launches
    assert norm.choice.variant.spec.family == "norm" and norm.choice.problem.hidden == 2880 and norm.times == 1
    assert list(found.unfused) == ["norm"] and found.problem.norm and not launch.choice.problem.norm
    assert not getattr(launch.choice.variant.knobs, "norm", False)
    title, unfused, kernel, *_ = found.lines()
    assert "m=65" in title and "norm=True" in title and unfused.startswith("unfused     norm: RMSNorm of X before")
    assert kernel == f"kernel      {launch.choice.variant.name}"
    assert found.to_dict()["unfused"] == [{"step": "norm", "detail": steps.STEPS["norm"]}]
    assert found.to_dict()["launched"] == launch.choice.problem.as_dict()


@pytest.mark.parametrize("norm", [False, True])
def test_a_comparison_launches_what_is_said_however_few_rows_are_written_at_a_time(
    norm: bool, card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "VALUES_AT_ONCE", 48 * N)
    for m in (1, 8, 20, 48, 50, 100, 196):
        weight = jitmx.PackedWeight(**packed(card))
        jitmx.linear_argmax(torch.zeros(m, K).bfloat16(), weight, norm=torch.ones(K).bfloat16() if norm else None)
        found = explain("linear", card.target, multiprocessors=4, m=m, n=N, k=K, norm=norm, argmax=True)
        assert launched(card) == said(found)
        if m > 32:  # for so many rows nothing has it fused
            assert list(found.unfused) == ["argmax", *["norm"][:norm]]


def test_a_call_in_passes_is_said_to_be(card: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITMX_LINEAR_KNOBS", "kernel=gemv")
    settings.reload()
    weight = jitmx.PackedWeight(**packed(card))
    jitmx.linear(torch.zeros(19, K).bfloat16(), weight)
    found = explain("linear", card.target, multiprocessors=4, m=19, n=N, k=K)
    assert launched(card) == said(found) and [one.times for one in found.launches] == [2, 1]
    assert found.lines()[1].endswith(", 2 times with 8 of 19 rows")
    assert found.choice.decided_by.detail == "JITMX_LINEAR_KNOBS=kernel=gemv"


@pytest.mark.parametrize("more", [{}, {"reduction": "atomic"}, {"x_format": "mxfp8"}], ids=str)
@pytest.mark.parametrize("routing", ["ids", "bf16", "fp32"])
def test_a_layer_launches_what_is_said_its_routing_too(more: dict[str, str], routing: str, card: Simulated) -> None:
    if more.get("reduction") == "atomic" and card.target.major < 9:
        return  # adds in bf16, which that target cannot
    types = {"bf16": BF16, "fp32": torch.float32}
    for m in (1, 2, 64, 65, 300):
        w13, w2 = (jitmx.PackedExperts(**packed(card, 4, n=n)) for n in (2 * K, K))
        chosen: Any = torch.zeros(m, 4, dtype=types.get(routing, BF16))
        if routing == "ids":
            chosen = torch.zeros(m, 2, dtype=torch.int32), torch.zeros(m, 2)
        top = None if routing == "ids" else 2
        jitmx.moe(torch.zeros(m, K).bfloat16(), chosen, w13, w2, top=top, **more)
        shape = {"m": m, "experts": 4, "top": 2, "hidden": K, "intermediate": K, "bias": False, "routing": routing}
        found = explain("moe", card.target, multiprocessors=4, **shape, **more)
        assert launched(card) == said(found)
        # From logits, experts are chosen by a launch before, but where the kernel of one row does it.
        assert ("routing" in found.unfused) == (routing != "ids" and found.choice.variant.spec.name != "token")
        assert ("zero" in found.unfused) == (more.get("reduction") == "atomic")
        routing_calls._plans.clear()


def test_the_remedy_of_a_shape_that_does_not_fit_names_no_kernel_without_rmsnorm() -> None:
    sm_121 = arch.parse("sm_121")
    with pytest.raises(KnobError, match=r"do not fit.*; leave norm to unfused steps$"):
        choose("linear", LinearProblem.on(sm_121, m=65, norm=True), sm_121)
