"""Whatever one argument of a call is, the call runs, or ends with an error of jitmx's before anything is launched."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import jitmx
from jitmx.errors import InputError, JitmxError, KnobError
from jitmx.kernels.routing.problem import TILES
from jitmx.ops import checks
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from simulated_card import Simulated, on_cpu

I32, I64, F32 = torch.int32, torch.int64, torch.float32


class Unlaunched(Simulated):
    """Notes launches, whose arguments are packed as for a card, and runs none."""

    def launch(self, variant: Variant, launch: Launch, values: dict[str, Any]) -> None:
        variant.arguments.pack(values, launch.maps, lambda *_: bytes(128))
        self.launched.append(variant)


@pytest.fixture
def card() -> Iterator[Unlaunched]:
    with on_cpu("sm_90", Unlaunched) as found:
        assert isinstance(found, Unlaunched)
        yield found


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def codes(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *outer, k = shape
    return zeros(*outer, k // 2, dtype=torch.uint8), torch.full((*outer, k // 32), 127, dtype=torch.uint8)


def attended() -> dict[str, Any]:
    return {
        "k_new": zeros(3, 2, 64), "v_new": zeros(3, 2, 64), "k_cache": zeros(4, 16, 2, 64),
        "v_cache": zeros(4, 16, 2, 64), "block_table": zeros(2, 2, dtype=I32),
        "seq_lens": torch.tensor([20, 16], dtype=I32), "query_start_loc": torch.tensor([0, 1, 3], dtype=I32),
        "max_query_len": 2, "rope": zeros(64, 64), "rope_style": "neox", "positions": zeros(3, dtype=I64),
        "slot_mapping": zeros(3, dtype=I64), "k_scale": None, "v_scale": None, "knobs": None,
    }  # fmt: skip


def layer() -> dict[str, Any]:
    return {
        "x": zeros(2, 64), "w13": jitmx.pack_experts(codes(4, 64, 64)), "w2": jitmx.pack_experts(codes(4, 64, 32)),
        "b13": zeros(4, 64), "b2": zeros(4, 64), "alpha": 1.7, "limit": 7.0, "out": zeros(2, 64),
    }  # fmt: skip


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "attention": (
        jitmx.attention,
        lambda: attended() | {
            "q": zeros(3, 8, 64), "max_seq_len": 32, "scale": 0.125, "sinks": zeros(8), "window": 16, "soft_cap": 30.0,
            "mask": zeros(3, 1, dtype=I32), "fp16_qk": False, "early": False, "out": zeros(3, 8, 64),
        },
    ),
    "append_kv": (jitmx.append_kv, attended),
    "linear": (
        jitmx.linear,
        lambda: {
            "x": zeros(2, 96), "weight": jitmx.pack_weight(codes(48, 96)), "bias": zeros(48), "out": zeros(2, 48),
            "residual": zeros(2, 48), "norm": zeros(96), "epsilon": 1e-5, "activation": None, "prefetch": None,
        },
    ),
    "linear_argmax": (
        jitmx.linear_argmax,
        lambda: {
            "x": zeros(2, 96), "weight": jitmx.pack_weight(codes(48, 96)), "bias": zeros(48), "norm": zeros(96),
            "epsilon": 1e-5, "out": zeros(2, dtype=I64),
        },
    ),
    "moe": (
        jitmx.moe,
        lambda: layer() | {
            "routing": zeros(2, 4), "top": 2, "scoring": "softmax_topk", "activation": "swiglu_oai", "x_format": "bf16",
            "scale_rule": "floor", "weight_on": "output", "reduction": "ordered", "count": zeros(1, dtype=I32),
            "residual": zeros(2, 64),
        },
    ),
    "moe of ids": (
        jitmx.moe,
        lambda: layer() | {"routing": (zeros(2, 2, dtype=I32), zeros(2, 2, dtype=F32)), "top": None,
                           "expert_map": zeros(4, dtype=I32)},
    ),
    "topk": (jitmx.topk, lambda: {"x": zeros(2, 64), "k": 4}),
    "greedy_sample": (jitmx.greedy_sample, lambda: {"logits": zeros(2, 64), "out": zeros(2, dtype=I64)}),
    "rms_norm": (
        jitmx.rms_norm,
        lambda: {"x": zeros(2, 64), "weight": zeros(64), "epsilon": 1e-5, "out": zeros(2, 64)},
    ),
    "route": (
        jitmx.route,
        lambda: {
            "x": zeros(2, 64), "weight": zeros(8, 64), "bias": zeros(8), "k": 2, "scoring": "softmax_topk",
            "norm": zeros(64), "epsilon": 1e-5, "normalized": True, "tile": 16, "expert_map": zeros(8, dtype=I32),
            "local_experts": 4, "out": None, "knobs": None,
        },
    ),
    "group_by_expert": (
        jitmx.group_by_expert,
        lambda: {
            "ids": zeros(2, 2, dtype=I32), "experts": 8, "tile": 16, "expert_map": zeros(8, dtype=I32),
            "local_experts": 4, "out": None, "knobs": None,
        },
    ),
    "quantize": (jitmx.quantize, lambda: {"x": zeros(2, 64), "format": "mxfp4", "scale_rule": "floor"}),
    "dequantize": (
        jitmx.dequantize,
        lambda: {"tensor": jitmx.MXTensor(*codes(2, 64), "mxfp4"), "dtype": torch.bfloat16},
    ),
    "pack_weight": (jitmx.pack_weight, lambda: {"weight": codes(48, 96), "encoding": None}),
    "pack_experts": (jitmx.pack_experts, lambda: {"weight": codes(4, 64, 64)}),
    "tree_plan": (
        jitmx.tree_plan,
        lambda: {"parents": zeros(2, 5, dtype=I32), "starts": zeros(2, dtype=I64), "levels": 3},
    ),
    "tree_plan of one tree": (
        jitmx.tree_plan,
        lambda: {"parents": zeros(5, dtype=I32), "starts": zeros(2, dtype=I64), "levels": 3},
    ),
    "tree_build": (
        jitmx.tree_build,
        lambda: {
            "scores": zeros(2, 6, dtype=F32), "tokens": zeros(2, 6, dtype=I64), "parents": zeros(2, 6, dtype=I32),
            "roots": zeros(2, dtype=I64), "nodes": 4, "starts": zeros(2, dtype=I64), "levels": 3,
        },
    ),
    "pack_mask": (
        jitmx.pack_mask,
        lambda: {
            "mask": zeros(50, dtype=torch.bool), "query_start_loc": torch.tensor([0, 5, 10], dtype=I32), "tokens": 10,
            "max_query_len": 5,
        },
    ),
    "tree_verify": (
        jitmx.tree_verify,
        lambda: {
            "tokens": zeros(2, 5, dtype=I64), "target": zeros(2, 5, dtype=I64), "parents": zeros(2, 5, dtype=I32),
            "starts": zeros(2, dtype=I64), "levels": 3, "probs": zeros(2, 5, 9, dtype=F32),
            "entropy": zeros(2, 5, dtype=F32), "threshold": 0.3, "alpha": 0.3,
        },
    ),
    "accept_greedy": (
        jitmx.accept_greedy,
        lambda: {"drafts": zeros(2, 3, dtype=I64), "target": zeros(2, 4, dtype=I64), "positions": zeros(2, dtype=I64)},
    ),
    "accept_greedy of rows": (
        jitmx.accept_greedy,
        lambda: {
            "drafts": zeros(8, dtype=I64), "target": zeros(8, dtype=I64), "cu_num_rows": zeros(3, dtype=I32),
            "max_drafts": 3,
        },
    ),
    "move_kv": (
        jitmx.move_kv,
        lambda: {
            "caches": [zeros(4, 16, 2, 64), zeros(4, 16, 2, 64)], "path": zeros(2, 3, dtype=I32),
            "accepted": zeros(2, dtype=I32), "starts": zeros(2, dtype=I64), "block_table": zeros(2, 2, dtype=I32),
        },
    ),
}  # fmt: skip


def others(value: Any) -> Iterator[Any]:
    """What might be passed in the place of an argument."""
    yield from (None, "x", b"x", 3.5, -1, 0, 1, True, math.nan, math.inf, 10**30, [], {}, (), [1, 2], {1: 2}, object())
    yield from (torch.zeros(()), torch.zeros(3), torch.zeros(3, dtype=torch.complex64), torch.empty(0))
    if isinstance(value, torch.Tensor):
        yield from (value.double(), value.to(torch.int8), value[None], value[:0], value.flatten(), value[..., :-1])
        yield torch.cat([value, value])
        yield value.repeat(*[1] * (value.dim() - 1), 2)[..., ::2]
        yield torch.cat([value.new_zeros(1), value.flatten()])[1:].view(value.shape)  # off 16 bytes
        if value.is_floating_point():
            yield value.clone().requires_grad_()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_any_kind_is_taken_or_refused_before_a_launch(name: str, warm: bool, card: Unlaunched) -> None:
    call, given = CALLS[name]
    right = given()
    if warm:
        call(**right)
    for argument, value in right.items():
        for other in others(value):
            card.launched.clear()
            try:
                call(**{**right, argument: other})
            except JitmxError as error:
                assert str(error).strip() and not card.launched, (argument, other)
            except Exception as error:
                raise AssertionError(f"{name}, {argument}={other!r}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", ["out", "sinks", "rope", "slot_mapping", "mask", "positions"])
def test_an_empty_tensor_is_not_taken_for_one_that_is_left_out(name: str, card: Unlaunched) -> None:
    right = attended() | {"q": zeros(3, 8, 64), "rope": None, "positions": None, "slot_mapping": None}
    jitmx.attention(**right)
    card.launched.clear()
    with pytest.raises(InputError, match=f"{name} is float32 "):
        jitmx.attention(**right | {name: torch.empty(0)})
    assert not card.launched


def test_a_sparse_tensor_is_refused_with_the_remedy(card: Unlaunched) -> None:
    with pytest.raises(InputError, match=r"x is bfloat16 \[5, 64\] on cpu, torch.sparse_coo; pass x.to_dense\(\)"):
        jitmx.topk(zeros(5, 64).to_sparse(), 3)


def test_a_sparse_tensor_behind_a_dense_one_of_its_shape_is_refused_too(card: Unlaunched) -> None:
    weight = jitmx.pack_weight(codes(48, 96))
    jitmx.linear(zeros(2, 96), weight)
    with pytest.raises(InputError, match=r"torch.sparse_coo; pass x.to_dense\(\)"):
        jitmx.linear(zeros(2, 96).to_sparse(), weight)


SWIGLU = jitmx.linear_swiglu, lambda: {
    "x": zeros(2, 96), "weight": jitmx.pack_weight(codes(64, 96)), "out": zeros(2, 32),
}  # fmt: skip
GREEDY = jitmx.greedy_sample, lambda: {"logits": zeros(5, 64), "out": zeros(5, dtype=I64)}
WRITERS: dict[str, Any] = CALLS | {"linear_swiglu": SWIGLU, "greedy_sample": GREEDY}


@pytest.mark.parametrize("name", ["linear", "linear_swiglu", "rms_norm"])
def test_an_out_that_requires_a_gradient_is_refused(name: str, card: Unlaunched) -> None:
    call, given = WRITERS[name]
    right = given()
    card.launched.clear()
    with pytest.raises(InputError, match=r"out requires a gradient"):
        call(**right | {"out": right["out"].requires_grad_()})
    assert not card.launched


BEFORE_OUT = [
    ("linear", "x", (2, 96), (2, 48)), ("linear", "residual", (2, 48), (2, 48)),
    ("linear_swiglu", "x", (2, 96), (2, 32)), ("linear_argmax", "x", (2, 96), (2,)),
    ("moe", "x", (2, 64), (2, 64)), ("moe", "residual", (2, 64), (2, 64)),
    ("rms_norm", "x", (2, 64), (2, 64)), ("greedy_sample", "logits", (5, 64), (5,)),
    ("attention", "q", (3, 8, 64), (3, 8, 64)), ("attention", "k_new", (3, 2, 64), (3, 8, 64)),
    ("attention", "v_new", (3, 2, 64), (3, 8, 64)),
]  # fmt: skip


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("name", "read", "shape", "written"), BEFORE_OUT)
def test_an_out_that_shares_a_value_with_what_is_read_is_refused_and_one_behind_it_is_taken(
    name: str, read: str, shape: tuple[int, ...], written: tuple[int, ...], warm: bool, card: Unlaunched
) -> None:
    call, given = WRITERS[name]
    right = given()
    memory = zeros(8192)
    size = math.prod(shape)
    right[read] = memory[:size].view(shape)
    if warm:
        call(**right)
    wide = right["out"].dtype.itemsize // 2
    for first in (-(math.prod(written) * wide - 8), 0, size - 8):  # in the tensor, and from its last 16 bytes on
        right[read] = memory[4096 : 4096 + size].view(shape)
        start = 4096 + first
        out = memory[start : start + math.prod(written) * wide].view(right["out"].dtype).view(written)
        card.launched.clear()
        if name == "rms_norm" and first == 0:
            assert call(**right | {"out": out}) is out
            continue
        with pytest.raises(InputError, match=f"out overlaps {read}, which is read while out is written; pass another"):
            call(**right | {"out": out})
        assert not card.launched
    for start in (4096 + size, 4096 - math.prod(written) * wide):
        out = memory[start : start + math.prod(written) * wide].view(right["out"].dtype).view(written)
        assert call(**right | {"out": out}) is out


def test_a_router_does_not_write_the_rows_that_it_reads(card: Unlaunched) -> None:
    call, given = WRITERS["route"]
    right = given()
    out = call(**right)
    assert call(**right | {"out": out}) is out
    card.launched.clear()
    with pytest.raises(InputError, match="out overlaps x, which is read while out is written; pass another Routing"):
        call(**right | {"out": out, "x": out.normalized})
    assert not card.launched


def test_attention_writes_beside_what_it_reads_in_the_rows_of_one_matrix(card: Unlaunched) -> None:
    rows = zeros(3, 8 * 64 + 2 * 2 * 64 + 8 * 64)
    q, k, v, out = (part.unflatten(1, (-1, 64)) for part in rows.split([512, 128, 128, 512], 1))
    given = attended() | {"q": q, "k_new": k, "v_new": v}
    for place in (out, rows[:, :512].clone().unflatten(1, (8, 64)), out):
        assert jitmx.attention(**given | {"out": place}) is place
    with pytest.raises(InputError, match="out overlaps v_new"):
        jitmx.attention(**given | {"out": rows[:, 640:1152].unflatten(1, (8, 64))})


@pytest.mark.parametrize("name", ["linear_argmax", "linear_swiglu", "greedy_sample"])
def test_an_out_that_an_operator_does_not_write_is_refused_of_parameters_too(name: str, card: Unlaunched) -> None:
    call, given = WRITERS[name]
    right = given()
    first = next(iter(right))
    right[first] = torch.nn.Parameter(right[first], requires_grad=False)
    call(**right)
    for out in (right["out"].to(torch.int16), right["out"].expand(2, *right["out"].shape)):
        with pytest.raises(InputError, match=r"out is .*it must be "):
            call(**right | {"out": out})
    if right["out"].is_floating_point():
        with pytest.raises(InputError, match=r"out requires a gradient"):
            call(**right | {"out": right["out"].requires_grad_()})


@pytest.mark.parametrize("epsilon", [None, "1e-5", -1, -1e-5])
@pytest.mark.parametrize("left_out", [("norm",), ("norm", "residual")])
def test_a_product_without_a_norm_takes_the_epsilons_that_a_norm_takes(
    left_out: tuple[str, ...], epsilon: Any, card: Unlaunched
) -> None:
    call, given = CALLS["linear"]
    with pytest.raises(InputError, match=r"epsilon=.* is not a finite number of 0 or more"):
        call(**given() | dict.fromkeys(left_out) | {"out": None, "epsilon": epsilon})


WHOLE = [
    ("topk", "k"), ("route", "k"), ("route", "tile"), ("route", "local_experts"), ("group_by_expert", "experts"),
    ("group_by_expert", "tile"), ("group_by_expert", "local_experts"), ("moe", "top"),
]  # fmt: skip


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", [float, np.int64, np.float32])
@pytest.mark.parametrize(("name", "argument"), WHOLE)
def test_a_number_that_is_equal_to_a_whole_one_is_refused_whatever_was_planned(
    name: str, argument: str, kind: Any, warm: bool, card: Unlaunched
) -> None:
    call, given = CALLS[name]
    right = given()
    if warm:
        call(**right)
    card.launched.clear()
    number = kind(right[argument])
    with pytest.raises(JitmxError, match=re.escape(f"{argument}={number!r} ")):
        call(**right | {argument: number})
    assert not card.launched


@pytest.mark.parametrize("tile", [7, 0, 256, "8", True])
@pytest.mark.parametrize("name", ["route", "group_by_expert"])
def test_another_tile_is_refused_with_those_that_there_are(name: str, tile: Any, card: Unlaunched) -> None:
    call, given = CALLS[name]
    said = re.escape(f"tile={tile!r} is not one of 8, 16, 32, 48, 64, 128, 192, 320") + "$"
    with pytest.raises(KnobError, match=said):
        call(**given() | {"tile": tile})


def test_the_tiles_that_there_are_stand_in_the_docstring() -> None:
    *some, last = map(str, TILES[1:])
    assert f"{', '.join(some)} or {last}." in jitmx.route.__doc__


@pytest.mark.parametrize("name", ["route", "group_by_expert"])
def test_a_number_of_local_experts_is_shown_as_it_was_passed(name: str, card: Unlaunched) -> None:
    call, given = CALLS[name]
    for wrong in ("4", 0, 9):
        said = f"local_experts={wrong!r} is not a whole number from 1 to the 8 experts there are"
        with pytest.raises(InputError, match=said):
            call(**given() | {"local_experts": wrong})


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("number", [8, 4])
def test_local_experts_without_lists_are_refused(number: int, traced: bool, card: Unlaunched) -> None:
    call, given = CALLS["route"]
    right = given() | {"tile": None, "expert_map": None, "local_experts": number}
    if traced:
        right["x"] = torch.nn.Parameter(right["x"], requires_grad=False)
    said = "local_experts is for the lists, and tile is None; give tile, or leave local_experts out"
    with pytest.raises(InputError, match=said):
        call(**right)


def test_one_is_not_taken_for_true(card: Unlaunched) -> None:
    for call, given in (CALLS["topk"], CALLS["route"]):
        call(**given() | {"k": 1})
        with pytest.raises(InputError, match="k=True is not a whole number; pass k as an int"):
            call(**given() | {"k": True})


FLOATS = [
    *[(name, "epsilon") for name in ("linear", "linear_argmax", "linear_swiglu", "rms_norm", "route")],
    ("moe", "alpha"), ("moe", "limit"), ("attention", "scale"), ("attention", "soft_cap"),
    ("tree_verify", "threshold"), ("tree_verify", "alpha"),
]  # fmt: skip


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(
    "number", [1e39, -1e39, 1e300, 10**400, 10**5000], ids=["1e39", "-1e39", "1e300", "400", "5000"]
)
@pytest.mark.parametrize(("name", "argument"), FLOATS)
def test_a_number_that_float32_does_not_hold_is_refused(
    name: str, argument: str, number: Any, warm: bool, card: Unlaunched
) -> None:
    call, given = WRITERS[name]
    right = given()
    if warm:
        call(**right)
    card.launched.clear()
    with pytest.raises(InputError, match=rf"{argument}=\S.* is not a (finite )?number .*in float32"):
        call(**right | {argument: number})
    assert not card.launched


@pytest.mark.parametrize(("name", "argument"), FLOATS)
def test_the_largest_number_of_float32_is_taken(name: str, argument: str, card: Unlaunched) -> None:
    call, given = WRITERS[name]
    right = given()
    call(**right | {argument: checks.LARGEST})
    assert card.launched


@pytest.mark.parametrize(
    ("name", "argument"), [("attention", "scale"), ("attention", "soft_cap"), ("tree_verify", "threshold")]
)
def test_a_number_that_float32_rounds_to_0_is_not_above_0(name: str, argument: str, card: Unlaunched) -> None:
    call, given = CALLS[name]
    with pytest.raises(InputError, match=rf"{argument}=1e-46 is not a finite number (over|above) 0 in float32"):
        call(**given() | {argument: 1e-46})


def test_a_number_of_acceptance_is_checked_where_it_is_not_used_too(card: Unlaunched) -> None:
    call, given = CALLS["tree_verify"]
    for alpha in (1e39, "0.3", [0.3]):
        with pytest.raises(InputError, match=r"alpha=.* is not a finite number above 0 in float32"):
            call(**given() | {"probs": None, "entropy": None, "threshold": None, "alpha": alpha})


def test_tensors_of_the_host_are_refused_whatever_they_are_rounded_to() -> None:
    with on_cpu("sm_90", Unlaunched):
        weight, experts = jitmx.pack_weight(codes(48, 96)), layer()
    x = torch.nn.Parameter(zeros(2, 96), requires_grad=False)
    with pytest.raises(InputError, match=r"x is .* on cpu; jitmx runs on CUDA tensors"):
        jitmx.linear(x, weight, activation="fp8")
    given = {name: experts[name] for name in ("w13", "w2", "b13", "b2")}
    routing = torch.zeros(2, 2, dtype=I32), torch.zeros(2, 2)
    x = torch.nn.Parameter(zeros(2, 64), requires_grad=False)
    with pytest.raises(InputError, match=r"on cpu; jitmx runs on CUDA tensors"):
        jitmx.moe(x, routing, x_format="fp8", **given)


def test_attention_of_no_requests_has_the_shape_of_q(card: Unlaunched) -> None:
    none = {"block_table": zeros(0, 2, dtype=I32), "seq_lens": zeros(0, dtype=I32)}
    given = attended() | none | {"q": zeros(3, 8, 64), "query_start_loc": zeros(1, dtype=I32)}
    assert jitmx.attention(**given).shape == (3, 8, 64)
    del given["knobs"]
    assert jitmx.attention(**given | {"q": torch.nn.Parameter(given["q"], requires_grad=False)}).shape == (3, 8, 64)
    assert not card.launched


def test_a_table_without_positions_is_refused(card: Unlaunched) -> None:
    with pytest.raises(InputError, match=r"rope is bfloat16 \[0, 64\] .*pass a longer table"):
        jitmx.append_kv(**attended() | {"rope": zeros(0, 64)})


@pytest.mark.parametrize("epsilon", [-1.0, math.nan, "1e-5", None])
def test_a_router_takes_the_epsilons_that_a_norm_takes(epsilon: Any, card: Unlaunched) -> None:
    call, given = CALLS["route"]
    with pytest.raises(InputError, match=r"epsilon=.* is not a finite number of 0 or more"):
        call(**given() | {"epsilon": epsilon})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"alpha": math.nan}, "alpha=nan of swiglu_oai is not a finite number"),
        ({"alpha": "1.7"}, "alpha='1.7' of swiglu_oai is not a finite number"),
        (
            {"limit": -7.0},
            "limit=-7.0 of swiglu_oai is not a number of 0 or more in float32; pass inf where there is none",
        ),
        ({"limit": None}, "limit=None of swiglu_oai"),
    ],
)
def test_numbers_of_swiglu_that_are_none_are_refused(change: dict[str, Any], said: str, card: Unlaunched) -> None:
    call, given = CALLS["moe"]
    with pytest.raises(InputError, match=said):
        call(**given() | change)


def test_logits_off_16_bytes_are_refused_with_the_remedy(card: Unlaunched) -> None:
    call, given = CALLS["moe"]
    astray = torch.zeros(5, dtype=F32)[1:].view(1, 4)
    one = {"x": zeros(1, 64), "out": zeros(1, 64), "residual": None, "count": None, "routing": astray}
    with pytest.raises(InputError, match=r"router logits starts at an address .*pass router logits.clone\(\)"):
        call(**given() | one)
