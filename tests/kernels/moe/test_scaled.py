"""`moe.scaled`: products of experts with activations in MX formats, thread for thread, and the codes between them."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import claim, keep_contracts, some
from jitmx import arch, formats, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError
from jitmx.kernels.linear import scaled as dense
from jitmx.kernels.linear.layout import preferred_encoding
from jitmx.kernels.moe import MoeProblem, by_expert, scaled
from jitmx.kernels.moe.arguments import random_weight
from jitmx.kernels.moe.grouped_arguments import lists
from jitmx.kernels.moe.hidden import arrange, hidden_bytes, restore, rounded
from jitmx.kernels.moe.layout import ALPHA, LIMIT, activate
from jitmx.registry.case import relative_l2
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim import verify as verifying
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import encode
from jitmx.sim.verify import Verdict, verify
from jitmx.toolchain import nvrtc
from strategies import ARCHES, examples

Array = npt.NDArray[Any]

FAMILY = kernels.family("moe")
X_FORMATS = ("mxfp8", "mxfp6", "mxfp4")
TARGETS = ("sm_80", "sm_90a", "sm_120a", "sm_121a")
SIZES = st.integers(1, 128).map(lambda blocks: 32 * blocks)
PROBLEMS = st.builds(
    MoeProblem,
    m=st.integers(1, 20_000),
    experts=st.integers(1, 512),
    top=st.integers(1, 8),
    hidden=SIZES,
    intermediate=SIZES,
    product=st.sampled_from(["layer", "up", "down"]),
    activation=st.sampled_from(["swiglu_oai", "silu", "plain", "relu2"]),
    bias=st.booleans(),
    encoding=st.sampled_from(["rotated", "nibble"]),
    scale_range=st.sampled_from(["normal", "full"]),
    x_format=st.sampled_from(X_FORMATS),
    scale_rule=st.sampled_from(formats.SCALE_RULES),
    weight_on=st.sampled_from(["output", "input"]),
)


def variant_for(target: str, x_format: str = "mxfp8", **knobs: Any) -> Variant:
    """A variant with the product that suits the target best."""
    chip = arch.parse(target)
    best = {
        "atom": dense.atom(x_format, chip), "pdl": "pdl" in chip.features, "encoding": preferred_encoding(chip),
    }  # fmt: skip
    return scaled.SPEC.variant(chip, x_format=x_format, **{**best, **knobs})


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(15))
@given(problem=PROBLEMS, multiprocessors=st.integers(20, 256))
def test_the_heuristic_is_legal_and_both_products_take_the_same_tiles_of_rows(
    target: Arch, problem: MoeProblem, multiprocessors: int
) -> None:
    choice = choose("moe", problem, target, multiprocessors=multiprocessors)
    assert choice.variant.spec.name == "scaled"
    assert choice.variant.knobs.atom == dense.atom(problem.x_format, target)
    assert FAMILY.launch(choice.variant, problem, multiprocessors).shared_bytes <= min(target.shared_bytes, 101_376)
    other = dataclasses.replace(problem, product="up" if problem.product == "down" else "down")
    again = choose("moe", other, target, multiprocessors=multiprocessors)
    assert again.variant.knobs.tile_m == choice.variant.knobs.tile_m


def test_few_rows_take_small_tiles_and_many_fill_large_ones() -> None:
    chip = arch.parse("sm_121")
    for x_format in X_FORMATS:
        for m, least, most in ((1, 8, 8), (16, 8, 8), (512, 16, 64), (8192, 64, 128)):
            knobs = scaled.KERNEL.heuristic(MoeProblem.on(chip, m=m, x_format=x_format), chip, chip.multiprocessors)
            assert least <= knobs["tile_m"] <= most, (x_format, m)


def test_one_row_has_a_block_for_every_multiprocessor() -> None:
    for target, multiprocessors in (("sm_121", 48), ("sm_120", 188), ("sm_90", 132)):
        chip = arch.parse(target)
        for experts, top, hidden, inner in ((128, 4, 2880, 2880), (256, 8, 2048, 512), (60, 4, 2048, 1408)):
            for product in ("up", "down"):
                problem = MoeProblem.on(
                    chip, m=1, experts=experts, top=top, hidden=hidden, intermediate=inner, product=product,
                    x_format="mxfp8",
                )  # fmt: skip
                variant = choose("moe", problem, chip, multiprocessors=multiprocessors).variant
                blocks = FAMILY.launch(variant, problem, multiprocessors).blocks
                assert blocks >= min(multiprocessors, top * -(-problem.sizes(product)[0] // 64))


@settings(max_examples=examples(40))
@given(rows=st.integers(1, 5), blocks=st.integers(1, 9), x_format=st.sampled_from(X_FORMATS), seed=st.integers(0, 99))
def test_codes_between_the_products_are_found_again(rows: int, blocks: int, x_format: str, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((rows, 32 * blocks))
    data = arrange(x, x_format, "floor")
    assert data.nbytes == hidden_bytes(MoeProblem(rows, top=1, intermediate=32 * blocks, x_format=x_format))
    np.testing.assert_array_equal(restore(data, rows, 32 * blocks, x_format), rounded(x, x_format, "floor"))


def test_a_code_lies_where_the_lane_finds_it_that_multiplies_by_it() -> None:
    """k = 77 of a row is the sixth value of lane 1's eight, in the first block of the second tile."""
    x = np.zeros((2, 128))
    x[1, 77] = 1.0
    eight, four = (np.flatnonzero(arrange(x, name, "floor")[:size]) for name, size in (("mxfp8", 256), ("mxfp4", 128)))
    assert eight.tolist() == [128 + 64 + 16 + 3]  # bytes k = 0, 4, 1, 5
    assert four.tolist() == [64 + 16 + 8 + 3]  # nibbles k = 0, 2, 4, 6, 1, 3, 5, 7: the lower one of the last byte
    assert arrange(x, "mxfp4", "floor")[64 + 16 + 8 + 3] < 16


# Knobs away from their defaults that change the instructions most, each on one target.
SAMPLE: dict[str, tuple[str, dict[str, Any]]] = {
    "eight rows, silu": ("sm_121a", {"tile_m": 8, "activation": "silu", "scale_rule": "even"}),
    "mxfp4, narrow": ("sm_121a", {"x_format": "mxfp4", "tile_n": 64, "warps_n": 4, "bias": False}),
    "mxfp4, wide, no gates": (
        "sm_120a", {"x_format": "mxfp4", "tile_n": 256, "tile_m": 32, "activation": "relu2", "scale_rule": "ceil"},
    ),
    "mxfp6, weights on the input": (
        "sm_121a", {"x_format": "mxfp6", "weight_on": "input", "encoding": "rotated", "warps_n": 4},
    ),
    "twin, plain": ("sm_90a", {"activation": "plain", "weight_on": "input", "tile_m": 32, "group": 1}),
    "twin, mxfp4": ("sm_89", {"x_format": "mxfp4", "tile_m": 64, "tile_n": 64, "warps_n": 4, "warps_m": 2}),
    "down, added by atomics": ("sm_121a", {"product": "down", "reduction": "atomic", "tile_m": 8, "stages": 2}),
    "down, mxfp4, many rows": (
        "sm_121a", {"product": "down", "x_format": "mxfp4", "tile_m": 128, "warps_n": 4, "warps_m": 2, "stages": 3},
    ),
    "down, mxfp6, no weights": (
        "sm_120a", {"product": "down", "x_format": "mxfp6", "weight_on": "input", "tile_n": 64, "warps_n": 4},
    ),
    "twin, down": ("sm_90a", {"product": "down", "tile_m": 64, "bias": False, "encoding": "nibble"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_a_variant_passes_its_cases_and_they_reach_its_code(name: str, simulated: Callable[[Variant], Verdict]) -> None:
    target, knobs = SAMPLE[name]
    assert simulated(variant_for(target, **knobs)).error <= 0.006


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("product", ["up", "down"])
@pytest.mark.parametrize("x_format", X_FORMATS)
def test_what_a_target_runs_by_default_passes_its_cases(
    target: str, product: str, x_format: str, simulated: Callable[[Variant], Verdict]
) -> None:
    chip = arch.parse(target)
    for m in (16, 512):
        problem = MoeProblem.on(chip, m=m, product=product, x_format=x_format)
        assert simulated(choose("moe", problem, chip).variant).error <= 0.006


@pytest.mark.parametrize("product", ["up", "down"])
@pytest.mark.parametrize("x_format", X_FORMATS)
def test_the_twin_differs_in_the_atom_alone(x_format: str, product: str) -> None:
    sources = [
        render(variant_for("sm_121a", x_format, product=product, **knobs)).splitlines()
        for knobs in ({"atom": "twin"}, {})
    ]
    assert len(sources[0]) == len(sources[1])
    changed = [line for twin, line in zip(*sources, strict=True) if twin != line]
    assert [line.split()[1] for line in changed] == ["atom", "Atom"]


class Layer:
    """A layer of random experts on the simulator: both products and the sum, one launch after the other."""

    def __init__(self, target: str, problem: MoeProblem) -> None:
        self.chip, self.problem = arch.parse(target), problem
        generator = np.random.default_rng(11)
        self.x = generator.standard_normal((problem.m, problem.hidden)).astype(ml_dtypes.bfloat16)
        self.ids = generator.integers(-1, problem.experts, (problem.m, problem.top)).astype(np.int32)
        self.weights = generator.uniform(0.1, 1.0, (problem.m, problem.top)).astype(np.float32)
        self.values, self.packed = zip(
            *(random_weight(_Weights(problem.encoding), problem.experts, *problem.sizes(product), generator)
              for product in ("up", "down")),
            strict=True,
        )  # fmt: skip
        self.biases = [
            generator.standard_normal((problem.experts, problem.sizes(product)[0])).astype(ml_dtypes.bfloat16)
            for product in ("up", "down")
        ]

    def run(self) -> Array:
        """y, in float64."""
        problem, memory = self.problem, Memory()
        pairs_of = problem.m * problem.top
        up, down = (self._variant(product) for product in ("up", "down"))
        pairs, schedule = lists(self.ids, problem.experts, up.knobs.tile_m)
        x, ids = memory.upload(self.x, "x"), memory.upload(self.ids, "ids")
        listed: dict[str, float] = {
            name: memory.upload(item, name)
            for name, item in (("pairs", pairs), ("schedule", schedule), ("weights", self.weights))
        }
        listed |= {"ids": ids, "tiles": len(schedule), "alpha": ALPHA, "limit": LIMIT}
        h = memory.upload(np.full(hidden_bytes(problem), 255, np.uint8), "h", writable=True)
        out = np.zeros((problem.m if problem.reduction == "atomic" else pairs_of, problem.hidden), np.uint16)
        parts = memory.upload(out, "parts", writable=True)
        for i, (variant, source, to) in enumerate(((up, x, h), (down, h, parts))):
            (words, scales, _), (n, k) = self.packed[i], problem.sizes(("up", "down")[i])
            weight = {
                name: memory.upload(item, f"{name} {i}")
                for name, item in (("weight", words), ("scales", scales), ("bias", self.biases[i]))
            }
            self._launch(variant, memory, x=source, y=to, n=n, k=k, **weight, **listed)
        if problem.reduction == "atomic":
            return memory.download(parts, np.dtype(np.uint16), out.shape).view(ml_dtypes.bfloat16).astype(np.float64)
        y = memory.allocate(problem.m * problem.hidden * 2, "y")
        self._launch(self._variant("combine"), memory, x=parts, ids=ids, y=y, n=problem.hidden)
        found = memory.download(y, np.dtype(np.uint16), (problem.m, problem.hidden))
        return found.view(ml_dtypes.bfloat16).astype(np.float64)

    def wanted(self, x_format: str) -> Array:
        """y with x and h rounded to a format, h to bf16 before, in float64; without any rounding for "bf16"."""
        problem = self.problem
        x = rounded(self.x.astype(np.float64), x_format, problem.scale_rule)
        y = np.zeros(x.shape)
        for row, slot in np.argwhere(self.ids >= 0):
            expert, weight = self.ids[row, slot], float(self.weights[row, slot])
            scales = (weight, 1.0) if problem.weight_on == "input" else (1.0, weight)
            rows = scales[0] * (self.values[0][expert] @ x[row]) + self.biases[0][expert].astype(np.float64)
            h = activate(rows, problem.activation)
            if x_format != "bf16":
                h = rounded(h.astype(ml_dtypes.bfloat16).astype(np.float64), x_format, problem.scale_rule)
            y[row] += scales[1] * (self.values[1][expert] @ h + self.biases[1][expert].astype(np.float64))
        return y

    def _variant(self, product: str) -> Variant:
        problem = dataclasses.replace(self.problem, product=product)
        knobs = None if product == "combine" else {"kernel": by_expert(problem)}
        return choose("moe", problem, self.chip, knobs=knobs).variant

    def _launch(self, variant: Variant, memory: Memory, **values: float) -> None:
        values |= {"rows": self.problem.m, "top": self.problem.top, "experts": self.problem.experts}
        product = getattr(variant.knobs, "product", "combine")
        geometry = FAMILY.launch(variant, dataclasses.replace(self.problem, product=product), 1)
        simulate(
            nvrtc.compile_ptx(render(variant), nvrtc.options(self.chip)), (geometry.blocks, 1, 1),
            (variant.threads, 1, 1), variant.arguments.pack(values, geometry.maps, encode), memory,
            entry=variant.spec.entry, shared_bytes=geometry.shared_bytes,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Weights:
    """What random_weight reads of knobs."""

    encoding: str
    scale_range: str = "normal"


# Against the layer in float64 without any rounding: what a format costs, through both products.
COST = {"bf16": 0.006, "mxfp8": 0.06, "mxfp6": 0.06, "mxfp4": 0.25}


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("x_format", COST)
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_a_layer_costs_no_more_than_stated_and_is_what_its_codes_stand_for(target: str, x_format: str) -> None:
    problem = MoeProblem.on(arch.parse(target), m=13, experts=3, top=2, hidden=160, intermediate=96, x_format=x_format)
    if x_format == "bf16":
        problem = dataclasses.replace(problem, m=70)
    layer = Layer(target, problem)
    found = layer.run()
    assert COST[x_format] / 6 <= relative_l2(found, layer.wanted("bf16")) <= COST[x_format]
    assert relative_l2(found, layer.wanted(x_format)) <= 0.006


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("activation", ["silu", "plain", "relu2"])
@pytest.mark.parametrize("reduction", ["ordered", "atomic"])
def test_layers_of_other_models_go_through_the_same_launches(activation: str, reduction: str) -> None:
    problem = MoeProblem.on(
        arch.parse("sm_121a"), m=9, experts=4, top=2, hidden=96, intermediate=160, x_format="mxfp8",
        activation=activation, reduction=reduction, weight_on="input" if activation == "silu" else "output",
    )  # fmt: skip
    layer = Layer("sm_121a", problem)
    assert relative_l2(layer.run(), layer.wanted("mxfp8")) <= (0.01 if reduction == "atomic" else 0.006)


def test_blocks_past_the_last_feature_are_found_if_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(variant: Variant) -> str:
        source = render(variant)
        cut = source.replace("args.k / 32)", "args.k / 32 + 4)")
        assert cut != source
        return cut

    monkeypatch.setattr(verifying, "render", broken)
    assert not verify(variant_for("sm_121a", product="down")).passed


def test_a_scale_of_the_wrong_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(variant: Variant) -> str:
        source = render(variant)
        cut = source.replace("feature, words, scale)", "feature, words, scale + (feature / 32 == 1 ? 1u : 0u))")
        assert cut != source
        return cut

    monkeypatch.setattr(verifying, "render", broken)
    assert not verify(variant_for("sm_121a")).passed


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120f", "sm_121a"])
@pytest.mark.parametrize("product", ["up", "down"])
def test_the_machine_code_keeps_its_contract(target: str, product: str, nightly: bool) -> None:
    chip, variants = arch.parse(target), []
    for x_format, m in itertools.product(X_FORMATS, (1, 512, 8192)):
        variant = choose("moe", MoeProblem.on(chip, m=m, product=product, x_format=x_format), chip).variant
        wanted = {"twin": "HMMA", "mxf8f6f4": "QMMA", "mxf4": "OMMA"}[dense.atom(x_format, chip)]
        promised = variant.spec.contract(variant.knobs, chip)
        assert wanted in promised.require[0] and not promised.max_spill_bytes
        variants.append(variant)
    keep_contracts(some(variants, nightly, every=4))


@pytest.mark.parametrize("product", ["up", "down"])
def test_every_geometry_spills_nothing_with_as_many_blocks_as_the_model_lets_it_have(
    product: str, nightly: bool
) -> None:
    chip = arch.parse("sm_121a")
    blocks = list(scaled._blocks(MoeProblem.on(chip, x_format="mxfp8"), product, chip))
    sizes = [(knobs.tile_n, knobs.tile_m, knobs.warps_n, knobs.warps_m) for knobs in blocks]
    assert all(sizes.count(geometry) == 1 for geometry in dense.GEOMETRIES)
    keep_contracts(some((scaled.SPEC.variant(chip, **knobs.as_dict()) for knobs in blocks), nightly))


@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_atomics_add_eight_values_an_instruction(target: str) -> None:
    knobs = {"product": "down", "reduction": "atomic"}
    variants = [variant_for(target, **knobs), FAMILY.spec("grouped").variant(arch.parse(target), **knobs)]
    for variant in variants:
        assert any("REDG" in pattern for pattern in variant.spec.contract(variant.knobs, variant.arch).require)
    keep_contracts(variants)


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("product", ["up", "down"])
@pytest.mark.parametrize("geometry", dense.GEOMETRIES)
def test_shared_memory_is_what_union_shared_takes(geometry: tuple[int, int, int, int], product: str) -> None:
    sizes = dict(zip(("tile_n", "tile_m", "warps_n", "warps_m"), geometry, strict=True))
    for x_format in ("mxfp8", "mxfp4"):
        variant = variant_for("sm_121a", x_format, product=product, **sizes)
        claim(variant, f"sizeof(Shared) == {scaled.shared_bytes(variant.knobs)}")


@pytest.mark.parametrize("product", ["up", "down"])
def test_what_the_tuner_would_try_is_legal_and_starts_with_the_heuristic(product: str) -> None:
    chip = arch.parse("sm_121a")
    problem = MoeProblem.on(chip, m=256, product=product, x_format="mxfp4")
    tried = scaled.KERNEL.candidates(problem, chip, chip.multiprocessors)
    assert tried[0] == FAMILY.tuned(problem, chip, chip.multiprocessors, "scaled")
    for knobs in tried:
        FAMILY.check(problem, FAMILY.spec("scaled").variant(chip, **knobs, **FAMILY.fixed(problem, "scaled")))


@pytest.mark.parametrize(
    ("target", "knobs", "said"),
    [
        ("sm_90a", {"atom": "mxf8f6f4"}, "not what multiplies x_format='mxfp8' on sm_90a; use atom='twin'"),
        ("sm_121a", {"x_format": "mxfp4", "atom": "mxf8f6f4"}, "x_format='mxfp4' on sm_121a; use atom='mxf4'"),
        ("sm_121a", {"product": "down", "scale_rule": "even"}, "scale_rule='even' is of product='up'"),
        ("sm_121a", {"stages": 3}, "stages=3 is of product='down'; with product='up' leave it at 4"),
        ("sm_121a", {"warps_m": 2}, "over 8 warps a block; the nearest legal value is warps_n=4"),
        ("sm_89", {"pdl": True}, "pdl=True needs sm_90 or newer"),
        ("sm_121a", {"product": "down", "tile_m": 128, "warps_n": 4, "warps_m": 2, "stages": 8}, "at most 101376 B"),
    ],
)
def test_knobs_that_do_not_go_together_are_refused(target: str, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError) as error:
        variant_for(target, **knobs)
    assert said in str(error.value)


def test_a_tile_by_name_is_one_of_those_there_are_or_refused_with_the_nearest() -> None:
    assert scaled.KERNEL.tile is not None
    chip = arch.parse("sm_121a")
    for m, n in ((8, 128), (16, 128), (32, 128), (64, 128), (128, 128), (64, 256), (32, 64)):
        for product in ("up", "down"):
            problem = MoeProblem.on(chip, m=100, product=product, x_format="mxfp4")
            knobs = {"kernel": "scaled", **scaled.KERNEL.tile(m, n, None, None)}
            chosen = choose("moe", problem, chip, knobs=knobs).variant.knobs
            assert (chosen.tile_m, chosen.tile_n, chosen.atom) == (m, n, "mxf4")
    assert scaled.KERNEL.tile(16, 128, 128, 6)["stages"] == 6
    with pytest.raises(KnobError, match="no tile 48x128x64; the nearest it has is 64x128x128"):
        scaled.KERNEL.tile(48, 128, 64, None)


def test_problems_that_it_cannot_serve_are_refused_with_the_reason() -> None:
    for problem, said in (
        (MoeProblem(), "moe.scaled does not take x_format='bf16', only mxfp8, mxfp6 or mxfp4"),
        (MoeProblem(x_format="mxfp8", product="combine"), "makes one product, and not product=combine"),
    ):
        with pytest.raises(KnobError, match=said):
            FAMILY.fixed(problem, "scaled")


COPIES = """
#include "jitmx/mma/block_scaled.cuh"
#include "jitmx/moe/hidden_codes.cuh"
using namespace jitmx;
using Product = ScaledProduct<Mxfp8, Nibble, BlockScaledTwin<Mxfp8>, 64, 128, 4, 2>;
extern "C" __global__ void copies(u8* h, int features, int chunk, u32* codes, u32* scales) {
  __shared__ Product::Stage stage;
  const HiddenRows<Mxfp8> rows(h, 128, features);
  const HiddenCopy<Product, Mxfp8> copy(rows, 0, 128, features / 32);
  copy.start(stage, chunk);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * 32; i += Product::kThreads) codes[i] = reinterpret_cast<u32*>(stage.codes)[i];
  for (int i = threadIdx.x; i < 128; i += Product::kThreads) scales[i] = stage.scales[i];
}
"""


def test_rows_of_h_in_codes_may_be_2_to_the_32_bytes_from_the_first_of_their_tile() -> None:
    """As many features are too many tiles of k for a case: a kernel copies a chunk of 128 rows as a product does."""
    features = 3 << 24
    chunks, chunk = features // 128, features // 128 - 1
    place = np.arange(128) * chunks + chunk
    assert int(place[-1]) * 128 > 1 << 32
    codes = np.repeat(np.arange(128, dtype=np.uint32)[:, None] * 0x01010101, 32, axis=1)
    scales = np.arange(128, dtype=np.uint32)[:, None] + 0x41000000
    memory = Memory()
    at = np.concatenate([place[:, None] * 128 + np.arange(0, 128, 4), 128 * chunks * 128 + place[:, None] * 4], axis=1)
    h = memory.upload_far(np.concatenate([codes, scales], axis=1), at, 128 * chunks * 132, "h")
    found, marks = memory.allocate(codes.nbytes, "codes"), memory.allocate(scales.nbytes, "scales")
    simulate(
        nvrtc.compile_ptx(COPIES, nvrtc.options(arch.parse("sm_90a"))), (1, 1, 1), (256, 1, 1),
        struct.pack("=QiiQQ", h, features, chunk, found, marks), memory,
    )  # fmt: skip
    assert np.array_equal(memory.download(found, np.uint32, codes.shape), codes)
    assert np.array_equal(memory.download(marks, np.uint32, scales.shape), scales)
