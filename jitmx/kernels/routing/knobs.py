"""Knobs that the kernels of `routing` share."""

from __future__ import annotations

from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.models import GPT_OSS_120B
from jitmx.registry.spec import knob

MAX_EXPERTS, MAX_K = 512, 8
MAX_TOKENS = 1 << 27  # eight slots each, and the padding of their lists, are counted in an int
SCORINGS = ("softmax_topk", "softmax_all")
BIASES = ("none", "bias_bf16", "bias_fp16", "bias_fp32")

EXPERTS: Any = knob(GPT_OSS_120B.experts, low=1, high=MAX_EXPERTS, doc="experts")
K: Any = knob(GPT_OSS_120B.top, low=1, high=MAX_K, doc="experts a token")
BIAS: Any = knob("none", choices=BIASES, doc="bias of the router, and its type")
SCORING: Any = knob("softmax_topk", choices=SCORINGS, doc="softmax over the chosen, or over all experts")


def check_k(fields: Any) -> None:
    """Raise KnobError where more experts a token are asked for than there are."""
    if fields.k > fields.experts:
        most = fields.experts
        raise KnobError(f"{fields.owner}.k={fields.k} is over experts={most}", f"the nearest legal value is {most}")


def check_cluster(blocks: int, remedy: str, arch: Arch) -> None:
    """Raise KnobError where several blocks share work and the target has no clusters."""
    if blocks > 1 and "cluster" not in arch.features:
        raise KnobError(f"a cluster of {blocks} blocks needs sm_90 or newer", f"on {arch} use {remedy}")


def takes_clusters(arch: Arch) -> bool:
    """Whether heuristics use clusters: on sm_12x nobody has seen them gain anything."""
    return "cluster" in arch.features and arch.major < 12
