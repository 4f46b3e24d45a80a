"""The launches of `jitmx.moe` for many rows: lists by expert, both products, and the sum over a row's experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels.moe import MoeProblem, launch_of
from jitmx.kernels.moe.grouped_arguments import LAYOUT
from jitmx.kernels.routing import MAX_EXPERTS
from jitmx.ops import checks
from jitmx.ops.experts import PackedExperts
from jitmx.ops.routing import group_by_expert
from jitmx.registry.spec import Variant
from jitmx.runtime.launch import Launcher


def check_lists(experts: int, expert_map: torch.Tensor | None) -> None:
    """Raise InputError where the lists cannot be made: they are of at most MAX_EXPERTS ids, no fewer than experts."""
    ids = experts if expert_map is None else expert_map.numel()
    if ids > MAX_EXPERTS:
        raise InputError(
            f"there are {ids} ids of experts; for more than 64 rows moe takes at most {MAX_EXPERTS}: call it with "
            "parts of at most 64 rows"
        )
    if ids < experts:
        raise InputError(
            f"expert_map has {ids} ids for {experts} experts at hand; for more than 64 rows it must have as many: "
            "fill it up with -1"
        )


class GroupedPlan:
    """Everything that does not change from call to call of one shape and pair of weights."""

    def __init__(self, problem: MoeProblem, w13: PackedExperts, w2: PackedExperts, device: int) -> None:
        self._arch, self._multiprocessors = checks.device_arch(device), checks.multiprocessors(device)
        self._device, self._problem = device, problem
        up = self._variant("up", {})
        self.tile = up.knobs.tile_m
        self._up = self._launcher(up, "up")
        # The schedule is of one tile: what else says of the other product yields to it.
        self._down = self._launcher(self._variant("down", {"tile_m": self.tile}), "down")
        self._combine = self._launcher(self._variant("combine", {}), "combine")
        self._keep = w2  # its identity is part of the key under which this plan is kept
        self._weights = tuple((w.words.data_ptr(), w.scales.data_ptr()) for w in (w13, w2))
        pairs = problem.m * problem.top
        self._h = -(-pairs * problem.intermediate * 2 // 256) * 256
        self.scratch = self._h + pairs * problem.hidden * 2

    def _variant(self, product: str, knobs: dict[str, Any]) -> Variant:
        problem = dataclasses.replace(self._problem, product=product)
        return choose("moe", problem, self._arch, multiprocessors=self._multiprocessors, knobs=knobs or None).variant

    def _launcher(self, variant: Variant, product: str) -> Launcher:
        problem = dataclasses.replace(self._problem, product=product)
        geometry = launch_of(variant, problem, self._multiprocessors)
        return Launcher(
            variant, self._device, blocks=geometry.blocks, shared_bytes=geometry.shared_bytes, layout=LAYOUT,
            pdl=variant.knobs.pdl,
        )  # fmt: skip

    def __call__(
        self, stream: int, x: int, ids: torch.Tensor, weights: int, y: int, b13: int, b2: int, alpha: float,
        limit: float, expert_map: torch.Tensor | None, count: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Launch on the CUstream `stream`, torch's current one; addresses on the device, 0 for what the call lacks."""
        problem = self._problem
        rows, top, experts, hidden, inner = (
            problem.m, problem.top, problem.experts, problem.hidden, problem.intermediate,
        )  # fmt: skip
        ids = ids.view(rows, top)
        if count is not None:
            there = torch.arange(rows, device=ids.device)[:, None] < count
            ids = torch.where(there, ids, -1)
        found = group_by_expert(
            ids, experts if expert_map is None else expert_map.numel(), tile=self.tile, expert_map=expert_map,
            local_experts=experts,
        )  # fmt: skip
        assert found.pairs is not None and found.schedule is not None
        # Nothing of it has to be zero or outlives the call: what is freed now is used again behind these launches.
        memory = torch.empty(self.scratch, dtype=torch.uint8, device=ids.device)
        h, parts = memory.data_ptr(), memory.data_ptr() + self._h
        lists = found.pairs.data_ptr(), found.schedule.data_ptr()
        chosen = ids.data_ptr(), 0 if expert_map is None else expert_map.data_ptr()
        sizes = rows, top, experts, 0 if expert_map is None else expert_map.numel()
        tiles = found.schedule.shape[0]
        (w13, scales13), (w2, scales2) = self._weights
        self._up(
            stream, x, w13, scales13, b13, *lists, weights, *chosen, h, alpha, limit, *sizes, 2 * inner, hidden, tiles,
        )  # fmt: skip
        self._down(
            stream, h, w2, scales2, b2, *lists, weights, *chosen, parts, alpha, limit, *sizes, hidden, inner, tiles,
        )  # fmt: skip
        self._combine(
            stream, parts, 0, 0, 0, *lists, weights, *chosen, y, alpha, limit, *sizes, hidden, hidden, tiles,
        )  # fmt: skip
