"""Geometry of a launch, which a kernel's own module gives for knobs and a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jitmx.registry.tensor_map import TensorMap


@dataclass(frozen=True)
class Launch:
    """Geometry of one launch.

    Attributes:
        blocks: blocks of the grid.
        shared_bytes: dynamic shared memory a block, bytes.
        cluster: blocks a cluster; 1 is no cluster.
        workspace: bytes of device memory that are zero before the first launch; every launch leaves its counters zero.
        maps: by field of the arguments, what each tensor map shows.
    """

    blocks: int
    shared_bytes: int = 0
    cluster: int = 1
    workspace: int = 0
    maps: Mapping[str, TensorMap] = field(default_factory=dict)
