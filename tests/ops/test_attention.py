"""`jitmx.attention` on the simulated card, held against attention that others wrote; and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitmx
from jitmx import settings as jitmx_settings
from jitmx.errors import InputError, KnobError
from jitmx.ops.attention import plan
from jitmx.ops.attention.calls import _plans
from jitmx.ops.attention.checks import Call
from jitmx.runtime import scratch
from simulated_card import Simulated, on_cpu
from strategies import examples

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS, KV, DIM, PAGE = 8, 2, 64, 16
GATE = 6e-3


@dataclasses.dataclass
class World:
    """One call's inputs, the keys and values that a request has in the end, and what is where before.

    Attributes:
        given: arguments of the call by name.
        olds, news: tokens of each request that are in the cache, and that are new; old < 0 is padding.
        keys, values: of each request [tokens, kv_heads, head_dim], float32, unrotated new keys apart in `given`.
        pool: the tensor that both caches are views of.
    """

    given: dict[str, Any]
    olds: list[int]
    news: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    pool: torch.Tensor

    def rows(self, request: int) -> slice:
        start = sum(self.news[:request])
        return slice(start, start + self.news[request])

    def call(self, **changed: Any) -> torch.Tensor:
        return jitmx.attention(**{**self.given, **changed})


def world(
    requests: list[tuple[int, int]],
    *,
    seed: int = 0,
    dtype: torch.dtype = BF16,
    heads: int = HEADS,
    kv: int = KV,
    dim: int = DIM,
    layout: str = "tokens",
    e4m3: bool = False,
    append: bool = True,
    strided: bool = False,
) -> World:
    """Random requests.

    Args:
        layout: vLLM's [blocks, tokens, heads, 2 D] or, "heads", [blocks, heads, tokens, 2 D]; "apart" two tensors.
        strided: q, k and v are views of one QKV output.
    """
    torch.manual_seed(seed)
    olds, news = [old for old, _ in requests], [new for _, new in requests]
    width = max(1, *(-(-(max(old, 0) + new) // PAGE) for old, new in requests))
    pages = len(requests) * width + 1
    table = 1 + torch.randperm(pages - 1).to(torch.int32).view(len(requests), width)
    stored = torch.float8_e4m3fn if e4m3 else dtype
    shape = {
        "tokens": (pages, PAGE, kv, 2 * dim),
        "heads": (pages, kv, PAGE, 2 * dim),
        "apart": (2, pages, PAGE, kv, dim),
    }
    pool = torch.randn(shape[layout]).to(stored)
    if layout == "apart":
        k_cache, v_cache = pool
    else:
        logical = pool if layout == "tokens" else pool.transpose(1, 2)
        k_cache, v_cache = logical[..., :dim], logical[..., dim:]
    tokens = sum(news)
    if strided:
        qkv = torch.randn(tokens, (heads + 2 * kv) * dim).to(dtype)
        q, k, v = qkv.split([heads * dim, kv * dim, kv * dim], dim=1)
        q, k, v = q.unflatten(1, (heads, dim)), k.unflatten(1, (kv, dim)), v.unflatten(1, (kv, dim))
    else:
        q, k, v = (torch.randn(tokens, count, dim).to(dtype) for count in (heads, kv, kv))
    scales = torch.rand(2, kv) + 0.5
    starts = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor([old + new if old >= 0 else 0 for old, new in requests], dtype=torch.int32)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for r, (old, new) in enumerate(requests):
        at = torch.arange(max(old, 0) + (0 if append else new))
        page, place = table[r, at // PAGE].long(), at % PAGE
        for found, cache, fresh, scale in ((keys, k_cache, k, scales[0]), (values, v_cache, v, scales[1])):
            own = fresh[int(starts[r]) : int(starts[r + 1])].float()
            if e4m3:
                own = (own / scale[:, None]).to(torch.float8_e4m3fn).float()
            whole = torch.cat([cache[page, place].float(), own]) if append else cache[page, place].float()
            found.append(whole * scale[:, None] if e4m3 else whole)
    given: dict[str, Any] = {
        "q": q, "k_new": k if append else None, "v_new": v if append else None, "k_cache": k_cache, "v_cache": v_cache,
        "block_table": table, "seq_lens": lengths, "query_start_loc": starts, "max_query_len": max(news),
    }  # fmt: skip
    if e4m3:
        given |= {"k_scale": scales[0].clone(), "v_scale": scales[1].clone()}
    return World(given, olds, news, keys, values, pool)


def allowed(old: int, new: int, window: int | None = None) -> torch.Tensor:
    """Causal order with a window, [new, old + new]."""
    apart = torch.arange(old, old + new)[:, None] - torch.arange(old + new)[None]
    return (apart >= 0) & (apart < (window or old + new + 1))


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """torch's attention in float64: the sink is one key and value of zeros more, whose mask value is the sink."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    bias = torch.where(seen, 0.0, -torch.inf).double().expand(heads, *seen.shape)
    k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    if sinks is not None:
        k, v = (torch.cat([x, x.new_zeros(heads, 1, x.shape[2])], dim=1) for x in (k, v))
        bias = torch.cat([bias, sinks.double()[:, None, None].expand(heads, len(seen), 1)], dim=2)
    found = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1)[None], k[None], v[None], attn_mask=bias[None], scale=scale
    )
    return found[0].transpose(0, 1).nan_to_num(0.0)


def expected(
    made: World, *, sinks: torch.Tensor | None = None, window: int | None = None, scale: float | None = None,
    seen: Callable[[int, int], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """What a call should return, by torch."""
    q, out = made.given["q"], []
    for r, (old, new) in enumerate(zip(made.olds, made.news, strict=True)):
        if old < 0:
            out.append(torch.zeros(new, *q.shape[1:], dtype=torch.float64))
            continue
        mask = seen(old, new) if seen is not None else allowed(old, new, window)
        args = q[made.rows(r)], made.keys[r], made.values[r], mask, sinks, scale or q.shape[2] ** -0.5
        out.append(sdpa(*args))
    return torch.cat(out)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).norm() / right.norm().clamp_min(1e-30))


MIXED = [(0, 1), (37, 2), (-1, 1), (130, 1), (16, 3)]


@pytest.mark.parametrize("layout", ["tokens", "heads", "apart"])
@pytest.mark.parametrize("strided", [False, True], ids=["own", "qkv"])
def test_mixed_lengths_with_sinks_agree_with_torch_and_the_cache_has_the_new_tokens(
    layout: str, strided: bool, card: Simulated
) -> None:
    made = world(MIXED, layout=layout, strided=strided)
    sinks = torch.randn(HEADS).to(BF16)
    before = made.pool.clone()
    assert error(made.call(sinks=sinks), expected(made, sinks=sinks)) < GATE
    assert card.kernels == ["attention.decode"]
    touched = torch.zeros(made.given["k_cache"].shape[:2], dtype=torch.bool)
    for r, (old, new) in enumerate(zip(made.olds, made.news, strict=True)):
        for i in range(new if old >= 0 else 0):
            page, place = int(made.given["block_table"][r, (old + i) // PAGE]), (old + i) % PAGE
            row = made.rows(r).start + i
            for name, fresh in (("k_cache", "k_new"), ("v_cache", "v_new")):
                assert torch.equal(made.given[name][page, place], made.given[fresh][row])
            touched[page, place] = True
    for name in ("k_cache", "v_cache"):  # nothing else is written
        now = made.given[name]
        then = torch.as_strided(before, now.shape, now.stride(), now.storage_offset())
        assert torch.equal(now[~touched].view(torch.int16), then[~touched].view(torch.int16))


@pytest.mark.parametrize(
    ("card", "heads", "kv", "dim", "window", "dtype"),
    [
        ("sm_90a", 8, 1, 64, 128, BF16),
        pytest.param("sm_90a", 4, 4, 128, None, FP16, marks=pytest.mark.nightly),
        ("sm_80", 5, 1, 96, 20, FP16),
        pytest.param("sm_121a", 16, 1, 64, 17, BF16, marks=pytest.mark.nightly),
        ("sm_120a", 4, 2, 256, None, BF16),
    ],
    indirect=["card"],
)
def test_groups_head_sizes_and_windows_agree_with_torch(
    card: Simulated, heads: int, kv: int, dim: int, window: int | None, dtype: torch.dtype
) -> None:
    made = world([(140, 1), (5, 1), (16, 1)], heads=heads, kv=kv, dim=dim, dtype=dtype, seed=1)
    assert error(made.call(window=window), expected(made, window=window)) < GATE
    assert card.kernels == ["attention.decode"]


@pytest.mark.parametrize("window", [None, 24])
def test_gpt_oss_attention_of_transformers_says_the_same(window: int | None, card: Simulated) -> None:
    gpt_oss = pytest.importorskip(
        "transformers.models.gpt_oss.modeling_gpt_oss", reason="transformers is not installed"
    )
    made = world([(0, 3), (41, 1), (17, 4)], seed=2)
    sinks = torch.randn(HEADS).to(FP32)
    positions = 64
    angles = torch.arange(positions)[:, None] / (150000.0 ** (torch.arange(0, DIM, 2) / DIM))
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    found = made.call(sinks=sinks, window=window, rope=torch.cat([cos, sin], dim=1))
    right = []
    for r, (old, new) in enumerate(zip(made.olds, made.news, strict=True)):
        at = torch.arange(old, old + new)
        q, k = (x.float().transpose(0, 1)[None] for x in (made.given["q"][made.rows(r)], made.keys[r][old:]))
        q, k = gpt_oss.apply_rotary_pos_emb(q, k, cos[at].float()[None], sin[at].float()[None])
        q, k = (x[0].transpose(0, 1).to(BF16).float() for x in (q, k))  # what jitmx rounds, and the cache keeps
        keys = torch.cat([made.keys[r][:old], k])
        module = torch.nn.Module()
        module.num_key_value_groups, module.sinks = HEADS // KV, torch.nn.Parameter(sinks)
        module.eval()
        bias = torch.where(allowed(old, new, window), 0.0, torch.finfo(FP32).min)[None, None]
        out, _ = gpt_oss.eager_attention_forward(
            module, *(x.transpose(0, 1)[None] for x in (q, keys, made.values[r])), bias, DIM**-0.5
        )
        right.append(out[0].detach())
    assert error(found, torch.cat(right).double()) < GATE


@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_a_part_of_the_head_is_rotated_at_the_positions_that_are_given(style: str, card: Simulated) -> None:
    made = world([(20, 2), (3, 1)], seed=3)
    rotary, at = 32, torch.tensor([7, 11, 2])
    angles = torch.rand(32, rotary // 2) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    found = made.call(rope=table, rope_style=style, positions=at)
    # A pair of values is a complex number, which is turned.
    turn = torch.polar(torch.ones_like(angles), angles)[at][:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        part, rest = x[..., :rotary].float(), x[..., rotary:].float()
        pairs = part.unflatten(-1, (2, -1)).transpose(-1, -2) if style == "neox" else part.unflatten(-1, (-1, 2))
        after = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        after = (after.transpose(-1, -2) if style == "neox" else after).flatten(-2)
        return torch.cat([after, rest], dim=-1).to(x.dtype)

    k = turned(made.given["k_new"])
    for r, old in enumerate(made.olds):
        made.keys[r][old:] = k[made.rows(r)].float()
    given, made.given = made.given, {**made.given, "q": turned(made.given["q"])}
    assert error(found, expected(made)) < GATE
    page, place = int(given["block_table"][1, 0]), 3
    assert (given["k_cache"][page, place].float() - k[2].float()).abs().max() <= 2.0**-7 * k[2].abs().max()


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.nightly), 20])
def test_capped_logits_are_plain_torch(window: int | None, card: Simulated) -> None:
    made = world([(33, 1), (9, 2)], seed=4)
    sinks = torch.tensor([0.5, -torch.inf, 40.0, 1.0] * 2)
    found = made.call(soft_cap=2.5, scale=1.0, sinks=sinks, window=window)
    right = []
    for r, (old, new) in enumerate(zip(made.olds, made.news, strict=True)):
        k, v = (x.double().repeat_interleave(HEADS // KV, dim=1) for x in (made.keys[r], made.values[r]))
        logits = torch.einsum("qhd,khd->hqk", made.given["q"][made.rows(r)].double(), k)
        logits = (2.5 * torch.tanh(logits / 2.5)).masked_fill(~allowed(old, new, window), -torch.inf)
        sunk = torch.cat([logits, sinks.double()[:, None, None].expand(-1, new, 1)], dim=2)
        right.append(torch.einsum("hqk,khd->qhd", sunk.softmax(-1)[..., :-1], v))
    assert error(found, torch.cat(right)) < GATE


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("card", ["sm_90a", "sm_121a"], indirect=True)
@pytest.mark.parametrize("scales", [1, KV])
def test_an_e4m3_cache_has_scales_and_new_tokens_count_as_it_keeps_them(scales: int, card: Simulated) -> None:
    made = world([(45, 1), (0, 2)], e4m3=True, seed=5, layout="heads")
    if scales == 1:
        for name, whole in (("k_scale", made.keys), ("v_scale", made.values)):
            for r, x in enumerate(whole):
                old = x[: made.olds[r]] / made.given[name][:, None]
                fresh = made.given[name.replace("scale", "new")][made.rows(r)].float()
                whole[r] = torch.cat([old, (fresh / 0.75).to(torch.float8_e4m3fn).float()]) * 0.75
            made.given[name] = torch.tensor(0.75)  # vLLM's have no dimension
    right = expected(made)
    as_bytes = {name: made.given[name].view(torch.uint8) for name in ("k_cache", "v_cache")}
    assert error(made.call(), right) < GATE
    assert error(made.call(**as_bytes), right) < GATE
    page, place = int(made.given["block_table"][0, 45 // PAGE]), 45 % PAGE
    kept = (made.given["v_new"][0].float() / made.given["v_scale"].reshape(-1, 1)).to(torch.float8_e4m3fn)
    assert torch.equal(made.given["v_cache"][page, place].view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("words", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_trees_see_their_own_branch_and_a_row_with_nothing_left_is_zero(words: int, card: Simulated) -> None:
    made = world([(18, 4), (0, 3)], seed=6)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    second = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    bits = torch.zeros(7, words, dtype=torch.int64)
    bits[:4, 0], bits[4:, 0] = (tree * (1 << torch.arange(4))).sum(1), (second * (1 << torch.arange(3))).sum(1)
    right = expected(made, seen=lambda old, new: torch.cat([torch.ones(new, old).bool(), {4: tree, 3: second}[new]], 1))
    for dtype in (torch.int32, torch.uint32):
        found = made.call(mask=bits.to(dtype))
        assert error(found, right) < GATE
        assert not found[5].any()


def test_a_mask_of_two_words_reaches_behind_the_first(card: Simulated) -> None:
    made = world([(3, 40)], seed=7, heads=1, kv=1)
    seen = torch.rand(40, 40) < 0.3
    seen |= torch.eye(40).bool()
    bits = torch.zeros(40, 2, dtype=torch.int64)
    for word in range(2):
        part = seen[:, 32 * word : 32 * word + 32]
        bits[:, word] = (part * (1 << torch.arange(part.shape[1]))).sum(1)
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    right = expected(made, seen=lambda old, new: torch.cat([torch.ones(new, old).bool(), seen], 1))
    assert error(made.call(mask=signed), right) < GATE


def test_slot_minus_one_is_written_nowhere_and_still_attended_to(card: Simulated) -> None:
    made = world([(20, 1), (7, 1)], seed=8)
    table, before = made.given["block_table"], made.pool.clone()
    slots = torch.tensor([-1, int(table[1, 0]) * PAGE + 7])
    assert error(made.call(slot_mapping=slots), expected(made)) < GATE
    changed = (made.pool != before).any(-1).nonzero()
    assert {(int(page), int(place)) for page, place, _ in changed} == {(int(table[1, 0]), 7)}


def test_padding_comes_out_as_zero_and_leaves_the_cache_alone(card: Simulated) -> None:
    made = world([(-1, 1), (-1, 2)], seed=9)
    before = made.pool.clone()
    out = torch.full((3, HEADS, DIM), 7.0, dtype=BF16)
    for slots in (None, torch.tensor([5, 6, 7])):
        out.fill_(7.0)
        assert made.call(out=out, sinks=torch.zeros(HEADS), slot_mapping=slots) is out
        assert not out.any() and torch.equal(made.pool, before)
        fields = ("k_new", "v_new", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc")
        jitmx.append_kv(*(made.given[name] for name in fields), max_query_len=2, slot_mapping=slots)
        assert torch.equal(made.pool, before)


def test_rows_of_no_request_are_not_written(card: Simulated) -> None:
    made = world([(4, 1), (9, 1), (3, 1)], seed=10)
    made.given["query_start_loc"] = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    out = torch.full((3, HEADS, DIM), 7.0, dtype=BF16)
    found = made.call(out=out)
    assert error(found[:2], expected(made)[:2]) < GATE and (found[2] == 7.0).all()


def test_keys_that_the_cache_has_are_read_there(card: Simulated) -> None:
    made = world([(30, 2), (0, 1), (64, 2)], seed=11, append=False)
    before = made.pool.clone()
    assert error(made.call(window=40), expected(made, window=40)) < GATE
    assert torch.equal(made.pool, before)


def test_an_output_with_tokens_apart_is_written_between_what_is_not(card: Simulated) -> None:
    made = world([(12, 2)], seed=12)
    wide = torch.full((2, HEADS * DIM + 64), 5.0, dtype=BF16)
    out = wide[:, : HEADS * DIM].unflatten(1, (HEADS, DIM))
    assert error(made.call(out=out), expected(made)) < GATE
    assert (wide[:, HEADS * DIM :] == 5.0).all()


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(
    "knobs", [{"reduction": "global"}, {"reduction": "cluster", "parts": 2}], ids=["grid", "cluster"]
)
def test_repeats_are_equal_to_the_bit(knobs: dict[str, Any], card: Simulated) -> None:
    made = world([(150, 1), (70, 1), (2, 1)], seed=13)
    wanted = {"warps": 2, "keys": 16, "parts": 1, **knobs}
    first = made.call(knobs=wanted)
    assert error(first, expected(made)) < GATE
    assert all(torch.equal(made.call(knobs=wanted), first) for _ in range(2))


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("reduction", ["global,parts=1", "cluster,parts=2"])
def test_launches_whose_addresses_are_packed_read_what_lies_there_now(
    reduction: str, e4m3: bool, card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_PACKED_AFTER", 1)
    monkeypatch.setattr(scratch, "_of_streams", {})
    monkeypatch.setenv("JITMX_ATTENTION_KNOBS", f"kernel=decode,warps=2,keys=16,reduction={reduction}")
    jitmx_settings.reload()
    try:
        made = world([(150, 1), (70, 1), (2, 1)], seed=21, e4m3=e4m3)
        q, out = made.given["q"], torch.empty_like(made.given["q"])
        for step in range(5):
            q.normal_(generator=torch.Generator().manual_seed(step))
            assert error(made.call(out=out), expected(made)) < GATE
        ((_, packed, _),) = [last for kept in _plans.values() for last in kept.last.values()]
        assert packed is not None and len(scratch._of_streams) == reduction.startswith("global")
    finally:
        monkeypatch.delenv("JITMX_ATTENTION_KNOBS")
        jitmx_settings.reload()


@settings(max_examples=examples(25), deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(-1, 130), st.integers(0, 3)), min_size=1, max_size=7),
    window=st.sampled_from([None, 1, 33]),
    kv=st.integers(1, 3),
    append=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_grid_shares_requests_of_any_lengths_and_every_row_is_right(
    requests: list[tuple[int, int]], window: int | None, kv: int, append: bool, seed: int
) -> None:
    if not any(new for _, new in requests):
        return
    with on_cpu("sm_121a") as card:
        made = world(requests, heads=2 * kv, kv=kv, seed=seed, append=append)
        sinks = torch.randn(2 * kv)
        knobs = {"reduction": "global", "parts": 1, "warps": 2, "keys": 16, "stages": 2}
        found = made.call(window=window, sinks=sinks, knobs=knobs)
        assert card.kernels == ["attention.decode"]
    right = expected(made, window=window, sinks=sinks)
    for row, (one, other) in enumerate(zip(found, right, strict=True)):
        assert error(one, other) < 2 * GATE, f"token {row}"


def test_fp16_sums_are_taken_where_they_are_asked_for(card: Simulated) -> None:
    made = world([(40, 1)], seed=14, dtype=FP16)
    assert error(made.call(fp16_qk=True), expected(made)) < 1e-2
    assert [variant.knobs.as_dict()["qk"] for variant in card.launched] == ["qk_fp16"]


@pytest.mark.parametrize(("requests", "tokens"), [(0, 0), (2, 0)])
def test_nothing_is_launched_for_nothing(requests: int, tokens: int, card: Simulated) -> None:
    made = world([(3, 1)], seed=15)
    none = {name: made.given[name][:0] for name in ("q", "k_new", "v_new")}
    table = torch.zeros(requests, 1, dtype=torch.int32)
    lengths, starts = (torch.zeros(count, dtype=torch.int32) for count in (requests, requests + 1))
    found = made.call(**none, block_table=table, seq_lens=lengths, query_start_loc=starts)
    assert found.shape == (tokens, HEADS, DIM) and not card.launched


def test_plans_are_kept_by_the_next_power_of_two_of_the_longest_context(card: Simulated) -> None:
    made = world([(60, 1)], seed=16)
    _plans.clear()
    for longest in (33, 40, 64):
        made.call(max_seq_len=longest)
    assert len(_plans) == 1
    with pytest.raises(InputError, match="max_seq_len=65 is over the 64 tokens that a row of block_table"):
        made.call(max_seq_len=65)


def test_kernels_are_chosen_by_the_tokens_that_a_window_lets_be_seen(
    card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    variants = plan.variants

    def noted(call: Call) -> Any:
        chosen.append(call.problem.context)
        return variants(call)

    monkeypatch.setattr(plan, "variants", noted)
    made = world([(120, 1)], seed=18)
    for window in (None, 20, 100):
        _plans.clear()
        assert error(made.call(window=window, max_seq_len=121), expected(made, window=window)) < GATE
    assert chosen == [128, 32, 128]


@pytest.mark.parametrize("card", ["sm_90a", "sm_121a"], indirect=True)
def test_many_new_tokens_are_written_first_and_short_requests_of_the_batch_left_to_decode(card: Simulated) -> None:
    made = world([(0, 40), (37, 2), (-1, 1), (130, 1), (16, 19)], seed=3)
    sinks = torch.randn(HEADS)
    found = made.call(sinks=sinks, window=50)
    first, _, last = card.kernels
    assert (first, last) == ("attention.append", "attention.decode")
    assert error(found, expected(made, sinks=sinks, window=50)) < GATE
    card.launched.clear()
    made = world([(5, 40)], seed=4)
    given = {name: value for name, value in made.given.items() if name != "q"}
    jitmx.append_kv(**given)
    assert error(made.call(k_new=None, v_new=None), expected(made)) < GATE
    assert len(card.kernels) == 2 and card.kernels[0] == "attention.append"
    assert error(made.call(), expected(made)) < GATE


def _cut(**changed: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {name: change(given[name]) for name, change in changed.items()}


def _set(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda _given: changed


def _astray(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def _apart(x: torch.Tensor, stride: int) -> torch.Tensor:
    """As `x`, with tokens of a page so many elements apart, in memory that nobody touches."""
    _, tokens, heads, values = x.shape
    memory = torch.empty(stride * tokens, dtype=x.dtype)
    return memory.as_strided(x.shape, (heads * values, stride, values, 1))


def _halves(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        own = {name: given[name].to(FP16) for name in ("q", "k_new", "v_new")}
        return {**own, **changed}

    return change


_ROPE = torch.zeros(64, 64)
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "q is a list": (_set(q=[1]), r"q is a list, not a torch tensor|traced"),
    "q of two dimensions": (_cut(q=lambda x: x[0]), r"q is bfloat16 \[8, 64\].*; it must be bfloat16 or float16 \[tok"),
    "q in float32": (_cut(q=lambda x: x.float()), r"q is float32 .*must be bfloat16 or float16 \[tokens, heads, 64\]"),
    "another head_dim": (_cut(q=lambda x: x[..., :32]), r"q is bfloat16 \[3, 8, 32\].*heads, 64\], head_dim being"),
    "heads": (_cut(q=lambda x: x[:, :7]), "q has 7 heads and the cache 2; each KV head serves as many .*multiple"),
    "heads apart": (_cut(q=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)), "q has strides .*heads of a"),
    "tokens off 16 bytes": (
        _cut(q=lambda x: torch.cat([x.flatten(1), x.new_zeros(3, 4)], 1)[:, :512].unflatten(1, (8, 64))),
        r"q has strides \[516, 64, 1\]; tokens must start on 16 bytes",
    ),
    "q astray": (_cut(q=_astray), "q starts at an address that is no multiple of 16 bytes"),
    "a gradient": (_cut(q=lambda x: x.clone().requires_grad_()), "q requires a gradient, and jitmx has inference"),
    "new keys of other heads": (_cut(k_new=lambda x: x[:, :1]), r"k_new is bfloat16 \[3, 1, 64\].*must be bfl"),
    "new values in fp16": (_cut(v_new=lambda x: x.half()), "v_new is float16 .*must be bfloat16"),
    "no new values": (_set(v_new=None), "v_new is None, and the other is given; pass both, or neither"),
    "no new keys": (_set(k_new=None), "k_new is None, and the other is given"),
    "three dimensions": (_cut(k_cache=lambda x: x[0]), r"k_cache is bfloat16 .*must be .*\[pages, page_size, kv"),
    "a cache in int8": (_cut(k_cache=lambda x: x.to(torch.int8)), "k_cache is int8 .*float8_e4m3fn or uint8"),
    "values of other pages": (_cut(v_cache=lambda x: x[:2]), "v_cache is bfloat16 .*; they must be alike"),
    "values of other strides": (_cut(v_cache=lambda x: x.contiguous()), "v_cache has strides .* they must be equal"),
    "a cache of columns": (
        _cut(k_cache=lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
             v_cache=lambda x: x.transpose(1, 3).contiguous().transpose(1, 3)),
        "k_cache has strides .*values of a head must follow one another",
    ),
    "rows of a cache off 16 bytes": (
        _cut(k_cache=lambda x: torch.zeros(*x.shape[:3], 68, dtype=BF16)[..., :64],
             v_cache=lambda x: torch.zeros(*x.shape[:3], 68, dtype=BF16)[..., :64]),
        "k_cache has strides .*each must be a multiple of 8 elements, 16 bytes",
    ),
    "tokens of a page far apart": (
        _cut(k_cache=lambda x: _apart(x, (1 << 26) + 8), v_cache=lambda x: _apart(x, (1 << 26) + 8)),
        "k_cache has strides .*16 tokens of a page must lie within 2 GiB",
    ),
    "an expanded cache": (
        _cut(k_cache=lambda x: x[:1, :, :, :].expand(9, -1, -1, -1), v_cache=lambda x: x[:1].expand(9, -1, -1, -1)),
        r"k_cache is expanded \(stride 0\), and new keys are written",
    ),
    "one cache": (lambda given: {"v_cache": given["k_cache"]}, "v_cache is k_cache itself, and both are written"),
    "a cache astray": (_cut(v_cache=_astray, k_cache=lambda x: x.contiguous()), "v_cache starts at an address"),
    "an empty cache": (_cut(k_cache=lambda x: x[:0], v_cache=lambda x: x[:0]), "k_cache is .*must have pages"),
    "another type of cache": (_halves(), "k_cache is bfloat16 .*and new keys are float16; a cache has their type"),
    "scales of no E4M3": (_set(k_scale=torch.ones(1)), "k_scale is of E4M3 caches, and this one is bfloat16; leave it"),
    "a table of int64": (_cut(block_table=lambda x: x.long()), r"block_table is int64 .*must be int32 \[requests"),
    "a table of columns": (
        _cut(block_table=lambda x: x.t().contiguous().t()), "block_table has strides .* pages of a request must follow"
    ),
    "a table without pages": (_cut(block_table=lambda x: x[:, :0]), "a request must have room for a page at least"),
    "lengths of int64": (_cut(seq_lens=lambda x: x.long()), r"seq_lens is int64 \[2\] .*must be int32 \[2\]"),
    "lengths of others": (_cut(seq_lens=lambda x: x[:1]), r"seq_lens is int32 \[1\] .*must be int32 \[2\]"),
    "starts without an end": (_cut(query_start_loc=lambda x: x[:2]), r"query_start_loc is int32 \[2\].*int32 \[3\]"),
    "no new token": (_set(max_query_len=0), "max_query_len=0 is not a whole number of 1 or more"),
    "half a token": (_set(max_query_len=1.5), "max_query_len=1.5 is not a whole number"),
    "too long": (_set(max_seq_len=100), "max_seq_len=100 is over the 32 tokens that a row of block_table"),
    "no context": (_set(max_seq_len=0), "max_seq_len=0 is not a whole number of 1 or more"),
    "a scale of nan": (_set(scale=float("nan")), "scale=nan is not a finite number over 0"),
    "an infinite scale": (_set(scale=float("inf")), "scale=inf is not a finite number over 0"),
    "a scale below 0": (_set(scale=-0.125), "scale=-0.125 is not a finite number over 0"),
    "no cap": (_set(soft_cap=0.0), "soft_cap=0.0 is not a finite number over 0"),
    "a word as cap": (_set(soft_cap="30"), "soft_cap='30' is not a finite number over 0"),
    "an empty window": (_set(window=0), "window=0 is not a whole number of 1 or more; a token counts itself"),
    "half a window": (_set(window=1.5), "window=1.5 is not a whole number"),
    "sinks of KV heads": (_set(sinks=torch.zeros(2)), r"sinks is float32 \[2\] .*or float32 \[8\]"),
    "sinks in float64": (_set(sinks=torch.zeros(8).double()), "sinks is float64"),
    "sinks apart": (_set(sinks=torch.zeros(16)[::2]), "sinks is not contiguous"),
    "a style": (_set(rope=_ROPE, rope_style="gptj"), "rope_style='gptj' is not one of neox, interleaved"),
    "a table of 3 dimensions": (_set(rope=_ROPE[None]), r"rope is .*must be .*\[positions, rotary\]"),
    "a wide table": (_set(rope=torch.zeros(64, 128)), "rope has 128 columns, .*up to head_dim=64"),
    "a narrow table": (_set(rope=torch.zeros(64, 24)), "rope has 24 columns, .*'neox' rotates a multiple of 16"),
    "a table of int32": (_set(rope=_ROPE.int()), "rope is int32"),
    "a table of columns, for rope": (_set(rope=_ROPE.t()), "rope is not contiguous"),
    "a short table": (_set(rope=_ROPE[:16], max_seq_len=17), "rope has 16 positions, and max_seq_len=17; pass"),
    "positions of int32": (_set(positions=torch.zeros(3, dtype=torch.int32)), r"positions is int32 .*int64 \[3\]"),
    "slots of requests": (_set(slot_mapping=torch.zeros(2, dtype=torch.int64)), r"slot_mapping is int64 \[2\] .*\[3\]"),
    "a mask of bools": (_set(mask=torch.zeros(3, 1).bool()), "mask is bool .*uint32 or int32"),
    "a mask of three words": (_set(mask=torch.zeros(3, 3, dtype=torch.int32)), "mask is int32 .*32 bits, or two"),
    "a mask of requests": (_set(mask=torch.zeros(2, 1, dtype=torch.int32)), r"mask is int32 \[2, 1\].*\[3, 1\]"),
    "more tokens than bits": (
        _set(mask=torch.zeros(3, 1, dtype=torch.int32), max_query_len=33), "max_query_len=33 is over the 32 bits .*two"
    ),
    "a mask of no new tokens": (
        _set(k_new=None, v_new=None, mask=torch.zeros(3, 1, dtype=torch.int32)), "mask is of new keys, and"
    ),
    "slots of no new tokens": (
        _set(k_new=None, v_new=None, slot_mapping=torch.zeros(3, dtype=torch.int64)), "slot_mapping says where new keys"
    ),
    "an output of another type": (_set(out=torch.zeros(3, 8, 64)), "out is float32"),
    "an output of tokens that overlap": (
        lambda given: {"out": torch.zeros(1, 8, 64, dtype=BF16).expand(3, -1, -1)}, "those of out not overlap"
    ),
    "q as output": (lambda given: {"out": given["q"]}, "out overlaps q, which is read while out is written; pass"),
    "a part of q in the output": (
        lambda given: {"q": (z := torch.zeros(4, 8, 64, dtype=BF16))[:3], "out": z[1:]}, "out overlaps q, which is read"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_what_cannot_be_is_refused_before_a_launch(what: str, warm: bool, card: Simulated) -> None:
    change, said = REFUSED[what]
    made = world([(30, 1), (16, 2)], seed=18)
    if warm:  # equal calls were planned; nothing is run
        _plans.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Simulated, "launch", lambda *_: None)
            made.call()
    with pytest.raises((InputError, KnobError), match=said):
        made.call(**change(made.given))
    assert not card.launched


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k_scale": None}, "k_scale is None, and the cache is E4M3; pass a float32 tensor of 1 or 2 elements"),
        ({"v_scale": torch.ones(3)}, r"v_scale is float32 \[3\] .*float32 of 1 or 2 elements"),
        ({"v_scale": torch.ones(1)}, "k_scale has 2 elements and v_scale 1; pass both with 1 or both with 2"),
        ({"v_scale": torch.ones(2).bfloat16()}, "v_scale is bfloat16"),
        ({"v_scale": torch.ones(4)[::2]}, "v_scale is not contiguous"),
    ],
)
def test_scales_of_an_e4m3_cache_are_two_of_a_kind(change: dict[str, Any], said: str, card: Simulated) -> None:
    with pytest.raises(InputError, match=said):
        world([(3, 1)], e4m3=True).call(**change)


@pytest.mark.parametrize(
    ("heads", "kv", "dim", "changed", "said"),
    [
        (34, 2, 64, {}, "group=17 is above its limit; the nearest legal value is 16"),
        (2, 2, 80, {}, "head_dim=80 is not one of 64, 96, 128, 256"),
        (2, 2, 64, {"fp16_qk": True}, "qk=qk_fp16 sums q k in fp16, .*bf16 values go beyond it; use qk=qk_fp32"),
        (2, 2, 64, {"knobs": {"warps": 17}}, "warps=17 is above its limit"),
        (2, 2, 64, {"knobs": {"group": 2}}, "group=2 cannot be overridden: the call itself fixes group=1"),
    ],
)
def test_sizes_and_knobs_that_no_kernel_has_are_refused_by_the_knob(
    heads: int, kv: int, dim: int, changed: dict[str, Any], said: str, card: Simulated
) -> None:
    with pytest.raises(KnobError, match=said):
        world([(3, 1)], heads=heads, kv=kv, dim=dim).call(**changed)
    assert not card.launched


@pytest.mark.parametrize("card", ["sm_80"], indirect=True)
def test_a_target_that_converts_no_e4m3_says_so(card: Simulated) -> None:
    with pytest.raises(KnobError, match="cache=e4m3 needs sm_89 or newer; sm_80 converts no E4M3"):
        world([(3, 1)], e4m3=True).call()


@pytest.mark.parametrize("card", ["sm_121a", "sm_90a"], indirect=True)
@pytest.mark.parametrize("new", [1, 40])
def test_pages_of_odd_size_are_refused_with_the_nearest(new: int, card: Simulated) -> None:
    made = world([(3, new)])
    odd = {name: torch.zeros(4, 24, KV, DIM, dtype=BF16) for name in ("k_cache", "v_cache")}
    with pytest.raises(KnobError, match="page_size=24 is not a multiple of 16; the nearest legal value is 32"):
        made.call(**odd)


def test_without_a_card_the_tensors_are_named() -> None:
    with pytest.raises(InputError, match=r"q is bfloat16 \[1, 8, 64\] on cpu; jitmx runs on CUDA tensors"):
        world([(3, 1)]).call()


def test_settings_choose_knobs_and_are_named_where_they_are_wrong(
    card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world([(40, 1)], seed=19)
    monkeypatch.setenv("JITMX_ATTENTION_KNOBS", "warps=2,keys=16")
    jitmx_settings.reload()
    made.call()
    assert (card.launched[-1].knobs.as_dict()["warps"], card.launched[-1].knobs.as_dict()["keys"]) == (2, 16)
    monkeypatch.setenv("JITMX_ATTENTION_KNOBS", "head_dim=128")
    jitmx_settings.reload()
    with pytest.raises(KnobError, match=r"JITMX_ATTENTION_KNOBS=head_dim=128.*cannot be overridden"):
        made.call()


ORDER = (
    "q", "k_new", "v_new", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc", "slot_mapping",
    "positions", "sinks", "rope", "mask", "k_scale", "v_scale", "out",
)  # fmt: skip


def operands(made: World, **changed: Any) -> tuple[Any, ...]:
    """Arguments of `torch.ops.jitmx.attention`."""
    given = {**made.given, "out": torch.empty_like(made.given["q"]), **changed}
    numbers = given["max_query_len"], None, None, given.get("window"), None, "neox", False
    return *(given.get(name) for name in ORDER), *numbers


def test_the_operator_says_what_it_writes_and_needs_no_data_for_shapes(card: Simulated) -> None:
    made = world([(20, 1), (5, 2)], seed=20)
    # Its schema, and that a fake does as the operator; AOT's check would launch on copies of caches of their own.
    torch.library.opcheck(
        torch.ops.jitmx.attention.default, operands(made), test_utils=("test_schema", "test_faketensor")
    )
    right = expected(made)
    given = operands(made)
    torch.ops.jitmx.attention(*given)
    assert error(given[15], right) < GATE


def test_tensors_without_data_have_the_shape_of_q() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(3, HEADS, DIM, dtype=BF16)
        k = torch.empty(3, KV, DIM, dtype=BF16)
        cache = torch.empty(2, 9, PAGE, KV, DIM, dtype=BF16)
        numbers = [torch.empty(count, dtype=torch.int32) for count in (2, 3)]
        table = torch.empty(2, 4, dtype=torch.int32)
        given = q, k, k, cache[0], cache[1], table, *numbers
        found = jitmx.attention(*given, max_query_len=2)
        assert (found.shape, found.dtype, found.device) == (q.shape, BF16, q.device)
        assert jitmx.attention(*given, max_query_len=2, out=found) is found
        with pytest.raises(InputError, match=r"out is float32 .* it must be like q, bfloat16"):
            jitmx.attention(*given, max_query_len=2, out=found.float())
        with pytest.raises(InputError, match="q requires a gradient"):
            jitmx.attention(q.requires_grad_(), *given[1:], max_query_len=2)
        with pytest.raises(InputError, match="knobs cannot be traced through"):
            jitmx.attention(*given, max_query_len=2, knobs={"warps": 2})
        jitmx.append_kv(*given[1:], max_query_len=2)


def test_a_compiled_program_writes_the_caches_that_it_was_given(card: Simulated) -> None:
    made = world([(20, 1), (5, 2)], seed=21, layout="heads")
    given, before = made.given, made.pool.clone()

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        logical = pool.transpose(1, 2)
        caches = logical[..., :DIM], logical[..., DIM:]
        wanted = (given[name] for name in ("block_table", "seq_lens", "query_start_loc"))
        return jitmx.attention(q, k, v, *caches, *wanted, max_query_len=2, window=64) * 1.0

    compiled: Any = torch.compile(program, backend="aot_eager", fullgraph=True)
    found = compiled(given["q"], given["k_new"], given["v_new"], made.pool)
    assert error(found, expected(made, window=64)) < GATE
    assert not torch.equal(made.pool, before)
    page = int(given["block_table"][0, 20 // PAGE])
    assert torch.equal(given["v_cache"][page, 20 % PAGE], given["v_new"][0])
