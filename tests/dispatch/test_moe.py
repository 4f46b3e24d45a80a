"""Dispatch of layers of experts: tiles by name, who serves how many rows, and all launches of a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jitmx import arch, settings
from jitmx.arch import Arch
from jitmx.dispatch.call import call_variants
from jitmx.dispatch.choice import Choice
from jitmx.dispatch.choose import choose, companions, launches
from jitmx.errors import KnobError
from jitmx.kernels.moe import FAMILY, MoeProblem
from jitmx.kernels.routing.problem import TILES
from strategies import ARCHES

SM_90, SM_121 = arch.parse("sm_90"), arch.parse("sm_121")
NAMES = ("JITMX_MOE_TILE", "FLASHINFER_MOE_TILE")
# experts, top, hidden, intermediate, biases
MODELS = {
    "gpt-oss-120b": (128, 4, 2880, 2880, True),
    "gpt-oss-20b": (32, 4, 2880, 2880, True),
    "256 small": (256, 8, 2048, 512, False),
    "sixty": (60, 4, 2048, 1408, False),
}


def layer(target: Arch, m: int, **more: object) -> Choice:
    return choose("moe", MoeProblem.on(target, m=m, **more), target)


def set_tile(monkeypatch: pytest.MonkeyPatch, text: str, name: str = NAMES[0]) -> None:
    monkeypatch.setenv(name, text)
    settings.reload()


@pytest.mark.parametrize(("kernel", "x_format"), [("wgmma", "bf16"), ("fused", "bf16"), ("fused_fp8", "fp8")])
@pytest.mark.parametrize("tile", ["64x128", "64x192", "128x128", "128x192", "192x128", "192x192", "320x128"])
def test_tiles_that_registers_allow_fit_with_the_stages_of_their_rows(
    tile: str, kernel: str, x_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITMX_MOE_KNOBS", f"kernel={kernel}")
    set_tile(monkeypatch, tile)
    found = layer(SM_90, 2048, x_format=x_format).variant
    assert (found.spec.name, f"{found.knobs.tile_m}x{found.knobs.tile_n}") == (kernel, tile)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "tile", "stages"),
    [
        ("8x128", (8, 128), 6), ("16x128", (16, 128), 6),
        ("32x128", (32, 128), 6), ("64x128", (64, 128), 4), ("128x128", (128, 128), 4),
        ("64x128s3", (64, 128), 3), ("64x128x64s5", (64, 128), 5), ("128X64", (128, 64), 4), ("64x96", (64, 96), 4),
        ("32x256", (32, 256), 6), ("128x256", (128, 256), 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("m", [1, 16, 64, 8192])
def test_a_tile_by_name_is_that_of_both_products_at_any_number_of_rows(
    name: str, text: str, tile: tuple[int, int], stages: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, text, name)
    choice = layer(SM_121, m)
    lists, down, combine = companions(choice)
    for one in (choice, down):
        knobs = one.variant.knobs
        assert one.variant.spec.name == "grouped" and (knobs.tile_m, knobs.tile_n) == tile and knobs.stages == stages
        assert (one.decided_by.name, one.decided_by.detail) == ("environment", f"{name}={text.lower()}")
    assert (lists.variant.spec.name, lists.variant.knobs.tile) == ("sort", tile[0])
    assert combine.variant.spec.name == "combine" and combine.decided_by.name != "environment"


@pytest.mark.parametrize(
    ("text", "kernels"),
    [
        ("192x192", {"fused"}), ("320x128", {"fused"}), ("16x128", {"grouped"}), ("128x256", {"grouped"}),
        ("64x128", {"grouped", "fused"}),
    ],
)  # fmt: skip
def test_a_tile_by_name_is_had_at_any_number_of_rows_from_a_kernel_that_has_it(
    text: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, text)
    found = set()
    for m in (1, 16, 64, 128, 8192):
        choice = layer(SM_90, m)
        found.add(choice.variant.spec.name)
        assert f"{choice.variant.knobs.tile_m}x{choice.variant.knobs.tile_n}" == text
        for one in companions(choice):
            assert getattr(one.variant.knobs, "tile_m", choice.variant.knobs.tile_m) == choice.variant.knobs.tile_m
    assert found == kernels


@pytest.mark.parametrize("text", ["8x128", "64x128", "128x128"])
def test_a_tile_by_name_is_that_of_quantized_layers_too(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, text)
    for x_format in ("mxfp8", "mxfp4"):
        choice = layer(SM_121, 16, x_format=x_format)
        _, down, _ = companions(choice)
        for one in (choice, down):
            assert (one.variant.spec.name, one.decided_by.name) == ("scaled", "environment")
            assert f"{one.variant.knobs.tile_m}x{one.variant.knobs.tile_n}" == text


def test_a_tile_that_a_target_has_no_registers_for_is_refused_with_the_nearest_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_tile(monkeypatch, "128x128")
    with pytest.raises(KnobError, match=r"JITMX_MOE_TILE=128x128: .* the nearest legal tile is (\d+x\d+)$") as error:
        layer(SM_90, 16, x_format="mxfp8")
    nearest = str(error.value).rpartition(" ")[2]
    set_tile(monkeypatch, nearest)
    knobs = layer(SM_90, 16, x_format="mxfp8").variant.knobs
    assert f"{knobs.tile_m}x{knobs.tile_n}" == nearest and knobs.tile_m * knobs.tile_n >= 64 * 64


@pytest.mark.parametrize("name", NAMES)
def test_auto_is_as_if_no_tile_were_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {m: layer(SM_121, m) for m in (16, 65)}
    set_tile(monkeypatch, "auto", name)
    assert {m: layer(SM_121, m) for m in usual} == usual
    assert usual[16].variant.spec.name == "decode"


@pytest.mark.parametrize("m", [16, 512])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("48x128", "moe.grouped.tile_m=48 is not one of 8, 16, 32, 64, 128; the nearest legal tile is 64x128"),
        ("256x128", "tile_m=256 is not one of 8, 16, 32, 64, 128; the nearest legal tile is 128x128"),
        ("64x100", "tile_n=100 is not one of 32, 64, 96, 128, 192, 256; the nearest legal tile is 64x96"),
        ("64x128x128", "moe.grouped takes 64 columns a step, not 128; the nearest legal tile is 64x128x64"),
        ("64x128s9", "moe.grouped.stages=9 is above its limit; the nearest legal value is 8"),
        ("128x256s5", "a block on sm_121a has at most 101376 B; the nearest legal value is stages=4"),
    ],
)
def test_an_illegal_tile_is_refused_with_the_variable_the_limit_and_the_nearest_that_is_legal(
    text: str, said: str, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, text, "FLASHINFER_MOE_TILE")
    with pytest.raises(KnobError) as error:
        layer(SM_121, m)
    assert str(error.value).startswith(f"FLASHINFER_MOE_TILE={text}: ") and said in str(error.value)


def test_a_named_kernel_without_a_tile_is_left_alone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, "64x128")
    monkeypatch.setenv("JITMX_MOE_KNOBS", "kernel=decode,stages=2")
    settings.reload()
    choice = layer(SM_121, 16)
    assert choice.variant.spec.name == "decode"
    assert choice.decided_by.detail.startswith("JITMX_MOE_TILE=64x128 does not apply, moe.decode has no tile; ")
    with pytest.raises(KnobError, match="kernel=decode cannot serve"):
        layer(SM_121, 65, product="up")


def test_knobs_by_name_reach_both_products_and_not_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITMX_MOE_KNOBS", "kernel=grouped,stages=3,tile_m=32")
    settings.reload()
    choice = layer(SM_121, 16)
    _, down, combine = companions(choice)
    assert [one.variant.knobs.stages for one in (choice, down)] == [3, 3]
    assert [one.variant.knobs.tile_m for one in (choice, down)] == [32, 32]
    (environment,) = [source for source in combine.sources if source.name == "environment"]
    assert environment.detail == "JITMX_MOE_KNOBS is not for this launch" and not environment.decided


def test_the_second_product_yields_to_the_tile_of_the_first() -> None:
    for tile_m, warps_m in ((16, 1), (32, 1), (64, 1), (128, 2)):
        knobs = {"kernel": "grouped", "tile_m": tile_m, "warps_m": warps_m, "tile_n": 128, "stages": 3}
        problem = MoeProblem.on(SM_121, m=512)
        _, down, _ = companions(choose("moe", problem, SM_121, knobs=knobs))
        assert down.variant.knobs.tile_m == tile_m


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", ARCHES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_layers_of_every_model_have_launches_that_fit_every_target(model: str, target: Arch) -> None:
    experts, top, hidden, intermediate, bias = MODELS[model]
    for m in (1, 2, 8, 16, 64, 65, 300, 8192):
        for scale_range in ("normal", "full"):
            problem = MoeProblem.on(
                target, m=m, experts=experts, top=top, hidden=hidden, intermediate=intermediate, bias=bias,
                activation="swiglu_oai" if bias else "silu", scale_range=scale_range,
            )  # fmt: skip
            made = launches("moe", problem, target)
            assert [one.variant for one in made] == list(call_variants("moe", target, **problem.as_dict()))
            for one in made:
                if isinstance(one.problem, MoeProblem):
                    geometry = FAMILY.launch(one.variant, one.problem, target.multiprocessors)
                    assert geometry.shared_bytes <= target.shared_bytes and 0 < geometry.blocks < 1 << 31
            tiles = {one.variant.knobs.tile_m for one in made if hasattr(one.variant.knobs, "tile_m")}
            listed = {one.variant.knobs.tile for one in made if one.variant.spec.family == "routing"}
            assert tiles == listed and len(tiles) == (len(made) > 1)


@hypothesis_settings(max_examples=60)
@given(
    m=st.integers(1, 2000), experts=st.integers(8, 512), top=st.integers(1, 8), target=st.sampled_from(ARCHES),
    tile=st.sampled_from([tile for tile in TILES if tile in (16, 32, 64, 128)]),
)  # fmt: skip
def test_whatever_tile_the_first_product_takes_the_call_has_one(
    m: int, experts: int, top: int, target: Arch, tile: int
) -> None:
    problem = MoeProblem.on(target, m=m, experts=experts, top=top, hidden=256, intermediate=96)
    block = {"tile_n": 128, "warps_n": 4, "warps_m": 2 if tile == 128 else 1, "stages": 3}
    choice = choose("moe", problem, target, knobs={"kernel": "grouped", "tile_m": tile, **block})
    lists, down, _ = companions(choice)
    assert lists.variant.knobs.tile == down.variant.knobs.tile_m == tile
