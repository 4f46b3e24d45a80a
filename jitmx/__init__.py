"""JIT-compiled CUDA kernels for MXFP4 inference.

    packed = jitmx.pack_weight(jitmx.quantize(weight, "mxfp4"))
    y = jitmx.linear(x, packed, bias)

    layer = jitmx.nn.MXFP4Linear.from_linear(torch_linear)  # the same as a module

Importing this module imports neither torch nor CuPy and touches no GPU; the operators below bring in torch when they
are first used. Each raises what its docstring names, and `errors.NotWarmedError` where JITMX_MODE=required and a kernel
is not in the cache; errors.py shows the whole tree.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitmx import nn
    from jitmx.ops.attention import append_kv, attention
    from jitmx.ops.linear import linear
    from jitmx.ops.linear.argmax import linear_argmax
    from jitmx.ops.linear.packed import PackedWeight, pack_weight
    from jitmx.ops.linear.swiglu import interleave_gate_up, linear_swiglu
    from jitmx.ops.moe import moe
    from jitmx.ops.moe.experts import PackedExperts, pack_experts
    from jitmx.ops.mx import MXTensor
    from jitmx.ops.norm import rms_norm
    from jitmx.ops.quantize import dequantize, quantize
    from jitmx.ops.routing import Routing, group_by_expert, route
    from jitmx.ops.sampling import greedy_sample
    from jitmx.ops.topk import topk
    from jitmx.ops.tree import accept_greedy, move_kv, pack_mask, tree_build, tree_plan, tree_verify

_WHERE = {
    "MXTensor": "jitmx.ops.mx",
    "PackedExperts": "jitmx.ops.moe.experts",
    "PackedWeight": "jitmx.ops.linear.packed",
    "Routing": "jitmx.ops.routing",
    "accept_greedy": "jitmx.ops.tree",
    "append_kv": "jitmx.ops.attention",
    "attention": "jitmx.ops.attention",
    "dequantize": "jitmx.ops.quantize",
    "greedy_sample": "jitmx.ops.sampling",
    "group_by_expert": "jitmx.ops.routing",
    "interleave_gate_up": "jitmx.ops.linear.swiglu",
    "linear": "jitmx.ops.linear",
    "linear_argmax": "jitmx.ops.linear.argmax",
    "linear_swiglu": "jitmx.ops.linear.swiglu",
    "moe": "jitmx.ops.moe",
    "move_kv": "jitmx.ops.tree",
    "pack_experts": "jitmx.ops.moe.experts",
    "pack_mask": "jitmx.ops.tree",
    "pack_weight": "jitmx.ops.linear.packed",
    "quantize": "jitmx.ops.quantize",
    "rms_norm": "jitmx.ops.norm",
    "route": "jitmx.ops.routing",
    "topk": "jitmx.ops.topk",
    "tree_build": "jitmx.ops.tree",
    "tree_plan": "jitmx.ops.tree",
    "tree_verify": "jitmx.ops.tree",
}

__all__ = [
    "MXTensor", "PackedExperts", "PackedWeight", "Routing", "accept_greedy", "append_kv", "attention", "dequantize",
    "greedy_sample", "group_by_expert", "interleave_gate_up", "linear", "linear_argmax", "linear_swiglu", "moe",
    "move_kv", "nn", "pack_experts", "pack_mask", "pack_weight", "quantize", "rms_norm", "route", "topk", "tree_build",
    "tree_plan", "tree_verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    value: Any
    if name == "nn":
        return _imported(name, "jitmx.nn")
    if name == "__version__":
        from importlib.metadata import version

        value = version("jitmx")
    elif name in _WHERE:
        value = getattr(_imported(name, _WHERE[name]), name)
    else:
        raise AttributeError(f"module 'jitmx' has no attribute {name!r}")
    globals()[name] = value
    return value


def _imported(name: str, module: str) -> ModuleType:
    """The module that holds `name`; where torch is missing, the error says who wants it and how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        said = f"jitmx.{name} takes torch, which is not installed; install it with: pip install 'jitmx[torch]'"
        raise ModuleNotFoundError(said, name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, "__version__", "nn"})
