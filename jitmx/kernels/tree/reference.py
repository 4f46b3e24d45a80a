"""Trees of drafts in plain Python: what the kernels are to make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Plan:
    """A tree by its nodes; -1 where there is none."""

    paths: list[list[int]] = field(default_factory=list)
    first_child: list[int] = field(default_factory=list)
    next_sibling: list[int] = field(default_factory=list)

    @property
    def depth(self) -> list[int]:
        """Nodes above each; -1 of padding."""
        return [len(path) - 1 for path in self.paths]


def plan(parents: Sequence[int]) -> Plan:
    """The tree of these parents. Node 0 is the root; one whose parent is not before it, or is padding, is padding."""
    made = Plan()
    kin: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        above = made.paths[parent] if 0 <= parent < node else []
        made.paths.append([*above, node] if above or node == 0 else [])
        if above and node:
            kin.setdefault(parent, []).append(node)
    made.first_child = [kin.get(node, [-1])[0] for node in range(len(parents))]
    made.next_sibling = [-1] * len(parents)
    for siblings in kin.values():
        for one, after in itertools.pairwise(siblings):
            made.next_sibling[one] = after
    return made


def verify(
    tokens: Sequence[int], target: Sequence[int], parents: Sequence[int], most: int,
    likely: Sequence[bool] | None = None,
) -> list[int]:  # fmt: skip
    """The nodes that are accepted, from the root on: the longest path of nodes that fit, of equals the one that ends
    first.

    Args:
        most: nodes of a path at most.
        likely: of each node, whether it fits although the target says another token.
    """

    def fits(node: int) -> bool:
        if tokens[node] < 0:
            return False
        return tokens[node] == target[parents[node]] or bool(likely is not None and likely[node])

    found = [0]
    for path in plan(parents).paths:
        if len(found) < len(path) <= most and all(fits(node) for node in path[1:]):
            found = path
    return found


def limit(threshold: float, alpha: float, entropy: float | None) -> float:
    """The probability from which a token is likely enough."""
    return threshold if entropy is None else min(threshold, alpha * math.exp(-entropy))


def build(scores: Sequence[float], parents: Sequence[int], nodes: int) -> tuple[list[int], list[int]]:
    """Candidates of the nodes behind the root, and parents of all nodes.

    Returns:
        Candidates of nodes 0 ... nodes - 1, -1 of the root and of padding; their parents, of padding as they are said.
    """
    there = [i for i, score in enumerate(scores) if score > -math.inf]
    best = sorted(sorted(there, key=lambda i: (-scores[i], i))[: nodes - 1])
    node = {candidate: 1 + place for place, candidate in enumerate(best)}
    above = [-1] + [0 if parents[i] < 0 else node.get(parents[i], -1) for i in best]
    missing = [-1] * (nodes - len(above))
    return [-1, *best, *missing], above + missing


def accept(drafts: Sequence[int], target: Sequence[int]) -> list[int]:
    """Tokens that come out of a chain of drafts: those accepted, and what the target says behind them."""
    taken = 0
    while taken < len(drafts) and drafts[taken] >= 0 and drafts[taken] == target[taken]:
        taken += 1
    return [int(token) for token in target[: taken + 1]]


def filled(values: Sequence[int], length: int, dtype: type = np.int64) -> np.ndarray:
    """Values as an array of this length, -1 behind them."""
    return np.array([*values[:length], *[-1] * (length - len(values))], dtype)
