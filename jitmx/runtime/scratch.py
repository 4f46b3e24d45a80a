"""Scratch memory of launches: zero before the first one, then as each leaves it for the next of its kind.

Launches on one stream follow one another, so that all of a kind share it, whatever weight they read. A CUDA graph gets
memory of its own: which stream it will run on, and beside what, is not known. What is small comes from memory that was
zeroed before, and is the graph's for good; what is large is zeroed as part of it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from jitmx.runtime import driver

# Row counts vary from call to call where prompts are read, and products of many rows want megabytes each.
_MOST_BYTES = 256 << 20
# Captures may overlap, in two threads; until one has ended no other allocation of its graph may have this memory.
_MOST_CAPTURES = 4

# Of a device: what graphs take their small pieces of, each the largest at most, at such distances.
_PIECES_BYTES, _LARGEST_PIECE, _ALIGNMENT = 1 << 20, 16 << 10, 256

_Kept = dict[tuple[Any, ...], torch.Tensor]
_of_streams: _Kept = {}
_of_captures: dict[int, _Kept] = {}
_pieces: dict[int, torch.Tensor] = {}  # by device, what is left
_lock = threading.Lock()


def memory(size: int, kind: tuple[Any, ...], device: int, stream: int) -> torch.Tensor:
    """Scratch memory for a launch on the CUstream `stream`, torch's current one; to be held until it is launched.

    Args:
        size: bytes.
        kind: what launches have in common that leave it as the next one wants it.
        device: its number; -1 is host memory, for launches that are simulated.

    Returns:
        uint8 [size].
    """
    if _is_of_inductor(device, stream):
        # Its graphs allow no memory that outlives a call; what is freed after a launch is free after it, in order.
        return _zeroed(size, device)
    capture = driver.capture_number(stream) if device >= 0 and torch.cuda.is_current_stream_capturing() else 0
    key = device, stream, kind
    kept = _of_captures.get(capture) if capture else _of_streams
    found = kept.get(key) if kept else None
    return _new(size, key, capture) if found is None else found


def _new(size: int, key: tuple[Any, ...], capture: int) -> torch.Tensor:
    with _lock:
        if capture:
            kept = _of_captures.setdefault(capture, {})
            while len(_of_captures) > _MOST_CAPTURES:
                del _of_captures[next(iter(_of_captures))]
        else:
            kept = _of_streams
            total = size + sum(found.nbytes for found in kept.values())
            while kept and total > _MOST_BYTES:
                total -= kept.pop(next(iter(kept))).nbytes
            _lay_in(key[0])
        if key not in kept:  # another thread may have been quicker
            piece = _piece(size, key[0]) if capture else None
            kept[key] = _zeroed(size, key[0]) if piece is None else piece
        return kept[key]


def _lay_in(device: int) -> None:
    """Memory for the graphs to come, zero by the time that this returns."""
    if device >= 0 and device not in _pieces:
        _pieces[device] = _zeroed(_PIECES_BYTES, device)
        torch.cuda.current_stream(device).synchronize()


def _piece(size: int, device: int) -> torch.Tensor | None:
    """Zeroed memory that no one else gets, or None where there is no such left."""
    left = _pieces.get(device)
    whole = -(-size // _ALIGNMENT) * _ALIGNMENT
    if left is None or size > _LARGEST_PIECE or whole > left.numel():
        return None
    _pieces[device] = left[whole:]
    return left[:size]


def _is_of_inductor(device: int, stream: int) -> bool:
    """Whether it is the stream on which Inductor records its CUDA graphs, and runs what it will record."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = trees.get_manager(device, create_if_none_exists=False) if trees else None
    return manager is not None and manager.stream.cuda_stream == stream


def _zeroed(size: int, device: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cpu" if device < 0 else f"cuda:{device}")
