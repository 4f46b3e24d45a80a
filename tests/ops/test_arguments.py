"""The struct of arguments that a kernel of `linear` is handed: what its call has, and nothing of the call before."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import jitmx
from jitmx import arch
from jitmx.errors import DriverError
from jitmx.kernels import Family
from jitmx.kernels.linear import wgmma
from jitmx.kernels.linear.arguments import ARGUMENTS, NO_PREFETCH
from jitmx.kernels.linear.arguments import PREFETCH as NEXT
from jitmx.ops.linear.packed import PackedWeight
from jitmx.ops.linear.plan import Plan
from jitmx.registry.launch import Launch
from jitmx.registry.tensor_map import BYTES, TensorMap
from jitmx.runtime import card, driver, launch, load, scratch
from jitmx.runtime.launch import Launcher
from jitmx.sim.tensormap import encode

N, K, ROWS = 48, 96, 4
PREFETCH = 21, 22, 23, 24


class Hopper(card.Card):
    def arch(self, _device: int) -> arch.Arch:
        return arch.parse("sm_90")

    def multiprocessors(self, _device: int) -> int:
        return 132


class Driver:
    """Notes the argument structs of launches; a tensor map before them is left as it is."""

    def __init__(self) -> None:
        self.structs: list[bytes] = []
        self.streams: list[int | None] = []
        self.attributes: list[list[int]] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.start, self.size = 0, ARGUMENTS.size

    def cuLaunchKernelEx(self, config: Any, _function: object, parameters: object, _extra: object) -> int:  # noqa: N802
        self.meanwhile()
        self.streams.append(config._obj.stream)
        self.attributes.append([config._obj.attributes[i].id for i in range(config._obj.attribute_count)])
        place = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]  # type: ignore[arg-type]
        self.structs.append(ctypes.string_at(place + self.start, self.size))  # type: ignore[operator]
        return 0

    def cuTensorMapEncodeTiled(self, *_arguments: object) -> int:  # noqa: N802
        return 0

    def cuTensorMapReplaceAddress(self, *_arguments: object) -> int:  # noqa: N802
        return 0

    def cuFuncSetAttribute(self, *_arguments: object) -> int:  # noqa: N802
        return 0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver of an sm_90a card, on which nothing was planned before."""
    made = Driver()
    monkeypatch.setattr(load, "function", lambda _variant, _device: 1 << 40)
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(launch, "_raw_stream", lambda _device: 7)
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    with card.use(Hopper()):
        yield made


def weight() -> PackedWeight:
    codes, scales = torch.zeros(N, K // 2, dtype=torch.uint8), torch.full((N, K // 32), 127, dtype=torch.uint8)
    return jitmx.pack_weight((codes, scales))


EXTRAS: list[dict[str, Any]] = [
    {}, {"bias": True}, {"norm": True}, {"residual": True}, {"residual": "pair"},
    {"bias": True, "norm": True, "residual": "pair"},
]  # fmt: skip


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_a_launch_reads_what_its_call_has_and_nothing_of_the_call_before(extras: dict[str, Any], noted: Driver) -> None:
    first, second = weight(), weight()
    plans = {packed: Plan(packed, ROWS, torch.bfloat16, -1, extras) for packed in (first, second)}
    plans[second] = plans[first].over(second)  # of one shape: they share launches, and the memory of the arguments
    calls = [
        (first, 1000, NO_PREFETCH), (first, 2000, PREFETCH), (first, 1000, NO_PREFETCH), (second, 3000, PREFETCH),
        (second, 1000, NO_PREFETCH), (first, 4000, (0, 0, 0, 0)),
    ]  # fmt: skip
    for packed, at, prefetch in calls:
        bias, norm = (at + 1 if extras.get("bias") else 0), (at + 2 if extras.get("norm") else 0)
        residual = at + 3 if extras.get("residual") else 0
        residual_lo = at + 4 if extras.get("residual") == "pair" else 0
        epsilon = at / 1024 if norm else 0.0
        plans[packed](at, at + 5, bias, residual, norm, epsilon, residual_lo, prefetch)
        assert len(plans[packed].steps) == 1
        words, scales = packed.addresses
        given = {
            "x": at, "weight": words, "scales": scales, "bias": bias, "residual": residual, "norm": norm, "y": at + 5,
            "residual_lo": residual_lo, "epsilon": epsilon, "rows": ROWS, "n": N, "k": K,
            **dict(zip(NEXT, prefetch, strict=True)),
        }  # fmt: skip
        assert noted.structs.pop() == ARGUMENTS.pack(given, {}, encode)
    assert not noted.structs


@pytest.mark.parametrize("takes", [("x", "y"), ("x", "norm", "n"), ("x", "epsilon", "next_words"), ("x",)], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_fixed_stays_wherever_it_lies_among_what_calls_give(
    takes: tuple[str, ...], mapped: bool, noted: Driver
) -> None:
    noted.start = BYTES if mapped else 0
    variant = wgmma.SPEC.variant(arch.parse("sm_90"), x="tensor" if mapped else "image")
    fixed = {name: 100 + place for place, name in enumerate(ARGUMENTS.fields) if name not in takes}
    geometry = Launch(1, maps={"x_map": TensorMap("bf16", (2880, 300), (64, 128), swizzle=128)} if mapped else {})
    run = Launcher(variant, -1, geometry, takes, fixed)
    for call in (16, 32):
        given = {name: call + 16 * place for place, name in enumerate(takes)}
        run(*given.values())
        assert noted.structs.pop() == ARGUMENTS.pack({**fixed, **given}, {}, encode)


def test_arguments_that_cannot_be_packed_leave_the_launcher_to_the_next_call(noted: Driver) -> None:
    variant = Plan(weight(), ROWS, torch.bfloat16, -1).steps[0].variant
    launcher = Launcher(variant, -1, Launch(1), ("x", "weight", "scales", "bias", "y"), {})
    with pytest.raises(struct.error):
        launcher(1, 2)
    with pytest.raises(struct.error):
        launcher(1, 2, 3, 4, "y")  # type: ignore[arg-type]
    assert not noted.structs
    launcher(1, 2, 3, 4, 5)
    assert struct.unpack("7P", noted.structs.pop()[:56]) == (1, 2, 3, 4, 0, 0, 5)


def test_a_thread_that_launches_while_another_does_has_memory_and_a_stream_of_its_own(
    noted: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = Plan(weight(), ROWS, torch.bfloat16, -1).steps[0].variant
    launcher = Launcher(variant, -1, Launch(1), ("x", "weight", "scales", "bias", "y"), {})
    streams = {threading.get_ident(): 8}
    monkeypatch.setattr(launch, "_raw_stream", lambda _device: streams.get(threading.get_ident(), 9))

    def meanwhile() -> None:
        noted.meanwhile = lambda: None
        other = threading.Thread(target=launcher, args=(6, 7, 8, 9, 10), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()

    noted.meanwhile = meanwhile
    launcher(1, 2, 3, 4, 5)
    launcher(11, 12, 13, 14, 15)
    found = [struct.unpack("7P", packed[:56])[:4] for packed in noted.structs]
    assert found == [(6, 7, 8, 9), (1, 2, 3, 4), (11, 12, 13, 14)] and noted.streams == [9, 8, 8]


def test_a_launch_with_all_its_values_packed_is_on_the_current_stream_as_any_is(
    noted: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Plan(weight(), ROWS, torch.bfloat16, -1).steps[0]
    runs = [lambda: step.run(1, 2, 3, 4, 5), step.packed(1, 2, 3, 4, 5)]
    for stream in (3, 4, 3):
        monkeypatch.setattr(launch, "_raw_stream", lambda _device, stream=stream: stream)
        for run in runs:
            run()
    assert noted.streams == [3, 3, 4, 4, 3, 3] and len(set(noted.structs)) == 1


def test_a_launch_with_all_its_values_packed_keeps_the_memory_that_they_are_in(noted: Driver) -> None:
    run = Plan(weight(), ROWS, torch.bfloat16, -1).steps[0].packed(1, 2, 3, 4, 5)
    others = [driver.aligned_buffer(ARGUMENTS.size) for _ in range(1000)]
    for other in others:
        ctypes.memset(other, 0xFF, len(other))
    run()
    assert struct.unpack("7P", noted.structs.pop()[:56]) == (1, 2, 3, 4, 0, 0, 5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_launch_that_the_driver_refuses_is_an_error_that_names_its_kernel(packed: bool, noted: Driver) -> None:
    noted.cuLaunchKernelEx = lambda *_given: 701  # type: ignore[method-assign]
    noted.cuGetErrorString = lambda *_given: 0  # type: ignore[attr-defined]
    step = Plan(weight(), ROWS, torch.bfloat16, -1).steps[0]
    run = step.packed(1, 2, 3, 4, 5) if packed else lambda: step.run(1, 2, 3, 4, 5)
    with pytest.raises(DriverError, match="launching linear"):
        run()


def test_a_launch_with_all_its_values_packed_shares_the_scratch_memory_of_others(
    noted: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def memory(*given: Any) -> torch.Tensor:
        asked.append(given)
        return torch.zeros(64)

    monkeypatch.setattr(scratch, "memory", memory)
    monkeypatch.setattr(Family, "launch", lambda *_asked: Launch(1, workspace=64))
    step = Plan(weight(), ROWS, torch.bfloat16, -1).steps[0]
    step.run(1, 2, 3, 4, 5)
    step.packed(1, 2, 3, 4, 5)()
    assert asked[0] == asked[1]


def test_a_field_that_a_kernel_does_not_take_is_an_error_that_names_those_it_takes(noted: Driver) -> None:
    step = Plan(weight(), ROWS, torch.bfloat16, -1).steps[0]
    with pytest.raises(TypeError, match="does not take z; it takes x, weight, scales, bias, y"):
        step(x=1, z=2)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dependent", [False, True])
def test_a_launch_may_begin_before_the_last_one_has_ended_only_where_kernel_and_call_allow_it(
    pdl: bool, dependent: bool, noted: Driver
) -> None:
    variant = wgmma.SPEC.variant(arch.parse("sm_90"), pdl=pdl)
    shown = {"x_map": TensorMap("bf16", (2880, 300), (64, 128), swizzle=128)}
    Launcher(variant, -1, Launch(4, 1024, maps=shown), ("x", "y"), {"rows": 300}, dependent=dependent)(1 << 20, 2 << 20)
    assert noted.attributes == [
        [6] if pdl and dependent else []
    ]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
