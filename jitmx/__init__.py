"""JIT-compiled CUDA kernels for MXFP4 inference.

    packed = jitmx.pack_weight(jitmx.quantize(weight, "mxfp4"))
    y = jitmx.linear(x, packed, bias)

Importing this module imports neither torch nor CuPy and touches no GPU; the operators below bring in torch when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitmx.ops.linear import linear
    from jitmx.ops.mx import MXTensor
    from jitmx.ops.packed import PackedWeight, pack_weight
    from jitmx.ops.quantize import dequantize, quantize

_WHERE = {
    "MXTensor": "jitmx.ops.mx",
    "PackedWeight": "jitmx.ops.packed",
    "dequantize": "jitmx.ops.quantize",
    "linear": "jitmx.ops.linear",
    "pack_weight": "jitmx.ops.packed",
    "quantize": "jitmx.ops.quantize",
}

__all__ = ["MXTensor", "PackedWeight", "dequantize", "linear", "pack_weight", "quantize"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'jitmx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
