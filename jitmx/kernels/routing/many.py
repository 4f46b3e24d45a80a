"""`routing.many`: logits of many tokens in bf16 by tiles in shared memory, and the choice of the largest; no lists."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.routing import form
from jitmx.kernels.routing import knobs as shared
from jitmx.kernels.routing.arguments import ARGUMENTS
from jitmx.kernels.routing.problem import RoutingProblem
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob

_TOKENS, _SPLITS = (32, 64, 128, 256), (1, 2, 4, 8)
_WARPS = (1, 2, 4, 8)
_STARTED = 100_000  # bytes that a block could have moved in the time that it takes to start, choose and end


@dataclass(frozen=True)
class ManyKnobs(Knobs):
    """Compile-time choices of `routing.many`."""

    experts: int = shared.EXPERTS
    k: int = shared.K
    bias: str = shared.BIAS
    scoring: str = shared.SCORING
    tokens: int = knob(128, choices=_TOKENS, doc="tokens of a tile")
    splits: int = knob(1, choices=_SPLITS, doc="blocks, a cluster, that share a tile, each with a slice of h")
    warps_t: int = knob(4, choices=_WARPS, doc="warps that share the tokens")
    warps_e: int = knob(2, choices=_WARPS, doc="warps that share the experts")
    stages: int = knob(3, low=2, high=8, doc="stages of the ring, 64 h each")
    pdl: bool = PDL


def _padded(knobs: ManyKnobs) -> int:
    """Experts that are multiplied with: whole tiles of 16 for each warp."""
    return -(-knobs.experts // (16 * knobs.warps_e)) * 16 * knobs.warps_e


def threads(knobs: ManyKnobs) -> int:
    """Threads a block."""
    return knobs.warps_t * knobs.warps_e * 32


def shared_bytes(knobs: ManyKnobs) -> int:
    """Dynamic shared memory of a launch: the ring, in whose place the logits come."""
    experts = _padded(knobs)
    return max(knobs.stages * (knobs.tokens + experts) * 128, knobs.tokens * (experts + 8) * 4)


def _registers(knobs: ManyKnobs) -> int:
    """Registers that sums, fragments, a bias loaded early, addresses of copies and the rest take, generously."""
    sums = knobs.tokens * _padded(knobs) // threads(knobs)
    copies = -(-knobs.tokens * 8 // threads(knobs)) + -(-_padded(knobs) * 8 // threads(knobs))
    return sums + knobs.tokens // knobs.warps_t // 4 + 4 + min(4, -(-knobs.experts // 32)) + 4 * copies + 48


def _check(knobs: ManyKnobs, arch: Arch) -> None:
    shared.check_k(knobs)
    shared.check_cluster(knobs.splits, "splits=1", arch)
    if knobs.tokens % (16 * knobs.warps_t):
        raise KnobError(
            f"tokens={knobs.tokens} is not a multiple of 16 for each of warps_t={knobs.warps_t}",
            f"the nearest legal value is warps_t={knobs.tokens // 16}",
        )
    room = min(255, 65536 // max(threads(knobs), 1) // 8 * 8)
    if threads(knobs) > 1024 or _registers(knobs) > room:
        raise KnobError(
            f"tokens={knobs.tokens} by {knobs.experts} experts on {knobs.warps_t} x "
            f"{knobs.warps_e} warps take {_registers(knobs)} registers a thread of {room}",
            "use fewer tokens or another number of warps",
        )


SPEC = KernelSpec(
    family="routing",
    name="many",
    knobs=ManyKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, 65536 // threads(knobs)),
        require=(r"HMMA\.16816\.F32\.BF16", r"\bLDSM\.16\.M88\.4\b", r"\bLDGSTS\.E\..*128"),
    ),
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: ManyKnobs, m: int, local: int) -> Launch:
    """Blocks for each tile of tokens, whatever experts are local: lists are made apart."""
    return Launch(-(-m // knobs.tokens) * knobs.splits, shared_bytes(knobs), knobs.splits)


def tuned(experts: int, m: int, h: int, arch: Arch, multiprocessors: int) -> dict[str, Any] | None:
    """The tile by which the block that is last has to move the fewest bytes; None where no tile fits the target."""
    pdl, found = "pdl" in arch.features, []
    splits = _SPLITS if shared.takes_clusters(arch) else _SPLITS[:1]
    for tokens, split in itertools.product(_TOKENS, splits):
        for knobs in _shapes(experts, tokens, split, arch):
            # Clusters of eight leave some multiprocessors of a group idle.
            tiles, fits = -(-m // tokens), max(1, multiprocessors // (split if split < 8 else 12))
            waves = -(-tiles // fits)
            moved = waves * ((tokens + _padded(knobs)) * h * 2 // split + _STARTED)
            # Then eight warps a block, and few reads of shared memory a product.
            rows, columns = tokens // knobs.warps_t // 16, _padded(knobs) // knobs.warps_e // 8
            warps = abs(knobs.warps_t * knobs.warps_e - 8)
            found.append((moved, warps, (rows + columns / 2) / (rows * columns), tokens, knobs))
    if not found:
        return None
    best = min(found, key=lambda item: item[:4])[4]
    names = ("tokens", "splits", "warps_t", "warps_e", "stages")
    return {name: getattr(best, name) for name in names} | {"pdl": pdl}


def _shapes(experts: int, tokens: int, splits: int, arch: Arch) -> list[ManyKnobs]:
    """Legal blocks of a tile, with as many stages as fit, six at most."""
    found = []
    for warps_t, warps_e in itertools.product(_WARPS, _WARPS):
        base = ManyKnobs(experts=experts, k=1, tokens=tokens, splits=splits, warps_t=warps_t, warps_e=warps_e)
        deep = (dataclasses.replace(base, stages=stages) for stages in (6, 5, 4, 3, 2))
        knobs = next((one for one in deep if shared_bytes(one) <= arch.shared_bytes), None)
        try:
            if knobs is not None:
                _check(knobs, arch)
                found.append(knobs)
        except KnobError:
            continue
    return found


def _fixed(problem: RoutingProblem) -> dict[str, Any]:
    form.require_source("many", problem, "hidden")
    for name, plain in (("dtype", "bf16"), ("norm", False), ("normalized", False), ("tile", 0)):
        if getattr(problem, name) != plain:
            raise KnobError(f"routing.many takes no {name}={getattr(problem, name)}", "use routing.route")
    return problem.pick("experts", "k", "bias", "scoring")


def _heuristic(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    knobs = tuned(problem.experts, problem.m, problem.h, arch, multiprocessors)
    if knobs is None:
        raise KnobError(f"no tile of {problem.experts} experts fits {arch} in routing.many", "use routing.route")
    return knobs


_RARER: tuple[dict[str, Any], ...] = (
    {"experts": 32, "scoring": "softmax_all", "tokens": 64, "warps_t": 2, "warps_e": 2, "bias": "bias_fp16"},
    {"experts": 32, "bias": "bias_fp32", "tokens": 64, "warps_t": 2, "warps_e": 2, "splits": 2, "pdl": False},
    {"experts": 32, "tokens": 64, "warps_t": 2, "warps_e": 1, "splits": 4},
)  # fmt: skip

KERNEL = form.kernel(SPEC, launch, _fixed, _heuristic, _RARER)
