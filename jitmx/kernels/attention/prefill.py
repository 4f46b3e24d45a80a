"""`attention.prefill`: many new tokens a request, whose keys and values the cache has already.

A block takes `rows` rows, tokens x the query heads of a KV head, and all keys that these see, `keys` at a time. What is
before the window or behind the last token is never read. A mixed batch is a launch of `attention.decode` and one of
this kernel, whose `least_queries` is one more than what decode takes.

Floor: 4 head_dim operations a (query head, token, key that it sees), over the rate of m16n8k16; beside it a power each,
of which a multiprocessor makes 16 a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.attention import problem as shared
from jitmx.kernels.attention.arguments import ARGUMENTS
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob

ROWS = (16, 32, 64, 128, 256)
KEYS = (16, 32, 48, 64, 80, 96, 128)
HELD = 128  # values of the rows of a lane's tiles of Q that stay in registers, as the template has it


@dataclass(frozen=True)
class PrefillKnobs(Knobs):
    """Compile-time choices of `attention.prefill`."""

    dtype: str = shared.DTYPE
    cache: str = shared.CACHE
    head_dim: int = shared.HEAD_DIM
    group: int = shared.GROUP
    page_size: int = shared.PAGE_SIZE
    sinks: str = shared.SINK
    soft_cap: bool = shared.SOFT_CAP
    windowed: bool = shared.WINDOWED
    qk: str = shared.QK
    rope: str = shared.ROPE
    rotary: int = knob(0, low=0, high=256, doc="first values of a head that are rotated; 0: none")
    table: str = shared.TABLE
    rows: int = knob(64, choices=ROWS, doc="new tokens x group that a block takes")
    tiles: int = knob(1, choices=(1, 2), doc="of 16 of these, a warp")
    keys: int = knob(64, choices=KEYS, doc="tokens of the cache that a block takes at a time")
    stages: int = knob(2, low=2, high=4, doc="of these, in shared memory")
    blocks_per_sm: int = knob(1, low=1, high=8, doc="blocks that the registers of a multiprocessor must suffice for")
    pdl: bool = PDL


def threads(knobs: PrefillKnobs) -> int:
    """Threads a block."""
    return knobs.rows // knobs.tiles * 2


def shared_bytes(knobs: PrefillKnobs) -> int:
    """Shared memory of a block, bytes, as the template lays it out."""
    stage = 2 * knobs.keys * knobs.head_dim * (1 if knobs.cache == "e4m3" else 2)
    queries = knobs.rows * knobs.head_dim * 2
    if knobs.tiles * knobs.head_dim <= HELD and queries <= stage:
        queries = 16
    return -(-(knobs.stages * stage + queries) // 128) * 128


def most_registers(knobs: PrefillKnobs) -> int:
    """Registers that a thread may take."""
    return min(255, 65536 // (threads(knobs) * knobs.blocks_per_sm) // 8 * 8)


def _registers(knobs: PrefillKnobs) -> int:
    """Registers that a thread needs: sums, logits, operands of Q, and all else, by what compilers took."""
    held = knobs.tiles * knobs.head_dim <= HELD
    each = knobs.head_dim // 2 + knobs.keys * 5 // 8 + (knobs.head_dim // 4 if held else 20)
    wide = knobs.keys * 3 // 4 if knobs.cache == "e4m3" and knobs.head_dim >= 128 else 0
    return knobs.tiles * each + wide + 66


def _check(knobs: PrefillKnobs, arch: Arch) -> None:
    shared.check_shared(knobs, arch)
    if knobs.rows < 16 * knobs.tiles:
        raise KnobError(f"rows={knobs.rows} are fewer than those of a warp of tiles={knobs.tiles}", "use tiles=1")
    need, most = _registers(knobs), most_registers(knobs)
    if need > most:
        said = f"tiles={knobs.tiles} of head_dim={knobs.head_dim} and keys={knobs.keys} take {need} registers a thread"
        raise KnobError(f"{said}, over {most}", "lower keys, tiles or blocks_per_sm")


PREFILL = KernelSpec(
    family="attention",
    name="prefill",
    knobs=PrefillKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=most_registers(knobs),
        max_spill_bytes=shared.spilled(knobs),
        require=(r"\bHMMA\.16816\.F", r"\bLDGSTS\.E\..*128", r"\bLDSM\b"),
    ),
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: ARGUMENTS,
)


# Every branch that the variants of typical calls have not.
RARER: tuple[dict[str, Any], ...] = (
    {"dtype": "fp16", "qk": "qk_fp16", "soft_cap": True, "rope": "neox", "rotary": 64, "table": "table_fp16",
     "rows": 32, "tiles": 2, "keys": 48, "group": 5},
    {"cache": "e4m3", "head_dim": 96, "sinks": "sinks_fp32", "windowed": True, "rope": "interleaved", "rotary": 96,
     "table": "table_fp32", "page_size": 48, "rows": 32, "keys": 48, "stages": 3, "group": 4, "pdl": False},
    {"head_dim": 256, "sinks": "sinks_fp16", "windowed": True, "rows": 32, "keys": 16, "group": 1},
)  # fmt: skip


def fixed(problem: AttentionProblem) -> dict[str, Any]:
    """Knobs that a problem decides; KnobError where new tokens have masks of their own."""
    if problem.mask:
        raise KnobError(f"mask={problem.mask}: attention.prefill is causal", "use attention.decode")
    return shared.fixed_for(PrefillKnobs, problem)


def launch(knobs: PrefillKnobs, problem: AttentionProblem, multiprocessors: int) -> Launch:
    """A block for each tile of rows that a request may have, of every KV head; the others end at once."""
    tiles = -(-problem.queries * problem.group // knobs.rows)
    return Launch(problem.batch * problem.kv_heads * tiles, shared_bytes(knobs))


def heuristic(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """The first of the candidates; KnobError where none fits."""
    found = candidates(problem, arch, multiprocessors)
    if not found:
        pdl = "pdl" in arch.features
        PREFILL.variant(arch, **fixed(problem), rows=64, keys=16, pdl=pdl)  # says what does not fit
    return found[0]


def candidates(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Two tiles a warp where their sums fit, which halves what is read of shared memory; fewer rows for few tokens.

    Within a window, as many keys at a time as give the fewest beyond it.
    """
    given = fixed(problem)
    blocks = problem.batch * problem.kv_heads * problem.queries * problem.group
    found = []
    for rows in (128, 64) if blocks >= 2 * 128 * multiprocessors else (64, 128):
        for tiles in (2, 1) if problem.head_dim <= 64 and rows == 128 else (1, 2):
            for keys in sorted((16, 32, 48, 64, 80, 96, 128), key=lambda keys: _waste(problem, rows, keys)):
                for stages in (2, 3):
                    knobs = {"rows": rows, "tiles": tiles, "keys": keys, "stages": stages, "blocks_per_sm": 1}
                    knobs["pdl"] = "pdl" in arch.features
                    if PREFILL.legal(arch, **given, **knobs):
                        found.append(knobs)
    return found


def _waste(problem: AttentionProblem, rows: int, keys: int) -> float:
    """Keys that a block takes beyond what it must, in a window; elsewhere, how far from 64 (32 of wide heads)."""
    usual = 64 if problem.head_dim <= 128 else 32
    if problem.window and problem.window <= 512:
        seen = problem.window + -(-rows // problem.group) + 14
        return -(-seen // keys) * (keys + 12)
    return abs(keys - usual) + (keys > usual)
