"""`quantize`: bf16, fp16 or fp32 to the OCP Microscaling formats with E8M0 block scales, and back.

Kernels:
    quantize     values to codes and scales
    dequantize   codes and scales to values

Shapes: values [..., k] with k a multiple of 32; scales [..., k / 32]. Formats and rules are those of jitmx/formats.py,
whose functions are the reference. Floor: bytes read plus bytes written over the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family, Problem
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, mismatches
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

DTYPES = ("bf16", "fp16", "fp32")
VALUES_A_VECTOR = 8

_VECTORS = number("vectors", "unsigned long long", f"of {VALUES_A_VECTOR} values, a multiple of 4")
QUANTIZE_ARGUMENTS = Arguments(
    "QuantizeArguments",
    reads("x", "[..., k]", "Vec4"),
    writes("codes", "[..., k], of mxfp4 two a byte", "unsigned char"),
    writes("scales", "[..., k / 32]", "unsigned char"),
    _VECTORS,
)
DEQUANTIZE_ARGUMENTS = {
    type: Arguments(
        "DequantizeArguments",
        reads("codes", "[..., k / 8], the codes of a vector", type),
        reads("scales", "[..., k / 32]", "unsigned char"),
        writes("y", "[..., k]", "Vec4"),
        _VECTORS,
    )
    for type in ("unsigned int", "unsigned long long")
}


@dataclass(frozen=True)
class QuantizeKnobs(Knobs):
    """Compile-time choices of `quantize.quantize`."""

    format: str = knob("mxfp4", choices=tuple(formats.FORMATS), doc="element format")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of the values")
    scale_rule: str = knob("floor", choices=formats.SCALE_RULES, doc="how the scale's exponent is taken")
    block: int = knob(256, choices=(128, 256, 512), doc="threads a block")
    vectors: int = knob(4, choices=(1, 2, 4, 8), doc="vectors of 8 values a thread")
    pdl: bool = PDL


@dataclass(frozen=True)
class DequantizeKnobs(Knobs):
    """Compile-time choices of `quantize.dequantize`."""

    format: str = knob("mxfp4", choices=tuple(formats.FORMATS), doc="element format")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of the values")
    block: int = knob(256, choices=(128, 256, 512), doc="threads a block")
    vectors: int = knob(4, choices=(1, 2, 4, 8), doc="vectors of 8 values a thread")
    pdl: bool = PDL


def _contract(require: str) -> Contract:
    return Contract(max_registers=128, require=(require,))


QUANTIZE = KernelSpec(
    family="quantize",
    name="quantize",
    knobs=QuantizeKnobs,
    contract=lambda knobs, arch: _contract(r"\bLDG\.E\..*128"),
    threads=lambda knobs: knobs.block,
    entry="jitmx_quantize",
    arguments=lambda knobs: QUANTIZE_ARGUMENTS,
)

DEQUANTIZE = KernelSpec(
    family="quantize",
    name="dequantize",
    knobs=DequantizeKnobs,
    contract=lambda knobs, arch: _contract(r"\bSTG\.E\..*128"),
    threads=lambda knobs: knobs.block,
    entry="jitmx_dequantize",
    arguments=lambda knobs: DEQUANTIZE_ARGUMENTS["unsigned int" if knobs.format == "mxfp4" else "unsigned long long"],
)


def launch(knobs: QuantizeKnobs | DequantizeKnobs, values: int) -> Launch:
    """Geometry of a launch over `values` values."""
    return Launch(-(-values // (knobs.block * knobs.vectors * VALUES_A_VECTOR)))


# Blocks of 32 before the last one: its vectors of 8 values are over 2^32, and bytes of all tensors over 2^31.
FAR_BLOCKS = 1 << 30

_STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def _blocks_to_try(knobs: QuantizeKnobs | DequantizeKnobs) -> tuple[int, ...]:
    """Counts of 32-blocks: one, just under what a thread block takes, and over it."""
    whole = knobs.block * knobs.vectors * VALUES_A_VECTOR // formats.BLOCK
    return 1, whole - 1, whole + 5


def _values(knobs: QuantizeKnobs, count: int, generator: np.random.Generator) -> npt.NDArray[Any]:
    """Blocks of six kinds in turn: values of many magnitudes, any bits, tiny values, zeros, ties, values again.

    Of the last kind every second has an infinity, and no NaN; the others have the largest value that is finite. Of
    zeros every second has one value, the least of all. Of the first kind every second has a largest value where the
    scale goes up, or next to that.
    """
    dtype, item = np.dtype(_STORED[knobs.dtype]), formats.get(knobs.format)
    shape = (count, formats.BLOCK)
    x = generator.standard_normal(shape) * np.exp2(generator.integers(-30, 30, (count, 1)))
    tiny = generator.standard_normal(shape) * (2.0**-20 if knobs.dtype == "fp16" else 2.0**-129)
    steps = formats.values(item)[: item.largest_code + 1]
    ties = generator.choice((steps[1:] + steps[:-1]) / 2, shape) * np.exp2(generator.integers(-5, 5, (count, 1)))
    kinds = np.arange(count)[:, None] % 6
    with np.errstate(over="ignore"):
        x = np.select(
            [kinds == 2, kinds == 3, kinds == 4],
            [tiny, np.resize([0.0, -0.0], shape), ties],
            x,
        ).astype(dtype)
    patterns = generator.integers(0, 256, (count, formats.BLOCK * dtype.itemsize), np.uint8).view(dtype)
    x = np.where(kinds == 1, patterns, x)
    x[5::12, 0], x[11::12, -1] = np.inf, -float(ml_dtypes.finfo(dtype).max)
    # The largest is a power of two, and where the rule "even" takes the next scale, or next to these.
    up = dtype.type(2 - 2.0 ** -(item.mantissa_bits + 1))
    one, two, none = dtype.type(1), dtype.type(2), dtype.type(0)
    edges = np.array([one, np.nextafter(one, two), up, np.nextafter(up, none)], dtype).astype(np.float64)
    on = np.arange(6, count, 12)
    beside = generator.uniform(-0.9, 0.9, (len(on), formats.BLOCK))
    beside[:, 7] = edges[(np.arange(len(on)) + count) % len(edges)]
    x[on] = (beside * np.exp2(generator.integers(-5, 5, (len(on), 1)))).astype(dtype)
    least = np.arange(9, count, 12)
    x[least, generator.integers(0, formats.BLOCK, len(least))] = ml_dtypes.finfo(dtype).smallest_subnormal
    return x


def _cases(variant: Variant) -> Iterator[Case]:
    knobs, generator = variant.knobs, np.random.default_rng(0)
    item = formats.get(knobs.format)
    written: dict[str, npt.NDArray[Any]]
    for count, before in (*((count, 0) for count in _blocks_to_try(knobs)), (1, FAR_BLOCKS)):
        size = count * formats.BLOCK
        if variant.spec is QUANTIZE:
            x = _values(knobs, count, generator)
            with np.errstate(invalid="ignore"):  # any bit pattern: signalling NaN among them
                codes, scales = formats.quantize(x.astype(np.float64), item, knobs.scale_rule)
            stored = formats.pack_nibbles(codes) if item.codes_per_byte == 2 else codes
            buffers = {"x": Buffer(x)}
            sides = _quantize_sides(x, item, knobs.scale_rule)
            written = {"codes": stored, "scales": scales[:, 0]}
        else:
            codes = generator.integers(0, 1 << item.bits, (count, formats.BLOCK)).astype(np.uint8)
            scales = generator.integers(0, 256, (count, 1)).astype(np.uint8)
            scales[generator.random((count, 1)) < 0.2] = 0  # 2^-127 and NaN take branches of their own
            scales[generator.random((count, 1)) < 0.2] = formats.SCALE_NAN
            scales[generator.random((count, 1)) < 0.1] = 1
            scales[generator.random((count, 1)) < 0.1] = 254
            stored = formats.pack_nibbles(codes) if item.codes_per_byte == 2 else codes
            with np.errstate(over="ignore"):
                values = formats.dequantize(codes, scales, item).astype(np.float32).astype(_STORED[knobs.dtype])
            buffers = {"codes": Buffer(stored), "scales": Buffer(scales[:, 0])}
            sides = {f"scale byte {byte}": bool((scales == byte).any()) for byte in (0, 1, 254, 255)}
            sides["-0"] = bool((np.signbit(values) & (values == 0)).any())
            magnitude = np.abs(np.nan_to_num(values.astype(np.float64)))
            sides["subnormal"] = bool(((magnitude > 0) & (magnitude < float(ml_dtypes.finfo(values.dtype).tiny))).any())
            if knobs.dtype == "fp16":
                sides["infinite"] = bool(np.isinf(values).any())
            written = {"y": values}
        buffers |= {name: Buffer(array, output=True) for name, array in written.items()}
        outputs = tuple(written.values())
        whole = launch(knobs, size + before * formats.BLOCK)
        if before:
            buffers = {name: _behind(item, before) for name, item in buffers.items()}

        def check(found: Sequence[npt.NDArray[Any]], wanted: tuple[npt.NDArray[Any], ...] = outputs) -> float:
            return max(_differing(a, b) for a, b in zip(found, wanted, strict=True))

        yield Case(
            name=f"{count} blocks of 32" + f" behind {before}" * (before > 0),
            launch=whole,
            values={"vectors": (size + before * formats.BLOCK) // VALUES_A_VECTOR, **buffers},
            check=check,
            gate=0.0,
            sides=sides,
            blocks=(whole.blocks - 1,) if before else None,
        )


def _quantize_sides(x: npt.NDArray[Any], item: formats.Format, rule: str) -> dict[str, bool]:
    """Edges of quantizing: ties, saturation, subnormal codes, blocks of zeros of either sign, ends of the scales."""
    with np.errstate(invalid="ignore"):
        blocks = x.astype(np.float64)
        scales = formats.block_scales(blocks, item, rule)
        scaled = np.abs(blocks / formats.scale_values(scales)[..., None])
        negative = (blocks == 0) & np.signbit(blocks)
    steps = formats.values(item)[: item.largest_code + 1]
    ties = (steps[1:] + steps[:-1]) / 2
    most = np.abs(blocks).max(-1)
    some = most > 0
    zero = (blocks == 0).all(-1)
    return {
        "tie to even": bool(np.isin(scaled, ties[0::2]).any()),
        "tie to odd": bool(np.isin(scaled, ties[1::2]).any()),
        **({"saturates": bool((scaled > item.largest).any())} if rule != "ceil" else {}),
        "subnormal code": bool(((scaled > 0) & (scaled < 2.0 ** (1 - item.bias))).any()),
        "block of zeros": bool(zero.any()),
        "-0": bool(negative.any()),
        **({"block of scale byte 0": bool((some & (scales == 0)).any())} if x.dtype != np.float16 else {}),
        "block that is not finite": bool((scales == formats.SCALE_NAN).any()),
        "infinity and no NaN": bool((most == np.inf).any()),
        "least value alone": bool((most == float(ml_dtypes.finfo(x.dtype).smallest_subnormal)).any()),
        "largest finite value": bool((most == float(ml_dtypes.finfo(x.dtype).max)).any()),
    }


def _behind(item: Buffer, blocks: int) -> Buffer:
    """What one block of 32 has in a tensor, as the last of very many."""
    size = item.data.nbytes
    return item.spread(blocks * size, (blocks + 1) * size)


def _differing(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """Share of elements that differ, zeros by their signs too; a NaN is like any other."""
    if found.dtype == np.uint8:
        return mismatches(found, wanted)
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    signs = mismatches(np.signbit(np.nan_to_num(a)), np.signbit(np.nan_to_num(b)))
    return (
        signs
        + mismatches(np.nan_to_num(a, nan=-1.5), np.nan_to_num(b, nan=-1.5))
        + mismatches(np.isnan(a), np.isnan(b))
    )


@dataclass(frozen=True)
class QuantizeProblem(Problem):
    """One call of `jitmx.quantize` or `jitmx.dequantize`."""

    direction: str = knob("quantize", choices=("quantize", "dequantize"), doc="to the format, or back")
    format: str = knob("mxfp4", choices=tuple(formats.FORMATS), doc="element format")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of the values")
    scale_rule: str = knob("floor", choices=formats.SCALE_RULES, doc="how the scale's exponent is taken")


def _fixed(problem: QuantizeProblem, direction: str, *names: str) -> dict[str, Any]:
    if problem.direction != direction:
        raise KnobError(f"quantize.{direction} does not take direction={problem.direction!r}, only {direction!r}")
    return problem.pick(*names)


def _tuned(problem: QuantizeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    return {"pdl": "pdl" in arch.features}


FAMILY = Family(
    name="quantize",
    summary="bf16, fp16, fp32 to MXFP4, MXFP6, MXFP8 and back",
    kernels=(
        Kernel(
            QUANTIZE,
            _cases,
            fixed=lambda problem: _fixed(problem, "quantize", "format", "dtype", "scale_rule"),
            heuristic=_tuned,
            rarer=(
                {"format": "mxfp8", "scale_rule": "even", "block": 128, "vectors": 1},
                {"format": "mxfp6e2m3", "dtype": "fp16", "scale_rule": "ceil", "block": 128, "vectors": 1},
                {"dtype": "fp32", "scale_rule": "even", "block": 128, "vectors": 2, "pdl": False},
            ),
        ),
        Kernel(
            DEQUANTIZE,
            _cases,
            fixed=lambda problem: _fixed(problem, "dequantize", "format", "dtype"),
            heuristic=_tuned,
        ),
    ),
    problem=QuantizeProblem,
    typical=lambda arch: tuple(
        QuantizeProblem(direction, format_, dtype)
        for format_ in formats.FORMATS
        for dtype in DTYPES
        for direction in ("quantize", "dequantize")
    ),
    benchmark=Benchmark("jitmx.bench.quantize", "64 MB of bf16 to each format and back"),
)
