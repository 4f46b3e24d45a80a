"""Operators whole, on the simulated card: what a bundle holds is enough where nothing may be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import jitmx
from jitmx import batch, build, bundles, settings
from jitmx.build import Built
from jitmx.cache import store
from jitmx.errors import NotWarmedError
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from jitmx.toolchain import nvrtc
from simulated_card import Simulated, on_cpu


class Loading(Simulated):
    """A card that obtains the machine code of what it launches, as a real one does."""

    statuses: tuple[str, ...] = ()

    def bind(
        self, variant: Variant, device: int, launch: Launch, takes: Sequence[str], fixed: Mapping[str, Any], *,
        dependent: bool = True,
    ) -> Callable[..., None]:  # fmt: skip
        self.statuses += (build.obtain(variant).status,)
        return super().bind(variant, device, launch, takes, fixed, dependent=dependent)


def product() -> torch.Tensor:
    """A product with a weight that is quantized and packed for it."""
    generator = torch.Generator().manual_seed(7)
    w, x = (torch.randn(n, 64, generator=generator).bfloat16() for n in (32, 2))
    return jitmx.linear(x, jitmx.pack_weight(jitmx.quantize(w)))


def test_operators_run_from_a_bundle_in_required_mode_with_no_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.reload()

    now(JITMX_CACHE_DIR=str(tmp_path / "build"))
    with on_cpu() as card:
        wanted = product()
    kernels = {variant.identity: variant for variant in card.launched}
    built = [one for one in batch.build_all(kernels.values(), strict=False) if isinstance(one, Built)]
    assert len(built) == len(kernels) >= 2
    (tmp_path / "made.jitmx").write_bytes(bundles.of(built, {"test": "product"}))

    def refuse(*_arguments: Any, **_more: Any) -> Any:
        raise AssertionError("nothing is compiled in this mode")

    monkeypatch.setattr(nvrtc, "compile", refuse)
    monkeypatch.setattr(nvrtc, "scan", refuse)
    now(JITMX_CACHE_DIR=str(tmp_path / "serve"), JITMX_MODE="required")
    with on_cpu(kind=Loading), pytest.raises(NotWarmedError):
        product()
    now(JITMX_SITE_CACHE=str(tmp_path / "made.jitmx"))
    with on_cpu(kind=Loading) as card:
        assert torch.equal(product(), wanted)
    assert isinstance(card, Loading) and set(card.statuses) == {"hit"} and len(card.statuses) >= 2
    assert list(store.current().records()) and not list((tmp_path / "serve").rglob("*.cubin"))


@pytest.fixture(autouse=True)
def _settings() -> Any:
    yield
    store._stores.clear()
    settings.current.cache_clear()
