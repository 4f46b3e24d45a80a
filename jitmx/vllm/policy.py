"""Which layers of a model jitmx serves: what was asked for (request.py), against what stands in the way.

Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jitmx import layers
from jitmx.kernels.attention.problem import HEAD_DIMS
from jitmx.vllm.request import STOCK_KERNELS, Request

OWN_BACKEND = "CUSTOM"  # jitmx's attention among vLLM's backends
# Caches that attention takes beside those of the type of its keys.
CACHES = ("auto", "fp8", "fp8_e4m3")
_MOST_GROUP = 16
_OFFLOADED = (
    "vLLM offloads weights to the host (--cpu-offload-gb or --offload-group-size), and jitmx packs and reads them in "
    "device memory; serve without it"
)


@dataclass(frozen=True)
class Decision:
    """What a layer is served in, and why.

    Attributes:
        format: of the weights in jitmx, or of the cache, or None where the layer stays with vLLM.
        reason: in words, for the log.
        all_scales: by kernels for all scales, whatever the weights have.
    """

    format: str | None
    reason: str
    all_scales: bool = False


@dataclass(frozen=True)
class Facts:
    """What a process serves and on what, as far as it bears on who serves which layer.

    Attributes:
        target: name of the SM target, or None.
        no_target: why there is none.
        lora: adapters can be loaded. lora_experts: to the experts as well.
        tied: the head shares its weight with the embeddings, by the model's configuration.
        backend: the experts' kernels that vLLM was told to take, or "auto".
        batch_invariant: results must not depend on the rest of the batch.
        ubatches: two halves of a batch run at a time, on two streams.
        offloaded: weights of transformer blocks are kept in the host's memory.
        against_moe: what else jitmx's experts cannot do of what is asked, in words; empty where nothing.
    """

    target: str | None
    no_target: str = ""
    lora: bool = False
    lora_experts: bool = False
    tied: bool = False
    backend: str = "auto"
    batch_invariant: bool = False
    ubatches: bool = False
    offloaded: bool = False
    against_moe: str = ""


@dataclass(frozen=True)
class Layer:
    """One layer to decide on.

    Attributes:
        kind: one of `layers.KINDS`, of a draft model one of `layers.DRAFT_KINDS`.
        prefix: its name in the model.
        draft: it is of a draft model.
        tied: its weight is that of the embeddings.
        against: what else stands against it, in words; empty where nothing.
    """

    kind: str
    prefix: str = ""
    draft: bool = field(default=False, kw_only=True)
    tied: bool = field(default=False, kw_only=True)
    against: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Block:
    """One transformer block, whose norms and residual may go into its products.

    Attributes:
        served: of "moe", "qkv" and "o" those that jitmx serves, each with its format.
        router: jitmx makes the router's product, too.
        ranks: that share each product.
        n, hidden: output and input features of QKV.
        other: what else stands against it, in words; empty where nothing.
    """

    served: Mapping[str, str]
    router: bool
    ranks: int
    n: int
    hidden: int
    other: str = ""

    @property
    def whole(self) -> bool:
        """Whether jitmx serves all of it."""
        return self.served.keys() >= set(layers.OF_BLOCK)


@dataclass(frozen=True)
class Attention:
    """Attention of one layer to a paged cache.

    Attributes:
        heads, kv_heads, head_dim: of this rank.
        dtype: of q and new keys, as torch names it.
        cache: kv_cache_dtype of the layer, as vLLM names it.
        page_size: tokens of a block that the user chose, or None.
        draft: it is of a draft model.
        backend: that the user chose for it, or an empty text.
        other: what else stands against it, in words; empty where nothing.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    cache: str = "auto"
    page_size: int | None = None
    draft: bool = False
    backend: str = ""
    other: str = ""


def decide(layer: Layer, asked: Request, facts: Facts) -> Decision:
    """Who serves a layer."""
    if layer.draft:
        return _decide_draft(layer, asked, facts)
    kind, said = layer.kind, asked.said[layer.kind]
    format = asked.layers.get(kind)
    if format is None:
        return Decision(None, f"not among the layers asked for ({said})")
    against = _against(layer, asked, facts)
    if against:
        return Decision(None, against)
    reason = "by default" if said == "default" else f"by {said}"
    if kind == "moe" and asked.moe_activation != "bf16":
        which = "inputs of many rows an expert" if asked.moe_activation == "fp8" else "inputs"
        reason += f"; {which} rounded to {asked.moe_activation} by {asked.said['moe_activation']}"
    if kind in ("qkv", "o") and format == "mxfp4" and asked.linear_activation != "bf16":
        reason += f"; inputs of many tokens rounded to {asked.linear_activation} by {asked.said['linear_activation']}"
    return Decision(format, reason, asked.all_scales)


def _decide_draft(layer: Layer, asked: Request, facts: Facts) -> Decision:
    """Who serves a layer of a draft model, which adapters of the target (`facts.lora`) do not touch."""
    said, format = asked.said["draft_layers"], asked.draft.get(layer.kind)
    if not asked.draft:
        return Decision(None, "it is of a draft model")
    if format is None:
        return Decision(None, f"not among the draft model's layers asked for ({said})")
    against = against_any(facts)
    if not against and facts.offloaded:
        against = _OFFLOADED
    if not against and layer.tied:
        against = "its weight is that of the embeddings, which are looked up in bf16"
    against = against or layer.against
    return Decision(None, against) if against else Decision(format, f"by {said}", asked.all_scales)


def against_fusing(block: Block, asked: Request, kernels: Callable[[str], str]) -> str:
    """What stands against norms and residual in the products of a block, or an empty text.

    Args:
        kernels: from the format of QKV to what its kernels lack, in words; empty where nothing.
    """
    if not asked.fuse_norm:
        return f"{asked.said['fuse_norm']} asks for norms in launches of their own"
    if not block.whole:
        return f"vLLM serves {' and '.join(kind for kind in layers.OF_BLOCK if kind not in block.served)}"
    if block.ranks > 1:
        return f"products are added up over {block.ranks} ranks before the residual is"
    if not block.router:
        return "vLLM makes the router's product, or looks at what it chooses"
    return block.other or kernels(block.served["qkv"])


def decide_attention(layer: Attention, asked: Request, facts: Facts, kernels: Callable[[], str]) -> Decision:
    """Who serves the attention of a layer; the format of what jitmx serves is that of its cache.

    Args:
        kernels: what kernels lack for it on the target, in words; empty where nothing.
    """
    said, wanted = asked.said["attention"], asked.serves_attention(facts.lora)
    if layer.backend == OWN_BACKEND:
        said, wanted = f"attention_config's {OWN_BACKEND}", True
    if not wanted:
        return Decision(None, f"not asked for ({said})")
    against = "it is of a draft model" if layer.draft and not asked.draft else ""
    if not against and layer.backend not in ("", OWN_BACKEND):
        against = f"attention_config asks for {layer.backend}"
    against = against or against_any(facts) or against_attention(layer) or kernels()
    if against:
        return Decision(None, against)
    return Decision(cache_format(layer), "by default" if said == "default" else f"by {said}")


def against_attention(layer: Attention) -> str:
    """What of a layer's own stands against jitmx's attention, or an empty text."""
    if layer.head_dim not in HEAD_DIMS:
        return f"head_dim={layer.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if layer.heads % layer.kv_heads or layer.heads // layer.kv_heads > _MOST_GROUP:
        return f"{layer.heads} query heads are no multiple of {layer.kv_heads} KV heads by 1 to {_MOST_GROUP}"
    if layer.dtype not in ("bfloat16", "float16"):
        return f"{layer.dtype} is neither bfloat16 nor float16; pass --dtype bfloat16"
    if layer.cache not in CACHES and layer.cache != layer.dtype:
        return f"--kv-cache-dtype {layer.cache} is none of {', '.join(CACHES)} and {layer.dtype}, the type of new keys"
    if layer.page_size is not None and layer.page_size % 16:
        return f"--block-size {layer.page_size} is no multiple of 16"
    return layer.other


def cache_format(layer: Attention) -> str:
    """What the cache of a layer is kept in: "e4m3" or the type of its keys."""
    return "e4m3" if layer.cache.startswith("fp8") else layer.dtype


def against_greedy(asked: Request, facts: Facts) -> str:
    """What stands against jitmx taking the tokens of greedy batches, or an empty text."""
    if not asked.greedy_sampler:
        return f"{asked.said['greedy_sampler']} asks for vLLM's sampler"
    return against_any(facts)


def against_any(facts: Facts) -> str:
    """What stands against jitmx serving anything, or an empty text."""
    if facts.target is None:
        return facts.no_target or "no device of this process is known"
    if facts.batch_invariant:
        return "VLLM_BATCH_INVARIANT is set, and jitmx picks kernels by the size of the batch"
    if facts.ubatches:
        return "two halves of a batch run on two streams, and blocks of jitmx's kernels wait for one another"
    return ""


def _against(layer: Layer, asked: Request, facts: Facts) -> str:
    """What stands against jitmx serving a layer that it was asked for, or an empty text."""
    if against := against_any(facts):
        return against
    if facts.offloaded and layer.kind in layers.OF_BLOCK:
        return _OFFLOADED
    if layer.kind == "moe":
        return _against_moe(asked, facts)
    if facts.lora:
        return "LoRA is on, and adapters are added to products of bf16 weights"
    if layer.kind == "lm_head":
        if layer.tied or facts.tied:
            return "its weight is that of the embeddings, which are looked up in bf16"
        if layer.prefix != "lm_head":
            return f"its name is {layer.prefix!r}: only the model's own head, lm_head, is quantized"
    return layer.against


def _against_moe(asked: Request, facts: Facts) -> str:
    if asked.moe_kernel in STOCK_KERNELS:
        return f"{asked.said['moe_kernel']} asks for vLLM's {asked.moe_kernel}"
    if facts.backend != "auto":
        return f"kernel_config.moe_backend asks for vLLM's {facts.backend}"
    if facts.lora_experts:
        return (
            "LoRA is on for the experts, and jitmx adds no adapters inside them; --lora-target-modules without "
            "'experts' leaves them to jitmx"
        )
    return facts.against_moe
