"""`attention.append`: rotary embedding of new keys, which go with new values to the paged cache, in one launch.

It comes before `attention.prefill`, which takes all keys and values from the cache. `attention.decode` does without.

Floor: bytes of new k and v, read and written, over the memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.kernels.attention import problem as shared
from jitmx.kernels.attention.arguments import ARGUMENTS
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob

RESIDENT_WARPS = 32  # of a multiprocessor: a launch has no more, and its warps go on with further tokens


@dataclass(frozen=True)
class AppendKnobs(Knobs):
    """Compile-time choices of `attention.append`."""

    dtype: str = shared.DTYPE
    cache: str = shared.CACHE
    head_dim: int = shared.HEAD_DIM
    page_size: int = shared.PAGE_SIZE
    rope: str = shared.ROPE
    rotary: int = knob(0, low=0, high=256, doc="first values of a head that are rotated; 0: none")
    table: str = shared.TABLE
    warps: int = knob(4, choices=(1, 2, 4, 8), doc="a block, each with a token at a time")
    pdl: bool = PDL


APPEND = KernelSpec(
    family="attention",
    name="append",
    knobs=AppendKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=64 if knobs.warps > 1 else 128,
        require=(r"\bLDG\.E\..*128", r"\bSTG\.E\..*" + ("64" if knobs.cache == "e4m3" else "128")),
        forbid=(r"\bSTG\.E ",),  # words: a quarter of a vector each
    ),
    check=shared.check_shared,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


# Every branch that the variants of typical calls have not.
RARER: tuple[dict[str, Any], ...] = (
    {"dtype": "fp16", "head_dim": 96, "cache": "e4m3", "rope": "interleaved", "rotary": 96, "table": "table_fp32",
     "page_size": 48, "warps": 2, "pdl": False},
    {"head_dim": 128, "warps": 1},
)  # fmt: skip


def fixed(problem: AttentionProblem) -> dict[str, Any]:
    """Knobs that a problem decides; KnobError where it asks for attention."""
    return shared.fixed_for(AppendKnobs, problem, "append")


def launch(knobs: AppendKnobs, problem: AttentionProblem, multiprocessors: int) -> Launch:
    """A warp a new token, up to those that a device runs at once."""
    blocks = -(-problem.batch * problem.queries // knobs.warps)
    return Launch(min(blocks, multiprocessors * max(1, RESIDENT_WARPS // knobs.warps)))


def heuristic(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Few warps a block, so that few tokens lie on many multiprocessors."""
    few = problem.batch * problem.queries <= 4 * multiprocessors
    return {"pdl": "pdl" in arch.features, "warps": 1 if few else 4}
