"""Special registers: what each lane of a machine reads in %tid.x, %laneid, %clusterid.x and the like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]

WIDE = ("%clock64", "%globaltimer")  # of 64 bits
FLAGS = ("%is_explicit_cluster",)  # predicates


def special(m: Machine, name: str) -> Array:
    """The values of a special register over all lanes, or one for all.

    Raises:
        SimulationError: a name that is not known.
    """
    thread = m.lane_ids % m.width
    at = np.repeat(m.blocks if m.order is None else m.order[m.blocks], m.width)
    x, y, _ = m.block
    gx, gy, gz = m.grid
    lane = thread % 32
    size = m.cluster_size  # clusters extend along x
    table: dict[str, Any] = {
        "%tid.x": thread % x, "%tid.y": thread // x % y, "%tid.z": thread // (x * y),
        "%ntid.x": m.block[0], "%ntid.y": m.block[1], "%ntid.z": m.block[2],
        "%ctaid.x": at % gx, "%ctaid.y": at // gx % gy, "%ctaid.z": at // (gx * gy),
        "%nctaid.x": gx, "%nctaid.y": gy, "%nctaid.z": gz,
        "%laneid": lane, "%warpid": thread // 32, "%nwarpid": m.width // 32, "WARP_SZ": 32,
        "%lanemask_eq": 1 << lane, "%lanemask_lt": (1 << lane) - 1, "%lanemask_le": (2 << lane) - 1,
        "%lanemask_gt": (1 << 32) - (2 << lane), "%lanemask_ge": (1 << 32) - (1 << lane),
        "%smid": at % 128, "%nsmid": 128, "%gridid": 0, "%clock": 0, "%clock64": 0, "%globaltimer": 0,
        "%dynamic_smem_size": m.dynamic_size, "%total_smem_size": m.total_size,
        "%clusterid.x": at % gx // size, "%clusterid.y": at // gx % gy, "%clusterid.z": at // (gx * gy),
        "%nclusterid.x": gx // size, "%nclusterid.y": gy, "%nclusterid.z": gz,
        "%cluster_ctaid.x": at % gx % size, "%cluster_ctaid.y": 0, "%cluster_ctaid.z": 0,
        "%cluster_nctaid.x": size, "%cluster_nctaid.y": 1, "%cluster_nctaid.z": 1,
        "%cluster_ctarank": at % gx % size, "%cluster_nctarank": size, "%is_explicit_cluster": size > 1,
    }  # fmt: skip
    if name not in table:
        raise SimulationError(f"{m.program.entry.name}: special register {name} is not known")
    value: Array = np.asarray(table[name])
    return value
