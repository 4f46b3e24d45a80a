"""Kernels are ready before vLLM captures or serves: which ones, made in parallel, and what comes late is said."""

# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

vllm_world = pytest.importorskip("vllm_world")

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

from jitmx import arch as arches
from jitmx import batch, settings
from jitmx.dispatch.choose import default_variants
from jitmx.errors import NotWarmedError
from jitmx.kernels.pack import encoding_on
from jitmx.runtime import load
from jitmx.serving import needed as needed_kernels
from jitmx.serving.experts import Experts
from jitmx.serving.linear import Linear, Packer
from jitmx.serving.needed import Needed, variants
from jitmx.toolchain import nvrtc
from jitmx.vllm import moe, monitor, warmup

LAYER = Experts(
    "sm_90a", None, 4096, 128, 128, False, 4, 2880, 2880, True, "rotated", "normal", "softmax_topk", "hidden", True
)
SMALL = replace(LAYER, rows=8, experts=4, local=4, top=2, hidden=64, intermediate=96)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with an empty cache."""
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warmup, "_ready", set())
    monkeypatch.setattr(monitor, "_sealed", None)
    settings.reload()
    yield
    monkeypatch.undo()
    settings.reload()


def names(asked: Needed) -> set[str]:
    return {variant.name for variant in variants(asked)}


@pytest.mark.parametrize("target", ["sm_90a", pytest.param("sm_121a", marks=pytest.mark.nightly)])
def test_the_numbers_that_are_asked_for_find_what_all_numbers_find(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = {"sm_90a": "rotated", "sm_121a": "nibble"}[target]
    some = [
        replace(LAYER, arch=target, encoding=encoding, rows=600),
        Linear(target, None, 300, 5120, 2880, "bf16", True, "mxfp4", encoding, "normal"),
        Linear(target, None, 300, 2880, 4096, "bf16", True, "mxfp4", encoding, "normal", residual="pair"),
        Linear(target, None, 300, 5120, 2880, "bf16", True, "mxfp4", encoding, "normal", norm=True),
        replace(LAYER, arch=target, encoding=encoding, rows=300, norm=True, residual="pair"),
        replace(LAYER, arch=target, encoding="nibble", rows=400, x_format="fp8"),
    ]
    found = [names(asked) for asked in some]
    monkeypatch.setattr(Needed, "numbers", lambda needed: [*range(1, needed.rows + 1)])
    monkeypatch.setattr(needed_kernels, "_STRIDE", 1)
    variants.cache_clear()
    assert [names(asked) for asked in some] == found
    variants.cache_clear()


def test_a_layers_kernels_are_routing_lists_and_experts() -> None:
    kinds = {tuple(name.split(".")[:2]) for name in names(LAYER)}
    assert kinds == {
        ("routing", "route"), ("routing", "many"), ("routing", "topk"), ("routing", "sort"), ("moe", "stream"),
        ("moe", "token"), ("moe", "gather"), ("moe", "fused"), ("moe", "combine"),
    }  # fmt: skip
    for routing, first in (("hidden", "route"), ("logits", "topk")):
        few = names(replace(LAYER, rows=64, routing=routing))
        assert {name.split(".")[1] for name in few} == {first, "stream", "token"}
    assert {name.split(".")[1] for name in names(replace(LAYER, routing="ids"))} == {
        "sort", "stream", "token", "gather", "fused", "combine"
    }  # fmt: skip
    scaled = names(replace(LAYER, arch="sm_121a", encoding="nibble", rows=64, x_format="mxfp8"))
    assert {name.split(".")[1] for name in scaled} == {"route", "sort", "scaled", "combine"}
    rounded = replace(LAYER, encoding="nibble", x_format="fp8")  # few rows an expert are not
    assert {name.split(".")[1] for name in names(rounded)} == {
        "route", "many", "topk", "sort", "token", "stream", "gather", "fused", "gather_fp8", "fused_fp8", "combine"
    }  # fmt: skip
    mapped = replace(LAYER, local=64, mapped=True, routing="ids")
    assert all("mapped" in name for name in names(mapped) if ".sort" in name)


def test_what_is_fused_is_part_of_what_is_asked_for() -> None:
    qkv = Linear("sm_90a", None, 64, 5120, 2880, "bf16", True, "mxfp4", "rotated", "normal", norm=True)
    fused = {variant.spec.name for variant in variants(qkv) if getattr(variant.knobs, "norm", False)}
    assert fused == {"stream"} and any(variant.spec.name == "splitk" for variant in variants(qkv))
    o = replace(qkv, n=2880, k=4096, norm=False, residual="pair")
    assert {variant.knobs.residual for variant in variants(o)} == {"pair"}
    experts = variants(replace(LAYER, norm=True, residual="pair"))
    adding = {variant.spec.name for variant in experts if getattr(variant.knobs, "residual", False) == "pair"}
    assert adding == {"stream", "token", "combine"}
    # Of one token; more are normalised by a launch before it, one kernel for products and experts.
    assert [
        variant.name for needed in (experts, variants(qkv)) for variant in needed if variant.spec.family == "norm"
    ] == ["norm.rms", "norm.rms"]
    assert not any("norm.rms" in names(asked) for asked in (LAYER, o, replace(qkv, rows=1)))
    assert {variant.knobs.normalized for variant in experts if variant.spec.name == "route"} == {True, False}


def test_the_first_layer_compiles_and_the_others_find(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_one = nvrtc.compile

    def count(source: str, *rest: Any, **options: Any) -> Any:
        compiled.append(source)
        return compile_one(source, *rest, **options)

    monkeypatch.setattr(nvrtc, "compile", count)
    warmup.prepare(SMALL)
    assert len(compiled) == len(variants(SMALL)) > 1
    warmup.prepare(replace(SMALL))
    assert len(compiled) == len(variants(SMALL))


def test_what_a_layer_needs_is_what_the_settings_of_now_choose() -> None:
    before = names(SMALL)
    settings.choose("moe_knobs", (("kernel", "decode"),), "a test")
    try:
        assert any(name.startswith("moe.decode") for name in names(SMALL)) and names(SMALL) != before
    finally:
        settings.release("moe_knobs")
    assert names(SMALL) == before


def test_required_serves_from_a_warm_cache_without_a_compiler_and_else_names_the_command(
    cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITMX_MODE", "required")
    settings.reload()
    said = r"kernels failed; each is in the log\); .*jitmx warmup --arch sm_90a --variant "
    with pytest.raises(NotWarmedError, match=said):
        warmup.prepare(SMALL)
    batch.build_all(variants(SMALL), strict=False)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is compiled in this mode")

    monkeypatch.setattr(nvrtc, "compile", refuse)
    monkeypatch.setattr(nvrtc, "scan", refuse)
    warmup.prepare(SMALL)


def test_a_cache_without_what_packs_is_an_error_before_weights_are_touched(
    host: Any, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "prepare", host.prepare)
    monkeypatch.setattr(moe, "pack_layer", None)
    monkeypatch.setenv("JITMX_MODE", "required")
    settings.reload()
    with pytest.raises(NotWarmedError, match=r"jitmx warmup --arch sm_90a --variant pack\.pack$"):
        host.build(load=True)


def test_one_kernel_packs_all_weights_of_a_format_on_a_target() -> None:
    wanted = {("sm_90a", "mxfp4"): "pack.pack", ("sm_121a", "mxfp4"): "pack.pack.nibble",
              ("sm_121a", "mxfp8"): "pack.pack.mxfp8"}  # fmt: skip
    for (target, format), name in wanted.items():
        arch = arches.parse(target)
        (made,) = names(Packer(target, None, 1, format, encoding_on(arch, format)))
        assert made == name and made in {variant.name for variant in default_variants("pack", arch)}


def test_vllms_warm_up_knows_every_kernel_once_and_ends_with_a_seal(
    host: Any, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "prepare", host.prepare)
    config = host.config(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=16)
    registry = JitWarmupRegistry(config)
    with vllm_world.world(), set_current_vllm_config(config), registry.activate():
        get_model(vllm_config=config)
    assert len(registry) == 2  # what packs a layer, and what serves it
    asked = [message for _, message in host.said if "are ready after" in message]
    assert len(asked) == 2 and all("kernels for sm_90a" in message for message in asked)
    assert monitor._sealed is None
    monkeypatch.setattr(nvrtc, "compile", None)
    registry.warmup()
    assert monitor._sealed is not None and monitor.late() == ()


def test_a_kernel_that_comes_late_is_counted_and_said_once(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {("early", 0): 1}
    monkeypatch.setattr(load, "_functions", modules)
    monkeypatch.setattr(monitor, "_sealed", None)
    monitor.look()
    assert monitor.late() == () and host.said == []
    monitor.seal()
    monitor.look()
    assert monitor.late() == () and host.said == []
    modules["late", 0] = 2
    monitor.look()
    monitor.look()
    assert monitor.late() == ("late",)
    assert host.said == [("WARNING", "jitmx loaded kernels for a request, which warm-up should have had: late")]
