"""Loading: what the driver is handed, with a driver that only notes it."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jitmx import arch, build
from jitmx.build import Built
from jitmx.dispatch.choose import default_variants
from jitmx.errors import CaptureError, DriverError, InputError
from jitmx.registry.spec import Variant
from jitmx.runtime import driver, load

(PACK, *_) = default_variants("pack", arch.parse("sm_90"))
IMAGE = b"\x7fELF, with zeros \0\0 inside"


class Driver:
    """Modules are numbered from 1000 on; a function's number is that of its module and the length of its name."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.names: list[bytes] = []
        self.shared: list[int] = []
        self.refuses = 0

    def cuModuleLoadData(self, module: Any, image: ctypes.c_char_p) -> int:  # noqa: N802
        self.images.append(ctypes.string_at(image, len(IMAGE)))
        module._obj.value = 999 + len(self.images)
        return self.refuses

    def cuModuleGetFunction(self, function: Any, module: ctypes.c_void_p, name: bytes) -> int:  # noqa: N802
        self.names.append(name)
        function._obj.value = (module.value or 0) * 100
        return 0

    def cuFuncSetAttribute(self, _function: object, _attribute: int, value: ctypes.c_int) -> int:  # noqa: N802
        self.shared.append(value.value)
        return 0

    def cuGetErrorString(self, _code: int, _text: object) -> int:  # noqa: N802
        return 0


def built(variant: Variant, image: bytes = IMAGE) -> Built:
    record: Any = SimpleNamespace(outputs={"shared_bytes": 1024, "breaches": []})
    return Built(variant, "key", image, record, "hit", 0.0)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """An H200's driver, on which nothing is loaded, and no cache."""
    made = Driver()
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(load, "_functions", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(build, "obtain", None)
    yield made


def test_what_was_built_is_loaded_whole_and_once_without_a_look_into_the_cache(noted: Driver) -> None:
    assert load.function(PACK, 0, built(PACK)) == 1000 * 100
    assert load.function(PACK, 0) == load.function(PACK, 0, built(PACK)) == 1000 * 100
    assert noted.images == [IMAGE] and noted.names == [PACK.spec.entry.encode()]
    assert noted.shared == [PACK.arch.shared_bytes - 1024]
    assert set(load.loaded()) == {(PACK.identity, 0)}
    assert load.function(PACK, 1, built(PACK)) == 1001 * 100


def test_what_was_not_built_yet_is_obtained(noted: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "obtain", built)
    assert load.function(PACK, 0) == 1000 * 100


def test_a_cubin_that_the_driver_refuses_is_an_error_and_is_not_loaded(noted: Driver) -> None:
    noted.refuses = 200
    with pytest.raises(DriverError, match=r"cuModuleLoadData failed: .* \(CUDA error 200\)"):
        load.function(PACK, 0, built(PACK))
    assert not load.loaded()


def test_another_chips_kernel_is_not_loaded_and_none_is_while_a_graph_is_captured(
    noted: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other, *_) = default_variants("pack", arch.parse("sm_120"))
    with pytest.raises(InputError, match="which does not run on cuda:0"):
        load.function(other, 0, built(other))
    monkeypatch.setattr(load, "capturing", lambda: True)
    with pytest.raises(CaptureError, match="is not loaded yet"):
        load.function(PACK, 0, built(PACK))
    assert not noted.images


def test_loading_does_without_cupy(noted: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "cupy_backends"):
        monkeypatch.setitem(sys.modules, name, None)
    assert load.function(PACK, 0, built(PACK))
