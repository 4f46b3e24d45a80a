"""`linear.scaled`: the quantizer bit for bit, a product by hand, the twin beside the instruction, rules and model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import claim, keep_contracts
from jitmx import arch, formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.linear import scaled
from jitmx.kernels.linear.arguments import EPSILON
from jitmx.kernels.linear.layout import pack, packed_tiles
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.case import Buffer, Case, relative_l2
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import encode
from jitmx.sim.verify import Verdict, run
from jitmx.toolchain import nvrtc
from strategies import ARCHES, examples

Array = npt.NDArray[Any]

FORMATS = {"mxfp8": "mxfp8", "mxfp6": "mxfp6e2m3", "mxfp4": "mxfp4"}
STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
ONE = 2  # the E2M1 code of 1.0
TARGETS = ("sm_80", "sm_121a")  # the twin and arithmetic in integers; the instruction, and conversions by instruction


def variant_for(target: str, activation: str = "mxfp8", **knobs: Any) -> Variant:
    """A variant with the product that suits the target best."""
    chip = arch.parse(target)
    best = {"atom": scaled.atom(activation, chip), "pdl": "pdl" in chip.features}
    return scaled.SPEC.variant(chip, activation=activation, **{**best, **knobs})


def ptx_of(variant: Variant) -> str:
    return nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))


def product(variant: Variant, x: Array, codes: Array, scales: Array) -> Array:
    """Y [rows, n] of X [rows, k] and a weight of codes [n, k] and scales [n, k / 32], as float64."""
    (rows, k), n = x.shape, len(codes)
    launch = scaled.launch(variant.knobs, LinearProblem(rows, n, k), 1)
    words, packed = pack(codes.astype(np.uint8), scales.astype(np.uint8), variant.knobs.encoding)
    found: list[Array] = []
    values = {
        "x": Buffer(x), "weight": Buffer(words, constant=True), "scales": Buffer(packed, constant=True),
        "y": Buffer(np.empty((rows, n), x.dtype), output=True),
        "workspace": Buffer(np.zeros(launch.workspace, np.uint8), scratch=True) if launch.workspace else 0,
        "epsilon": EPSILON, "rows": rows, "n": n, "k": k,
    }  # fmt: skip
    case = Case("", launch, values, lambda outputs: found.append(outputs[0]) or 0.0, 0.0)
    run(case, variant, ptx_of(variant))
    return found[0].astype(np.float64)


def quantized(x: Array, activation: str, rule: str = "floor") -> Array:
    """What the codes of X stand for, in float64."""
    item = formats.get(FORMATS[activation])
    with np.errstate(invalid="ignore"):
        return formats.dequantize(*formats.quantize(x.astype(np.float64), item, rule), item)


def hard_blocks(activation: str, dtype: str, rows: int, blocks: int) -> Array:
    """Rows of X of six kinds in turn: many magnitudes, any bits, tiny values, zeros, ties, the largest there are."""
    generator, kind = np.random.default_rng(7), np.dtype(STORED[dtype])
    item, shape = formats.get(FORMATS[activation]), (rows, blocks, formats.BLOCK)
    steps = formats.values(item)[: item.largest_code + 1]
    limit = 2.0**15 if dtype == "fp16" else 2.0**127
    spread = (-10, 8) if dtype == "fp16" else (-60, 60)
    powers = np.exp2(generator.integers(*spread, (rows, blocks, 1)))
    choices = [
        generator.standard_normal(shape) * powers,
        generator.integers(0, 256, (*shape[:2], formats.BLOCK * kind.itemsize), np.uint8).view(kind),
        generator.standard_normal(shape) * (2.0**-20 if dtype == "fp16" else 2.0**-129),
        np.zeros(shape),
        generator.choice((steps[1:] + steps[:-1]) / 2, shape) * powers * generator.choice([-1.0, 1.0], shape),
        generator.uniform(-1.9, 1.9, shape) * limit,
    ]
    with np.errstate(invalid="ignore", over="ignore"):
        kinds = [choice.astype(kind) for choice in choices]
    mixed = [kinds[row % 6][row] for row in range(rows)]
    return np.stack(mixed).reshape(rows, blocks * formats.BLOCK)


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize(
    ("activation", "rule", "dtype"),
    [(a, rule, "bf16") for a in FORMATS for rule in formats.SCALE_RULES] + [(a, "floor", "fp16") for a in FORMATS],
)
@pytest.mark.parametrize("target", TARGETS)
def test_times_the_identity_x_comes_out_as_the_reference_quantizes_it_bit_for_bit(
    target: str, activation: str, rule: str, dtype: str
) -> None:
    x = hard_blocks(activation, dtype, 18, 4)
    if rule == "floor":  # the largest value is no infinity; other rules round it to one
        x[5, 7] = ml_dtypes.finfo(x.dtype).max
    variant = variant_for(target, activation, scale_rule=rule, dtype=dtype, tile_m=16)
    found = product(variant, x, ONE * np.eye(128), np.full((128, 4), formats.SCALE_ONE))
    wanted = quantized(x, activation, rule)
    wanted[np.isnan(wanted).any(axis=1)] = np.nan  # a NaN block meets every feature, if only with zeros
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, wanted.astype(np.float32).astype(x.dtype).astype(np.float64))
    assert np.isfinite(wanted).all(axis=1).sum() >= 12


_BY_HAND = """
#include "jitmx/math/scalar.cuh"
#include "jitmx/mma/block_scaled.cuh"
using namespace jitmx;
struct Arguments {{ const Vec4* w; const u32* row_scales; const u32* x; const u32* token_scales; float* d; }};
extern "C" __global__ void by_hand(const Arguments args) {{
  const int lane = threadIdx.x;
  using Atom = {atom}<{format}>;
  RowFragment<{format}> w;
  w.set<{encoding}>(args.w[lane]);
  TokenFragment<{format}> x;
  for (int i = 0; i < {words}; ++i) x.r[i] = args.x[lane * {words} + i];
  float d[4] = {{}};
  Atom::add<{tile}>(d, w, x, Atom::rows<{tile}>(args.row_scales[lane]), Atom::tokens(args.token_scales[lane / 4]));
  for (int i = 0; i < 4; ++i) args.d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}}
"""


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("activation", FORMATS)
@pytest.mark.parametrize(("target", "atom"), [("sm_90a", "BlockScaledTwin"), ("sm_121a", "BlockScaled")])
def test_one_product_with_a_scale_of_its_own_for_every_row_column_and_block(
    target: str, atom: str, activation: str, tile: int
) -> None:
    """Rows of ones times columns of ones: D[r, c] = 32 (2^(r + c) + 2^(22 - r - c)), r and c in the scales alone."""
    encoding = ("Nibble", "Rotated")[tile]
    words = 2 if activation == "mxfp4" else 4
    text = _BY_HAND.format(
        atom=atom, format=activation.capitalize(), encoding=encoding, words=words, tile=tile,
    )  # fmt: skip
    row, column = np.arange(16), np.arange(8)
    lanes, _ = pack(np.full((16, 64), ONE, np.uint8), np.full((16, 2), 127, np.uint8), encoding.lower())
    scale = np.stack([127 + row, 127 + 15 - row], axis=-1)  # of both blocks
    row_scales = np.full(32, 0xDEADBEEF, np.uint32)
    for r in row:
        row_scales[4 * (r % 8) + 2 * tile + r // 8] = scale[r, 0] | scale[r, 1] << 8 | 0xFFFF0000
    token_scales = (127 + column | 127 + 7 - column << 8).astype(np.uint32) << 16 * tile
    token_scales |= np.uint32(0xFFFF0000 if tile == 0 else 0xFFFF)  # NaN where nothing may look
    one = {"mxfp8": 0x38383838, "mxfp6": 0x08080808, "mxfp4": 0x22222222}[activation]
    memory = Memory()
    inputs = (lanes, row_scales, np.full(32 * words, one, np.uint32), token_scales)
    addresses = [memory.upload(item, str(i)) for i, item in enumerate(inputs)]
    d = memory.allocate(16 * 8 * 4, "d")
    arguments = np.array([*addresses, d], np.uint64).tobytes()
    simulate(nvrtc.compile_ptx(text, nvrtc.options(arch.parse(target))), (1, 1, 1), (32, 1, 1), arguments, memory)
    found = memory.download(d, np.dtype(np.float32), (16, 8))
    exponent = row[:, None] + column
    np.testing.assert_array_equal(found, 32 * (2.0**exponent + 2.0 ** (22 - exponent)))
    assert found[0, 0] == 32 + 134217728 and found[5, 3] == 8192 + 524288 and found[12, 1] == 262144 + 16384


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", FORMATS)
def test_the_smallest_and_the_largest_scale_of_a_row_are_exact_and_nan_stays_in_its_row(
    target: str, activation: str
) -> None:
    scales = np.full((48, 4), formats.SCALE_ONE)
    scales[3], scales[20], scales[41, 2] = 0, 254, formats.SCALE_NAN
    codes = np.zeros((48, 128))
    codes[:, 5] = ONE
    x = np.zeros((3, 128), ml_dtypes.bfloat16)
    x[:, 5] = 1.0, 2.0**120, 2.0**-120
    wanted = np.outer([1.0, 2.0**120, 2.0**-120], np.exp2(scales[:, 0] - 127.0))
    wanted[:, 41] = np.nan
    found = product(variant_for(target, activation), x, codes, scales)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, wanted.astype(np.float32).astype(x.dtype).astype(np.float64))
    assert found[0, 3] == 2.0**-127 and found[1, 3] == 2.0**-7 and found[2, 20] == 2.0**7 and found[1, 20] == np.inf


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("activation", FORMATS)
@pytest.mark.parametrize("encoding", ["nibble", "rotated"])
def test_the_twin_and_the_instruction_agree_to_the_order_of_their_sums(activation: str, encoding: str) -> None:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((19, 288)).astype(np.float16)
    codes, scales = generator.integers(0, 16, (70, 288)), generator.integers(110, 120, (70, 9))
    twin, real = (
        product(
            variant_for("sm_121a", activation, encoding=encoding, dtype="fp16", tile_m=16, **knobs), x, codes, scales
        )
        for knobs in ({"atom": "twin"}, {})
    )
    assert relative_l2(twin, real) <= 2.0**-14
    assert (twin == real).mean() >= 0.99
    np.testing.assert_allclose(twin, real, rtol=2.0**-10, atol=1e-6)


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize(("activation", "gate"), [("mxfp8", 0.05), ("mxfp6", 0.05), ("mxfp4", 0.14)])
@pytest.mark.parametrize("rule", ["floor", "even"])
def test_rounding_x_costs_no_more_than_stated(activation: str, gate: float, rule: str) -> None:
    generator = np.random.default_rng(5)
    x = generator.standard_normal((8, 512)).astype(ml_dtypes.bfloat16)
    codes, scales = generator.integers(0, 16, (64, 512)).astype(np.uint8), np.full((64, 16), 120, np.uint8)
    weight = formats.dequantize(codes, scales, formats.get("mxfp4"))
    found = product(variant_for("sm_121a", activation, scale_rule=rule), x, codes, scales)
    error = relative_l2(found, x.astype(np.float64) @ weight.T)
    assert gate / 4 <= error <= gate


CASES: list[tuple[str, dict[str, Any]]] = [
    ("sm_80", {"dtype": "fp16", "encoding": "rotated", "bias": True, "split_k": 3}),
    ("sm_86", {"activation": "mxfp6", "residual": True, "tile_m": 32}),
    ("sm_89", {"activation": "mxfp4", "dtype": "fp16", "residual": True, "tile_n": 128, "warps_n": 8}),
    ("sm_90a", {"activation": "mxfp4", "split_k": 16, "bias": True, "residual": True}),
    ("sm_100a", {"activation": "mxfp6", "tile_n": 128, "tile_m": 64, "warps_m": 2}),
    ("sm_120a", {"activation": "mxfp6", "tile_n": 256, "tile_m": 64, "warps_n": 8, "bias": True}),
    ("sm_120f", {"activation": "mxfp4", "encoding": "rotated", "tile_m": 16, "split_k": 2}),
    ("sm_121a", {"activation": "mxfp4", "tile_n": 128, "tile_m": 128, "warps_m": 2, "residual": True}),
    ("sm_121a", {"dtype": "fp16", "tile_m": 64, "split_k": 5, "bias": True, "scale_rule": "ceil"}),
    ("sm_121a", {"activation": "mxfp6", "scale_rule": "even", "tile_n": 256, "warps_n": 8, "split_k": 3}),
]


@pytest.mark.parametrize(("target", "knobs"), CASES, ids=lambda item: item if isinstance(item, str) else "-".join(item))
def test_its_cases_pass_and_reach_all_of_its_code(
    target: str, knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]
) -> None:
    simulated(variant_for(target, **knobs))


def test_slices_of_k_add_up_in_one_order_and_leave_the_counters_as_they_were() -> None:
    variant = variant_for("sm_121a", split_k=4)
    rows, n, k = 9, 80, 640
    generator = np.random.default_rng(1)
    x = generator.standard_normal((rows, k)).astype(ml_dtypes.bfloat16)
    words, scales = pack(
        generator.integers(0, 16, (n, k)).astype(np.uint8), generator.integers(110, 125, (n, k // 32)).astype(np.uint8),
        "nibble",
    )  # fmt: skip
    launch, memory = scaled.launch(variant.knobs, LinearProblem(rows, n, k), 48), Memory()
    inputs = {name: memory.upload(item, name) for name, item in (("x", x), ("weight", words), ("scales", scales))}
    workspace = memory.upload(np.zeros(launch.workspace, np.uint8), "workspace", writable=True)
    found = []
    for resident in (16, 1):  # side by side, and one after the other
        y = memory.allocate(rows * n * 2, "y")
        values = {**inputs, "y": y, "workspace": workspace, "epsilon": EPSILON, "rows": rows, "n": n, "k": k}
        simulate(
            ptx_of(variant), (launch.blocks, 1, 1), (variant.threads, 1, 1),
            variant.arguments.pack(values, launch.maps, encode), memory, shared_bytes=launch.shared_bytes,
            resident_blocks=resident,
        )  # fmt: skip
        found.append(memory.download(y, np.dtype(np.uint16), (rows, n)))
        tiles = launch.blocks // variant.knobs.split_k
        assert not memory.download(workspace, np.dtype(np.uint32), (tiles,)).any()
    np.testing.assert_array_equal(*found)


PROBLEMS = st.builds(
    LinearProblem,
    m=st.integers(1, 20_000),
    n=st.integers(1, 300_000),
    k=st.integers(1, 512).map(lambda blocks: 32 * blocks),
    dtype=st.sampled_from(["bf16", "fp16"]),
    bias=st.booleans(),
    residual=st.booleans(),
    encoding=st.sampled_from(["rotated", "nibble"]),
    scale_range=st.sampled_from(["normal", "full"]),
    activation=st.sampled_from(scaled.ACTIVATIONS),
)


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(25))
@given(problem=PROBLEMS, multiprocessors=st.integers(1, 256))
def test_heuristic_and_candidates_are_legal_and_serve_the_problem(
    target: Arch, problem: LinearProblem, multiprocessors: int
) -> None:
    kernel = scaled.KERNEL
    choices = kernel.candidates(problem, target, multiprocessors)
    assert choices[0] == kernel.heuristic(problem, target, multiprocessors)
    assert 1 <= len(choices) <= 60
    for knobs in choices:
        assert not knobs.keys() & kernel.fixed(problem).keys()
        variant = scaled.SPEC.variant(target, **knobs, **kernel.fixed(problem))
        kernel.check(problem, variant)
        assert variant.knobs.atom == scaled.atom(problem.activation, target)
        launch = kernel.launch(variant.knobs, problem, multiprocessors)
        assert launch.blocks >= variant.knobs.split_k and launch.shared_bytes <= 101_376


@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096)])
def test_few_rows_are_split_until_every_multiprocessor_of_gb10_has_a_block(m: int, n: int, k: int) -> None:
    chip = arch.parse("sm_121")
    problem = LinearProblem(m, n, k, encoding="nibble", activation="mxfp4")
    knobs = scaled.ScaledKnobs(**scaled.KERNEL.fixed(problem), **scaled.KERNEL.heuristic(problem, chip, 48))
    assert scaled.launch(knobs, LinearProblem(m, n, k), 48).blocks >= 48
    # Bytes bound such a call: the model may add latencies to the stream of weights, not a second stream.
    floor = packed_tiles(n, k)[0] * packed_tiles(n, k)[1] * 544 / (chip.memory_gbps * 1e3)
    assert floor <= scaled.microseconds(knobs, problem, chip, 48) <= 1.3 * floor


def test_many_rows_take_tiles_that_are_bound_by_products() -> None:
    chip = arch.parse("sm_121")
    for activation in scaled.ACTIVATIONS:
        problem = LinearProblem(8192, 5120, 2880, encoding="nibble", activation=activation)
        knobs = scaled.KERNEL.heuristic(problem, chip, 48)
        assert knobs["tile_n"] * knobs["tile_m"] >= 8192 and knobs["split_k"] == 1


@settings(max_examples=examples(15), deadline=None)
@given(
    target=st.sampled_from(["sm_80", "sm_90a", "sm_121a"]),
    activation=st.sampled_from(scaled.ACTIVATIONS),
    geometry=st.sampled_from(scaled.GEOMETRIES[:-1]),
    split=st.sampled_from([1, 2]),
)
def test_shared_memory_is_what_struct_shared_takes(
    target: str, activation: str, geometry: tuple[int, int, int, int], split: int
) -> None:
    names = ("tile_n", "tile_m", "warps_n", "warps_m")
    try:
        variant = variant_for(target, activation, split_k=split, **dict(zip(names, geometry, strict=True)))
    except KnobError as error:
        assert target != "sm_121a" and "use more warps or a smaller tile" in str(error)  # the twin takes more registers
        return
    claim(variant, f"sizeof(Shared) == {scaled.shared_bytes(variant.knobs)}")


def test_the_machine_code_of_the_twin_keeps_its_contract() -> None:
    keep_contracts(
        variant_for(target, activation, tile_n=128, tile_m=64, warps_n=8)
        for target, activation in (("sm_80", "mxfp6"), ("sm_90a", "mxfp8"), ("sm_90a", "mxfp4"))
    )


@pytest.mark.parametrize("target", ["sm_120a", "sm_120f", "sm_121a"])
def test_the_machine_code_holds_the_block_scaled_instruction_and_spills_nothing(target: str) -> None:
    variants = []
    for activation, instruction in (("mxfp8", "QMMA"), ("mxfp6", "QMMA"), ("mxfp4", "OMMA")):
        variant = variant_for(target, activation, tile_n=256, tile_m=64, warps_n=8, bias=True)
        promised = variant.spec.contract(variant.knobs, variant.arch)
        assert any(instruction in pattern for pattern in promised.require) and not promised.max_spill_bytes
        variants.append(variant)
    keep_contracts(variants)


@pytest.mark.parametrize(
    ("target", "knobs", "said"),
    [
        ("sm_90a", {"atom": "mxf8f6f4"}, "not what multiplies activation='mxfp8' on sm_90a; use atom='twin'"),
        ("sm_121a", {"activation": "mxfp4", "atom": "mxf8f6f4"}, "activation='mxfp4' on sm_121a; use atom='mxf4'"),
        (
            "sm_121a",
            {"warps_n": 8},
            "warps_n=8 warps of 16 do not divide tile_n=64; the nearest legal value is warps_n=4",
        ),
        (
            "sm_121a",
            {"warps_m": 2},
            "warps_m=2 warps of 8 do not divide tile_m=8; the nearest legal value is warps_m=1",
        ),
        ("sm_121a", {"tile_n": 256}, "at most 32 features each, not tile_n=256; the nearest legal value is warps_n=8"),
        (
            "sm_121a",
            {"tile_n": 128, "tile_m": 16, "warps_n": 8, "warps_m": 2},
            "warps_n=8 by warps_m=2 is over 8 warps a block; the nearest legal value is warps_n=4",
        ),
        (
            "sm_121a",
            {"tile_n": 128, "warps_n": 8, "blocks_per_sm": 7},
            "blocks_per_sm=7 of 256 threads is over 1536 threads a multiprocessor; the nearest legal value is 6",
        ),
        (
            "sm_121a",
            {"tile_n": 256, "tile_m": 64, "warps_n": 8, "blocks_per_sm": 2},
            "over the 128 of blocks_per_sm=2; the nearest legal value is blocks_per_sm=1",
        ),
        (
            "sm_90a",
            {"tile_n": 128, "tile_m": 128, "warps_m": 2},
            "over the 255 of blocks_per_sm=1; use more warps or a smaller tile",
        ),
        ("sm_89", {"pdl": True}, "pdl=True needs sm_90 or newer; sm_89 has no programmatic dependent launch"),
    ],
)
def test_knobs_that_do_not_fit_are_refused_with_the_nearest_that_do(
    target: str, knobs: dict[str, Any], said: str
) -> None:
    with pytest.raises(KnobError) as error:
        variant_for(target, **knobs)
    assert said in str(error.value)


def test_problems_that_it_cannot_serve_are_refused_with_the_reason() -> None:
    for fields, said in (
        ({}, "does not take activation='none'"),
        ({"activation": "mxfp8", "norm": True}, "does not take norm=True"),
        ({"activation": "mxfp8", "argmax": True}, "does not take argmax=True"),
        ({"activation": "mxfp8", "weight": "mxfp8"}, "does not take weight='mxfp8'"),
    ):
        with pytest.raises(KnobError, match=said):
            scaled.KERNEL.fixed(LinearProblem(**fields))
    with pytest.raises(KnobError, match="split_k=4 is over the 3 chunks of 128 in k=384; the nearest legal value is 3"):
        scaled.KERNEL.check(LinearProblem(k=384, activation="mxfp8"), variant_for("sm_121a", split_k=4))
    small = variant_for("sm_121a", tile_n=64, tile_m=8, warps_n=4, warps_m=1)
    with pytest.raises(KnobError, match="a grid has at most 2\\^31 - 1; use larger tiles or fewer rows a call"):
        scaled.KERNEL.check(LinearProblem(m=4_000_000, n=300_000, activation="mxfp8"), small)


def test_a_tile_by_name_is_one_of_those_there_are_or_refused_with_the_nearest() -> None:
    assert scaled.KERNEL.tile is not None
    assert scaled.KERNEL.tile(64, 256, 128, 2) == {"tile_m": 64, "tile_n": 256, "warps_n": 8, "warps_m": 1}
    assert scaled.KERNEL.tile(64, 64, None, None) == {"tile_m": 64, "tile_n": 64, "warps_n": 4, "warps_m": 2}
    for asked, near in (((48, 64, None, None), "64x64x128s2"), ((64, 128, 64, None), "64x128x128s2")):
        with pytest.raises(KnobError, match=f"the nearest it has is {near}"):
            scaled.KERNEL.tile(*asked)
