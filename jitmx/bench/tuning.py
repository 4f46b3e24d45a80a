"""What runs of `jitmx tune` have in common: the process that times, the card, and the code that timings are of."""

from __future__ import annotations

import hashlib
import subprocess
from abc import ABC, abstractmethod
from typing import Any

import torch

from jitmx import kernels, resources, settings
from jitmx.bench.tuning_process import Isolated
from jitmx.dispatch.tune import Candidate
from jitmx.errors import DriverError, KnobError


def isolated(op: str) -> Isolated:
    """What times candidates of `op`, in a process of its own.

    Raises:
        KnobError: the family has no benchmark.
    """
    benchmark = kernels.family(op).benchmark
    if benchmark is None:
        raise KnobError(f"{op} has no benchmark, which is what times its candidates")
    return Isolated(f"{benchmark.module}:Bench")


def origin(device: int = 0) -> dict[str, Any]:
    """Card and driver, as a tuning table names them."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device}"]
    try:
        driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise DriverError(f"nvidia-smi does not say which driver this is ({error})") from error
    return {"kind": "measured", "card": torch.cuda.get_device_name(device), "driver": driver}


def code_digest(op: str) -> str:
    """Digest of everything that kernels of `op` are made of: timings of other code are not resumed."""
    tuning = kernels.family(op).tuning
    folders = (op, "include", "macros", *(tuning.beside if tuning else ()))
    digest = hashlib.sha256()
    for root in resources.directories("templates", settings.current().families):
        for path in sorted(path for folder in folders for path in (root / folder).rglob("*")):
            if path.is_file():
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Timer(ABC):
    """Times candidates on a device; a family's `Bench` says how."""

    def __init__(self, device: int = 0) -> None:
        self._device = device

    def healthy(self) -> bool:
        """Whether the device still does what it is asked: after a fault in a kernel nothing works any more."""
        try:
            torch.cuda.synchronize(self._device)
            return bool((torch.ones(1, device=f"cuda:{self._device}") + 1).item() == 2.0)
        except RuntimeError:
            return False

    def __call__(self, problem: Any, candidate: Candidate, repeats: int) -> float:
        """Median microseconds a call.

        Raises:
            JitmxError: the candidate cannot run, or what it computes is wrong.
        """
        try:
            with torch.no_grad(), torch.cuda.device(self._device):
                return self._seconds(problem, candidate, repeats) * 1e6
        except torch.OutOfMemoryError as error:
            raise DriverError(f"{candidate.key} on {problem.as_dict()} takes too much memory ({error})") from error

    @abstractmethod
    def _seconds(self, problem: Any, candidate: Candidate, repeats: int) -> float:
        """Median seconds a call."""
