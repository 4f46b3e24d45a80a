"""Experts in E4M3 with a scale a row: `moe.gather_fp8`, `moe.fused_fp8` and `moe.wgmma_fp8`, and what decoding makes of
a weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from contracts import keep_contracts
from jitmx import arch, formats, kernels
from jitmx.dispatch.choose import choose, companions
from jitmx.errors import KnobError
from jitmx.kernels import fp8_rows
from jitmx.kernels.moe import MoeProblem
from jitmx.models import EXPERT_LAYERS
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict

FAMILY = kernels.family("moe")
HOPPER = arch.parse("sm_90")
SMALL = {"tile_m": 64, "grain": 32, "tile_n": 128, "stages": 2}
# Knobs away from their defaults that change the instructions most.
SAMPLE: dict[str, dict[str, Any]] = {
    "tiles of 192": {"encoding": "nibble"},
    "rotated, tiles of 64": {"tile_m": 64, "stages": 4, "depth": 4},
    "wide rows": {"rows": "wide", "bias": False, **SMALL},
    "wide rows, nibble": {"rows": "wide", "encoding": "nibble"},
    "four warpgroups": {"tile_m": 64, "tile_n": 256, "stages": 3, "depth": 4, "encoding": "nibble"},
    "five warpgroups": {"tile_m": 48, "grain": 8, "tile_n": 320, "stages": 3, "depth": 4, "encoding": "nibble"},
    "deep stages": {"tile_m": 128, "stages": 3, "depth": 4, "pdl": False},
    "wide tiles": {"tile_n": 128, "tile_m": 320, "grain": 32, "stages": 4, "bias": False},
    "silu": {"name": "wgmma_fp8", "encoding": "nibble"},
    "silu, tiles of 64": {"name": "wgmma_fp8", "tile_m": 64, "tile_n": 256, "stages": 6},
    "silu, wide rows": {"name": "wgmma_fp8", "rows": "wide", "bias": False, "encoding": "nibble", **SMALL},
}


def variant(name: str = "fused_fp8", **knobs: Any) -> Variant:
    return FAMILY.spec(name).variant(HOPPER, **knobs)


@pytest.mark.parametrize("knobs", SAMPLE.values(), ids=SAMPLE)
def test_products_are_those_of_rows_rounded_alike(knobs: dict[str, Any], simulated: Callable[..., Verdict]) -> None:
    simulated(variant(**knobs))


@pytest.mark.parametrize("knobs", [{}, {"tile_m": 64, "rows": 64, "warps": 16}, {"tile_counters": True}], ids=str)
def test_gathered_rows_are_rounded_bit_for_bit(knobs: dict[str, Any], simulated: Callable[..., Verdict]) -> None:
    assert simulated(variant("gather_fp8", **knobs)).error == 0


def test_the_machine_code_keeps_its_contract_and_its_products_overlap() -> None:
    keep_contracts(variant(**knobs) for knobs in SAMPLE.values())
    keep_contracts([variant("gather_fp8")])


def table(base: int, byte: int) -> list[float]:
    """What look-ups give the eight magnitudes, in the arithmetic of mxfp4/e4m3_decode.cuh."""
    low = 0x14100800 + (byte - base) * 0x08080800
    high = 0x24201C18 + (byte - base) * 0x08080808
    codes = np.array([low & 0xFFFFFFFF, high & 0xFFFFFFFF], np.uint32).view(np.uint8)
    return list(map(float, codes.view(ml_dtypes.float8_e4m3fn)))


@pytest.mark.parametrize("base", [2, 77, 117, 128])
def test_every_scale_within_a_pass_makes_exact_normal_numbers_of_e4m3(base: int) -> None:
    magnitudes = formats.values(formats.get("mxfp4"))[:8]
    factor = np.uint32(base + 5 << 23).view(np.float32)  # as row_factor has it
    for byte in range(base, base + fp8_rows.BINADES):
        found = table(base, byte)
        assert np.array_equal(np.array(found) * float(factor), magnitudes * 2.0 ** (byte - 127))
        assert all(value >= 2.0**-6 for value in found[1:]) and max(found) <= 448
    for byte in (base - 1, base + fp8_rows.BINADES):  # one further is wrong: a subnormal, or past the largest
        assert np.array_equal(table(base, byte), magnitudes * 2.0 ** (byte - base - 5)) is False


@pytest.mark.parametrize("byte", [0, 2, 127, 187, 254])
def test_zero_stays_zero_under_the_scale_of_another_pass(byte: int) -> None:
    assert table(60, byte)[0] == 0


@given(
    x=arrays.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)),
        elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
    )
)  # fmt: skip
def test_a_row_takes_the_least_scale_that_holds_it(x: np.ndarray[Any, Any]) -> None:
    rows = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    codes, scales = fp8_rows.quantize_rows(rows)
    for row, code, scale in zip(rows, fp8_rows.decode(codes), scales.astype(np.float64), strict=True):
        if not np.isfinite(row).all():
            assert np.isnan(scale) and not code.any()
            continue
        assert np.abs(row).max() <= 448 * scale and np.log2(scale) % 1 == 0
        assert scale == (2.0**-126 if 0 < np.abs(row).max() < 2.0**-118 else scale)
        if np.abs(row).max() > 2.0**-117:
            assert np.abs(row).max() > 448 * scale / 2
        step = np.maximum(
            np.exp2(np.floor(np.log2(np.maximum(np.abs(row), 2.0**-6 * scale)))) * 2.0**-3, 2.0**-9 * scale
        )
        assert (np.abs(code * scale - row) <= step / 2).all()


@given(seed=st.integers(0, 99), k=st.sampled_from((32, 96, 160, 352)), counts=st.lists(st.integers(0, 11), min_size=1))
def test_lines_are_taken_apart_again(seed: int, k: int, counts: list[int]) -> None:
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    codes = np.random.default_rng(seed).integers(0, 256, (int(offsets[-1]), k)).astype(np.uint8)
    lines = fp8_rows.arrange(codes, offsets) if len(codes) else np.zeros((0, 128), np.uint8)
    assert lines.nbytes == fp8_rows.rows_bytes(len(codes), k)
    assert np.array_equal(fp8_rows.restore(lines, offsets, k), codes) or not len(codes)


@pytest.mark.parametrize("alpha", [0.01, 0.75, 1.702, 30.0])
@pytest.mark.parametrize("limit", [0.1, 1.25, 7.0, 100.0])
def test_the_activation_never_passes_what_h_is_scaled_for(alpha: float, limit: float) -> None:
    gate = np.concatenate([np.linspace(-60 / alpha, limit, 20001), [limit]])
    largest = (limit + 1) * np.abs(gate / (1 + np.exp(-np.clip(alpha * gate, -700, 700)))).max()
    multiplier = fp8_rows.hidden_multiplier(alpha, limit)
    assert largest * multiplier <= 448 * 1.0001 and largest * multiplier >= 448 / 4.2


@pytest.mark.parametrize("rows", [1, 64, 512, 8192])
def test_every_number_of_rows_goes_by_expert(rows: int) -> None:
    found = choose("moe", MoeProblem.on(HOPPER, m=rows, x_format="fp8"), HOPPER)
    names = [found.variant.spec.name, *(one.variant.spec.name for one in companions(found))]
    assert names[0] == "fused_fp8" and names[-2:] == ["gather_fp8", "combine"]
    assert found.variant.knobs.encoding == "nibble" and found.variant.knobs.rows == "narrow"


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_experts_with_silu_read_x_in_e4m3_and_h_in_bf16(model: str, rows: int) -> None:
    layer = EXPERT_LAYERS[model]
    found = choose("moe", MoeProblem.on(HOPPER, m=rows, x_format="fp8", **dataclasses.asdict(layer)), HOPPER)
    launches = [found.variant, *(one.variant for one in companions(found) if one.variant.spec.family == "moe")]
    assert [one.spec.name for one in launches] == ["wgmma_fp8", "gather_fp8", "wgmma", "combine"]
    assert {one.knobs.tile_m for one in launches[:3]} == {launches[0].knobs.tile_m}
    assert launches[0].knobs.activation == "silu" and launches[2].knobs.encoding == "nibble"


@pytest.mark.parametrize(
    ("activation", "product", "kernel"),
    [("swiglu_oai", "both", "fused_fp8"), ("silu", "up", "wgmma_fp8"), ("silu", "down", "wgmma")],
)
def test_one_kernel_by_wgmma_serves_what_a_launch_of_fp8_makes(activation: str, product: str, kernel: str) -> None:
    problem = MoeProblem.on(HOPPER, m=4096, x_format="fp8", activation=activation, product=product)
    assert problem.h_format == ("bf16" if activation == "silu" else "fp8")
    assert FAMILY.serving(problem, HOPPER) == (kernel,)
    assert choose("moe", problem, HOPPER).variant.spec.name == kernel


def test_what_no_launch_makes_is_refused() -> None:
    silu = MoeProblem.on(HOPPER, m=64, x_format="fp8", activation="silu", product="down")
    with pytest.raises(KnobError, match="makes the first product, and not product=down"):
        FAMILY.fixed(silu, "wgmma_fp8")
    with pytest.raises(KnobError, match=r"moe\.wgmma does not take x_format='fp8'"):
        FAMILY.fixed(dataclasses.replace(silu, product="up"), "wgmma")
    bounded = dataclasses.replace(silu, activation="swiglu_oai", product="up")
    with pytest.raises(KnobError, match=r"leaves h in bf16, which activation='swiglu_oai' bounds; use moe\.fused_fp8"):
        FAMILY.fixed(bounded, "wgmma_fp8")
    with pytest.raises(KnobError, match="makes both products, and not product=up"):
        FAMILY.fixed(bounded, "fused_fp8")
    with pytest.raises(KnobError, match=r"activation='silu' gives no bound; use moe\.wgmma_fp8"):
        FAMILY.fixed(dataclasses.replace(silu, product="layer"), "fused_fp8")
    with pytest.raises(KnobError, match="does not take x_format='bf16', only fp8"):
        FAMILY.fixed(dataclasses.replace(bounded, product="layer", x_format="bf16"), "fused_fp8")
    for product in ("up", "down"):
        with pytest.raises(KnobError):
            choose("moe", dataclasses.replace(bounded, product=product), HOPPER)


@pytest.mark.parametrize(
    ("m", "tile"),
    [(64, (32, 320)), (512, (32, 320)), (1024, (48, 320)), (1536, (64, 192)), (2048, (128, 192)), (4096, (192, 192)),
     (8192, (320, 128)), (12288, (192, 192))],
)  # fmt: skip
def test_tiles_of_gpt_oss_hold_the_rows_of_nearly_every_expert(m: int, tile: tuple[int, int]) -> None:
    knobs = choose("moe", MoeProblem.on(HOPPER, m=m, x_format="fp8"), HOPPER).variant.knobs
    assert (knobs.tile_m, knobs.tile_n) == tile


@pytest.mark.parametrize(("target", "atom"), [("sm_80", "twin"), ("sm_89", "e4m3"), ("sm_121", "mxf8f6f4")])
def test_targets_without_it_take_a_scale_a_block_that_holds_its_largest(target: str, atom: str) -> None:
    chip = arch.parse(target)
    with pytest.raises(KnobError, match="sm_90a"):
        FAMILY.spec("fused_fp8").variant(chip, pdl=False)
    found = choose("moe", MoeProblem.on(chip, m=64, x_format="fp8"), chip)
    knobs = found.variant.knobs
    assert (found.variant.spec.name, knobs.x_format, knobs.scale_rule) == ("scaled", "mxfp8", "ceil")
    if target != "sm_121":  # whose table was made without it
        assert knobs.atom == atom


@pytest.mark.parametrize("m", [1, 512])
@pytest.mark.parametrize(
    "more",
    [{"scale_range": "full"}, {"weight_on": "input"}, {"reduction": "atomic"}, {"activation": "relu2"},
     {"activation": "plain"}],
    ids=str,
)  # fmt: skip
def test_so_do_calls_that_its_kernels_do_not_take_where_it_is(m: int, more: dict[str, str]) -> None:
    found = choose("moe", MoeProblem.on(HOPPER, m=m, x_format="fp8", **more), HOPPER)
    knobs = found.variant.knobs
    assert (found.variant.spec.name, knobs.x_format, knobs.scale_rule) == ("scaled", "mxfp8", "ceil")
    assert all(not one.variant.spec.name.endswith("_fp8") for one in companions(found))
