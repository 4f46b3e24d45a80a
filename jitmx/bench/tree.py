"""What `jitmx bench tree` measures: what lies between a draft and its target, for 1 to 64 requests.

Calls follow one another in a CUDA graph. torch's equivalents take precomputed paths, as engines do that verify with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jitmx.bench import peers, timing
from jitmx.bench.benchmark import Asked, Ceilings, Table, peer_cells, peer_headers, peer_notes
from jitmx.errors import DriverError
from jitmx.kernels.tree.build import beams
from jitmx.kernels.tree.problem import random_parents
from jitmx.models import NAMED
from jitmx.ops import tree

BATCHES = (1, 16, 64)
DRAFTS, NODES, LEVELS = 3, 64, 8
_CALLS = 64
_PAGE = 16

PEERS = ("torch",)


@dataclass(frozen=True)
class Call:
    """One operator on inputs of one size.

    Attributes:
        name: the operator.
        run: calls it.
        torch: calls torch's equivalent, where it has one.
        moved: bytes that it reads and writes.
    """

    name: str
    run: Callable[[], Any]
    torch: Callable[[], Any] | None
    moved: int


def torch_accept(drafts: torch.Tensor, target: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`jitmx.accept_greedy` in torch."""
    accepted = (drafts == target[:, :-1]).long().cumprod(1).sum(1)
    places = torch.arange(target.shape[1], device=target.device)
    tokens = torch.where(places <= accepted[:, None], target, -1)
    return tokens, accepted.int(), target.gather(1, accepted[:, None])[:, 0], positions + accepted + 1


def torch_verify(
    tokens: torch.Tensor, target: torch.Tensor, parents: torch.Tensor, paths: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`jitmx.tree_verify` in torch, given the paths of a plan."""
    fits = tokens == target.gather(1, parents.clamp(min=0).long())
    fits[:, 0] = True
    batch, nodes, _ = paths.shape
    there, at = paths >= 0, paths.clamp(min=0).long()
    taken = (fits.gather(1, at.flatten(1)).view(paths.shape) | ~there).all(-1)
    depth = torch.where(taken, there.sum(-1), 0)
    order = torch.arange(nodes, 0, -1, device=tokens.device)
    best = (depth * (nodes + 1) + order).argmax(1)
    rows = torch.arange(batch, device=tokens.device)
    path, accepted = paths[rows, best], depth[rows, best] - 1
    following = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)
    own = torch.where(following >= 0, tokens.gather(1, following.clamp(min=0).long()), -1)
    last = path.gather(1, accepted[:, None]).long()
    behind = target.gather(1, last)
    out = own.scatter(1, accepted[:, None], behind)
    return path, accepted.int(), out, behind[:, 0], starts + accepted + 1


def torch_mask(mask: torch.Tensor) -> torch.Tensor:
    """`jitmx.pack_mask` in torch, of 64 nodes."""
    bits = torch.arange(32, device=mask.device, dtype=torch.int64)
    words = (mask.view(-1, 2, 32).long() << bits).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def calls(batch: int, model: str, generator: np.random.Generator) -> list[Call]:
    """The operators on inputs of so many requests."""

    def on_card(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to("cuda", dtype)

    target = on_card(generator.integers(0, 2, (batch, DRAFTS + 1)), torch.int64)
    drafts = on_card(generator.integers(0, 2, (batch, DRAFTS)), torch.int64)
    starts = on_card(generator.integers(0, 1000, batch), torch.int64)
    kinds = [random_parents(NODES, generator, "bushy") for _ in range(batch)]
    parents = on_card(np.stack(kinds), torch.int32)
    plan = tree.tree_plan(parents, starts, levels=LEVELS)
    tokens = on_card(generator.integers(0, 2, (batch, NODES)), torch.int64)
    says = on_card(generator.integers(0, 2, (batch, NODES)), torch.int64)
    scores, above = beams(batch, 8, 8, generator)
    drawn = on_card(scores, torch.float32), on_card(np.zeros(scores.shape), torch.int64), on_card(above, torch.int32)
    mask = on_card(generator.random((batch, NODES, NODES)) < 0.3, torch.bool)
    size = NAMED[model]
    pages = 1 + (1000 + NODES) // _PAGE
    caches = [
        torch.zeros(batch * pages, _PAGE, size.kv_heads, size.head_dim, dtype=torch.bfloat16, device="cuda")
        for _ in range(2 * min(size.layers, 16))
    ]
    table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages)
    path = on_card(np.tile([0, 2, 8, 26], (batch, 1)), torch.int32)
    accepted = torch.full((batch,), 3, dtype=torch.int32, device="cuda")
    row = size.kv_heads * size.head_dim * 2
    return [
        Call(
            "accept_greedy", lambda: tree.accept_greedy(drafts, target, positions=starts),
            lambda: torch_accept(drafts, target, starts), 2 * target.nbytes + drafts.nbytes + batch * 28,
        ),
        Call(
            "tree_verify", lambda: tree.tree_verify(tokens, says, parents, starts=starts, levels=LEVELS),
            lambda: torch_verify(tokens, says, parents, plan.paths, starts), 3 * tokens.nbytes + batch * 128,
        ),
        Call("pack_mask", lambda: tree.pack_mask(mask), lambda: torch_mask(mask), mask.nbytes * 9 // 8),
        Call(
            "tree_plan", lambda: tree.tree_plan(parents, starts, levels=LEVELS), None,
            parents.nbytes + sum(one.nbytes for one in plan),
        ),
        Call(
            "tree_build",
            lambda: tree.tree_build(*drawn, starts, nodes=NODES, starts=starts, levels=LEVELS), None,
            drawn[0].nbytes + sum(one.nbytes for one in plan),
        ),
        Call(
            f"move_kv of {len(caches)} caches", lambda: tree.move_kv(caches, path, accepted, starts, table), None,
            2 * 3 * row * len(caches) * batch,
        ),
    ]  # fmt: skip


def check(call: Call) -> None:
    """What the operator gives is what torch's equivalent gives.

    Raises:
        DriverError: it is not.
    """
    if call.torch is None:
        return
    found, wanted = call.run(), call.torch()
    pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else list(zip(found, wanted, strict=True))
    if not all(torch.equal(one, right.to(one.dtype)) for one, right in pairs):
        raise DriverError(f"{call.name} gives something else than torch")


def seconds(run: Callable[[], Any], repeats: int = 21) -> float:
    """Median seconds a call."""

    def many() -> None:
        for _ in range(_CALLS):
            run()

    return timing.replayed(many, repeats) / _CALLS


def _beside(call: Call) -> dict[str, Any]:
    if call.torch is None:
        return {"us": None, "reason": f"{call.name} has no equivalent of few operators"}
    return peers.timed(lambda: seconds(call.torch))  # type: ignore[arg-type]


def bench(asked: Asked) -> dict[str, Any]:
    """Rows of `operator, batch, us, bytes` and times of torch.

    Raises:
        DriverError: what an operator gives is wrong.
    """
    generator = np.random.default_rng(asked.seed)
    rows = []
    for batch in BATCHES:
        for call in calls(batch, asked.model, generator):
            check(call)
            others = {name: _beside(call) for name in asked.peers}
            us = seconds(call.run) * 1e6
            rows.append({"operator": call.name, "batch": batch, "us": us, "bytes": call.moved, "peers": others})
    return {"model": asked.model, "nodes": NODES, "drafts": DRAFTS, "rows": rows}


def tables(payload: dict[str, Any], limits: Ceilings) -> list[Table]:
    """Time of each operator and batch."""
    rows = payload["rows"]
    shown = [(row["operator"], row["batch"], f"{row['us']:.2f}", row["bytes"], *peer_cells(row)) for row in rows]
    headers = ("OPERATOR", "BATCH", "US", "BYTES", *peer_headers(rows))
    title = f"trees of {payload['nodes']} nodes, chains of {payload['drafts']}"
    return [Table(headers, shown, headers[1:], title, peer_notes(rows))]
