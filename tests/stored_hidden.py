"""h of experts in E4M3 as the first product has stored it, read by a call whose second weight is part of an identity.

y beside float64 of "inputs that are rounded alike" is to have h rounded as the kernel has rounded it. Sums of E4M3
products are off by 0.1 to 0.2 % in Hopper's tensor cores, by which some h in a hundred go to the next code, 6 to 12 %
further: a reference that rounds h by itself is 0.5 to 1.1 % off for that alone. So y is held against the h that is
there, and each h by itself: it is a code that its sum may be rounded to.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import torch

import jitmx
from jitmx.kernels import fp8_sums
from jitmx.kernels.fp8_rows import hidden_multiplier
from jitmx.kernels.moe import edges
from jitmx.kernels.moe.layout import ALPHA, LIMIT, activate
from jitmx.ops.moe.experts import PackedExperts
from jitmx.registry.case import deviation, summed

MULTIPLIER = hidden_multiplier(ALPHA, LIMIT)


def stored(w13: PackedExperts, b13: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """h of x [rows, hidden] at experts ids [rows, top]: float64 [rows, top, intermediate].

    Rows come once for each of their experts, of weight 1. What others there are beside a row changes no bit of it.
    """
    (rows, top), hidden, inner = ids.shape, w13.k, w13.n // 2
    repeated = x.repeat_interleave(top, 0)
    routing = ids.reshape(-1, 1).contiguous(), torch.ones(rows * top, 1, device=x.device)
    parts = []
    for first in range(0, inner, hidden):
        count = min(hidden, inner - first)
        w2 = _selecting(w13, first, count)
        b2 = torch.zeros(w13.experts, hidden, dtype=x.dtype, device=x.device)
        parts.append(jitmx.moe(repeated, routing, w13, w2, b13, b2, x_format="fp8")[:, :count])
    return torch.cat(parts, 1).double().view(rows, top, inner)


def _selecting(w13: PackedExperts, first: int, count: int) -> PackedExperts:
    """W2 [experts, hidden, intermediate] whose y is so many features of h, from `first` on."""
    at = torch.arange(count, device=w13.words.device)
    nibbles = torch.zeros(w13.k, w13.n // 2, dtype=torch.uint8, device=at.device)
    nibbles[at, first + at] = 2  # E2M1's 1
    codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    scales = torch.full((w13.experts, w13.k, w13.n // 64), 127, dtype=torch.uint8, device=at.device)
    return jitmx.pack_experts((codes.expand(w13.experts, -1, -1).contiguous(), scales), encoding=w13.encoding)


def further(h: torch.Tensor, gates_and_ups: torch.Tensor, magnitudes: torch.Tensor, k: int) -> float:
    """The largest distance of an h [rows, intermediate] from what it may be, in units of what is allowed: half a code,
    and what the sums [rows, 2 * intermediate] of so many terms may be off by.
    """
    sums, size = (part.cpu().numpy() for part in (gates_and_ups, magnitudes))
    bound: Any = edges.activation_bound(sums, summed(size, k) + fp8_sums.lost(size, k), "swiglu_oai", ALPHA, LIMIT)
    codes = (h * MULTIPLIER).cpu().numpy().astype(ml_dtypes.float8_e4m3fn)
    return deviation(codes, activate(sums, "swiglu_oai") * MULTIPLIER, bound * MULTIPLIER, 0.5)
