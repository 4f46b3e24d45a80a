"""`jitmx.move_kv`: keys and values of an accepted path to where the tokens of its sequence lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitmx.errors import InputError
from jitmx.kernels.tree.move import CACHES
from jitmx.kernels.tree.problem import MAX_NODES
from jitmx.ops import checks, custom
from jitmx.ops.tree import calls
from jitmx.ops.tree.calls import IDS, INT32

_VECTOR = 16  # bytes


def move_kv(
    caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    accepted: torch.Tensor,
    starts: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Move keys and values of the nodes of an accepted path to the places of the tokens that they become.

    `jitmx.attention` writes those of node i at start + i of its request; the d-th node of the path is to lie at
    start + d, where the next step looks for it. Keys need no rotation: a node's position is start + depth already. A
    launch for up to 32 caches, all layers' keys and values alike; what is in its place stays. Nothing is read back; it
    works under `torch.cuda.graph` and `torch.compile`.

    Args:
        caches: each [pages, page_size, kv_heads, head_dim], of one shape, strides and dtype, as `jitmx.attention` takes
            them; written.
        path: int32 [batch, levels], and
        accepted: int32 [batch], as `tree_verify` returns them.
        starts: int32 or int64 [batch], where the root of each request is in its sequence: seq_lens less the nodes.
        block_table: int32 [batch, pages of a request], as for `jitmx.attention`. No two requests may share the pages
            that are written.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/tree/move.cu.j2.
    """
    if type(path) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("path", path)
        torch.ops.jitmx.move_kv(list(caches), path, accepted, starts, block_table)
        return
    run(caches, path, accepted, starts, block_table)


def _check(
    caches: Sequence[torch.Tensor], path: torch.Tensor, accepted: torch.Tensor, starts: torch.Tensor,
    block_table: torch.Tensor,
) -> None:  # fmt: skip
    if not isinstance(caches, Sequence) or not caches:
        found = "empty" if isinstance(caches, Sequence) else f"a {type(caches).__name__}"
        raise InputError(f"caches is {found}", "pass a list of the keys and values of each layer")
    first = checks.require_tensor("caches[0]", caches[0])
    size = first.element_size()
    if first.dim() != 4 or first.stride(3) != 1 or first.shape[3] * size % _VECTOR or first.shape[1] < 1:
        raise InputError(
            f"caches[0] is {checks.describe(first)} with strides {list(first.stride())}; it must be [pages, page_size, "
            f"kv_heads, head_dim], and values of a head follow one another in multiples of {_VECTOR} bytes"
        )
    if any(stride * size % _VECTOR for stride in first.stride()[:3]):
        raise InputError(f"caches[0] has strides {list(first.stride())}; each must be a multiple of {_VECTOR} bytes")
    for i, one in enumerate(caches):
        checks.require_tensor(f"caches[{i}]", one)
        alike = one.shape == first.shape and one.stride() == first.stride() and one.dtype is first.dtype
        if not alike or one.device != first.device:
            raise InputError(
                f"caches[{i}] is {checks.describe(one)} with strides {list(one.stride())}; it must be like caches[0], "
                f"{checks.describe(first)} with strides {list(first.stride())}"
            )
    calls.require("path", path, INT32, ("batch", "levels"), first)
    batch, width = path.shape
    if not 1 <= width <= MAX_NODES:
        raise InputError(f"path has shape {list(path.shape)}; a path has 1 to {MAX_NODES} nodes")
    calls.require_sizes(batch * min(len(caches), CACHES), 1)
    calls.require("accepted", accepted, INT32, (batch,), first)
    calls.require("starts", starts, IDS, (batch,), first)
    calls.require("block_table", block_table, INT32, (batch, "pages of a request"), first)


def run(
    caches: Sequence[torch.Tensor], path: torch.Tensor, accepted: torch.Tensor, starts: torch.Tensor,
    block_table: torch.Tensor,
) -> None:  # fmt: skip
    """`move_kv` on plain tensors."""
    _check(caches, path, accepted, starts, block_table)
    for i, one in enumerate(caches):
        checks.require_cuda(f"caches[{i}]", one)
        checks.require_aligned(f"caches[{i}]", one)
    batch, width = path.shape
    if batch == 0:
        return
    first = caches[0]
    unit = _VECTOR // first.element_size()
    strides = [stride // unit for stride in first.stride()[:3]]
    for begin in range(0, len(caches), CACHES):
        own = [one.data_ptr() for one in caches[begin : begin + CACHES]]
        step = calls.step(
            "move", batch * len(own), path.device, page_stride=strides[0], token_stride=strides[1],
            head_stride=strides[2], table_stride=block_table.shape[1], pages=block_table.shape[1],
            page_size=first.shape[1], heads=first.shape[2], vectors=first.shape[3] // unit, width=width,
            caches=len(own), wide=calls.wide(starts),
        )  # fmt: skip
        given = path, accepted, starts, block_table
        step.run(*own, *[0] * (CACHES - len(own)), *map(calls.address, given))


def _run(
    caches: list[torch.Tensor], path: torch.Tensor, accepted: torch.Tensor, starts: torch.Tensor,
    block_table: torch.Tensor,
) -> None:  # fmt: skip
    run([custom.plain(one) for one in caches], *map(custom.plain, (path, accepted, starts, block_table)))


def _fake(
    caches: list[torch.Tensor], path: torch.Tensor, accepted: torch.Tensor, starts: torch.Tensor,
    block_table: torch.Tensor,
) -> None:  # fmt: skip
    _check(caches, path, accepted, starts, block_table)


custom.define(
    "move_kv(Tensor(a!)[] caches, Tensor path, Tensor accepted, Tensor starts, Tensor block_table) -> ()", _run, _fake
)
