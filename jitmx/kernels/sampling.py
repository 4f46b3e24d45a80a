"""`sampling`: the next token of each request from its logits.

Kernels:
    greedy   the index of a row's largest logit, and of its request how many tokens that makes

Shapes: logits [rows, vocab] in rows that may lie apart, tokens [rows]; lengths and requests [rows], prompts by request,
num_sampled and num_rejected [rows]. The lowest index of several with the largest value is taken; both zeros are one
value; a NaN is never the largest, so that a row of nothing else has index 0. Of a request that is still being read
(length < prompts[request]) nothing is sampled, of others one token; nothing is rejected.

Floor: the trip to the logits, which lie in the L2 as a rule, and that by which blocks of a row meet; bytes over the
bandwidth of the L2 for many rows.
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
from jitmx.kernels.kernel import Kernel
from jitmx.models import GPT_OSS_120B
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, mismatches
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

DTYPES = ("bf16", "fp16", "fp32")
MAX_ROWS, MAX_VOCAB = 1 << 20, 1 << 30
_MOST_CLUSTER = 16
_RESIDENT = 1024  # threads of a multiprocessor that blocks of one launch are to fill

ARGUMENTS = Arguments(
    "GreedyArguments",
    reads("logits", "[rows, vocab]"),
    reads("requests", "[rows], where the prompt's length of each is; or 0", "long long"),
    reads("lengths", "[rows], tokens of each request that are in this step or before it", "int"),
    reads("prompts", "by request, tokens that are read before one is sampled", "int"),
    writes("tokens", "[rows]", "long long"),
    writes("num_sampled", "[rows], or 0", "int"),
    writes("num_rejected", "[rows]", "int"),
    writes("workspace", "[rows] of a rank, a counter and four bytes"),
    number("stride", "unsigned long long", "values between rows"),
    number("vocab", "unsigned int"),
    number("shift", "unsigned int", "of the blocks of a row, their number's logarithm to base 2"),
)


@dataclass(frozen=True)
class GreedyKnobs(Knobs):
    """Compile-time choices of `sampling.greedy`."""

    dtype: str = knob("bf16", choices=DTYPES, doc="type of the logits")
    block: int = knob(512, choices=(128, 256, 512, 1024), doc="threads a block")
    vectors: int = knob(8, choices=(1, 2, 4, 8), doc="vectors of 16 bytes a thread that are on their way at once")
    parts: int = knob(8, choices=(1, 2, 4, 8, 16, 32, 64, 128), doc="blocks of a row at most")
    cluster: bool = knob(True, doc="blocks of a row are a cluster, and meet in its shared memory, not in the workspace")
    pdl: bool = PDL


@dataclass(frozen=True)
class SamplingProblem(Problem):
    """One call of `jitmx.greedy_sample`."""

    rows: int = knob(1, low=1, high=MAX_ROWS, doc="rows of the logits")
    vocab: int = knob(GPT_OSS_120B.vocabulary, low=1, high=MAX_VOCAB, doc="logits of a row")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of the logits")


def _check(knobs: GreedyKnobs, arch: Arch) -> None:
    if not knobs.cluster:
        return
    if "cluster" not in arch.features:
        raise KnobError("cluster=True needs sm_90 or newer", f"on {arch} use cluster=False")
    if knobs.parts > _MOST_CLUSTER:
        said = f"parts={knobs.parts} is over the {_MOST_CLUSTER} blocks of a cluster"
        raise KnobError(said, f"the nearest legal value is {_MOST_CLUSTER}; cluster=False takes more")


GREEDY = KernelSpec(
    family="sampling",
    name="greedy",
    knobs=GreedyKnobs,
    contract=lambda knobs, arch: Contract(max_registers=64, require=(r"\bLDG\.E\..*128", r"\bREDUX\b")),
    threads=lambda knobs: knobs.block,
    entry="jitmx_sampling_greedy",
    arguments=lambda knobs: ARGUMENTS,
    check=_check,
)

_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def launch(knobs: GreedyKnobs, problem: SamplingProblem, multiprocessors: int) -> Launch:
    """As many blocks a row, of 1, 2, 4 and so on, as the card takes at once and have a vector for each thread."""
    vectors = problem.vocab * _SIZES[knobs.dtype] // 16
    room = multiprocessors * max(_RESIDENT // knobs.block, 1) // problem.rows
    most = min(knobs.parts, room, vectors // knobs.block)
    parts = 1 << max(most, 1).bit_length() - 1
    meet = parts > 1 and not knobs.cluster
    return Launch(
        problem.rows * parts, cluster=parts if knobs.cluster else 1, workspace=16 * problem.rows if meet else 0
    )


def parts_of(launched: Launch, rows: int) -> int:
    """Blocks of a row."""
    return launched.blocks // rows


Floats = npt.NDArray[Any]
_STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def reference(logits: Floats) -> npt.NDArray[np.int64]:
    """The index of the largest of each row, as the kernel's documentation has it."""
    values = logits.astype(np.float64)
    numbers = ~np.isnan(values)
    largest = np.where(numbers, values, -np.inf).max(1, keepdims=True)
    return np.asarray((numbers & (values == largest)).argmax(1), np.int64)


def _row(
    kind: str, vocab: int, part: int, round: int, deep: int, least: float, generator: np.random.Generator
) -> Floats:
    """Logits of one row.

    Args:
        part, round: values of a block, and of a vector of each of its threads.
        deep: values before those of the last vector that its threads load at once.
        least: the smallest number.
    """
    row = generator.integers(-40, 41, vocab) / 4
    blocks = ("tie of blocks", "infinite", "neighbours", "neighbours below 0")
    apart = round if kind == "tie of a thread" else part + 1 if kind in blocks else 1
    first = min(round, vocab - apart) if kind in ("tie of a thread", "NaN") else vocab - apart
    place = int(generator.integers(0, max(first, 1)))
    both = [place, min(place + apart, vocab - 1)]
    match kind:
        case "tie" | "tie of a thread" | "tie of blocks":
            row[both] = 60
        case "zeros":
            row = -np.abs(row) - 1
            row[both] = -0.0, 0.0
        case "NaN":
            row[generator.random(vocab) < 0.3] = np.nan
            row[both[1] + 1 :] = np.nan
            row[both] = np.nan, 60
        case "infinite":
            row[both] = np.inf
        case "neighbours":  # of fp32, and far smaller than what lies between other values
            row = -np.abs(row) - 1
            row[both] = np.float32(3 * 2.0**-20), np.nextafter(np.float32(3 * 2.0**-20), np.float32(1))
        case "neighbours below 0":
            row = -np.abs(row) - 2
            row[both] = np.nextafter(np.float32(-1.5), np.float32(-2)), -1.5
        case "deep":
            row[min(deep + 13, vocab - 1)] = 60
        case "rising" | "falling":  # each block's largest is larger than that of the block before, or behind
            tops = np.arange(part // 2, vocab, part)
            row[tops] = 60 + np.arange(len(tops))[:: 1 if kind == "rising" else -1]
        case "late":  # in the last vectors
            row[max(vocab - 17, 0)] = 60
        case "nothing":
            row[:] = -np.inf
            row[: 1 + vocab // 3] = np.nan
        case "all NaN":
            row[:] = np.nan
        case "first" | "last":
            row[0 if kind == "first" else -1] = 60
        case "behind":  # the last vector, if any row that begins with one has three values behind it
            row[max(vocab - 5, 0)] = 60
        case "negative":
            row = -np.abs(row) - 1e-3
        case "tiny" | "tiny below 0":  # neighbours below the smallest normal number
            row = -np.abs(row) - 1
            row[both] = np.array([1, 2] if kind == "tiny" else [-2, -1]) * least
    return np.where(np.isnan(row) & (np.arange(vocab) % 3 == 1), -row, row)  # NaN of both signs


_KINDS = (
    "tie", "tie of a thread", "tie of blocks", "zeros", "NaN", "infinite", "deep", "late", "nothing", "all NaN",
    "first", "last", "negative", "neighbours", "neighbours below 0", "tiny", "tiny below 0",
)  # fmt: skip


def _sides(logits: Floats, found: npt.NDArray[np.int64], width: int, part: int) -> dict[str, bool]:
    values = logits.astype(np.float64)
    rows = np.arange(len(values))
    equal = values == values[rows, found][:, None]
    at = [np.flatnonzero(row) for row in equal]
    zero = values[rows, found] == 0
    return {
        "largest twice in a vector": any(len(np.unique(one // width)) < len(one) for one in at),
        "largest in two vectors": any(len(np.unique(one // width)) > 1 for one in at),
        "largest in two parts": any(len(np.unique(one // part)) > 1 for one in at),
        "-0 before 0": bool((zero & np.signbit(values[rows, found])).any()),
        "infinite": bool((values[rows, found] == np.inf).any()),
        "subnormal": bool((~zero & (np.abs(values[rows, found]) < float(ml_dtypes.finfo(logits.dtype).tiny))).any()),
        "-NaN before the largest": any(
            (np.isnan(row[:place]) & np.signbit(row[:place])).any() for row, place in zip(values, found, strict=True)
        ),
        "NaN before the largest": any(np.isnan(row[:place]).any() for row, place in zip(values, found, strict=True)),
        "row of -inf behind NaN": bool((values[rows, found] == -np.inf).any()),
        "row without a number": bool(np.isnan(values).all(1).any()),
        "last of a row": bool((found == values.shape[1] - 1).any()),
    }


def _case(
    variant: Variant, kinds: Sequence[str], vocab: int, padding: int, *, counted: bool, multiprocessors: int,
    seed: int, then: Sequence[str] = (),
) -> Case:  # fmt: skip
    """Rows of these kinds, with what is larger than all between them; `then` are those of the same launch again."""
    knobs, generator, rows = variant.knobs, np.random.default_rng(seed), len(kinds)
    dtype = _STORED[knobs.dtype]
    geometry = launch(knobs, SamplingProblem(rows, vocab, knobs.dtype), multiprocessors)
    parts, width = parts_of(geometry, rows), 16 // _SIZES[knobs.dtype]
    part = -(-vocab // parts)
    logits = np.full((rows, vocab + padding), np.inf)
    for row, kind in zip(logits, kinds, strict=True):
        round = width * knobs.block
        least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        row[:vocab] = _row(kind, vocab, part, round, (knobs.vectors - 1) * round, least, generator)
    stored = logits.astype(dtype)
    tokens = reference(stored[:, :vocab])
    values: dict[str, Any] = {
        "logits": Buffer(stored), "tokens": Buffer(tokens, output=True), "stride": vocab + padding, "vocab": vocab,
        "shift": parts.bit_length() - 1,
    }  # fmt: skip
    wanted: list[npt.NDArray[Any]] = [tokens]
    sides = _sides(stored[:, :vocab], tokens, width, part)
    if counted:
        prompts = generator.integers(1, 100, rows + 3).astype(np.int32)
        requests = generator.permutation(rows + 3)[:rows].astype(np.int64)
        lengths = (prompts[requests] + generator.integers(-1, 2, rows)).astype(np.int32)
        sampled = (lengths >= prompts[requests]).astype(np.int32)
        wanted += [sampled, np.zeros(rows, np.int32)]
        values |= {
            "requests": Buffer(requests), "lengths": Buffer(lengths), "prompts": Buffer(prompts),
            "num_sampled": Buffer(sampled, output=True), "num_rejected": Buffer(wanted[2], output=True),
        }  # fmt: skip
        sides["prompt not read"] = bool((sampled == 0).any())
        sides["prompt just read"] = bool((lengths == prompts[requests]).any())
    if geometry.workspace:
        values["workspace"] = Buffer(np.zeros(geometry.workspace, np.uint8), scratch=True)

    def check(found: Sequence[npt.NDArray[Any]]) -> float:
        return max(mismatches(a, b) for a, b in zip(found, wanted, strict=True))

    return Case(
        name=f"[{rows}, {vocab}] by {parts} blocks a row" + ", counted" * counted,
        launch=geometry,
        values=values,
        check=check,
        gate=0.0,
        sides=sides,
        fixed=("stride", "vocab", "shift"),
        again=lambda: _case(
            variant, then or kinds, vocab, padding, counted=counted, multiprocessors=multiprocessors, seed=seed + 50
        ),
    )


def _cases(variant: Variant) -> Iterator[Case]:
    knobs = variant.knobs
    width = 16 // _SIZES[knobs.dtype]
    whole = knobs.block * width
    # Rows that start on any value; fewer values than a vector; a second round of vectors, not all of whose are there.
    kinds = _KINDS * 2 + ("behind",) * width  # each starts on another value of a vector
    yield _case(variant, kinds, 5 * width + 3, 2, counted=True, multiprocessors=1, seed=0)
    yield _case(variant, _KINDS, 1, 0, counted=False, multiprocessors=1, seed=1)
    yield _case(variant, _KINDS, width - 1, 1, counted=True, multiprocessors=1, seed=2)
    several = "tie of a thread", "NaN", "deep", "late"
    rounds = min(knobs.parts, max(_RESIDENT // knobs.block // len(several), 1)) * knobs.vectors * whole
    yield _case(variant, several, rounds + 40 * width + 1, 3, counted=False, multiprocessors=1, seed=3)
    if knobs.parts > 1:
        for seed, parts in enumerate((min(knobs.parts, 16), 2), 4):
            met = "falling", "behind", "tie of blocks", "infinite", "NaN", "rising"
            then = "negative", "late", "nothing", "behind", "falling", "rising"
            card = -(-len(met) * parts // max(_RESIDENT // knobs.block, 1))
            yield _case(
                variant, met, parts * whole + 2 * width + 1, width - 1, counted=bool(seed % 2), multiprocessors=card,
                seed=seed, then=then,
            )  # fmt: skip
    yield _far(variant)


# Values between the rows of a far case: their bytes pass 2^32, and what is before the last of them 2^32 values.
_FAR_STRIDE, _FAR_ROWS = (1 << 31) + 8, 4


def _far(variant: Variant) -> Case:
    """The last of rows that lie far from one another."""
    small = _case(variant, _KINDS[:1], 77, 0, counted=True, multiprocessors=1, seed=0)
    values: dict[str, Any] = dict(small.values)
    item = values["logits"].data
    size = _FAR_STRIDE * item.itemsize
    values["logits"] = values["logits"].spread([(_FAR_ROWS - 1) * size], (_FAR_ROWS - 1) * size + item.nbytes)
    for name in ("requests", "lengths", "tokens", "num_sampled", "num_rejected"):
        one = values[name].data.itemsize
        values[name] = values[name].spread([(_FAR_ROWS - 1) * one], _FAR_ROWS * one)
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


def _heuristic(problem: SamplingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Clusters of eight where there are any; on sm_12x nobody has seen them gain anything."""
    cluster = "cluster" in arch.features and arch.major < 12
    return {"cluster": cluster, "parts": 8 if cluster else 64, "pdl": "pdl" in arch.features}


def _candidates(problem: SamplingProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    pdl = "pdl" in arch.features
    found = [
        {"cluster": False, "parts": parts, "block": block, "vectors": vectors, "pdl": pdl}
        for parts, block, vectors in ((64, 256, 2), (128, 256, 1), (32, 512, 2), (16, 512, 4), (8, 512, 8))
    ]
    if "cluster" in arch.features:
        found += [
            {"cluster": True, "parts": parts, "block": block, "vectors": vectors, "pdl": pdl}
            for parts, block, vectors in ((8, 1024, 4), (16, 512, 4), (8, 512, 4), (8, 256, 8), (4, 512, 8))
        ]
    return found


FAMILY = Family(
    name="sampling",
    summary="the next token of each request from its logits",
    kernels=(
        Kernel(
            GREEDY,
            _cases,
            fixed=lambda problem: problem.pick("dtype"),
            launch=launch,
            heuristic=_heuristic,
            candidates=_candidates,
            rarer=(
                {"dtype": "fp16", "block": 128, "vectors": 2, "parts": 4},
                {"dtype": "fp16", "block": 128, "vectors": 1, "parts": 16, "cluster": False, "pdl": False},
            ),
        ),
    ),
    problem=SamplingProblem,
    typical=lambda arch: (SamplingProblem(), SamplingProblem(dtype="fp32")),
    axes=("rows",),
)
