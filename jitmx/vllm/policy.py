"""Which layers of a model jitmx serves: what was asked for, against what stands in the way. Knows nothing of vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jitmx import layers, settings
from jitmx.errors import SettingError
from jitmx.kernels.attention.problem import HEAD_DIMS
from jitmx.settings import Settings

# Keys of --additional-config '{"jitmx": {...}}', and the setting whose place each takes.
KEYS = {name: name for name in ("mxfp4_layers", "moe_kernel", "moe_activation", "linear_activation", "fuse_norm",
                                "all_scales", "attention", "greedy_sampler", "draft_layers")}  # fmt: skip
FLAGS = ("fuse_norm", "all_scales", "attention", "greedy_sampler")  # these may also be a bool or a number
# Attention that nobody asked for or against is jitmx's where it serves all of these.
ATTENTION_BESIDE = frozenset(("moe", "qkv", "o"))
DEFAULT = {"moe": "mxfp4"}
STOCK_KERNELS = ("marlin", "triton")
# What the experts' inputs are rounded to, and what `jitmx.moe` calls it.
X_FORMATS = {"bf16": "bf16", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "fp6": "mxfp6", "fp8": "fp8"}

# Caches that attention takes beside those of the type of its keys.
OWN_BACKEND = "CUSTOM"  # jitmx's attention among vLLM's backends
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
class Request:
    """What the user asked for.

    Attributes:
        layers: the format of each layer asked for.
        draft: the same of the draft model.
        said: by kind of layer, and for what else there is, where that was said.
        moe_kernel, moe_activation, linear_activation, fuse_norm, all_scales, attention, greedy_sampler: as
            JITMX_MOE_KERNEL, JITMX_MOE_ACTIVATION, JITMX_LINEAR_ACTIVATION, JITMX_FUSE_NORM, JITMX_ALL_SCALES,
            JITMX_ATTENTION and JITMX_GREEDY_SAMPLER.
    """

    layers: Mapping[str, str]
    said: Mapping[str, str]
    moe_kernel: str = "auto"
    moe_activation: str = "bf16"
    linear_activation: str = "bf16"
    fuse_norm: bool = True
    all_scales: bool = False
    attention: bool | None = None
    greedy_sampler: bool = True
    draft: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether greedy batches are to be jitmx's: where it is to serve anything else, too."""
        return self.greedy_sampler and bool(self.layers or self.attention)

    def serves_attention(self, lora: bool = False) -> bool:
        """Whether attention is to be jitmx's where nothing stands against it: as asked, by default beside the layers in
        `ATTENTION_BESIDE`, which adapters (`lora`) may leave to vLLM."""
        return self.served(lora).keys() >= ATTENTION_BESIDE if self.attention is None else self.attention

    def attends(self, head_dim: int, lora: bool = False) -> bool:
        """Whether attention of heads of so many values is to be jitmx's; by default, only where it can be."""
        return self.serves_attention(lora) and (bool(self.attention) or head_dim in HEAD_DIMS)

    @property
    def x_format(self) -> str:
        """What the experts' inputs are rounded to, as `jitmx.moe` calls it."""
        return X_FORMATS[self.moe_activation]

    @property
    def activation(self) -> str:
        """What the inputs of dense layers are rounded to, as `jitmx.linear` calls it, or "none"."""
        return "none" if self.linear_activation == "bf16" else self.linear_activation

    def served(self, lora: bool = False) -> dict[str, str]:
        """The formats of the layers that jitmx serves where nothing but adapters (`lora`) stands against it."""
        stock = self.moe_kernel in STOCK_KERNELS
        return {kind: format for kind, format in self.layers.items() if not (stock if kind == "moe" else lora)}


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


def request(options: Any = None, read: Settings | None = None, environ: Mapping[str, str] | None = None) -> Request:
    """What was asked for: by `options` where they say it, else by the environment.

    Args:
        options: the value of "jitmx" in vLLM's additional_config, a mapping with keys of `KEYS`, or None.
        read: the settings; by default those of `environ`, and without it those of this process.
        environ: the environment that says where a setting came from.

    Raises:
        SettingError: an unknown key, layer, format or kernel.
    """
    if read is None:
        read = settings.current() if environ is None else settings.read(environ)
    own = _checked(options)
    said = {name: settings.origin(name, environ) for name in KEYS if name != "mxfp4_layers"}
    said.update({name: f"additional_config's {name}" for name in own if name in said})
    if "mxfp4_layers" in own:
        chosen, where = dict(own["mxfp4_layers"]), "additional_config's mxfp4_layers"
        said.update(dict.fromkeys(layers.KINDS, where))
    else:
        asked = read.mxfp4_layers
        chosen = dict(DEFAULT if asked is None else asked)
        where = settings.origin("mxfp4_layers", environ)
        said.update(dict.fromkeys(layers.KINDS, where))
        for kind in layers.KINDS[1:]:
            switch = getattr(read, f"quantize_{kind}")
            if switch is None:
                continue
            said[kind] = f"{settings.origin(f'quantize_{kind}', environ)}={int(switch)}"
            if switch:
                chosen.setdefault(kind, layers.FORMATS[kind][0])
            else:
                chosen.pop(kind, None)
    kernel = own.get("moe_kernel", read.moe_kernel)
    activation = own.get("moe_activation", read.moe_activation)
    flags = {name: own.get(name, getattr(read, name)) for name in FLAGS}
    draft = dict(own.get("draft_layers", read.draft_layers))
    dense = own.get("linear_activation", read.linear_activation)
    return Request(chosen, said, kernel, activation, dense, draft=draft, **flags)


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


def _checked(options: Any) -> dict[str, Any]:
    """The options as the settings of the same name are read."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise SettingError(
            f"additional_config's jitmx is {options!r}, and must be an object with keys of {', '.join(KEYS)}"
        )
    by_field = {setting.field: setting for setting in settings.TABLE}
    found: dict[str, Any] = {}
    for key, value in options.items():
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(KEYS)}"
            raise SettingError(f"additional_config's jitmx has no {key!r}", hint)
        setting = by_field[KEYS[key]]
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) and key.endswith("_layers") else value
        text = str(int(text)) if isinstance(text, int) and key in FLAGS else text
        if not isinstance(text, str):
            raise SettingError(f"additional_config's jitmx.{key} is {value!r}, and must be a text: {setting.choices}")
        try:
            found[key] = setting.parse(text)
        except ValueError as error:
            why = f" ({error})" if isinstance(error.__cause__, Exception) else ""
            raise SettingError(f"additional_config's jitmx.{key}={value!r} is not {setting.choices}{why}") from None
    return found
