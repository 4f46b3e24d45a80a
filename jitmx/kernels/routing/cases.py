"""`routing`: references in float64 and launches with known results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx.kernels.linear.arguments import norm_rows, norm_sides
from jitmx.kernels.routing.knobs import MAX_TOKENS
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.case import Buffer, Case, deviation, judged, mismatches, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

Array = npt.NDArray[Any]
Geometry = Callable[[Any, int, int], Launch]  # of knobs, tokens and local experts

EPSILON = 1e-5
AGAIN = 1000  # added to a seed, for the same launch on other inputs
_OVERFLOW = 88.0  # e^x is past fp32 from here on
GATE = 1e-4  # relative L2 of the weights; ids and lists are exact
LISTS = "pairs", "offsets", "schedule", "tiles"
STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


@dataclasses.dataclass(frozen=True)
class Lists:
    """What the kernels write as `pairs`, `offsets`, `schedule` and `tiles`."""

    pairs: Array
    offsets: Array
    schedule: Array
    tiles: Array


def router(x: Array, weight: Array, bias: Array | None, norm: Array | None, epsilon: float = EPSILON) -> Array:
    """Logits [m, experts] in float64; with the norm of bf16 values, x * norm is rounded to bf16 as the kernel does."""
    scale = np.ones((len(x), 1))
    if norm is not None:
        wide = x.astype(np.float64)
        scale = _scale(x, epsilon)
        rounded = ml_dtypes.bfloat16 if x.dtype == ml_dtypes.bfloat16 else np.float64
        x = (wide * norm.astype(np.float64)).astype(rounded)
    logits = x.astype(np.float64) @ weight.astype(np.float64).T * scale
    return logits if bias is None else logits + bias.astype(np.float64)


def _scale(x: Array, epsilon: float) -> Array:
    """What RMSNorm multiplies each row by, [m, 1]."""
    scale: Array = 1 / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + epsilon)
    return scale


def normalized(x: Array, norm: Array, epsilon: float = EPSILON) -> Array:
    """RMSNorm of x [m, h] in float64."""
    return x.astype(np.float64) * _scale(x, epsilon) * norm.astype(np.float64)


def choose(logits: Array, k: int, scoring: str) -> tuple[Array, Array]:
    """Ids and weights [m, k]: the largest first, the lower id where logits are equal, a NaN after all numbers."""
    logits = logits.astype(np.float64)
    last = np.isnan(logits)
    logits = np.where(last, -np.inf, logits)
    ids = np.lexsort((np.broadcast_to(np.arange(logits.shape[1]), logits.shape), -logits, last), axis=-1)[:, :k]
    chosen = np.take_along_axis(logits, ids, axis=1)
    with np.errstate(invalid="ignore"):
        shares = np.exp(chosen - chosen[:, :1])
        among = shares if scoring == "softmax_topk" else np.exp(logits - chosen[:, :1])
    return ids.astype(np.int32), shares / among.sum(axis=1, keepdims=True)


def lists(ids: Array, local: int, tile: int, expert_map: Array | None = None) -> Lists:
    """The lists of ids [m, k]; ids that name no expert, or one that is elsewhere, are left out."""
    flat = ids.reshape(-1).astype(np.int64)
    if expert_map is not None:
        inside = (flat >= 0) & (flat < len(expert_map))
        flat = np.where(inside, expert_map[np.where(inside, flat, 0)], -1)
    flat = np.where((flat >= 0) & (flat < local), flat, local)
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=local + 1)[:local]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    pairs = np.full(len(flat), -1)
    pairs[: offsets[-1]] = order[: offsets[-1]]
    entries = [
        (expert, offsets[expert] + number * tile, min(tile, count - number * tile), number)
        for expert, count in enumerate(counts.tolist())
        for number in range(-(-count // tile))
    ]
    schedule = np.zeros((capacity(len(ids), ids.shape[1], local, tile), 4), np.int32)
    schedule[:, 0] = -1
    schedule[: len(entries)] = np.array(entries, np.int32).reshape(-1, 4)
    return Lists(pairs.astype(np.int32), offsets.astype(np.int32), schedule, np.array([len(entries)], np.int32))


def _shapes(variant: Variant) -> list[tuple[int, int, str]]:
    """Tokens, values of a hidden state, and what is special."""
    knobs = variant.knobs
    if variant.spec.name == "route":
        workers = knobs.splits * knobs.parts
        long = 32 * workers * knobs.depth + 40  # one round of chunks and a ragged piece of another
        shapes = [(1, long, "ties"), (min(knobs.tokens, 8), 8, "nan"), (knobs.tokens + 3, 72, "plain")]
        if knobs.tile:
            few = 32 // knobs.k + 1
            shapes.append((few if knobs.cluster else max(3 * knobs.tokens + 1, few), 40, "plain"))
        warps = variant.threads // 32
        if knobs.normalized and warps > 1:
            # Of more warps than tokens those without one write what is normalized, in two rounds.
            most = min(knobs.tokens, 8, warps - 1)
            shapes.append((most, ((warps - most) * 32 // most + 1) * 8, "plain"))
            if warps <= knobs.tokens:  # and none is without
                shapes.append((warps, 72, "plain"))
        return shapes
    if variant.spec.name == "many":
        ring = 64 * knobs.splits * (knobs.stages + 1)  # a stage of each block is taken again
        return [(1, 8, "nan"), (knobs.tokens + 3, ring - 24, "plain"), (5, 72, "ties")]
    if variant.spec.name == "topk":
        few = 32 // knobs.k
        return [
            (1, 8, "nan"),
            (few - 1, 8, "plain"),
            (few, 8, "ties"),
            (few + 1, 8, "ties"),
            (32 * knobs.warps // knobs.k - 1, 8, "plain"),  # with lists a round of every warp, the last one ragged
            (32 * knobs.warps // knobs.k + 2, 8, "nan"),
        ]
    threads = knobs.cluster * 32 * knobs.warps
    many = 3 * threads // knobs.k - 4  # three rounds of a warp, of the last warp too
    # A few pairs more than threads are, whose warps take two rounds: some of them have none.
    over = threads // knobs.k + 1
    shapes = [(0, 8, "plain"), (1, 8, "plain"), (7, 8, "strangers"), (over, 8, "plain"), (many, 8, "few experts")]
    if threads * knobs.tile <= 8192:  # more tiles than threads
        shapes.append((threads * knobs.tile // knobs.k + 3, 8, "plain"))
    if threads >= 512:  # else it takes too long
        shapes.append(((1 << 16) // knobs.k + 3, 8, "one expert"))
    return shapes


def cases(variant: Variant, launch: Geometry) -> Iterator[Case]:
    """Small ragged launches: ties, NaN, absent experts, more tokens than blocks share, experts that take all, logits
    whose powers are beyond fp32.

    Args:
        launch: geometry of a launch by knobs, tokens and local experts.
    """
    for seed, (m, h, special) in enumerate(_shapes(variant)):
        yield _case(variant, launch, m, h, special, seed)
    if variant.spec.name != "sort" and not _knobs(variant).tile:
        yield _far_case(variant, launch)


def _far_case(variant: Variant, launch: Geometry) -> Case:
    """The last tokens of the most that there may be: x, ids, weights, and parts of logits in the workspace.

    Lists are made by one block or cluster, which goes through all ids: with them, and so in `sort`, no few blocks are
    enough, and 2^32 bytes of ids take a launch of minutes here. Their offsets are those of ints below 2^30.
    """
    knobs = _knobs(variant)
    h = 264  # vectors of x are over 2^32
    unit = variant.knobs.warps if variant.spec.name == "topk" else knobs.tokens
    before = (MAX_TOKENS - 8) // unit * unit
    while launch(knobs, before + 3, knobs.experts).workspace > 1 << 38:  # device addresses have room for a few
        before = before // 2 // unit * unit
    few = _case(variant, launch, 3, h, "plain", 9)
    geometry = launch(knobs, before + 3, knobs.experts)
    values: dict[str, Any] = dict(few.values)
    for name in ("x", "ids", "weights", "normalized"):
        if name in values:
            row = values[name].data[0].nbytes
            values[name] = values[name].spread(before * row, (before + 3) * row)
    together = max(getattr(knobs, "splits", 1), geometry.cluster)
    if geometry.workspace:
        # Counters of tiles, then the parts of each; those of the last tile have rows for as many tokens as others.
        tiles = geometry.blocks // together
        size = (geometry.workspace - 4 * (-(-(tiles + 1) // 4) * 4)) // tiles
        places = (((tiles - 1) * 4 // 16 * 16, 16), (geometry.workspace - size, size))
        at = np.concatenate([np.arange(begin, begin + count, 16) for begin, count in places])
        held = Buffer(np.zeros((len(at), 16), np.uint8), scratch=True)
        values["workspace"] = held.spread(at, geometry.workspace)
    return dataclasses.replace(
        few,
        name=f"far: m={before + 3} h={h}",
        launch=geometry,
        values=values | {"m": before + 3},
        blocks=range(geometry.blocks - together, geometry.blocks),
    )


def _knobs(variant: Variant) -> Any:
    """The knobs of a variant; what it has none of is plain."""
    plain = {"dtype": "bf16", "norm": False, "normalized": False, "mapped": False, "tile": 0}
    return SimpleNamespace(**plain | variant.knobs.as_dict())


def _expert_map(variant: Variant, generator: np.random.Generator) -> tuple[Array | None, int]:
    """Every second expert, in another order, is here, and the first."""
    experts = variant.knobs.experts
    if not _knobs(variant).mapped:
        return None, experts
    local = (experts + 1) // 2
    expert_map = np.resize(np.array([-1, local, -2, 65536], np.int32), experts)
    here = generator.permutation(experts)
    here = here[np.argsort(here > 0, kind="stable")][:local]
    generator.shuffle(here)
    expert_map[here] = np.arange(local)
    return expert_map, local


def _logits(variant: Variant, m: int, special: str, generator: np.random.Generator) -> Array:
    knobs = variant.knobs
    logits = generator.standard_normal((m, knobs.experts)).astype(STORED[knobs.dtype])
    if special == "ties":
        logits[::2, ::3] = 1.5
        logits[1::2] = -1 - np.abs(logits[1::2])  # below zeros of either sign
        logits[1::2, 1::7] = -0.0
        logits[1::2, 2::7] = 0.0
        if m > 2:  # fewer numbers than are chosen, beside minus infinity
            logits[-1] = -np.inf
            logits[-1, -2 : -1 - knobs.k : -1] = np.arange(knobs.k - 1)
    elif special == "nan":
        logits[:, generator.permutation(knobs.experts)[: knobs.experts // 2]] = np.nan
        logits[-1] = np.nan
        logits[-1, -1] = -np.inf if m > 1 else 1
    elif special == "plain":
        logits[:, 0] += 4  # an expert that nearly all take
        logits[0] += 2 * _OVERFLOW
        logits[-1] -= 2 * _OVERFLOW
    return logits


def _case(variant: Variant, launch: Geometry, m: int, h: int, special: str, seed: int) -> Case:
    knobs, generator = _knobs(variant), np.random.default_rng(seed)
    expert_map, local = _expert_map(variant, generator)
    inputs: dict[str, Any] = {}
    outputs: list[Array] = []
    bound: Array | float = 0.0
    epsilon = EPSILON if seed % 2 == 0 else 0.25
    if variant.spec.name == "sort":
        ids = generator.permuted(np.tile(np.arange(knobs.experts, dtype=np.int32), (m, 1)), axis=1)[:, : knobs.k].copy()
        if special == "few experts":
            # Whole tiles of the first experts, three rows fewer of the last.
            full = m // knobs.tile * knobs.tile or m - 3
            ids[full:][ids[full:] < knobs.k] = -1
            ids[:full] = np.arange(knobs.k)
            ids[full - 3 : full, -1] = -1
        elif special == "one expert":  # its rows are more than 16 bits count
            ids[:] = 1
        elif special == "strangers":
            ids[::2, 0], ids[1, -1] = -1, knobs.experts
            ids[2::4, 0] += 65536 + ids[3, 0] + 1  # of which lower halves are experts'
        inputs["ids"] = Buffer(ids)
        sides = _id_sides(ids, knobs.experts)
    else:
        logits, off = _logits_of(variant, m, h, special, generator, inputs, epsilon, seed)
        ids, weights = choose(logits, knobs.k, knobs.scoring)
        # What the largest error of a row's logits makes of its weights, and powers of two that are approximate.
        bound = np.abs(weights) * (4 * off + 2.0**-16) + 2.0**-100
        sides = _logit_sides(logits, knobs.k)
        if variant.spec.name == "topk" and knobs.k > 1:
            sides["minus infinity beside numbers"] = bool(
                (np.isneginf(logits).any(1) & np.isfinite(logits[:, -2])).any()
            )
        if not knobs.norm:
            sides["powers beyond fp32"] = bool((logits > _OVERFLOW).any())
        if knobs.norm:
            sides |= norm_sides(inputs["x"].data, epsilon)
        inputs |= {"ids": Buffer(ids, output=True), "weights": Buffer(weights.astype(np.float32), output=True)}
        outputs = [ids, weights]
    if knobs.tile:
        wanted = lists(ids, local, knobs.tile, expert_map)
        arrays = (wanted.pairs, wanted.offsets, wanted.schedule, wanted.tiles)
        outputs += arrays
        inputs |= {"capacity": len(wanted.schedule)}
        inputs |= dict(zip(LISTS, (Buffer(array, output=True) for array in arrays), strict=True))
        if expert_map is not None:
            inputs["map"] = Buffer(expert_map, constant=True)
    if knobs.normalized:
        wide = normalized(inputs["x"].data, inputs["norm"].data, epsilon)
        sides["normalized is -0"] = bool(((wide == 0) & np.signbit(wide)).any())
        inputs["normalized"] = Buffer(wide.astype(inputs["x"].data.dtype), output=True)
        outputs.append(wide)
    geometry = launch(variant.knobs, m, local)
    if geometry.workspace:
        inputs["workspace"] = Buffer(np.zeros(geometry.workspace, np.uint8), scratch=True)
    return Case(
        name=f"m={m} h={h} {special}",
        launch=geometry,
        values={"local": local, "epsilon": epsilon, "m": m, "h": h, **inputs},
        check=lambda found: _error(found, outputs, bound),
        gate=GATE,
        sides=sides,
        fixed=("local", *(["capacity"] if knobs.tile else []), "m", "h"),
        again=lambda: _case(variant, launch, m, h, "plain", seed + AGAIN),
    )


def _id_sides(ids: Array, experts: int) -> dict[str, bool]:
    """Edges of ids that are only sorted."""
    return {
        "negative id": bool((ids < 0).any()),
        "id past the experts": bool((ids >= experts).any()),
        "no row": len(ids) == 0,
        "expert of most rows": len(ids) > 1 and int(np.unique(ids, return_counts=True)[1].max()) > len(ids) // 2,
    }


def _logit_sides(logits: Array, k: int) -> dict[str, bool]:
    """Edges of a choice among logits: equal ones, at its end or within, and what is no number."""
    nan = np.isnan(logits)
    ordered = -np.sort(-logits, axis=1)  # NaN last
    ends = logits.shape[1] > k
    return {
        "equal logits at the last place": not ends
        or bool((ordered[:, k - 1] == ordered[:, min(k, logits.shape[1] - 1)]).any()),
        "NaN beside numbers": bool((nan.any(axis=1) & ~nan.all(axis=1)).any()),
    }


def _logits_of(
    variant: Variant,
    m: int,
    h: int,
    special: str,
    generator: np.random.Generator,
    inputs: dict[str, Any],
    epsilon: float,
    seed: int,
) -> tuple[Array, Array | float]:
    """Logits of random inputs, which are added to `inputs`, and how far those of each row may be off, [m, 1]."""
    knobs = _knobs(variant)
    if variant.spec.name == "topk":
        logits = _logits(variant, m, special, generator)
        inputs["x"] = Buffer(logits)
        return logits.astype(np.float64), 0.0
    x = generator.standard_normal((m, h)).astype(STORED[knobs.dtype])
    if knobs.norm:
        x = norm_rows(x, epsilon, seed)
        x[:, 0] = -0.0
    elif special == "plain":
        x[0] *= _OVERFLOW
    weight = (generator.standard_normal((knobs.experts, h)) * 2 / np.sqrt(h)).astype(ml_dtypes.bfloat16)
    bias = norm = None
    if knobs.bias != "none":
        bias = generator.standard_normal(knobs.experts).astype(STORED[knobs.bias.removeprefix("bias_")])
    if knobs.norm:
        norm = generator.uniform(0.5, 1.5, h).astype(STORED[knobs.dtype])
    if special == "ties":
        third = knobs.experts // 3  # equal logits by threes: of four chosen, the last is one of several
        for first in (third, 2 * third):
            weight[first : first + third] = weight[:third]
            if bias is not None:
                bias[first : first + third] = bias[:third]
    elif special == "nan":
        weight[knobs.experts // 2, 0] = np.nan
    inputs |= {"x": Buffer(x), "weight": Buffer(weight, constant=True)}
    if bias is not None:
        inputs["bias"] = Buffer(bias, constant=True)
    if norm is not None:
        inputs["norm"] = Buffer(norm, constant=True)
    size = router(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias), norm, epsilon)
    return router(x, weight, bias, norm, epsilon), np.nanmax(summed(size, h), axis=1, keepdims=True, initial=0.0)


def _error(found: Sequence[Array], wanted: Sequence[Array], bound: Array | float) -> float:
    """Error of the weights, each of which may be off by `bound`.

    It is infinite where ids or lists differ, or normalized values by more than a rounding.
    """
    error = 0.0
    for a, b in zip(found, wanted, strict=True):
        if b.dtype == np.float64 and a.dtype == np.float32:
            error = judged(relative_l2(a, b), deviation(a, b, bound), GATE)
        elif b.dtype == np.float64:
            ulp = np.spacing(np.abs(b).astype(a.dtype)).astype(np.float64)
            if not (np.abs(a.astype(np.float64) - b) <= 0.51 * ulp).all() or (np.signbit(a) != np.signbit(b)).any():
                return float("inf")
        elif mismatches(a, b):
            return float("inf")
    return error
