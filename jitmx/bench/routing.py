"""What `jitmx bench routing` measures: router product, top-k and softmax by themselves, beside torch's.

How calls depend on one another. With RMSNorm a call writes its normalised rows (`normalized=True`), and the next one
reads these. Without, the ids that a call writes are the first values of the rows that the next one reads: as bfloat16
an int32 below 512 is a number below 2^-122 and a zero, so that no logit suffers, and no further kernel is in the chain.

What is guaranteed of the order. All launches are in one stream. One with `pdl` may start once every block of the launch
before it has; up to its griddepcontrol.wait it reads weights, bias and norm of its router and nothing else. That wait
ends when the launch before has completed and what it wrote is visible, and so for all launches before. What a launch
asks of a router's weights before the wait (all or most of them at few rows) may thus come while earlier calls compute,
as it may in a model while the product before the router ends; to read x, choose and write is never done by two calls at
a time. `serial_us` is the same kernel without `pdl`: nothing of a call starts before the last one has ended.

What caches hold. A model has a router a layer: 36 of 0.74 MB are less than the L2 of an H200. `us` is over copies of
all of them that exceed the L2 several times, `model_us` over one model's, which the L2 keeps where it has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from jitmx.bench import timing
from jitmx.bench.benchmark import Asked, Ceilings, Table, peer_cells, peer_headers, peer_notes
from jitmx.bench.moe_inputs import ROUTER_DEVIATION
from jitmx.bench.peers import timed
from jitmx.dispatch.choose import choose
from jitmx.errors import DriverError
from jitmx.kernels.routing.problem import RoutingProblem
from jitmx.models import GPT_OSS_120B, NAMED
from jitmx.ops.routing import Routing, route
from jitmx.runtime import card

ROWS = (1, 4, 16, 64, 512, 8192)
EPSILON = 1e-5


@dataclass(frozen=True)
class RouterShape:
    """The routers of a model.

    Attributes:
        experts, top: how many there are, and how many a row takes.
        hidden: values of a row.
        layers: routers that the model has.
    """

    experts: int = GPT_OSS_120B.experts
    top: int = GPT_OSS_120B.top
    hidden: int = GPT_OSS_120B.hidden
    layers: int = GPT_OSS_120B.layers

    @property
    def router_bytes(self) -> int:
        """Bytes of a router's weight."""
        return 2 * self.experts * self.hidden

    def bytes(self, m: int, norm: bool) -> int:
        """Bytes that a call of m rows moves at the least: router, x, ids and weights; norm and normalised rows."""
        moved = self.router_bytes + 2 * self.experts + m * (2 * self.hidden + 8 * self.top)
        return moved + norm * 2 * self.hidden * (1 + m)

    def flops(self, m: int) -> int:
        """Operations of the product of m rows."""
        return 2 * m * self.experts * self.hidden


MODELS = {name: RouterShape(model.experts, model.top, model.hidden, model.layers) for name, model in NAMED.items()}


class Router(NamedTuple):
    """Weight [experts, hidden], bias [experts] and RMSNorm's weight [hidden] before them, bfloat16."""

    weight: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor | None


class Made(NamedTuple):
    """What a call read, x [m, hidden], and what it wrote: ids and weights [m, top], normalised rows [m, hidden]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    normalized: torch.Tensor | None


class Allowed(NamedTuple):
    """How far a call may be from float64.

    Attributes:
        near: of the logit of an id that is chosen from the logit of the one that torch.topk chooses.
        weights: relative L2.
        normalized: of each value, relative.
    """

    near: float
    weights: float
    normalized: float


ALLOWED = Allowed(1e-4, 1e-4, 1.02 * 2**-8)  # sums in fp32; one rounding to bfloat16, which is 2^-8 at the most
PEERS_ALLOWED = Allowed(0.05, 0.02, 2**-6)  # logits and weights in bfloat16


class Way(Protocol):
    """A call as a library makes it."""

    def __call__(self, router: Router, x: torch.Tensor, y: torch.Tensor, first: bool) -> Made:
        """Route the rows in the flat buffer x, and write into y what the next call reads; `first` is of a chain."""


class Routers:
    """Random routers of a model, and copies of all of them, so many that they exceed the L2 several times.

    Logits of rows whose values have deviation 1 neither vanish nor overflow. The norms of all layers together leave a
    value as it is: they are powers of two, whose product is exactly 1, so that rows bear thousands of rounds. From a
    seed the same routers come anywhere.
    """

    def __init__(self, shape: RouterShape, seed: int = 0, device: str = "cuda") -> None:
        generator = torch.Generator().manual_seed(seed)
        size = shape.layers, shape.experts
        weight = torch.randn(*size, shape.hidden, generator=generator).mul_(ROUTER_DEVIATION).bfloat16().to(device)
        powers = torch.randint(0, 2, (shape.layers, shape.hidden), generator=generator)
        self.shape, self.device = shape, torch.device(device)
        self._biases = torch.randn(size, generator=generator).mul_(0.1).bfloat16().to(device)
        self._norms = torch.exp2((powers - powers.roll(1, 0)).float()).bfloat16().to(device)
        self._copies = [weight] + [weight.clone() for _ in range(sets(shape) - 1)]

    def __len__(self) -> int:
        """Routers, with the copies."""
        return len(self._copies) * self.shape.layers

    def router(self, index: int, norm: bool) -> Router:
        """One of them."""
        copy, layer = divmod(index, self.shape.layers)
        return Router(self._copies[copy][layer], self._biases[layer], self._norms[layer] if norm else None)


def sets(shape: RouterShape) -> int:
    """How often a model's routers are there, so that all of them exceed the L2 several times."""
    return -(-timing.copies_past_l2(shape.router_bytes) // shape.layers)


class Chain:
    """Calls with m rows over routers that rotate, with or without RMSNorm before them; whole rounds of a model's."""

    def __init__(self, routers: Routers, rows: int, norm: bool) -> None:
        self._routers, self._rows, self._norm = routers, rows, norm
        shape = routers.shape
        most = timing.calls_of(shape.bytes(rows, norm), len(routers), rows, shape.experts, shape.hidden)
        self._calls = max(1, most // shape.layers) * shape.layers
        self._last: tuple[Router, Made] | None = None

    def time(self, way: Way, allowed: Allowed, over: int | None = None, repeats: int = 21) -> tuple[float, float]:
        """Median seconds a call, and how far the weights of the last call timed are from float64, relative L2.

        Args:
            over: how many routers take turns; all by default.

        Raises:
            DriverError: what the last call of the graph wrote is wrong.
        """
        calls = [partial(self._call, way, index, over or len(self._routers)) for index in range(self._calls)]
        shape = self._routers.shape
        spent = timing.chain(calls, self._rows * shape.hidden, torch.bfloat16, repeats)
        assert self._last is not None
        return spent, error(*self._last, allowed)

    def _call(self, way: Way, index: int, over: int, x: torch.Tensor, y: torch.Tensor) -> None:
        router = self._routers.router(index % over, self._norm)
        self._last = router, way(router, x, y, not index)


def jitmx_way(routers: Routers, rows: int, norm: bool, knobs: Mapping[str, Any] | None = None) -> Way:
    """`jitmx.route`; its ids and weights are poisoned before the first call."""
    shape = routers.shape
    apart = torch.full((rows, shape.top), -1, dtype=torch.int32, device=routers.device)
    weights = torch.full((rows, shape.top), torch.nan, device=routers.device)

    def way(router: Router, x: torch.Tensor, y: torch.Tensor, first: bool) -> Made:
        seen = x.view(rows, shape.hidden)
        ids = apart if norm else _head(y, apart)
        normalized = y.view(rows, shape.hidden) if norm else None
        out = Routing(ids, weights, None, None, None, None, normalized)
        route(
            seen, router.weight, router.bias, k=shape.top, norm=router.norm, epsilon=EPSILON, normalized=norm, out=out,
            knobs=knobs,
        )  # fmt: skip
        return Made(seen, ids, weights, normalized)

    return way


def torch_way(routers: Routers, rows: int, norm: bool) -> Way:
    """rms_norm, linear, topk and softmax of torch, in bfloat16 as models call them."""
    shape = routers.shape
    apart = torch.full((rows, shape.top), -1, dtype=torch.int64, device=routers.device)
    values = torch.full((rows, shape.top), torch.nan, dtype=torch.bfloat16, device=routers.device)
    # rms_norm writes into no given tensor: what it returned is handed on, where a copy would be a kernel more.
    handed: list[torch.Tensor] = []

    def way(router: Router, x: torch.Tensor, y: torch.Tensor, first: bool) -> Made:
        seen = x.view(rows, shape.hidden) if first or not norm else handed[0]
        normalized = None
        if norm:
            normalized = torch.nn.functional.rms_norm(seen, (shape.hidden,), router.norm, EPSILON)
            handed[:] = [normalized]
        logits = torch.nn.functional.linear(seen if normalized is None else normalized, router.weight, router.bias)
        ids = apart if norm else _head(y, apart)
        torch.topk(logits, shape.top, -1, out=(values, ids))
        return Made(seen, ids, values.softmax(-1), normalized)

    return way


PEERS: dict[str, Callable[[Routers, int, bool], Way]] = {"torch": torch_way}


def _head(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The start of a flat bfloat16 buffer as ids of the shape and type of `like`."""
    return y[: like.nbytes // y.element_size()].view(like.dtype).view(like.shape)


def error(router: Router, made: Made, allowed: Allowed) -> float:
    """How far a call's weights are from float64, relative L2, over all its rows.

    Raises:
        DriverError: they are further away than is allowed, an id is not what torch.topk chooses of float64 logits, or
            a normalised value is further away than its rounding.
    """
    wide, wrong = made.x.double(), f"{len(made.x)} rows are routed wrongly"
    if router.norm is not None and made.normalized is not None:
        scale = (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        wanted = wide * router.norm.double() * scale
        right = (made.normalized.double() - wanted).abs() <= allowed.normalized * wanted.abs()
        if not right.all():
            raise DriverError(f"{wrong}: {int((~right).sum())} of {right.numel()} normalised values are off")
        # What is multiplied is x * norm, rounded once.
        wide = (made.x.float() * router.norm.float()).to(made.x.dtype).double() * scale
    logits = wide @ router.weight.double().T + router.bias.double()
    best, ids = logits.topk(made.ids.shape[1], -1), made.ids.long()
    experts, in_order = logits.shape[1], ids.sort(-1).values
    if not (0 <= int(ids.min()) <= int(ids.max()) < experts) or (in_order[:, 1:] == in_order[:, :-1]).any():
        raise DriverError(f"{wrong}: ids are not {ids.shape[1]} different ones of 0 to {experts - 1} in every row")
    near = float((logits.gather(-1, ids) - best.values).abs().max())
    if not near <= allowed.near:
        raise DriverError(f"{wrong}: the logit of an id is {near:.2g} from that of torch.topk's, over {allowed.near}")
    weights = best.values.softmax(-1)
    found = float((made.weights.double() - weights).norm() / weights.norm())
    if not found <= allowed.weights:
        raise DriverError(f"{wrong}: weights are {found:.2g} from float64, relative L2, over {allowed.weights}")
    return found


def bench_routing(
    shape: RouterShape,
    rows: Iterable[int],
    limits: Ceilings,
    wanted: Sequence[str] = tuple(PEERS),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows of `m, norm, kernel, us, model_us, serial_us, error, bytes, flops, memory_us, compute_us, floor_us, peers`.

    There are two for each row count, without and with RMSNorm. `us`, `model_us` and `serial_us` are said at the top of
    this file; `error` is that of the weights against float64. Floors are bytes at the read rate of this run and
    operations at its matmul rate, and the longer one: no launch is in them. `peers` has for each library that was
    wanted its `us` over the routers of `us`, None where it could not be measured, and then the `reason`.

    Args:
        wanted: names of libraries to run beside jitmx.
        seed: of the routers.

    Raises:
        DriverError: what jitmx computes here is wrong.
    """
    routers, out = Routers(shape, seed), []
    for m in rows:
        for norm in (False, True):
            chain = Chain(routers, m, norm)
            spent, off = chain.time(jitmx_way(routers, m, norm), ALLOWED)
            kept, _ = chain.time(jitmx_way(routers, m, norm), ALLOWED, over=shape.layers)
            serial, _ = chain.time(jitmx_way(routers, m, norm, {"pdl": False}), ALLOWED)
            row: dict[str, Any] = {"m": m, "norm": norm, "kernel": _kernel(shape, m, norm)}
            row |= {"us": spent * 1e6, "model_us": kept * 1e6, "serial_us": serial * 1e6, "error": off}
            row |= limits.floors(shape.bytes(m, norm), shape.flops(m))
            row["peers"] = {name: time_peer(chain, PEERS[name](routers, m, norm)) for name in wanted}
            out.append(row)
    return out


def time_peer(chain: Chain, way: Way) -> dict[str, Any]:
    """`us` a call of another library on a chain's routers, or the `reason` why there is none."""
    return timed(lambda: chain.time(way, PEERS_ALLOWED)[0])


def _kernel(shape: RouterShape, m: int, norm: bool) -> str:
    """The kernel that a call of m rows runs on."""
    problem = RoutingProblem(m, shape.experts, shape.top, shape.hidden, bias="bias_bf16", norm=norm, normalized=norm)
    chosen = choose("routing", problem, card.arch(0), multiprocessors=card.multiprocessors(0))
    return str(chosen.variant.spec.name)


def bench(asked: Asked) -> dict[str, Any]:
    """Model, seed, shape, and the rows of `bench_routing`."""
    shape = MODELS[asked.model]
    found = bench_routing(shape, asked.fields.get("m") or ROWS, asked.ceilings, asked.peers, asked.seed)
    return {"model": asked.model, "seed": asked.seed, "shape": asdict(shape), "rows": found}


def tables(payload: dict[str, Any], limits: Ceilings) -> list[Table]:
    """Times beside the floor and other libraries."""
    rows, layers = payload["rows"], payload["shape"]["layers"]
    headers = ["M", "RMSNORM", "KERNEL", "US", "FLOOR US", "OF FLOOR", "TB/S", f"{layers} ROUTERS US", "NO OVERLAP US"]
    others = peer_headers(rows)
    cells = [
        (
            row["m"], "yes" if row["norm"] else None, row["kernel"], f"{row['us']:.2f}", f"{row['floor_us']:.2f}",
            f"{row['floor_us'] / row['us']:.0%}", f"{row['bytes'] / row['us'] / 1e6:.2f}",
            f"{row['model_us']:.2f}", f"{row['serial_us']:.2f}", *peer_cells(row),
        )
        for row in rows
    ]  # fmt: skip
    title = (
        f"routers of {payload['model']} that rotate past the L2, top-k and softmax, seed {payload['seed']}; "
        f"and over {layers} only, and without launches that overlap"
    )
    return [Table((*headers, *others), cells, (headers[0], *headers[3:], *others), title, peer_notes(rows))]
