"""The launches of `jitmx.moe` by expert: lists, both products, and the sum over a row's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jitmx.dispatch.choose import Choice
from jitmx.errors import InputError, KnobError
from jitmx.kernels.moe import MoeProblem, launch_of
from jitmx.kernels.moe.grouped_arguments import LAYOUT
from jitmx.kernels.moe.hidden import hidden_bytes
from jitmx.kernels.moe.problem import MAX_ROWS
from jitmx.kernels.routing import MAX_EXPERTS
from jitmx.ops.routing_calls import run_group
from jitmx.ops.routing_plan import Routing
from jitmx.registry.spec import Variant
from jitmx.runtime.launch import Launcher

if TYPE_CHECKING:
    from jitmx.ops.moe_plan import Call


def check_lists(experts: int, expert_map: torch.Tensor | None) -> None:
    """Raise InputError where the lists cannot be made: they are of at most MAX_EXPERTS ids, no fewer than experts."""
    ids = experts if expert_map is None else expert_map.numel()
    if ids > MAX_EXPERTS:
        raise InputError(
            f"there are {ids} ids of experts; for more than {MAX_ROWS} rows, and for what one launch does not make, "
            f"moe takes at most {MAX_EXPERTS}: call it with parts of at most {MAX_ROWS} rows, or plainly"
        )
    if ids < experts:
        raise InputError(
            f"expert_map has {ids} ids for {experts} experts at hand; for more than {MAX_ROWS} rows it must have as "
            "many: fill it up with -1"
        )


class GroupedPlan:
    """Both products and the sum, where the second does not add to y itself, over lists of one tile.

    Attributes:
        tile: rows of a tile of the lists.
        adds: whether y has to be zero before.
    """

    def __init__(self, problem: MoeProblem, choices: tuple[Choice, ...], device: int) -> None:
        self._problem = problem
        up, down = (choice.variant.knobs for choice in choices[:2])
        if up.tile_m != down.tile_m:
            raise KnobError(
                f"tile_m={up.tile_m} of the first product and tile_m={down.tile_m} of the second: both read one "
                f"schedule; give the second tile_m={up.tile_m}"
            )
        self.tile: int = up.tile_m
        self._launchers = tuple(self._launcher(choice, device) for choice in choices)
        self.adds = problem.reduction == "atomic"
        self._h = -(-hidden_bytes(problem) // 256) * 256
        self.scratch = self._h + (0 if self.adds else problem.m * problem.top * problem.hidden * 2)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What it launches, the lists aside."""
        return tuple(launcher.variant for launcher in self._launchers)

    @staticmethod
    def _launcher(choice: Choice, device: int) -> Launcher:
        variant = choice.variant
        assert isinstance(choice.problem, MoeProblem)
        geometry = launch_of(variant, choice.problem, choice.multiprocessors)
        return Launcher(
            variant, device, blocks=geometry.blocks, shared_bytes=geometry.shared_bytes, layout=LAYOUT,
            pdl=variant.knobs.pdl, cluster=geometry.cluster,
        )  # fmt: skip

    def lists(self, ids: torch.Tensor, expert_map: torch.Tensor | None, count: torch.Tensor | None) -> Routing:
        """The lists that the products read, of ids [rows, top]."""
        if count is not None:
            there = torch.arange(self._problem.m, device=ids.device)[:, None] < count
            ids = torch.where(there, ids, -1)
        experts = self._problem.experts
        total = experts if expert_map is None else expert_map.numel()
        return run_group(ids, total, self.tile, expert_map, experts)

    def __call__(self, stream: int, call: Call, found: Routing) -> None:
        """Launch on the CUstream `stream`, torch's current one; `found` has weights, and lists of this tile."""
        assert found.weights is not None and found.pairs is not None and found.schedule is not None
        problem = self._problem
        hidden = problem.hidden
        # Nothing of it has to be zero or outlives the call: what is freed now is used again behind these launches.
        memory = torch.empty(self.scratch, dtype=torch.uint8, device=found.ids.device)
        h, parts = memory.data_ptr(), memory.data_ptr() + self._h
        w13, scales13, w2, scales2 = call.weights
        lists = found.pairs.data_ptr(), found.schedule.data_ptr()
        chosen = found.weights.data_ptr(), found.ids.data_ptr(), call.expert_map
        sizes = problem.m, problem.top, problem.experts, call.map_size
        tiles = found.schedule.shape[0]
        each = (
            ((call.x, w13, scales13, call.b13), h, problem.sizes("up")),
            ((h, w2, scales2, call.b2), call.y if self.adds else parts, problem.sizes("down")),
            ((parts, 0, 0, 0), call.y, (hidden, hidden)),
        )
        for launcher, (read, written, shape) in zip(self._launchers, each, strict=False):
            launcher(stream, *read, *lists, *chosen, written, call.alpha, call.limit, *sizes, *shape, tiles)
