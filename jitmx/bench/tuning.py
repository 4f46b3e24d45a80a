"""Timing candidates of `linear` on the present card, for `jitmx tune`; tuning_moe.py times those of `moe`."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from jitmx import resources
from jitmx.bench import timing
from jitmx.bench.benchmarks import calls_of, random_weight, rotated
from jitmx.bench.tuning_process import Isolated
from jitmx.dispatch import tune
from jitmx.dispatch.tune import Candidate
from jitmx.errors import DriverError, InputError
from jitmx.kernels.linear import LinearProblem
from jitmx.ops import compose
from jitmx.ops.linear_plan import DTYPES, Plan
from jitmx.ops.packed import PackedWeight, pack_weight
from jitmx.ops.quantize import dequantize

# A candidate whose product is further from that of the dequantized weight than this is wrong, whatever its time.
GATE = 0.02

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def isolated(op: str) -> Isolated:
    """What times candidates of `op`, in a process of its own."""
    return Isolated(f"jitmx.ops.{'tuning_moe' if op == 'moe' else 'tuning'}:Bench")


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
    root = resources.directory("templates")
    folders = (op, "include", "macros", *(("routing",) if op == "moe" else ()))  # of a layer, its lists are timed too
    files = sorted(path for folder in folders for path in (root / folder).rglob("*"))
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def answers(device: int) -> bool:
    """Whether a device still does what it is asked: after a fault in a kernel nothing works any more."""
    try:
        torch.cuda.synchronize(device)
        return bool((torch.ones(1, device=f"cuda:{device}") + 1).item() == 2.0)
    except RuntimeError:
        return False


class Bench:
    """Times candidates in CUDA graphs of dependent calls over copies of a random weight that rotate past the L2.

    Weight and inputs of the shape at hand are kept; one shape after the other costs the memory of one.
    """

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self._shape: tuple[Any, ...] | None = None
        self._weights: list[PackedWeight] = []
        self._values = torch.empty(0)
        self._problem: LinearProblem | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._wanted = torch.empty(0)

    def healthy(self) -> bool:
        """Whether the device still answers."""
        return answers(self._device)

    def __call__(self, problem: Any, candidate: Candidate, repeats: int) -> float:
        """Median microseconds a call.

        Raises:
            JitmxError: the candidate cannot run, or what it computes is wrong.
        """
        with torch.no_grad(), torch.cuda.device(self._device):
            self._take(problem)
            knobs = {"kernel": candidate.kernel, **candidate.knobs}
            extras = {name: getattr(problem, name) for name in ("bias", "norm", "residual", "argmax", "activation")}
            dtype = _TYPES[problem.dtype]
            plan = Plan(self._weights[0], problem.m, dtype, self._device, extras, knobs)
            plans = [plan.over(weight) for weight in self._weights]
            count = calls_of(self._weights[0].nbytes, len(plans), problem.m, problem.n, problem.k)
            calls = [self._call(plans[index % len(plans)]) for index in range(count)]
            try:
                if repeats <= tune.QUICK:
                    self._check(plan, problem)
                # Candidates of a problem leave the card as they find it; a new problem rested (`_take`).
                return timing.chain(calls, problem.m * max(problem.n, problem.k), dtype, repeats, pause=0.02) * 1e6
            except torch.OutOfMemoryError as error:
                raise DriverError(f"{candidate.key} on {problem.as_dict()} takes too much memory ({error})") from error

    def _call(self, plan: Plan) -> Callable[[torch.Tensor, torch.Tensor], None]:
        bias, residual, norm = (
            int(self._inputs[name].data_ptr()) if name in self._inputs else 0 for name in ("bias", "residual", "norm")
        )

        def call(x: torch.Tensor, y: torch.Tensor) -> None:
            plan(x.data_ptr(), y.data_ptr(), bias, residual, norm, 1e-5)

        return call

    def _take(self, problem: LinearProblem) -> None:
        """Weight, inputs and right answer of a problem, if they are not those at hand."""
        shape = problem.n, problem.k, problem.weight, problem.encoding
        if shape != self._shape:
            self._weights, self._values, self._problem = [], torch.empty(0), None
            tensor = random_weight(problem.n, problem.k, problem.weight)
            self._values = dequantize(tensor)
            self._weights = rotated(pack_weight(tensor, encoding=problem.encoding))
            self._shape = shape
        if problem == self._problem:
            return
        if problem.residual == "pair":
            raise InputError("residual='pair' is not timed; rows that name no residual serve it")
        dtype, m, n, k = _TYPES[problem.dtype], problem.m, problem.n, problem.k
        x = torch.randn(m, k, device="cuda").to(dtype)
        self._inputs = {"x": x}
        for name, size in (("bias", (n,)), ("residual", (m, n)), ("norm", (k,))):
            if getattr(problem, name):
                self._inputs[name] = torch.randn(size, device="cuda").to(dtype)
        if problem.norm:
            x = compose.rms_norm(x, self._inputs["norm"], 1e-5)
        if problem.activation != "none":
            x = compose.rounded(x, problem.activation)
        wanted = x @ self._values.to(dtype).T
        for name in ("bias", "residual"):
            if name in self._inputs:
                wanted += self._inputs[name]
        self._wanted, self._problem = wanted, problem
        torch.cuda.synchronize()
        time.sleep(timing.PAUSE_S)

    def _check(self, plan: Plan, problem: LinearProblem) -> None:
        kind = torch.int64 if problem.argmax else _TYPES[problem.dtype]
        shape = (problem.m,) if problem.argmax else (problem.m, problem.n)
        y = torch.zeros(shape, dtype=kind, device="cuda")
        self._call(plan)(self._inputs["x"], y)
        if problem.argmax:
            found = self._wanted.gather(1, y.clamp(0, problem.n - 1)[:, None])[:, 0]
            error = float(((self._wanted.amax(1) - found) / self._wanted.float().std(1)).max())
        else:
            parts = [_squares(*part) for part in zip(y.split(256), self._wanted.split(256), strict=True)]
            error = (sum(wrong for wrong, _ in parts) / sum(size for _, size in parts)) ** 0.5
        if not error <= GATE:
            raise DriverError(f"{plan.steps[0].variant.name} is {error:.2g} off on {problem.as_dict()}")


def _squares(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Sums of squares of what differs, and of what was wanted."""
    return float((found.float() - wanted.float()).square().sum()), float(wanted.float().square().sum())
