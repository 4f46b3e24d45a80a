"""Operators on chains and trees of drafts, on a simulated card: what they give is what plain Python gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import jitmx
import tree_oracles
from jitmx.bench import tree as benchmarks
from jitmx.errors import InputError
from jitmx.ops import tree
from simulated_card import Simulated

TARGETS = pytest.mark.parametrize("card", ["sm_80", "sm_90a", "sm_121a"], indirect=True)
few_cases = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
SEEDS = st.integers(0, 1 << 30)
NODES = st.integers(1, 64)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(found: Any, wanted: Any) -> bool:
    return all(torch.equal(one.long(), other.long()) for one, other in zip(found, wanted, strict=True))


@few_cases
@given(nodes=NODES, seed=SEEDS, padded=st.booleans(), wide=st.booleans())
def test_a_plan_is_what_walking_up_from_each_node_finds(
    card: Simulated, nodes: int, seed: int, padded: bool, wide: bool
) -> None:
    parents = tree_oracles.drawn(3, nodes, seed, padded=padded)
    starts, levels = [5, 0, 70000], max(nodes // 2, 1)
    found = jitmx.tree_plan(parents, torch.tensor(starts, dtype=torch.int64 if wide else torch.int32), levels=levels)
    wanted = tree_oracles.planned(parents, starts, levels)
    wanted["mask"] = tree_oracles.bits(wanted["mask"])
    assert same(found, wanted.values())


@TARGETS
def test_a_tree_that_all_requests_share_is_given_once(card: Simulated) -> None:
    parents = ints(-1, 0, 0, 1, 1, 2)
    found = jitmx.tree_plan(parents, torch.tensor([3, 9]))
    assert same(found, jitmx.tree_plan(parents.repeat(2, 1), torch.tensor([3, 9])))
    assert found.depth.tolist() == [[0, 1, 1, 2, 2, 2]] * 2 and found.positions[1].tolist() == [9, 10, 10, 11, 11, 11]
    assert jitmx.tree_plan(parents).positions.tolist() == [[0, 1, 1, 2, 2, 2]]


@few_cases
@given(nodes=NODES, seed=SEEDS)
def test_a_packed_mask_is_that_of_the_plan(card: Simulated, nodes: int, seed: int) -> None:
    parents = tree_oracles.drawn(2, nodes, seed)
    mask = tree_oracles.planned(parents, [0, 0], 1)["mask"]
    packed = jitmx.pack_mask(mask)
    assert torch.equal(packed, jitmx.tree_plan(parents).mask) and torch.equal(packed, tree_oracles.bits(mask))
    assert torch.equal(jitmx.pack_mask(mask[0].byte() * 7), packed[:nodes])


@TARGETS
def test_masks_of_different_sizes_lie_one_behind_the_other(card: Simulated) -> None:
    counts = [3, 0, 40, 1, 64]
    masks = [torch.rand(count, count, generator=torch.Generator().manual_seed(count)) < 0.5 for count in counts]
    flat = torch.cat([mask.flatten() for mask in masks])
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    found = jitmx.pack_mask(flat, starts, tokens=sum(counts) + 5, max_query_len=64)
    wide = [torch.nn.functional.pad(mask, (0, 64 - len(mask))) for mask in masks]
    assert torch.equal(found, torch.cat([tree_oracles.bits(torch.cat(wide)), torch.zeros(5, 2, dtype=torch.int32)]))


@few_cases
@given(nodes=NODES, seed=SEEDS, dtype=st.sampled_from([torch.int32, torch.int64]))
def test_a_greedy_target_accepts_the_longest_path_that_it_says(
    card: Simulated, nodes: int, seed: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(seed)
    parents = tree_oracles.drawn(4, nodes, seed, padded=bool(seed % 2))
    tokens, target = (torch.randint(-1 if way else 0, 2, (4, nodes), generator=draw).to(dtype) for way in (1, 0))
    starts, levels = torch.tensor([4, 0, 9, 1 << 20]), max(nodes - seed % 3, 1)
    found = jitmx.tree_verify(tokens, target, parents, starts=starts, levels=levels)
    assert same(found, tree_oracles.verified(tokens, target, parents, starts.tolist(), levels))
    if levels == nodes and not (tokens < 0).any():
        plan = jitmx.tree_plan(parents)
        assert same(found, benchmarks.torch_verify(tokens.long(), target.long(), parents, plan.paths, starts))


@pytest.mark.parametrize("typical", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_by_thresholds_likely_nodes_are_accepted_too(card: Simulated, seed: int, typical: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch, nodes, vocab = 3, 40, 4
    parents = tree_oracles.drawn(batch, nodes, seed)
    tokens, target = (torch.randint(0, vocab, (batch, nodes), generator=draw) for _ in range(2))
    probs = torch.randn(batch, nodes, vocab, generator=draw).mul(2).softmax(-1)
    entropy = torch.special.entr(probs).sum(-1)
    limits = torch.full((batch, nodes), 0.2)
    if typical:
        limits = limits.minimum(0.4 * (-entropy).exp())
    above = parents.clamp(min=0).long()
    of_token = probs.gather(1, above[..., None].expand(-1, -1, vocab)).gather(2, tokens[..., None])[..., 0]
    likely = of_token >= limits.gather(1, above)
    found = jitmx.tree_verify(
        tokens, target, parents, probs=probs, entropy=entropy if typical else None, threshold=0.2, alpha=0.4
    )
    assert same(found, tree_oracles.verified(tokens, target, parents, [0] * batch, nodes, likely))
    assert (found.accepted > jitmx.tree_verify(tokens, target, parents).accepted).any()


@few_cases
@given(seed=SEEDS, width=st.integers(1, 6), depth=st.integers(1, 4), nodes=st.integers(2, 64))
def test_a_tree_is_of_the_best_candidates_in_their_order(
    card: Simulated, seed: int, width: int, depth: int, nodes: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    count = width + (depth - 1) * width * width
    scores, parents = torch.zeros(2, count), torch.full((2, count), -1)
    for r in range(2):
        scores[r, :width] = -torch.randint(0, 3, (width,), generator=draw).float()
        level = torch.arange(width)
        for begin in range(width, count, width * width):
            level = level[scores[r, level].sort(stable=True, descending=True).indices[:width]]
            parents[r, begin : begin + width * width] = level.repeat_interleave(width)
            level = torch.arange(begin, begin + width * width)
            scores[r, level] = scores[r, parents[r, level]] - torch.randint(0, 3, (width * width,), generator=draw)
    tokens, roots = torch.randint(0, 1 << 20, (2, count), generator=draw), torch.tensor([7, 8])
    found = jitmx.tree_build(scores, tokens, parents.int(), roots, nodes=nodes, starts=torch.tensor([3, 4]))
    for r in range(2):
        best = scores[r].sort(stable=True, descending=True).indices[: nodes - 1].sort().values.tolist()
        fill = [-1] * (nodes - 1 - len(best))
        assert found.candidates[r].tolist() == [-1, *best, *fill]
        assert found.tokens[r].tolist() == [int(roots[r]), *tokens[r, best].tolist(), *fill]
        place = {candidate: 1 + node for node, candidate in enumerate(best)} | {-1: 0}
        assert found.parents[r].tolist() == [-1, *(place[int(parents[r, one])] for one in best), *fill]
    assert same(found.plan, jitmx.tree_plan(found.parents, torch.tensor([3, 4])))


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Drafts of requests, and what the target says; of many the first drafts are right."""
    target = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=6))
    drafts = [
        [*says[: draw(st.integers(0, len(says) - 1))], *draw(st.lists(st.integers(-1, 1), max_size=40))][
            : len(says) - 1
        ]
        for says in target
    ]
    return [own + [-1] * (len(says) - 1 - len(own)) for own, says in zip(drafts, target, strict=True)], target


@few_cases
@given(requests=chains(), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_chains_are_accepted_as_by_a_rejection_sampler(
    card: Simulated, requests: tuple[list[list[int]], list[list[int]]], dtype: torch.dtype
) -> None:
    drafts, target = requests
    most = max(map(len, drafts))
    wanted = tree_oracles.accepted(drafts, target, most)
    flat = torch.tensor([one for own in drafts for one in own], dtype=dtype)
    says = torch.tensor([one for own in target for one in own], dtype=dtype)
    ends = torch.tensor([len(own) for own in drafts]).cumsum(0).int()
    positions = torch.arange(len(drafts)) * 100
    found = jitmx.accept_greedy(flat, says, cu_num_drafts=ends, max_drafts=most, positions=positions)
    counts = torch.tensor([sum(one >= 0 for one in own) for own in wanted])
    last = torch.tensor([own[count - 1] for own, count in zip(wanted, counts.tolist(), strict=True)])
    assert same(found, (torch.tensor(wanted), counts - 1, last, positions + counts))
    # The same with a row for each token.
    rows = torch.tensor([one for own in drafts for one in (9, *own)], dtype=dtype)
    starts = torch.tensor([0, *(len(own) for own in target)]).cumsum(0).int()
    again = jitmx.accept_greedy(rows, says, cu_num_rows=starts, max_drafts=most, positions=positions)
    assert same(again, found)


@TARGETS
@pytest.mark.parametrize("k", [0, 1, 3, 33])
def test_chains_of_one_length_are_accepted_as_torch_does(card: Simulated, k: int) -> None:
    draw = torch.Generator().manual_seed(k)
    target = torch.randint(0, 2, (6, k + 1), generator=draw)
    drafts = torch.where(torch.rand(6, k, generator=draw) < 0.2, 2, target[:, :k])
    found = jitmx.accept_greedy(drafts, target, positions=torch.arange(6))
    assert same(found, benchmarks.torch_accept(drafts, target, torch.arange(6)))
    assert card.kernels == ["tree.accept"]


def test_a_call_that_is_like_the_last_one_is_not_checked_again_and_another_is(card: Simulated) -> None:
    target, drafts = torch.zeros(4, 3).long(), torch.zeros(4, 2).long()
    for value in (0, 1):
        drafts.fill_(value)
        assert jitmx.accept_greedy(drafts, target).accepted.tolist() == [2 * (1 - value)] * 4
    assert jitmx.accept_greedy(drafts[:2], target[:2]).accepted.tolist() == [0, 0]
    for wrong in (target[:, :2], target.int()[:2], target.t(), target.float(), None):
        with pytest.raises(InputError, match="target"):
            jitmx.accept_greedy(drafts, wrong)  # type: ignore[arg-type]
    assert len(card.launched) == 3


def test_requests_that_are_still_read_get_nothing_and_lose_nothing(card: Simulated) -> None:
    rows = torch.tensor([1, 5, 6, 2, 3, 8])  # of three requests, the second of which has no drafts
    says = torch.tensor([5, 7, 7, 9, 8, 4])
    prompts = torch.tensor([4, 0, 30, 5], dtype=torch.int32)
    tokens, sampled, rejected = tree.accept_requests(
        rows, says, ints(0, 3, 4, 6), 2, torch.tensor([0, 2, 3]), ints(9, 29, 5), prompts
    )
    assert sampled.tolist() == [2, 0, 2] and rejected.tolist() == [1, 0, 0]
    assert tokens[0].tolist() == [5, 7, -1] and tokens[2].tolist() == [8, 4, -1]
    given: dict[str, Any] = {"requests": torch.tensor([0, 2, 3]), "lengths": ints(9, 29, 5), "prompts": prompts}
    for name in ("requests", "lengths"):  # what lies on another device
        with pytest.raises(InputError, match="of 3 requests or more on cpu"):
            tree.accept_requests(rows, says, ints(0, 3, 4, 6), 2, **given | {name: given[name].to("meta")})


@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
@pytest.mark.parametrize(("dtype", "layers"), [(torch.bfloat16, 1), (torch.uint8, 17)])
def test_keys_and_values_of_a_path_go_where_its_tokens_are(
    card: Simulated, layout: str, dtype: torch.dtype, layers: int
) -> None:
    draw = torch.Generator().manual_seed(layers)
    batch, pages = 3, 3
    shape = (batch * pages, 16, 2, 64) if layout == "tokens first" else (batch * pages, 2, 16, 64)
    whole = [torch.randint(0, 100, shape, generator=draw).to(dtype) for _ in range(2 * layers)]
    caches = [one if layout == "tokens first" else one.transpose(1, 2) for one in whole]
    before = [one.clone() for one in caches]
    table = torch.randperm(batch * pages, generator=draw).view(batch, pages).int()
    starts, accepted = torch.tensor([10, 0, 20]), ints(4, 0, 2)
    path = ints([0, 1, 7, 8, 25], [0, -1, -1, -1, -1], [0, 2, 11, -1, -1])
    jitmx.move_kv(caches, path, accepted, starts, table)
    for now, was in zip(caches, before, strict=True):
        wanted = was.clone()
        for r, count in enumerate(accepted.tolist()):
            for d in range(count + 1):
                source, target = int(starts[r] + path[r, d]), int(starts[r]) + d
                wanted[table[r, target // 16], target % 16] = was[table[r, source // 16], source % 16]
        assert torch.equal(now, wanted)
    assert card.kernels == ["tree.move"] * -(-2 * layers // 32)


def step(
    scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor, says: torch.Tensor,
    caches: list[torch.Tensor], table: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    built = jitmx.tree_build(scores, tokens, parents, roots, nodes=6, starts=roots)
    found = jitmx.tree_verify(built.tokens, says, built.parents, starts=roots, levels=4)
    jitmx.move_kv(caches, found.path, found.accepted, roots, table)
    chain = jitmx.accept_greedy(found.path.long()[:, 1:].contiguous(), found.tokens)
    best = jitmx.topk(scores, 3)
    plan = jitmx.tree_plan(built.parents)
    return *found, *chain, *best, *plan, jitmx.pack_mask(torch.ones(2, 6, 6, dtype=torch.bool))


def inputs() -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(3)
    scores, tokens = torch.randn(2, 9, generator=draw), torch.randint(0, 3, (2, 9), generator=draw)
    parents = ints(-1, -1, -1, 0, 0, 1, 1, 3, 3).repeat(2, 1)
    caches = [torch.randn(4, 16, 1, 64, generator=draw).bfloat16() for _ in range(2)]
    return scores, tokens, parents, torch.tensor([1, 2]), torch.zeros(2, 6).long(), caches, ints([0, 1], [2, 3])


def test_compiled_code_is_one_graph_and_gives_the_same(card: Simulated) -> None:
    torch.compiler.reset()
    eager, compiled = inputs(), inputs()
    wanted = step(*eager)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    assert same(found, wanted) and same(compiled[5], eager[5])


def test_operators_trace_without_data(card: Simulated) -> None:
    wanted = step(*inputs())
    with FakeTensorMode(allow_non_fake_inputs=True):
        scores, tokens, parents, roots, says, caches, table = (
            [torch.empty_like(one) for one in given] if isinstance(given, list) else torch.empty_like(given)
            for given in inputs()
        )
        found = step(scores, tokens, parents, roots, says, caches, table)
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in wanted]


def test_nothing_is_launched_for_no_requests(card: Simulated) -> None:
    none = torch.empty(0, 4, dtype=torch.int32)
    assert jitmx.tree_plan(none).mask.shape == (0, 1)
    assert jitmx.tree_verify(none, none, none).path.shape == (0, 4)
    assert jitmx.accept_greedy(none, torch.empty(0, 5, dtype=torch.int32)).tokens.shape == (0, 5)
    assert jitmx.pack_mask(torch.empty(0, 4, 4, dtype=torch.bool)).shape == (0, 1)
    assert jitmx.tree_build(none.float(), none, none, none[:, 0], nodes=3).tokens.shape == (0, 3)
    jitmx.move_kv([torch.zeros(1, 16, 1, 64)], none, none[:, 0], none[:, 0], none)
    assert not card.launched


PARENTS = ints([-1, 0, 0], [-1, 0, 1])
IDS = torch.zeros(2, 3, dtype=torch.int64)
CACHE = torch.zeros(2, 16, 1, 64).bfloat16()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: jitmx.tree_plan(PARENTS.long()),
            r"parents is int64 \[2, 3\].*must be contiguous int32 \[batch, nodes\]",
        ),
        (lambda: jitmx.tree_plan(torch.zeros(1, 65).int()), "trees of 65 nodes; a tree has 1 to 64, its root included"),
        (lambda: jitmx.tree_plan(PARENTS, ints(1)), r"starts is int32 \[1\].*int32 or int64 \[2\]"),
        (lambda: jitmx.tree_plan(PARENTS, levels=4), "levels=4: a path in a tree of 3 nodes has 1 to 3"),
        (lambda: jitmx.tree_plan([1]), "parents is a list, not a torch tensor"),  # type: ignore[arg-type]
        (lambda: jitmx.pack_mask(torch.zeros(2, 3).bool()), r"it must be \[batch, n, n\] or \[n, n\]"),
        (lambda: jitmx.pack_mask(torch.zeros(65, 65).bool()), "trees of 65 nodes"),
        (lambda: jitmx.pack_mask(torch.zeros(9).bool(), ints(0, 3), tokens=3), "a flat mask takes both, as numbers"),
        (lambda: jitmx.pack_mask(torch.zeros(3, 3).bool(), tokens=3), "are for a flat mask; leave them out"),
        (lambda: jitmx.pack_mask(torch.zeros(3, 3)), "must be contiguous bool or uint8"),
        (lambda: jitmx.tree_build(IDS, IDS, PARENTS, IDS[0, :2], nodes=3), "scores is int64.*contiguous float32"),
        (lambda: jitmx.tree_build(IDS.float(), IDS, PARENTS, IDS[0, :2], nodes=1), "nodes=1: a tree has 2 to 64"),
        (lambda: jitmx.tree_build(IDS.float(), IDS[:1], PARENTS, IDS[0, :2], nodes=3), r"tokens is .*\[2, 3\]"),
        (lambda: jitmx.tree_verify(IDS, IDS[:, :2], PARENTS), r"target is .* with strides .*\[2, 3\]"),
        (lambda: jitmx.tree_verify(IDS, IDS, PARENTS, threshold=0.3), "probs and threshold go together"),
        (
            lambda: jitmx.tree_verify(IDS, IDS, PARENTS, probs=torch.zeros(2, 3, 5), threshold=-1.0),
            "threshold=-1.0 is not a finite number above 0 in float32",
        ),
        (lambda: jitmx.accept_greedy(IDS, IDS), r"target is int64 \[2, 3\].*\[2, 4\]"),
        (lambda: jitmx.accept_greedy(IDS[0], IDS[0], cu_num_rows=ints(0, 3)), "max_drafts=None: a flat target takes"),
        (lambda: jitmx.accept_greedy(IDS, torch.zeros(2, 4).long(), max_drafts=3), "max_drafts is for a flat target"),
        (
            lambda: jitmx.accept_greedy(IDS[0], IDS[0], cu_num_rows=ints(0, 3), cu_num_drafts=ints(2), max_drafts=2),
            "are both given; pass one of them",
        ),
        (lambda: jitmx.move_kv([], PARENTS, ints(0, 0), ints(0, 0), PARENTS), "caches is empty"),
        (lambda: jitmx.move_kv([CACHE, CACHE[:1]], PARENTS, ints(0, 0), ints(0, 0), PARENTS), "must be like caches"),
        (
            lambda: jitmx.move_kv([CACHE[..., :4]], PARENTS, ints(0, 0), ints(0, 0), PARENTS),
            "follow one another in multiples of 16 bytes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(card: Simulated, call: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()
    assert not card.launched
