"""Sizes of Eagle3 draft models for gpt-oss: those that are known by name, and those of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jitmx.errors import InputError
from jitmx.quoting import short

_LARGEST = 16 << 20  # bytes of a config.json
_PADDING = 64  # vLLM pads a vocabulary to a multiple of it


@dataclass(frozen=True)
class Draft:
    """Sizes of an Eagle3 draft of Llama layers, or of what one rank of tensor parallelism serves of it.

    Attributes:
        hidden: features of its residual stream. intermediate: of its feed-forward layer.
        layers: its own. states: of the target that fc reads, each of `target_hidden` features; 0: it has no fc.
        heads, kv_heads, head_dim: of attention. window: tokens that attention sees; 0: all.
        vocabulary: rows of its head. target_vocabulary: tokens of the target, which d2t maps to where these are more.
        bias: QKV and O have one. norm_output: the next step reads normalised states.
    """

    hidden: int
    intermediate: int
    layers: int
    states: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    target_vocabulary: int
    window: int = 0
    bias: bool = False
    norm_output: bool = False

    @property
    def dense(self) -> dict[str, tuple[int, int]]:
        """Output and input features of each product; QKV is that of the first layer, which also reads embeddings."""
        heads = self.heads * self.head_dim
        return {
            "qkv": (heads + 2 * self.kv_heads * self.head_dim, 2 * self.hidden),
            "o": (self.hidden, heads),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "fc": (self.hidden, self.states * self.target_hidden),
            "lm_head": (-(-self.vocabulary // _PADDING) * _PADDING, self.hidden),
        }

    def products(self, kind: str) -> list[tuple[int, int]]:
        """Output and input features of every product of a kind that differs."""
        n, k = self.dense[kind]
        if kind == "fc" and not self.states:
            return []
        return [(n, k), (n, self.hidden)] if kind == "qkv" and self.layers > 1 else [(n, k)]

    def on_rank(self, ranks: int) -> Draft:
        """Sizes of what each of so many tensor-parallel ranks of vLLM serves.

        Raises:
            InputError: sizes that the ranks do not divide.
        """
        heads, kv_heads = self.heads, self.kv_heads
        if ranks < 1 or heads % ranks or (kv_heads % ranks and ranks % kv_heads) or self.intermediate % ranks:
            raise InputError(
                f"{ranks} ranks do not divide {heads} heads, {kv_heads} KV heads and {self.intermediate} features of "
                "the draft",
                "give --ranks as vLLM's tensor_parallel_size",
            )
        return replace(
            self, heads=heads // ranks, kv_heads=max(1, kv_heads // ranks), intermediate=self.intermediate // ranks,
            vocabulary=self.dense["lm_head"][0] // ranks,
        )  # fmt: skip


# NVIDIA's for gpt-oss-120b, and SpecForge's for gpt-oss-20b, whose vocabulary is reduced.
EAGLE3_120B = Draft(
    hidden=2880, intermediate=17280, layers=1, states=3, target_hidden=2880, heads=64, kv_heads=8, head_dim=64,
    vocabulary=201088, target_vocabulary=201088,
)  # fmt: skip
EAGLE3_20B = replace(EAGLE3_120B, vocabulary=32000)
NAMED = {"eagle3-120b": EAGLE3_120B, "eagle3-20b": EAGLE3_20B}


def find(name: str) -> Draft:
    """A draft by its name, or by the folder of its checkpoint.

    Raises:
        InputError: neither.
    """
    from jitmx.cache import files

    if name in NAMED:
        return NAMED[name]
    try:
        found = files.read(Path(name) / "config.json", _LARGEST, follow=True)
        if found is None:
            raise FileNotFoundError("there is no such file")
        return of_config(json.loads(found[0]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{short(name)} is none of {', '.join(NAMED)}, and no folder with the config.json of an Eagle3 draft "
            f"({error})"
        ) from None


def of_config(said: dict[str, Any]) -> Draft:
    """Sizes of a config.json.

    Raises:
        ValueError, KeyError, TypeError: it is none of such a draft.
    """
    eagle = said.get("eagle_config") or {}
    hidden, heads, vocabulary = said["hidden_size"], said["num_attention_heads"], said["vocab_size"]
    states = said.get("num_aux_hidden_states") or len(eagle.get("eagle_aux_hidden_state_layer_ids") or ()) or 3
    types = said.get("layer_types") or []
    found = Draft(
        hidden=hidden, intermediate=said["intermediate_size"], layers=said.get("num_hidden_layers", 1),
        states=states if eagle.get("use_aux_hidden_state", True) else 0,
        target_hidden=said.get("target_hidden_size") or hidden, heads=heads,
        kv_heads=said.get("num_key_value_heads") or heads, head_dim=said.get("head_dim") or hidden // heads,
        vocabulary=said.get("draft_vocab_size") or vocabulary, target_vocabulary=vocabulary,
        window=(said.get("sliding_window") or 0) if types[:1] == ["sliding_attention"] else 0,
        bias=bool(said.get("attention_bias", False)), norm_output=bool(said.get("norm_output", False)),
    )  # fmt: skip
    for name, value in vars(found).items():
        low = 0 if name in ("states", "window") else 1
        if not isinstance(value, bool) and not (type(value) is int and low <= value < 1 << 31):
            raise ValueError(f"{name} is {short(value)}")
    return found
