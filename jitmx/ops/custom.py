"""Operators that torch knows by name, for torch.compile, torch.export and whatever else traces a program.

They are defined straight in torch's dispatcher: a call costs a few microseconds less than through
`torch.library.custom_op`, and nothing once it lies in a CUDA graph. None has a derivative: `refuse_gradients` says so
while the program is traced, and the kernels' own checks do when it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from jitmx.errors import InputError
from jitmx.ops import checks

_LIBRARY: Any = torch.library.Library("jitmx", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_schemas: set[str] = set()

# Whether either is so, which is `torch.compiler.is_compiling` in a third of its time.
is_tracing, is_exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator under `jitmx::`.

    Compiled code that torch keeps on disk names the operator and its arguments, and torch's key for it does not know
    the schema: what an argument is called stays once it is released, and new ones come last, with defaults.

    Args:
        schema: such as `linear(Tensor x, Tensor words) -> Tensor`.
        run: what a call does, on every backend; it refuses the tensors that it cannot take.
        fake: the same for tensors without data: shapes, dtypes and strides of what comes back.
    """
    _LIBRARY.define(schema, tags=_TAGS)
    _schemas.add(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jitmx::{name}", fake, lib=_LIBRARY)


def digest() -> str:
    """Of the schemas of all operators defined so far, for who keeps compiled code that calls them."""
    return hashlib.sha256("\n".join(sorted(_schemas)).encode()).hexdigest()[:16]


def refuse_gradients(**tensors: torch.Tensor | None) -> None:
    """No gradient is expected to flow through any of them.

    Raises:
        InputError: one is.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            checks.require_no_grad(name, tensor)


def plain(tensor: Any) -> Any:
    """A subclass of tensors as a plain tensor, which the operators take without a detour.

    What torch itself makes no detour for stays as it is: plain tensors, parameters, and None.
    """
    if tensor is None or type(tensor) is Tensor or type(tensor) is Parameter:
        return tensor
    return tensor.as_subclass(Tensor) if isinstance(tensor, Tensor) else tensor


def into(out: Tensor | None, found: Tensor) -> Tensor:
    """What an operator that takes no `out` has found: where `out` is given, there.

    Raises:
        InputError: `out` has another dtype or shape, or requires a gradient.
    """
    if out is None:
        return found
    checks.require_tensor("out", out)
    if out.dtype is not found.dtype or out.shape != found.shape:
        raise InputError(f"out is {checks.describe(out)}; it must be {checks.describe(found)}")
    checks.require_no_grad("out", out)
    return out.copy_(found)
