"""Tests in this folder run kernels on the card; without one they are not collected.

Each test that has compared a variant with its reference calls `evidence`, which notes it for the ledger.

A test that costs the process its CUDA context ends the tests of that process.

`pytest -n auto -m "not alone"` takes as many workers as the card has memory for; tests marked `alone` time something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import evidence as tests_evidence
from gpu import lost_device
from gpu.lost_device import pytest_runtest_makereport, pytest_runtest_protocol  # noqa: F401  hooks of these tests
from jitmx import machine, settings
from jitmx.registry.spec import Variant

try:
    import torch

    HAVE_GPU = torch.cuda.is_available()
except ImportError:
    HAVE_GPU = False

WORKER_BYTES = 10 << 30  # of the card's memory: the largest weights, in float64 too

collect_ignore_glob = [] if HAVE_GPU else ["test_*.py"]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of `-n auto`."""
    memory = torch.cuda.get_device_properties(0).total_memory if HAVE_GPU else 0
    return max(1, min(machine.compiles_at_once(), memory // WORKER_BYTES))


@pytest.fixture
def evidence() -> Iterator[Callable[[Variant, float | None, str], None]]:
    """Note that a variant agreed with its reference; counts only if the whole test passes."""
    noted: list[tuple[Variant, float | None, str]] = []
    yield lambda variant, error, note: noted.append((variant, error, note))
    card = torch.cuda.get_device_name()
    for variant, error, said in noted:
        tests_evidence.note(variant, "hardware", card=card, error=error, note=said)


lost_device.before_the_end.append(tests_evidence.write)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set JITMX_* variables for one test."""

    def use(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        settings.reload()

    yield use
    monkeypatch.undo()
    settings.reload()
