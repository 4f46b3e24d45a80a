"""Sizes of a gpt-oss model, its `config.json`, and the tensors of its checkpoint in the Hugging Face layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jitmx import models
from jitmx.errors import InputError
from jitmx.formats import BLOCK


@dataclass(frozen=True)
class Sizes:
    """What fixes the shape of every tensor.

    Attributes:
        hidden, intermediate: features of the residual stream and of an expert; multiples of 32.
        experts, top_k: experts a layer, and experts a token.
        heads, kv_heads, head_dim: attention; `heads` is a multiple of `kv_heads`.
        window: tokens that every second layer sees, from the first on.
        positions: longest context; YaRN stretches `trained_positions` to it.
    """

    hidden: int = 128
    intermediate: int = 96
    layers: int = 2
    experts: int = 8
    top_k: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512
    window: int = 128
    positions: int = 131072
    trained_positions: int = 4096

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if getattr(self, item.name) < 1:
                raise InputError(f"{item.name}={getattr(self, item.name)} is not positive; give 1 or more")
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if value % BLOCK:
                near = max(BLOCK, round(value / BLOCK) * BLOCK)
                raise InputError(f"{name}={value} is not a multiple of {BLOCK}, an MXFP4 block; the nearest is {near}")
        if self.top_k > self.experts:
            raise InputError(f"top_k={self.top_k} experts a token, of {self.experts}; give {self.experts} at most")
        if self.heads % self.kv_heads:
            raise InputError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs")
        if self.vocab < 8:
            raise InputError(f"vocab={self.vocab} leaves no room beside the special tokens; give 8 or more")
        if self.positions < self.trained_positions:
            raise InputError(
                f"positions={self.positions} is below trained_positions={self.trained_positions}; lower the latter"
            )

    @property
    def pad_token(self) -> int:
        """Number of the padding token: the last but one."""
        return self.vocab - 2

    @property
    def end_token(self) -> int:
        """Number of the token that ends a text: the last."""
        return self.vocab - 1


def _of(model: models.Model) -> Sizes:
    return Sizes(
        model.hidden, model.intermediate, model.layers, model.experts, model.top, model.heads, model.kv_heads,
        model.head_dim, model.vocabulary, model.window,
    )  # fmt: skip


PRESETS = {
    "tiny": Sizes(),
    "small": Sizes(hidden=1024, intermediate=1024, layers=4, experts=32, heads=16, kv_heads=2, vocab=8192),
    # Two layers of gpt-oss-20b, one of each kind of attention, with a vocabulary that takes seconds to draw.
    "gpt-oss-slice": dataclasses.replace(_of(models.GPT_OSS_20B), layers=2, vocab=16384),
    **{name: _of(model) for name, model in models.NAMED.items()},
}


def config(sizes: Sizes) -> dict[str, Any]:
    """The model's `config.json`."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "experts_per_token": sizes.top_k,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(sizes.layers)],
        "sliding_window": sizes.window,
        "initial_context_length": sizes.trained_positions,
        "max_position_embeddings": sizes.positions,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": sizes.positions / sizes.trained_positions,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": sizes.trained_positions,
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
        "vocab_size": sizes.vocab,
        "eos_token_id": sizes.end_token,
        "pad_token_id": sizes.pad_token,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.9,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    }  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """How one entry of a checkpoint is drawn.

    Attributes:
        name: in the checkpoint; for `kind` "mxfp4" the stem, to which `_blocks` and `_scales` are added.
        shape: of the values (not of the bytes that hold them).
        kind: "bf16", "grid" (bf16 that may be rounded to the MXFP4 grid), "mxfp4", "ones" (bf16), or a table of tokens.
        deviation: standard deviation of the values.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    deviation: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        count = math.prod(self.shape)
        return count // 2 + count // BLOCK if self.kind == "mxfp4" else count * 2


# What a layer adds to the residual stream, of what the embedding brings: it neither drowns nor stays alone.
_GAIN = 0.5
# Spread of the logits of the router and of the output layer over a normalized token.
_ROUTER_SPREAD = 1.0
_OUTPUT_SPREAD = 3.0


def entries(sizes: Sizes) -> Iterator[Drawn]:
    """Every entry of the checkpoint, in the order of the layers.

    Norms are 1 and embeddings standard normal, so that tokens reach the routers spread out and choose experts as those
    of a trained model do; products keep their inputs' scale.
    """
    hidden, inner, experts = sizes.hidden, sizes.intermediate, sizes.experts
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    yield Drawn("model.embed_tokens.weight", (sizes.vocab, hidden), "bf16", 1.0)
    for layer in range(sizes.layers):
        stem = f"model.layers.{layer}"
        yield Drawn(f"{stem}.input_layernorm.weight", (hidden,), "ones")
        for name, rows, columns, gain in (
            ("q", q, hidden, 1.0), ("k", kv, hidden, 1.0), ("v", kv, hidden, 1.0), ("o", hidden, q, _GAIN),
        ):  # fmt: skip
            yield Drawn(f"{stem}.self_attn.{name}_proj.weight", (rows, columns), "grid", gain * columns**-0.5)
            yield Drawn(f"{stem}.self_attn.{name}_proj.bias", (rows,), "bf16", 0.1)
        yield Drawn(f"{stem}.self_attn.sinks", (sizes.heads,), "bf16", 1.0)
        yield Drawn(f"{stem}.post_attention_layernorm.weight", (hidden,), "ones")
        yield Drawn(f"{stem}.mlp.router.weight", (experts, hidden), "bf16", _ROUTER_SPREAD * hidden**-0.5)
        yield Drawn(f"{stem}.mlp.router.bias", (experts,), "bf16", 0.1)
        experts_stem = f"{stem}.mlp.experts"
        yield Drawn(f"{experts_stem}.gate_up_proj", (experts, 2 * inner, hidden), "mxfp4", hidden**-0.5)
        yield Drawn(f"{experts_stem}.gate_up_proj_bias", (experts, 2 * inner), "bf16", 0.1)
        yield Drawn(f"{experts_stem}.down_proj", (experts, hidden, inner), "mxfp4", _GAIN * inner**-0.5)
        yield Drawn(f"{experts_stem}.down_proj_bias", (experts, hidden), "bf16", 0.1)
    yield Drawn("model.norm.weight", (hidden,), "ones")
    yield Drawn("lm_head.weight", (sizes.vocab, hidden), "grid", _OUTPUT_SPREAD * hidden**-0.5)
