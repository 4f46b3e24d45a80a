"""`attention.wgmma`: what `attention.prefill` does, by products of warpgroups (sm_90a).

A warpgroup takes 64 rows. Q, K and V are read from shared memory, V with its columns side by side; weights come from
registers. The values of a tile of keys are weighed beside the softmax of the next one. One more warp brings keys and
values by tensor copies, so that warpgroups wait for nothing but them.

Floor: as for prefill, over the rate of wgmma; at head_dim 64 powers take as long as products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from jitmx.registry.tensor_map import TensorMap

MAPPED = ARGUMENTS.with_maps(k_map="k_cache", v_map="v_cache")
_CODES = 3  # tiles of E4M3 under way, as the template has them
_PAGES = 1 << 31  # of a map: more than a cache has


@dataclass(frozen=True)
class WgmmaKnobs(Knobs):
    """Compile-time choices of `attention.wgmma`."""

    dtype: str = shared.DTYPE
    cache: str = shared.CACHE
    head_dim: int = knob(64, choices=(64, 128), doc="values a head")
    group: int = shared.GROUP
    page_size: int = shared.PAGE_SIZE
    sinks: str = shared.SINK
    soft_cap: bool = shared.SOFT_CAP
    windowed: bool = shared.WINDOWED
    rope: str = shared.ROPE
    rotary: int = knob(0, low=0, high=256, doc="first values of a head that are rotated; 0: none")
    table: str = shared.TABLE
    rows: int = knob(192, choices=(64, 128, 192, 256), doc="new tokens x group that a block takes, 64 a warpgroup")
    keys: int = knob(64, choices=(32, 64, 128), doc="tokens of the cache that a block takes at a time")
    stages: int = knob(3, low=3, high=6, doc="of these, in shared memory")
    blocks_per_sm: int = knob(1, low=1, high=4, doc="blocks that the registers of a multiprocessor must suffice for")
    pdl: bool = PDL


def shared_bytes(knobs: WgmmaKnobs) -> int:
    """Shared memory of a block, bytes, as the template lays it out."""
    size = knobs.head_dim * 2 * (knobs.stages * 2 * knobs.keys + knobs.rows) + 16 * knobs.stages
    if knobs.cache == "e4m3":
        size += _CODES * (2 * knobs.keys * knobs.head_dim + 4 * 8)
    return -(-size // 1024) * 1024


def threads(knobs: WgmmaKnobs) -> int:
    """Threads of a block: warpgroups with rows, and one of which a warp brings keys."""
    return knobs.rows * 2 + 128


def maps(knobs: WgmmaKnobs, values: Mapping[str, Any]) -> dict[str, TensorMap]:
    """The cache as tensor copies see it, 16 tokens of a head at a time.

    Args:
        values: `kv_heads` and the strides of the cache in elements, by field.
    """
    dtype, item = ("e4m3", 1) if knobs.cache == "e4m3" else (knobs.dtype, 2)
    strides = tuple(item * int(values[name]) for name in ("token_stride", "head_stride", "block_stride"))
    sizes = knobs.head_dim, knobs.page_size, int(values["kv_heads"]), _PAGES
    box = (knobs.head_dim if item == 1 else 64), 16, 1, 1
    shown = TensorMap(dtype, sizes, box, strides, swizzle=0 if item == 1 else 128)
    return {field.name: shown for field in MAPPED.maps}


def launched_registers(knobs: WgmmaKnobs) -> int:
    """Registers that a thread is launched with."""
    return 65536 // (threads(knobs) * knobs.blocks_per_sm) // 8 * 8


def most_registers(knobs: WgmmaKnobs) -> int:
    """Registers that a thread with rows may take, once those of the others are given back."""
    groups = knobs.rows // 64
    spare = 40 if knobs.cache == "e4m3" and groups < 3 else 32  # of a thread that has none
    return min(240, (launched_registers(knobs) * (groups + 1) - spare) // groups // 8 * 8)


def _check(knobs: WgmmaKnobs, arch: Arch) -> None:
    shared.check_shared(knobs, arch)
    if "wgmma" not in arch.features:
        raise KnobError(f"attention.wgmma needs products of warpgroups; {arch} has none", "use attention.prefill")
    if knobs.cache == "e4m3" and knobs.keys < 64:
        raise KnobError(f"keys={knobs.keys} of cache=e4m3: each of four warps converts 16 tokens", "use keys=64")
    need, most = knobs.head_dim // 2 + knobs.keys * 3 // 4 + 29, most_registers(knobs)
    if need > most:
        said = f"keys={knobs.keys} of head_dim={knobs.head_dim} take {need} registers a thread, over {most}"
        raise KnobError(said, "lower keys, rows or blocks_per_sm")


WGMMA = KernelSpec(
    family="attention",
    name="wgmma",
    knobs=WgmmaKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, launched_registers(knobs)), require=(r"\bHGMMA\.64x", r"\bUTMALDG\.4D\b")
    ),
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: MAPPED,
)


# Every branch that the variants of typical calls have not.
RARER: tuple[dict[str, Any], ...] = (
    {"cache": "e4m3", "sinks": "sinks_fp32", "windowed": True, "soft_cap": True, "rope": "interleaved", "rotary": 32,
     "table": "table_fp32", "rows": 64, "stages": 3, "group": 8, "page_size": 32},
    {"dtype": "fp16", "head_dim": 128, "cache": "e4m3", "rows": 128, "stages": 3, "group": 4},
    {"dtype": "fp16", "head_dim": 128, "windowed": True, "rows": 64, "stages": 4, "group": 5, "page_size": 48,
     "pdl": False},
    {"windowed": True, "rows": 64, "stages": 3, "group": 1},
    {"windowed": True, "rows": 128, "keys": 32, "stages": 6, "blocks_per_sm": 2, "group": 8},
)  # fmt: skip


def runs_on(arch: Arch) -> bool:
    """Whether a target has products of warpgroups."""
    return "wgmma" in arch.features


def fixed(problem: AttentionProblem) -> dict[str, Any]:
    """Knobs that a problem decides; KnobError where prefill alone takes it."""
    for name, taken in (("mask", (0,)), ("qk", ("qk_fp32",)), ("head_dim", (64, 128))):
        value = getattr(problem, name)
        if value not in taken:
            said = f"attention.wgmma does not take {name}={value}, only {', '.join(map(str, taken))}"
            raise KnobError(said, "use attention.decode" if name == "mask" else "use attention.prefill")
    return shared.fixed_for(WgmmaKnobs, problem)


def launch(knobs: WgmmaKnobs, problem: AttentionProblem, multiprocessors: int) -> Launch:
    """A block for each tile of rows that a request may have, of every KV head; the others end at once."""
    tiles = -(-problem.queries * problem.group // knobs.rows)
    return Launch(problem.batch * problem.kv_heads * tiles, shared_bytes(knobs))


def heuristic(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """As many warpgroups a multiprocessor as registers suffice for; blocks of one where there are few rows, and behind
    a short window, of which large blocks read more: 8192 tokens behind 128 take 138 us on an H200 for 155."""
    offered = list(_offered(problem, arch))
    if not offered:
        WGMMA.variant(arch, **fixed(problem), rows=64, keys=64)  # says what does not fit
    small = [knobs for knobs in offered if knobs["rows"] == 64]
    if 0 < problem.window <= 256:
        smallest = [knobs for knobs in small if knobs["keys"] == 32 and knobs["stages"] == 4]
        if smallest:
            return smallest[0]
    few = launch(WgmmaKnobs(**offered[0]), problem, multiprocessors).blocks < 2 * multiprocessors
    return small[0] if few and small else offered[0]


def candidates(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs that tuning tries."""
    return list(_offered(problem, arch))


def _offered(problem: AttentionProblem, arch: Arch) -> Iterator[dict[str, Any]]:
    """Blocks that fit a multiprocessor as often as registers are shared out for, best guesses first."""
    given = fixed(problem)
    for rows, keys, blocks in (
        (256, 64, 1), (192, 128, 1), (192, 64, 1), (128, 128, 1), (128, 64, 1), (64, 64, 3), (64, 64, 2), (64, 128, 2),
        (128, 32, 2), (64, 32, 4), (256, 32, 1),
    ):  # fmt: skip
        for stages in (6, 5, 4, 3):
            knobs = {"rows": rows, "keys": keys, "stages": stages, "blocks_per_sm": blocks, "pdl": True}
            if WGMMA.legal(arch, **given, **knobs) and _fit(WgmmaKnobs(**{**given, **knobs}), arch):
                yield knobs


def _fit(knobs: WgmmaKnobs, arch: Arch) -> bool:
    """Whether shared memory holds as many blocks as registers are shared out for; each takes 1 KiB more."""
    return knobs.blocks_per_sm * (shared_bytes(knobs) + 1024) <= arch.shared_bytes + 1024
