"""The magnitudes of x that `jitmx.linear` documents: both ends, in every kernel of sm_90."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import jitmx
from jitmx import settings
from simulated_card import on_cpu

GATE = 0.005
N, K = 48, 160


def relative(kernel: str, m: int, magnitude: float, scales: tuple[int, int], dtype: torch.dtype) -> float:
    """Relative L2 of a simulated product against float64, and that this kernel made it."""
    generator = torch.Generator().manual_seed(m)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    bytes_ = torch.randint(*scales, (N, K // 32), generator=generator).to(torch.uint8)
    x = ((torch.rand(m, K, generator=generator) * 2 - 1).double() * magnitude).to(dtype)
    assert x.isfinite().all()
    with on_cpu("sm_90a") as card:
        tensor = jitmx.MXTensor(codes, bytes_)
        y = jitmx.linear(x, jitmx.pack_weight(tensor))
        assert card.kernels[0] == f"linear.{kernel}"
        wanted = x.double() @ jitmx.dequantize(tensor, torch.float32).double().T
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test chose is not in force in those that come after it."""
    yield
    monkeypatch.undo()
    settings.reload()


def use(monkeypatch: pytest.MonkeyPatch, knobs: str) -> None:
    monkeypatch.setenv("JITMX_LINEAR_KNOBS", knobs)
    settings.reload()


@pytest.mark.parametrize("magnitude", [2.0**-60, 2.0**63], ids=["least", "largest"])
@pytest.mark.parametrize(
    ("kernel", "m"), [("gemv", 1), ("stream", 1), ("stream", 4), ("stream", 8), ("tile", 8), ("wgmma", 40)]
)
def test_magnitudes_of_the_documented_range_keep_their_precision(
    kernel: str, m: int, magnitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, f"kernel={kernel}")
    assert relative(kernel, m, magnitude, (126, 128), torch.bfloat16) <= GATE


@pytest.mark.parametrize("magnitude", [2.0**-60, 2.0**63], ids=["least", "largest"])
@pytest.mark.parametrize("m", [1, 8])
def test_so_do_those_beside_scales_of_any_size(m: int, magnitude: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "kernel=stream")
    assert relative("stream", m, magnitude, (100, 150), torch.bfloat16) <= GATE


@pytest.mark.parametrize(("knobs", "m"), [("gemv", 1), ("stream,scaling=post", 8), ("tile", 8), ("wgmma", 40)])
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_kernels_that_bring_codes_to_their_exponent_take_the_range_of_fp32(
    knobs: str, m: int, magnitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, f"kernel={knobs}")
    assert relative(knobs.partition(",")[0], m, magnitude, (126, 128), torch.bfloat16) <= GATE


@pytest.mark.parametrize(("kernel", "m"), [("gemv", 1), ("stream", 4), ("tile", 8)])
@pytest.mark.parametrize("magnitude", [2.0**-14, 64.0])
def test_float16_keeps_its_precision(kernel: str, m: int, magnitude: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, f"kernel={kernel}")
    assert relative(kernel, m, magnitude, (133, 135) if magnitude < 1 else (126, 128), torch.float16) <= GATE
