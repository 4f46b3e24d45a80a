"""All that the layers of a served model launch, from its sizes: what `jitmx warmup --model` makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jitmx.arch import Arch
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.layers import OF_BLOCK
from jitmx.models import Model
from jitmx.serving.attention import Attention
from jitmx.serving.experts import of_experts
from jitmx.serving.linear import gains, of_linear
from jitmx.serving.needed import Needed


def of_model(
    model: Model,
    arch: Arch,
    served: Mapping[str, str],
    *,
    tokens: int,
    ranks: int = 1,
    lora: bool = False,
    fuse_norm: bool = True,
    all_scales: bool = False,
    x_format: str = "bf16",
    activation: str = "none",
    attention: AttentionProblem | None = None,
) -> list[Needed]:
    """What the layers of a gpt-oss model need as vLLM builds them, each once.

    Args:
        served: the format of each kind of layer that jitmx serves (`layers.KINDS`).
        tokens: of a forward pass at most (max_num_batched_tokens).
        ranks: of tensor parallelism. Layers of the first rank and of the others are given.
        lora: adapters can be loaded: vLLM chooses the experts, and no norm is fused.
        fuse_norm: norms and residuals go into the products of blocks, where that gains.
        all_scales: kernels for all scales, whatever the weights have.
        x_format: what the experts' inputs are rounded to, as `x_format_of` takes it.
        activation: what those of dense layers are, as `activation_of` does.
        attention: where jitmx serves it, requests and tokens of one at most, and the cache's type and page size.

    Raises:
        InputError: sizes that the ranks do not divide.
    """
    shard = model.on_rank(ranks)
    scales = "full" if all_scales else "normal"
    fused = (
        fuse_norm and not lora and ranks == 1 and served.keys() >= set(OF_BLOCK)
        and gains(arch, *shard.qkv, served["qkv"])
    )  # fmt: skip
    # The products, their biases and what is fused; of O only the first rank adds the bias.
    dense: dict[str, tuple[set[bool], dict[str, Any]]] = {
        "qkv": ({model.bias}, {"norm": fused}),
        "o": ({model.bias, model.bias and ranks == 1}, {"residual": "pair" if fused else False}),
        "lm_head": ({False}, {}),
    }
    found: list[Needed] = []
    for kind, (biases, extras) in dense.items():
        for bias in biases if kind in served else ():
            n, k = shard.dense[kind]
            found += of_linear(
                arch, None, tokens, n, k, served[kind], bias=bias, scale_range=scales, activation=activation, **extras
            )
    if "moe" in served:
        found += of_experts(
            arch, None, tokens, fused=fused, experts=model.experts, local=model.experts, mapped=False, top=model.top,
            hidden=model.hidden, intermediate=shard.intermediate, bias=True, scale_range=scales,
            scoring="softmax_topk", routing="ids" if lora else "hidden", router_bias=not lora, x_format=x_format,
        )  # fmt: skip
    if attention is not None:
        rope: dict[str, Any] = {"rope": "neox", "rotary": model.head_dim} if fused else {}
        layer = replace(
            attention, kv_heads=shard.kv_heads, group=shard.heads // shard.kv_heads, head_dim=model.head_dim,
            sinks="sinks_bf16", **rope,
        )  # fmt: skip
        found += [Attention(arch.name, None, tokens, replace(layer, window=window)) for window in (model.window, 0)]
    return list(dict.fromkeys(found))
