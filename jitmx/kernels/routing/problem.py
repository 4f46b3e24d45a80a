"""What one call of `jitmx.route` or `jitmx.group_by_expert` asks for, and choices that its kernels have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.errors import KnobError
from jitmx.kernels import Problem
from jitmx.kernels.routing import knobs as shared
from jitmx.models import GPT_OSS_120B
from jitmx.registry.spec import MAX_SIZE, knob

MAX_EXPERTS, MAX_K = shared.MAX_EXPERTS, shared.MAX_K
SCORING, BIASES = shared.SCORINGS, shared.BIASES
FEW_TOKENS = 64  # choice and lists are one launch
DTYPES = ("bf16", "fp16")
LOGIT_DTYPES = ("bf16", "fp16", "fp32")
TILES = (0, 8, 16, 32, 48, 64, 128, 192, 320)
SOURCES = ("hidden", "logits", "ids")

MAPPED: Any = knob(False, doc="an expert map gives local ids, or -1 for experts that are elsewhere")
TILE: Any = knob(0, choices=TILES, doc="rows of a tile of the schedule, at most; 0 makes no lists")


@dataclass(frozen=True)
class RoutingProblem(Problem):
    """One call of `jitmx.route` or `jitmx.group_by_expert`."""

    m: int = knob(1, low=0, high=shared.MAX_TOKENS, doc="tokens")
    experts: int = shared.EXPERTS
    k: int = shared.K
    h: int = knob(GPT_OSS_120B.hidden, low=8, high=MAX_SIZE, doc="values of a hidden state, a multiple of 8")
    source: str = knob("hidden", choices=SOURCES, doc="what is given: hidden states, logits, or ids")
    dtype: str = knob("bf16", choices=LOGIT_DTYPES, doc="type of the hidden states or logits")
    bias: str = shared.BIAS
    norm: bool = knob(False, doc="RMSNorm of the hidden states")
    normalized: bool = knob(False, doc="the hidden states behind that RMSNorm are written as well")
    scoring: str = shared.SCORING
    mapped: bool = MAPPED
    tile: int = TILE

    def __post_init__(self) -> None:
        super().__post_init__()
        shared.check_k(self)
        if self.h % 8:
            raise KnobError(
                f"{self.owner}.h={self.h} is not a multiple of 8, the values of a 16-byte load",
                f"the nearest legal value is {max(8, (self.h + 4) // 8 * 8)}",
            )

    def require_call(self) -> None:
        """Raise KnobError for a norm where no hidden states are given."""
        for name in ("norm", "normalized"):
            if getattr(self, name) and self.source != "hidden":
                said = f"{self.owner}.{name}=True is of hidden states, and source={self.source!r} gives none"
                raise KnobError(said, "leave it out, or use source='hidden'")


def parts(problem: RoutingProblem) -> list[RoutingProblem]:
    """The problems of a call's launches: one where tokens are few, lists apart where they are many."""
    fields = problem.as_dict()
    if problem.source == "ids":
        return [problem]
    if not problem.tile:
        return [problem] if problem.m else []
    without = {"norm": False, "normalized": False, "bias": "none", "dtype": "bf16"}
    sort = RoutingProblem(**fields | {"source": "ids", "h": 8} | without)
    if not problem.m:
        return [sort]
    if problem.m <= FEW_TOKENS:
        return [problem]
    return [RoutingProblem(**fields | {"tile": 0, "mapped": False}), sort]


def capacity(m: int, k: int, local: int, tile: int) -> int:
    """The most tiles of at most `tile` rows that m tokens of k experts each can need, however they are routed."""
    pairs = m * k
    return (pairs + min(local, pairs) * (tile - 1)) // tile
