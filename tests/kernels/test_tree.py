"""`tree`: references agree with other ways to say the same, and variants keep their contracts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keep_contracts
from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose, default_variants
from jitmx.errors import KnobError
from jitmx.kernels.tree import reference
from jitmx.kernels.tree.build import beams
from jitmx.kernels.tree.problem import STEPS, TreeProblem
from strategies import ARCHES, examples

FAMILY = kernels.family("tree")

# Parents that may be wrong: not before the node, or none.
ANY_PARENTS = st.lists(st.integers(-2, 66), min_size=1, max_size=64)


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of a tree without padding."""
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 64))))]


def up(parents: list[int], node: int) -> list[int] | None:
    """The way from the root to a node, walked from the node; None where it does not lead there."""
    way = [node]
    while way[0]:
        above = parents[way[0]]
        if not 0 <= above < way[0]:
            return None
        way.insert(0, above)
    return way


@settings(max_examples=examples(200))
@given(parents=ANY_PARENTS)
def test_a_plan_is_what_walking_up_from_each_node_finds(parents: list[int]) -> None:
    plan = reference.plan(parents)
    ways = [up(parents, node) for node in range(len(parents))]
    assert plan.paths == [way or [] for way in ways]
    for node, way in enumerate(ways):
        children = [i for i, other in enumerate(ways) if other and len(other) > 1 and other[-2] == node]
        assert plan.first_child[node] == (children[0] if children else -1)
        siblings = [i for i, other in enumerate(ways) if way and other and node and other[:-1] == way[:-1]]
        later = [i for i in siblings if i > node]
        assert plan.next_sibling[node] == (later[0] if later else -1)


@settings(max_examples=examples(200))
@given(parents=trees(), data=st.data())
def test_a_greedy_path_is_what_a_walk_from_the_root_takes(parents: list[int], data: st.DataObject) -> None:
    """As engines walk: of each node's children the one with the target's token; siblings have tokens of their own."""
    plan = reference.plan(parents)
    number = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    target = data.draw(st.lists(st.integers(0, 2), min_size=len(parents), max_size=len(parents)))
    walked, child = [0], plan.first_child[0]
    while child >= 0:
        if number[child] == target[walked[-1]]:
            walked.append(child)
            child = plan.first_child[child]
        else:
            child = plan.next_sibling[child]
    assert reference.verify(number, target, parents, 64) == walked
    assert reference.verify(number, target, parents, 2) == walked[:2]


@given(parents=trees(), data=st.data())
def test_by_thresholds_no_longer_path_is_likely_throughout(parents: list[int], data: st.DataObject) -> None:
    likely = data.draw(st.lists(st.booleans(), min_size=len(parents), max_size=len(parents)))
    found = reference.verify([1] * len(parents), [0] * len(parents), parents, 64, likely)
    paths = [path for path in reference.plan(parents).paths if all(likely[node] for node in path[1:])]
    assert found == min(paths, key=lambda path: (-len(path), path[-1]))


def test_the_limit_of_typical_acceptance_is_the_lesser_of_two() -> None:
    assert reference.limit(0.3, 0.5, None) == 0.3 and reference.limit(0.3, 0.5, 0.0) == 0.3
    assert reference.limit(0.3, 0.5, math.log(5)) == pytest.approx(0.1)


@pytest.mark.parametrize(("width", "depth", "nodes"), [*itertools.product((1, 4, 8), (1, 3, 6), (2, 12, 64))])
def test_a_tree_has_the_best_candidates_and_all_that_they_continue(width: int, depth: int, nodes: int) -> None:
    (scores,), (parents,) = beams(1, width, depth, np.random.default_rng(width))
    candidates, above = reference.build(scores.tolist(), parents.tolist(), nodes)
    chosen = [one for one in candidates if one >= 0]
    assert len(chosen) == min(nodes - 1, len(scores)) and chosen == sorted(chosen)
    left = np.delete(scores, chosen)
    assert not left.size or scores[chosen].min() >= left.max()
    for node, candidate in enumerate(candidates):
        if candidate >= 0:  # what it continues is in the tree, and before it
            assert above[node] < node
            assert candidates[above[node]] == (parents[candidate] if parents[candidate] >= 0 else -1)


@given(st.lists(st.integers(-1, 1), max_size=6), st.lists(st.integers(0, 1), min_size=7, max_size=7))
def test_what_comes_of_a_chain_is_its_common_prefix_with_the_target_and_one_more(
    drafts: list[int], target: list[int]
) -> None:
    found = reference.accept(drafts, target[: len(drafts) + 1])
    common = [i for i in range(len(drafts) + 1) if drafts[:i] == target[:i]][-1]
    assert found == target[: common + 1]


@pytest.mark.parametrize("target", ARCHES, ids=str)
def test_each_step_is_a_kernel_of_its_own_and_one_variant_takes_all_sizes(target: Arch) -> None:
    for step in STEPS:
        found = {choose("tree", TreeProblem(step, batch), target).variant for batch in (1, 7, 1 << 20)}
        assert len(found) == 1 and found.pop().spec.name == step
    assert len(default_variants("tree", target)) == len(STEPS)
    with pytest.raises(KnobError, match=r"tree\.pack does not make step=plan; use kernel=plan"):
        FAMILY.fixed(TreeProblem("plan"), "pack")


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
def test_every_kernel_keeps_its_contract(target: str) -> None:
    keep_contracts(default_variants("tree", arch.parse(target)))
