"""Trees of drafts drawn at random, and what engines make of them, node by node in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

Tensors = dict[str, torch.Tensor]


def drawn(batch: int, nodes: int, seed: int, *, padded: bool = False) -> torch.Tensor:
    """Parents int32 [batch, nodes], each before its node, some -1."""
    draw = torch.Generator().manual_seed(seed)
    parents = (torch.rand(batch, nodes, generator=draw) * torch.arange(nodes)).int()
    parents[:, 0] = -1
    if padded:
        parents[torch.rand(batch, nodes, generator=draw) < 0.2] = -1
    return parents


def ways(parents: Sequence[int]) -> list[list[int]]:
    """Of each node the way from the root to it, walked up from it; empty where it does not lead there."""
    found = []
    for node in range(len(parents)):
        way = [node]
        while way[0] > 0:
            way.insert(0, parents[way[0]])
        found.append(way if way[0] == 0 else [])
    return found


def planned(parents: torch.Tensor, starts: Sequence[int], levels: int) -> Tensors:
    """Masks as booleans, depths, positions, links and paths."""
    batch, nodes = parents.shape
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    depth, positions = (torch.zeros(batch, nodes, dtype=torch.int64) for _ in range(2))
    first, later = (torch.full((batch, nodes), -1) for _ in range(2))
    paths = torch.full((batch, nodes, levels), -1)
    for r, own in enumerate(parents.tolist()):
        found = ways(own)
        for i, way in enumerate(found):
            mask[r, i, way] = True
            depth[r, i] = len(way) - 1
            positions[r, i] = starts[r] + max(len(way) - 1, 0)
            paths[r, i, : len(way[:levels])] = torch.tensor(way[:levels], dtype=torch.int64)
            children = [j for j in range(nodes) if found[j][-2:-1] == [i]]
            first[r, i] = children[0] if children else -1
            for one, other in itertools.pairwise(children):
                later[r, one] = other
    names = ("mask", "depth", "positions", "first_child", "next_sibling", "paths")
    return dict(zip(names, (mask, depth, positions, first, later, paths), strict=True))


def bits(mask: torch.Tensor) -> torch.Tensor:
    """Rows of a mask [..., n] as words, int32 [rows, 1 or 2]."""
    rows = mask.reshape(-1, mask.shape[-1]).tolist()
    words = 1 if mask.shape[-1] <= 32 else 2
    packed = [
        [sum(set_ << j for j, set_ in enumerate(row[32 * w : 32 * w + 32])) for w in range(words)] for row in rows
    ]
    return (
        torch.tensor(packed, dtype=torch.int64).view(torch.int32)[:, ::2].contiguous()
        if rows
        else torch.empty(0, words)
    )


def verified(
    tokens: torch.Tensor, target: torch.Tensor, parents: torch.Tensor, starts: Sequence[int], levels: int,
    likely: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Path, accepted, tokens, next token and next position: every path is tried."""
    found: list[list[list[int] | int]] = [[], [], [], [], []]
    for r, own in enumerate(parents.tolist()):
        best = [0]
        for way in ways(own):
            fits = [
                int(tokens[r, i]) >= 0
                and (int(tokens[r, i]) == int(target[r, own[i]]) or (likely is not None and bool(likely[r, i])))
                for i in way[1:]
            ]
            if all(fits) and len(best) < len(way) <= levels:
                best = way
        behind = [int(tokens[r, i]) for i in best[1:]] + [int(target[r, best[-1]])]
        fill = [-1] * (levels - len(best))
        values = best + fill, len(best) - 1, behind + fill, behind[-1], starts[r] + len(best)
        for column, value in zip(found, values, strict=True):
            column.append(value)
    return [torch.tensor(column) for column in found]


def accepted(drafts: Sequence[Sequence[int]], target: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Tokens of each request, as a rejection sampler of a greedy batch stores them: draft by draft."""
    found = []
    for own, says in zip(drafts, target, strict=True):
        out: list[int] = []
        for draft, right in zip(own, says, strict=False):
            out.append(right)
            if draft != right or draft < 0:
                break
        else:
            out += says[len(own) :][:1]
        found.append(out + [-1] * (most + 1 - len(out)))
    return found
