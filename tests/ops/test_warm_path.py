"""What warm calls do on the host, counted in calls, which no busy machine changes; and what they check all the same."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitmx
from jitmx.errors import InputError
from jitmx.ops import sampling
from jitmx.ops.attention import plan
from jitmx.ops.linear import operand
from jitmx.runtime import driver, launch, load
from simulated_card import Simulated, on_cpu

N, K = 16, 64
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card whose driver takes every launch and does nothing; packing alone is simulated."""
    # Any function of C that gives 0 for four pointers, of which the first two differ.
    nothing = SimpleNamespace(cuLaunchKernelEx=ctypes.CDLL(None).pthread_equal)
    monkeypatch.setattr(load, "function", lambda _variant, _device: 1 << 40)
    monkeypatch.setattr(driver, "library", lambda: nothing)
    simulated = Simulated.bind

    def bind(self: Simulated, variant: Any, *rest: Any, **more: Any) -> Callable[..., None]:
        packs = variant.spec.family == "quantize"
        return simulated(self, variant, *rest) if packs else launch.bound(variant, *rest, **more)

    monkeypatch.setattr(Simulated, "bind", bind)
    # As many calls as on a card: functions of C.
    monkeypatch.setattr(launch, "_raw_stream", abs)
    monkeypatch.setattr(launch, "_current_device", (-1).__index__)
    with on_cpu("sm_90a") as launched:
        yield
        assert set(launched.kernels) <= {"quantize.pack"}


@pytest.fixture
def weight() -> jitmx.PackedWeight:
    codes, scales = torch.zeros(N, K // 2, dtype=torch.uint8), torch.full((N, K // 32), 127, dtype=torch.uint8)
    return jitmx.pack_weight(jitmx.MXTensor(codes, scales))


@pytest.fixture
def experts() -> tuple[jitmx.PackedExperts, jitmx.PackedExperts]:
    """W13 and W2 of four experts."""

    return packed_experts(2 * K), packed_experts(K)


def packed_experts(n: int) -> jitmx.PackedExperts:
    codes, scales = torch.zeros(4, n, K // 2, dtype=torch.uint8), torch.full((4, n, K // 32), 127, dtype=torch.uint8)
    return jitmx.pack_experts((codes, scales))


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


def test_a_new_y_costs_no_call_more_than_one_that_is_given(weight: jitmx.PackedWeight) -> None:
    x, out = torch.zeros(1, K, dtype=BF16), torch.empty(1, N, dtype=BF16)
    assert calls(lambda: jitmx.linear(x, weight)) <= calls(lambda: jitmx.linear(x, weight, out=out))


def test_the_operator_costs_six_calls_more_at_most(weight: jitmx.PackedWeight) -> None:
    """Among them those that find its weight: two addresses, a device, a look-up."""
    x, none = torch.zeros(1, K, dtype=BF16), (None, None, None, 1e-5, None)
    packed, run = (weight.words, weight.scales, N, K, operand.layout(weight)), torch.ops.jitmx.linear.default
    assert calls(lambda: run(x, *packed, *none)) <= calls(lambda: jitmx.linear(x, weight)) + 6


def inputs(rows: int) -> dict[str, torch.Tensor]:
    tensors = {"x": torch.zeros(rows, K).bfloat16(), "b13": torch.zeros(4, 2 * K).bfloat16()}
    tensors |= {"ids": torch.zeros(rows, 2, dtype=torch.int32), "weights": torch.ones(rows, 2)}
    return tensors | {"b2": torch.zeros(4, K).bfloat16(), "residual": torch.zeros(rows, K).bfloat16()}


def layer(packed: Any, out: Any = None, **changed: Any) -> torch.Tensor:
    given = {**inputs(3), **changed}
    chosen = given["ids"], given["weights"]
    return jitmx.moe(given["x"], chosen, *packed, given["b13"], given["b2"], residual=given["residual"], out=out)


def test_a_warm_layer_of_experts_calls_seventy_functions_at_most(experts: Any) -> None:
    given, out = inputs(3), torch.empty(3, K).bfloat16()
    biases, chosen = (given["b13"], given["b2"]), (given["ids"], given["weights"])
    assert calls(lambda: jitmx.moe(given["x"], chosen, *experts, *biases, out=out)) <= 70


LIES = {
    "apart": (lambda t: torch.stack([t, t], -1)[..., 0], "is not contiguous"),
    "astray": (lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape), "starts at an address that is no"),
    "traced": (lambda t: t.clone().requires_grad_(), "requires a gradient"),
}


@pytest.mark.parametrize("how", LIES)
@pytest.mark.parametrize("name", ["x", "b13", "b2", "residual", "out", "ids", "weights"])
def test_a_warm_layer_refuses_tensors_of_known_shape_that_lie_wrong(name: str, how: str, experts: Any) -> None:
    change, said = LIES[how]
    right = {**inputs(3), "out": torch.zeros(3, K).bfloat16()}
    layer(experts, **right)
    if (how == "astray" and name in ("ids", "weights")) or (how == "traced" and name == "ids"):
        return  # are read one at a time; integers have no gradient
    with pytest.raises(InputError, match=f"{name} {said}"):
        layer(experts, **{**right, name: change(right[name])})


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ([1], "out is a list, not a torch tensor"),
        (torch.zeros(3, K), r"out is float32 \[3, 64\]"),
        (torch.zeros(3, K - 32).bfloat16(), r"out is bfloat16 \[3, 32\]"),
    ],
)
def test_a_warm_layer_writes_into_nothing_that_does_not_fit(out: Any, said: str, experts: Any) -> None:
    layer(experts)
    with pytest.raises(InputError, match=said):
        layer(experts, out)


def test_a_layer_with_another_second_weight_or_residual_has_launches_of_its_own(experts: Any) -> None:
    first, other = experts[0], packed_experts(K)
    layer(experts)
    layer((first, other))
    layer(experts, residual=torch.zeros(2, 3, K).bfloat16())
    layer(experts)
    found = list(first.plans.values())
    assert [planned.w2 for planned in found] == [experts[1], other, experts[1]]
    assert [planned.pair for planned in found] == [False, False, True]
    assert [planned.weights for planned in found] == [
        (*first.addresses, *second.addresses) for second in (experts[1], other, experts[1])
    ]


def test_a_warm_norm_calls_twenty_two_functions_at_most() -> None:
    x, weight, out = torch.zeros(3, K, dtype=BF16), torch.ones(K, dtype=BF16), torch.empty(3, K, dtype=BF16)
    assert calls(lambda: jitmx.rms_norm(x, weight, out=out)) <= 22
    assert calls(lambda: jitmx.rms_norm(x, weight)) <= 20


@pytest.mark.parametrize("how", ["astray", "traced"])
@pytest.mark.parametrize("name", ["x", "weight"])
def test_a_warm_norm_refuses_tensors_of_known_shape_that_lie_wrong(name: str, how: str) -> None:
    change, said = LIES[how]
    right = {"x": torch.zeros(3, K).bfloat16(), "weight": torch.ones(K).bfloat16()}
    jitmx.rms_norm(**right)
    with pytest.raises(InputError, match=f"{name} {said}"):
        jitmx.rms_norm(**{**right, name: change(right[name])})


def attention_inputs() -> dict[str, Any]:
    """What a layer of gpt-oss gives at one token: views of QKV's output and of vLLM's cache."""
    q, k, v = (x.unflatten(1, (-1, 64)) for x in torch.zeros(1, 80 * 64).bfloat16().split([4096, 512, 512], 1))
    pool, numbers = torch.zeros(4, 16, 8, 128).bfloat16(), torch.zeros(1, 4, dtype=torch.int32)
    caches = {"k_cache": pool[..., :64], "v_cache": pool[..., 64:], "block_table": numbers}
    lengths = {"seq_lens": numbers[0, :1], "query_start_loc": numbers[0, :2]}
    more = {"sinks": torch.zeros(64).bfloat16(), "rope": torch.zeros(64, 64).bfloat16(), "out": torch.zeros_like(q)}
    slots = torch.zeros(1, dtype=torch.int64)
    return {"q": q, "k_new": k, "v_new": v, **caches, **lengths, **more, "slot_mapping": slots, "max_query_len": 1}


def test_a_warm_attention_calls_nineteen_functions_at_most() -> None:
    """Of Python four; of C one that compares all tensors, and one for the address of each of twelve."""
    given = attention_inputs()
    with torch.inference_mode():
        for _ in range(plan._PACKED_AFTER + 2):
            jitmx.attention(**given, max_seq_len=50, window=128)
        assert calls(lambda: jitmx.attention(**given, max_seq_len=50, window=128)) <= 19


def test_an_attention_whose_tensors_lie_elsewhere_each_time_calls_two_more_at_most() -> None:
    given, outs = attention_inputs(), [torch.zeros(1, 64, 64).bfloat16() for _ in range(2)]
    with torch.inference_mode():
        for _ in range(plan._PACKED_AFTER + 2):
            assert calls(lambda: [jitmx.attention(**{**given, "out": out}) for out in outs]) <= 2 * 23 + 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", ["astray", "traced"])
@pytest.mark.parametrize("name", ["q", "k_new", "v_new", "k_cache", "v_cache", "rope", "out"])
def test_a_warm_attention_refuses_tensors_of_known_shape_that_lie_wrong(name: str, how: str, packed: bool) -> None:
    change, said = LIES[how]
    right = attention_inputs()
    whole = {key: right[key].contiguous() for key in ("q", "k_new", "v_new", "k_cache", "v_cache", "rope", "out")}
    right |= whole
    for _ in range(2 + plan._PACKED_AFTER if packed else 1):
        jitmx.attention(**right)
    with pytest.raises(InputError, match=f"{name} {said}"):
        jitmx.attention(**{**right, name: change(right[name])})


@pytest.mark.parametrize("how", LIES)
@pytest.mark.parametrize("name", ["x", "weight", "bias", "norm"])
def test_a_warm_routing_refuses_tensors_of_known_shape_that_lie_wrong(name: str, how: str) -> None:
    change, said = LIES[how]
    right = {"x": torch.zeros(3, K).bfloat16(), "weight": torch.zeros(8, K).bfloat16()}
    right |= {"bias": torch.zeros(8).bfloat16(), "norm": torch.zeros(K).bfloat16()}
    jitmx.route(k=2, **right)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"{name} {said}"):
        jitmx.route(k=2, **{**right, name: change(right[name])})  # type: ignore[arg-type]


@pytest.mark.parametrize("current", [-1, 1])
def test_launches_are_made_with_the_device_of_x_as_the_current_one(
    current: int, weight: jitmx.PackedWeight, experts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(3, K).bfloat16()
    given = attention_inputs()
    runs: list[Callable[[], object]] = [
        lambda: jitmx.linear(x, weight), lambda: layer(experts), lambda: jitmx.attention(**given)
    ]  # fmt: skip
    for run in runs:
        for _ in range(plan._PACKED_AFTER + 3):
            run()
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    monkeypatch.setattr(launch, "_current_device", lambda: -1 if entered else current)
    for run in runs:
        entered.clear()
        run()
        assert entered == ([] if current == -1 else [-1])


def test_the_tokens_of_requests_cost_sixteen_calls_at_most_and_those_of_rows_fifteen() -> None:
    """Of the first ten make outputs and find addresses, and one compares all tensors."""
    logits, requests = torch.zeros(2, 64, dtype=BF16), torch.arange(2)
    lengths, prompts = torch.ones(2, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    assert calls(lambda: sampling.sample_requests(logits, requests, lengths, prompts)) <= 16
    assert calls(lambda: jitmx.greedy_sample(logits)) <= 15
