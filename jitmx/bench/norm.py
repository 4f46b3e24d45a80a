"""What `jitmx bench norm` measures: RMSNorm of 1 to 8192 rows, alone, beside torch's and vLLM's.

Each call reads what the last one wrote, in a CUDA graph, so that what a launch waits for counts. Few rows lie in the
L2, where the launch before has left them, as in a decode; the weights of a model's norms take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from jitmx.bench import peers, timing
from jitmx.bench.benchmark import Asked, Ceilings, Table, peer_cells, peer_headers, peer_notes
from jitmx.errors import DriverError
from jitmx.models import NAMED
from jitmx.ops.norm import rms_norm

ROWS = (1, 2, 4, 8, 16, 32, 64, 512, 2048, 8192)
EPSILON = 1e-5
_CALLS = 144  # two a layer, of two steps

# Takes x, a weight and y, and writes y.
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def jitmx_way(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> object:
    """`jitmx.rms_norm`."""
    return rms_norm(x, weight, EPSILON, out=y)


def torch_way() -> Way:
    """torch's, which writes into no given tensor: what it returned is handed on."""
    handed: list[torch.Tensor] = []

    def way(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> object:
        seen = handed[0] if handed and handed[0].shape == x.shape else x
        handed[:] = [torch.nn.functional.rms_norm(seen, weight.shape, weight, EPSILON)]
        return handed[0]

    return way


def vllm_way() -> Way:
    """vLLM's kernel, as its layers launch it.

    Raises:
        Unavailable: vLLM is not here.
    """
    operators = peers.module("vllm._custom_ops")

    def way(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> object:
        return operators.rms_norm(y, x, weight, EPSILON)

    return way


PEERS: dict[str, Callable[[], Way]] = {"torch": torch_way, "vllm": vllm_way}


def error(x: torch.Tensor, weight: torch.Tensor) -> float:
    """How far what the kernel makes is from float64, relative L2."""
    y, wide = torch.full_like(x, torch.nan), x.double()
    jitmx_way(x, weight, y)
    wanted = wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()
    return float((y.double() - wanted).norm() / wanted.norm())


def seconds(way: Way, rows: int, weights: list[torch.Tensor], repeats: int = 21) -> float:
    """Median seconds a call."""
    hidden = len(weights[0])

    def call(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        way(x.view(rows, hidden), weight, y.view(rows, hidden))

    calls = [partial(call, weights[index % len(weights)]) for index in range(min(_CALLS, max(8, (1 << 18) // rows)))]
    return timing.chain(calls, rows * hidden, torch.bfloat16, repeats)


def _beside(way: Way | str, rows: int, weights: list[torch.Tensor]) -> dict[str, Any]:
    """The time of another library, or why there is none."""
    if isinstance(way, str):
        return {"us": None, "reason": way}
    return peers.timed(lambda: seconds(way, rows, weights))


def bench(asked: Asked) -> dict[str, Any]:
    """Rows of `m, us, error, bytes, floor_us` and times of other libraries, of the model's norms in bf16.

    Raises:
        DriverError: what the kernel makes is wrong.
    """
    model = NAMED[asked.model]
    torch.manual_seed(asked.seed)
    weights = [torch.rand(model.hidden, device="cuda").add(0.5).bfloat16() for _ in range(2 * model.layers)]
    loaded = peers.loaded(asked.peers, lambda name: PEERS[name]())
    rows = []
    for m in ROWS:
        x = torch.randn(m, model.hidden, device="cuda").bfloat16()
        wrong = error(x, weights[0])
        if not wrong <= 0.004:
            raise DriverError(f"norm.rms of {m} rows is {wrong:.2g} from float64, relative L2")
        moved = 2 * x.nbytes + weights[0].nbytes
        others = {name: _beside(way, m, weights) for name, way in loaded.items()}
        rows.append(
            {"m": m, "us": seconds(jitmx_way, m, weights) * 1e6, "error": wrong, "bytes": moved,
             "floor_us": moved / asked.ceilings.copy * 1e6, "peers": others}
        )  # fmt: skip
    return {"model": asked.model, "hidden": model.hidden, "rows": rows}


def tables(payload: dict[str, Any], limits: Ceilings) -> list[Table]:
    """Time of each number of rows, and its share of what a copy of so many bytes takes."""
    rows = payload["rows"]
    shown = [
        (row["m"], f"{row['us']:.2f}", f"{row['floor_us']:.2f}", f"{row['floor_us'] / row['us']:.0%}", *peer_cells(row))
        for row in rows
    ]  # fmt: skip
    headers = ("M", "US", "COPY US", "OF COPY", *peer_headers(rows))
    title = f"RMSNorm of {payload['model']}, rows of {payload['hidden']} in bf16"
    return [Table(headers, shown, headers, title, peer_notes(rows))]
