"""Layers to time `moe` on: shapes of models, random experts, and routing that spreads as a trained router's.

How routing is made. Token t has a hidden state h_t, all of whose values are normal with deviation 1, as RMSNorm leaves
them; the router's rows are normal with deviation 0.02. Logits are h_t router^T in bfloat16, where two of a token that
round to the same number are moved apart: every library takes the same experts. From seed and sizes the same logits come
anywhere. Of 128 experts at top 4, that hits about 4 with one token, 15 with 4,
51 with 16, 111 with 64 and all with 8192. Weights that are all zero, or tokens that are all alike, would send a batch
to the same four experts, and every batch over one would look too fast.

How caches are kept cold. The next call of a chain reads the experts that were read longest ago: its routing is drawn
anew and its experts are renamed. Between two uses of an expert, all others that there are have been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from jitmx import formats
from jitmx.bench import timing
from jitmx.bench.linear import random_mxfp4
from jitmx.kernels.moe.layout import ALPHA, LIMIT
from jitmx.kernels.moe.problem import ACTIVATIONS, MoeProblem
from jitmx.models import EXPERT_LAYERS, GPT_OSS_120B
from jitmx.ops.moe.experts import PackedExperts
from jitmx.ops.mx import MXTensor
from jitmx.ops.quantize import dequantize, quantize

HIDDEN_DEVIATION, ROUTER_DEVIATION = 1.0, 0.02


@dataclass(frozen=True)
class LayerShape:
    """A layer of experts.

    Attributes:
        experts, top: how many there are, and how many a row takes.
        hidden, intermediate: columns of x, and pairs of gate and up.
        activation, x_format, scale_rule, weight_on, reduction: as for `jitmx.moe`.
        bias: whether both products have one.
    """

    experts: int = GPT_OSS_120B.experts
    top: int = GPT_OSS_120B.top
    hidden: int = GPT_OSS_120B.hidden
    intermediate: int = GPT_OSS_120B.intermediate
    activation: str = "swiglu_oai"
    bias: bool = True
    x_format: str = "bf16"
    scale_rule: str = "floor"
    weight_on: str = "output"
    reduction: str = "ordered"

    @property
    def recipe(self) -> dict[str, Any]:
        """How the layer is computed, as `jitmx.moe` takes it."""
        names = ("activation", "x_format", "scale_rule", "weight_on", "reduction")
        return {name: getattr(self, name) for name in names}

    @property
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of an expert's W13 and W2."""
        rows = self.intermediate * (2 if self.activation in ACTIVATIONS else 1)
        return (rows, self.hidden), (self.hidden, self.intermediate)

    @property
    def h_format(self) -> str:
        """What h is rounded to."""
        return MoeProblem(activation=self.activation, x_format=self.x_format).h_format

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: both weights in MXFP4, and both biases."""
        values = sum(n * k for n, k in self.sizes)
        return values // 2 + values // formats.BLOCK + 2 * self.bias * sum(n for n, _ in self.sizes)

    def __str__(self) -> str:
        return f"{self.experts} x [{self.hidden}, {self.intermediate}] top {self.top}, {self.activation}"

    def flops(self, m: int) -> int:
        """Operations of both products of m rows."""
        return 2 * m * self.top * sum(n * k for n, k in self.sizes)

    def bytes(self, m: int, hit: float) -> float:
        """Bytes that m rows move at the least, whose tokens hit so many experts: those, x and y."""
        return hit * self.expert_bytes + 4 * m * self.hidden


MODELS = {name: LayerShape(**asdict(layer)) for name, layer in EXPERT_LAYERS.items()}


def spread_logits(shape: LayerShape, m: int, calls: int, seed: int = 0) -> tuple[list[torch.Tensor], float]:
    """Router logits of `calls` calls with m rows each, and how many experts a call hits on the average.

    Returns:
        bfloat16 [m, experts] each, in host memory; no two of a row are the same.
    """
    generator = torch.Generator().manual_seed(seed)
    router = torch.randn(shape.experts, shape.hidden, generator=generator) * ROUTER_DEVIATION
    oldest, found, hits = list(range(shape.experts)), [], 0
    for _ in range(calls):
        hidden = torch.randn(m, shape.hidden, generator=generator) * HIDDEN_DEVIATION
        logits = _apart(hidden @ router.T)
        hit = logits.topk(shape.top, -1).indices.unique().tolist()
        hits += len(hit)
        # Experts that this call hits take the names of those that were read longest ago.
        rest = sorted(set(range(shape.experts)) - set(hit))
        renamed = torch.empty_like(logits)
        for column, name in zip([*hit, *rest], oldest, strict=True):
            renamed[:, name] = logits[:, column]
        found.append(renamed)
        oldest = oldest[len(hit) :] + oldest[: len(hit)]
    return found, hits / calls


def _apart(logits: torch.Tensor) -> torch.Tensor:
    """Rows in bfloat16, in the order that they had; each value is less than the one above it."""
    order = logits.argsort(-1, descending=True)
    values = logits.gather(-1, order).bfloat16()
    down = torch.tensor(-torch.inf, dtype=torch.bfloat16)
    for column in range(1, values.shape[-1]):
        values[:, column] = values[:, column].minimum(values[:, column - 1].nextafter(down))
    return torch.empty_like(values).scatter_(-1, order, values)


@dataclass(frozen=True)
class RandomLayer:
    """Weights of a layer as a checkpoint holds them, interleaved gate and up rows."""

    shape: LayerShape
    w13: MXTensor
    w2: MXTensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None

    def reference(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """y of few rows in float32, from dequantized weights."""
        shape = self.shape
        x, y = _seen(x, shape, shape.x_format), torch.zeros(x.shape, device=x.device)
        for expert in ids.unique().tolist():
            if not 0 <= expert < shape.experts:
                continue
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            w13, w2 = (
                dequantize(MXTensor(w.codes[expert].contiguous(), w.scales[expert].contiguous()), torch.float32)
                for w in (self.w13, self.w2)
            )
            weight = weights[rows, slots][:, None]
            out = x[rows] @ w13.T * (weight if shape.weight_on == "input" else 1)
            h = _activated(out if self.b13 is None else out + self.b13[expert].float(), shape.activation)
            h = _seen(h, shape, shape.h_format)
            out = h @ w2.T
            out = out if self.b2 is None else out + self.b2[expert].float()
            y.index_add_(0, rows, out * (weight if shape.weight_on == "output" else 1))
        return y


def _seen(x: torch.Tensor, shape: LayerShape, x_format: str) -> torch.Tensor:
    """What a product reads of x or h, which are rounded to a format, in float32."""
    if x_format == "bf16":
        return x.float()
    if x_format == "fp8":
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / 448
        scale = scale.log2().ceil().exp2()
        return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    name = {"mxfp6": "mxfp6e2m3"}.get(x_format, x_format)
    return dequantize(quantize(x.bfloat16().contiguous(), name, scale_rule=shape.scale_rule), torch.float32)


def _activated(rows: torch.Tensor, activation: str) -> torch.Tensor:
    """h of the rows of a first product."""
    if activation == "plain":
        return rows
    if activation == "relu2":
        return rows.relu().square()
    gate, up = rows[:, 0::2], rows[:, 1::2]
    if activation == "silu":
        return up * torch.nn.functional.silu(gate)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
    return up * gate * torch.sigmoid(ALPHA * gate)


def random_layer(shape: LayerShape, device: str = "cuda") -> RandomLayer:
    """Random experts whose outputs neither grow nor vanish along a chain."""

    def bias(n: int) -> torch.Tensor | None:
        return torch.randn(shape.experts, n, device=device).bfloat16() if shape.bias else None

    return RandomLayer(
        shape,
        *(random_mxfp4(shape.experts, *size, device=device) for size in shape.sizes),
        *(bias(n) for n, _ in shape.sizes),
    )


def rotated(experts: tuple[PackedExperts, PackedExperts]) -> Iterator[tuple[PackedExperts, PackedExperts]]:
    """Both weights, and copies of them where all experts together do not exceed the L2 several times."""
    yield experts
    size = sum(weight.nbytes for weight in experts)
    for _ in range(-(-timing.L2_MULTIPLE * timing.l2_bytes() // size) - 1):
        yield experts[0].clone(), experts[1].clone()


def calls_of(shape: LayerShape, m: int, copies: int) -> int:
    """Calls a graph: through all experts and copies, and some milliseconds at the most by a guess of what one takes."""
    guess = max(shape.bytes(m, min(shape.experts, m * shape.top)) / 4e12, shape.flops(m) / 6e14, 5e-6)
    rounds = copies * -(-shape.experts // max(1, min(shape.experts, m * shape.top)))
    return max(min(rounds, 8), min(max(rounds, 32), int(2e-2 / guess)), 4)
