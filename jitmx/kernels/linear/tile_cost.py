"""What a launch of `linear.tile` should take: a written model, for where no table was measured.

A multiprocessor's time is what its busiest scheduler issues: MMA at the chip's rate, and everything else, of which
little hides behind the MMA of the same warp. To that come a start and an end for each round of resident blocks, and the
exchange of parts where blocks share k. None of it is faster than the bytes: of weights and X from DRAM once, of every
stage from the L2, and of what the ring keeps in flight over a latency. The constants are fitted to 849 launches on an
H200, of 16 to 2048 tokens: four in five lie within 20 %, and what the model picks takes 6 % longer than the best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitmx.arch import Arch

# Cycles of a tensor core for m16n8k16 with fp32 sums, by compute capability: 6 is measured, the rest published.
_MMA_CYCLES = {(8, 0): 8, (8, 6): 16, (8, 9): 16, (9, 0): 6, (10, 0): 8, (10, 3): 8, (12, 0): 16, (12, 1): 16}
_GIGAHERTZ = {8: 1.5, 9: 1.7, 10: 1.8, 12: 2.4}
_SCHEDULERS = 4
_DECODE = 40  # instructions for a block of 32 k of a packed tile
_READ = 4  # cycles of a scheduler for 512 bytes from shared memory
_COPY = 4  # cycles for 16 bytes of a thread to shared memory
_OTHER, _ALONE = 0.65, 0.85  # part of these that does not pass beside MMA; the same of a scheduler with one warp
_STAGE = 125  # cycles of a barrier and its ring
_ROUND = 3000  # cycles to fill the ring and to put out Y
_EXCHANGE = 3100  # cycles to write parts, count, and read them
_MEETING = 800  # cycles of two barriers of a cluster and a read from another of its blocks; published, as is the next
_REMOTE_BYTES = 14  # a cycle and multiprocessor, from other blocks of the cluster
_TOGETHER = 16  # multiprocessors, of which a cluster takes all of its own
_LATENCY = 550  # cycles from a copy to its end
_L2_BYTES = 36  # a cycle and multiprocessor
_UNHIDDEN = 0.1  # of the lesser of two times that pass side by side


@dataclass(frozen=True)
class Shape:
    """What the model needs of a variant.

    Attributes:
        rows, columns: packed tiles and columns of 8 tokens of a warp.
        warps: of a block.
        tile_n, tile_m, tile_k, stages, split_k: as the knobs.
        stage_bytes: shared memory of a stage.
        resident: blocks that a multiprocessor holds at once.
        clustered: whether the blocks that share a tile are a cluster.
    """

    rows: int
    columns: int
    warps: int
    tile_n: int
    tile_m: int
    tile_k: int
    stages: int
    split_k: int
    stage_bytes: int
    resident: int
    clustered: bool = False


def places(shape: Shape, multiprocessors: int) -> int:
    """Blocks that run at once. Clusters leave places over where they do not divide those of a part of the chip."""
    if not shape.clustered:
        return multiprocessors * shape.resident
    parts = [_TOGETHER] * (multiprocessors // _TOGETHER) + [multiprocessors % _TOGETHER]
    return max(1, sum(part * shape.resident // shape.split_k for part in parts)) * shape.split_k


def microseconds(shape: Shape, m: int, n: int, k: int, arch: Arch, multiprocessors: int) -> float:
    """Time of a launch for X [m, k] and W [n, k] on a target with so many multiprocessors."""
    tiles = -(-n // shape.tile_n) * -(-m // shape.tile_m)
    steps = math.ceil(math.ceil(k / shape.tile_k) / shape.split_k)
    # Blocks of the busiest multiprocessor, half way between an even spread and full rounds: a last round that is not
    # full is uneven where the launch before still holds some multiprocessors.
    rounds = math.ceil(tiles * shape.split_k / places(shape, multiprocessors))
    even = math.ceil(tiles * shape.split_k / multiprocessors)
    blocks, together = (even + rounds * shape.resident) / 2, min(even, shape.resident)

    mma = 4 * shape.rows * shape.columns * _MMA_CYCLES[arch.major, arch.minor]
    copies = shape.stage_bytes * 64 / shape.tile_k / 16 / (32 * shape.warps)
    other = shape.rows * (2 * _DECODE + 3) + _READ * 2 * shape.columns + _COPY * copies
    on_scheduler = -(-together * shape.warps // _SCHEDULERS)
    exposed = other * (_ALONE if on_scheduler == 1 else _OTHER)
    stage = (on_scheduler * (mma + exposed) * shape.tile_k / 64 + _STAGE) / together
    cycles = blocks * steps * stage + rounds * _ROUND

    in_flight = together * (shape.stages - 2) * shape.stage_bytes
    moved = blocks * steps * shape.stage_bytes / min(_L2_BYTES, in_flight / _LATENCY) + rounds * _ROUND / 2
    parts = shape.tile_n * shape.tile_m * 4 * blocks
    exchanged = 0.0
    if shape.clustered:
        exchanged = parts * (1 - 1 / shape.split_k) / _REMOTE_BYTES + _MEETING
    elif shape.split_k > 1:
        exchanged = 2 * parts / _L2_BYTES + _EXCHANGE
    weights = shape.stage_bytes - shape.tile_m * shape.tile_k * 2
    once = -(-n // shape.tile_n) * steps * shape.split_k * weights + 2 * m * (n + k)
    hertz = _GIGAHERTZ[arch.major] * 1e3
    times = sorted([(cycles + exchanged) / hertz, (moved + exchanged) / hertz, once / arch.memory_gbps / 1e3])
    return times[2] + _UNHIDDEN * times[1]
