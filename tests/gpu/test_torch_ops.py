"""jitmx inside torch on the card: operators, compiled code, graphs, fused steps, argmax and the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import opcheck

import jitmx
import jitmx.operators  # those that no function here has used yet
from jitmx.errors import InputError
from jitmx.nn import MXFP4Linear
from jitmx.ops.linear import operand

GATE = 0.005  # relative L2 against float64, rounding of the output included
BF16 = torch.bfloat16
ROWS = [1, 5, 16, 70, 300]


class Weight:
    """A random MXFP4 weight [n, k], packed, with its values in float64."""

    def __init__(self, n: int, k: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(119, 123, (n, k // 32), device="cuda").to(torch.uint8)
        tensor = jitmx.MXTensor(codes, scales)
        self.packed = jitmx.pack_weight(tensor)
        self.values = jitmx.dequantize(tensor, torch.float32).double()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the operators take it."""
        packed = self.packed
        return packed.words, packed.scales, packed.n, packed.k, operand.layout(packed)


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def normalised(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()


def replayed(run: Callable[[], object], times: int = 3) -> None:
    """Run once, capture, and replay so many times."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("m", [1, 9, 130])
def test_operators_keep_what_they_promise_to_torch(m: int) -> None:
    weight = Weight(320, 256)
    x, bias, residual, norm = normal(m, 256), normal(320), normal(m, 320), normal(256)
    plain = (x, *weight.arguments, None, None, None, 1e-5, None)
    full = (x, *weight.arguments, bias, residual, norm, 1e-5, None)
    ops = torch.ops.jitmx
    for operator, arguments in (
        (ops.linear, plain),
        (ops.linear, full),
        (ops.linear_out, (*full, torch.empty(m, 320, dtype=BF16, device="cuda"))),
        (ops.linear_argmax, (x, *weight.arguments, bias, norm, 1e-5)),
        (ops.quantize, (x, "mxfp8", "floor")),
        (ops.dequantize, (*ops.quantize(x, "mxfp4", "even"), "mxfp4", torch.float16)),
    ):
        checked = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        assert set(opcheck(operator.default, arguments, test_utils=checked).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs", "inductor"])
def test_compiled_code_computes_what_eager_code_does(backend: str) -> None:
    first, second = Weight(512, 256), Weight(256, 512, 1)
    norm = normal(256)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(jitmx.linear(x, first.packed, norm=norm))
        return jitmx.linear(y, second.packed, residual=x) * 2

    torch.compiler.reset()
    # torch's backend of that name records one graph for a symbolic size, with the inputs of the first.
    dynamic = False if backend == "cudagraphs" else None
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for m in (1, 4, 40):
        x = normal(m, 256)
        for _ in range(3):
            assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize("knobs", ["", "kernel=tile,split_k=4"])  # the latter takes scratch memory
def test_compiled_code_runs_from_cuda_graphs_of_inductor(knobs: str, environment: Callable[..., None]) -> None:
    environment(JITMX_LINEAR_KNOBS=knobs)
    weight = Weight(256, 4096)
    torch.compiler.reset()
    step = torch.compile(lambda x: jitmx.linear(x + 1, weight.packed), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = normal(4, 4096)
        assert error(step(x).clone(), (x + 1).double() @ weight.values.T) <= GATE


def test_compiled_code_writes_into_the_output_it_is_given() -> None:
    weight, x, out = Weight(96, 64), normal(3, 64), torch.full((3, 96), torch.nan, dtype=BF16, device="cuda")
    torch.compiler.reset()
    torch.compile(lambda x, out: jitmx.linear(x, weight.packed, out=out), fullgraph=True, backend="aot_eager")(x, out)
    assert error(out, x.double() @ weight.values.T) <= GATE


def test_a_gradient_is_refused_with_the_remedy() -> None:
    weight, x = Weight(64, 64), normal(2, 64).requires_grad_()
    packed = weight.arguments
    for call in (
        lambda: jitmx.linear(x, weight.packed),
        lambda: jitmx.linear_argmax(x, weight.packed),
        lambda: jitmx.quantize(x),
        lambda: torch.ops.jitmx.linear(x, *packed, None, None, None, 1e-5, None),
        lambda: jitmx.linear(normal(2, 64), weight.packed, residual=x.detach().clone().requires_grad_()),
    ):
        with pytest.raises(InputError, match=r"requires a gradient, .* torch\.no_grad\(\) or pass .*\.detach\(\)"):
            call()
    with torch.no_grad():
        assert not jitmx.linear(x, weight.packed).requires_grad
    assert not jitmx.linear(x.detach(), weight.packed).requires_grad


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_norm_bias_and_residual_agree_with_float64(m: int, dtype: torch.dtype) -> None:
    weight = Weight(513, 2880)
    x, norm = normal(m, 2880, dtype=dtype), torch.rand(2880, device="cuda").add(0.5).to(dtype)
    bias, residual = normal(513, dtype=dtype), normal(m, 513, dtype=dtype)
    for more in (
        {"norm": norm}, {"residual": residual}, {"norm": norm, "residual": residual, "bias": bias},
    ):  # fmt: skip
        wanted = (normalised(x, norm) if "norm" in more else x.double()) @ weight.values.T
        wanted += sum(more[name].double() for name in ("bias", "residual") if name in more)
        out = torch.full((m, 513), torch.nan, dtype=dtype, device="cuda")
        assert error(jitmx.linear(x, weight.packed, out=out, **more), wanted) <= GATE
        out.fill_(torch.nan)
        replayed(lambda out=out, more=more: jitmx.linear(x, weight.packed, out=out, **more))
        assert error(out, wanted) <= GATE


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("activation", "format"), [("mxfp8", "mxfp8"), ("mxfp6", "mxfp6e2m3"), ("mxfp4", "mxfp4")])
def test_a_quantized_activation_counts_as_what_its_codes_stand_for(m: int, activation: str, format: str) -> None:
    weight, x, residual = Weight(320, 576), normal(m, 576), normal(m, 320)
    codes = jitmx.dequantize(jitmx.quantize(x, format), torch.float32).double()
    y = jitmx.linear(x, weight.packed, residual=residual, activation=activation)
    assert error(y, codes @ weight.values.T + residual.double()) <= GATE


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("with_norm", "with_bias"), [(False, False), (True, False), (True, True)])
def test_the_index_found_is_that_of_the_largest_value(m: int, with_norm: bool, with_bias: bool) -> None:
    weight, x = Weight(5003, 576), normal(m, 576)
    norm = torch.rand(576, device="cuda").add(0.5).to(BF16) if with_norm else None
    bias = normal(5003) if with_bias else None
    wanted = (x.double() if norm is None else normalised(x, norm)) @ weight.values.T
    wanted = wanted if bias is None else wanted + bias.double()
    out = torch.full((m,), -1, dtype=torch.int64, device="cuda")

    def shortfall() -> float:
        """How far below the largest values those at the indices are, relative to what bf16 tells apart."""
        best = wanted.amax(-1)
        return float(((best - wanted.gather(1, out[:, None])[:, 0]) / best.abs().clamp(min=1)).max())

    assert jitmx.linear_argmax(x, weight.packed, bias, norm=norm, out=out) is out
    assert shortfall() <= 2**-7
    out.fill_(-1)
    replayed(lambda: jitmx.linear_argmax(x, weight.packed, bias, norm=norm, out=out))
    assert shortfall() <= 2**-7


@pytest.mark.parametrize("m", ROWS)
def test_of_several_largest_values_the_lowest_index_is_found_and_never_a_nan(m: int) -> None:
    codes = torch.zeros(300, 32, dtype=torch.uint8, device="cuda")
    codes[[40, 41, 290]] = 0x22  # rows of ones
    scales = torch.full((300, 2), 127, dtype=torch.uint8, device="cuda")
    scales[7] = 255
    x = torch.ones(m, 64, dtype=BF16, device="cuda")
    found = jitmx.linear_argmax(x, jitmx.pack_weight((codes, scales)))
    assert found.shape == (m,) and (found == 40).all()


def test_indices_come_in_the_shape_of_the_leading_dimensions() -> None:
    weight = Weight(320, 256)
    assert jitmx.linear_argmax(normal(2, 3, 256), weight.packed).shape == (2, 3)
    assert jitmx.linear_argmax(normal(0, 256), weight.packed).shape == (0,)
    assert jitmx.linear_argmax(normal(256), weight.packed).shape == ()
    for out in (torch.empty(3, dtype=torch.int64, device="cuda"), torch.empty(2, dtype=torch.int32, device="cuda")):
        with pytest.raises(InputError, match=r"out is .*; it must be contiguous int64 \[2\] on cuda:0"):
            jitmx.linear_argmax(normal(2, 256), weight.packed, out=out)


def test_what_does_not_fit_the_fused_steps_is_refused_with_the_reason() -> None:
    weight = Weight(64, 128).packed
    x, norm, residual = normal(2, 128), normal(128), normal(2, 64)
    jitmx.linear(x, weight, residual=residual, norm=norm)  # a plan exists: the warm path must refuse as well
    cases: list[tuple[dict[str, Any], str]] = [
        ({"residual": normal(2, 63)}, r"residual is bfloat16 \[2, 63\].*must be contiguous bfloat16 \[2, 64\]"),
        ({"residual": residual.float()}, "residual is float32"),
        ({"residual": residual.cpu()}, "jitmx runs on CUDA tensors"),
        ({"norm": normal(127)}, r"norm is bfloat16 \[127\].*must be contiguous bfloat16 \[128\]"),
        ({"norm": normal(129)[1:]}, r"norm starts at an address that is no multiple of 16 bytes"),
        ({"norm": norm.tolist()}, "norm is a list, not a torch tensor"),
        ({"epsilon": -1.0}, "epsilon=-1.0 is not a finite number of 0 or more"),
        ({"epsilon": float("nan")}, "epsilon=nan is not a finite number"),
        ({"activation": "fp4"}, "activation='fp4' is not one of mxfp8, mxfp6, mxfp4, fp8, or None"),
        ({"activation": ["fp8"]}, r"activation=\['fp8'\] is not one of mxfp8, mxfp6, mxfp4, fp8, or None"),
        ({"out": residual}, "out overlaps residual"),
        ({"out": normal(129)[1:].view(2, 64)}, "out starts at an address that is no multiple of 16 bytes"),
    ]
    for change, said in cases:
        with pytest.raises(InputError, match=said):
            jitmx.linear(**{"x": x, "weight": weight, "residual": residual, "norm": norm, **change})
    torch.cuda.synchronize()


@pytest.mark.parametrize("knobs", ["", "kernel=tile,split_k=4"])
def test_graphs_and_eager_calls_share_no_scratch_memory(knobs: str, environment: Callable[..., None]) -> None:
    environment(JITMX_LINEAR_KNOBS=knobs)
    weight, x = Weight(2880, 4096), normal(16, 4096)
    wanted = jitmx.linear(x, weight.packed)
    outs = [torch.empty_like(wanted) for _ in range(3)]
    graphs = []
    for out in outs[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                jitmx.linear(x, weight.packed, out=out)
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            jitmx.linear(x, weight.packed, out=outs[2])
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("scale_rule", ["floor", "even"])
def test_a_module_made_of_a_linear_one_multiplies_by_its_quantized_weight(
    dtype: torch.dtype, format: str, scale_rule: str
) -> None:
    source = torch.nn.Linear(576, 321, dtype=dtype, device="cuda")
    before = source.weight.detach().clone()
    module = MXFP4Linear.from_linear(source, format=format, scale_rule=scale_rule)
    assert torch.equal(source.weight, before) and module.bias is not None
    own = torch.float16 if dtype is torch.float16 else BF16
    values = jitmx.dequantize(jitmx.quantize(before, format, scale_rule=scale_rule), torch.float32).double()
    for m in (1, 12):
        x = normal(m, 576, dtype=own)
        wanted = x.double() @ values.T + source.bias.detach().to(own).double()
        assert module(x).dtype is own and error(module(x), wanted) <= GATE


def test_a_module_survives_saving_moving_copying_and_compiling() -> None:
    module = MXFP4Linear.from_linear(torch.nn.Linear(256, 320, dtype=BF16, device="cuda"))
    x = normal(3, 256)
    wanted = module(x)
    fresh = MXFP4Linear(256, 320, device="cuda")
    fresh.load_state_dict(module.state_dict())
    torch.compiler.reset()
    others = [fresh, copy.deepcopy(module), torch.compile(module, fullgraph=True, backend="aot_eager")]
    for other in others:
        assert torch.equal(other(x), wanted)
    moved = copy.deepcopy(module).cpu()
    with pytest.raises(InputError, match="the weight on cpu; put both on one GPU"):
        moved(x)
    assert torch.equal(moved.cuda()(x), wanted)
    out = torch.empty_like(wanted)
    replayed(lambda: out.copy_(module(x)))
    assert torch.equal(out, wanted)
