"""The loop of docs/speculation.md, run as it stands there on a simulated card."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import jitmx
from chained_card import on_stream
from jitmx.errors import SimulationError
from simulated_card import Simulated
from speculation_loop import SHAPE, World, code

TIE = 0.1  # logits that are nearer than this may come in another order where other kernels have added up their terms


def test_the_loop_generates_what_the_target_says_alone(card: Simulated) -> None:
    world = World(2, 48, seed=1)
    tokens, accepted = world.generate(10)
    says, behind = world.alone(tokens)
    assert behind.max() <= TIE and (says == torch.tensor(tokens)).float().mean() >= 0.9
    assert max(max(step) for step in accepted) >= 2, "no path of two drafts was accepted"
    launches = Counter(card.kernels)
    assert launches["tree.build"] == launches["tree.verify"] == launches["tree.move"] == len(accepted)
    assert launches["topk.select"] == (2 * SHAPE["depth"] - 1) * len(accepted)


def test_keys_and_values_that_are_not_moved_are_noticed(card: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 48, seed=1)
    monkeypatch.setattr(jitmx, "move_kv", lambda *given: None)
    tokens, _ = world.generate(10)
    assert world.alone(tokens)[1].max() > 5 * TIE


def test_chains_and_typical_acceptance_of_the_document_run(card: Simulated) -> None:
    drafts, says = torch.tensor([[4, 5], [4, 5]]), torch.tensor([[4, 5, 6], [3, 5, 6]])
    tokens, following, positions = code()["accept_chain"](says, drafts, torch.tensor([10, 20]))
    assert tokens.tolist() == [[4, 5, 6], [3, -1, -1]] and following.tolist() == [6, 3]
    assert positions.tolist() == [13, 21]
    world = World(2, 48)
    tree = code()["draft_tree"](world.draft, torch.tensor([1, 2]), torch.tensor([5, 6]), **SHAPE)
    torch.manual_seed(0)
    found = code()["verify_typical"](tree, torch.zeros(2, SHAPE["nodes"], 96), torch.tensor([5, 6]), threshold=0.01)
    # Of 96 tokens that are all alike each is likely enough at 0.3 exp(-entropy): the first of the longest paths is it.
    assert found.accepted.tolist() == tree.plan.depth.max(1).values.tolist()


@pytest.mark.parametrize("early", [False, True])
def test_launches_of_the_loop_read_nothing_before_their_wait_that_a_launch_at_work_may_write(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = jitmx.attention
    monkeypatch.setattr(jitmx, "attention", lambda *given, **more: attention(*given, **more, early=early))
    with on_stream() as card:
        World(1, 32, seed=1).generate(4)
        assert card.early > 5 and {"attention.decode", "tree.move", "tree.build"} <= set(card.kernels)


def test_attention_that_reads_early_what_the_launch_before_it_writes_is_noticed() -> None:
    q, new, rows = torch.zeros(3, 2, 64).bfloat16(), torch.zeros(3, 1, 64).bfloat16(), torch.ones(3, 3).tril().bool()
    cache, table = [torch.zeros(2, 16, 1, 64).bfloat16() for _ in "kv"], torch.zeros(1, 1, dtype=torch.int32)
    lengths, starts = torch.tensor([9], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)

    def step(*, early: bool) -> None:
        mask = jitmx.pack_mask(rows)
        jitmx.attention(q, new, new, *cache, table, lengths, starts, max_query_len=3, mask=mask, early=early)

    with on_stream() as card:
        step(early=False)
        assert card.early == 1  # the mask's own launch
        torch.zeros(1)  # an ordinary launch, so that the caches are there
        with pytest.raises(SimulationError, match=r"mask of .* before griddepcontrol\.wait"):
            step(early=True)
