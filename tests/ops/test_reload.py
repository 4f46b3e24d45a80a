"""Settings that change: what was planned under those of before is forgotten, by warm calls of every operator."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import jitmx
from jitmx import arch, settings
from jitmx.dispatch.choose import choose
from jitmx.errors import SettingError
from jitmx.kernels.pack import PackProblem
from jitmx.kernels.quantize import QuantizeProblem
from jitmx.kernels.routing.problem import RoutingProblem
from jitmx.ops import pack
from jitmx.ops.linear import operand
from jitmx.registry.spec import Variant
from simulated_card import Simulated, on_cpu

N, K = 16, 64
BF16 = torch.bfloat16
TARGET = arch.parse("sm_90a")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    """A card that notes launches and makes none."""
    settings.reload()
    with on_cpu(TARGET.name) as found:

        def note(self: Simulated, variant: Variant, *_rest: Any) -> None:
            self.launched.append(variant)

        monkeypatch.setattr(Simulated, "launch", note)
        monkeypatch.setattr(pack, "_by_kernel", lambda _codes: True)
        yield found
    monkeypatch.undo()
    settings.reload()


def weight() -> jitmx.PackedWeight:
    return jitmx.PackedWeight(*scaled(1, 1), N, K, "rotated", "normal")


def scaled(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and scales of tiles."""
    return torch.zeros(*shape, 32, 4, dtype=torch.int32), torch.full((*shape, 8), 0x7F7F7F7F, dtype=torch.int32)


def a_product() -> Callable[[], object]:
    x, packed = torch.zeros(1, K, dtype=BF16), weight()
    return lambda: jitmx.linear(x, packed)


def an_operator() -> Callable[[], object]:
    x, packed = torch.zeros(1, K, dtype=BF16), weight()
    named = packed.words, packed.scales, N, K, operand.layout(packed), None, None, None, 1e-5, None
    return lambda: torch.ops.jitmx.linear(x, *named)


def a_comparison() -> Callable[[], object]:
    x, packed = torch.zeros(1, K, dtype=BF16), weight()
    return lambda: jitmx.linear_argmax(x, packed)


def a_layer() -> Callable[[], object]:
    x, chosen = torch.zeros(3, K, dtype=BF16), (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2))
    w13, w2 = (jitmx.PackedExperts(*scaled(4, n // 16, 1), n, K, "rotated", "normal") for n in (2 * K, K))
    return lambda: jitmx.moe(x, chosen, w13, w2)


def a_routing() -> Callable[[], object]:
    logits = torch.zeros(3, 128, dtype=BF16)
    return lambda: jitmx.route(logits, k=4)


def a_packing() -> Callable[[], object]:
    codes, scales = torch.zeros(N, K // 2, dtype=torch.uint8), torch.full((N, K // 32), 127, dtype=torch.uint8)
    return lambda: jitmx.pack_weight((codes, scales))


def a_quantization() -> Callable[[], object]:
    x = torch.zeros(1, K, dtype=BF16)
    return lambda: jitmx.quantize(x)


@pytest.mark.parametrize(
    ("make", "variable", "text", "kernel"),
    [
        (a_product, "JITMX_LINEAR_KNOBS", "kernel=tile", "tile"),
        (an_operator, "JITMX_LINEAR_KNOBS", "kernel=gemv", "gemv"),
        (a_layer, "JITMX_MOE_KNOBS", "kernel=decode", "decode"),
        (a_layer, "JITMX_MOE_TILE", "16x64", "grouped"),
    ],
)
def test_a_warm_call_takes_the_kernel_that_a_variable_names_once_settings_are_reloaded(
    make: Any, variable: str, text: str, kernel: str, card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    run()
    first = list(card.launched)
    monkeypatch.setenv(variable, text)
    run()
    assert card.launched[len(first) :] == first  # read once, until told
    settings.reload()
    card.launched.clear()
    run()
    assert kernel in {variant.spec.name for variant in card.launched} and card.launched != first
    monkeypatch.delenv(variable)
    settings.reload()
    card.launched.clear()
    run()
    assert card.launched == first


TABLES: list[tuple[Any, str, Any, dict[str, Any]]] = [
    (a_comparison, "linear", None, {"kernel": "stream", "knobs": {"warps": 6, "share": False, "pdl": False}}),
    (a_routing, "routing", RoutingProblem(3, 128, 4, 8, "logits"), {"kernel": "topk", "knobs": {"warps": 4}}),
    (a_packing, "pack", PackProblem(), {"kernel": "pack", "knobs": {"block": 512}}),
    (a_quantization, "quantize", QuantizeProblem(), {"kernel": "quantize", "knobs": {"vectors": 2}}),
]


@pytest.mark.parametrize(("make", "family", "problem", "row"), TABLES)
def test_a_warm_call_takes_the_knobs_of_a_table_that_a_variable_names_once_settings_are_reloaded(
    make: Any, family: str, problem: Any, row: dict[str, Any], card: Simulated, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    table = {"schema_version": 1, "family": family, "arch": TARGET.name, "origin": {"kind": "heuristic"}}
    path = tmp_path / TARGET.name / f"{family}.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**table, "rows": [{"when": {}, **row}]}))
    run = make()
    run()
    (first,) = card.launched
    monkeypatch.setenv("JITMX_TACTICS", str(tmp_path))
    settings.reload()
    run()
    *_, second = card.launched
    knobs = second.knobs.as_dict()
    assert second != first and {name: knobs[name] for name in row["knobs"]} == row["knobs"]
    assert problem is None or second == choose(family, problem, TARGET, multiprocessors=4).variant


def test_what_a_program_chooses_counts_for_warm_calls_until_it_is_released(card: Simulated) -> None:
    run = a_product()
    run()
    settings.choose("linear_knobs", (("kernel", "tile"),), "the program")
    run()
    settings.release("linear_knobs")
    run()
    first, second, third = card.kernels
    assert second == "linear.tile" != first == third


def test_plans_are_forgotten_even_where_the_new_settings_are_refused(card: Simulated, monkeypatch: Any) -> None:
    run = a_product()
    run()
    with monkeypatch.context() as patch:
        patch.setenv("JITMX_MODE", "sometimes")
        with pytest.raises(SettingError, match="JITMX_MODE"):
            settings.reload()
        with pytest.raises(SettingError, match="JITMX_MODE"):
            run()
    run()
    assert len(card.launched) == 2


def test_a_weight_is_not_kept_alive_for_what_was_planned_for_it() -> None:
    packed = weight()
    jitmx.linear(torch.zeros(1, K, dtype=BF16), packed)
    assert packed.plans
    gone = weakref.ref(packed)
    del packed
    gc.collect()
    assert gone() is None
