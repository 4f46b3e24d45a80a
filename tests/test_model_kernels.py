"""A layer's kernels, asked for some thousand times: what is remembered on the way changes no answer."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from jitmx import arch as arches
from jitmx.dispatch import choose, tactics
from jitmx.kernels import Problem
from jitmx.kernels.moe import tiles
from jitmx.model_kernels import Linear, Packer, Quantizer, of_model, variants
from jitmx.models import GPT_OSS_120B, NAMED
from jitmx.registry import spec
from jitmx.vllm import policy


def fits(row: tactics.Row, problem: Problem) -> bool:
    """As a table's format says it."""
    values = problem.as_dict()
    return all(
        wanted[0] <= values[name] <= wanted[1] if isinstance(wanted, list) else values[name] == wanted
        for name, wanted in row.when.items()
    )


def forget() -> None:
    variants.cache_clear()
    choose._guess.cache_clear()


def kernels_of(name: str, target: str, tokens: int, **asked: Any) -> list[tuple[str, ...]]:
    """The kernels of every layer of a model, in the order in which they are found."""
    arch = arches.parse(target)
    request = policy.request({"mxfp4_layers": "all", **asked.pop("options", {})})
    served = request.served(asked.get("lora", False))
    layers = of_model(NAMED[name], arch, served, tokens=tokens, x_format=request.x_format, **asked)
    forget()
    return [tuple(variant.name for variant in variants(layer)) for layer in layers]


@pytest.mark.parametrize(
    ("name", "target", "tokens", "asked"),
    [
        ("gpt-oss-120b", "sm_90", 8192, {}),
        ("gpt-oss-120b", "sm_90", 300, {"ranks": 2}),
        ("gpt-oss-120b", "sm_90", 96, {"lora": True}),
        ("gpt-oss-20b", "sm_90", 1, {}),
        ("gpt-oss-20b", "sm_121", 70, {}),
        ("gpt-oss-120b", "sm_121", 40, {"options": {"moe_activation": "mxfp8"}}),
        ("gpt-oss-120b", "sm_80", 20, {}),
        # Half a minute each.
        pytest.param("gpt-oss-20b", "sm_121", 700, {}, marks=pytest.mark.nightly),
        pytest.param("gpt-oss-120b", "sm_80", 200, {}, marks=pytest.mark.nightly),
    ],
)
def test_what_is_remembered_changes_no_kernel(
    name: str, target: str, tokens: int, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kernels_of(name, target, tokens, **asked)
    monkeypatch.setattr(tactics.Row, "fits", fits)
    for module, function in ((spec, "_variant"), (tiles, "_first_product"), (tiles, "_has_product")):
        # `choose._guess` stays: it was remembered before, and is cleared.
        monkeypatch.setattr(module, function, getattr(module, function).__wrapped__)
    assert kernels_of(name, target, tokens, **asked) == found
    forget()


def test_a_layer_makes_each_of_its_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    check = spec.Variant.__post_init__

    @functools.wraps(check)
    def count(variant: spec.Variant) -> None:
        made.append(variant.name)
        check(variant)

    monkeypatch.setattr(spec.Variant, "__post_init__", count)
    spec._variant.cache_clear()
    kernels_of("gpt-oss-120b", "sm_90", 512)
    assert made and len(made) == len(set(made))


def test_a_choice_without_experts_or_for_stock_kernels_asks_for_none() -> None:
    target = arches.parse("sm_90")
    for options in ({"mxfp4_layers": "qkv,o,lm_head"}, {"mxfp4_layers": "all", "moe_kernel": "marlin"}):
        found = of_model(GPT_OSS_120B, target, policy.request(options).served(), tokens=64)
        assert [type(item) for item in found] == [Quantizer, Packer] + [Linear] * 3
    assert of_model(GPT_OSS_120B, target, {}, tokens=64) == []
    assert len(of_model(GPT_OSS_120B, target, policy.request({"mxfp4_layers": "all"}).served(), tokens=64)) == 6
