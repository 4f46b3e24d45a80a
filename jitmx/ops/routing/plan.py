"""Launches of `routing`, planned once for each kind of call, and the tensors that they write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from jitmx.dispatch.choose import choose
from jitmx.kernels import routing
from jitmx.kernels.routing.problem import RoutingProblem, capacity, parts
from jitmx.runtime import card, plan
from jitmx.runtime.plan import Step


class Routing(NamedTuple):
    """What `route` and `group_by_expert` return.

    With E the number of local experts and `tile` rows a tile; the lists are None where no tile was asked for.

    Attributes:
        ids: int32 [m, k], experts of each token, the largest logit first.
        weights: float32 [m, k]; None from `group_by_expert`.
        pairs: int32 [m * k], token * k + slot by local expert, in the order of the tokens; -1 past offsets[E].
        offsets: int32 [E + 1], where each local expert's pairs start.
        schedule: int32 [capacity, 4], tiles of at most `tile` rows: local expert, first row, rows, number of the tile
            within its expert; rows past the last tile have expert -1.
        tiles: int32 [1], how many tiles there are.
        normalized: RMSNorm of the hidden states [m, h], where it was asked for.
    """

    ids: torch.Tensor
    weights: torch.Tensor | None
    pairs: torch.Tensor | None
    offsets: torch.Tensor | None
    schedule: torch.Tensor | None
    tiles: torch.Tensor | None
    normalized: torch.Tensor | None = None


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Call:
    """What decides the launches of a call."""

    problem: RoutingProblem
    local: int
    device: int
    knobs: tuple[tuple[str, Any], ...] = ()


# What calls differ in: what is read, what is written.
READ = "x", "weight", "bias", "norm", "map"
TAKES = (*READ, "ids", "weights", "pairs", "offsets", "schedule", "tiles", "normalized", "epsilon")


class Plan(plan.Plan):
    """Launches and outputs of one kind of call."""

    def __init__(self, call: Call) -> None:
        problem = call.problem
        self.m, self.k, self.h, self.tile = problem.m, problem.k, problem.h, problem.tile
        self.device, self.place = call.device, card.place(call.device)
        self.capacity = capacity(self.m, self.k, call.local, self.tile) if self.tile else 0
        for part in parts(problem):
            own = None if self.steps else dict(call.knobs) or None
            self.steps = (*self.steps, self._step(part, call, own))
        pairs, given = self.m * self.k, problem.source == "ids"
        chosen = [] if given else [pairs, pairs]
        lists = [pairs, call.local + 1, 1, 4 * self.capacity] if self.tile else []
        self._normalized = _DTYPES[problem.dtype] if problem.normalized else None
        hidden = [self.m * self.h // 2] if problem.normalized else []
        # Every output starts on 16 bytes.
        self.sizes = [size for wanted in chosen + hidden + lists for size in (wanted, -wanted % 4)]
        self.words = sum(self.sizes)
        given_ids = torch.empty(self.m, self.k, dtype=torch.int32, device="meta") if given else None
        self.wanted = self.outputs(given_ids, torch.device("meta"))

    def outputs(self, ids: torch.Tensor | None, device: torch.device) -> Routing:
        """Views of one new allocation."""
        views = torch.empty(self.words, dtype=torch.int32, device=device).split_with_sizes(self.sizes)[::2]
        weights = None
        if ids is None:
            ids, weights = views[0].view(self.m, self.k), views[1].view(torch.float32).view(self.m, self.k)
            views = views[2:]
        normalized = None
        if self._normalized is not None:
            normalized, views = views[0].view(self._normalized).view(self.m, self.h), views[1:]
        if not self.tile:
            return Routing(ids, weights, None, None, None, None, normalized)
        pairs, offsets, tiles, schedule = views
        return Routing(ids, weights, pairs, offsets, schedule.view(self.capacity, 4), tiles, normalized)

    def _step(self, problem: RoutingProblem, call: Call, knobs: Mapping[str, Any] | None) -> Step:
        arch, multiprocessors = card.arch(call.device), card.multiprocessors(call.device)
        variant = choose("routing", problem, arch, multiprocessors=multiprocessors, knobs=knobs).variant
        geometry = routing.launch(variant, problem.m, call.local)
        fixed = {"local": call.local, "capacity": self.capacity, "m": self.m, "h": self.h}
        return Step(variant, call.device, geometry, fixed, TAKES)
