"""What calls of operators on trees have in common: checks of their tensors, and the launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels.tree.problem import MAX_BATCH, MAX_NODES, TreeProblem, words_of
from jitmx.ops import checks
from jitmx.registry.launch import Launch
from jitmx.runtime import card
from jitmx.runtime.plan import Plans, Step

IDS = (torch.int32, torch.int64)
INT32 = (torch.int32,)
PLAN = ("mask", "depth", "positions", "first_child", "next_sibling", "paths")

_steps = Plans()


def step(name: str, batch: int, device: torch.device, **fixed: int | float) -> Step:
    """The launch of a kernel of the family for so many requests; kept for the next call that is alike."""
    key = name, batch, device, *fixed.values()
    found: Step | None = _steps.get(key)
    if found is None:
        number = card.number(device)
        problem = TreeProblem(name, batch)
        variant = choose("tree", problem, card.arch(number), multiprocessors=card.multiprocessors(number)).variant
        found = _steps.remember(key, Step(variant, number, Launch(batch), fixed))
    return found


def address(tensor: torch.Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def wide(*tensors: torch.Tensor | None) -> int:
    """A bit for each tensor, from the lowest on, that says whether it is of 64 bits."""
    return sum(1 << i for i, one in enumerate(tensors) if one is not None and one.dtype is torch.int64)


def require(
    name: str,
    tensor: object,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    place: torch.Tensor | None = None,
) -> torch.Tensor:
    """A contiguous tensor of one of these dtypes, whose sizes are these numbers, or any where there is a word.

    Args:
        place: a tensor on whose device it must be.

    Raises:
        InputError: it is not so.
    """
    found = checks.require_tensor(name, tensor)
    fits = found.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(found.shape, shape, strict=True)
    )
    elsewhere = place is not None and found.device != place.device
    if found.dtype not in dtypes or not fits or not found.is_contiguous() or elsewhere:
        kinds = checks.names(dtypes)
        strides = "" if found.is_contiguous() else f" with strides {list(found.stride())}"
        on = f" on {place.device}" if place is not None else ""
        wanted = ", ".join(map(str, shape))
        said = f"{name} is {checks.describe(found)}{strides}; it must be contiguous {kinds} [{wanted}]{on}"
        raise InputError(said, f"pass {name}.contiguous()" if strides and fits else "")
    if found.requires_grad:
        checks.require_no_grad(name, found)
    return found


def require_starts(starts: torch.Tensor | None, batch: int | str, place: torch.Tensor) -> None:
    """Positions of roots, where they are given."""
    if starts is not None:
        require("starts", starts, IDS, (batch,), place)


def require_sizes(batch: int, nodes: int) -> None:
    """Raise InputError where there are more requests or nodes than a call takes."""
    if batch > MAX_BATCH:
        raise InputError(f"{batch} requests are over the {MAX_BATCH} of a call", "split them")
    if not 1 <= nodes <= MAX_NODES:
        raise InputError(f"trees of {nodes} nodes; a tree has 1 to {MAX_NODES}, its root included")


def require_levels(levels: int | None, nodes: int) -> int:
    """Nodes of a path that are written: by default as many as a tree has."""
    if levels is None:
        return nodes
    if type(levels) is not int or not 1 <= levels <= nodes:
        raise InputError(f"levels={levels!r}: a path in a tree of {nodes} nodes has 1 to {nodes}, its root included")
    return levels


def new_plan(like: torch.Tensor, batch: int, nodes: int, levels: int) -> tuple[torch.Tensor, ...]:
    """Tensors for the plan of trees, in the order of the kernels' fields."""
    each = batch, nodes
    ints = {"dtype": torch.int32}
    return (
        like.new_empty((batch * nodes, words_of(nodes)), **ints), like.new_empty(each, **ints),
        like.new_empty(each, dtype=torch.int64), like.new_empty(each, **ints), like.new_empty(each, **ints),
        like.new_empty((*each, levels), **ints),
    )  # fmt: skip
