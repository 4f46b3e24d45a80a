"""What `jitmx bench linear` measures and `jitmx tune linear` times.

Weights are random and rotate past the L2; products run in CUDA graphs of dependent calls, beside cuBLAS in bf16 and
what other libraries there are, on the same shapes in the same run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from jitmx import formats
from jitmx.bench import peers, roofline, timing, tuning
from jitmx.bench.benchmark import Asked, Ceilings, Table, peer_cells, peer_headers, peer_notes
from jitmx.dispatch import tune
from jitmx.dispatch.tune import Candidate
from jitmx.errors import DriverError, InputError
from jitmx.kernels.linear import LinearProblem, usual_rows
from jitmx.models import GPT_OSS_120B
from jitmx.ops.checks import HALF_DTYPES
from jitmx.ops.linear import compose
from jitmx.ops.linear.packed import PackedWeight, pack_weight
from jitmx.ops.linear.plan import Plan
from jitmx.ops.mx import MXTensor
from jitmx.ops.quantize import dequantize, quantize

ROWS = (1, 4, 16, 64, 512, 8192)
# A candidate whose product is further from that of the dequantized weight than this is wrong, whatever its time.
GATE = 0.02

_TYPES = {name: dtype for dtype, name in HALF_DTYPES.items()}


def random_mxfp4(*shape: int, device: str = "cuda") -> MXTensor:
    """A random weight [..., n, k] in MXFP4 whose products neither grow nor vanish along a chain."""
    *rows, k = shape
    codes = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, device=device)
    centre = formats.SCALE_ONE - round(k**0.5 * 2.5).bit_length() + 1
    scales = torch.randint(centre - 1, centre + 2, (*rows, k // formats.BLOCK), device=device)
    return MXTensor(codes, scales.to(torch.uint8))


def random_weight(n: int, k: int, format: str = "mxfp4") -> MXTensor:
    """A random weight in one of the formats, likewise."""
    if format != "mxfp4":
        parts = [torch.randn(min(8192, n - at), k, device="cuda").mul_(k**-0.5) for at in range(0, n, 8192)]
        tensors = [quantize(part, format) for part in parts]
        return MXTensor(torch.cat([t.codes for t in tensors]), torch.cat([t.scales for t in tensors]), format)
    return random_mxfp4(n, k)


def time_linear(weights: list[PackedWeight], m: int, **extras: Any) -> float:
    """Seconds a call of `jitmx.linear` with m rows in a chain over `weights`, copies of one shape.

    Args:
        extras: fields of the problem: activation, norm.
    """
    n, k = weights[0].shape
    plan = Plan(weights[0], m, torch.bfloat16, weights[0].words.get_device(), extras)
    plans = [plan.over(weight) for weight in weights]
    norm = torch.ones(k, device="cuda", dtype=torch.bfloat16)
    normed = norm.data_ptr() if extras.get("norm") else 0

    def call(plan: Plan) -> Any:
        return lambda x, y: plan(x.data_ptr(), y.data_ptr(), 0, 0, normed, 1e-5)

    count = timing.calls_of(weights[0].nbytes, len(weights), m, n, k)
    return timing.chain([call(plans[i % len(plans)]) for i in range(count)], m * max(n, k), torch.bfloat16)


def time_cublas(n: int, k: int, m: int) -> float:
    """Seconds a call of bf16 `torch.mm` with m rows in a chain over copies of the weight."""
    count = timing.copies_past_l2(n * k * 2)
    weights = [torch.randn(n, k, device="cuda").mul_(k**-0.5).bfloat16() for _ in range(count)]

    def call(weight: torch.Tensor) -> Any:
        return lambda x, y: torch.mm(x[: m * k].view(m, k), weight.T, out=y[: m * n].view(m, n))

    calls = timing.calls_of(n * k * 2, count, m, n, k)
    return timing.chain([call(weights[i % count]) for i in range(calls)], m * max(n, k), torch.bfloat16)


def rotated(weight: PackedWeight) -> list[PackedWeight]:
    """`weight` and copies of it, enough to exceed the L2 several times."""
    return [weight, *(weight.clone() for _ in range(timing.copies_past_l2(weight.nbytes) - 1))]


def bench_products(
    shapes: Iterable[tuple[str, int, int]],
    rows: Iterable[int],
    wanted: Sequence[str] = tuple(peers.PEERS),
    encoding: str | None = None,
    **extras: Any,
) -> list[dict[str, Any]]:
    """Rows of `name, n, k, m, kernel, us, bytes, flops, cublas_us, peers` for each shape and row count.

    `peers` has for each library that was wanted its `us`, None where it could not be measured, and then the `reason`.

    Args:
        wanted: names of libraries to run beside jitmx and cuBLAS.
        encoding: of the packed weight; by default what its device wants.
        extras: fields of the problem: activation, norm. What is beside has neither.
    """
    out = []
    counts = tuple(rows)
    for name, n, k in shapes:
        tensor = random_weight(n, k)
        weights = rotated(pack_weight(tensor, encoding=encoding))
        others = peers.loaded(wanted, functools.partial(peers.load, weight=tensor, copies=len(weights)))
        for m in counts:
            spent = time_linear(weights, m, **extras)
            moved = weights[0].nbytes + m * (n + k) * 2
            row = {"name": name, "n": n, "k": k, "m": m, "kernel": _kernel(weights[0], m, **extras)}
            row |= {"us": spent * 1e6, "bytes": moved, "flops": 2 * m * n * k}
            row |= {"cublas_us": time_cublas(n, k, m) * 1e6}
            row["peers"] = {peer: time_peer(found, n, k, m) for peer, found in others.items()}
            out.append(row)
        del weights, others
    return out


def _kernel(weight: PackedWeight, m: int, **extras: Any) -> str:
    """The kernel that most rows of a call run on."""
    device = weight.words.get_device()
    return str(Plan(weight, m, torch.bfloat16, device, extras).parts[0].brief.variant.spec.name)


def time_peer(products: list[peers.Product] | str, n: int, k: int, m: int) -> dict[str, Any]:
    """`us` a call of another library's product with m rows in a chain over copies of the weight, or the `reason`."""
    if isinstance(products, str):
        return {"us": None, "reason": products}

    def call(product: peers.Product) -> Any:
        return lambda x, y: product(x[: m * k].view(m, k), y[: m * n].view(m, n))

    count = timing.calls_of(n * k // 2, len(products), m, n, k)
    calls = [call(products[i % len(products)]) for i in range(count)]
    return peers.timed(lambda: timing.chain(calls, m * max(n, k), torch.bfloat16))


def bench(asked: Asked) -> list[dict[str, Any]]:
    """Rows of `bench_products` for the shape that was given, or those of gpt-oss-120b."""
    given = asked.fields
    sizes = (
        [("", given["n"], given["k"])]
        if "n" in given
        else [(name, *shape) for name, shape in GPT_OSS_120B.dense.items()]
    )
    extras = {name: given[name] for name in ("encoding", "activation", "norm") if name in given}
    return [
        row
        for size in sizes
        for row in bench_products([size], given.get("m") or usual_rows(size[1], ROWS), asked.peers, **extras)
    ]


def tables(payload: list[dict[str, Any]], limits: Ceilings) -> list[Table]:
    """Times beside what the card yields, cuBLAS and other libraries."""
    headers = ["SHAPE", "N", "K", "M", "KERNEL", "US", "TB/S", "OF READ", "TFLOP/S", "CUBLAS BF16 US", "SPEED-UP"]
    others = peer_headers(payload)
    rows = [
        (
            row["name"], row["n"], row["k"], row["m"], row["kernel"], f"{row['us']:.2f}",
            f"{row['bytes'] / row['us'] / 1e6:.2f}", f"{row['bytes'] / row['us'] * 1e6 / limits.read:.0%}",
            f"{row['flops'] / row['us'] / 1e6:.1f}", f"{row['cublas_us']:.2f}",
            f"{row['cublas_us'] / row['us']:.2f}", *peer_cells(row),
        )
        for row in payload
    ]  # fmt: skip
    right = (*headers[1:4], *headers[5:], *others)
    return [Table((*headers, *others), rows, right, notes=peer_notes(payload))]


def draw(payload: list[dict[str, Any]], limits: Ceilings, path: Path) -> None:
    """Write a PNG: a column a shape, bandwidth above and rate below."""
    roofline.draw(payload, limits, path, "linear", "TB/s of packed weight, X and Y")


class Bench(tuning.Timer):
    """Times candidates in CUDA graphs of dependent calls over copies of a random weight that rotate past the L2.

    Weight and inputs of the shape at hand are kept; one shape after the other costs the memory of one.
    """

    def __init__(self, device: int = 0) -> None:
        super().__init__(device)
        self._shape: tuple[Any, ...] | None = None
        self._weights: list[PackedWeight] = []
        self._values = torch.empty(0)
        self._problem: LinearProblem | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._wanted = torch.empty(0)

    def _seconds(self, problem: LinearProblem, candidate: Candidate, repeats: int) -> float:
        self._take(problem)
        knobs = {"kernel": candidate.kernel, **candidate.knobs}
        extras = {name: getattr(problem, name) for name in ("bias", "norm", "residual", "argmax", "activation")}
        dtype = _TYPES[problem.dtype]
        plan = Plan(self._weights[0], problem.m, dtype, self._device, extras, knobs)
        plans = [plan.over(weight) for weight in self._weights]
        count = timing.calls_of(self._weights[0].nbytes, len(plans), problem.m, problem.n, problem.k)
        calls = [self._call(plans[index % len(plans)]) for index in range(count)]
        if repeats <= tune.QUICK:
            self._check(plan, problem)
        # Candidates of a problem leave the card as they find it; a new problem rested (`_take`).
        return timing.chain(calls, problem.m * max(problem.n, problem.k), dtype, repeats, pause=0.02)

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
            raise InputError("residual='pair' is not timed", "rows that name no residual serve it")
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
