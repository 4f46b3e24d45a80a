"""`pack`: MXFP4 and MXFP8 weights to the layout that every product reads (docs/packed-layout.md).

Kernels:
    pack   codes and scales to words and scales, padded to whole tiles; into other memory, or into their own

Shapes: codes [experts, n, k / 2] (mxfp8: k) and scales [experts, n, k / 32], words and scales tile by tile. Floor:
bytes read plus bytes written over the memory bandwidth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family, Problem
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import layout, mxfp8
from jitmx.kernels.linear.layout import ENCODINGS, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.problem import WEIGHTS
from jitmx.kernels.moe.layout import interleave
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, mismatches
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Knobs, Variant, knob

Bytes = npt.NDArray[np.uint8]

ARGUMENTS = Arguments(
    "PackArguments",
    reads("codes", "[experts, n, k], or two codes a byte", "unsigned char"),
    reads("scales", "[experts, n, k / 32]", "unsigned char"),
    writes("words", "[experts, tile rows, tiles of k, ...]", "Vec4"),
    writes("packed", "scales: [experts, tile rows, tiles of k, 32]", "unsigned char"),
    writes("beyond", "[1]: becomes 1 where a scale is outside what decoding folds in", "unsigned int"),
    number("code_row", "unsigned long long", "bytes from a row of codes to the next, a multiple of 16"),
    number("code_expert", "unsigned long long", "bytes from an expert's codes to the next, a multiple of 16"),
    number("scale_row", "unsigned long long", "bytes from a row of scales to the next"),
    number("scale_expert", "unsigned long long", "bytes from an expert's scales to the next"),
    number("n", "unsigned int", "rows of an expert"),
    number("blocks", "unsigned int", "of 32 values, of a row"),
    number("half", "unsigned int", "n / 2: rows i and n / 2 + i are packed as rows 2 i and 2 i + 1; 0: as they are"),
    number("tile_rows", "unsigned int", "of an expert"),
    number("tiles", "unsigned int", "of a row"),
    number("chunk", "unsigned int", "tiles of k that a block takes"),
)
_CHUNK_BYTES = 36 * 1024  # of codes that a block takes where it need not take whole rows


@dataclass(frozen=True)
class PackKnobs(Knobs):
    """Compile-time choices of `pack.pack`."""

    format: str = knob("mxfp4", choices=WEIGHTS, doc="element format")
    encoding: str = knob("rotated", choices=ENCODINGS, doc="order of bits in a word of mxfp4")
    block: int = knob(256, choices=(256, 512), doc="threads a block")


def _check(knobs: PackKnobs, arch: Arch) -> None:
    if knobs.format != "mxfp4" and knobs.encoding != "rotated":
        raise KnobError(f"encoding={knobs.encoding!r} is of mxfp4 words; {knobs.format} has one layout: 'rotated'")


PACK = KernelSpec(
    family="pack",
    name="pack",
    knobs=PackKnobs,
    contract=lambda knobs, arch: Contract(max_registers=42, require=(r"\bLDGSTS\.", r"\bSTG\.E\..*128")),
    check=_check,
    shared_bytes=lambda knobs: shared_bytes(knobs.format, 1),
    threads=lambda knobs: knobs.block,
    entry="jitmx_pack",
    arguments=lambda knobs: ARGUMENTS,
)


@dataclass(frozen=True)
class Geometry:
    """Of a launch.

    Attributes:
        chunk: tiles of k that a block takes.
        blocks: of the grid.
        shared_bytes: dynamic shared memory a block.
    """

    chunk: int
    blocks: int
    shared_bytes: int


def shared_bytes(format: str, chunk: int) -> int:
    """Shared memory of a block that takes `chunk` tiles of k: codes of 16 rows, each padded, and scales."""
    row = chunk * TILE_K // formats.get(format).codes_per_byte + (16 if format == "mxfp4" else 32)
    return TILE_ROWS * (row + chunk * TILE_K // formats.BLOCK)


def geometry(format: str, experts: int, n: int, k: int, *, whole: bool) -> Geometry:
    """Of the launch that packs [experts, n, k].

    Args:
        whole: a block takes whole rows, which is what makes packing into the same memory safe.
    """
    tile_rows, tiles = packed_tiles(n, k)
    chunks = 1 if whole else -(-shared_bytes(format, tiles) // _CHUNK_BYTES)
    chunk = -(-tiles // chunks)
    return Geometry(chunk, experts * tile_rows * -(-tiles // chunk), shared_bytes(format, chunk))


def reference(codes: Bytes, scales: Bytes, format: str, encoding: str) -> tuple[Any, Any, bool]:
    """What a weight is packed to.

    Args:
        codes: [n, k], one a byte.
        scales: [n, k / 32].

    Returns:
        Words and scales as in docs/packed-layout.md, and whether a scale is outside what decoding folds in.
    """
    magnitudes = (codes & (7 if format == "mxfp4" else 127)).reshape(*scales.shape, formats.BLOCK)
    empty = (magnitudes.max(-1) == 0) & (scales != formats.SCALE_NAN)
    scales = np.where(empty, np.uint8(formats.SCALE_ONE), scales)
    if format == "mxfp4":
        words, packed = layout.pack(codes, scales, encoding)
        low, high = layout.NORMAL_SCALES
    else:
        words, packed = mxfp8.pack_mxfp8(codes, scales)
        low, high = mxfp8.MXFP8_NORMAL_SCALES
    found = packed.view(np.uint8)
    return words, packed, bool(((found < low) | (found > high)).any())


# Experts, n, k, most tiles a block, bytes between rows of scales beyond them, and whether rows come in halves.
_SHAPES = ((1, 16, 64, 1, 0, False), (2, 21, 96, 1, 1, False), (2, 26, 224, 3, 2, True), (1, 13, 5344, 99, 0, False))


def _cases(variant: Variant) -> Iterator[Case]:
    for seed, shape in enumerate(_SHAPES):
        for scales in ("folded in", "any"):
            yield _case(variant, *shape, scales=scales, seed=seed)
    # Where a warp has several tiles, it is in the first one.
    for which, shape in (("below", _SHAPES[-1]), ("above", _SHAPES[0]), ("NaN", _SHAPES[0])):
        yield _case(variant, *shape, scales=f"folded in but one {which}", seed=len(_SHAPES))
    yield from _far_cases(variant)


def _far_cases(variant: Variant) -> Iterator[Case]:
    """The last rows of the last of many experts, and of the second of two that are far by themselves, in halves."""
    for seed, (experts, rows, chunk, halves) in enumerate(((1 << 10, 1 << 20, 2, False), (2, 1 << 30, 1, True))):
        # Of those that are far by themselves rows lie a block apart: scales are behind 2^32 bytes too.
        small = _case(variant, 1, 16, 96, chunk, int(halves), halves, scales="any", seed=seed)
        yield _last(small, experts, rows, halves)


def _last(case: Case, experts: int, rows: int, halves: bool) -> Case:
    """The same as the last rows of the last of many experts; in halves, a row's other half is far from it."""
    values: dict[str, Any] = dict(case.values)
    n, tiles, tile_rows = rows + values["n"], values["tiles"], rows // TILE_ROWS + values["tile_rows"]
    for name, pitch, whole in (("codes", "code_row", "code_expert"), ("scales", "scale_row", "scale_expert")):
        row = int(values[pitch])
        values[whole] = n * row
        some = np.arange(values["n"])[None]
        place = (
            (some % (values["n"] // 2) + rows // 2 + some // (values["n"] // 2) * (n // 2)) if halves else rows + some
        )
        values[name] = values[name].spread((experts - 1) * n * row + place * row, experts * n * row)
    before = (experts - 1) * tile_rows + rows // TILE_ROWS
    for name in ("words", "packed"):
        row = values[name].data[0, 0].nbytes
        values[name] = values[name].spread(before * row, experts * tile_rows * row)
    values |= {"n": n, "half": n // 2 * halves, "tile_rows": tile_rows}
    chunks = -(-tiles // values["chunk"])
    blocks = experts * tile_rows * chunks
    return dataclasses.replace(
        case,
        name=f"the last rows of [{experts}, {n}, 96]" + ", rows in halves" * halves,
        launch=dataclasses.replace(case.launch, blocks=blocks),
        values=values,
        blocks=range(blocks - chunks, blocks),
    )


def _case(
    variant: Variant, experts: int, n: int, k: int, most: int, apart: int, halves: bool, *, scales: str, seed: int
) -> Case:
    """Packing into other memory, from rows that lie `apart` and whose neighbours hold anything."""
    format, encoding = variant.knobs.format, variant.knobs.encoding
    generator, item = np.random.default_rng(seed), formats.get(format)
    low, high = layout.NORMAL_SCALES if format == "mxfp4" else mxfp8.MXFP8_NORMAL_SCALES
    codes: Bytes = generator.integers(0, 1 << item.bits, (experts, n, k + 32 * apart)).astype(np.uint8)
    if format == "mxfp8" and scales != "any":
        codes[codes & 0x7F == 0x7F] = 0x7E
    blocks = codes.reshape(experts, n, -1, formats.BLOCK)
    zeros = generator.choice(np.array([0, 1 << item.bits - 1], np.uint8), blocks.shape)
    blocks[:] = np.where(generator.random((*blocks.shape[:3], 1)) < 0.3, zeros, blocks)
    # A single bit of a block's magnitudes may be set, whichever it is and whichever lane has it.
    alone = generator.random(blocks.shape[:3]) < 0.2
    blocks[alone] = zeros[alone]
    some = np.count_nonzero(alone)
    bits = (1 << generator.integers(0, item.bits - 1, some)).astype(np.uint8)
    blocks[(*alone.nonzero(), generator.integers(0, formats.BLOCK, some))] |= bits
    bounds = (low, high + 1) if scales != "any" else (0, 256)
    given = generator.integers(*bounds, (experts, n, k // formats.BLOCK + apart)).astype(np.uint8)
    if scales == "any":
        given[generator.random(given.shape) < 0.2] = generator.choice([low - 1, low, high, high + 1, 255])
    else:
        given[0, 0, 0], given[-1, -1, 0] = low, high
        blocks[0, [0, 5], 0, :2] = blocks[-1, -1, 0, :2] = 1
        lone = {"below": low - 1, "above": high + 1, "NaN": formats.SCALE_NAN}.get(scales.rpartition(" ")[2])
        given[0, 5, 0] = given[0, 5, 0] if lone is None else lone
    taken = codes[..., :k], given[..., : k // formats.BLOCK]
    rows = [interleave(array).astype(np.uint8) for array in taken] if halves else taken
    packed = [reference(*expert, format, encoding) for expert in zip(rows[0], rows[1], strict=True)]
    words, bytes_of_scales = (np.stack([expert[part] for expert in packed]) for part in (0, 1))
    full = any(expert[2] for expert in packed)
    sides = _sides(*taken, low, high, format)
    stored = formats.pack_nibbles(codes) if item.codes_per_byte == 2 else codes
    tile_rows, tiles = packed_tiles(n, k)
    chunk = min(most, tiles)

    def check(found: Sequence[npt.NDArray[Any]]) -> float:
        beyond = float(found[2][0] != full)
        return mismatches(found[0], words) + mismatches(found[1], bytes_of_scales) + beyond

    return Case(
        name=f"[{experts}, {n}, {k}], scales {scales}" + ", rows in halves" * halves,
        launch=Launch(experts * tile_rows * -(-tiles // chunk), shared_bytes(format, chunk)),
        values={
            "codes": Buffer(stored), "scales": Buffer(given), "words": Buffer(words, output=True),
            "packed": Buffer(bytes_of_scales, output=True),
            "beyond": Buffer(np.zeros(1, np.uint32), output=True, scratch=True),
            "code_row": stored.shape[2], "code_expert": stored[0].size,
            "scale_row": given.shape[2], "scale_expert": given[0].size,
            "n": n, "blocks": k // formats.BLOCK, "half": n // 2 * halves, "tile_rows": tile_rows, "tiles": tiles,
            "chunk": chunk,
        },
        check=check,
        gate=0.0,
        sides=sides,
    )  # fmt: skip


def _sides(codes: Bytes, scales: Bytes, low: int, high: int, format: str) -> dict[str, bool]:
    """Edges of packing: ends of the scales that decoding folds in, what alone is past them, blocks of zeros, NaN."""
    some = ((codes & (7 if format == "mxfp4" else 127)).reshape(*scales.shape, formats.BLOCK) > 0).any(-1)
    below, above, nan = (scales < low), (scales > high) & (scales < 255), scales == formats.SCALE_NAN
    lost = (format == "mxfp8") & ((codes & 127) == 127).reshape(*scales.shape, formats.BLOCK).any(-1)
    inside = not ((below | above | nan) & some | nan | lost).any()
    found = {
        f"scale byte {low}, none past it": inside and bool((some & (scales == low)).any()),
        f"scale byte {high}, none past it": inside and bool((some & (scales == high)).any()),
        f"scale byte {low - 1} alone": bool((below & some).sum() == 1 and not (above & some).any() and not nan.any()),
        f"scale byte {high + 1} alone": bool((above & some).sum() == 1 and not (below & some).any() and not nan.any()),
        "scale NaN alone": bool(nan.sum() == 1 and not ((below | above) & some).any()),
        "block of zeros": bool((~some & ~nan).any()),
        "zeros of scale NaN": bool((~some & nan).any()),
    }
    if format == "mxfp8":
        found["NaN code"] = bool((lost & ~nan).any())
    return found


@dataclass(frozen=True)
class PackProblem(Problem):
    """One weight to be packed; its shape makes no difference to the kernel."""

    format: str = knob("mxfp4", choices=WEIGHTS, doc="element format")
    encoding: str = knob("rotated", choices=ENCODINGS, doc="order of bits in a word of mxfp4")

    @classmethod
    def on(cls, arch: Arch, **shape: Any) -> PackProblem:
        """By default what the target's kernels read."""
        format = shape.get("format", "mxfp4")
        return cls(**({"encoding": encoding_on(arch, format)} | shape))


def encoding_on(arch: Arch, format: str) -> str:
    """The encoding that weights of a format have on a target."""
    return layout.preferred_encoding(arch) if format == "mxfp4" else "rotated"


FAMILY = Family(
    name="pack",
    summary="MXFP4 and MXFP8 weights to the layout that products read",
    kernels=(Kernel(PACK, _cases, fixed=PackProblem.as_dict, rarer=({}, {"encoding": "nibble", "block": 512})),),
    problem=PackProblem,
    typical=lambda arch: tuple(PackProblem.on(arch, format=format) for format in WEIGHTS),
)
