"""What one call asks of `attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Problem
from jitmx.registry.spec import MAX_SIZE, Knobs, knob

DTYPES = ("bf16", "fp16")
CACHES = ("same", "e4m3")
SINKS = ("no_sinks", "sinks_bf16", "sinks_fp16", "sinks_fp32")
ROPES = ("no_rope", "neox", "interleaved")
TABLES = ("table_bf16", "table_fp16", "table_fp32")
MASKS = (0, 32, 64)
STEPS = ("attend", "append", "short")
ORDER = ("append", "attend", "short")  # of the launches of a call
HEAD_DIMS = (64, 96, 128, 256)

# Knobs that a problem decides, the same in every kernel.
DTYPE = knob("bf16", choices=DTYPES, doc="type of q, new k and v, and the output")
CACHE = knob("same", choices=CACHES, doc="type of the cache: that of q, or E4M3 with scales")
HEAD_DIM = knob(64, choices=HEAD_DIMS, doc="values a head")
GROUP = knob(8, low=1, high=16, doc="query heads a KV head")
PAGE_SIZE = knob(16, low=16, high=1 << 20, doc="tokens a page of the cache, a multiple of 16")
SINK = knob("no_sinks", choices=SINKS, doc="a logit a query head that joins the softmax's sum")
SOFT_CAP = knob(False, doc="logits go through a tanh")
WINDOWED = knob(False, doc="a token attends to the last ones only")
QK = knob("qk_fp32", choices=("qk_fp32", "qk_fp16"), doc="sums of q k in fp32, or in fp16 beside dtype=fp16")
ROPE = knob("no_rope", choices=ROPES, doc="rotary embedding of q, and of new k: of two halves, or of neighbours")
TABLE = knob("table_bf16", choices=TABLES, doc="type of cosines and sines")
MASK = knob(0, choices=MASKS, doc="bits a new token has for the new tokens that it attends to; 0: causal")
APPEND = knob(True, doc="new k and v are given and written to the cache; else the cache has them")

SHARED = (
    "dtype", "cache", "head_dim", "group", "page_size", "sinks", "soft_cap", "windowed", "qk", "rope", "rotary",
    "table", "mask", "append",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionProblem(Problem):
    """Attention of new tokens to a paged cache and to themselves.

    `batch` counts requests, `context` is the longest that they may have, tokens (with a window, at most that);
    `queries` the most new tokens of a request.
    """

    batch: int = knob(1, low=1, high=MAX_SIZE, doc="requests")
    context: int = knob(4096, low=1, high=MAX_SIZE, doc="tokens of a request, with the new ones, at most")
    queries: int = knob(1, low=1, high=MAX_SIZE, doc="new tokens of a request, at most")
    kv_heads: int = knob(8, low=1, high=1 << 16, doc="heads of k and v")
    dtype: str = DTYPE
    cache: str = CACHE
    head_dim: int = HEAD_DIM
    group: int = GROUP
    page_size: int = PAGE_SIZE
    sinks: str = SINK
    soft_cap: bool = SOFT_CAP
    window: int = knob(0, low=0, high=MAX_SIZE, doc="tokens that a token attends to, itself included; 0: all")
    qk: str = QK
    rope: str = ROPE
    rotary: int = knob(0, low=0, high=256, doc="first values of a head that are rotated; 0: all, where rope is")
    table: str = TABLE
    mask: int = MASK
    append: bool = APPEND
    step: str = knob("attend", choices=STEPS, doc="all, the cache write alone, or short requests of a mixed batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_page(self.page_size)

    def require_call(self) -> None:
        """Raise KnobError where a request has fewer tokens than new ones, or a mask fewer bits."""
        require_places(self.context, self.queries, self.mask)

    @property
    def windowed(self) -> bool:
        """Whether tokens attend to the last ones only."""
        return self.window > 0

    @property
    def overridable(self) -> bool:
        """Whether knobs in the environment are meant for it: not of the launches beside that of attention."""
        return self.step == "attend"

    @property
    def fixed(self) -> dict[str, object]:
        """Knobs that it decides, in every kernel."""
        found = {name: getattr(self, name) for name in SHARED}
        if self.rope == "no_rope":
            return found | {"rotary": 0, "table": "table_bf16"}
        return found | {"rotary": self.rotary or self.head_dim}


def require_places(context: int, queries: int, mask: int) -> None:
    """Raise KnobError where requests have fewer tokens than new ones, or a mask fewer bits than these."""
    if queries > context:
        raise KnobError(
            f"context={context} is less than its queries={queries}, and counts new tokens too",
            f"give context={queries} or more",
        )
    if 0 < mask < queries:
        enough = next((bits for bits in MASKS if bits >= queries), None)
        remedy = f"give queries={MASKS[-1]} or fewer" if enough is None else f"use mask={enough}"
        raise KnobError(f"mask={mask} bits are fewer than queries={queries}", remedy)


def short_queries(group: int) -> int:
    """New tokens up to which a request of a mixed batch is left to `attention.decode`: those of its narrowest tile."""
    return max(1, 16 // group)


def fixed_for(knobs: type[Knobs], problem: AttentionProblem, step: str = "attend") -> dict[str, Any]:
    """Those of a kernel's knobs that a problem decides; KnobError where it asks for another step."""
    if problem.step != step:
        raise KnobError(f"the kernel makes step={step}, not step={problem.step}")
    return {name: value for name, value in problem.fixed.items() if name in knobs.__dataclass_fields__}


def with_defaults(knobs: object) -> dict[str, Any]:
    """Knobs by name, with those that every other kernel has at what they mean where a kernel has none."""
    absent: dict[str, Any] = {"group": 1, "cache": "same", "sinks": "no_sinks", "qk": "qk_fp32", "mask": 0}
    absent |= {"soft_cap": False, "windowed": False, "append": False}
    return {**absent, **vars(knobs)}


def spilled(knobs: Any) -> int:
    """Bytes a thread that may go to local memory: addresses, before the loop, of the widest heads in E4M3."""
    return 64 if knobs.head_dim == 256 and knobs.cache == "e4m3" else 0


def _check_page(size: int) -> None:
    if size % 16:
        nearest = max(16, (size + 8) // 16 * 16)
        raise KnobError(f"page_size={size} is not a multiple of 16", f"the nearest legal value is {nearest}")


def check_shared(knobs: object, arch: Arch) -> None:
    """Raise KnobError where knobs that every kernel has do not fit each other or the target."""
    values = with_defaults(knobs)
    dtype, qk, head_dim, rope, rotary = (values[name] for name in ("dtype", "qk", "head_dim", "rope", "rotary"))
    if qk == "qk_fp16" and dtype != "fp16":
        raise KnobError(
            "qk=qk_fp16 sums q k in fp16, whose range ends at 65504; bf16 values go beyond it",
            "use qk=qk_fp32, or dtype=fp16",
        )
    _check_page(values["page_size"])
    if (rope == "no_rope") != (rotary == 0):
        raise KnobError(f"rope={rope} with rotary={rotary}", "use rotary=0 with no_rope, and rotary > 0 else")
    if rope == "no_rope" and values["table"] != "table_bf16":
        raise KnobError(f"table={values['table']} with rope=no_rope reads no table", "use table=table_bf16")
    step = 16 if rope == "neox" else 8
    if rotary % step or rotary > head_dim:
        said = f"rotary={rotary} is not a multiple of {step} up to head_dim={head_dim}"
        raise KnobError(said, f"the nearest legal value is {max(step, min(head_dim, rotary) // step * step)}")
    if values["mask"] and not values["append"]:
        raise KnobError("mask is for new tokens, and append=False has none", "use append=True")
    if values["cache"] == "e4m3" and "cvt_e4m3" not in arch.features:
        raise KnobError(f"cache=e4m3 needs sm_89 or newer; {arch} converts no E4M3", "use cache=same")
