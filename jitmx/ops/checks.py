"""What every operator asks of its tensors before anything reaches the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch

from jitmx.errors import InputError
from jitmx.quoting import short
from jitmx.runtime import card

# What knobs call the types of values, all and those of 16 bits.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# The least normal number of float32 above 0, and the largest.
LEAST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
HALF_DTYPES = {dtype: name for dtype, name in DTYPES.items() if dtype.itemsize == 2}


def names(dtypes: Iterable[torch.dtype]) -> str:
    """`bfloat16 or float16`."""
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def describe(tensor: torch.Tensor) -> str:
    """`bfloat16 [4, 2880] on cuda:0`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def shown(value: object) -> str:
    """What was passed where a tensor belongs: `describe` of one, or its type."""
    return describe(value) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def require_tensor(name: str, tensor: object) -> torch.Tensor:
    """`tensor` as a tensor.

    Raises:
        InputError: it is none.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}, not a torch tensor")
    return tensor


def require_cuda(name: str, tensor: object) -> torch.Tensor:
    """`tensor` as one that kernels can read.

    Raises:
        InputError: not a tensor, or not on a GPU.
    """
    found = require_tensor(name, tensor)
    if not card.holds(found):
        raise InputError(f"{name} is {describe(found)}; jitmx runs on CUDA tensors", f"move it with {name}.cuda()")
    require_strided(name, found)
    return found


def require_strided(name: str, tensor: torch.Tensor) -> None:
    """`tensor` is none of the sparse ones.

    Raises:
        InputError: it is.
    """
    if tensor.layout is not torch.strided:
        raise InputError(f"{name} is {describe(tensor)}, {tensor.layout}", f"pass {name}.to_dense()")


def require_layout(name: str, tensor: torch.Tensor) -> None:
    """Rows of `tensor` follow one another and start on 16 bytes.

    Raises:
        InputError: they do not.
    """
    if not tensor.is_contiguous():
        raise InputError(f"{name} is not contiguous (strides {list(tensor.stride())})", f"pass {name}.contiguous()")
    require_aligned(name, tensor)


def require_aligned(name: str, tensor: torch.Tensor) -> None:
    """`tensor` starts on 16 bytes.

    Raises:
        InputError: it does not.
    """
    if tensor.data_ptr() % 16:
        raise InputError(
            f"{name} starts at an address that is no multiple of 16 bytes (storage offset {tensor.storage_offset()})",
            f"pass {name}.clone()",
        )


def row_stride(rows: torch.Tensor) -> int | None:
    """Values from a row to the next; None where rows do not lie evenly, or values of a row apart."""
    *sizes, length = rows.shape
    *strides, step = rows.stride()
    if step != 1 and length > 1:
        return None
    pairs = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(pairs):
        if outer != size * inner:
            return None
    return int(pairs[-1][1]) if pairs else int(length)


def require_apart(out: torch.Tensor, remedy: str = "pass another tensor", **read: torch.Tensor | None) -> None:
    """`out` shares no memory with what is read while it is written.

    Calls that are to take few microseconds compare addresses first, and come here where ranges of memory meet.

    Raises:
        InputError: it does.
    """
    for name, tensor in read.items():
        if tensor is None or not (tensor.numel() and out.numel()):
            continue
        distance = out.data_ptr() - tensor.data_ptr()
        if -_reach(out) < distance < _reach(tensor) and not _lie_by_turns(tensor, out, distance):
            raise InputError(f"out overlaps {name}, which is read while out is written", remedy)


def _reach(tensor: torch.Tensor, first: int = 0) -> int:
    """Bytes from the first value to the end of the last, of one index into the dimensions before `first`."""
    steps = zip(tensor.shape[first:], tensor.stride()[first:], strict=True)
    size: int = (sum((count - 1) * stride for count, stride in steps) + 1) * tensor.element_size()
    return size


def _lie_by_turns(first: torch.Tensor, second: torch.Tensor, distance: int) -> bool:
    """Whether rows of one lie between those of the other, as those of two slices of a matrix by columns do.

    Args:
        distance: bytes from the first to the second.
    """
    period, other = (tensor.stride(0) * tensor.element_size() if tensor.dim() else 0 for tensor in (first, second))
    between = distance % period if period else 0
    return period == other and between >= _reach(first, 1) and between + _reach(second, 1) <= period


def require_no_grad(name: str, tensor: torch.Tensor) -> None:
    """No gradient is expected to flow through `tensor`.

    Raises:
        InputError: one is.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name} requires a gradient, and jitmx has inference kernels only",
            f"call under torch.no_grad() or pass {name}.detach()",
        )


def is_number(value: Any) -> bool:
    """Whether `value` is a number of Python's or NumPy's; a tensor is none, for it would have to be read."""
    return isinstance(value, Real)


def require_whole(**numbers: Any) -> None:
    """Each is a whole number of Python's: what is equal to one, such as 2.0 or True, is none.

    Raises:
        InputError: one is not.
    """
    for name, number in numbers.items():
        if type(number) is not int:
            raise InputError(f"{name}={short(number)} is not a whole number", f"pass {name} as an int")


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that is finite in float32, which launches take."""
    return is_number(value) and bool(-LARGEST <= value <= LARGEST)


def is_positive(value: Any) -> bool:
    """Whether `value` is a number that is finite and above 0 in float32; kernels may take smaller ones for 0."""
    return is_number(value) and bool(LEAST <= value <= LARGEST)


def require_epsilon(epsilon: Any) -> None:
    """`epsilon` is one that an RMSNorm can have.

    Raises:
        InputError: it is no number of 0 or more that is finite in float32.
    """
    if not is_finite(epsilon) or epsilon < 0:
        raise InputError(f"epsilon={short(epsilon)} is not a finite number of 0 or more in float32")


def require_knobs(knobs: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """Knobs of a call, in order of their names.

    Raises:
        InputError: they are no mapping.
    """
    if knobs is None:
        return ()
    if not isinstance(knobs, Mapping) or not all(isinstance(name, str) for name in knobs):
        raise InputError(f"knobs={knobs!r} is no mapping of names to values", "pass such a mapping, or None")
    return tuple(sorted(knobs.items()))


def mismatch(name: str, tensor: object, shape: tuple[int, ...], x: torch.Tensor) -> InputError:
    """What is wrong with a tensor that is to be contiguous, of this shape, and of x's dtype on x's GPU."""
    found = require_cuda(name, tensor)
    wanted = f"{str(x.dtype).removeprefix('torch.')} {list(shape)} on {x.device}"
    strides = "" if found.is_contiguous() else f" with strides {list(found.stride())}"
    return InputError(f"{name} is {describe(found)}{strides}; it must be contiguous {wanted}")
