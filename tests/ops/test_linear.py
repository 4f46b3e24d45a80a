"""`jitmx.linear` and `jitmx.linear_argmax` around their kernels, which here are arithmetic on the same addresses.

What is fused and what is not must make no difference to what a call means.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.library import opcheck

import jitmx
from jitmx.dispatch import call
from jitmx.errors import InputError
from jitmx.kernels.linear import steps
from jitmx.ops import linear
from jitmx.ops.linear import argmax, compose, operand
from jitmx.ops.linear.packed import PackedWeight
from simulated_card import on_cpu

BF16 = torch.bfloat16
N, K = 48, 96


def memory(address: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """The tensor at an address, not a copy."""
    count = torch.Size(shape).numel()
    size = count * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


class Emulated:
    """A plan whose one launch computes what the fields of the problem say, in fp64, and rounds once."""

    values: torch.Tensor
    made: list[dict[str, Any]]
    told: list[tuple[int, ...]]  # where the next weight lies, call by call

    def __init__(self, weight: Any, rows: int, dtype: torch.dtype, _device: int, extras: dict[str, Any]) -> None:
        self.rows, self.dtype, self.extras = rows, dtype, extras
        self.steps = (None,) if rows else ()
        Emulated.made.append(extras)

    @property
    def launch(self) -> Callable[..., None]:
        return self.__call__

    def __call__(
        self, x: int, y: int, bias: int = 0, residual: int = 0, norm: int = 0, epsilon: float = 0.0,
        residual_lo: int = 0, prefetch: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        Emulated.told.append(prefetch)
        if not self.rows:
            return
        asked = {name: bool(self.extras.get(name)) for name in ("bias", "residual", "norm")}
        assert {"bias": bool(bias), "residual": bool(residual), "norm": bool(norm)} == asked
        wide = memory(x, self.rows, K, dtype=self.dtype).double()
        if norm:
            wide = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
            wide = wide * memory(norm, K, dtype=self.dtype).double()
        found = wide @ Emulated.values.T
        if bias:
            found = found + memory(bias, N, dtype=self.dtype).double()
        if residual:
            found = found + memory(residual, self.rows, N, dtype=self.dtype).double()
        assert bool(residual_lo) == (self.extras.get("residual") == "pair")
        if residual_lo:
            found = found + memory(residual_lo, self.rows, N, dtype=self.dtype).double()
            memory(y, 2, self.rows, N, dtype=self.dtype).copy_(compose.pair(found.float(), self.dtype))
            return
        if self.extras.get("argmax"):
            memory(y, self.rows, dtype=torch.int64).copy_(found.nan_to_num(nan=-torch.inf).argmax(-1))
        else:
            memory(y, self.rows, N, dtype=self.dtype).copy_(found.to(self.dtype))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what kernels have fused: `fused("norm", "residual")`."""

    def use(*names: str) -> None:
        def fits(_op: str, problem: Any, _arch: Any) -> bool:
            asked = {name for name in ("norm", "residual", "argmax") if getattr(problem, name)}
            return asked <= set(names)

        monkeypatch.setattr(call, "fits_one_launch", fits)

    use()
    return use


@pytest.fixture
def weight(monkeypatch: pytest.MonkeyPatch, fused: Any) -> Iterator[PackedWeight]:
    """A random weight [48, 96] on a card that computes on the host."""
    generator = torch.Generator().manual_seed(4)
    monkeypatch.setattr(Emulated, "values", torch.randn(N, K, generator=generator, dtype=torch.float64), raising=False)
    for notes in ("made", "told"):
        monkeypatch.setattr(Emulated, notes, [], raising=False)
    for module in (linear, argmax):
        monkeypatch.setattr(module, "Plan", Emulated)
    codes, scales = torch.zeros(N, K // 2, dtype=torch.uint8), torch.full((N, K // 32), 127, dtype=torch.uint8)
    with on_cpu("sm_90"):
        yield jitmx.pack_weight((codes, scales))


def inputs(rows: int, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = {"x": (rows, K), "bias": (N,), "residual": (rows, N), "norm": (K,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def wanted(x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    """The product in float64."""
    wide = x.double()
    if "norm" in more:
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * more["norm"].double()
    found = wide @ Emulated.values.T
    return found + sum(more[name].double() for name in ("bias", "residual") if name in more)


def subsets(*names: str) -> list[tuple[str, ...]]:
    return [some for size in range(len(names) + 1) for some in itertools.combinations(names, size)]


@pytest.mark.parametrize("has", subsets("norm", "residual"), ids=str)
@pytest.mark.parametrize("asked", subsets("bias", "residual", "norm"), ids=str)
def test_what_is_fused_makes_no_difference_to_the_product(
    asked: tuple[str, ...], has: tuple[str, ...], weight: PackedWeight, fused: Any
) -> None:
    fused(*has)
    for rows, dtype in ((1, BF16), (5, torch.float16)):
        tensors = inputs(rows, dtype)
        given = {name: tensors[name] for name in ("x", *asked)}
        exact = wanted(**given)
        for out in (None, torch.full((rows, N), torch.nan, dtype=dtype)):
            y = jitmx.linear(weight=weight, out=out, **given)
            assert out is None or y is out
            assert float((y.double() - exact).norm() / exact.norm()) <= 3 * torch.finfo(dtype).eps
    assert all(bool(made["norm"]) == ("norm" in asked and "norm" in has) for made in Emulated.made)
    assert len(Emulated.made) == 2  # the second call of each kind was planned


@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 3, K)])
@pytest.mark.usefixtures("weight")
def test_leading_dimensions_are_kept(shape: tuple[int, ...], weight: PackedWeight) -> None:
    x = torch.randn(shape).bfloat16()
    y = jitmx.linear(x, weight)
    assert y.shape == (*shape[:-1], N)
    assert torch.equal(y, wanted(x.view(-1, K)).bfloat16().view(y.shape))
    assert torch.equal(jitmx.linear_argmax(x, weight), wanted(x.view(-1, K)).bfloat16().argmax(-1).view(shape[:-1]))


@pytest.mark.parametrize("has", subsets("norm", "argmax"), ids=str)
@pytest.mark.parametrize("asked", subsets("bias", "norm"), ids=str)
@pytest.mark.parametrize("values", [1 << 26, 2 * N])
def test_what_is_fused_makes_no_difference_to_the_index_found(
    asked: tuple[str, ...],
    has: tuple[str, ...],
    values: int,
    weight: PackedWeight,
    fused: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "VALUES_AT_ONCE", values)  # as many rows at a time as have so many values
    fused(*has)
    tensors = inputs(7)
    given = {name: tensors[name] for name in ("x", *asked)}
    out = torch.full((7,), -1)
    assert jitmx.linear_argmax(weight=weight, out=out, **given) is out
    exact = wanted(**given)
    best, found = exact.amax(-1), exact.gather(1, out[:, None])[:, 0]
    assert ((best - found) <= 0.02 * best.abs().clamp(min=1)).all()


def test_a_nan_is_never_the_largest_and_ties_go_to_the_lowest(weight: PackedWeight) -> None:
    Emulated.values.zero_()
    Emulated.values[[9, 30, 31]] = 1.0
    Emulated.values[4] = torch.nan
    assert (jitmx.linear_argmax(torch.ones(3, K, dtype=BF16), weight) == 9).all()


def test_a_quantized_activation_that_is_not_fused_is_rounded_after_the_norm(
    weight: PackedWeight, fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, str]] = []
    monkeypatch.setattr(compose, "rounded", lambda x, activation: seen.append((x, activation)) or x)
    monkeypatch.setattr(call, "fits_one_launch", lambda _op, problem, _arch: problem.activation == "none")
    tensors = inputs(3)
    y = jitmx.linear(tensors["x"], weight, norm=tensors["norm"], activation="mxfp6")
    ((x, activation),) = seen
    assert activation == "mxfp6"
    assert torch.equal(x, compose.rms_norm(tensors["x"], tensors["norm"], 1e-5))
    exact = wanted(tensors["x"], norm=tensors["norm"])
    assert float((y.double() - exact).norm() / exact.norm()) <= 0.01


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(3, 64, dtype=BF16)}, "its last dimension must be k=96"),
        ({"x": torch.zeros(3, K)}, "linear takes bfloat16 or float16"),
        ({"x": torch.zeros(3, 2 * K, dtype=BF16)[:, ::2]}, "x is not contiguous"),
        ({"x": torch.zeros(3 * K + 1, dtype=BF16)[1:].view(3, K)}, "x starts at an address that is no multiple of 16"),
        ({"x": torch.zeros(3, K, dtype=BF16, requires_grad=True)}, "x requires a gradient"),
        ({"bias": torch.zeros(N)}, r"bias is float32 \[48\] .*must be contiguous bfloat16 \[48\]"),
        ({"bias": torch.zeros(1, N, dtype=BF16)}, r"bias is bfloat16 \[1, 48\]"),
        ({"bias": torch.zeros(2 * N, dtype=BF16)[::2]}, r"bias is .* with strides \[2\]; it must be contiguous"),
        ({"bias": torch.zeros(N, dtype=BF16, requires_grad=True)}, "bias requires a gradient"),
        ({"bias": 1.0}, "bias is a float, not a torch tensor"),
        ({"residual": torch.zeros(3, 47, dtype=BF16)}, r"residual is bfloat16 \[3, 47\]"),
        ({"residual": torch.zeros(N, 3, dtype=BF16).T}, r"residual is .* with strides \[1, 3\]; it must be contiguous"),
        ({"residual": torch.zeros(3, N, dtype=BF16, requires_grad=True)}, "residual requires a gradient"),
        ({"norm": torch.zeros(95, dtype=BF16)}, r"norm is bfloat16 \[95\]"),
        ({"norm": torch.zeros(97, dtype=BF16)[1:]}, "norm starts at an address that is no multiple of 16"),
        ({"norm": torch.zeros(K, dtype=BF16, requires_grad=True)}, "norm requires a gradient"),
        ({"epsilon": -1.0}, "epsilon=-1.0 is not a finite number of 0 or more"),
        ({"epsilon": float("inf")}, "epsilon=inf is not a finite number of 0 or more"),
        ({"activation": "int8"}, "activation='int8' is not one of mxfp8, mxfp6, mxfp4, fp8, or None"),
        ({"activation": ["fp8"]}, r"activation=\['fp8'\] is not one of mxfp8, mxfp6, mxfp4, fp8, or None"),
        ({"out": torch.zeros(3, 47, dtype=BF16)}, r"out is bfloat16 \[3, 47\]"),
        ({"out": [1]}, "out is a list, not a torch tensor"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_launched(
    change: dict[str, Any], said: str, warm: bool, weight: PackedWeight, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(3)
    if warm:
        jitmx.linear(weight=weight, **given)

    def launch(*_arguments: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(Emulated, "__call__", launch)
    with pytest.raises(InputError, match=said):
        jitmx.linear(weight=weight, **{**given, **change})


def test_out_may_be_neither_x_nor_residual(weight: PackedWeight) -> None:
    tensors = inputs(3)
    with pytest.raises(InputError, match="out overlaps residual"):
        jitmx.linear(tensors["x"], weight, residual=tensors["residual"], out=tensors["residual"])
    shared = torch.zeros(3 * K, dtype=BF16)
    with pytest.raises(InputError, match="out overlaps x"):
        jitmx.linear(shared.view(3, K), weight, out=shared[: 3 * N].view(3, N))


def test_another_weight_of_the_same_shape_has_plans_of_its_own(weight: PackedWeight) -> None:
    x = inputs(2)["x"]
    jitmx.linear(x, weight)
    other = jitmx.PackedWeight(weight.words.clone(), weight.scales, N, K, weight.encoding, weight.scale_range)
    jitmx.linear(x, other)
    assert len(weight.plans) == len(other.plans) == 1 and weight.plans is not other.plans


@pytest.mark.parametrize("has", [(), ("residual",)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_residual_that_is_a_pair_is_added_whole_and_left_as_one(
    has: tuple[str, ...], dtype: torch.dtype, weight: PackedWeight, fused: Any
) -> None:
    fused(*has)
    tensors = inputs(5, dtype)
    total = torch.randn(5, N, generator=torch.Generator().manual_seed(1)) * 100
    residual, residual_lo = compose.pair(total, dtype).unbind()
    for _ in range(2):  # planned, then warm
        y = linear.run(tensors["x"], weight, tensors["bias"], residual=residual, residual_lo=residual_lo)
        assert y.shape == (2, 5, N) and y.dtype == dtype and y[1].any()
        assert bool((y[1].abs() <= y[0].abs() * 2.0**-8).all())
        whole = wanted(tensors["x"], bias=tensors["bias"]) + residual.double() + residual_lo.double()
        # Unfused, the product itself is rounded before it is added.
        gate = 2.0**-16 if has else 0.0005
        assert (y.double().sum(0) - whole).norm() / whole.norm() < gate
    assert Emulated.made == [{"bias": True, "residual": "pair" if has else False, "norm": False, "activation": "none"}]
    plain = linear.run(tensors["x"], weight, tensors["bias"], residual=residual)
    assert plain.shape == (5, N)
    with pytest.raises(InputError, match="pass that residual too"):
        linear.run(tensors["x"], weight, residual_lo=residual_lo)
    with pytest.raises(InputError, match=r"residual_lo is .*\[4, 48\]"):
        linear.run(tensors["x"], weight, residual=residual, residual_lo=residual_lo[:4])


def test_operators_in_eager_code_compute_the_same(weight: PackedWeight) -> None:
    tensors = inputs(4)
    packed = weight.words, weight.scales, N, K, operand.layout(weight)
    more = tensors["bias"], tensors["residual"], tensors["norm"], 1e-5, None
    y = jitmx.linear(weight=weight, **tensors)
    assert torch.equal(torch.ops.jitmx.linear(tensors["x"], *packed, *more), y)
    out = torch.full_like(y, torch.nan)
    torch.ops.jitmx.linear_out(tensors["x"], *packed, *more, out)
    assert torch.equal(out, y)
    found = torch.ops.jitmx.linear_argmax(tensors["x"], *packed, tensors["bias"], tensors["norm"], 1e-5)
    assert torch.equal(found, jitmx.linear_argmax(tensors["x"], weight, tensors["bias"], norm=tensors["norm"]))
    parameter = torch.nn.Parameter(tensors["x"], requires_grad=False)
    assert torch.equal(jitmx.linear(parameter, weight), jitmx.linear(tensors["x"], weight))


@pytest.mark.parametrize("has", [(), ("norm", "residual")], ids=str)
def test_every_launch_is_told_where_the_next_weight_lies(
    has: tuple[str, ...], weight: PackedWeight, fused: Any
) -> None:
    fused(*has)
    later = jitmx.pack_weight((torch.zeros(32, 64, dtype=torch.uint8), torch.full((32, 4), 127, dtype=torch.uint8)))
    place = later.words.data_ptr(), later.scales.data_ptr(), later.words.nbytes, later.scales.nbytes
    tensors = inputs(4)
    y = jitmx.linear(weight=weight, **tensors, prefetch=later)
    jitmx.linear(weight=weight, **tensors, out=y, prefetch=later)
    packed = weight.words, weight.scales, N, K, operand.layout(weight)
    more = tensors["bias"], tensors["residual"], tensors["norm"], 1e-5, None
    torch.ops.jitmx.linear(tensors["x"], *packed, *more, later.words, later.scales)
    torch.ops.jitmx.linear_out(tensors["x"], *packed, *more, y, later.words, later.scales)
    torch.compiler.reset()
    torch.compile(lambda x: jitmx.linear(x, weight, prefetch=later), fullgraph=True, backend="aot_eager")(tensors["x"])
    assert Emulated.told == [place] * 5
    assert torch.equal(jitmx.linear(weight=weight, **tensors), y)
    assert Emulated.told[-1] == (0, 0, 0, 0)


@pytest.mark.parametrize("prefetch", [torch.zeros(4), "o_proj", 7])
def test_a_next_weight_that_is_not_packed_is_refused(prefetch: Any, weight: PackedWeight) -> None:
    said = r"prefetch is a \w+; pass the packed weight that a later product reads, or None"
    x = inputs(1)["x"]
    for given in (x, torch.nn.Parameter(x, requires_grad=False)):  # a call and an operator
        with pytest.raises(InputError, match=said):
            jitmx.linear(given, weight, prefetch=prefetch)
    assert not Emulated.told


def test_a_next_weight_elsewhere_is_refused(weight: PackedWeight) -> None:
    far = PackedWeight(*(t.to("meta") for t in (weight.words, weight.scales)), N, K, "rotated", "normal")
    with pytest.raises(InputError, match="prefetch is on meta and x on cpu; put both on one GPU"):
        jitmx.linear(inputs(1)["x"], weight, prefetch=far)


def test_beside_a_next_weight_what_is_no_weight_is_still_refused_as_such(weight: PackedWeight) -> None:
    for given in (None, torch.zeros(N, K)):
        with pytest.raises(InputError, match=r"jitmx\.pack_weight"):
            jitmx.linear(inputs(1)["x"], given, prefetch=weight)


@pytest.mark.parametrize("has", [(), ("norm", "residual", "argmax")], ids=str)
def test_operators_keep_what_they_promise_to_torch(has: tuple[str, ...], weight: PackedWeight, fused: Any) -> None:
    fused(*has)
    tensors = inputs(5)
    packed = weight.words, weight.scales, N, K, operand.layout(weight)
    more = tensors["bias"], tensors["residual"], tensors["norm"], 1e-5, None
    ops, out = torch.ops.jitmx, torch.empty(5, N, dtype=BF16)
    for operator, arguments in (
        (ops.linear, (tensors["x"], *packed, None, None, None, 1e-5, None)),
        (ops.linear, (tensors["x"], *packed, *more)),
        (ops.linear_out, (tensors["x"], *packed, *more, out)),
        (ops.linear_out, (tensors["x"], *packed, *more, out, *packed[:2])),
        (ops.linear_argmax, (tensors["x"], *packed, None, tensors["norm"], 1e-5)),
    ):
        checked = opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(checked.values()) == {"SUCCESS"}


def test_compiled_code_runs_the_operators(weight: PackedWeight) -> None:
    tensors = inputs(4)
    torch.compiler.reset()
    step = torch.compile(lambda x, norm: jitmx.linear(x, weight, norm=norm) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        step(tensors["x"], tensors["norm"]), jitmx.linear(tensors["x"], weight, norm=tensors["norm"]) * 2
    )
