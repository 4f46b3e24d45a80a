"""Geometry of a launch, which a kernel's own module gives for knobs and a problem."""

from __future__ import annotations

from dataclasses import dataclass

from jitmx.registry.matrix import MatrixMap


@dataclass(frozen=True)
class Launch:
    """Geometry of one launch.

    Attributes:
        blocks: blocks of the grid.
        shared_bytes: dynamic shared memory a block, bytes.
        cluster: blocks a cluster; 1 is no cluster.
        workspace: bytes of device memory that are zero before the first launch; every launch leaves its counters zero.
        matrix: how a tensor map before the arguments shows X, where the kernel takes one.
    """

    blocks: int
    shared_bytes: int
    cluster: int = 1
    workspace: int = 0
    matrix: MatrixMap | None = None
