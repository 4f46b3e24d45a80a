"""The launches of `jitmx.moe` by expert: lists, both products, and the sum over a row's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from jitmx.dispatch.choice import Choice
from jitmx.errors import InputError, KnobError
from jitmx.kernels.moe import FAMILY, MoeProblem, grouped_arguments, wgmma_arguments
from jitmx.kernels.moe.hidden import hidden_bytes
from jitmx.kernels.moe.problem import MAX_ROWS, PRODUCTS
from jitmx.kernels.moe.wgmma_arguments import COUNTERS, rows_bytes
from jitmx.kernels.routing.problem import MAX_EXPERTS
from jitmx.ops.routing_calls import run_group
from jitmx.ops.routing_plan import Routing
from jitmx.registry.spec import Variant
from jitmx.runtime.launch import Launcher

if TYPE_CHECKING:
    from jitmx.ops.moe_plan import Call

ORDER = PRODUCTS[1:]  # of the launches of a layer
MOST_BYTES = 1 << 32  # of x: rows are found by offsets of 32 bits


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

    Args:
        choices: by product, the launches of a layer ("gather" where the first product reads gathered rows).

    Attributes:
        tile: rows of a tile of the lists.
        adds: whether y has to be zero before, or the residual.
    """

    def __init__(self, problem: MoeProblem, choices: Mapping[str, Choice], device: int) -> None:
        self._problem = problem
        row = problem.hidden * 2
        if problem.m * row > MOST_BYTES:
            raise InputError(
                f"x has {problem.m} rows of {problem.hidden}, over {MOST_BYTES >> 30} GiB; call moe with parts of at "
                f"most {MOST_BYTES // row} rows"
            )
        up, down = (choices[product].variant for product in ("up", "down"))
        if up.knobs.tile_m != down.knobs.tile_m:
            raise KnobError(
                f"tile_m={up.knobs.tile_m} of the first product and tile_m={down.knobs.tile_m} of the second: both "
                f"read one schedule; give the second tile_m={up.knobs.tile_m}"
            )
        if up.spec.name != down.spec.name:
            raise KnobError(
                f"the first product by {up.spec.name} and the second by {down.spec.name}: each reads h as its own kind "
                f"writes it; give the second kernel={up.spec.name}"
            )
        self.tile: int = up.knobs.tile_m
        self._launchers = {product: self._launcher(choices[product], device) for product in ORDER if product in choices}
        self.adds = problem.adds
        self._gathers = "gather" in choices
        pairs = problem.m * problem.top
        parts = 0 if self.adds else pairs * problem.hidden * 2
        h = hidden_bytes(problem)
        if self._gathers:  # nobody reads the gathered rows once there are parts: these take their place
            h, parts = rows_bytes(pairs, problem.intermediate), rows_bytes(pairs, problem.hidden)
        self._parts = _whole(h)
        self._counters = self._parts + _whole(parts)
        self.scratch = self._counters + (4 * COUNTERS if self._gathers else 0)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What it launches, the lists aside."""
        return tuple(launcher.variant for launcher in self._launchers.values())

    @staticmethod
    def _launcher(choice: Choice, device: int) -> Launcher:
        variant = choice.variant
        assert isinstance(choice.problem, MoeProblem)
        geometry = FAMILY.launch(variant, choice.problem, choice.multiprocessors)
        layout = (wgmma_arguments if _by_offsets(variant) else grouped_arguments).LAYOUT
        return Launcher(
            variant, device, blocks=geometry.blocks, shared_bytes=geometry.shared_bytes, layout=layout,
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
        assert found.weights is not None and found.schedule is not None
        assert found.pairs is not None and found.offsets is not None
        problem = self._problem
        hidden = problem.hidden
        # Nothing of it has to be zero or outlives the call: what is freed now is used again behind these launches.
        memory = torch.empty(self.scratch, dtype=torch.uint8, device=found.ids.device)
        h, parts, counters = (memory.data_ptr() + offset for offset in (0, self._parts, self._counters))
        w13, scales13, w2, scales2 = call.weights
        pairs, schedule, weights = (tensor.data_ptr() for tensor in (found.pairs, found.schedule, found.weights))
        by_offsets = pairs, found.offsets.data_ptr(), schedule, weights
        by_ids = pairs, schedule, weights, found.ids.data_ptr(), call.expert_map
        sizes = problem.m, problem.top, problem.experts, call.map_size
        tiles = found.schedule.shape[0]
        each = {
            "gather": ((call.x, 0, 0, 0), parts, (0, hidden)),
            "up": ((parts if self._gathers else call.x, w13, scales13, call.b13), h, problem.sizes("up")),
            "down": ((h, w2, scales2, call.b2), call.y if self.adds else parts, problem.sizes("down")),
            "combine": ((parts, 0, 0, call.residual), call.y, (hidden, hidden)),
        }
        for product, launcher in self._launchers.items():
            read, written, shape = each[product]
            if _by_offsets(launcher.variant):
                launcher(
                    stream, *read, *by_offsets, written, counters, call.alpha, call.limit, problem.top, *shape, tiles,
                )  # fmt: skip
            else:
                launcher(stream, *read, *by_ids, written, call.alpha, call.limit, *sizes, *shape, tiles)


def _by_offsets(variant: Variant) -> bool:
    """Whether a kernel finds an expert's rows by offsets, which is the argument struct of `moe.wgmma`."""
    return variant.spec.name in ("gather", "wgmma")


def _whole(size: int) -> int:
    """Bytes up to the next boundary on which arrays start."""
    return -(-size // 256) * 256
