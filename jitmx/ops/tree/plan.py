"""`jitmx.tree_plan` and `jitmx.tree_build`: trees from parents, and from what a draft has scored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitmx.errors import InputError
from jitmx.kernels.tree.problem import MAX_CANDIDATES, words_of
from jitmx.ops import checks, custom
from jitmx.ops.tree import calls
from jitmx.ops.tree.calls import IDS, INT32


class TreePlan(NamedTuple):
    """What an engine asks of trees.

    Attributes:
        mask: int32 [batch * nodes, 1 or 2], as `jitmx.attention` takes it: bit j of a node's row: node j is the node
            itself or above it. 0 of padding.
        depth: int32 [batch, nodes], nodes above each; -1 of padding.
        positions: int64 [batch, nodes], the root's and the depth; of padding the root's.
        first_child: int32 [batch, nodes], or -1.
        next_sibling: int32 [batch, nodes], the next node with the same parent, or -1.
        paths: int32 [batch, nodes, levels], the first nodes of the way from the root to each node, then -1.
    """

    mask: torch.Tensor
    depth: torch.Tensor
    positions: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor
    paths: torch.Tensor


class Tree(NamedTuple):
    """Trees that were built of candidates.

    Attributes:
        tokens: int64 [batch, nodes], the root's first; -1 of padding.
        parents: int32 [batch, nodes]; -1 of root and padding.
        candidates: int32 [batch, nodes], which candidate each node was; -1 of root and padding.
        plan: the rest.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    candidates: torch.Tensor
    plan: TreePlan


def tree_plan(parents: torch.Tensor, starts: torch.Tensor | None = None, *, levels: int | None = None) -> TreePlan:
    """Masks, depths, positions, links and paths of trees of up to 64 nodes, from their parents, in one launch.

    Node 0 is the root, whatever its parent; others have theirs before them. A node whose parent is not before it (-1,
    say), and all below it, is padding: it attends to nothing in the tree, and is never accepted. Nothing is read back;
    it works under `torch.cuda.graph` and `torch.compile`.

    Args:
        parents: int32 [batch, nodes], contiguous; or [nodes], the same tree for each request.
        starts: int32 or int64 [batch], the position of each root; 0 by default, and one request for [nodes].
        levels: nodes of a path that are written, the root included; by default all.

    Returns:
        `TreePlan`: mask, depths, positions, links and paths, node by node.

    Raises:
        InputError: a device, dtype, shape or number that the kernel cannot take; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/tree/plan.cu.j2; reference: jitmx.kernels.tree.reference.plan.
    """
    if type(parents) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("parents", parents)
        return TreePlan(*torch.ops.jitmx.tree_plan(parents, starts, levels))
    return TreePlan(*run_plan(parents, starts, levels))


def _check_plan(parents: torch.Tensor, starts: torch.Tensor | None, levels: int | None) -> tuple[int, int, int]:
    """Requests, nodes and levels."""
    shared = parents.dim() == 1
    calls.require("parents", parents, INT32, ("nodes",) if shared else ("batch", "nodes"))
    nodes = parents.shape[-1]
    calls.require_starts(starts, "batch" if shared else parents.shape[0], parents)
    batch = (1 if starts is None else starts.shape[0]) if shared else parents.shape[0]
    calls.require_sizes(batch, nodes)
    return batch, nodes, calls.require_levels(levels, nodes)


def run_plan(
    parents: torch.Tensor, starts: torch.Tensor | None = None, levels: int | None = None
) -> tuple[torch.Tensor, ...]:
    """`tree_plan` on plain tensors."""
    checks.require_cuda("parents", parents)
    batch, nodes, levels = _check_plan(parents, starts, levels)
    made = calls.new_plan(parents, batch, nodes, levels)
    if batch:
        stride = 0 if parents.dim() == 1 else nodes
        step = calls.step(
            "plan", batch, parents.device, stride=stride, nodes=nodes, words=words_of(nodes), levels=levels,
            wide=calls.wide(starts),
        )  # fmt: skip
        step.run(parents.data_ptr(), calls.address(starts), *map(calls.address, made))
    return made


def tree_build(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    roots: torch.Tensor,
    *,
    nodes: int,
    starts: torch.Tensor | None = None,
    levels: int | None = None,
) -> Tree:
    """Trees of the best candidates of a draft, as EAGLE-2 and EAGLE-3 choose them, and their plan, in one launch.

    Of each request the nodes - 1 candidates with the highest scores become nodes behind its root, in the order in which
    candidates are given: those of a level behind all of the levels above, so that parents come before children. Equal
    scores go by the order too. With scores that add up logarithms of probabilities along the way, none is above its
    parent's, so that the parents of what is chosen are chosen; a candidate whose parent is not is padding.

    Args:
        scores: float32 [batch, candidates], 4096 at most; -inf and NaN: there is no such candidate.
        tokens: int32 or int64 [batch, candidates].
        parents: int32 [batch, candidates]: the candidate that each continues, or -1: it follows the root.
        roots: int32 or int64 [batch]: the last token of each request that is certain.
        nodes: of each tree, its root included: 2 to 64. Where candidates run out, the last nodes are padding.
        starts: int32 or int64 [batch], the position of each root; 0 by default.
        levels: nodes of a path that are written, the root included; by default all.

    Returns:
        `Tree`: tokens, parents and candidates [batch, nodes], and the plan.

    Raises:
        InputError: a device, dtype, shape or number that the kernel cannot take; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/tree/build.cu.j2; reference: jitmx.kernels.tree.reference.build.
    """
    if type(scores) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("scores", scores)
        made: Any = torch.ops.jitmx.tree_build(scores, tokens, parents, roots, starts, nodes, levels)
    else:
        made = run_build(scores, tokens, parents, roots, starts, nodes, levels)
    built_tokens, built_parents, candidates, *plan = made
    return Tree(built_tokens, built_parents, candidates, TreePlan(*plan))


def _check_build(
    scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor,
    starts: torch.Tensor | None, nodes: int, levels: int | None,
) -> int:  # fmt: skip
    """Levels."""
    calls.require("scores", scores, (torch.float32,), ("batch", "candidates"))
    batch, each = scores.shape
    if not 1 <= each <= MAX_CANDIDATES:
        raise InputError(f"scores have shape {list(scores.shape)}; a request has 1 to {MAX_CANDIDATES} candidates")
    calls.require("tokens", tokens, IDS, (batch, each), scores)
    calls.require("parents", parents, INT32, (batch, each), scores)
    calls.require("roots", roots, IDS, (batch,), scores)
    calls.require_starts(starts, batch, scores)
    if type(nodes) is not int or nodes < 2:
        raise InputError(f"nodes={nodes!r}: a tree has 2 to 64, its root included")
    calls.require_sizes(batch, nodes)
    return calls.require_levels(levels, nodes)


def _new_tree(scores: torch.Tensor, nodes: int, levels: int) -> tuple[torch.Tensor, ...]:
    each = scores.shape[0], nodes
    own = (scores.new_empty(each, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int32))
    return (*own, *calls.new_plan(scores, *each, levels))


def run_build(
    scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor,
    starts: torch.Tensor | None, nodes: int, levels: int | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`tree_build` on plain tensors."""
    checks.require_cuda("scores", scores)
    levels = _check_build(scores, tokens, parents, roots, starts, nodes, levels)
    made = _new_tree(scores, nodes, levels)
    if len(scores):
        step = calls.step(
            "build", len(scores), scores.device, candidates_each=scores.shape[1], nodes=nodes, words=words_of(nodes),
            levels=levels, wide=calls.wide(roots, tokens, starts),
        )  # fmt: skip
        given = scores.data_ptr(), tokens.data_ptr(), parents.data_ptr(), roots.data_ptr(), calls.address(starts)
        step.run(*given, *map(calls.address, made))
    return made


def _run_plan(parents: torch.Tensor, starts: torch.Tensor | None, levels: int | None) -> tuple[torch.Tensor, ...]:
    return run_plan(custom.plain(parents), custom.plain(starts), levels)


def _fake_plan(parents: torch.Tensor, starts: torch.Tensor | None, levels: int | None) -> tuple[torch.Tensor, ...]:
    return calls.new_plan(parents, *_check_plan(parents, starts, levels))


def _run_build(
    scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor,
    starts: torch.Tensor | None, nodes: int, levels: int | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    scores, tokens, parents, roots, starts = map(custom.plain, (scores, tokens, parents, roots, starts))
    return run_build(scores, tokens, parents, roots, starts, nodes, levels)


def _fake_build(
    scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor,
    starts: torch.Tensor | None, nodes: int, levels: int | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return _new_tree(scores, nodes, _check_build(scores, tokens, parents, roots, starts, nodes, levels))


_SIX = ", ".join(["Tensor"] * 6)
custom.define(f"tree_plan(Tensor parents, Tensor? starts, int? levels) -> ({_SIX})", _run_plan, _fake_plan)
custom.define(
    "tree_build(Tensor scores, Tensor tokens, Tensor parents, Tensor roots, Tensor? starts, int nodes, int? levels) -> "
    f"(Tensor, Tensor, Tensor, {_SIX})",
    _run_build,
    _fake_build,
)
