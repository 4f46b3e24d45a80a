"""`tree.plan`: masks, depths, positions, links and paths of trees, from the parents of their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jitmx.kernels.tree import reference
from jitmx.kernels.tree.problem import (
    KINDS,
    PLAN_FIELDS,
    SIZES,
    STARTS,
    Array,
    exact,
    ids,
    random_parents,
    spec,
    words,
    words_of,
)
from jitmx.registry.arguments import Arguments, number, reads
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

PLAN = spec(
    "plan",
    Arguments(
        "PlanArguments",
        reads("parents", "[batch, nodes], or [nodes] of all", "int"),
        STARTS,
        *PLAN_FIELDS,
        number("stride", "unsigned int", "parents from a request to the next"),
        *SIZES,
        number("wide", "unsigned int", "1: starts are of 64 bits"),
    ),
    threads=32,
    require=(r"\bVOTE",),
)


def planned(trees: Sequence[reference.Plan], starts: Sequence[int], levels: int) -> dict[str, Array]:
    """What the kernel writes of trees of as many nodes, by field."""
    nodes = len(trees[0].paths)
    depth = np.array([tree.depth for tree in trees], np.int32)
    return {
        "mask": np.array([words(tree.paths, words_of(nodes)) for tree in trees]),
        "depth": depth,
        "positions": np.array(starts, np.int64)[:, None] + np.maximum(depth, 0),
        "first_child": np.array([tree.first_child for tree in trees], np.int32),
        "next_sibling": np.array([tree.next_sibling for tree in trees], np.int32),
        "paths": np.array([[reference.filled(path, levels, np.int32) for path in tree.paths] for tree in trees]),
    }


def sides(trees: Sequence[reference.Plan]) -> dict[str, bool]:
    """Edges that trees stand on."""
    paths = [path for tree in trees for path in tree.paths]
    return {
        "padding": not all(paths),
        "a path through both words": any(path[0] < 32 <= path[-1] for path in paths if path),
        "a path of all nodes": any(len(path) == len(tree.paths) > 1 for tree in trees for path in tree.paths),
        "a sibling in the other word": any(
            node < 32 <= after for tree in trees for node, after in enumerate(tree.next_sibling)
        ),
    }


def _case(nodes: int, levels: int, seed: int, *, shared: bool = False, wide: bool | None = None) -> Case:
    """Trees of every kind; of one alone where all requests share it."""
    generator = np.random.default_rng(seed)
    kinds = ("random",) if shared else KINDS
    parents = np.stack([random_parents(nodes, generator, kind) for kind in kinds])
    batch = 3 if shared else len(kinds)
    starts = generator.integers(0, 1 << (40 if wide else 20), batch)
    trees = [reference.plan(parents[request % len(parents)].tolist()) for request in range(batch)]
    given = [0] * batch if wide is None else starts.tolist()
    outputs, check = exact(planned(trees, given, levels))
    values: dict[str, Any] = {
        "parents": Buffer(parents), **outputs, "nodes": nodes, "words": words_of(nodes), "levels": levels,
        "stride": 0 if shared else nodes, "wide": int(bool(wide)),
    }  # fmt: skip
    if wide is not None:
        values["starts"] = Buffer(ids(starts, wide))
    return Case(
        name=f"{batch} trees of {nodes}, paths of {levels}",
        launch=Launch(batch),
        values=values,
        check=check,
        gate=0.0,
        sides=sides(trees),
        fixed=("stride", "nodes", "words", "levels", "wide"),
    )


def cases(variant: Variant) -> Iterator[Case]:
    """Trees of few and many nodes, and the last of very many."""
    for seed, (nodes, levels, wide) in enumerate(
        ((1, 1, False), (7, 3, True), (32, 32, None), (33, 6, False), (64, 64, True))
    ):
        yield _case(nodes, levels, seed, wide=wide)
    yield _case(20, 5, 9, shared=True, wide=False)
    yield _far()


def _far() -> Case:
    """The last of 2^20 requests: what is written of earlier ones is over 2^32 bytes of paths."""
    batch, nodes = 1 << 20, 64
    parents = random_parents(nodes, np.random.default_rng(5))
    outputs, check = exact(planned([reference.plan(parents.tolist())], [77], nodes))
    values: dict[str, Any] = {"parents": Buffer(parents[None]), "starts": Buffer(np.array([77], np.int32)), **outputs}
    for name, item in values.items():
        before = (batch - 1) * item.data.nbytes
        values[name] = item.spread([before], before + item.data.nbytes)
    values |= {"nodes": nodes, "words": 2, "levels": nodes, "stride": nodes}
    return Case(
        name=f"the last of {batch} trees", launch=Launch(batch), values=values, check=check, gate=0.0,
        blocks=(batch - 1,), fixed=("stride", "nodes", "words", "levels", "wide"),
    )  # fmt: skip
