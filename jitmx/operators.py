"""Every operator of `torch.ops.jitmx`, defined by importing this module.

    import jitmx.operators

    program = torch.export.load("model.pt2")

The functions of jitmx define their own operators when they are first used. A program that names operators without
calling those functions, such as one that was exported in another process, needs this import first.
"""

from jitmx.ops import attention, linear, moe, norm, norm_concat, quantize, routing, sampling, topk, tree
from jitmx.ops.linear import argmax, swiglu

__all__ = [
    "argmax", "attention", "linear", "moe", "norm", "norm_concat", "quantize", "routing", "sampling", "swiglu", "topk",
    "tree",
]  # fmt: skip
