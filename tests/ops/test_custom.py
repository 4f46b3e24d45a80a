"""The operators that torch knows by name: traced without a GPU, by tensors that have a shape and no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jitmx
from jitmx.errors import InputError
from jitmx.ops.linear import operand
from jitmx.ops.linear.packed import PackedWeight

BF16 = torch.bfloat16


@pytest.fixture
def weight() -> PackedWeight:
    """Zeros [48, 96]."""
    codes, scales = torch.zeros(48, 48, dtype=torch.uint8), torch.full((48, 3), 127, dtype=torch.uint8)
    return jitmx.pack_weight((codes, scales))


@pytest.fixture
def fake(weight: PackedWeight) -> Iterator[FakeTensorMode]:
    """Tensors made in the test, though not the weight, are on a GPU that there need not be."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def on_gpu(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def anywhere(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """For what torch does itself, which it will not do for a GPU that it was not built for."""
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (7,), (2, 3)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.usefixtures("fake")
def test_a_product_of_tensors_without_data_has_shape_dtype_and_device(
    rows: tuple[int, ...], dtype: torch.dtype, weight: PackedWeight
) -> None:
    x = on_gpu(*rows, 96, dtype=dtype)
    y = jitmx.linear(x, weight, on_gpu(48, dtype=dtype), residual=on_gpu(*rows, 48, dtype=dtype), norm=on_gpu(96))
    assert (y.shape, y.dtype, y.device, y.is_contiguous()) == ((*rows, 48), dtype, x.device, True)
    found = jitmx.linear_argmax(x, weight)
    assert (found.shape, found.dtype, found.device) == (rows, torch.int64, x.device)


@pytest.mark.usefixtures("fake")
def test_the_output_that_was_passed_is_the_one_that_comes_back(weight: PackedWeight) -> None:
    out = on_gpu(3, 48)
    assert jitmx.linear(on_gpu(3, 96), weight, out=out) is out
    found = anywhere(3, dtype=torch.int64)
    assert jitmx.linear_argmax(anywhere(3, 96), weight, out=found) is found


@pytest.mark.parametrize(("format", "columns"), [("mxfp4", 32), ("mxfp8", 64), ("mxfp6e2m3", 64)])
@pytest.mark.usefixtures("fake")
def test_quantized_tensors_without_data_have_their_shapes(format: str, columns: int) -> None:
    tensor = jitmx.quantize(on_gpu(2, 5, 64), format)
    assert (tensor.codes.shape, tensor.scales.shape, tensor.format) == ((2, 5, columns), (2, 5, 2), format)
    back = jitmx.dequantize(tensor, torch.float32)
    assert (back.shape, back.dtype) == ((2, 5, 64), torch.float32)


def names(graph: Any) -> list[str]:
    """Operators of a traced graph that are jitmx's."""
    return [str(node.target) for node in graph.nodes if str(node.target).startswith("jitmx.")]


def compiled(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Operators of what torch.compile makes of `function`, as one graph."""
    found: list[str] = []

    class Seen(Exception):
        pass

    def backend(module: Any, _inputs: Any) -> Any:
        found.extend(
            f"{node.target}".removeprefix("torch.ops.") for node in module.graph.nodes if node.op == "call_function"
        )
        raise Seen

    torch.compiler.reset()
    with pytest.raises(Exception, match="Seen"):
        torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    return [name for name in found if name.startswith("jitmx.")]


def test_compiled_code_calls_the_operators_in_one_graph(weight: PackedWeight) -> None:
    def step(x: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        y = jitmx.linear(x, weight, bias, norm=norm, activation="mxfp8")
        again = jitmx.dequantize(jitmx.quantize(y.repeat(1, 2), "mxfp8"))
        jitmx.linear(again, weight, out=out)
        return jitmx.linear_argmax(out.repeat(1, 2), weight, norm=norm)

    arguments = [torch.zeros(shape, dtype=BF16) for shape in ((3, 96), (96,), (48,), (3, 48))]
    assert compiled(step, *arguments) == [
        "jitmx.linear", "jitmx.quantize", "jitmx.dequantize", "jitmx.linear_out", "jitmx.linear_argmax"
    ]  # fmt: skip


def test_a_traced_graph_keeps_the_operators_whole(weight: PackedWeight) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return jitmx.linear(x, weight) + 1

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.zeros(3, 96, dtype=BF16)).graph
    assert names(graph) == ["jitmx.linear.default"]


def test_an_exported_product_of_a_constant_is_the_operator(weight: PackedWeight) -> None:
    """The constant is a plain tensor, and nothing but torch's flag says that it is traced."""

    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.zeros(3, 96, dtype=BF16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + jitmx.linear(self.rows, weight)

    graph = torch.export.export(Constant(), (torch.zeros(3, 48, dtype=BF16),), strict=False).graph
    assert "jitmx.linear.default" in [str(node.target) for node in graph.nodes]


def test_the_number_of_rows_may_be_unknown(weight: PackedWeight) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return jitmx.linear(x, weight) * 2

    graph = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.zeros(3, 96, dtype=BF16))
    (node,) = [node for node in graph.graph.nodes if str(node.target).startswith("jitmx.")]
    rows, columns = node.meta["val"].shape
    assert isinstance(rows, torch.SymInt) and columns == 48


@pytest.mark.parametrize("name", ["x", "bias", "residual", "norm"])
@pytest.mark.usefixtures("fake")
def test_a_gradient_is_refused_with_the_remedy(name: str, weight: PackedWeight) -> None:
    tensors = {"x": anywhere(3, 96), "bias": anywhere(48), "residual": anywhere(3, 48), "norm": anywhere(96)}
    tensors[name].requires_grad_()
    said = rf"{name} requires a gradient, .* call under torch\.no_grad\(\) or pass {name}\.detach\(\)"
    with pytest.raises(InputError, match=said):
        jitmx.linear(weight=weight, **tensors)
    if name != "residual":
        del tensors["residual"]
        with pytest.raises(InputError, match=said):
            jitmx.linear_argmax(weight=weight, **tensors)
    with torch.no_grad():
        assert jitmx.linear(weight=weight, **tensors).shape == (3, 48)


def test_a_gradient_through_compiled_code_is_refused_with_the_remedy(weight: PackedWeight) -> None:
    torch.compiler.reset()
    step = torch.compile(lambda x: jitmx.linear(x, weight), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"InputError\('x requires a gradient, .* pass x\.detach\(\)'\)"):
        step(torch.zeros(3, 96, dtype=BF16, requires_grad=True))


@pytest.mark.usefixtures("fake")
def test_tensors_without_data_are_checked_like_others(weight: PackedWeight) -> None:
    for x, said in (
        (on_gpu(3, 64), "its last dimension must be k=96"),
        (on_gpu(3, 96, dtype=torch.float32), "linear takes bfloat16 or float16"),
        ([1.0], "x is a list, not a torch tensor"),
    ):
        for call in (jitmx.linear, jitmx.linear_argmax):
            with pytest.raises(InputError, match=said):
                call(x, weight)  # type: ignore[operator]
    with pytest.raises(InputError, match=r"out is bfloat16 \[3, 47\].*must be contiguous bfloat16 \[3, 48\]"):
        jitmx.linear(on_gpu(3, 96), weight, out=on_gpu(3, 47))
    with pytest.raises(InputError, match=r"pack it once with jitmx\.pack_weight"):
        jitmx.linear(on_gpu(3, 96), on_gpu(48, 96))  # type: ignore[arg-type]


def test_a_parameter_is_a_tensor_like_others_and_one_on_the_cpu_is_refused(weight: PackedWeight) -> None:
    x = torch.nn.Parameter(torch.zeros(3, 96, dtype=BF16), requires_grad=False)
    with pytest.raises(InputError, match=r"x is bfloat16 \[3, 96\] on cpu; jitmx runs on CUDA tensors"):
        jitmx.linear(x, weight)
    with pytest.raises(InputError, match="jitmx runs on CUDA tensors"):
        jitmx.quantize(x)


def test_operators_take_a_weight_apart_and_find_it_again_by_where_it_lies(weight: PackedWeight) -> None:
    layout = operand.layout(weight)
    found = operand.find(weight.words, weight.scales, 48, 96, layout)
    assert (found.n, found.k, found.format, found.encoding, found.scale_range) == (
        48, 96, weight.format, weight.encoding, weight.scale_range
    )  # fmt: skip
    assert found.addresses == weight.addresses and found.device == weight.device
    assert operand.find(weight.words, weight.scales, 48, 96, layout) is found
    moved = operand.find(weight.words.clone(), weight.scales, 48, 96, layout)
    assert moved is not found and moved.addresses != found.addresses
    assert operand.find(weight.words, weight.scales, 47, 96, layout) is not found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout": "mxfp4"}, "layout='mxfp4' is not format/encoding/scale range"),
        ({"layout": "mxfp5/rotated/normal"}, "format='mxfp5' of a packed weight is not one of"),
        ({"layout": "mxfp4/zigzag/normal"}, "encoding='zigzag' must be rotated or nibble"),
        ({"n": 64}, r"words of a packed weight \[64, 96\] is int32 .* on cpu; it must be int32"),
        ({"k": 192}, r"words of a packed weight \[48, 192\] is int32 .* on cpu; it must be int32"),
    ],
)
def test_what_is_no_packed_weight_is_refused_with_the_reason(
    change: dict[str, Any], said: str, weight: PackedWeight
) -> None:
    asked = {"n": 48, "k": 96, "layout": "mxfp4/rotated/normal"} | change
    with pytest.raises(InputError, match=said):
        operand.find(weight.words, weight.scales, **asked)


def test_another_tensor_where_a_weight_lay_is_no_packed_weight_for_that(weight: PackedWeight) -> None:
    asked = weight.scales, 48, 96, operand.layout(weight)
    operand.find(weight.words, *asked)
    for other in (weight.words.flatten(), weight.words[:2], weight.words.view(torch.float32)):
        assert other.data_ptr() == weight.words.data_ptr()
        with pytest.raises(InputError, match=r"words of a packed weight \[48, 96\] is .* on cpu; it must be int32"):
            operand.find(other, *asked)
    assert operand.find(weight.words, weight.scales, 48, 96, "mxfp4/nibble/normal").encoding == "nibble"


def test_what_is_remembered_of_weights_is_bounded(monkeypatch: pytest.MonkeyPatch, weight: PackedWeight) -> None:
    monkeypatch.setattr(operand, "_known", {})
    monkeypatch.setattr(operand, "_MOST", 3)
    kept = [weight.words.clone() for _ in range(5)]
    for words in kept:
        operand.find(words, weight.scales, 48, 96, "mxfp4/rotated/normal")
    assert [key[0] for key in operand._known] == [words.data_ptr() for words in kept[2:]]
