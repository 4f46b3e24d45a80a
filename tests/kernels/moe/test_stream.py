"""`moe.stream` computes the layer, thread for thread and in any order, and Python knows what the template lays out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts import claim, keep_contracts, see_in_ptx
from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError, SimulationError
from jitmx.kernels.linear.layout import TILE_K
from jitmx.kernels.moe import MOST_READS, MoeProblem, layer
from jitmx.kernels.moe.arguments import GATE, Routing, make_case
from jitmx.kernels.moe.stream import COLUMNS, HANDSHAKES, KERNEL, SCALINGS, SPEC, held_rows, most_items, shared_bytes
from jitmx.kernels.moe.wgmma import LEAST_ROWS, MANY_ROWS
from jitmx.kernels.routing.knobs import MAX_EXPERTS
from jitmx.registry.case import Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict, run
from jitmx.toolchain import nvrtc
from strategies import ARCHES, SMALL_LAYERS, examples, variants

Orders = Callable[[], Iterator[None]]
Passes = Callable[[Variant, Case], None]

FAMILY = kernels.family("moe")
HOPPER = arch.parse("sm_90")
LARGE = tuple(target for target in ARCHES if target.shared_bytes >= 200 << 10 and "tma" in target.features)
BULK = tuple(target for target in ARCHES if "tma" in target.features)
MODELS = {
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "many small": (256, 8, 2048, 512),
    "sixty": (60, 4, 2048, 1408),
    "128 of 768": (128, 8, 2048, 768),
    "8 of 14336": (8, 2, 4096, 14336),
}


def variant(**knobs: Any) -> Variant:
    return SPEC.variant(HOPPER, **knobs)


# Knobs away from their defaults that change the instructions most.
SAMPLE: dict[str, dict[str, Any]] = {
    "one column, shortest chunks": {"columns": 1, "warps": 4, "chunk": 1, "unroll": 1},
    "one column, silu": {"columns": 1, "warps": 14, "chunk": 8, "unroll": 4, "activation": "silu", "scaling": "fold"},
    "two columns, no bias": {"columns": 2, "warps": 4, "chunk": 2, "stages": 3, "unroll": 2, "bias": False},
    "two columns, post": {"columns": 2, "warps": 10, "chunk": 3, "stages": 4, "scaling": "post", "pdl": False},
    "four columns, halves": {"columns": 4, "warps": 8, "chunk": 4, "stages": 3, "unroll": 2, "scaling": "halves"},
    "four columns, all scales": {"columns": 4, "warps": 16, "chunk": 5, "stages": 3, "scale_range": "full"},
    "eight columns, bare": {"columns": 8, "warps": 8, "chunk": 5, "stages": 2, "activation": "silu"},
    "eight columns, halves": {"columns": 8, "warps": 4, "chunk": 3, "scaling": "halves", "encoding": "nibble"},
    "eight columns, all scales, nibbles": {
        "columns": 8, "warps": 8, "chunk": 5, "stages": 1, "unroll": 5, "scaling": "post", "scale_range": "full",
        "encoding": "nibble", "bias": False, "pdl": False,
    },
    "eight columns, fold": {"columns": 8, "warps": 4, "chunk": 7, "unroll": 7, "scaling": "fold"},
    "residual": {"columns": 4, "warps": 12, "chunk": 9, "residual": True},
    "residual, counters": {"columns": 2, "warps": 4, "chunk": 3, "residual": True, "handshake": "counters"},
    "pair": {"columns": 4, "warps": 12, "chunk": 9, "residual": "pair"},
    "chunks of a row and more": {"columns": 1, "warps": 4, "chunk": 45, "stages": 1, "unroll": 9},
}  # fmt: skip


def test_the_sample_has_every_scaling_and_number_of_columns() -> None:
    sampled = [variant(**knobs).knobs for knobs in SAMPLE.values()]
    assert {knobs.scaling for knobs in sampled} == set(SCALINGS)
    assert {knobs.columns for knobs in sampled} == set(COLUMNS)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_variant_passes_its_cases_and_they_reach_its_code(name: str, simulated: Callable[[Variant], Verdict]) -> None:
    # Other inputs on a workspace in use may be off by twice the gate: parts of a row may cancel there.
    assert simulated(variant(**SAMPLE[name])).error <= 2 * GATE


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", LARGE, ids=str)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_what_a_target_runs_by_default_passes_its_cases(
    target: Arch, m: int, simulated: Callable[[Variant], Verdict]
) -> None:
    problem = MoeProblem.on(target, m=m, experts=96)  # no table knows it
    knobs = FAMILY.tuned(problem, target, target.multiprocessors, "stream")
    usual = SPEC.variant(target, **knobs, **FAMILY.fixed(problem, "stream"))
    chosen = choose("moe", problem, target).variant
    assert chosen.spec.name == "token" if m == 1 else chosen == usual
    assert simulated(usual).error <= 0.006


# Routings: experts of one row and of many, none; blocks share rows, warps share rows, some warps have nothing.
SHARED = {
    "an item": (2, 96, 608, Routing(np.array([[1]], np.int32)), 8),
    "many items": (3, 160, 160, Routing(np.array([[0, 2]] * 5 + [[1, 1], [2, -1], [0, 1]], np.int32)), 3),
}


@functools.cache
def small() -> Variant:
    return variant(columns=2, warps=8, chunk=2, stages=2, unroll=2)


@functools.cache
def source(reversed_blocks: bool = False) -> str:
    text = render(small())
    if reversed_blocks:
        # Who comes first is the last block then, in lists of lanes and at counters.
        name = re.compile(r"\bblockIdx\.x\b")
        assert name.search(text)
        text = name.sub("(gridDim.x - 1u - blockIdx.x)", text)
    return nvrtc.compile_ptx(text, nvrtc.options(HOPPER))


@pytest.mark.parametrize("shape", [pytest.param("an item", marks=pytest.mark.nightly), "many items"])
def test_the_order_in_which_blocks_and_warps_run_changes_no_bit(shape: str, orders: Orders) -> None:
    experts, hidden, intermediate, routing, blocks = SHARED[shape]
    problem = MoeProblem(len(routing.ids), experts, routing.ids.shape[1], hidden, intermediate)
    case = make_case(small(), FAMILY.launch(small(), problem, blocks), problem, routing, 0)
    found: list[npt.NDArray[Any]] = []

    def kept(outputs: Any) -> float:
        found.append(outputs[0].view(np.uint16).copy())
        return case.check(outputs)

    for ptx in (source(), source(reversed_blocks=True)):
        for _ in orders():
            assert run(dataclasses.replace(case, check=kept), small(), ptx)[0] <= case.gate
    assert len(found) == 6 and all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("handshake", "old", "new"),
    [
        ("counters", r"while \(load_acquire\(&counters\.ready.*\{\}", ";"),
        ("counters", r"while \(load_acquire\(&counters\.generation\) == generation\) \{\}", ";"),
        ("data", r"while \(lacks_half\(b\)\).*;", ";"),
        ("data", r"while \(lacks_word\(one\[s\]\)\).*;", ";"),
        ("data", r"split\.shared\(.*\);", "false;"),
        ("data", r"mbarrier_wait\(shared_address\(&shared\.head_full.*\);", ";"),
        ("data", r"ring\.wait\(\);", ";"),
    ],
    ids=["counted h", "all blocks", "h", "sums", "rows of two blocks", "rows of two warps", "weights"],
)
def test_what_is_not_waited_for_or_added_is_found(
    caught: Callable[[Variant, str], bool], handshake: str, old: str, new: str
) -> None:
    one = dataclasses.replace(small(), knobs=dataclasses.replace(small().knobs, handshake=handshake))
    text = render(one)
    cut = re.sub(old, new, text)
    assert cut != text
    assert caught(one, cut)


# Rows of each expert; the last routing is to experts of which a map knows some.
MANY = {
    "5 to 12": Routing(np.repeat(np.arange(6, dtype=np.int32), (5, 8, 9, 12, 1, 4))[:, None]),
    "all of one": Routing(np.full((64, 1), 3, np.int32)),
    "some of a map": Routing(
        np.random.default_rng(0).choice(6, (32, 2), p=(0.4, 0.2, 0.2, 0.1, 0.1, 0.0)).astype(np.int32),
        np.array([4, -1, 0, 5, -1, 1], np.int32),
    ),
}


def of_eight(handshake: str = "data") -> Variant:
    """Items of eight rows."""
    return variant(columns=8, warps=4, chunk=2, stages=2, unroll=2, handshake=handshake)


@functools.cache
def wide(lacks_room: str | None = None) -> tuple[Variant, str]:
    """The same and its PTX; `lacks_room`: what is put in the place of that question."""
    one = of_eight()
    text = render(one)
    if lacks_room is not None:
        text, count = re.subn(r"if \(lacks_room\(.*\)\) ", f"if ({lacks_room}) ", text)
        assert count == 1
    return one, nvrtc.compile_ptx(text, nvrtc.options(HOPPER))


def many_case(one: Variant, routing: Routing, blocks: int) -> Case:
    problem = MoeProblem(len(routing.ids), 6, routing.ids.shape[1], 96, 160)
    return make_case(one, FAMILY.launch(one, problem, blocks), problem, routing, 0)


@pytest.mark.parametrize("handshake", HANDSHAKES)
@pytest.mark.parametrize("routing", MANY)
@pytest.mark.parametrize("blocks", [2, 12], ids=["two blocks", "a block an item"])
def test_experts_of_more_rows_than_four_are_read_by_eight(
    routing: str, blocks: int, handshake: str, passes: Passes
) -> None:
    one = of_eight(handshake)
    passes(one, many_case(one, MANY[routing], blocks))


def test_items_have_four_rows_where_blocks_have_no_room_for_eight() -> None:
    """Room is for two items of eight, or for as many of four as there may be."""
    routing = MANY["all of one"]
    few, each = (many_case(wide()[0], routing, blocks) for blocks in (5, 12))
    with pytest.raises(SimulationError, match="shared memory outside of it"):
        run(few, *wide(lacks_room="false"))
    one, ptx = wide()
    spent = run(each, one, ptx)[1].thread_instructions
    assert run(each, *wide(lacks_room="false"))[1].thread_instructions < spent
    error, by_four = run(each, *wide(lacks_room="true"))
    assert error <= each.gate and by_four.thread_instructions > 1.2 * spent


def fixed_bytes(one: Variant) -> int:
    """Shared memory in front of the activations, by what is told of a launch with one row of them."""
    return shared_bytes(one.knobs, MoeProblem(1, 1, 1, TILE_K, TILE_K), 1) - (TILE_K * 2 + 64)


@settings(max_examples=examples(50))
@given(one=variants(SPEC))
def test_shared_memory_is_laid_out_as_python_counts_it(one: Variant) -> None:
    claim(one, f"__builtin_offsetof(Shared, rows) == {fixed_bytes(one)}")


@settings(max_examples=examples(200))
@given(data=st.data(), columns=st.sampled_from(COLUMNS), m=st.integers(1, 64), top=st.integers(1, 8))
def test_no_routing_makes_more_items_than_there_is_room_for(
    data: st.DataObject, columns: int, m: int, top: int
) -> None:
    experts = data.draw(st.integers(1, 40))
    ids = np.random.default_rng(data.draw(st.integers(0, 1 << 20))).integers(-1, experts, (m, top))
    counts = np.bincount(ids[ids >= 0], minlength=experts)
    assert (-(-counts // columns)).sum() <= most_items(MoeProblem(m, experts, top), columns)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("experts", [1, 2, 3])
def test_some_routing_makes_as_many_items_as_there_is_room_for(columns: int, m: int, top: int, experts: int) -> None:
    """Every way to give so many pairs to experts, by how many each is given."""
    counts = itertools.product(range(m * top + 1), repeat=experts)
    most = max(sum(-(-n // columns) for n in given) for given in counts if sum(given) <= m * top)
    assert most == most_items(MoeProblem(m, experts, top), columns)


def stretches(total: int, grain: int, blocks: int) -> Iterator[tuple[int, int]]:
    """First and last tile of each block's stretch, of `total` tiles dealt by `grain` of them; none of empty ones."""
    ends = [block * (total // grain // blocks) + min(block, total // grain % blocks) for block in range(blocks + 1)]
    return ((a * grain, b * grain - 1) for a, b in itertools.pairwise(ends) if a < b)


@settings(max_examples=examples(200))
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any),
    blocks=st.integers(1, 40),
    rows=st.integers(1, 12),
    tiles=st.integers(1, 4),
)
def test_blocks_have_room_for_the_rows_of_any_stretch_of_items_of_four_at_most(
    counts: list[int], blocks: int, rows: int, tiles: int
) -> None:
    """Those of eight are what a launch has where they fit."""
    problem, size = MoeProblem(sum(counts), len(counts), 1), rows * tiles
    for columns in COLUMNS:
        limit = min(columns, 4)
        items = [min(limit, count - at) for count in counts for at in range(0, count, limit)]
        for grain in (1, tiles):
            for first, last in stretches(len(items) * size, grain, blocks):
                held = sum(items[first // size : last // size + 1])
                assert held <= held_rows(variant(columns=columns).knobs, problem, blocks)


@pytest.mark.parametrize("target", BULK, ids=str)
@settings(max_examples=examples(100))
@given(problem=SMALL_LAYERS, multiprocessors=st.integers(1, 256))
@example(problem=MoeProblem(64, hidden=4096, intermediate=4096), multiprocessors=40)
@example(problem=MoeProblem(45, 133, 3, 32, 3744, bias=False), multiprocessors=133)
@example(problem=MoeProblem(64, experts=512, top=8, hidden=4096, intermediate=4096), multiprocessors=1)
def test_a_layer_in_one_launch_fits_shared_memory_and_goes_to_stream_where_that_is_large(
    target: Arch, problem: MoeProblem, multiprocessors: int
) -> None:
    for count in (target.multiprocessors, multiprocessors):
        chosen = choose("moe", problem, target, multiprocessors=count).variant
        assert FAMILY.launch(chosen, problem, count).shared_bytes <= target.shared_bytes
        if chosen.spec.name == "token":
            assert problem.m == 1 and target in LARGE
            continue
        knobs, fixed = FAMILY.tuned(problem, target, count, "stream"), FAMILY.fixed(problem, "stream")
        assert not knobs.keys() & fixed.keys()
        usual = SPEC.variant(target, **knobs, **fixed)
        # Chosen for no more multiprocessors than a check of the knobs assumes, and where weights are read about once.
        fits = FAMILY.launch(usual, problem, min(count, target.multiprocessors)).shared_bytes <= target.shared_bytes
        once = problem.experts > MAX_EXPERTS or layer.reads(problem, knobs["columns"]) <= MOST_READS
        once &= not ("fused" in FAMILY.serving(problem, target) and problem.rows_an_expert >= MANY_ROWS)
        assert (chosen.spec is SPEC) == (fits and once and target in LARGE)


@pytest.mark.parametrize("target", ARCHES, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 64])
def test_layers_of_known_models_are_served_where_blocks_have_much_shared_memory(
    target: Arch, model: str, m: int
) -> None:
    experts, top, hidden, intermediate = MODELS[model]
    problem = MoeProblem.on(target, m=m, experts=experts, top=top, hidden=hidden, intermediate=intermediate)
    chosen = choose("moe", problem, target).variant
    measured = target == HOPPER and model == "gpt-oss-120b"  # by a table
    if target in LARGE and m > 1 and not measured:
        columns = FAMILY.tuned(problem, target, target.multiprocessors, "stream")["columns"]
        if layer.reads(problem, columns) > MOST_READS or chosen.spec.name == "fused":
            assert chosen.spec.name == ("fused" if "wgmma" in target.features else "grouped")
            assert problem.rows_an_expert >= (MANY_ROWS if layer.reads(problem, columns) <= MOST_READS else LEAST_ROWS)
            return
    assert measured or (chosen.spec.name == ("token" if m == 1 else "stream")) == (target in LARGE)
    if target in LARGE and not measured and m > 1:
        # Columns that no row fills cost as much as others.
        assert chosen.knobs.columns <= max(m, 1)


@pytest.mark.parametrize("target", LARGE, ids=str)
def test_the_machine_code_keeps_its_contract(target: Arch) -> None:
    keep_contracts(choose("moe", MoeProblem.on(target, m=m), target).variant for m in (1, 2, 16, 64))


def test_the_machine_code_of_more_columns_keeps_its_contract() -> None:
    keep_contracts(variant(**SAMPLE[f"eight columns, {scaling}"]) for scaling in ("bare", "halves"))


def no_word_of_64_bits_is_put_together(ptx: str) -> None:
    assert "bfi.b64" not in ptx


@pytest.mark.parametrize("columns", COLUMNS)
def test_no_word_of_64_bits_is_put_together_from_values_of_16(columns: int) -> None:
    """ptxas 13.0.88 has lost half of one, in `moe.decode` on an H200."""
    each = itertools.product(("swiglu_oai", "silu"), (True, False))
    variants = (variant(columns=columns, activation=activation, bias=bias) for activation, bias in each)
    see_in_ptx(variants, no_word_of_64_bits_is_put_together)


@pytest.mark.parametrize(
    ("target", "knobs", "said"),
    [
        ("sm_80", {"pdl": False}, r"moe.stream needs bulk copies, sm_90 or newer; on sm_80 use kernel=decode"),
        ("sm_90", {"scaling": "halves", "scale_range": "full"},
         "scaling=halves takes scale_range=normal only; use post or bare"),
        ("sm_90", {"scaling": "fold", "scale_range": "full"},
         "scaling=fold takes scale_range=normal only; use post or bare"),
        ("sm_90", {"columns": 3}, "columns=3 is not one of 1, 2, 4, 8"),
        ("sm_90", {"warps": 9}, "warps=9 is not one of 4, 8, 10, 12, 14, 16"),
        ("sm_90", {"unroll": 10}, "unroll=10 is above its limit; the nearest legal value is 9"),
        ("sm_90", {"chunk": 45}, "needs .* B of shared memory; a block on sm_90a has at most 232448 B"),
        ("sm_90", {"stages": 8}, "has at most 232448 B; .*stages=3"),
    ],
)  # fmt: skip
def test_knobs_that_do_not_fit_are_refused_with_the_remedy(target: str, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        SPEC.variant(arch.parse(target), **knobs)


def test_a_shape_that_does_not_fit_shared_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(KnobError, match=r"hidden=8192.* B of shared memory; .* at most 232448 B.*lower columns"):
        FAMILY.check(MoeProblem(64, hidden=8192), variant(columns=8))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"product": "up"}, "moe.stream makes whole layers, not product=up; use product='layer'"),
        ({"activation": "plain"}, "not take activation='plain', only swiglu_oai or silu"),
        ({"x_format": "mxfp8"}, "moe.stream does not take x_format='mxfp8', only bf16"),
        ({"weight_on": "input"}, "moe.stream does not take weight_on='input', only output"),
    ],
)
def test_what_it_does_not_make_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        FAMILY.fixed(MoeProblem(8, **fields), "stream")


@pytest.mark.parametrize("target", BULK, ids=str)
@pytest.mark.parametrize("m", [1, 2, 16, 64])
@pytest.mark.parametrize("scale_range", ["normal", "full"])
def test_what_the_tuner_would_try_is_legal_and_starts_with_the_heuristic(
    target: Arch, m: int, scale_range: str
) -> None:
    problem = MoeProblem.on(target, m=m, scale_range=scale_range)
    tried = KERNEL.candidates(problem, target, target.multiprocessors)
    assert tried[0] == FAMILY.tuned(problem, target, target.multiprocessors, "stream")
    assert len(tried) > 1 or target not in LARGE
    for knobs in tried:
        one = SPEC.variant(target, **knobs, **FAMILY.fixed(problem, "stream"))
        FAMILY.check(problem, one)
        assert FAMILY.launch(one, problem, target.multiprocessors).shared_bytes <= target.shared_bytes
        assert one.knobs.columns <= max(2 * m, 1)


def test_a_launch_is_a_block_a_multiprocessor_with_room_for_all_sums() -> None:
    problem = MoeProblem(5, 32, 4, 2880, 2880)
    hidden, parts = 5 * 4 * 2880 * 2, 5 * 4 * 180 * 2 * 16 * 4
    for handshake, buffers in (("counters", 1), ("data", 2)):
        geometry = FAMILY.launch(variant(columns=2, handshake=handshake), problem, 132)
        assert (geometry.blocks, geometry.cluster) == (132, 1)
        assert geometry.workspace == 4096 + buffers * hidden + parts


def test_x_and_weights_of_two_runs_of_tiles_meet_whatever_the_unrolling(passes: Passes) -> None:
    """A run shorter than what is unrolled must end: compilers have dropped the checks (test_unrolled_loops.py)."""
    routing = Routing(np.zeros((1, 1), np.int32))
    problem = MoeProblem(1, 1, 1, 64, 32)  # rows of one tile
    for unroll in range(1, 10):
        one = variant(columns=1, warps=4, chunk=9, stages=1, unroll=unroll)
        passes(one, make_case(one, FAMILY.launch(one, problem, 1), problem, routing, unroll))


def test_names_of_variants_tell_their_knobs_apart() -> None:
    one = variant(columns=2, bias=False, scaling="fold")
    assert one.name == "moe.stream.columns2-no_bias-fold"
    assert dataclasses.replace(one, knobs=dataclasses.replace(one.knobs, chunk=5)).name != one.name
