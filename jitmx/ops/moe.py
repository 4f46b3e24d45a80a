"""`jitmx.moe`: a mixture of experts with weights in MXFP4."""

from __future__ import annotations

from typing import Any

import torch

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels.moe import MoeProblem, launch_of
from jitmx.kernels.moe.arguments import LAYOUT
from jitmx.kernels.moe.layout import ALPHA, LIMIT
from jitmx.kernels.moe.problem import MAX_ROWS, MAX_TOP
from jitmx.ops import checks, scratch
from jitmx.ops.experts import PackedExperts
from jitmx.ops.moe_grouped import GroupedPlan, check_lists
from jitmx.ops.routing import Routing
from jitmx.runtime.launch import Launcher


class Plan:
    """One launch: everything that does not change from call to call of one shape and pair of weights."""

    __slots__ = ("_device", "_keep", "_kind", "_sizes", "_weights", "launcher", "scratch")

    def __init__(self, problem: MoeProblem, w13: PackedExperts, w2: PackedExperts, device: int) -> None:
        arch, multiprocessors = checks.device_arch(device), checks.multiprocessors(device)
        variant = choose("moe", problem, arch, multiprocessors=multiprocessors).variant
        geometry = launch_of(variant, problem, multiprocessors)
        self.launcher = Launcher(
            variant,
            device,
            blocks=geometry.blocks,
            shared_bytes=geometry.shared_bytes,
            cluster=geometry.cluster,
            layout=LAYOUT,
            pdl=variant.knobs.pdl,
        )
        self._keep = w2  # its identity is part of the key under which this plan is kept
        self._weights = tuple(tensor.data_ptr() for w in (w13, w2) for tensor in (w.words, w.scales))
        self._sizes = problem.m, problem.top, problem.experts, problem.hidden, problem.intermediate
        self.scratch = geometry.workspace
        self._device = device
        self._kind = variant.identity, self._sizes

    def __call__(
        self, stream: int, x: int, ids: int, weights: int, y: int, b13: int = 0, b2: int = 0,
        alpha: float = ALPHA, limit: float = LIMIT, expert_map: int = 0, map_size: int = 0, count: int = 0,
    ) -> None:  # fmt: skip
        """Launch on the CUstream `stream`; addresses on the device, 0 for what the call lacks."""
        rows, top, experts, hidden, intermediate = self._sizes
        memory = scratch.memory(self.scratch, self._kind, self._device, stream)
        self.launcher(
            stream, x, *self._weights, b13, b2, ids, weights, expert_map, count, y, memory.data_ptr(),
            alpha, limit, rows, top, experts, map_size, hidden, intermediate,
        )  # fmt: skip


def moe(
    x: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor] | Routing,
    w13: PackedExperts,
    w2: PackedExperts,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: str = "swiglu_oai",
    alpha: float = ALPHA,
    limit: float = LIMIT,
    expert_map: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t] = sum over slots of w[t, slot] (W2[e] h + b2[e]), h = act(W13[e] x[t] + b13[e]), e = ids[t, slot].

    Accumulated in fp32; h, with the row's weight, and y are rounded to bf16. Deterministic: the same inputs give the
    same bits. Nothing of the routing has to be known on the host. Runs on the current stream of x's device and works
    under `torch.cuda.graph` once the shape has been called before capture.

    Up to 64 rows are one launch. More are four: lists by expert, the two products, and the sum over a row's experts in
    the order of its slots; each expert's part is then rounded to bf16.

    The launch for few rows takes all multiprocessors, and its blocks wait for one another: do not run two, or one and a
    `jitmx.linear` of many rows, at a time on two streams.

    Args:
        x: [..., hidden], bfloat16, contiguous, on the weights' GPU.
        routing: from `jitmx.route`, or ids int32 and weights float32 [..., top], contiguous; top is at most 8. An id
            that is not in 0 … experts - 1 (-1, say) is skipped.
        w13: [experts, 2 intermediate, hidden], from `jitmx.pack_experts`, gate and up rows in turn.
        w2: [experts, hidden, intermediate], likewise.
        b13, b2: [experts, 2 intermediate] and [experts, hidden], bfloat16, contiguous; both or neither.
        activation: "swiglu_oai", (up + 1) gate sigmoid(alpha gate) of gate up to `limit` and up within ± `limit`; or
            "silu", up gate sigmoid(gate).
        alpha, limit: of swiglu_oai.
        expert_map: int32, contiguous, from the ids in `routing` to the experts at hand, -1 for those elsewhere. For
            more than 64 rows it has at least as many ids as there are experts at hand, and at most 512.
        count: int32, one element: rows that count; y of the others is zero. For batches padded to the rows of a graph.
        out: like x; written and returned. It must not overlap x.

    Returns:
        [..., hidden] bfloat16.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take; nothing was launched.
        KnobError: the shape does not fit the shared memory of the device.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/moe/, chosen by jitmx/dispatch (`jitmx explain moe`).
    """
    ids, weights = _check(x, routing, w13, w2, b13, b2, expert_map, count)
    if out is None:
        out = torch.empty_like(x)
    else:
        _require("out", out, x, torch.bfloat16, tuple(x.shape))
        if out.data_ptr() == x.data_ptr() and x.numel():
            raise InputError("out is x itself; a product cannot be written over what it reads: pass another tensor")
    rows, top = x.numel() // w13.k, ids.shape[-1]
    if rows == 0:
        return out
    key = rows, top, id(w2), b13 is None, activation
    with torch.cuda.device(x.device):
        plan = w13.plans.get(key)
        if plan is None:
            problem = MoeProblem(
                rows, w13.experts, top, w13.k, w2.k, activation, b13 is not None, w13.encoding,
                "normal" if w13.scale_range == w2.scale_range == "normal" else "full",
            )  # fmt: skip
            kind = Plan if rows <= MAX_ROWS else GroupedPlan
            plan = w13.plans[key] = kind(problem, w13, w2, x.get_device())
        stream = torch.cuda.current_stream().cuda_stream
        common = weights.data_ptr(), out.data_ptr(), _address(b13), _address(b2), alpha, limit
        if isinstance(plan, GroupedPlan):
            plan(stream, x.data_ptr(), ids, *common, expert_map, count)
        else:
            to = _address(expert_map), 0 if expert_map is None else expert_map.numel()
            plan(stream, x.data_ptr(), ids.data_ptr(), *common, *to, _address(count))
    return out


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(
    x: torch.Tensor, routing: Any, w13: PackedExperts, w2: PackedExperts, b13: Any, b2: Any, expert_map: Any, count: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights, where everything fits together."""
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, PackedExperts):
            raise InputError(f"{name} is a {type(weight).__name__}; pack it once with jitmx.pack_experts")
    checks.require_cuda("x", x)
    if x.dtype != torch.bfloat16 or x.dim() == 0 or x.shape[-1] != w13.k:
        raise InputError(
            f"x is {checks.describe(x)}; moe takes bfloat16 whose last dimension is hidden={w13.k} of w13 "
            f"{list(w13.shape)}"
        )
    if (w2.experts, w2.n, 2 * w2.k) != (w13.experts, w13.k, w13.n):
        raise InputError(
            f"w13 {list(w13.shape)} and w2 {list(w2.shape)} do not fit: they must be [experts, 2 intermediate, hidden] "
            "and [experts, hidden, intermediate]"
        )
    if w13.encoding != w2.encoding:
        raise InputError(f"w13 was packed as {w13.encoding} and w2 as {w2.encoding}; pack both alike")
    if w13.device != x.device or w2.device != x.device:
        raise InputError(f"x is on {x.device}, w13 on {w13.device} and w2 on {w2.device}; put all on one GPU")
    checks.require_layout("x", x)
    checks.require_no_grad("x", x)
    if not isinstance(routing, Routing) and (not isinstance(routing, tuple) or len(routing) != 2):
        raise InputError(f"routing is a {type(routing).__name__}; pass (ids, weights), or what jitmx.route returns")
    ids, weights = routing[:2]
    checks.require_cuda("ids", ids)
    top = ids.shape[-1] if ids.dim() else 0
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"ids is {checks.describe(ids)}; its last dimension, experts a row, must be 1 to {MAX_TOP}")
    _require("ids", ids, x, torch.int32, (*x.shape[:-1], top))
    _require("weights", weights, x, torch.float32, (*x.shape[:-1], top))
    if (b13 is None) != (b2 is None):
        raise InputError("one of b13 and b2 is missing; pass both or neither (zeros where one product has none)")
    if b13 is not None:
        _require("b13", b13, x, torch.bfloat16, (w13.experts, w13.n))
        _require("b2", b2, x, torch.bfloat16, (w2.experts, w2.n))
    if expert_map is not None:
        _require("expert_map", expert_map, x, torch.int32, (getattr(expert_map, "numel", int)(),))
    if count is not None:
        _require("count", count, x, torch.int32, (1,))
    if x.numel() // w13.k > MAX_ROWS:
        check_lists(w13.experts, expert_map)
    return ids, weights


def _require(name: str, tensor: Any, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise InputError unless a tensor is contiguous, of this type and shape, on x's GPU."""
    checks.require_cuda(name, tensor)
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != x.device or not tensor.is_contiguous():
        wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)} on {x.device}"
        raise InputError(
            f"{name} is {checks.describe(tensor)} with strides {list(tensor.stride())}; it must be contiguous {wanted}"
        )
    if dtype is torch.bfloat16:  # read and written several at a time
        checks.require_layout(name, tensor)
    checks.require_no_grad(name, tensor)
