"""A layer's kernels, asked for some thousand times: what is remembered on the way changes no answer."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import arch as arches
from jitmx import settings
from jitmx.dispatch import choose, tactics
from jitmx.kernels import Problem
from jitmx.kernels.moe import MoeProblem, tiles
from jitmx.kernels.moe.problem import X_FORMATS
from jitmx.models import GPT_OSS_120B, NAMED
from jitmx.registry import spec
from jitmx.serving.experts import Experts, routed_rows
from jitmx.serving.linear import Linear, Packer, Quantizer
from jitmx.serving.model import of_model
from jitmx.serving.needed import Needed, variants
from jitmx.serving.rounded_inputs import FP8_ROWS_AN_EXPERT, x_format_of
from jitmx.vllm.request import requested


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
    request = requested({"mxfp4_layers": "all", **asked.pop("options", {})})
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
        ("gpt-oss-20b", "sm_90", 80, {"options": {"moe_activation": "fp8"}}),
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
    for module, function in ((spec, "_variant"), (tiles, "_first_product"), (tiles, "_fields_of")):
        # `choose._guess` stays: it was remembered before, and is cleared.
        monkeypatch.setattr(module, function, getattr(module, function).__wrapped__)
    assert kernels_of(name, target, tokens, **asked) == found
    forget()


def of_each_number(needed: Needed, arch: arches.Arch) -> set[str]:
    """Kernels of calls of each number of tokens that is told from the next."""
    found = (needed.launches(m, arch, arch.multiprocessors) for m in needed.numbers())
    return {variant.name for launched in found for variant in launched}


@pytest.mark.parametrize(
    ("name", "target", "asked"),
    [
        ("gpt-oss-120b", "sm_90", {}),
        ("gpt-oss-20b", "sm_121", {"options": {"moe_activation": "mxfp8"}}),
        *(
            pytest.param(name, target, asked, marks=pytest.mark.nightly)
            for name in ("gpt-oss-120b", "gpt-oss-20b")
            for target in ("sm_80", "sm_90", "sm_120", "sm_121")
            for asked in ({}, {"ranks": 2}, {"lora": True}, {"options": {"moe_activation": "fp8"}})
        ),
    ],
)
def test_numbers_between_two_of_the_same_kernels_have_no_others(name: str, target: str, asked: dict[str, Any]) -> None:
    arch, options = arches.parse(target), {**asked}
    request = requested({"mxfp4_layers": "all", **options.pop("options", {})})
    served = request.served(options.get("lora", False))
    for needed in of_model(NAMED[name], arch, served, tokens=16384, x_format=request.x_format, **options):
        asked_for = {variant.name for variant in needed.every(arch, arch.multiprocessors)}
        assert asked_for == of_each_number(needed, arch), needed


@pytest.mark.parametrize("rest", [1, 5, 23, 116])
def test_what_is_left_of_the_largest_launch_is_among_what_is_asked_for(rest: int) -> None:
    needed = Linear("sm_90a", None, 16384, 2880, 4096, "bf16", True, "mxfp4", "rotated", "normal", residual="pair")
    arch = arches.parse("sm_90a")
    launched = [variant.name for variant in needed.launches(8192 + rest, arch, 132)]
    assert len(launched) == 2 and {*launched} <= {variant.name for variant in needed.every(arch, 132)}


def test_a_range_of_a_table_between_numbers_that_are_asked_for_is_found(tmp_path: Path) -> None:
    row = {"when": {"m": [43, 43], "n": 5120, "k": 2880}, "kernel": "tile", "knobs": {"stages": 3, "tile_m": 48}}
    folder = tmp_path / "sm_121a"
    folder.mkdir()
    table = {
        "schema_version": tactics.SCHEMA_VERSION,
        "family": "linear",
        "arch": "sm_121a",
        "origin": {"kind": "heuristic"},
        "rows": [row],
    }
    (folder / "linear.json").write_text(json.dumps(table))
    needed = Linear("sm_121a", None, 64, 5120, 2880, "bf16", True, "mxfp4", "nibble", "normal")
    arch = arches.parse("sm_121a")
    forget()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JITMX_TACTICS", str(tmp_path))
        settings.reload()
        found = {variant.name for variant in needed.every(arch, arch.multiprocessors)}
        assert found == of_each_number(needed, arch)
    settings.reload()
    forget()
    assert found - {variant.name for variant in needed.every(arch, arch.multiprocessors)}


@given(
    rows=st.tuples(st.integers(0, 1 << 16), st.integers(0, 1 << 16)).map(sorted),
    experts=st.integers(1, 512),
    top=st.integers(1, 8),
    target=st.sampled_from(["sm_80", "sm_89", "sm_90", "sm_120", "sm_121"]),
    x_format=st.sampled_from(X_FORMATS),
)
def test_inputs_of_experts_are_rounded_from_some_rows_on(
    rows: list[int], experts: int, top: int, target: str, x_format: str
) -> None:
    arch = arches.parse(target)
    few, many = (x_format_of(m, experts, top, x_format, arch) for m in rows)
    if x_format != "fp8":
        assert few == many == x_format
        return
    assert {few, many} <= {"bf16", "fp8"} and (few, many) != ("fp8", "bf16")
    least = FP8_ROWS_AN_EXPERT["wgmma" in arch.features]
    for m, found in zip(rows, (few, many), strict=True):
        assert (found == "fp8") == (m > 0 and MoeProblem(m, experts, top).rows_an_expert >= least)


@pytest.mark.parametrize(
    ("target", "name", "fewest"),
    [("sm_90", "gpt-oss-120b", 512), ("sm_90", "gpt-oss-20b", 128), ("sm_121", "gpt-oss-120b", 2048)],
)
def test_steps_of_few_rows_are_those_of_experts_in_bf16_with_weights_packed_alike(
    target: str, name: str, fewest: int
) -> None:
    arch, model = arches.parse(target), NAMED[name]
    rounded, plain = (
        next(item for item in of_model(model, arch, {"moe": "mxfp4"}, tokens=8192, x_format=x_format)
             if isinstance(item, Experts))
        for x_format in ("fp8", "bf16")
    )  # fmt: skip
    assert rounded.encoding == "nibble"
    plain = dataclasses.replace(plain, encoding="nibble")
    for m in (1, 16, fewest - 1, fewest, 8192):
        found, others = (
            [one.name for one in item.launches(m, arch, arch.multiprocessors)] for item in (rounded, plain)
        )
        assert (found == others) == (m < fewest), m
        assert any("fused_fp8" in one or "moe.scaled" in one for one in found) == (m >= fewest), m


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
        found = of_model(GPT_OSS_120B, target, requested(options).served(), tokens=64)
        assert [type(item) for item in found] == [Quantizer, Packer] + [Linear] * 3
    assert of_model(GPT_OSS_120B, target, {}, tokens=64) == []
    assert len(of_model(GPT_OSS_120B, target, requested({"mxfp4_layers": "all"}).served(), tokens=64)) == 6


@pytest.mark.parametrize(("target", "rows"), [("sm_90a", 512), ("sm_121a", 64), ("sm_80", 64)])
def test_of_few_tokens_the_routers_product_and_the_choice_are_one_launch(target: str, rows: int) -> None:
    arch = arches.parse(target)
    layer = Experts(
        target, None, 4096, 128, 128, False, 4, 2880, 2880, True, "rotated", "normal", "softmax_topk", "hidden", True
    )
    assert routed_rows(arch) == rows
    for m, own in ((1, True), (65, rows > 64), (rows, True), (rows + 1, False)):
        names = {launch.choice.variant.spec.name for launch in layer.made(m, arch, arch.multiprocessors)}
        assert ("topk" in names) is not own, m
        assert bool(names & {"route", "many"}) is own, m
