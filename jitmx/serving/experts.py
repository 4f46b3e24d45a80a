"""A layer of experts of a served model, with its routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.dispatch.call import Launch
from jitmx.kernels.fp8_rows import ROW_RANGES
from jitmx.kernels.linear.layout import preferred_encoding
from jitmx.kernels.moe import MoeProblem
from jitmx.kernels.moe.choice import logits_of, reads
from jitmx.kernels.routing.problem import FEW_TOKENS, RoutingProblem, parts
from jitmx.serving import linear
from jitmx.serving.linear import Packer
from jitmx.serving.needed import Needed, chosen
from jitmx.serving.rounded_inputs import x_format_of

_ROUTED_ROWS = 512


def routed_rows(arch: Arch) -> int:
    """Tokens up to which a router's product and the choice are one launch; of more, the product is a library's.

    On an H200 it takes half of what cuBLAS, which splits k, and a top-k behind it take; elsewhere that is not measured.
    """
    return _ROUTED_ROWS if "wgmma" in arch.features else FEW_TOKENS


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

    families = ("moe", "routing")
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
        if self.norm and m > linear.NORMED_ROWS:
            yield from linear.norm(self.hidden, "bf16", arch, multiprocessors)
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
        for problem in () if chooses else self._routing(m, tile, routed_rows(arch)):
            yield chosen("routing", problem, arch, multiprocessors)

    def _routing(self, m: int, tile: int, routed: int) -> Iterator[RoutingProblem]:
        """The launches that choose experts for m tokens, and list the tokens of each in tiles."""
        mapped = self.mapped and tile > 0
        given = RoutingProblem(m, self.experts, self.top, 8, scoring=self.scoring)
        if self.routing == "logits" or (self.routing == "hidden" and m > routed):
            yield from parts(replace(given, source="logits", mapped=mapped, tile=tile))
            return
        if self.routing == "hidden":
            bias = "bias_bf16" if self.router_bias else "none"
            own = self.norm and m <= linear.NORMED_ROWS
            yield replace(given, h=self.hidden, bias=bias, norm=own, normalized=own)
        if tile:
            yield RoutingProblem(m, self.experts, self.top, 8, "ids", mapped=mapped, tile=tile)


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
