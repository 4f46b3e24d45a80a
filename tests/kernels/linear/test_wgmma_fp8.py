"""Dense products in E4M3 with a scale a row: `linear.wgmma_fp8`, and `norm.rows`, which makes the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from contracts import keep_contracts
from jitmx import arch, kernels
from jitmx.dispatch.call import call
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.norm import NormProblem
from jitmx.registry.spec import Variant
from jitmx.serving.linear import Linear, fused
from jitmx.serving.rounded_inputs import FP8_ROWS, activation_of
from jitmx.sim.verify import Verdict

HOPPER = arch.parse("sm_90")
SPEC = kernels.family("linear").spec("wgmma_fp8")
# Knobs away from their defaults that change the instructions most.
SAMPLE: dict[str, dict[str, Any]] = {
    "nibbles, a pair": {"encoding": "nibble", "residual": "pair", "bias": True, "tile_m": 176},
    "wide rows": {"rows": "wide", "groups": 2, "tile_m": 256, "stages": 4},
    "sums in fp32": {"promote": True, "groups": 2, "tile_m": 128, "residual": True},
    "long ring": {"ring": 8, "stages": 4, "order": "x_first", "pdl": False},
    "four warpgroups": {"groups": 4, "tile_m": 96, "bias": True},
}


def variant(**knobs: Any) -> Variant:
    return SPEC.variant(HOPPER, **knobs)


@pytest.mark.parametrize("knobs", [SAMPLE["sums in fp32"], SAMPLE["four warpgroups"]], ids=["fp32", "four"])
def test_products_are_those_of_rows_rounded_alike(knobs: dict[str, Any], simulated: Callable[..., Verdict]) -> None:
    simulated(variant(**knobs))


def test_the_machine_code_keeps_its_contract_and_its_products_overlap() -> None:
    keep_contracts(variant(**knobs) for knobs in SAMPLE.values())


@pytest.mark.parametrize(
    ("knobs", "nearest"),
    [({"groups": 3, "tile_m": 208}, 192), ({"groups": 3, "tile_m": 192, "residual": "pair"}, 176),
     ({"groups": 2, "tile_m": 144, "promote": True}, 128), ({"groups": 4, "tile_m": 112}, 96)],
)  # fmt: skip
def test_a_tile_that_registers_do_not_hold_is_refused_with_the_nearest_that_they_do(
    knobs: dict[str, Any], nearest: int
) -> None:
    with pytest.raises(KnobError, match=f"tile_m={nearest}"):
        variant(**knobs)
    variant(**{**knobs, "tile_m": nearest, "stages": 4})


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"dtype": "fp16"}, "bf16"), ({"k": 16416}, "16384"), ({"scale_range": "full"}, "scale_range"),
     ({"weight": "mxfp8"}, "weight")],
)  # fmt: skip
def test_what_it_lacks_is_left_to_the_kernel_with_a_scale_a_block(fields: dict[str, Any], said: str) -> None:
    problem = LinearProblem(**{"m": 512, "n": 256, "k": 256, "activation": "fp8"} | fields)
    with pytest.raises(KnobError, match=said):
        kernels.family("linear").fixed(problem, "wgmma_fp8")
    assert "wgmma_fp8" not in kernels.family("linear").serving(problem, HOPPER)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_121"])
def test_a_call_is_two_launches_where_there_is_wgmma_and_else_one(target: str) -> None:
    found = call("linear", LinearProblem(512, 5120, 2880, activation="fp8"), arch.parse(target))
    names = [one.choice.variant.spec.name for one in found.launches]
    assert names == (["wgmma_fp8", "rows"] if target == "sm_90" else ["scaled"])
    atoms = {"sm_80": "twin", "sm_89": "e4m3", "sm_121": "mxf8f6f4"}
    if target in atoms:
        knobs = found.choice.variant.knobs
        assert (knobs.activation, knobs.scale_rule, knobs.atom) == ("mxfp8", "ceil", atoms[target])


def test_the_norm_is_in_the_launch_that_makes_the_rows() -> None:
    found = call("linear", LinearProblem(512, 5120, 2880, activation="fp8", norm=True), HOPPER)
    assert not found.unfused
    product, rows = (one.choice for one in found.launches)
    assert product.variant.spec.name == "wgmma_fp8" and rows.variant.knobs.norm
    assert rows.problem == NormProblem(2880, y="e4m3", norm=True)


@pytest.mark.parametrize(("k", "promote"), [(2880, False), (4096, False), (14336, True)])
def test_sums_of_many_columns_leave_the_tensor_cores(k: int, promote: bool) -> None:
    chosen = choose("linear", LinearProblem(8192, 4096, k, activation="fp8"), HOPPER).variant.knobs
    assert chosen.promote is promote


@pytest.mark.parametrize(
    ("target", "fields", "rounded"),
    [("sm_90", {}, "fp8"), ("sm_121", {}, "fp8"), ("sm_90", {"m": FP8_ROWS - 1}, "none"),
     ("sm_90", {"weight": "mxfp8"}, "none"), ("sm_90", {"scale_range": "full"}, "none"),
     ("sm_121", {"scale_range": "full"}, "fp8")],
)  # fmt: skip
def test_inputs_are_rounded_where_that_gains(target: str, fields: dict[str, Any], rounded: str) -> None:
    problem = LinearProblem(**{"m": FP8_ROWS, "n": 5120, "k": 2880} | fields)
    assert activation_of(problem, "fp8", arch.parse(target)) == rounded
    assert activation_of(problem, "none", arch.parse(target)) == "none"


def test_warm_up_compiles_what_few_rows_and_many_launch() -> None:
    layer = Linear(
        "sm_90a", None, 1024, 5120, 2880, "bf16", True, "mxfp4", "rotated", "normal", norm=True, activation="fp8"
    )
    few, many = ([one.choice.variant for one in layer.made(m, HOPPER, 132)] for m in (FP8_ROWS - 1, FP8_ROWS))
    assert [one.spec.name for one in many] == ["rows", "wgmma_fp8"] and many[0].knobs.norm
    assert "wgmma_fp8" not in {one.spec.name for one in few} and few[0].spec.name == "rms"


def test_a_residual_pair_is_in_the_product_and_on_other_targets_beside_it() -> None:
    problem = LinearProblem(512, 2880, 4096, residual="pair", activation="fp8")
    assert fused(problem, HOPPER, 132) == problem
    assert not fused(problem, arch.parse("sm_121"), 48).residual
