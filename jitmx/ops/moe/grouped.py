"""The launches of `jitmx.moe` by expert: lists, both products, and the sum over a row's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from jitmx.dispatch.choice import Choice
from jitmx.errors import InputError, KnobError
from jitmx.kernels import fp8_rows
from jitmx.kernels.moe import FAMILY, MoeProblem
from jitmx.kernels.moe.hidden import hidden_bytes
from jitmx.kernels.moe.problem import MAX_ROWS, PRODUCTS
from jitmx.kernels.moe.tiles import makes_products
from jitmx.kernels.moe.wgmma_arguments import COUNTERS, rows_bytes
from jitmx.kernels.routing.problem import MAX_EXPERTS, capacity
from jitmx.ops.routing.calls import run_group
from jitmx.ops.routing.plan import Routing
from jitmx.registry.spec import Variant
from jitmx.runtime.plan import Plan, Step

if TYPE_CHECKING:
    from jitmx.ops.moe.plan import Call

ORDER = PRODUCTS[1:]  # of the launches of a layer
MOST_BYTES = 1 << 32  # of x: rows are found by offsets of 32 bits


def check_lists(experts: int, expert_map: torch.Tensor | None) -> None:
    """Raise InputError where the lists cannot be made: they are of at most MAX_EXPERTS ids, no fewer than experts."""
    ids = experts if expert_map is None else expert_map.numel()
    if ids > MAX_EXPERTS:
        raise InputError(
            f"there are {ids} ids of experts; for more than {MAX_ROWS} rows, and for what one "
            f"launch does not make, moe takes at most {MAX_EXPERTS}",
            f"call it with parts of at most {MAX_ROWS} rows, or plainly",
        )
    if ids < experts:
        raise InputError(
            f"expert_map has {ids} ids for {experts} local experts; for more than {MAX_ROWS} rows it must have as many",
            "fill it up with -1",
        )


class GroupedPlan(Plan):
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
                f"x has {problem.m} rows of {problem.hidden}, over {MOST_BYTES >> 30} GiB",
                f"call moe with parts of at most {MOST_BYTES // row} rows",
            )
        if "both" not in choices:
            _check_products(problem, choices["up"].variant, choices["down"].variant)
        self.tile: int = next(choices[name] for name in ("both", "up") if name in choices).variant.knobs.tile_m
        self._products = {product: _step(choices[product], device) for product in ORDER if product in choices}
        self.steps = tuple(self._products.values())
        self.adds = problem.adds
        self._gathers = "gather" in choices
        pairs = problem.m * problem.top
        parts = 0 if self.adds else pairs * problem.hidden * 2
        h = hidden_bytes(problem)
        self._in_e4m3 = problem.x_format == "fp8"
        gathered, counters = 0, 0
        if self._gathers:
            h_bytes, x_bytes = (fp8_rows.rows_bytes if form == "fp8" else rows_bytes for form in
                                (problem.h_format, problem.x_format))  # fmt: skip
            h, gathered = h_bytes(pairs, problem.intermediate), x_bytes(pairs, problem.hidden)
            counters = 4 * COUNTERS
        self._parts = self._gathered = _whole(h)
        if "both" in choices:  # which makes parts while it reads gathered rows
            self._parts = self._gathered + _whole(gathered)
            counters += 4 * capacity(problem.m, problem.top, problem.experts, self.tile)
        else:  # nobody reads the gathered rows once there are parts: these take their place
            parts = max(parts, gathered)
        self._counters = self._parts + _whole(parts)
        self._scales = self._counters + (_whole(counters) if self._in_e4m3 else 0)
        self.scratch = self._counters + counters
        if self._in_e4m3:
            self.scratch = self._scales + 4 * pairs

    def lists(self, ids: torch.Tensor, expert_map: torch.Tensor | None, count: torch.Tensor | None) -> Routing:
        """The lists that the products read, of ids [rows, top]."""
        if count is not None:
            there = torch.arange(self._problem.m, device=ids.device)[:, None] < count
            ids = torch.where(there, ids, -1)
        experts = self._problem.experts
        total = experts if expert_map is None else expert_map.numel()
        return run_group(ids, total, self.tile, expert_map, experts)

    def __call__(self, call: Call, found: Routing) -> None:
        """Launch on torch's current stream of the device; `found` has weights, and lists of this tile."""
        assert found.weights is not None and found.schedule is not None
        assert found.pairs is not None and found.offsets is not None
        # Nothing of it has to be zero or outlives the call: what is freed now is used again behind these launches.
        memory = torch.empty(self.scratch, dtype=torch.uint8, device=found.ids.device)
        h, gathered, parts, counters = (
            memory.data_ptr() + offset for offset in (0, self._gathered, self._parts, self._counters)
        )
        w13, scales13, w2, scales2 = call.weights
        lists = {
            "pairs": found.pairs.data_ptr(), "schedule": found.schedule.data_ptr(), "tiles": found.schedule.shape[0],
        }  # fmt: skip
        listed = {**lists, "weights": found.weights.data_ptr(), "alpha": call.alpha, "limit": call.limit}
        ids = {"ids": found.ids.data_ptr(), "map": call.expert_map, "map_size": call.map_size}
        own = {"offsets": found.offsets.data_ptr(), "counters": counters} if self._gathers else ids
        rounded: dict[str, int] = {}
        first: dict[str, int] = {}
        both: dict[str, int] = {}
        if self._in_e4m3:
            rounded = {"x_scales": memory.data_ptr() + self._scales}
            first = {"bases": call.bases[0], **rounded}
            both = {"w13_bases": call.bases[0], "w2_bases": call.bases[1], **rounded}
        if self._gathers:
            self._products["gather"](x=call.x, y=gathered, **lists, **own, **rounded)
        x = gathered if self._gathers else call.x
        y = call.y if self.adds else parts
        if "both" in self._products:
            self._products["both"](
                x=x, w13=w13, w13_scales=scales13, w2=w2, w2_scales=scales2, b13=call.b13, b2=call.b2, h=h, y=y,
                **listed, **own, **both,
            )  # fmt: skip
        else:
            self._products["up"](x=x, weight=w13, scales=scales13, bias=call.b13, y=h, **listed, **own, **first)
            self._products["down"](x=h, weight=w2, scales=scales2, bias=call.b2, y=y, **listed, **own)
        if "combine" in self._products:
            self._products["combine"](x=parts, bias=call.residual, y=call.y, **ids)


def _check_products(problem: MoeProblem, up: Variant, down: Variant) -> None:
    """Raise KnobError where the second product cannot read what the first one writes."""
    if up.knobs.tile_m != down.knobs.tile_m:
        raise KnobError(
            f"tile_m={up.knobs.tile_m} of the first product and tile_m={down.knobs.tile_m} of the "
            "second: both read one schedule",
            f"give the second tile_m={up.knobs.tile_m}",
        )
    reads = "wgmma" if up.spec.name == "wgmma_fp8" else up.spec.name
    if reads != down.spec.name:
        raise KnobError(
            f"the first product by {up.spec.name} and the second by {down.spec.name}: each reads "
            "h as its own kind writes it",
            f"give the second kernel={reads}",
        )


def _step(choice: Choice, device: int) -> Step:
    variant, problem = choice.variant, choice.problem
    assert isinstance(problem, MoeProblem)
    n, k = problem.sizes(variant.knobs.product) if makes_products(variant.spec) else (problem.hidden, problem.hidden)
    sizes = {
        "rows": problem.m, "top": problem.top, "experts": problem.experts, "n": n, "k": k, "hidden": problem.hidden,
        "intermediate": problem.intermediate,
    }  # fmt: skip
    fixed = {name: size for name, size in sizes.items() if name in variant.arguments.fields}
    return Step(variant, device, FAMILY.launch(variant, problem, choice.multiprocessors), fixed)


def _whole(size: int) -> int:
    """Bytes up to the next boundary on which arrays start."""
    return -(-size // 256) * 256
