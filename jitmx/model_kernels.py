"""The kernels that layers of a served model launch: while weights are loaded, and in calls of up to so many tokens.

Whoever has kernels made before they are launched asks here: vLLM's layers as they are built and loaded, and
`jitmx warmup --model` by a model's sizes. What vLLM's layers launch follows `fused` and `Experts` as well.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jitmx import arch as arches
from jitmx import attention_kernels, kernels, settings
from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.dispatch.call import Launch
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.fp8_rows import ROW_RANGES
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.linear.layout import preferred_encoding
from jitmx.kernels.moe import MoeProblem
from jitmx.kernels.moe.choice import logits_of, reads
from jitmx.kernels.norm import NormProblem
from jitmx.kernels.norm import takes as norm_takes
from jitmx.kernels.pack import PackProblem, encoding_on
from jitmx.kernels.quantize import QuantizeProblem
from jitmx.kernels.routing.problem import FEW_TOKENS, RoutingProblem, parts
from jitmx.layers import OF_BLOCK
from jitmx.models import Model
from jitmx.registry.spec import Variant
from jitmx.rounded_inputs import activation_of, x_format_of

# Rows up to which a product with its norm is quicker than a launch of the norm's own and the product alone: measured
# on an H200, where one row gains 7 us a block, two lose what they gain, and four lose 6.
NORMED_ROWS = 1
_EXTRAS = ("norm", "residual", "swiglu")
_EVERY = 128  # tokens up to which each number is asked for; beyond, every 32nd part of a number


@dataclass(frozen=True)
class Needed(ABC):
    """What decides the kernels of a layer.

    Attributes:
        arch: SM target.
        device: CUDA device number, or None where there is none to load onto.
        rows: tokens of a call, at most.
    """

    arch: str
    device: int | None
    rows: int

    @abstractmethod
    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """Every launch of a call with m tokens, with why and how often."""

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """The variants of every launch of a call with m tokens."""
        return (launch.choice.variant for launch in self.made(m, arch, multiprocessors))

    def every(self, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """Every launch of every call."""
        for m in _rows(self.rows):
            yield from self.launches(m, arch, multiprocessors)


@dataclass(frozen=True)
class Linear(Needed):
    """A product with a packed weight.

    Attributes:
        n, k, dtype, bias, weight, encoding, scale_range: as in `LinearProblem`.
        norm, residual: it is given one, and has it fused where that is best.
        swiglu: its rows are gates and ups, likewise.
        activation: what X is rounded to, as `activation_of` takes it.
        row_range: as in `LinearProblem`.
    """

    n: int
    k: int
    dtype: str
    bias: bool
    weight: str
    encoding: str
    scale_range: str
    norm: bool = False
    residual: bool | str = False
    swiglu: bool = False
    activation: str = "none"
    row_range: str = "narrow"

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, or several where a kernel takes only some of the rows; before them the norm, where they have none."""
        problem = LinearProblem(
            m, self.n, self.k, self.dtype, self.bias, self.encoding, self.scale_range, self.weight, norm=self.norm,
            residual=self.residual, swiglu=self.swiglu, row_range=self.row_range,
        )  # fmt: skip
        problem = replace(problem, activation=activation_of(problem, self.activation, arch))
        problem = fused(problem, arch, multiprocessors)
        if self.norm and not problem.norm:
            yield from norm(self.k, self.dtype, arch, multiprocessors)
        for choice, times in choose.split("linear", problem, arch, multiprocessors=multiprocessors):
            yield from map(Launch, choose.companions(choice))
            yield Launch(choice, times)


@dataclass(frozen=True)
class Quantizer(Needed):
    """What quantizes weights while they are loaded.

    Attributes:
        format: that weights are quantized to.
        dtype: of the checkpoint's values.
    """

    format: str
    dtype: str

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, whatever the number of rows."""
        problem = QuantizeProblem("quantize", self.format, self.dtype)
        yield Launch(choose.choose("quantize", problem, arch, multiprocessors=multiprocessors))


@dataclass(frozen=True)
class Packer(Needed):
    """What packs weights while they are loaded.

    Attributes:
        format, encoding: as in `PackProblem`.
    """

    format: str
    encoding: str

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, whatever the number of rows."""
        problem = PackProblem(self.format, self.encoding)
        yield Launch(choose.choose("pack", problem, arch, multiprocessors=multiprocessors))


@dataclass(frozen=True)
class Experts(Needed):
    """A layer of experts with its routing.

    Attributes:
        experts, local: experts that are routed to, and local ones. mapped: by an expert map.
        top, hidden, intermediate, bias, encoding, scale_range, row_range: as in `MoeProblem`.
        x_format: what inputs are rounded to, as `x_format_of` takes it.
        scoring: as for `jitmx.route`.
        routing: what the routing is made from: "hidden" states, "logits", or "ids" where vLLM makes it.
        router_bias: the router, where it was taken over, has a bias.
        norm, residual: an RMSNorm of the hidden states goes before the layer, and they are added to what it makes; with
            "pair" these and the result are hi/lo residuals.
    """

    experts: int
    local: int
    mapped: bool
    top: int
    hidden: int
    intermediate: int
    bias: bool
    encoding: str
    scale_range: str
    scoring: str
    routing: str
    router_bias: bool
    x_format: str = "bf16"
    row_range: str = "narrow"
    norm: bool = False
    residual: bool | str = False

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """The routing, the lists where the experts read some, and the experts; the norm, where the routing has none."""
        if self.norm and m > NORMED_ROWS:
            yield from norm(self.hidden, "bf16", arch, multiprocessors)
        own = logits_of(m, self.mapped, "bf16", self.scoring) if self.routing == "logits" else {}
        x_format = x_format_of(m, self.local, self.top, self.x_format, arch)
        layer = MoeProblem(
            m, self.local, self.top, self.hidden, self.intermediate, bias=self.bias, encoding=self.encoding,
            scale_range=self.scale_range, x_format=x_format, residual=self.residual,
            row_range=self.row_range if x_format == "fp8" else ROW_RANGES[0],
            **own,
        ).taken(arch)  # fmt: skip
        tile, chooses = 0, False
        for choice in choose.launches("moe", layer, arch, multiprocessors=multiprocessors):
            if isinstance(choice.problem, RoutingProblem):  # of the local experts, which may be some of more
                tile = choice.problem.tile
            else:
                yield Launch(choice)
                chooses = chooses or reads(choice.variant) != "ids"
        for problem in () if chooses else self._routing(m, tile):
            yield Launch(choose.choose("routing", problem, arch, multiprocessors=multiprocessors))

    def _routing(self, m: int, tile: int) -> Iterator[RoutingProblem]:
        """The launches that choose experts for m tokens, and list the tokens of each in tiles."""
        mapped = self.mapped and tile > 0
        given = RoutingProblem(m, self.experts, self.top, 8, scoring=self.scoring)
        if self.routing == "logits" or (self.routing == "hidden" and m > FEW_TOKENS):
            yield from parts(replace(given, source="logits", mapped=mapped, tile=tile))
            return
        if self.routing == "hidden":
            bias = "bias_bf16" if self.router_bias else "none"
            own = self.norm and m <= NORMED_ROWS
            yield replace(given, h=self.hidden, bias=bias, norm=own, normalized=own)
        if tile:
            yield RoutingProblem(m, self.experts, self.top, 8, "ids", mapped=mapped, tile=tile)


@dataclass(frozen=True)
class Attention(Needed):
    """A layer's attention to a paged cache.

    Attributes:
        problem: any call of it; `batch` requests and `context` tokens of one are the most there are.
    """

    problem: AttentionProblem

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """Those of any requests with m new tokens in all."""
        for problem in attention_kernels.problems(self.problem, m):
            yield from map(Launch, attention_kernels.choices(problem, arch, multiprocessors))

    def every(self, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """Those of the most tokens: calls of fewer are among them."""
        return self.launches(self.rows, arch, multiprocessors)


def of_linear(
    arch: Arch,
    device: int | None,
    rows: int,
    n: int,
    k: int,
    format: str,
    *,
    dtype: str = "bf16",
    bias: bool,
    scale_range: str,
    norm: bool = False,
    residual: bool | str = False,
    swiglu: bool = False,
    activation: str = "none",
    row_range: str = "narrow",
) -> tuple[Quantizer, Packer, Linear]:
    """What quantizes and packs the weight of a dense layer while it is loaded, and its product; in this order.

    Args:
        format: that the weight is quantized to.
        dtype: of the checkpoint's values and of activations.
        device, rows, n, k, bias, scale_range, norm, residual, swiglu, activation, row_range: as in `Linear`.
    """
    encoding = encoding_on(arch, format)
    return (
        Quantizer(arch.name, device, 1, format, dtype),
        Packer(arch.name, device, 1, format, encoding),
        Linear(
            arch.name, device, rows, n, k, dtype, bias, format, encoding, scale_range, norm, residual, swiglu,
            activation, row_range,
        ),
    )  # fmt: skip


def of_experts(
    arch: Arch, device: int | None, rows: int, *, fused: bool = False, **layer: Any
) -> tuple[Packer, Experts]:
    """What packs the weights of a layer of experts while they are loaded, and the layer; in this order.

    Args:
        fused: norm and residual of its transformer block go into its launches.
        device, rows, layer: as in `Experts`.
    """
    encoding = preferred_encoding(arch, layer.get("x_format", "bf16"))
    return (
        Packer(arch.name, device, 1, "mxfp4", encoding),
        Experts(arch.name, device, rows, encoding=encoding, norm=fused, residual="pair" if fused else False, **layer),
    )


def cached(batch: int, context: int, page_size: int, cache: str) -> AttentionProblem:
    """Calls of a model's attention: requests and tokens of one at most, tokens of a page, and the cache's type."""
    return AttentionProblem(batch=batch, context=context, page_size=page_size, cache=cache)


def of_model(
    model: Model,
    arch: Arch,
    served: Mapping[str, str],
    *,
    tokens: int,
    ranks: int = 1,
    lora: bool = False,
    fuse_norm: bool = True,
    all_scales: bool = False,
    x_format: str = "bf16",
    activation: str = "none",
    attention: AttentionProblem | None = None,
) -> list[Needed]:
    """What the layers of a gpt-oss model need as vLLM builds them, each once.

    Args:
        served: the format of each kind of layer that jitmx serves (`layers.KINDS`).
        tokens: of a forward pass at most (max_num_batched_tokens).
        ranks: of tensor parallelism. Layers of the first rank and of the others are given.
        lora: adapters can be loaded: vLLM chooses the experts, and no norm is fused.
        fuse_norm: norms and residuals go into the products of blocks, where that gains.
        all_scales: kernels for all scales, whatever the weights have.
        x_format: what the experts' inputs are rounded to, as `x_format_of` takes it.
        activation: what those of dense layers are, as `activation_of` does.
        attention: where jitmx serves it, requests and tokens of one at most, and the cache's type and page size.

    Raises:
        InputError: sizes that the ranks do not divide.
    """
    shard = model.on_rank(ranks)
    scales = "full" if all_scales else "normal"
    fused = (
        fuse_norm and not lora and ranks == 1 and served.keys() >= set(OF_BLOCK)
        and gains(arch, *shard.qkv, served["qkv"])
    )  # fmt: skip
    # The products, their biases and what is fused; of O only the first rank adds the bias.
    dense: dict[str, tuple[set[bool], dict[str, Any]]] = {
        "qkv": ({model.bias}, {"norm": fused}),
        "o": ({model.bias, model.bias and ranks == 1}, {"residual": "pair" if fused else False}),
        "lm_head": ({False}, {}),
    }
    found: list[Needed] = []
    for kind, (biases, extras) in dense.items():
        for bias in biases if kind in served else ():
            n, k = shard.dense[kind]
            found += of_linear(
                arch, None, tokens, n, k, served[kind], bias=bias, scale_range=scales, activation=activation, **extras
            )
    if "moe" in served:
        found += of_experts(
            arch, None, tokens, fused=fused, experts=model.experts, local=model.experts, mapped=False, top=model.top,
            hidden=model.hidden, intermediate=shard.intermediate, bias=True, scale_range=scales,
            scoring="softmax_topk", routing="ids" if lora else "hidden", router_bias=not lora, x_format=x_format,
        )  # fmt: skip
    if attention is not None:
        rope: dict[str, Any] = {"rope": "neox", "rotary": model.head_dim} if fused else {}
        layer = replace(
            attention, kv_heads=shard.kv_heads, group=shard.heads // shard.kv_heads, head_dim=model.head_dim,
            sinks="sinks_bf16", **rope,
        )  # fmt: skip
        found += [Attention(arch.name, None, tokens, replace(layer, window=window)) for window in (model.window, 0)]
    return list(dict.fromkeys(found))


def gains(arch: Arch, n: int, k: int, format: str) -> bool:
    """Whether the kernel for one row of QKV has RMSNorm in it, without which fusing norms gains nothing.

    Args:
        n, k: output and input features of QKV.
        format: of its weight.
    """
    problem = LinearProblem(1, n, k, bias=True, encoding=preferred_encoding(arch), weight=format, norm=True)
    return fused(problem, arch, arch.multiprocessors).norm


def fused(problem: LinearProblem, arch: Arch, multiprocessors: int) -> LinearProblem:
    """`problem` without what the kernel that is best for the product alone has not in it.

    Another kernel, for the sake of one launch less, would cost more than that launch: what a block of few rows gains,
    it loses in the product of many.

    Raises:
        KnobError: no kernel serves the product alone.
    """
    asked = [name for name in _EXTRAS if getattr(problem, name)]
    early = problem.m <= NORMED_ROWS or problem.activation != "none"
    wanted = [name for name in asked if name != "norm" or early]
    absent: dict[str, Any] = dict.fromkeys(asked, False)
    plain = replace(problem, **absent) if asked else problem
    if not wanted:
        return plain
    family = kernels.family("linear")
    kernel = choose.choose("linear", plain, arch, multiprocessors=multiprocessors).variant.spec.name
    most = family.kernel(kernel).max_rows
    if most is not None and problem.m > most:
        return plain
    best = plain
    for name in wanted:
        fields: dict[str, Any] = {name: getattr(problem, name)}
        more = replace(best, **fields)
        if kernel in family.serving(more, arch):
            best = more
    return best


@functools.lru_cache(maxsize=64)
def variants(needed: Needed, multiprocessors: int | None = None) -> tuple[Variant, ...]:
    """Every variant that calls of a layer launch.

    Beyond 128 tokens numbers 3 % apart are asked for: two that close together, whose kernels are the same, are taken to
    have no others between them.

    Args:
        multiprocessors: of the card; by default those of the device, or of the card that the target stands for.
    """
    arch = arches.parse(needed.arch)
    count = multiprocessors or (arch.multiprocessors if needed.device is None else _multiprocessors(needed.device))
    found: dict[str, Variant] = {}
    for variant in needed.every(arch, count):
        found.setdefault(variant.name, variant)
    return tuple(found.values())


settings.when_changed(variants.cache_clear)


def norm(hidden: int, dtype: str, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
    """RMSNorm in a launch of its own; none where torch makes it."""
    if norm_takes(hidden):
        yield Launch(choose.choose("norm", NormProblem(hidden, dtype), arch, multiprocessors=multiprocessors))


def _multiprocessors(device: int) -> int:
    # Asking a device takes torch, which warm-up on a host without one does not need.
    from jitmx.runtime import card

    return card.multiprocessors(device)


def _rows(most: int) -> Iterator[int]:
    m = 0
    while m < most:
        m = min(most, m + max(1, m // _EVERY * _EVERY // 32))
        yield m
