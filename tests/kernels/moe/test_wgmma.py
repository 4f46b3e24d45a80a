"""`moe.wgmma` and `moe.gather` compute a layer with `moe.combine`, and are chosen where they serve."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import claim, keep_contracts
from jitmx import arch, kernels
from jitmx.build import Built
from jitmx.dispatch.choose import choose, companions
from jitmx.errors import KnobError
from jitmx.kernels.moe import KERNELS, MoeProblem, gather, wgmma, wgmma_arguments
from jitmx.kernels.moe.arguments import random_weight
from jitmx.kernels.moe.grouped_arguments import lists
from jitmx.kernels.moe.layout import ALPHA, LIMIT, reference
from jitmx.registry.case import relative_l2
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import encode
from jitmx.sim.verify import Verdict, verify
from jitmx.toolchain import nvrtc
from strategies import examples

FAMILY = kernels.family("moe")
HOPPER = arch.parse("sm_90")
PRODUCTS = ("gather", "up", "down", "combine")
SIZES = st.integers(1, 128).map(lambda blocks: 32 * blocks)
MANY = st.builds(
    MoeProblem,
    m=st.integers(4096, 20_000),
    experts=st.integers(1, 128),
    top=st.integers(1, 8),
    hidden=SIZES,
    intermediate=SIZES,
    product=st.sampled_from(PRODUCTS),
    activation=st.sampled_from(["swiglu_oai", "silu"]),
    bias=st.booleans(),
    encoding=st.sampled_from(["rotated", "nibble"]),
)


def variant(**knobs: Any) -> Variant:
    return wgmma.SPEC.variant(HOPPER, **knobs)


@settings(max_examples=examples(60))
@given(problem=MANY, multiprocessors=st.integers(1, 200))
def test_many_rows_an_expert_take_it_and_what_is_tried_is_legal(problem: MoeProblem, multiprocessors: int) -> None:
    choice = choose("moe", problem, HOPPER, multiprocessors=multiprocessors)
    name = problem.product if problem.product in ("gather", "combine") else "wgmma"
    assert choice.variant.spec.name == name
    assert FAMILY.launch(choice.variant, problem, multiprocessors).shared_bytes <= HOPPER.shared_bytes
    tried = KERNELS[name].candidates(problem, HOPPER, multiprocessors)
    assert tried[0] == FAMILY.tuned(problem, HOPPER, multiprocessors, name)
    for knobs in tried:
        FAMILY.check(problem, FAMILY.spec(name).variant(HOPPER, **knobs, **FAMILY.fixed(problem, name)))


@given(problem=MANY, rows=st.integers(513, 20_000))
def test_all_launches_of_a_layer_take_the_same_tiles_of_rows(problem: MoeProblem, rows: int) -> None:
    """Lists, rows by expert and both products; the sum has no tiles."""
    layer = choose("moe", MoeProblem(**problem.as_dict() | {"product": "layer", "m": rows}), HOPPER)
    launches = [layer.variant, *(one.variant for one in companions(layer))]
    tiles = [getattr(one.knobs, "tile_m", getattr(one.knobs, "tile", 0)) for one in launches]
    assert len({tile for tile in tiles if tile}) == 1 and sum(map(bool, tiles)) >= 3


@pytest.mark.parametrize(
    ("target", "problem", "kernel"),
    [
        ("sm_90", {"m": 40}, "wgmma"),
        ("sm_90", {"m": 24}, "grouped"),
        ("sm_90", {"m": 8192, "product": "layer"}, "fused"),
        ("sm_90", {"m": 65, "experts": 8}, "wgmma"),
        ("sm_90", {"m": 64, "experts": 8, "product": "layer"}, "fused"),
        ("sm_90", {"m": 64, "product": "layer"}, "stream"),
        ("sm_90", {"m": 8192, "scale_range": "full"}, "grouped"),
        ("sm_80", {"m": 8192}, "grouped"),
        ("sm_121", {"m": 8192}, "grouped"),
    ],
)
def test_it_is_chosen_for_many_rows_an_expert_where_the_target_has_it(
    target: str, problem: dict[str, Any], kernel: str
) -> None:
    asked = MoeProblem(**{"product": "up"} | problem)
    assert choose("moe", asked, arch.parse(target)).variant.spec.name == kernel


def test_tiles_hold_the_rows_of_nearly_every_expert_and_have_more_rows_of_w_where_they_hold_fewer() -> None:
    rows = (384, 575, 576, 1279, 1280, 1791, 1792, 3583, 3584, 8192)  # with each expert a 32nd of them
    knobs = [choose("moe", MoeProblem(m, product="up"), HOPPER).variant.knobs for m in rows]
    assert [one.tile_m for one in knobs] == [32, 32, 48, 48, 64, 64, 128, 128, 192, 192]
    assert [one.tile_n for one in knobs] == [320, 320, 320, 320, 256, 256, 192, 192, 192, 192]


@pytest.mark.parametrize(
    ("sizes", "rows"), [((2880, 2880), 320), ((2048, 768), 256), ((4096, 14336), 320), ((7168, 2048), 320)]
)
def test_blocks_have_as_many_rows_of_w_as_fill_few_up(sizes: tuple[int, int], rows: int) -> None:
    """Those of Qwen3-30B are multiples of 256, and of 320 a twentieth would be for nothing."""
    hidden, intermediate = sizes
    problem = MoeProblem(256, hidden=hidden, intermediate=intermediate, product="both")
    assert choose("moe", problem, HOPPER).variant.knobs.tile_n == rows


@pytest.mark.parametrize(("activation", "most"), [("swiglu_oai", 320), ("silu", 192)])
def test_in_e4m3_one_tile_holds_all_rows_of_an_expert_where_it_can_and_h_is_too(activation: str, most: int) -> None:
    """Else moe.wgmma reads h, whose tiles of 192 are quicker."""
    rows = (4097, 5631, 5632, 8192, 10240, 10272, 16384)
    problems = [MoeProblem(m, activation=activation, x_format="fp8") for m in rows]
    tiles = [choose("moe", one, HOPPER).variant.knobs.tile_m for one in problems]
    assert tiles == [192, 192, most, most, most, 192, 192]


@pytest.mark.parametrize("rows", [64, 512, 2048, 8192])
def test_a_second_product_in_bf16_behind_a_first_in_e4m3_has_stages_that_fit(rows: int) -> None:
    """Its tile is that of the first, and of SiLU h is in bf16."""
    problem = MoeProblem(rows, 8, 2, 4096, 14336, "silu", product="layer", x_format="fp8")
    down = next(one for one in companions(choose("moe", problem, HOPPER)) if one.variant.spec.name == "wgmma").variant
    assert down.knobs.product == "down" and wgmma.shared_bytes(down.knobs) <= HOPPER.shared_bytes


@settings(max_examples=examples(50))
@given(data=st.data(), k=st.integers(1, 6).map(lambda blocks: 32 * blocks))
def test_arranged_rows_are_restored(data: st.DataObject, k: int) -> None:
    counts = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    rows = np.random.default_rng(0).standard_normal((offsets[-1], k)).astype(ml_dtypes.bfloat16)
    lines = wgmma_arguments.arrange(rows, offsets)
    assert lines.nbytes == wgmma_arguments.rows_bytes(len(rows), k)
    np.testing.assert_array_equal(wgmma_arguments.restore(lines, offsets, k), rows)


@pytest.mark.parametrize(
    "knobs",
    [
        {"tile_m": 64, "grain": 16, "tile_n": 128, "depth": 2, "stages": 2},
        {"tile_m": 64, "grain": 32, "tile_n": 256, "depth": 3, "stages": 3, "bias": False, "activation": "silu"},
        {"tile_m": 128, "grain": 64, "stages": 3, "depth": 3, "encoding": "nibble", "pdl": False},
        {"tile_m": 64, "grain": 16, "tile_n": 128, "depth": 2, "stages": 2, "product": "down", "pdl": False},
        {"tile_m": 320, "grain": 64, "tile_n": 128, "stages": 3, "product": "down", "bias": False},
    ],
    ids=str,
)
def test_cases_pass_in_the_simulator(knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]) -> None:
    assert simulated(variant(**knobs)).error <= 0.006


@pytest.mark.parametrize("knobs", [{}, {"tile_m": 64, "spans": 1, "at_once": 1, "pdl": False}], ids=str)
def test_rows_are_gathered_bit_for_bit(knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]) -> None:
    simulated(gather.SPEC.variant(HOPPER, **knobs))


def test_machine_code_of_every_gather_keeps_its_contract() -> None:
    keep_contracts(
        gather.SPEC.variant(HOPPER, at_once=steps, warps=warps) for steps in (1, 2, 3, 4) for warps in (1, 4)
    )


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("gather", "exchange_in_quad(v[j][i], lane);", ""),
        ("wgmma", "first = entry[3] * each;", "first = 0;"),
        ("wgmma", "Bf16::widen(bias[8]);", "Bf16::widen(bias[0]);"),
        ("wgmma", "activate<kActivation>(odd ? got :", "activate<kActivation>(odd ? 1.f :"),
    ],
)
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch, kernel: str, old: str, new: str) -> None:
    from jitmx.sim import verify as verifying

    def broken(variant: Variant) -> str:
        source = render(variant)
        cut = source.replace(old, new)
        assert cut != source
        return cut

    monkeypatch.setattr(verifying, "render", broken)
    knobs = {"tile_m": 64, "grain": 64, "tile_n": 128, "depth": 2, "stages": 2} if kernel == "wgmma" else {}
    assert not verify(FAMILY.spec(kernel).variant(HOPPER, **knobs)).passed


class Chain:
    """Launches that follow one another over the same memory."""

    def __init__(self) -> None:
        self.memory = Memory()

    def __call__(self, one: Variant, problem: MoeProblem, **values: float) -> None:
        launch = FAMILY.launch(one, problem, 2)
        simulate(
            nvrtc.compile_ptx(render(one), nvrtc.options(HOPPER)), (launch.blocks, 1, 1),
            (one.threads, 1, 1), one.arguments.pack(values, launch.maps, encode), self.memory, entry=one.spec.entry,
            shared_bytes=launch.shared_bytes,
        )  # fmt: skip


@pytest.mark.parametrize("intermediate", [96, 128])
def test_four_launches_are_the_layer(intermediate: int) -> None:
    """Experts of no rows, of one, and of more than a tile; ids of none; parts where the gathered rows were."""
    rows, top, experts, hidden = 110, 2, 5, 160
    generator = np.random.default_rng(3)
    ids = generator.choice([-1, 0, 0, 0, 1, 3, 9], (rows, top)).astype(np.int32)
    ids[7, 0] = 4
    x = generator.standard_normal((rows, hidden)).astype(ml_dtypes.bfloat16)
    weights = generator.uniform(0.1, 1.0, (rows, top)).astype(np.float32)
    narrow = {"tile_m": 64, "grain": 16, "tile_n": 128, "depth": 2, "stages": 2}
    first, second = variant(**narrow), variant(product="down", **narrow)
    w13, packed13 = random_weight(first.knobs, experts, 2 * intermediate, hidden, generator)
    w2, packed2 = random_weight(first.knobs, experts, hidden, intermediate, generator)
    b13, b2 = (generator.standard_normal((experts, n)).astype(ml_dtypes.bfloat16) for n in (2 * intermediate, hidden))
    pairs, schedule = lists(ids, experts, 64)
    counts = np.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)
    assert counts.max() > 64 and not counts[2] and counts[4]
    offsets = np.cumsum([0, *counts]).astype(np.int32)

    chain = Chain()
    put = chain.memory.upload
    in_x, in_ids = put(x, "x"), put(ids, "ids")
    w13_, w2_ = (
        {
            name: put(array, name, constant=True)
            for name, array in zip(("weight", "scales", "bias"), (*packed[:2], bias), strict=True)
        }
        for packed, bias in ((packed13, b13), (packed2, b2))
    )
    listed: dict[str, float] = {
        name: put(array, name, constant=True)
        for name, array in (("pairs", pairs), ("offsets", offsets), ("schedule", schedule), ("weights", weights))
    }
    counters = chain.memory.allocate(4 * wgmma_arguments.COUNTERS, "counters")
    h = chain.memory.allocate(wgmma_arguments.rows_bytes(rows * top, intermediate), "h")
    parts = chain.memory.allocate(wgmma_arguments.rows_bytes(rows * top, hidden), "gathered rows, then parts")
    y = chain.memory.allocate(x.nbytes, "y")
    listed |= {"counters": counters, "alpha": ALPHA, "limit": LIMIT, "top": top, "tiles": len(schedule)}

    problems = [
        MoeProblem(rows, experts, top, hidden, intermediate, product=product)
        for product in ("gather", "up", "down", "combine")
    ]
    chain(gather.SPEC.variant(HOPPER, tile_m=64), problems[0], x=in_x, y=parts, k=hidden, **listed)
    chain(first, problems[1], x=parts, y=h, n=2 * intermediate, k=hidden, **w13_, **listed)
    chain(second, problems[2], x=h, y=parts, n=hidden, k=intermediate, **w2_, **listed)
    combine = choose("moe", problems[3], HOPPER).variant
    chain(combine, problems[3], x=parts, ids=in_ids, y=y, rows=rows, top=top, experts=experts, n=hidden)
    wanted = reference(
        x.astype(np.float64), ids, weights.astype(np.float64), w13, w2, b13.astype(np.float64), b2.astype(np.float64)
    )
    assert relative_l2(chain.memory.download(y, ml_dtypes.bfloat16, x.shape), wanted) <= 0.006


@pytest.mark.parametrize(
    "knobs",
    [{}, {"product": "down"}, {"tile_n": 128, "tile_m": 320, "stages": 4}, {"bias": False, "tile_m": 64, "stages": 8},
     {"bias": False, "product": "down", "tile_n": 256, "tile_m": 64, "stages": 4, "depth": 3}],
    ids=str,
)  # fmt: skip
def test_shared_memory_and_registers_are_what_the_template_lays_out(knobs: dict[str, Any]) -> None:
    """The compiler evaluates the template's own struct."""
    one = variant(**knobs)
    assert f"setmaxnreg_inc<{wgmma.multiplying_registers(one.knobs)}>" in render(one)
    claim(one, f"sizeof(Shared) == {wgmma.shared_bytes(one.knobs)}")


def loops_address_products_by_uniform_registers(built: Built, lines: list[str]) -> None:
    knobs = built.variant.knobs
    for width in range(knobs.grain, knobs.tile_m + 1, knobs.grain):
        columns = width if knobs.tile_m <= 256 else min(width, knobs.tile_m // 2)
        products = [number for number, line in enumerate(lines) if f"HGMMA.64x{columns}x16" in line]
        for before, after in itertools.pairwise(products[: 4 * wgmma.turn(knobs)]):
            assert not [line for line in lines[before:after] if "R2UR" in line], built.variant.name


def test_machine_code_keeps_its_contract_and_loops_address_products_by_uniform_registers(nightly: bool) -> None:
    """No spills, products of every width in pairs; a descriptor that is moved across costs a tenth."""
    sampled: list[dict[str, Any]] = [
        {},
        {"product": "down", "tile_m": 128, "grain": 16},
        # Each takes 7 s to compile.
        {"product": "down"},
        {"tile_n": 128, "tile_m": 320, "stages": 4},
        {"activation": "silu", "tile_m": 64, "depth": 1, "bias": False},
    ]
    some = sampled if nightly else sampled[:2]
    keep_contracts((variant(**knobs) for knobs in some), loops_address_products_by_uniform_registers)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"tile_m": 320}, "takes about 218 registers a thread of 160; the nearest legal value is tile_m=192"),
        ({"tile_m": 128, "tile_n": 256}, "registers a thread of 112; the nearest legal value is tile_m=64"),
        ({"tile_m": 48, "tile_n": 320, "grain": 64}, "does not divide tile_m=48; the nearest legal value is grain=16"),
        ({"tile_m": 64, "tile_n": 320}, "registers a thread of 88; the nearest legal value is tile_m=48"),
        ({"stages": 9}, "the nearest legal value is stages="),
        ({"product": "down", "activation": "silu"}, "activation='silu' is of product='up'"),
        ({"tile_m": 100}, "tile_m=100 is not one of"),
    ],
)
def test_knobs_that_do_not_fit_are_refused_with_the_nearest_that_do(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        variant(**knobs)


@pytest.mark.parametrize("kernel", ["wgmma", "gather"])
def test_targets_without_wgmma_are_refused(kernel: str) -> None:
    with pytest.raises(KnobError, match=r"needs the instructions of sm_90a"):
        FAMILY.spec(kernel).variant(arch.parse("sm_121"))


@pytest.mark.parametrize(
    ("kernel", "fields", "said"),
    [
        ("wgmma", {"product": "up", "scale_range": "full"}, "does not take scale_range='full', only 'normal'"),
        ("wgmma", {"product": "combine"}, "moe.wgmma makes one product, and not product=combine"),
        ("gather", {"product": "up"}, "moe.gather brings rows together and makes no product=up"),
    ],
)
def test_what_a_kernel_does_not_make_is_refused(kernel: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        FAMILY.fixed(MoeProblem(8192, **fields), kernel)
