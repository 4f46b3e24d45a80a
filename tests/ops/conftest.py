"""A fixture that runs operators whole on the simulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from jitmx import arch, settings
from jitmx.ops import checks, moe, moe_grouped, moe_plan, routing_calls, routing_plan, scratch
from simulated_card import Card, Launcher


@pytest.fixture(params=["sm_121a"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """The card; `torch` believes that tensors in host memory lie on it."""
    settings.reload()
    Launcher.card = Card()
    for module in (moe_plan, moe_grouped, routing_plan):
        monkeypatch.setattr(module, "Launcher", Launcher)
    for module in (moe, routing_calls):
        monkeypatch.setattr(module, "_raw_stream", lambda _device: 7)
    monkeypatch.setattr(checks, "require_cuda", checks.require_tensor)
    monkeypatch.setattr(checks, "device_arch", lambda _device: arch.parse(request.param))
    monkeypatch.setattr(checks, "multiprocessors", lambda _device: 4)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    outputs, check_out = routing_plan.Plan.outputs, routing_calls._check_out

    def in_host_memory(plan: routing_plan.Plan, ids: torch.Tensor | None, device: torch.device) -> routing_plan.Routing:
        return outputs(plan, ids, device if device.type == "meta" else torch.device("cpu"))

    monkeypatch.setattr(routing_plan.Plan, "outputs", in_host_memory)
    monkeypatch.setattr(routing_calls, "_check_out", lambda out, wanted, _device: check_out(out, wanted, -1))
    monkeypatch.setattr(scratch, "_zeroed", lambda size, _device: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(scratch, "_of_streams", {})
    monkeypatch.setattr(routing_calls, "_plans", {})
    moe_plan._plan.cache_clear()
    yield Launcher.card
    moe_plan._plan.cache_clear()
    monkeypatch.undo()
    settings.reload()
