"""`jitmx.route` and `jitmx.group_by_expert` where there is no card: what is launched for what, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from jitmx.errors import InputError, KnobError
from jitmx.kernels.routing.problem import FEW_TOKENS, RoutingProblem, parts
from jitmx.ops.routing import group_by_expert, route
from jitmx.ops.routing.calls import _check_out
from jitmx.ops.routing.plan import Routing


def sources(**fields: Any) -> list[tuple[str, int]]:
    return [(part.source, part.tile) for part in parts(RoutingProblem(**fields))]


@pytest.mark.parametrize("source", ["hidden", "logits"])
def test_up_to_64_tokens_are_one_launch_and_more_have_their_lists_made_apart(source: str) -> None:
    assert sources(m=1, source=source, tile=64) == [(source, 64)]
    assert sources(m=FEW_TOKENS, source=source, tile=64) == [(source, 64)]
    assert sources(m=FEW_TOKENS + 1, source=source, tile=64) == [(source, 0), ("ids", 64)]
    assert sources(m=8192, source=source) == [(source, 0)]


def test_no_tokens_launch_nothing_but_the_empty_lists() -> None:
    assert sources(m=0) == []
    assert sources(m=0, tile=16) == [("ids", 16)] == sources(m=0, tile=16, source="ids")


def test_the_map_goes_to_the_launch_that_makes_lists() -> None:
    choice, lists = parts(RoutingProblem(m=100, tile=8, mapped=True, norm=True, bias="bias_fp32"))
    assert not choice.mapped and choice.norm and choice.bias == "bias_fp32"
    assert lists.mapped and not lists.norm and lists.bias == "none"


X, W = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: route(X, W, k=2, scoring="sigmoid"), KnobError, "scoring='sigmoid' is not one of softmax_topk, "),
        (lambda: route(X, W, k=2), InputError, r"x is bfloat16 \[2, 64\] on cpu; jitmx runs on CUDA tensors"),
        (lambda: group_by_expert(X, 8, tile=8), InputError, r"ids is bfloat16 \[2, 64\] on cpu"),
    ],
)
def test_calls_that_cannot_be_are_refused_with_the_reason(
    call: Callable[[], object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call()


def test_an_out_of_another_call_is_refused_by_name() -> None:
    def made(m: int, lists: bool) -> Routing:
        chosen = torch.empty(m, 4, dtype=torch.int32), torch.empty(m, 4)
        numbers = torch.empty(3, dtype=torch.int32) if lists else None
        return Routing(*chosen, numbers, numbers, numbers, numbers)

    device = made(1, False).ids.get_device()
    _check_out(made(2, True), made(2, True), device)
    with pytest.raises(InputError, match=r"out\.ids is int32 \[3, 4\] on cpu; this call writes int32 \[2, 4\]"):
        _check_out(made(3, True), made(2, True), device)
    with pytest.raises(InputError, match=r"out\.pairs is None, unlike what this call writes"):
        _check_out(made(2, False), made(2, True), device)
