"""Sums of E4M3 products as Hopper's tensor cores make them: they keep 13 bits behind the first of the largest term."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jitmx.sim import mma, wgmma

Floats = npt.NDArray[np.float64]
K, BITS = 32, 13


def added(a: Floats, b: Floats, sums: Floats) -> Floats:
    """Sums [..., m, n] and A [..., m, 32] times B [..., 32, n]; all terms cut off alike, then added exactly."""
    terms = a[..., :, None, :] * b.swapaxes(-1, -2)[..., None, :, :]
    largest = np.maximum(np.abs(terms).max(axis=-1), np.abs(sums))
    unit = np.exp2(np.frexp(largest)[1] - 1.0 - BITS)
    return np.asarray((np.trunc(terms / unit[..., None]).sum(axis=-1) + np.trunc(sums / unit)) * unit)


def product(x: Floats, w: Floats) -> Floats:
    """X [rows, k] times W [n, k] transposed."""
    found = np.zeros((len(x), len(w)))
    for first in range(0, x.shape[1], K):
        found = added(x[:, first : first + K], w[:, first : first + K].T, found)
    return found


def in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the simulator's products of warpgroups in E4M3 are such sums."""
    plain = wgmma.Wgmma.__call__

    def call(self: wgmma.Wgmma, a: Any, b: Any, d: Any, keep: Any, signs: tuple[int, int] = (1, 1)) -> Any:
        if (self.a, self.b, self.d) != ("e4m3", "e4m3", "f32"):
            return plain(self, a, b, d, keep, signs)
        warps = d.shape[1] // 32
        places = np.arange(a.shape[0] * 64 * self.n).reshape(-1, 16, self.n)
        order = mma.held(places, warps)[0]
        before = np.zeros(places.size)
        before[order] = np.where(np.repeat(keep, 128), mma.sums(d, self.d), 0)
        after = added(
            a.astype(np.float64), b.astype(np.float64) * (signs[0] * signs[1]), before.reshape(-1, 64, self.n)
        )
        return mma.settled(mma.rounded(after.ravel()[order], self.d), self.d)

    monkeypatch.setattr(wgmma.Wgmma, "__call__", call)
