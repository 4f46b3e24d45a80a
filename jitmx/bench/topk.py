"""What `jitmx bench topk` measures: the 1 to 64 largest of 1 to 64 rows of logits, in the L2 as a head leaves them.

Calls follow one another in a CUDA graph, of several rows of logits in turn, beside torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jitmx.bench import peers, timing
from jitmx.bench.benchmark import Asked, Ceilings, Table, peer_cells, peer_headers, peer_notes
from jitmx.errors import DriverError
from jitmx.kernels.topk import reference
from jitmx.models import NAMED
from jitmx.ops.topk import topk

SHAPES = tuple((rows, k) for rows in (1, 4, 16, 64) for k in (1, 8, 64))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_CALLS = 64
_COPIES = 3  # of the logits, so that no call has those of the one before in a cache of its own

# Values and indices of the k largest of each row.
Way = Callable[[torch.Tensor, int], Any]

PEERS: dict[str, Way] = {"torch": torch.topk}


def check(x: torch.Tensor, k: int) -> None:
    """What the kernel finds is right.

    Raises:
        DriverError: it is not.
    """
    found = topk(x, k).indices.cpu().numpy()
    if not np.array_equal(found, reference(x.float().cpu().numpy(), k)):
        raise DriverError(f"topk.select of {k} of {list(x.shape)} finds other indices than the reference")


def seconds(way: Way, inputs: list[torch.Tensor], k: int, repeats: int = 21) -> float:
    """Median seconds a call."""

    def run() -> None:
        for call in range(_CALLS):
            way(inputs[call % len(inputs)], k)

    return timing.replayed(run, repeats) / _CALLS


def bench(asked: Asked) -> dict[str, Any]:
    """Rows of `dtype, m, k, us, bytes, floor_us` and times of other libraries, over the model's vocabulary.

    Raises:
        DriverError: what the kernel finds is wrong.
    """
    model = NAMED[asked.model]
    torch.manual_seed(asked.seed)
    loaded = peers.loaded(asked.peers, lambda name: PEERS[name])
    rows = []
    for name, dtype in DTYPES.items():
        for m, k in SHAPES:
            inputs = [torch.randn(m, model.vocabulary, device="cuda").to(dtype) for _ in range(_COPIES)]
            check(inputs[0], k)
            others = {
                peer: {"us": None, "reason": way} if isinstance(way, str)
                else peers.timed(lambda way=way, inputs=inputs, k=k: seconds(way, inputs, k))  # type: ignore[misc]
                for peer, way in loaded.items()
            }  # fmt: skip
            moved = inputs[0].nbytes
            rows.append(
                {"dtype": name, "m": m, "k": k, "us": seconds(topk, inputs, k) * 1e6, "bytes": moved,
                 "floor_us": moved / asked.ceilings.read * 1e6, "peers": others}
            )  # fmt: skip
    return {"model": asked.model, "vocabulary": model.vocabulary, "rows": rows}


def tables(payload: dict[str, Any], limits: Ceilings) -> list[Table]:
    """Time of each call, and how long reading its bytes from memory takes."""
    rows = payload["rows"]
    shown = [
        (row["dtype"], row["m"], row["k"], f"{row['us']:.2f}", f"{row['floor_us']:.2f}", *peer_cells(row))
        for row in rows
    ]
    headers = ("DTYPE", "M", "K", "US", "READ US", *peer_headers(rows))
    return [Table(headers, shown, headers[1:], f"the k largest of rows of {payload['vocabulary']}", peer_notes(rows))]
