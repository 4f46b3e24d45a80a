"""`attention`: random inputs of a launch, and what it should leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.attention.reference import STORED, Array, Attended, attend, rotate, to_e4m3, visible
from jitmx.registry.case import Buffer

LEFT = 3.0  # what lies in rows of the output that a launch leaves to another
NOWHERE = 1 << 30  # a page that is read only by mistake
# Of far buffers: elements from a page to the next, and the first page, beyond 2^32 bytes whatever a value's size;
# from a head to the next, where these do not lie within a token; elements from a row of q, k, v or out to the next;
# where positions that are given begin; old tokens before a window; pages from a row of the table to the next.
FAR, FAR_PAGE, FAR_HEAD = (1 << 16) + (1 << 6), 70001, (1 << 32) + (1 << 6)
FAR_ROW, FAR_POSITION, FAR_TOKENS, FAR_TABLE = (1 << 32) + (1 << 6), (1 << 26) + 1, 70000, (1 << 31) + 8
PADS = {"q": 8, "k": 16, "v": 24}  # elements between rows, which are NaN: rows lie in larger ones, of others
FP16_MAX = 65504.0
SHIFT = 3  # of positions that are given: they need not count from a request's first token
_BRIGHT = 8  # last values of a head that make a key's weight large
# A scale, and what it divides into halfway points of E4M3, which a product with its reciprocal lies above.
HALVED, HALFWAY = 0.875, (1.5625, 1.8125)
# All tokens have the same level values, of E4M3, and so has their weighted mean. Half a unit of bf16 or fp16 there is
# 1.07 times _FINE of it: weights of that type that are about the same and rounded to the nearest are together less far
# off, and cut ones further. _HALF is that half unit of bf16: fp16 weights tell values apart that lie just above it.
_LEVEL, _LEVELS, _HALF = 1.875, 4, 2.0**-8
_FINE = {"bf16": 2.0**-9, "fp16": 2.0**-12}
SCALE = 0.3  # larger than 1 / sqrt(head_dim): weights of a few keys count


@dataclass(frozen=True)
class Asked:
    """One launch.

    Attributes:
        name: what is ragged about it.
        requests: old tokens and new ones of each.
        kv_heads: heads of the cache.
        window: tokens that a token attends to.
        sinks: where sinks are drawn from.
        soft_cap: of the logits.
        null_slots: whether the first new token is written nowhere.
        explicit: whether slots and positions are given.
        placed: whether positions are, without slots.
        first: whether the first page is that of a request without old tokens, if there is one, instead of nobody's.
        large: factor of q: logits far apart.
        least_queries: new tokens of a request that is not left to another launch; most_queries: at most.
        far: whether pages of the cache, its heads where a head's tokens lie side by side, rows, those of the table, and
            positions that are given lie so far apart that offsets pass 2^32 bytes; all heads have one scale then.
        lost: whether a value of q of the first request is NaN, and a new value of each head of the last one.
        beyond: whether a value of the first token's q is beyond the range of fp16.
        bright: whether the first key in a token's window has a large weight, and would have it in the next one's.
        still: of each 16 rows, tokens x group, of a request in turn the first eight or the others have no preference
            among keys; those of the others rise by so much that their powers are beyond fp32.
        sunk: whether all logits are so low that powers of them are 0, and only their differences count.
        rising: whether the last sixth of a request's old keys has logits twice as large as all before.
        loud: whether the first value of new keys, which no query looks at, and of new values is beyond E4M3, of every
            second token without end, and the next two of new values lie halfway between two of E4M3.
        level: whether the last values of all tokens are the same, so that results there are known to the last bit.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    window: int = 0
    sinks: tuple[float, ...] = (0.0, 1.0, -1.0, 4.0)
    soft_cap: float = 3.0
    null_slots: bool = False
    explicit: bool = False
    placed: bool = False
    first: bool = False
    large: float = 1.0
    least_queries: int = 1
    most_queries: int = 1 << 30
    far: bool = False
    lost: bool = False
    beyond: bool = False
    bright: bool = False
    still: bool = False
    sunk: bool = False
    rising: bool = False
    loud: bool = False
    level: bool = False

    def takes(self, new: int) -> bool:
        """Whether a request of so many new tokens is not left to another launch."""
        return self.least_queries <= new <= self.most_queries

    @property
    def problem(self) -> AttentionProblem:
        """Its geometry, as a call would ask for it."""
        queries = max(new for _, new in self.requests if self.takes(new))
        return AttentionProblem(batch=len(self.requests), kv_heads=self.kv_heads, queries=queries)


@dataclass
class Drawn:
    """Inputs of a launch, and what it should leave."""

    values: dict[str, Any]
    caches: dict[str, Array]
    out: Array
    bound: Array
    sides: dict[str, bool]
    level: Array  # how far a result may be off before it is rounded, or infinite


def drawn(knobs: Any, asked: Asked, seed: int) -> Drawn:
    generator = np.random.default_rng(seed)
    dtype, head_dim, page = STORED[knobs.dtype], knobs.head_dim, knobs.page_size
    kv_heads, heads = asked.kv_heads, asked.kv_heads * knobs.group
    requests, news = len(asked.requests), [new for _, new in asked.requests]
    tokens = sum(news)
    window = asked.window if knobs.windowed else 0

    # Pages in no order, with more that nobody has, of NaN, as is what lies behind a request's tokens. Those wholly
    # before a window are none of the cache's. Far ones are left out here: their tokens are gone.
    gone = [max(old - window + 1, 0) // page * page if asked.far and window else 0 for old, _ in asked.requests]
    there = [(old - without, new) for (old, new), without in zip(asked.requests, gone, strict=True)]
    wide = max(1, *(-(-(max(old, 0) + new) // page) for old, new in there))
    table = 1 + generator.permutation(requests * wide).astype(np.int32).reshape(requests, wide)
    if asked.first:
        owner = next((r for r, (old, _) in enumerate(there) if old == 0), 0)
        table[table == 1], table[owner, 0] = table[owner, 0], 0
    pages = requests * wide + 2
    shape = (pages, page, kv_heads, head_dim)
    scales = [generator.uniform(0.5, 2.0, 1 if asked.far else kv_heads).astype(np.float32) for _ in "kv"]
    if asked.loud:
        scales = [np.full_like(scale, HALVED) for scale in scales]
    fine = _FINE[knobs.dtype if knobs.cache == "same" else "fp16"]
    levels = np.where(np.arange(_LEVELS) % 2 == 0, _LEVEL, -_LEVEL)
    if asked.level:
        just_above = (1 + _HALF / _LEVEL) * (1 + 1.0625 * fine)
        scales[1] = np.full_like(scales[1], just_above if knobs.dtype == "bf16" else 1)
    caches = [generator.standard_normal(shape) for _ in "kv"]
    if asked.sunk:
        caches[0][..., -_BRIGHT:] = 4
    per_head = [scale[None, None, :, None] for scale in scales]
    if knobs.cache == "e4m3":
        caches = [to_e4m3(x, scale) for x, scale in zip(caches, per_head, strict=True)]
    else:
        caches = [x.astype(dtype) for x in caches]
    if asked.level:
        caches[1][..., -_LEVELS:] = levels
    behind = [(row, np.arange(max(old, 0) + new, wide * page)) for row, (old, new) in zip(table, there, strict=True)]
    for cache in caches:
        cache[1 if asked.first else 0] = np.nan
        for row, at in behind:
            cache[row[at // page], at % page] = np.nan
    if asked.rising:
        for row, (old, _) in zip(table, there, strict=True):
            late = np.arange(old * 5 // 6, old)
            caches[0][row[late // page], late % page] = 2 * caches[0][row[late // page], late % page].astype(np.float32)
    q, k, v = (
        generator.standard_normal((tokens, count, head_dim)).astype(dtype) for count in (heads, kv_heads, kv_heads)
    )
    q = (q.astype(np.float32) * asked.large).astype(dtype)
    if asked.beyond:
        q[0], q[0, :, 0] = 0.0, 1e5
    if asked.lost:
        q[: news[0], 0, -1], v[-news[-1] :, :, 1] = np.nan, np.nan
    if asked.bright:
        q[..., -_BRIGHT:] = 2
    if asked.sunk:
        q[..., -_BRIGHT:], k[..., -_BRIGHT:] = -24, 4
    if asked.loud and knobs.cache == "e4m3":
        q[..., [0, 1, knobs.rotary // 2]] = 0
        beyond = np.where(np.arange(tokens) % 2 == 0, 1000, np.inf)[:, None]
        for x in (k, v):
            x[..., 0] = beyond * np.sign(x[..., 0].astype(np.float32))
        v[..., 1:3] = HALVED * np.asarray(HALFWAY) * np.sign(v[..., 1:3].astype(np.float32))
    if asked.level:
        v[..., -_LEVELS:] = levels * (scales[1][0] if knobs.cache == "e4m3" else 1)
    sinks = np.resize(np.asarray(asked.sinks), heads)
    sink_type = knobs.sinks.removeprefix("sinks_")
    rounded_sinks = None
    if knobs.sinks != "no_sinks":
        rounded_sinks = sinks.astype(np.float32 if sink_type == "fp32" else STORED[sink_type])
    words = knobs.mask // 32
    mask_words = np.zeros((tokens, max(words, 1)), np.uint32)
    starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
    seen, positions = _seen(knobs, asked, starts, mask_words, generator)
    rope_table = None
    places = np.unique(positions) if asked.far else np.arange(int(positions.max()) + 1)  # that the table has
    if knobs.rope != "no_rope":
        table_type = knobs.table.removeprefix("table_")
        angles = generator.uniform(-np.pi, np.pi, (len(places), knobs.rotary // 2))
        if asked.sunk:  # the last values of a head are not turned
            angles[:, -_BRIGHT:] = 0
        rope_table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(
            np.float32 if table_type == "fp32" else STORED[table_type]
        )

    out = np.zeros((tokens, heads, head_dim))
    left = np.zeros((tokens, heads, head_dim), dtype)
    bound = np.zeros((tokens, heads, head_dim))
    level = np.full((tokens, heads, head_dim), np.inf)
    if asked.level:
        shares = np.zeros(heads, bool) if rounded_sinks is None else np.isfinite(rounded_sinks)
        most = _LEVEL * (float(scales[1][0]) if knobs.cache == "e4m3" else 1)
        level[:, :, -_LEVELS:] = np.where(shares, np.inf, fine * most)[:, None]
    slots = np.full(tokens, -1, np.int64)
    first_page = FAR_PAGE if asked.far else 0
    after = [cache.copy() for cache in caches]
    lengths = np.zeros(requests, np.int32)
    sides: dict[str, bool] = {}
    kept_by: dict[str, Array] = {}
    for r, (old, new) in enumerate(there):
        rows = slice(starts[r], starts[r + 1])
        if not asked.takes(new):
            lengths[r] = gone[r] + max(old, 0) + new
            left[rows] = LEFT
            continue
        if old < 0:  # padding: fewer tokens than new ones
            lengths[r] = new - 1
            if asked.explicit:  # which are not written
                slots[rows] = (first_page + table[r, 0]) * page + np.arange(new)
            continue
        lengths[r] = gone[r] + old + new
        at, own = positions[rows], seen[r]
        if window:
            table[r, : max(old - window + 1, 0) // page] = NOWHERE
        keys = np.arange(old + new)
        slot = table[r, keys // page] * page + keys % page
        slots[rows] = slot[old:] + first_page * page
        if asked.bright and window:
            edge = slot[max(old - window, 0) : max(old + new - window + 1, 0)]
            caches[0].reshape(-1, kv_heads, head_dim)[edge, :, -_BRIGHT:] = 3
        if asked.still:
            for keys_there in (caches[0].reshape(-1, kv_heads, head_dim), after[0].reshape(-1, kv_heads, head_dim)):
                late = slot[len(slot) // 2 :]
                keys_there[late] = keys_there[late].astype(np.float32) * 4
            group_rows = np.arange(new)[:, None] * knobs.group + np.arange(heads)[None] % knobs.group
            q[rows][group_rows // 8 % 2 == r % 2] = 0
        kept = [cache.reshape(-1, kv_heads, head_dim) for cache in after]
        fresh = []
        for which, x in enumerate((k, v)):
            item = x[rows]
            if which == 0 and rope_table is not None:
                item = rotate(item, np.searchsorted(places, at), rope_table, knobs.rope).astype(dtype)
            if knobs.cache == "e4m3":
                item = to_e4m3(item, scales[which][None, :, None])
            fresh.append(item)
        if knobs.append:
            skip = 1 if asked.null_slots and r == 0 else 0
            slots[rows][:skip] = -1
            for which in range(2):
                kept[which][slot[old + skip :]] = fresh[which][skip:]
            whole = [
                np.concatenate([cache.reshape(-1, kv_heads, head_dim)[slot[:old]], item])
                for cache, item in zip(caches, fresh, strict=True)
            ]
        else:
            whole = [cache.reshape(-1, kv_heads, head_dim)[slot] for cache in caches]
        values: list[Array] = [x.astype(np.float64) for x in whole]
        if knobs.cache == "e4m3":
            values = [x * scale[None, :, None] for x, scale in zip(values, scales, strict=True)]
        queries = q[rows]
        if rope_table is not None:
            queries = rotate(queries, np.searchsorted(places, at), rope_table, knobs.rope).astype(dtype)
        if knobs.cache == "e4m3":  # products are of fp16
            queries = np.clip(queries.astype(np.float32), -FP16_MAX, FP16_MAX)
        allowed: Array = visible(new, old + new, window, own, at - gone[r])
        unseen: Array = np.logical_not(allowed.any(axis=0))
        values = [np.where(unseen[:, None, None], 0.0, x) for x in values]
        found = attend(
            queries, values[0], values[1], SCALE, allowed,
            None if rounded_sinks is None else rounded_sinks, asked.soft_cap if knobs.soft_cap else 0.0,
        )  # fmt: skip
        out[rows] = found.out
        # Weights are rounded to the type of the products, and logits to fp16 where their sums are.
        spread = np.repeat(np.abs(values[1]).max(axis=0, initial=0.0), knobs.group, axis=0)
        off = 2.0**-9 if knobs.dtype == "bf16" and knobs.cache == "same" else 2.0**-11
        off += 2.0**-12 + (2.0**-8 * asked.large if knobs.qk == "qk_fp16" else 0.0)
        bound[rows] = off * spread
        _stand(sides, knobs, gone[r] + old, new, window, allowed, found, rounded_sinks)
    out += left
    front = np.full((requests, max(gone) // page), NOWHERE, np.int32)
    table = np.concatenate([np.where(table == NOWHERE, table, table + first_page), front], axis=1)
    table = np.stack([np.roll(row, without // page) for row, without in zip(table, gone, strict=True)])
    # Odd seeds have the tokens of a head side by side in a page, even ones the heads of a token.
    grouped = seed % 2 == 1
    strides = {"token_stride": head_dim, "head_stride": FAR_HEAD if asked.far else page * head_dim} if grouped else {
        "token_stride": kv_heads * head_dim, "head_stride": head_dim,
    }  # fmt: skip
    named: dict[str, Any] = _apart({"q": q, "k": k, "v": v} if knobs.append else {"q": q}, asked.far)
    for name, before, right in zip(("k_cache", "v_cache"), caches, after, strict=True):
        before, right = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if grouped else x for x in (before, right))
        # What takes all keys from the cache waits for the launch that writes the new ones.
        named[name] = Buffer(before, early=knobs.append, output=knobs.append, scratch=knobs.append)
        if asked.far:
            far = FAR * before.itemsize
            at = (FAR_PAGE + np.arange(pages)) * far
            if grouped:
                at = at[:, None] + np.arange(kv_heads) * (FAR_HEAD * before.itemsize)
            named[name] = named[name].spread(at, int(at.max()) + far)
        kept_by[name] = right
    if asked.explicit or asked.null_slots:
        named["slots"] = Buffer(slots, constant=True)
    if asked.explicit or asked.placed:
        named["positions"] = Buffer(positions, constant=True)
    if rounded_sinks is not None:
        named["sinks"] = Buffer(rounded_sinks, constant=True)
    if rope_table is not None:
        named["rope"] = Buffer(rope_table, constant=True)
        if asked.far:
            row = rope_table[0].nbytes
            named["rope"] = named["rope"].spread(places * row, (int(places[-1]) + 1) * row)
    if knobs.mask:
        named["mask"] = Buffer(mask_words, constant=True)
    if knobs.cache == "e4m3":
        named |= {"k_scale": Buffer(scales[0], constant=True), "v_scale": Buffer(scales[1], constant=True)}
    results = Buffer(left, output=True, scratch=bool(left.any()))
    named |= {
        "block_table": _far_table(table) if asked.far else Buffer(np.ascontiguousarray(table), constant=True),
        "seq_lens": Buffer(lengths, constant=True),
        "query_start": Buffer(starts, constant=True),
        "out": _far_rows(results) if asked.far else results,
        "block_stride": FAR if asked.far else page * kv_heads * head_dim,
        "table_stride": FAR_TABLE if asked.far else table.shape[1],
        "out_stride": FAR_ROW if asked.far else heads * head_dim,
        "scale": SCALE, "soft_cap": asked.soft_cap, "window": window, "requests": requests, "kv_heads": kv_heads,
        "scale_stride": int(not asked.far), "least_queries": asked.least_queries, **strides,
    }  # fmt: skip
    return Drawn(named, kept_by if knobs.append else {}, out, bound, sides, level)


def _seen(
    knobs: Any, asked: Asked, starts: Array, mask_words: Array, generator: np.random.Generator
) -> tuple[list[Array], Array]:
    """Which new tokens of its request each one sees, by request, as `mask_words` then says too; their positions."""
    seen, positions = [], np.zeros(int(starts[-1]), np.int64)
    moved = (asked.explicit or asked.placed) and not knobs.mask and not (knobs.windowed and asked.window)
    for r, (old, new) in enumerate(asked.requests):
        rows = slice(starts[r], starts[r + 1])
        own: Array = np.tril(np.ones((new, new), bool))
        at = np.arange(old, old + new)
        if not asked.takes(new) or old < 0:
            seen.append(own)
            continue
        if knobs.mask:
            parents = np.array([generator.integers(-1, i) if i else -1 for i in range(new)])
            own, depth = np.eye(new, dtype=bool), np.zeros(new, np.int64)
            for i, parent in enumerate(parents):
                if parent >= 0:
                    own[i] |= own[parent]
                    depth[i] = depth[parent] + 1
            if new > 2:
                own[1 - r % 2] = False  # a row that may be left with nothing
            if asked.explicit:
                at = old + depth
            bits = (own[:, :, None].astype(np.uint64) << (np.arange(new) % 32).astype(np.uint64)[None, :, None])[..., 0]
            # Bits behind a request's tokens say nothing.
            others = generator.integers(1 << 32, size=(new, knobs.mask // 32), dtype=np.uint32)
            for w in range(knobs.mask // 32):
                there = np.uint32((1 << min(max(new - 32 * w, 0), 32)) - 1)
                own_bits = bits[:, 32 * w : 32 * w + 32].sum(axis=1).astype(np.uint32)
                mask_words[rows, w] = own_bits | others[:, w] & ~there
        positions[rows] = at + ((FAR_POSITION if asked.far else SHIFT) if moved else 0)
        seen.append(own)
    return seen, positions


def _apart(arrays: dict[str, Array], far: bool) -> dict[str, Any]:
    """Arrays [tokens, heads, head_dim] as buffers of rows with NaN between them, or far apart, and their strides."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        tokens, width = len(array), array[0].size
        found[name] = _far_rows(Buffer(array))
        if not far:
            rows = np.full((tokens, width + PADS[name]), np.nan, array.dtype)
            rows[:, :width] = array.reshape(tokens, width)
            found[name] = Buffer(rows)
        found[f"{name}_stride"] = FAR_ROW if far else width + PADS[name]
    return found


def _far_rows(buffer: Buffer) -> Buffer:
    at = np.arange(len(buffer.data)) * (FAR_ROW * buffer.data.itemsize)
    return buffer.spread(at, int(at[-1]) + buffer.data[0].nbytes)


def _far_table(table: Array) -> Buffer:
    at = np.arange(len(table)) * (FAR_TABLE * table.itemsize)
    return Buffer(np.ascontiguousarray(table), constant=True).spread(at, int(at[-1]) + table[0].nbytes)


def _stand(
    sides: dict[str, bool], knobs: Any, old: int, new: int, window: int, allowed: Array, attended: Attended,
    sinks: Array | None,
) -> None:  # fmt: skip
    """Note which sides of the edges of attention a request stands on."""

    def note(side: str, there: bool) -> None:
        sides[side] = sides.get(side, False) or there

    note("a token alone", old == 0 and new == 1)
    note("a page that is full", old % knobs.page_size == 0 and old > 0)
    note("one key has most of the weight", bool((attended.weights > 0.9).any()))
    if knobs.windowed:
        note("as many tokens as the window", old + 1 == window)
        note("one more", old + 1 == window + 1)
        note("fewer", old + 1 < window)
    if sinks is not None:
        note("a sink of -inf", bool(np.isneginf(sinks).any()))
        note("a sink that has most of the weight", bool((sinks > 20).any()))
    if knobs.mask:
        note("a row that sees no new token", not allowed[:, -new:].any(axis=1).all())
