"""`topk`: the k largest of each row and where they are, k up to 64.

Kernels:
    select   values and indices, the largest first

Shapes: x [rows, vocab] in rows that may lie apart, values and indices [rows, k]. Of equals the lower index comes first;
both zeros are one value, +0; a NaN comes after every number, so that it is among the k only where numbers run out.

Floor: bytes of x over the memory bandwidth; of one row, whose 402 KB lie in the L2 as a rule, a first load, two
selections of a block and the trip by which blocks of a row meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family, Problem
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel
from jitmx.models import GPT_OSS_120B
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, mismatches
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

DTYPES = ("bf16", "fp16", "fp32")
MAX_K, MAX_ROWS, MAX_VOCAB = 64, 1 << 20, 1 << 30
_RESIDENT = 1024  # threads of a multiprocessor that blocks of one launch are to fill

ARGUMENTS = Arguments(
    "SelectArguments",
    reads("x", "[rows, vocab]"),
    writes("values", "[rows, k], of x's type"),
    writes("indices", "[rows, k]", "long long"),
    writes("workspace", "[rows] counters in 16 bytes, and of each block the ranks of its k largest"),
    number("stride", "unsigned long long", "values between rows"),
    number("vocab", "unsigned int", "values of a row, k at least"),
    number("k", "unsigned int", f"1 to {MAX_K}"),
    number("shift", "unsigned int", "of the blocks of a row, their number's logarithm to base 2"),
)


@dataclass(frozen=True)
class SelectKnobs(Knobs):
    """Compile-time choices of `topk.select`."""

    dtype: str = knob("bf16", choices=DTYPES, doc="type of x")
    block: int = knob(512, choices=(128, 256, 512, 1024), doc="threads a block")
    vectors: int = knob(2, choices=(1, 2, 4), doc="vectors of 16 bytes a thread has at once")
    parts: int = knob(32, choices=(1, 2, 4, 8, 16, 32, 64), doc="blocks of a row at most")
    pdl: bool = PDL


@dataclass(frozen=True)
class TopkProblem(Problem):
    """One call of `jitmx.topk`."""

    rows: int = knob(1, low=1, high=MAX_ROWS, doc="rows of x")
    vocab: int = knob(GPT_OSS_120B.vocabulary, low=1, high=MAX_VOCAB, doc="values of a row")
    k: int = knob(8, low=1, high=MAX_K, doc="how many are taken")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of x")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.vocab:
            raise KnobError(f"k={self.k} is over the {self.vocab} values of a row", f"use k={self.vocab} at most")


def _check(knobs: SelectKnobs, arch: Arch) -> None:
    if knobs.vectors == 4 and knobs.dtype != "fp32":
        said = f"vectors=4 of {knobs.dtype} are 32 values a thread, over the 16 that registers hold"
        raise KnobError(said, "the nearest legal value is 2")


SELECT = KernelSpec(
    family="topk",
    name="select",
    knobs=SelectKnobs,
    contract=lambda knobs, arch: Contract(max_registers=64, require=(r"\bLDG\.E\..*128", r"\bREDUX\b")),
    threads=lambda knobs: knobs.block,
    arguments=lambda knobs: ARGUMENTS,
    check=_check,
)

_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def launch(knobs: SelectKnobs, problem: TopkProblem, multiprocessors: int) -> Launch:
    """As many blocks a row, of 1, 2, 4 and so on, as the card takes at once and have a vector for each thread."""
    vectors = problem.vocab * _SIZES[knobs.dtype] // 16
    room = multiprocessors * max(_RESIDENT // knobs.block, 1) // problem.rows
    most = min(knobs.parts, room, vectors // knobs.block)
    parts = 1 << max(most, 1).bit_length() - 1
    ranks = -(-problem.k // 2) * 2
    return Launch(problem.rows * parts, workspace=problem.rows * (16 + 8 * parts * ranks) if parts > 1 else 0)


def numbers_of(launched: Launch, problem: TopkProblem) -> dict[str, int]:
    """Fields of the arguments that a plan fixes, but for the stride."""
    shift = (launched.blocks // problem.rows).bit_length() - 1
    return {"vocab": problem.vocab, "k": problem.k, "shift": shift}


Array = npt.NDArray[Any]
_STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def reference(x: Array, k: int) -> npt.NDArray[np.int64]:
    """Indices of the k largest of each row, in order, as the kernel's documentation has it."""
    values = x.astype(np.float64)
    nothing = np.isnan(values)
    places = np.broadcast_to(np.arange(x.shape[-1]), x.shape)
    order = np.lexsort((places, -np.where(nothing, 0.0, values), nothing))
    return np.asarray(order[..., :k], np.int64)


_KINDS = (
    "few values", "flat", "ascending", "descending", "crowd", "late crowd", "NaN", "mostly NaN", "masked", "zeros",
    "tiny",
)  # fmt: skip


_FULL = ("one too many", "one too many later", "all of the first stay")


def _row(kind: str, vocab: int, knobs: SelectKnobs, generator: np.random.Generator) -> Array:
    """Values of one row."""
    if kind in _FULL:
        return _one_too_many(knobs, vocab, kind)
    row = generator.standard_normal(vocab) * 4
    at = np.arange(vocab)
    match kind:
        case "few values":
            row = np.round(row)
        case "flat":
            row[:] = -1.5
        case "ascending" | "descending":  # each round of a block is above, or below, all before it
            row = at / vocab * 64 * (1 if kind == "ascending" else -1)
        case "crowd" | "late crowd":  # more neighbours are high than the list holds
            high = max(min(vocab // 3, 2600), 1)
            row[slice(high) if kind == "crowd" else slice(-high, None)] += 40
        case "NaN" | "mostly NaN":
            row[generator.random(vocab) < (0.3 if kind == "NaN" else 0.999)] = np.nan
        case "masked":
            keep = generator.integers(0, vocab, 3)
            row[~np.isin(at, keep)] = -np.inf
            row[-1] = np.inf
        case "zeros":
            row = np.where(generator.random(vocab) < 0.5, -0.0, 0.0)
        case "tiny":  # below the smallest normal number, of both signs
            row = generator.integers(-60, 3, vocab) * np.float64(
                ml_dtypes.finfo(_STORED[knobs.dtype]).smallest_subnormal
            )
    return np.where(np.isnan(row) & (at % 3 == 1), -row, row)  # NaN of both signs


def _one_too_many(knobs: SelectKnobs, vocab: int, kind: str) -> Array:
    """A row of which one value more than the list holds reaches the threshold: in the first round, or in a later one.

    Groups are those of topk/selection.cuh: MAX_K of them have large values, and the least of their largest is the first
    threshold. Later threads have larger ones, so that what finds no room is among the k; or all others of the first
    round stay among them.
    """
    width = 16 // _SIZES[knobs.dtype]
    thread = np.arange(vocab) // width % knobs.block
    of_warp = 128 * 32 // knobs.block
    group = thread // 32 * of_warp + thread % 32 % of_warp
    first = np.arange(vocab) < knobs.block * knobs.vectors * width
    row = np.zeros(vocab)
    lone = [int(np.flatnonzero(first & (group == g))[0]) for g in range(MAX_K)]
    row[lone] = dict(zip(_FULL, (2, 1, 1000), strict=True))[kind]
    row[lone[0]] = 1
    rest = np.flatnonzero(first & (group > 0) & (group < MAX_K) & (row == 0) if kind == _FULL[0] else ~first)
    rest = rest[np.argsort(thread[rest], kind="stable")][MAX_K - 1 - min(knobs.block, 512) :]
    row[rest] = 3 + np.arange(len(rest)) // 4
    return row


def _sides(x: Array, found: Array) -> dict[str, bool]:
    values = np.take_along_axis(x.astype(np.float64), found, 1)
    last = values[:, -1:]
    beyond = (x.astype(np.float64) == last).sum(1) > (values == last).sum(1)
    return {
        "equals within the k": bool((values[:, 1:] == values[:, :-1]).any()) or found.shape[1] == 1,
        "equals at the end of the k": bool(beyond.any()),
        "subnormal": bool(((values != 0) & (np.abs(values) < float(ml_dtypes.finfo(x.dtype).tiny))).any()),
        "both zeros": bool(any(len(np.unique(np.signbit(row[row == 0]))) > 1 for row in values)) or found.shape[1] == 1,
        "infinite": bool((values == np.inf).any()),
        "minus infinite": bool((values == -np.inf).any()),
        "NaN": bool((np.isnan(values) & ~np.signbit(values)).any()),
        "-NaN": bool((np.isnan(values) & np.signbit(values)).any()),
        "last of a row": bool((found == x.shape[1] - 1).any()),
    }


def _checked(x: Array, k: int, width: int) -> tuple[list[Array], Array]:
    """Values and indices of the k largest; `width` values of a row count."""
    indices = reference(x[:, :width], k)
    values = np.take_along_axis(x[:, :width], indices, 1)
    return [np.where(values == 0, np.zeros((), x.dtype), values), indices], indices


def _case(
    variant: Variant, kinds: Sequence[str], vocab: int, k: int, padding: int, *, multiprocessors: int, seed: int,
    then: Sequence[str] = (),
) -> Case:  # fmt: skip
    """Rows of these kinds, with what is larger than all between them; `then` are those of the same launch again."""
    knobs, generator, rows = variant.knobs, np.random.default_rng(seed), len(kinds)
    problem = TopkProblem(rows, vocab, k, knobs.dtype)
    geometry = launch(knobs, problem, multiprocessors)
    x = np.full((rows, vocab + padding), np.inf)
    for row, kind in zip(x, kinds, strict=True):
        row[:vocab] = _row(kind, vocab, knobs, generator)
    stored = x.astype(_STORED[knobs.dtype])
    wanted, indices = _checked(stored, k, vocab)
    numbers = numbers_of(geometry, problem)
    values: dict[str, Any] = {
        "x": Buffer(stored), "values": Buffer(wanted[0], output=True), "indices": Buffer(indices, output=True),
        "stride": vocab + padding, **numbers,
    }  # fmt: skip
    if geometry.workspace:
        # Counters are zero; ranks are what another call left.
        workspace = np.full(geometry.workspace, 255, np.uint8)
        workspace[: 16 * rows] = 0
        values["workspace"] = Buffer(workspace, scratch=True)
    return Case(
        name=f"{k} of [{rows}, {vocab}] by {1 << numbers['shift']} blocks a row",
        launch=geometry,
        values=values,
        check=lambda found: _error(found, wanted),
        gate=0.0,
        sides=_sides(stored[:, :vocab], indices),
        fixed=("stride", "vocab", "k", "shift"),
        again=lambda: _case(variant, then or kinds, vocab, k, padding, multiprocessors=multiprocessors, seed=seed + 50),
    )


def _error(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """Share of values and indices that are wrong; of NaN any bits are right."""
    values, right = found[0].astype(np.float64), wanted[0].astype(np.float64)
    both = np.isnan(values) & np.isnan(right)
    same = (values == right) & (np.signbit(values) == np.signbit(right))
    return max(float(np.mean(~(both | same))), mismatches(found[1], wanted[1]))


def _cases(variant: Variant) -> Iterator[Case]:
    knobs = variant.knobs
    width = 16 // _SIZES[knobs.dtype]
    whole = knobs.block * knobs.vectors * width
    # Rows that start on any value; no more values than are taken, fewer than a vector; several rounds, the last short.
    yield _case(variant, _KINDS, 9 * width + 3, 7, 2, multiprocessors=1, seed=0)
    yield _case(variant, ("few values", "NaN", "zeros"), MAX_K, MAX_K, 1, multiprocessors=1, seed=1)
    yield _case(variant, ("few values", "masked"), 1, 1, 0, multiprocessors=1, seed=2)
    several = ("few values", "ascending", "late crowd", "descending")
    rows = several if knobs.block < 512 else several[1:3]
    shares = min(knobs.parts, max(_RESIDENT // knobs.block // len(rows), 1))
    longer = shares * (2 * whole + max(3000 - whole, 0)) - 3 * width + 1
    yield _case(variant, rows, longer, MAX_K, 3, multiprocessors=1, seed=3)
    yield _case(variant, ("crowd", "flat"), whole - 5, 33, 1, multiprocessors=1, seed=4)
    full = (*_FULL[:2] * max(_RESIDENT // knobs.block // 2, 1), _FULL[2])
    yield _case(variant, full, whole + min(whole, 1024), MAX_K, 0, multiprocessors=1, seed=7)
    if knobs.parts > 1:
        for seed, parts, k, kind in ((5, min(knobs.parts, 4), MAX_K, "ascending"), (6, 2, 5, "few values")):
            card = -(-3 * parts // max(_RESIDENT // knobs.block, 1))
            yield _case(
                variant, ("late crowd", kind, "crowd"), parts * knobs.block * width + 2 * width + 1, k, width - 1,
                multiprocessors=card, seed=seed, then=("flat", "mostly NaN", "few values"),
            )  # fmt: skip
        yield _far_share(variant)
    yield _far(variant)


# Values between the rows of a far case: their bytes pass 2^32, and what is before the last of them 2^32 values.
_FAR_STRIDE, _FAR_ROWS = (1 << 31) + 8, 4


def _far(variant: Variant) -> Case:
    """The last of rows that lie far from one another."""
    small = _case(variant, _KINDS[:1], 77, 5, 0, multiprocessors=1, seed=0)
    values: dict[str, Any] = dict(small.values)
    for name, stride in (("x", _FAR_STRIDE), ("values", 5), ("indices", 5)):
        data = values[name].data
        before = (_FAR_ROWS - 1) * stride * data.itemsize
        values[name] = values[name].spread([before], before + data.nbytes)
    values["stride"] = _FAR_STRIDE
    return Case(
        name=f"the last of {_FAR_ROWS} rows that are far apart",
        launch=Launch(_FAR_ROWS),
        values=values,
        check=small.check,
        gate=0.0,
        blocks=(_FAR_ROWS - 1,),
        fixed=small.fixed,
    )


def _far_share(variant: Variant) -> Case:
    """The last block of the longest row: what is before its share, times blocks, passes 2^32 vectors.

    A row has more blocks than `launch` gives it, so that the share of one is short.
    """
    knobs, k = variant.knobs, 2
    vocab, width = MAX_VOCAB - 3, 16 // _SIZES[knobs.dtype]
    vectors = vocab // width
    shift = (vectors // (knobs.block * knobs.vectors)).bit_length()
    parts = 1 << shift
    first = vectors * (parts - 1) >> shift
    size = (vectors - first) * width
    share = _row("few values", size, knobs, np.random.default_rng(0)).astype(_STORED[knobs.dtype])
    wanted, found = _checked(share[None], k, size)
    found = found + first * width
    ranks = 16 + 8 * k * (parts - 1)
    workspace = np.zeros((2, 16), np.uint8)  # the counter, and ranks of the last block
    return Case(
        name=f"the last of {parts} blocks of a row of {vocab}",
        launch=Launch(parts, workspace=ranks + 16),
        values={
            "x": Buffer(share.reshape(1, -1)).spread([first * 16], vocab * _SIZES[knobs.dtype], fill=255),
            "values": Buffer(wanted[0], scratch=True), "indices": Buffer(found, scratch=True),
            "stride": vocab, "vocab": vocab, "k": k, "shift": shift,
            "workspace": Buffer(workspace, output=True, scratch=True).spread([0, ranks], ranks + 16),
        },
        check=lambda outputs: _rank_error(outputs[0][1], wanted[0][0], found[0]),
        gate=0.0,
        blocks=(parts - 1,),
        fixed=("stride", "vocab", "k", "shift"),
    )  # fmt: skip


def _rank_error(stored: Array, values: Array, places: Array) -> float:
    """Share of ranks, 64 bits each (`ranked` in epilogue/argmax.cuh), that are wrong."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    keys = bits ^ np.where(bits >> np.uint64(31), np.uint64(0xFFFFFFFF), np.uint64(0x80000000))
    return mismatches(stored.view(np.uint64), keys << np.uint64(32) | np.uint64(0xFFFFFFFF) - places.astype(np.uint64))


def _heuristic(problem: TopkProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    return {"vectors": 4 if problem.dtype == "fp32" else 2, "pdl": "pdl" in arch.features}


def _candidates(problem: TopkProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    pdl, most = "pdl" in arch.features, 4 if problem.dtype == "fp32" else 2
    return [
        {"block": block, "vectors": vectors, "parts": parts, "pdl": pdl}
        for block, vectors, parts in (
            (1024, most, 16), (1024, most // 2, 32), (512, most, 16), (256, most, 64), (256, most // 2, 64),
            (512, most // 2, 64),
        )
    ]  # fmt: skip


FAMILY = Family(
    name="topk",
    summary="the k largest of each row and their indices",
    kernels=(
        Kernel(
            SELECT,
            _cases,
            fixed=lambda problem: problem.pick("dtype"),
            launch=launch,
            heuristic=_heuristic,
            candidates=_candidates,
            rarer=(
                {"dtype": "fp16", "block": 128, "vectors": 2, "parts": 4},
                {"dtype": "fp16", "block": 256, "vectors": 1, "parts": 1, "pdl": False},
            ),
        ),
    ),
    problem=TopkProblem,
    typical=lambda arch: (TopkProblem(), TopkProblem(dtype="fp32")),
    axes=("rows",),
    benchmark=Benchmark("jitmx.bench.topk", "the 1 to 64 largest of rows of logits", peers=("torch",)),
)
