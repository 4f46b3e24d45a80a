"""What calls of `attention` ask of their tensors and numbers, before anything reaches the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from jitmx.errors import InputError, KnobError
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.ops import checks
from jitmx.ops.checks import names
from jitmx.quoting import short
from jitmx.runtime import card

ROPE_STYLES = ("neox", "interleaved")
E4M3 = torch.float8_e4m3fn, torch.uint8
_STORED = torch.bfloat16, torch.float16
_MASK_BITS = 32


class Tensors(NamedTuple):
    """The tensors of a call, by the names that users know; q and out are None where only the cache is written."""

    q: torch.Tensor | None
    k_new: torch.Tensor | None
    v_new: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor | None
    positions: torch.Tensor | None
    sinks: torch.Tensor | None
    rope: torch.Tensor | None
    mask: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    out: torch.Tensor | None


# Those that most calls lack.
RARE = "positions", "mask", "k_scale", "v_scale"


class Numbers(NamedTuple):
    """What a call says beside its tensors."""

    max_query_len: int
    max_seq_len: int | None
    scale: float | None
    window: int | None
    soft_cap: float | None
    rope_style: str
    fp16_qk: bool
    early: bool = False


@dataclass(frozen=True)
class Call:
    """What decides the launches of a call.

    Attributes:
        problem: what is asked.
        tokens: rows of q, and new tokens of all requests at most.
        requests: how many there are; 0: nothing is launched.
        contexts: tokens of a request, at least and at most, of calls that the same launches serve.
        scale: of q k.
        soft_cap: of the logits; 0 for none.
        strides: of k_cache (pages, tokens, heads), the block table, q, k_new, v_new and out, in elements.
        scale_stride: 1 where each head of the cache has scales of its own, else 0.
        device: its number.
        rare: whether it has any of the tensors in `RARE`.
        early: whether it may begin while the launch before it is at work.
        knobs: of the call.
    """

    problem: AttentionProblem
    tokens: int
    requests: int
    contexts: tuple[int, int]
    scale: float
    soft_cap: float
    strides: tuple[int, ...]
    scale_stride: int
    device: int
    rare: bool
    early: bool
    knobs: tuple[tuple[str, Any], ...] = ()


def rounded_up(value: int, exact: int = 0) -> int:
    """The next power of two of a number over `exact`: plans are made for as many, as these numbers grow by the step."""
    return value if value <= exact else 1 << (value - 1).bit_length()


def check(given: Tensors, numbers: Numbers, knobs: Mapping[str, Any] | None) -> Call:
    """A call that kernels can take.

    Raises:
        InputError: a device, dtype, shape, layout or number that they cannot; the message names it and the rule.
        KnobError: a size outside the kernels' choices.
    """
    first = "q" if given.q is not None else "k_new"
    if given.q is None and given.k_new is None:
        raise InputError("k_new is None, and without new keys there is nothing to write", "pass k_new and v_new")
    rows = checks.require_cuda(first, getattr(given, first))
    place = rows.device
    cache = _check_cache(given, place)
    _, page_size, kv_heads, head_dim = cache.shape
    if rows.dim() != 3 or rows.dtype not in _STORED or rows.shape[2] != head_dim:
        raise InputError(
            f"{first} is {checks.describe(rows)}; it must be bfloat16 or float16 [tokens, heads, {head_dim}], head_dim "
            "being that of the cache"
        )
    tokens, heads = rows.shape[0], rows.shape[1] if given.q is not None else kv_heads
    if heads % kv_heads:
        raise InputError(
            f"q has {heads} heads and the cache {kv_heads}; each KV head serves as many query heads as any other",
            "pass a multiple of the cache's heads",
        )
    if given.q is not None:
        _check_rows("q", given.q, (tokens, heads, head_dim), rows.dtype, place)
    _check_new(given, (tokens, kv_heads, head_dim), rows.dtype, place)
    _check_cache_type(given, rows.dtype, kv_heads, place)
    batch, capacity = _check_requests(given, numbers, page_size, place)
    _check_extras(given, numbers, (tokens, heads, head_dim), place)
    if given.out is not None:
        _check_rows("out", given.out, (tokens, heads, head_dim), rows.dtype, place)
    scale, soft_cap = _check_numbers(numbers, head_dim)
    contexts = _contexts(given, numbers, capacity)
    context = rounded_up(numbers.max_seq_len) if numbers.max_seq_len is not None else capacity
    if numbers.window:  # all that is seen of more tokens
        context = min(context, rounded_up(numbers.window + numbers.max_query_len))
    mask = 0 if given.mask is None else given.mask.shape[1] * _MASK_BITS
    problem = AttentionProblem(
        batch=max(batch, 1),
        context=max(1, min(context, capacity)),
        queries=rounded_up(numbers.max_query_len, 64),
        kv_heads=kv_heads,
        dtype=checks.DTYPES[rows.dtype],
        cache="e4m3" if cache.dtype in E4M3 else "same",
        head_dim=head_dim,
        group=heads // kv_heads,
        page_size=page_size,
        sinks="no_sinks" if given.sinks is None else f"sinks_{checks.DTYPES[given.sinks.dtype]}",
        soft_cap=soft_cap > 0,
        window=numbers.window or 0,
        qk="qk_fp16" if numbers.fp16_qk else "qk_fp32",
        rope="no_rope" if given.rope is None else numbers.rope_style,
        rotary=0 if given.rope is None else given.rope.shape[1],
        table="table_bf16" if given.rope is None else f"table_{checks.DTYPES[given.rope.dtype]}",
        mask=mask,
        append=given.k_new is not None,
    )
    row_strides = [
        heads * head_dim if name == "out" and tensor is None else 0 if tensor is None else tensor.stride(0)
        for name, tensor in zip(("q", "k", "v", "out"), (given.q, given.k_new, given.v_new, given.out), strict=True)
    ]
    strides = (cache.stride(0), cache.stride(1), cache.stride(2), given.block_table.stride(0), *row_strides)
    scales = 1 if given.k_scale is None else given.k_scale.numel()
    own = checks.require_knobs(knobs)
    rare = any(getattr(given, name) is not None for name in RARE)
    return Call(
        problem, tokens, batch, contexts, scale, soft_cap, strides, int(scales > 1), card.number(place), rare,
        numbers.early, own,
    )  # fmt: skip


def _check_cache(given: Tensors, place: torch.device) -> torch.Tensor:
    """The keys' cache, which the values' one is like."""
    k_cache = checks.require_cuda("k_cache", given.k_cache)
    v_cache = checks.require_cuda("v_cache", given.v_cache)
    if k_cache.dim() != 4 or k_cache.dtype not in (*_STORED, *E4M3) or k_cache.device != place:
        raise InputError(
            f"k_cache is {checks.describe(k_cache)}; it must be {names((*_STORED, *E4M3))} "
            f"[pages, page_size, kv_heads, head_dim] on {place}",
            "pass a view with the dimensions in this order; any strides will do",
        )
    if 0 in k_cache.shape:
        raise InputError(f"k_cache is {checks.describe(k_cache)}; it must have pages, heads and values")
    for rule in ("shape", "dtype", "device"):
        if getattr(v_cache, rule) != getattr(k_cache, rule):
            raise InputError(
                f"v_cache is {checks.describe(v_cache)} and k_cache {checks.describe(k_cache)}; they must be alike"
            )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride() != k_cache.stride():
            raise InputError(
                f"v_cache has strides {list(cache.stride())} and k_cache {list(k_cache.stride())}; they must be equal"
            )
        if cache.stride(3) != 1:
            raise InputError(
                f"{name} has strides {list(cache.stride())}; values of a head must follow one another",
                "pass a cache whose last dimension is contiguous",
            )
        if cache.stride(1) * cache.element_size() * 16 > 2 << 30:  # which kernels that count in 32 bits rely on
            raise InputError(
                f"{name} has strides {list(cache.stride())}; 16 tokens of a page must lie within 2 GiB",
                "pass a cache that has the tokens of a page, or its heads, side by side",
            )
        for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True):
            if size > 1 and stride * cache.element_size() % 16:
                raise InputError(
                    f"{name} has strides {list(cache.stride())}; each must be a multiple of "
                    f"{16 // cache.element_size()} elements, 16 bytes",
                    "pad the cache's rows",
                )
            if size > 1 and stride == 0 and given.k_new is not None:
                said = f"{name} is expanded (stride 0), and new keys are written to it"
                raise InputError(said, "pass memory of its own")
    return k_cache


def _check_rows(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, place: torch.device
) -> None:
    """A tensor [tokens, heads, head_dim] whose heads follow one another; tokens may lie apart."""
    checks.require_cuda(name, tensor)
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != place:
        raise InputError(f"{name} is {checks.describe(tensor)}; it must be {names((dtype,))} {list(shape)} on {place}")
    tokens, heads, head_dim = shape
    apart, own, value = tensor.stride()
    if tensor.numel() and (value != 1 or (heads > 1 and own != head_dim)):
        raise InputError(
            f"{name} has strides {list(tensor.stride())}; the heads of a token must follow one another",
            f"pass {name}.contiguous(), or a view of QKV's output by tokens",
        )
    if tokens > 1 and (apart * tensor.element_size() % 16 or (name == "out" and apart < heads * head_dim)):
        raise InputError(
            f"{name} has strides {list(tensor.stride())}; tokens must start on 16 bytes, and those of out not overlap",
            f"pass {name}.contiguous()",
        )


def _check_new(given: Tensors, shape: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> None:
    if (given.k_new is None) != (given.v_new is None):
        missing = "k_new" if given.k_new is None else "v_new"
        raise InputError(f"{missing} is None, and the other is given", "pass both, or neither where the cache has them")
    if given.k_new is None or given.v_new is None:
        if given.slot_mapping is not None:
            raise InputError("slot_mapping says where new keys go, and k_new is None", "leave it out, or pass k_new")
        if given.mask is not None:
            raise InputError("mask is of new keys, and k_new is None", "leave it out, or pass k_new and v_new")
        return
    _check_rows("k_new", given.k_new, shape, dtype, place)
    _check_rows("v_new", given.v_new, shape, dtype, place)


def _check_cache_type(given: Tensors, dtype: torch.dtype, kv_heads: int, place: torch.device) -> None:
    stored = given.k_cache.dtype
    scales = {"k_scale": given.k_scale, "v_scale": given.v_scale}
    if stored not in E4M3:
        if stored != dtype:
            raise InputError(
                f"k_cache is {checks.describe(given.k_cache)}, and q and new keys are {names((dtype,))}; a cache has "
                "their type, or E4M3",
                f"make the cache {names((dtype,))} or float8_e4m3fn",
            )
        for name, tensor in scales.items():
            if tensor is not None:
                raise InputError(f"{name} is of E4M3 caches, and this one is {names((stored,))}", "leave it out")
        return
    for name, tensor in scales.items():
        if tensor is None:
            raise InputError(
                f"{name} is None, and the cache is E4M3", f"pass a float32 tensor of 1 or {kv_heads} elements"
            )
        checks.require_cuda(name, tensor)
        if tensor.dtype != torch.float32 or tensor.device != place or tensor.numel() not in (1, kv_heads):
            raise InputError(
                f"{name} is {checks.describe(tensor)}; it must be float32 of 1 or {kv_heads} elements on {place}"
            )
        if not tensor.is_contiguous():
            checks.require_layout(name, tensor)
    assert given.k_scale is not None and given.v_scale is not None
    if given.k_scale.numel() != given.v_scale.numel():
        raise InputError(
            f"k_scale has {given.k_scale.numel()} elements and v_scale {given.v_scale.numel()}",
            f"pass both with 1 or both with {kv_heads}",
        )


def _check_vector(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], place: torch.device
) -> None:
    checks.require_cuda(name, tensor)
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != place:
        raise InputError(f"{name} is {checks.describe(tensor)}; it must be {names(dtypes)} {list(shape)} on {place}")
    if not tensor.is_contiguous():
        checks.require_layout(name, tensor)


def _check_requests(given: Tensors, numbers: Numbers, page_size: int, place: torch.device) -> tuple[int, int]:
    """How many requests there are, and how many tokens a row of the block table has room for."""
    table = checks.require_cuda("block_table", given.block_table)
    if table.dim() != 2 or table.dtype != torch.int32 or table.device != place:
        raise InputError(
            f"block_table is {checks.describe(table)}; it must be int32 [requests, pages of a request] on {place}"
        )
    batch, width = table.shape
    if width < 1:
        raise InputError(f"block_table is {checks.describe(table)}; a request must have room for a page at least")
    if width > 1 and table.stride(1) != 1:
        raise InputError(
            f"block_table has strides {list(table.stride())}; pages of a request must follow one another",
            "pass block_table.contiguous()",
        )
    _check_vector("seq_lens", given.seq_lens, (batch,), (torch.int32,), place)
    _check_vector("query_start_loc", given.query_start_loc, (batch + 1,), (torch.int32,), place)
    capacity = width * page_size
    for name, most in (("max_query_len", numbers.max_query_len), ("max_seq_len", numbers.max_seq_len)):
        if name == "max_seq_len" and most is None:
            continue
        if type(most) is not int or most < 1:
            raise InputError(f"{name}={most!r} is not a whole number of 1 or more")
    if numbers.max_seq_len is not None and numbers.max_seq_len > capacity:
        raise InputError(
            f"max_seq_len={numbers.max_seq_len} is over the {capacity} tokens that a row of block_table has pages for",
            "pass a wider block_table",
        )
    return batch, capacity


def _contexts(given: Tensors, numbers: Numbers, capacity: int) -> tuple[int, int]:
    """What `max_seq_len` may be in calls that the same launches serve: up to the next power of two and the room."""
    if numbers.max_seq_len is None:
        return 1, capacity
    most = rounded_up(numbers.max_seq_len)
    room = capacity if given.rope is None or given.positions is not None else min(capacity, given.rope.shape[0])
    return most // 2 + 1, min(most, room)


def _check_extras(given: Tensors, numbers: Numbers, shape: tuple[int, int, int], place: torch.device) -> None:
    """Sinks, rope, positions, slots and mask."""
    tokens, heads, head_dim = shape
    if given.sinks is not None:
        _check_vector("sinks", given.sinks, (heads,), tuple(checks.DTYPES), place)
    if numbers.rope_style not in ROPE_STYLES:
        raise KnobError(f"rope_style={numbers.rope_style!r} is not one of {', '.join(ROPE_STYLES)}")
    if given.rope is not None:
        table = checks.require_cuda("rope", given.rope)
        step = 16 if numbers.rope_style == "neox" else 8
        if table.dim() != 2 or table.dtype not in checks.DTYPES or table.device != place:
            raise InputError(
                f"rope is {checks.describe(table)}; it must be {names(checks.DTYPES)} [positions, rotary] on "
                f"{place}, cosines then sines"
            )
        if table.shape[0] < 1:
            raise InputError(f"rope is {checks.describe(table)}; it has no position", "pass a longer table")
        if table.shape[1] % step or not 0 < table.shape[1] <= head_dim:
            raise InputError(
                f"rope has {table.shape[1]} columns, cosines and sines of as many values of a head; rope_style="
                f"{numbers.rope_style!r} rotates a multiple of {step}, up to head_dim={head_dim}"
            )
        if not table.is_contiguous():
            checks.require_layout("rope", table)
        if numbers.max_seq_len is not None and given.positions is None and table.shape[0] < numbers.max_seq_len:
            raise InputError(
                f"rope has {table.shape[0]} positions, and max_seq_len={numbers.max_seq_len}", "pass a longer table"
            )
    for name, tensor in (("positions", given.positions), ("slot_mapping", given.slot_mapping)):
        if tensor is not None:
            _check_vector(name, tensor, (tokens,), (torch.int64,), place)
    if given.mask is not None:
        mask = checks.require_cuda("mask", given.mask)
        if mask.dim() != 2 or mask.shape[1] not in (1, 2):
            raise InputError(f"mask is {checks.describe(mask)}; a token has one word of 32 bits, or two")
        _check_vector("mask", mask, (tokens, mask.shape[1]), (torch.uint32, torch.int32), place)
        bits = mask.shape[1] * _MASK_BITS
        if numbers.max_query_len > bits:
            raise InputError(
                f"max_query_len={numbers.max_query_len} is over the {bits} bits that mask has a token",
                "pass two words a token" if bits < 64 else "a mask is for 64 new tokens at most",
            )


def _check_numbers(numbers: Numbers, head_dim: int) -> tuple[float, float]:
    """Scale and soft cap, 0 for none."""
    scale = head_dim**-0.5 if numbers.scale is None else numbers.scale
    for name, value in (("scale", scale), ("soft_cap", numbers.soft_cap)):
        if value is None:
            continue
        if isinstance(value, bool) or not checks.is_positive(value):
            raise InputError(f"{name}={short(value)} is not a finite number over 0 in float32")
    window = numbers.window
    if window is not None and (type(window) is not int or window < 1):
        raise InputError(
            f"window={window!r} is not a whole number of 1 or more; a token counts itself",
            "pass None where tokens attend to all",
        )
    for name, said in (("fp16_qk", numbers.fp16_qk), ("early", numbers.early)):
        if not isinstance(said, bool):
            raise InputError(f"{name}={said!r} is not True or False")
    return float(scale), float(numbers.soft_cap or 0.0)


def refuse(given: Tensors) -> None:
    """Raise InputError for an address off 16 bytes, a gradient, or an output over what is read, in a call that is right
    otherwise."""
    for name in ("q", "k_new", "v_new", "k_cache", "v_cache", "rope", "out"):
        tensor = getattr(given, name)
        if tensor is not None and tensor.data_ptr() % 16:
            raise InputError(
                f"{name} starts at an address that is no multiple of 16 bytes (storage offset "
                f"{tensor.storage_offset()})",
                f"pass {name}.clone()" if "cache" not in name and name != "out" else "allocate it on 16 bytes",
            )
    for name, tensor in given._asdict().items():
        if tensor is not None:
            checks.require_no_grad(name, tensor)
    if given.out is not None and given.q is not None:
        checks.require_apart(given.out, q=given.q, k_new=given.k_new, v_new=given.v_new)
    if given.k_new is not None and given.k_cache.data_ptr() == given.v_cache.data_ptr():
        raise InputError("v_cache is k_cache itself, and both are written", "pass another tensor")
