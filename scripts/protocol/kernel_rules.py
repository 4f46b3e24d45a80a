"""Which kernels a configuration must run, and which it must not, as data.

A family is a set of kernels, told by the names that a profiler gives them. A rule holds for some configurations and
bounds how often a family runs: so many times a layer and so many a forward pass. Names cannot tell the products of QKV
from those of O, counts can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from scripts.protocol.configurations import Configuration
from scripts.protocol.profiles import Profile
from scripts.protocol.report import Report

# Families of kernels by regular expressions over demangled names, tried in this order; the first that is found counts.
FAMILIES: dict[str, tuple[str, ...]] = {
    "jitmx moe": (r"^jitmx_moe_",),
    "jitmx linear": (r"^jitmx_linear_",),
    "jitmx routing": (r"^jitmx_routing_",),
    "jitmx norm": (r"^jitmx_norm_",),
    "jitmx quantize": (r"^jitmx_(de)?quantize$",),
    "jitmx attention": (r"^jitmx_attention_",),
    "jitmx other": (r"^jitmx_",),
    "adding norm": (r"\bfused_add_rms_norm_kernel\b", r"^triton_\w*rsqrt"),
    # FlashAttention 2 to 4 with what prepares and merges, Triton, FlashInfer with TensorRT's and XQA, FlexAttention.
    "vllm attention": (
        r"\bflash::", r"flash_?attn", r"\bflash_fwd", r"^kernel_(unified|paged)_attention", r"^reduce_segments",
        r"^_fwd_kernel(_stage\d|_alibi)?$", r"\bflashinfer::\w*(KVCache|MergeStates)", r"^fmhaSm\d", r"\bkernel_mha\b",
        r"^triton_tem_fused_\w*flex_attention",
    ),
    "cache write": (r"\breshape_and_cache",),
    # A compiled graph looks cosines and sines up in the launch that rotates.
    "rotary": (r"\brotary_embedding_kernel\b", r"^triton_\w*index_select"),
    "triton moe": (r"^_(p_)?matmul_ogs",),
    "marlin moe": (r"\bmarlin_moe_wna16::Marlin<",),
    "marlin linear": (r"(^|[^\w:])marlin::Marlin<",),
    "humming": (r"(^|[^\w:])humming<", r"^_Z7humming"),
    # cuBLAS and cuBLASLt: Hopper and later, the older tensor-core kernels, and products with one row.
    "cublas": (
        r"^nvjet_", r"gemvx::kernel<", r"\bgemv[A-Z2]\w*_kernel", r"^(sm\d+_xmma|ampere|turing|volta)_\w*gemm",
        r"cutlass_\d+_\w*gemm", r"^(void )?cublasLt::(?!splitKreduce)",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """A bound on how often a family runs in a forward pass.

    Attributes:
        family: a key of `FAMILIES`.
        why: what a breach means.
        served: layers that jitmx must serve for the rule to hold; "qkv:mxfp4" says in which format.
        stock: layers that vLLM must serve for the rule to hold.
        backends: vLLM's MoE backends for which it holds; empty: any.
        activations: formats of the experts' inputs for which it holds; empty: any.
        attends: whether attention must be jitmx's (True) or vLLM's (False) for the rule to hold; None: either.
        phase: a regular expression for what ran: "^decode "; empty: anything.
        least: (a layer, a pass) launches at least, or None.
        most: (a layer, a pass) launches at most, or None. (0, 0): must not be seen.
        only: a regular expression that narrows the family.
        beside: kernels, by regular expressions, that must be in a profile for the rule to hold.
    """

    family: str
    why: str
    served: tuple[str, ...] = ()
    stock: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    attends: bool | None = None
    phase: str = ""
    least: tuple[int, int] | None = None
    most: tuple[int, int] | None = None
    only: str = ""
    beside: tuple[str, ...] = ()

    def holds_for(self, configuration: Configuration) -> bool:
        """Whether the rule says anything about this configuration."""
        return (
            set(self.served) <= configuration.served | configuration.formats
            and not set(self.stock) & configuration.served
            and (not self.backends or configuration.backend in self.backends)
            and (not self.activations or configuration.activation in self.activations)
            and self.attends in (None, configuration.attends)
        )


_BACKENDS = {"triton": "triton moe", "marlin": "marlin moe", "humming": "humming"}
_DENSE = ("qkv", "o", "lm_head")
_NEVER = (0, 0)
_ATTENDING = r"_(decode|prefill|wgmma)$"
_FUSED = r"^jitmx_routing_route", r"^jitmx_linear_stream"

RULES: tuple[Rule, ...] = (
    Rule("jitmx moe", "jitmx serves the experts", served=("moe",), least=(1, 0)),
    *(Rule(name, "jitmx serves the experts, not vLLM", served=("moe",), most=_NEVER) for name in _BACKENDS.values()),
    Rule(
        "jitmx moe", "the experts take rounded inputs", served=("moe",), activations=("mxfp8", "mxfp4", "fp6"),
        least=(1, 0), only=r"^jitmx_moe_scaled",
    ),
    Rule(
        "jitmx moe", "experts of many rows take inputs in E4M3", served=("moe",), activations=("fp8",),
        phase=r"^prefill ([2-9]|\d\d)\d{3}$", least=(1, 0), only=r"^jitmx_moe_(scaled|fused_fp8|wgmma_fp8)",
    ),
    Rule(
        "jitmx moe", "experts of few rows take inputs in bf16", served=("moe",), activations=("fp8",),
        phase="^decode 1$", most=_NEVER, only=r"^jitmx_moe_(scaled|fused_fp8|wgmma_fp8)",
    ),
    Rule(
        "jitmx moe", "the experts take bf16 inputs", served=("moe",), activations=("bf16",), most=_NEVER,
        only=r"^jitmx_moe_(scaled|fused_fp8|wgmma_fp8)",
    ),
    Rule("jitmx moe", "vLLM serves the experts, not jitmx", stock=("moe",), most=_NEVER),
    *(
        Rule(family, f"{name} serves the experts", stock=("moe",), backends=(name,), least=(1, 0))
        for name, family in _BACKENDS.items()
    ),
    *(
        Rule(other, f"{name} serves the experts, not {other}", stock=("moe",), backends=(name,), most=_NEVER)
        for name, family in _BACKENDS.items()
        for other in _BACKENDS.values()
        if other != family
    ),
    Rule("jitmx linear", "vLLM serves every dense layer", stock=_DENSE, most=_NEVER),
    Rule("jitmx linear", "jitmx serves QKV", served=("qkv",), least=(1, 0)),
    Rule("jitmx linear", "jitmx serves O", served=("o",), least=(1, 0)),
    Rule("jitmx linear", "jitmx serves QKV and O, a launch each", served=("qkv", "o"), least=(2, 0)),
    Rule("jitmx linear", "jitmx serves the output layer", served=("lm_head",), least=(0, 1)),
    Rule("jitmx linear", "jitmx serves every dense layer", served=_DENSE, least=(2, 1)),
    # What cuBLAS may still do is the router.
    Rule("cublas", "no dense layer is left to cuBLAS but the router", served=_DENSE, most=(1, 0)),
    # vLLM's final norm is left; of more than one token a block's norms are launches too, which add nothing. Targets
    # without linear.stream, which has the norm in it, keep vLLM's blocks.
    Rule(
        "adding norm", "a block's products add the residual", served=("moe", "qkv:mxfp4", "o"), most=(0, 1),
        beside=_FUSED,
    ),
    Rule("marlin linear", "no dense layer is quantized by vLLM", most=_NEVER),
    Rule("jitmx attention", "vLLM serves attention", attends=False, most=_NEVER),
    Rule("jitmx attention", "jitmx serves every layer's attention", attends=True, least=(1, 0), only=_ATTENDING),
    Rule(
        "jitmx attention", "attention and cache write of a decode are one launch", attends=True, phase="^decode ",
        least=(1, 0), most=(1, 0), only=r"_decode$",
    ),
    *(
        # attention.decode takes 128 rows, tokens times the query heads of a KV head.
        Rule("jitmx attention", why, attends=True, phase=r"^prefill \d{3,}$", least=(1, 0), only=only)
        for why, only in (
            ("a kernel for many new tokens attends", r"_(prefill|wgmma)$"),
            ("a launch before it writes the cache", r"_append$"),
        )
    ),
    Rule("vllm attention", "jitmx serves attention, not vLLM", attends=True, most=_NEVER),
    Rule("cache write", "jitmx's attention writes the cache", attends=True, most=_NEVER),
    # In blocks with fused norms; what tells them is what tells of them above.
    Rule(
        "rotary", "the launch of attention rotates q and k", served=("moe", "qkv:mxfp4", "o"), attends=True,
        most=_NEVER, beside=_FUSED,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What one rule said of one profile: launches seen, and how many there must be at least and at most."""

    rule: Rule
    launches: int
    low: int | None
    high: int | None

    @property
    def passed(self) -> bool:
        """Whether the rule holds."""
        return (self.low is None or self.launches >= self.low) and (self.high is None or self.launches <= self.high)

    def words(self) -> str:
        """One line: what was wanted, and what was seen."""
        bounds = [f"at least {self.low}"] if self.low is not None else []
        bounds += [f"at most {self.high}"] if self.high is not None else []
        what = self.rule.family + (f" ({self.rule.only})" if self.rule.only else "")
        return f"{what}: {self.launches} launches, wanted {' and '.join(bounds)}; {self.rule.why}"


def family(name: str) -> str | None:
    """The family of a kernel, by its demangled name; None for what no rule speaks of."""
    return next((key for key, patterns in FAMILIES.items() if any(re.search(p, name) for p in patterns)), None)


def judge(
    launches: Mapping[str, int], configuration: Configuration, *, layers: int, passes: int, phase: str = ""
) -> list[Finding]:
    """What every rule for `configuration` says of a profile.

    Args:
        launches: demangled kernel name to number of launches.
        layers: transformer layers of the model.
        passes: forward passes in the profile.
        phase: what ran, as a profile says it.
    """
    findings = []
    for rule in RULES:
        if not rule.holds_for(configuration) or not re.search(rule.phase, phase):
            continue
        if not all(any(re.search(pattern, name) for name in launches) for pattern in rule.beside):
            continue
        seen = sum(
            count for name, count in launches.items() if family(name) == rule.family and re.search(rule.only, name)
        )
        low = None if rule.least is None else (rule.least[0] * layers + rule.least[1]) * passes
        # An engine that schedules ahead may start a pass more than its tokens need.
        high = None if rule.most is None else (rule.most[0] * layers + rule.most[1]) * (passes + 1)
        findings.append(Finding(rule, seen, low, high))
    return findings


def check(
    report: Report,
    profile: Profile,
    configuration: Configuration,
    *,
    passes: int | None = None,
    layers: int | None = None,
) -> None:
    """Add a check to `report` for every rule, and what of the profile no rule speaks of to its results.

    Args:
        passes, layers: over what the profile says of itself. Where neither knows, a bound means seen at all.
    """
    passes, layers = passes or profile.passes or 1, layers or profile.layers or 1
    for finding in judge(profile.launches, configuration, layers=layers, passes=passes, phase=profile.phase):
        report.check(f"{configuration.name}, {profile.phase}", finding.passed, finding.words())
    total = sum(kernel.us for kernel in profile.kernels) or 1.0
    shares: dict[str, float] = {}
    for kernel in profile.kernels:
        key = family(kernel.name) or "other"
        shares[key] = shares.get(key, 0.0) + kernel.us / total
    kept = report.results.setdefault("time_by_family", {}).setdefault(configuration.name, {})
    kept[profile.phase] = {key: round(share, 4) for key, share in sorted(shares.items(), key=lambda item: -item[1])}
