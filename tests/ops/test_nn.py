"""`jitmx.nn.MXFP4Linear`: what it holds, how it is saved, and what it hands to the operator."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from jitmx import arch
from jitmx.errors import InputError
from jitmx.nn import MXFP4Linear
from jitmx.runtime import card


def filled(format: str = "mxfp4", **more: Any) -> MXFP4Linear:
    """A module [48, 96] with random words."""
    module = MXFP4Linear(96, 48, format=format, **more)
    generator = torch.Generator().manual_seed(1)
    module.words.copy_(torch.randint(-(2**31), 2**31, module.words.shape, generator=generator, dtype=torch.int64))
    if module.bias is not None:
        module.bias.copy_(torch.randn(48, generator=generator))
    return module


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_goes_round_with_how_the_weight_is_packed(format: str, assign: bool) -> None:
    module = filled(format)
    module.encoding, module.scale_range = "nibble", "full"
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    again = MXFP4Linear(96, 48, format=format)
    before = again.weight
    again.load_state_dict(torch.load(stream, weights_only=True), assign=assign)
    for name in ("words", "scales", "bias"):
        assert torch.equal(getattr(again, name), getattr(module, name))
    assert (again.encoding, again.scale_range, again.format) == ("nibble", "full", format)
    assert again.weight is not before and again.weight.encoding == "nibble"
    assert torch.equal(again.weight.words, module.words)


def test_a_state_dict_of_another_format_is_refused() -> None:
    state = {**MXFP4Linear(96, 48).state_dict(), "_extra_state": {"format": "mxfp8"}}
    with pytest.raises(InputError, match="the state dict holds an mxfp8 weight; make the module with that format"):
        MXFP4Linear(96, 48).load_state_dict(state)


@pytest.mark.parametrize("said", [None, {}, {"format": "mxfp4", "encoding": "x", "scale_range": "normal"}])
def test_a_state_dict_that_says_nothing_that_is_packed_is_refused(said: Any) -> None:
    state = {**MXFP4Linear(96, 48).state_dict(), "_extra_state": said}
    with pytest.raises(InputError, match="which is nothing that jitmx packs; save a state dict of a module that"):
        MXFP4Linear(96, 48).load_state_dict(state)


def test_a_state_dict_that_says_a_list_is_refused_in_words() -> None:
    said = {"format": ["mxfp4"], "encoding": "rotated", "scale_range": "normal"}
    with pytest.raises(InputError, match="which is nothing that jitmx packs"):
        MXFP4Linear(96, 48).load_state_dict({**MXFP4Linear(96, 48).state_dict(), "_extra_state": said})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["words", "scales"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_a_state_dict_that_was_cast_is_refused_and_leaves_the_weight(
    dtype: torch.dtype, name: str, assign: bool
) -> None:
    model = torch.nn.Sequential(MXFP4Linear(96, 48))
    before = {key: value.clone() for key, value in model[0].named_buffers()}
    state = model.state_dict()
    state[f"0.{name}"] = state[f"0.{name}"].to(dtype)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(
        InputError, match=rf"0\.{name} of the state dict is {kind} .*load a state dict that was not cast"
    ):
        model.load_state_dict(state, assign=assign)
    assert all(torch.equal(value, before[key]) for key, value in model[0].named_buffers())


@pytest.mark.parametrize("bias", [True, False])
def test_buffers_are_what_it_holds_and_no_parameter(bias: bool) -> None:
    module = MXFP4Linear(96, 48, bias=bias)
    assert not list(module.parameters())
    assert {name for name, _ in module.named_buffers()} == {"words", "scales"} | ({"bias"} if bias else set())
    assert set(module.state_dict()) == {name for name, _ in module.named_buffers()} | {"_extra_state"}


def test_a_fresh_module_holds_zeros_at_scale_one() -> None:
    module = MXFP4Linear(96, 40, bias=False)
    assert not module.words.any() and (module.scales.view(torch.uint8) == 127).all()
    assert module.weight.shape == (40, 96)


def test_it_prints_like_a_linear_module() -> None:
    assert repr(MXFP4Linear(96, 48)) == "MXFP4Linear(in_features=96, out_features=48, bias=True, format=mxfp4)"


def test_plans_stay_with_the_buffers_that_they_were_made_for() -> None:
    module = filled()
    weight = module.weight
    assert module.weight is weight
    module.to(torch.float16)
    assert module.bias is not None and module.bias.dtype is torch.float16 and module.words.dtype is torch.int32
    assert module.weight is not weight
    weight = module.weight
    module.words = module.words.clone()
    assert module.weight is not weight and module.weight.words is module.words


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_hold_their_own_weight(how: Any) -> None:
    module = filled()
    weight = module.weight
    again = how(module)
    assert again.weight is not weight and again.weight.words is again.words
    assert torch.equal(again.words, module.words) and again.words.data_ptr() != module.words.data_ptr()
    assert module.weight is weight


def test_a_tensor_without_data_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "arch", lambda _device: arch.parse("sm_121"))
    with FakeTensorMode():
        module = MXFP4Linear(96, 48, device="cuda")
        assert module.encoding == "nibble"
        x = torch.empty(2, 3, 96, dtype=torch.bfloat16, device="cuda")
        norm = torch.empty(96, dtype=torch.bfloat16, device="cuda")
        y = module(x, norm=norm, residual=torch.empty(2, 3, 48, dtype=torch.bfloat16, device="cuda"))
        assert (y.shape, y.dtype, y.device.type) == ((2, 3, 48), torch.bfloat16, "cuda")


def test_a_compiled_module_is_one_graph_with_one_operator() -> None:
    module, seen = filled(), []

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    with pytest.raises(InputError, match="jitmx runs on CUDA tensors"):
        torch.compile(module, fullgraph=True, backend=backend)(torch.zeros(3, 96, dtype=torch.bfloat16))
    assert seen == ["jitmx.linear"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MXFP4Linear(95, 48), "in_features=95 .*must be a multiple of 32"),
        (lambda: MXFP4Linear(0, 48), "in_features=0 "),
        (lambda: MXFP4Linear(96, 0), "out_features=0"),
        (lambda: MXFP4Linear(96.0, 48), "in_features=96.0 is not a whole number; pass in_features as an int"),
        (lambda: MXFP4Linear("96", 48), "in_features='96' is not a whole number"),
        (lambda: MXFP4Linear(96, None), "out_features=None is not a whole number"),
        (lambda: MXFP4Linear(1 << 40, 1 << 40), "in_features=1099511627776 .* both 2147483616 at most"),
        (lambda: MXFP4Linear(96, 1 << 40, device="meta"), "out_features=1099511627776: .* both 2147483616 at most"),
        (lambda: MXFP4Linear(96, 48, dtype=torch.float32), r"neither bfloat16 nor float16; .*\.bfloat16\(\)"),
        (lambda: MXFP4Linear(96, 48, format="mxfp6"), "format='mxfp6' is not one of mxfp4, mxfp8"),
        (lambda: MXFP4Linear.from_linear(torch.nn.ReLU()), "module is a ReLU without a weight"),
        (lambda: MXFP4Linear.from_linear(torch.nn.Linear(96, 48)), r"module\.weight is float32 .* on cpu"),
        (lambda: MXFP4Linear(96, 48)([1.0]), "x is a list, not a torch tensor"),
    ],
)
def test_what_it_cannot_be_made_of_is_refused_with_the_reason(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()
