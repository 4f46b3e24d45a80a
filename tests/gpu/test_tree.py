"""Operators on chains and trees of drafts on the card: against plain Python, and the document's loop in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitmx
import tree_oracles
from jitmx.bench import timing
from jitmx.dispatch.choose import choose
from jitmx.kernels.tree.problem import TreeProblem
from jitmx.ops import tree
from jitmx.runtime import card
from speculation_loop import PROMPT, SHAPE, World, code

Evidence = Callable[[object, float | None, str], None]

TIE = 0.3  # logits that are nearer than this may come in another order where other kernels have added up their terms


def note(evidence: Evidence, step: str, said: str) -> None:
    chosen = choose("tree", TreeProblem(step), card.arch(0), multiprocessors=card.multiprocessors(0)).variant
    evidence(chosen, None, said)


def same(found: Any, wanted: Any) -> bool:
    return all(torch.equal(one.cpu().long(), other.cpu().long()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("nodes", [1, 2, 17, 32, 33, 64])
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_plans_and_masks_are_what_walking_up_finds(nodes: int, batch: int, evidence: Evidence) -> None:
    for seed in range(3):
        parents = tree_oracles.drawn(batch, nodes, seed, padded=seed == 2)
        starts = torch.randint(0, 1 << 20, (batch,), generator=torch.Generator().manual_seed(seed))
        levels = max(nodes - seed, 1)
        found = jitmx.tree_plan(parents.cuda(), starts.cuda(), levels=levels)
        wanted = tree_oracles.planned(parents, starts.tolist(), levels)
        mask = wanted["mask"]
        wanted["mask"] = tree_oracles.bits(mask)
        assert same(found, wanted.values())
        assert same([jitmx.pack_mask(mask.cuda())], [wanted["mask"]])
    note(evidence, "plan", f"{batch} trees of {nodes}, exact")
    note(evidence, "pack", f"{batch} masks of {nodes}, exact")


def test_masks_of_different_sizes_lie_one_behind_the_other() -> None:
    counts = [3, 0, 40, 1, 64, *(k % 7 for k in range(60))]
    masks = [torch.rand(count, count) < 0.5 for count in counts]
    flat = torch.cat([mask.flatten() for mask in masks]).cuda()
    starts = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    found = jitmx.pack_mask(flat, starts, tokens=sum(counts) + 5, max_query_len=64)
    wide = torch.cat([torch.nn.functional.pad(mask, (0, 64 - len(mask))) for mask in masks])
    assert same([found], [torch.cat([tree_oracles.bits(wide), torch.zeros(5, 2, dtype=torch.int32)])])


@pytest.mark.parametrize("nodes", [1, 9, 32, 64])
@pytest.mark.parametrize("batch", [1, 64])
def test_the_longest_path_is_accepted(nodes: int, batch: int, evidence: Evidence) -> None:
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        parents = tree_oracles.drawn(batch, nodes, seed, padded=seed == 1)
        tokens, target = (torch.randint(low, 2, (batch, nodes), generator=draw) for low in (-1, 0))
        starts, levels = torch.randint(0, 99, (batch,), generator=draw), max(nodes - seed, 1)
        found = jitmx.tree_verify(tokens.cuda(), target.cuda(), parents.cuda(), starts=starts.cuda(), levels=levels)
        assert same(found, tree_oracles.verified(tokens, target, parents, starts.tolist(), levels))
        # By thresholds, of the probabilities of a vocabulary.
        probs = torch.randn(batch, nodes, 7, generator=draw).mul(2).softmax(-1)
        entropy = torch.special.entr(probs).sum(-1)
        limits = (0.4 * (-entropy).exp()).clamp(max=0.2)
        above = parents.clamp(min=0).long()
        of_token = probs.gather(1, above[..., None].expand(-1, -1, 7)).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
        likely = of_token >= limits.gather(1, above)
        by = {"probs": probs.cuda(), "entropy": entropy.cuda(), "threshold": 0.2, "alpha": 0.4}
        found = jitmx.tree_verify(tokens.cuda(), target.cuda(), parents.cuda(), **by)
        assert same(found, tree_oracles.verified(tokens, target, parents, [0] * batch, nodes, likely))
    note(evidence, "verify", f"{batch} trees of {nodes}, exact")


@pytest.mark.parametrize(("count", "nodes"), [(3, 3), (580, 64), (710, 60), (4096, 64), (40, 64)])
def test_trees_are_of_the_best_candidates(count: int, nodes: int, evidence: Evidence) -> None:
    draw = torch.Generator().manual_seed(count)
    scores = torch.randn(16, count, generator=draw).mul(4).round()  # many alike
    tokens = torch.randint(0, 1 << 20, (16, count), generator=draw)
    parents = torch.full((16, count), -1, dtype=torch.int32)
    roots, starts = torch.arange(16), torch.arange(16) * 7
    given = [one.cuda() for one in (scores, tokens, parents, roots)]
    found = jitmx.tree_build(*given, nodes=nodes, starts=starts.cuda(), levels=2)
    for r in range(16):
        best = scores[r].sort(stable=True, descending=True).indices[: nodes - 1].sort().values.tolist()
        fill = [-1] * (nodes - 1 - len(best))
        assert found.candidates[r].tolist() == [-1, *best, *fill]
        assert found.tokens[r].tolist() == [r, *tokens[r, best].tolist(), *fill]
    assert same(found.plan, jitmx.tree_plan(found.parents, starts.cuda(), levels=2))
    note(evidence, "build", f"{nodes} of {count} candidates, exact")


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
@pytest.mark.parametrize("most", [1, 3, 8, 70])
def test_chains_are_accepted_as_by_a_rejection_sampler(batch: int, most: int, evidence: Evidence) -> None:
    draw = torch.Generator().manual_seed(batch + most)
    counts = torch.randint(0, most + 1, (batch,), generator=draw).tolist()
    target = [torch.randint(0, 2, (count + 1,), generator=draw).tolist() for count in counts]
    drafts = [
        torch.where(torch.rand(count, generator=draw) < 0.1, -1, torch.tensor(says[:-1], dtype=torch.int64)).tolist()
        for count, says in zip(counts, target, strict=True)
    ]
    wanted = torch.tensor(tree_oracles.accepted(drafts, target, most))
    says = torch.tensor([one for own in target for one in own]).cuda()
    rows = torch.tensor([one for own in drafts for one in (9, *own)]).int().cuda()
    flat = torch.tensor([one for own in drafts for one in own], dtype=torch.int32).cuda()
    ends = torch.tensor(counts).cumsum(0).int().cuda()
    starts = torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0).int().cuda()
    positions = torch.arange(batch).cuda()
    found = jitmx.accept_greedy(flat, says, cu_num_drafts=ends, max_drafts=most, positions=positions)
    taken = (wanted >= 0).sum(1)
    last = wanted.gather(1, taken[:, None] - 1)[:, 0]
    assert same(found, (wanted, taken - 1, last, positions.cpu() + taken))
    again = jitmx.accept_greedy(rows, says, cu_num_rows=starts, max_drafts=most, positions=positions)
    assert same(again, found)
    requests, prompts = torch.arange(batch).cuda(), torch.full((batch,), 5, dtype=torch.int32).pin_memory()
    lengths = torch.randint(4, 7, (batch,), generator=draw).int()
    tokens, sampled, rejected = tree.accept_requests(rows, says, starts, most, requests, lengths.cuda(), prompts)
    behind = lengths >= 5
    assert same([tokens, sampled], [wanted, torch.where(behind, taken, 0)])
    assert same([rejected], [torch.where(behind, torch.tensor(counts) + 1 - taken, 0)])
    note(evidence, "accept", f"{batch} requests of up to {most} drafts, exact")


@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
@pytest.mark.parametrize(("dtype", "layers", "head_dim"), [(torch.bfloat16, 36, 64), (torch.uint8, 3, 128)])
def test_keys_and_values_move(layout: str, dtype: torch.dtype, layers: int, head_dim: int, evidence: Evidence) -> None:
    draw = torch.Generator().manual_seed(layers)
    batch, pages, nodes, levels = 16, 8, 64, 12
    shape = (batch * pages, 16, 8, head_dim) if layout == "tokens first" else (batch * pages, 8, 16, head_dim)
    whole = [torch.randint(0, 100, shape, generator=draw).to(dtype) for _ in range(2 * layers)]
    before = [one if layout == "tokens first" else one.transpose(1, 2) for one in whole]
    moved = [one.cuda() if layout == "tokens first" else one.cuda().transpose(1, 2) for one in whole]
    table = torch.randperm(batch * pages, generator=draw).view(batch, pages).int()
    starts = torch.randint(0, pages * 16 - nodes, (batch,), generator=draw)
    accepted = torch.randint(0, levels, (batch,), generator=draw).int()
    path = torch.full((batch, levels), -1, dtype=torch.int32)
    for r, count in enumerate(accepted.tolist()):
        path[r, : count + 1] = torch.cat(
            [torch.zeros(1), torch.randperm(nodes - 1, generator=draw)[:count].sort()[0] + 1]
        )
    jitmx.move_kv(moved, path.cuda(), accepted.cuda(), starts.cuda(), table.cuda())
    for now, was in zip(moved, before, strict=True):
        wanted = was.clone()
        for r, count in enumerate(accepted.tolist()):
            source, target = starts[r] + path[r, : count + 1], starts[r] + torch.arange(count + 1)
            wanted[table[r, target // 16].long(), target % 16] = was[table[r, source // 16].long(), source % 16]
        assert torch.equal(now.cpu(), wanted)
    note(evidence, "move", f"{2 * layers} caches, {layout}, exact")


def test_the_document_s_loop_generates_what_the_target_says_alone() -> None:
    for seed in range(4):
        world = World(8, 160, "cuda", seed)
        tokens, accepted = world.generate(60, width=4, depth=4, nodes=24)
        says, behind = world.alone(tokens)
        assert behind.max() <= TIE and (says.cpu() == torch.tensor(tokens)).float().mean() >= 0.95
        assert max(max(step) for step in accepted) >= 3


def test_a_whole_step_lies_in_one_graph() -> None:
    world = World(3, 96, "cuda", 2)
    length = world.prompts.shape[1]
    assert length == PROMPT
    made = []
    for captured in (False, True):
        target = world.target()
        positions = torch.arange(length, device="cuda").repeat(3, 1)
        seq_lens = torch.full((3,), length, dtype=torch.int32, device="cuda")
        roots = jitmx.greedy_sample(target(world.prompts, positions, seq_lens, world.block_table)[:, -1])
        starts = torch.full_like(roots, length)

        def step(target: Any = target, roots: torch.Tensor = roots, starts: torch.Tensor = starts) -> Any:
            found = code()["step"](target, world.draft, roots, starts, world.block_table, **SHAPE)
            roots.copy_(found.next_token)
            starts.copy_(found.next_positions)
            return found

        run = step
        out: list[list[list[int]]] = []
        if captured:
            kept = roots.clone(), starts.clone(), [cache.clone() for cache in target.caches]
            step()  # compiles and loads
            for now, was in zip((roots, starts, *target.caches), (*kept[:2], *kept[2]), strict=True):
                now.copy_(was)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = step()

            def run(graph: Any = graph, found: Any = found) -> Any:
                graph.replay()
                return found

        for _ in range(8):
            out.append(run().tokens.tolist())
        made.append(out)
    assert made[0] == made[1]


@pytest.mark.alone
@pytest.mark.parametrize("batch", [1, 64])
def test_accept_greedy_takes_4_us_at_most(batch: int) -> None:
    target = torch.randint(0, 2, (batch, 4), device="cuda")
    drafts, positions = target[:, :3].contiguous(), torch.arange(batch, device="cuda")

    def run() -> None:
        for _ in range(48):
            jitmx.accept_greedy(drafts, target, positions=positions)

    assert timing.replayed(run) / 48 <= 4e-6
