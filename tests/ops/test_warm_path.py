"""What a warm `jitmx.linear` does on the host: counted in calls, which no busy machine changes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitmx
from jitmx.ops import linear, plan
from jitmx.runtime import driver, launch, load
from simulated_card import on_cpu

N, K = 16, 64
BF16 = torch.bfloat16


@pytest.fixture
def weight(monkeypatch: pytest.MonkeyPatch) -> Iterator[jitmx.PackedWeight]:
    """A packed weight, on a card whose driver takes every launch and does nothing."""
    # Any function of C that gives 0 for four pointers, of which the first two differ.
    nothing = SimpleNamespace(cuLaunchKernelEx=ctypes.CDLL(None).pthread_equal)
    monkeypatch.setattr(load, "function", lambda _variant, _device: 1 << 40)
    monkeypatch.setattr(driver, "library", lambda: nothing)
    with on_cpu("sm_90a") as card:
        monkeypatch.setattr(plan, "Launcher", launch.Launcher)
        # As many calls as on a card: functions of C.
        monkeypatch.setattr(linear, "_raw_stream", abs)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", (-1).__index__)
        codes, scales = torch.zeros(N, K // 2, dtype=torch.uint8), torch.full((N, K // 32), 127, dtype=torch.uint8)
        yield jitmx.pack_weight(jitmx.MXTensor(codes, scales))
        assert set(card.kernels) <= {"quantize.pack"}


def calls(run: Callable[[], object]) -> int:
    """Functions that a warm `run` calls, of Python and of C, itself apart."""
    run()
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count - 2  # `run`, and setting the profile back


def test_a_warm_call_calls_sixteen_functions_at_most(weight: jitmx.PackedWeight) -> None:
    """Four of Python above the launcher's: linear, run, is_compiling and the plan's launch."""
    x, out = torch.zeros(1, K, dtype=BF16), torch.empty(1, N, dtype=BF16)
    assert calls(lambda: jitmx.linear(x, weight, out=out)) <= 16


def test_a_bias_costs_seven_calls_at_most(weight: jitmx.PackedWeight) -> None:
    x, out, bias = torch.zeros(1, K, dtype=BF16), torch.empty(1, N, dtype=BF16), torch.zeros(N, dtype=BF16)
    plain = calls(lambda: jitmx.linear(x, weight, out=out))
    assert calls(lambda: jitmx.linear(x, weight, bias, out)) <= plain + 7
