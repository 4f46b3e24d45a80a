"""The layers of a gpt-oss model as vLLM builds them, for warm-up on a host that serves nothing.

What decides the kernels of a layer is written down twice: here from a model's sizes, and where vLLM has the layer
(`moe.py`, `warmup.py`). A test builds models and holds both together.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitmx import arch as arches
from jitmx import formats
from jitmx.cache import files
from jitmx.errors import InputError
from jitmx.kernels.linear.layout import preferred_encoding
from jitmx.kernels.pack import encoding_on
from jitmx.quoting import short
from jitmx.registry.spec import MAX_SIZE
from jitmx.vllm import fusion, policy
from jitmx.vllm.needed import Experts, Linear, Needed, Packer, Quantizer

# Rows that vLLM pads a vocabulary to.
_PADDING = 64
_LARGEST = 16 << 20  # bytes of a config.json


@dataclass(frozen=True)
class Model:
    """Sizes of a gpt-oss model, by their names in its config.json; those of the 120b by default."""

    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    vocab_size: int = 201088
    attention_bias: bool = True


NAMED = {"gpt-oss-120b": Model(), "gpt-oss-20b": Model(num_hidden_layers=24, num_local_experts=32)}


def find(name: str) -> Model:
    """A model by its name, or by the folder of its checkpoint.

    Raises:
        InputError: neither.
    """
    if name in NAMED:
        return NAMED[name]
    try:
        found = files.read(Path(name) / "config.json", _LARGEST, follow=True)
        if found is None:
            raise FileNotFoundError("there is no such file")
        said = json.loads(found[0])
        sizes = {item.name: said[item.name] for item in dataclasses.fields(Model)}
        for member, usual in dataclasses.asdict(Model()).items():
            value = sizes[member]
            if type(value) is not type(usual) or not (isinstance(value, bool) or 1 <= value <= MAX_SIZE):
                raise ValueError(f"{member} is {short(value)}")
        return Model(**sizes)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{short(name)} is none of {', '.join(NAMED)}, and no folder with the config.json of a gpt-oss model "
            f"({error})"
        ) from None


def layers(
    model: Model, target: arches.Arch, asked: policy.Request, *, tokens: int, ranks: int = 1, lora: bool = False
) -> list[Needed]:
    """What vLLM's layers of a model ask to be warmed, each once.

    Args:
        asked: which layers jitmx is to serve, and how.
        tokens: of a forward pass at most (max_num_batched_tokens).
        ranks: of tensor parallelism. Those of the first rank and of the others are given.
        lora: adapters can be loaded, on layers other than the experts.

    Raises:
        InputError: sizes that the ranks do not divide.
    """
    heads, kv_heads, encoding = model.num_attention_heads, model.num_key_value_heads, preferred_encoding(target)
    if ranks < 1 or heads % ranks or (kv_heads % ranks and ranks % kv_heads) or model.intermediate_size % ranks:
        raise InputError(
            f"{ranks} ranks do not divide {heads} heads, {kv_heads} KV heads and {model.intermediate_size} features of "
            "an expert; give --ranks as vLLM's tensor_parallel_size"
        )
    q, kv = heads // ranks * model.head_dim, max(1, kv_heads // ranks) * model.head_dim
    served = {kind: format for kind, format in asked.layers.items() if not (lora and kind != "moe")}
    if asked.moe_kernel in policy.STOCK_KERNELS:
        served.pop("moe", None)
    in_block = (
        asked.fuse_norm and not lora and ranks == 1 and served.keys() >= set(policy.OF_BLOCK)
        and fusion.gains(target, model.hidden_size, q + 2 * kv, served["qkv"])
    )  # fmt: skip
    added = "pair" if in_block else False
    scales = "full" if asked.all_scales else "normal"

    def linear(kind: str, n: int, k: int, bias: bool, **extras: Any) -> Linear:
        return Linear(target.name, None, tokens, n, k, "bf16", bias, served[kind], encoding, scales, **extras)

    formats_of = {format for kind, format in served.items() if kind != "moe"}
    found: list[Needed] = [Quantizer(target.name, None, 1, format, "bf16") for format in sorted(formats_of)]
    found += [
        Packer(target.name, None, 1, format, encoding_on(target, format)) for format in sorted(set(served.values()))
    ]
    if "qkv" in served:
        found.append(linear("qkv", q + 2 * kv, model.hidden_size, model.attention_bias, norm=in_block))
    if "o" in served:  # the first rank adds the bias
        for bias in {model.attention_bias, model.attention_bias and ranks == 1}:
            found.append(linear("o", model.hidden_size, q, bias, residual=added))
    if "lm_head" in served:
        whole = -(-model.vocab_size // _PADDING) * _PADDING
        found.append(linear("lm_head", whole // ranks, model.hidden_size, False))
    if "moe" in served:
        shard = -(-model.intermediate_size // ranks)
        found.append(Experts(
            target.name, None, tokens, experts=model.num_local_experts, local=model.num_local_experts, mapped=False,
            top=model.num_experts_per_tok, hidden=model.hidden_size,
            intermediate=-(-shard // formats.BLOCK) * formats.BLOCK, bias=True, encoding=encoding,
            scale_range=scales, scoring="softmax_topk", routing="ids" if lora else "hidden", router_bias=not lora,
            x_format=policy.X_FORMATS[asked.moe_activation], norm=in_block, residual=added,
        ))  # fmt: skip
    return found
