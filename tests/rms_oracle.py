"""RMSNorm in float64, and what rounding its result once leaves."""

from __future__ import annotations

import torch


def normalized(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    """Of rows of x, in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def rounded_once(y: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether each value is off by half a unit in the last place at most, and a little for fp32 on the way."""
    info = torch.finfo(y.dtype)
    allowed = exact.abs() * (info.eps * 0.5 + 2.0**-19) + info.smallest_normal * info.eps * 0.5
    return bool(((y.double() - exact).abs() <= allowed).all())
