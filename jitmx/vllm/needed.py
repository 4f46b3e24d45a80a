"""Every kernel that a layer launches: when it is loaded, and in calls with any number of tokens up to a most."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jitmx import arch as arches
from jitmx import settings
from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.moe import MoeProblem
from jitmx.kernels.moe.choice import logits_of, reads
from jitmx.kernels.pack import PackProblem
from jitmx.kernels.quantize import QuantizeProblem
from jitmx.kernels.routing.problem import FEW_TOKENS, RoutingProblem, parts
from jitmx.registry.spec import Variant
from jitmx.vllm import fusion

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
    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """Every launch of a call with m tokens."""


@dataclass(frozen=True)
class Linear(Needed):
    """A product with a packed weight.

    Attributes:
        n, k, dtype, bias, weight, encoding, scale_range: as in `LinearProblem`.
        norm, residual: it is given one, and has it fused where that is best.
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

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """One, or several where a kernel takes only some of the rows."""
        problem = LinearProblem(
            m, self.n, self.k, self.dtype, self.bias, self.encoding, self.scale_range, self.weight, norm=self.norm,
            residual=self.residual,
        )  # fmt: skip
        problem = fusion.fused(problem, arch, multiprocessors)
        for choice, _ in choose.split("linear", problem, arch, multiprocessors=multiprocessors):
            yield choice.variant


@dataclass(frozen=True)
class Quantizer(Needed):
    """What quantizes weights while they are loaded.

    Attributes:
        format: that weights are quantized to.
        dtype: of the checkpoint's values.
    """

    format: str
    dtype: str

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """One, whatever the number of rows."""
        problem = QuantizeProblem("quantize", self.format, self.dtype)
        yield choose.choose("quantize", problem, arch, multiprocessors=multiprocessors).variant


@dataclass(frozen=True)
class Packer(Needed):
    """What packs weights while they are loaded.

    Attributes:
        format, encoding: as in `PackProblem`.
    """

    format: str
    encoding: str

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """One, whatever the number of rows."""
        problem = PackProblem(self.format, self.encoding)
        yield choose.choose("pack", problem, arch, multiprocessors=multiprocessors).variant


@dataclass(frozen=True)
class Experts(Needed):
    """A layer of experts with its routing.

    Attributes:
        experts, local: experts that are routed to, and those whose weights are at hand. mapped: by an expert map.
        top, hidden, intermediate, bias, encoding, scale_range, x_format: as in `MoeProblem`.
        scoring: as for `jitmx.route`.
        routing: what the routing is made from: "hidden" states, "logits", or "ids" where vLLM makes it.
        router_bias: the router, where it was taken over, has a bias.
        norm, residual: an RMSNorm of the hidden states goes before the layer, and they are added to what it makes; with
            "pair" these, and what comes of it, are pairs.
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
    norm: bool = False
    residual: bool | str = False

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """The routing, the lists where the experts read some, and the experts."""
        own = logits_of(m, self.mapped, "bf16", self.scoring) if self.routing == "logits" else {}
        layer = MoeProblem(
            m, self.local, self.top, self.hidden, self.intermediate, bias=self.bias, encoding=self.encoding,
            scale_range=self.scale_range, x_format=self.x_format, residual=self.residual,
            **own,
        )  # fmt: skip
        tile, chooses = 0, False
        for choice in choose.launches("moe", layer, arch, multiprocessors=multiprocessors):
            if isinstance(choice.problem, RoutingProblem):  # of all experts at hand, while these may be some of more
                tile = choice.problem.tile
            else:
                yield choice.variant
                chooses = chooses or reads(choice.variant) != "ids"
        for problem in () if chooses else self._routing(m, tile):
            yield choose.choose("routing", problem, arch, multiprocessors=multiprocessors).variant

    def _routing(self, m: int, tile: int) -> Iterator[RoutingProblem]:
        """The launches that choose experts for m tokens, and list the tokens of each in tiles."""
        mapped = self.mapped and tile > 0
        given = RoutingProblem(m, self.experts, self.top, 8, scoring=self.scoring)
        if self.routing == "logits" or (self.routing == "hidden" and m > FEW_TOKENS):
            yield from parts(replace(given, source="logits", mapped=mapped, tile=tile))
            return
        if self.routing == "hidden":
            bias = "bias_bf16" if self.router_bias else "none"
            own = self.norm and m <= fusion.NORMED_ROWS
            yield replace(given, h=self.hidden, bias=bias, norm=own, normalized=own)
        if tile:
            yield RoutingProblem(m, self.experts, self.top, 8, "ids", mapped=mapped, tile=tile)


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
    for m in _rows(needed.rows):
        for variant in needed.launches(m, arch, count):
            found.setdefault(variant.name, variant)
    return tuple(found.values())


settings.when_changed(variants.cache_clear)


def _multiprocessors(device: int) -> int:
    # Asking a device takes torch, which warm-up on a host without one does not need.
    from jitmx.runtime import card

    return card.multiprocessors(device)


def _rows(most: int) -> Iterator[int]:
    m = 0
    while m < most:
        m = min(most, m + max(1, m // _EVERY * _EVERY // 32))
        yield m
