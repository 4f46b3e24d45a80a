"""Other libraries in a benchmark: what is not there is a reason, and what computes something else too."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import jitmx
from jitmx import formats
from jitmx.bench import linear, peers

WEIGHT = jitmx.MXTensor(
    torch.randint(0, 256, (48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)),
    torch.full((48, 3), 120, dtype=torch.uint8),
)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantized by NumPy, so that no GPU is needed."""

    def dequantize(tensor: jitmx.MXTensor, dtype: torch.dtype) -> torch.Tensor:
        item = formats.get(tensor.format)
        codes = torch.stack([tensor.codes & 15, tensor.codes >> 4], -1).flatten(1)
        return torch.from_numpy(formats.dequantize(codes.numpy(), tensor.scales.numpy(), item)).to(dtype)

    monkeypatch.setattr(peers, "dequantize", dequantize)


@pytest.mark.parametrize(
    ("name", "module"),
    [("humming", r"humming\.layer"), ("marlin", r"vllm\..*marlin_utils_fp4"), ("triton_kernels", r"vllm\.utils")],
)
def test_a_library_that_is_not_installed_is_a_reason(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("humming", "vllm", "triton_kernels"):
        monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(peers.Unavailable, match=rf"{module}.* cannot be imported \(ModuleNotFoundError: "):
        peers.load(name, WEIGHT, 1)


class HummingLayer:
    """What the adapter uses of Humming's layer, by the reference."""

    wrong = 1.0

    def __init__(self, n: int, k: int, weight_config: dict[str, str], torch_dtype: torch.dtype) -> None:
        assert (n, k, torch_dtype) == (48, 96, torch.bfloat16) and weight_config["quant_method"] == "gpt_oss_mxfp4"
        self.weight: torch.Tensor | None = None

    def to(self, _device: Any) -> HummingLayer:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensor = jitmx.MXTensor(tensors["weight"], tensors["weight_scale"])

    def transform(self) -> None:
        self.weight = peers.dequantize(self.tensor, torch.float32)

    def __call__(self, x: torch.Tensor, outputs: torch.Tensor) -> None:
        assert self.weight is not None
        outputs.copy_(self.wrong * x.float() @ self.weight.T)


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch) -> type[HummingLayer]:
    module = ModuleType("humming.layer")
    module.HummingLayer = HummingLayer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    return HummingLayer


def test_a_library_that_is_there_gives_a_product_a_copy(humming: type[HummingLayer]) -> None:
    first, second = peers.load("humming", WEIGHT, 2)
    x, y = torch.randn(2, 96).bfloat16(), torch.zeros(2, 48, dtype=torch.bfloat16)
    second(x, y)
    wanted = x.double() @ peers.dequantize(WEIGHT, torch.float64).T
    assert float((y.double() - wanted).norm() / wanted.norm()) <= 0.01
    assert first is not second


def test_a_library_that_computes_something_else_is_not_timed(
    humming: type[HummingLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (1.05, float("nan")):
        monkeypatch.setattr(humming, "wrong", wrong)
        with pytest.raises(peers.Unavailable, match=r"what humming computes here is .* away from the product"):
            peers.load("humming", WEIGHT, 1)


def test_an_error_of_a_library_is_a_reason_of_one_line(
    humming: type[HummingLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: HummingLayer) -> None:
        raise RuntimeError("no kernel image\nfor this card" + "!" * 300)

    monkeypatch.setattr(humming, "transform", fail)
    with pytest.raises(peers.Unavailable) as error:
        peers.load("humming", WEIGHT, 1)
    assert str(error.value) == "RuntimeError: no kernel image"


def test_what_could_not_be_loaded_or_timed_has_no_time_but_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear.time_peer("it is not here", 48, 96, 4) == {"us": None, "reason": "it is not here"}

    def chain(*_arguments: Any) -> float:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(linear.timing, "chain", chain)
    found = linear.time_peer([lambda x, y: None], 48, 96, 4)
    assert found == {"us": None, "reason": "RuntimeError: operation not permitted when stream is capturing"}
