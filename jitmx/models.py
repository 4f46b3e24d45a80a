"""Sizes of gpt-oss models and of their Eagle3 drafts, by name or of a checkpoint; and of other models' experts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jitmx.errors import InputError
from jitmx.quoting import short

_LARGEST = 16 << 20  # bytes of a config.json
_MOST = 1 << 31  # of any size
_PADDING = 64  # vLLM pads a vocabulary to a multiple of it
_BLOCK = 32  # values that share a scale; formats.py, which has it too, imports NumPy


def _require_divided(ranks: int, heads: int, kv_heads: int, features: int, of: str) -> None:
    """Raise InputError where tensor-parallel ranks do not divide these sizes; ranks may share a KV head."""
    if ranks < 1 or heads % ranks or (kv_heads % ranks and ranks % kv_heads) or features % ranks:
        raise InputError(
            f"{ranks} ranks do not divide {heads} heads, {kv_heads} KV heads and {features} features of {of}",
            "give --ranks as vLLM's tensor_parallel_size",
        )


@dataclass(frozen=True)
class Model:
    """Sizes of a gpt-oss model, or of what one rank of tensor parallelism serves of it.

    Attributes:
        hidden: features of the residual stream.
        intermediate: features of an expert, each of a gate and an up row.
        layers: transformer blocks.
        experts, top: experts a block, and experts a token.
        heads, kv_heads, head_dim: of attention.
        vocabulary: rows of the output layer.
        window: tokens that attention sees in every second block, from the first on; in the others it sees all.
        bias: QKV and O have one.
    """

    hidden: int
    intermediate: int
    layers: int
    experts: int
    top: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    window: int
    bias: bool

    @property
    def qkv(self) -> tuple[int, int]:
        """Output and input features of the QKV product."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden

    @property
    def o(self) -> tuple[int, int]:
        """Output and input features of attention's output product."""
        return self.hidden, self.heads * self.head_dim

    @property
    def lm_head(self) -> tuple[int, int]:
        """Output and input features of the language-model head."""
        return self.vocabulary, self.hidden

    @property
    def dense(self) -> dict[str, tuple[int, int]]:
        """Output and input features of each dense product whose weight jitmx may quantize."""
        return {"qkv": self.qkv, "o": self.o, "lm_head": self.lm_head}

    def on_rank(self, ranks: int) -> Model:
        """Sizes of what each of so many tensor-parallel ranks of vLLM serves; experts' features and vocabulary padded.

        Raises:
            InputError: sizes that the ranks do not divide.
        """
        heads, kv_heads, features = self.heads, self.kv_heads, self.intermediate
        _require_divided(ranks, heads, kv_heads, features, "an expert")
        return replace(
            self,
            heads=heads // ranks,
            kv_heads=max(1, kv_heads // ranks),
            intermediate=-(-(features // ranks) // _BLOCK) * _BLOCK,
            vocabulary=-(-self.vocabulary // _PADDING) * _PADDING // ranks,
        )

    def config(self) -> dict[str, Any]:
        """The sizes by their names in a config.json."""
        return {name: getattr(self, field) for name, field in _CONFIG.items()}


_MODEL_TYPE = "gpt_oss"

# From the names in a config.json.
_CONFIG = {
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_hidden_layers": "layers",
    "num_local_experts": "experts",
    "num_experts_per_tok": "top",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocabulary",
    "sliding_window": "window",
    "attention_bias": "bias",
}

GPT_OSS_120B = Model(
    hidden=2880, intermediate=2880, layers=36, experts=128, top=4, heads=64, kv_heads=8, head_dim=64,
    vocabulary=201088, window=128, bias=True,
)  # fmt: skip
GPT_OSS_20B = replace(GPT_OSS_120B, layers=24, experts=32)
NAMED = {"gpt-oss-120b": GPT_OSS_120B, "gpt-oss-20b": GPT_OSS_20B}


@dataclass(frozen=True)
class ExpertLayer:
    """A model's layer of experts.

    Attributes:
        experts, top: how many there are, and experts a token.
        hidden, intermediate: features of the residual stream, and of an expert.
        activation: of gate and up.
        bias: both products have one.
    """

    experts: int
    top: int
    hidden: int
    intermediate: int
    activation: str = "swiglu_oai"
    bias: bool = True


# As the models' published configurations have them; layers of DeepSeek-V3 have a shared expert beside these.
EXPERT_LAYERS = {
    name: ExpertLayer(model.experts, model.top, model.hidden, model.intermediate) for name, model in NAMED.items()
} | {
    "qwen3-30b-a3b": ExpertLayer(128, 8, 2048, 768, "silu", False),
    "mixtral-8x7b": ExpertLayer(8, 2, 4096, 14336, "silu", False),
    "deepseek-v3": ExpertLayer(256, 8, 7168, 2048, "silu", False),
}


@dataclass(frozen=True)
class Draft:
    """Sizes of an Eagle3 draft model of Llama blocks, or of what one rank of tensor parallelism serves of it.

    Attributes:
        hidden, heads, kv_heads, head_dim: as in `Model`.
        intermediate: features of its MLP, each of a gate and an up row.
        vocabulary: tokens that it can propose: rows of its output layer.
        states: hidden states of the target that it reads through fc, each of `target_hidden` features (0: of `hidden`);
            0 where it has no fc.
        window: tokens that its attention sees, 0 for all.
        bias: QKV and O have one.
        layers: its blocks.
        norm_output: the next step reads normalized states.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    states: int = 3
    window: int = 0
    bias: bool = False
    layers: int = 1
    target_hidden: int = 0
    norm_output: bool = False

    def products(self, kind: str) -> list[tuple[int, int]]:
        """Output and input features of every product of a kind that differs."""
        n, k = self.dense[kind]
        if kind == "fc" and not self.states:
            return []
        return [(n, k), (n, self.hidden)] if kind == "qkv" and self.layers > 1 else [(n, k)]

    @property
    def dense(self) -> dict[str, tuple[int, int]]:
        """Output and input features of each product (`layers.DRAFT_KINDS`). QKV of the first block reads token and
        state side by side; the head is padded as vLLM pads it."""
        q, qkv = self.heads * self.head_dim, (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (qkv, 2 * self.hidden), "o": (self.hidden, q), "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "fc": (self.hidden, self.states * (self.target_hidden or self.hidden)),
            "lm_head": (-(-self.vocabulary // _PADDING) * _PADDING, self.hidden),
        }  # fmt: skip

    def on_rank(self, ranks: int) -> Draft:
        """Sizes of what each of so many tensor-parallel ranks of vLLM serves; the vocabulary padded.

        Raises:
            InputError: sizes that the ranks do not divide.
        """
        heads, kv_heads, features = self.heads, self.kv_heads, self.intermediate
        _require_divided(ranks, heads, kv_heads, features, "the draft")
        return replace(
            self, heads=heads // ranks, kv_heads=max(1, kv_heads // ranks), intermediate=features // ranks,
            vocabulary=self.dense["lm_head"][0] // ranks,
        )  # fmt: skip


_EAGLE3 = Draft(hidden=2880, intermediate=17280, heads=64, kv_heads=8, head_dim=64, vocabulary=201088)
NAMED_DRAFTS = {"gpt-oss-120b-eagle3": _EAGLE3, "gpt-oss-20b-eagle3-32k": replace(_EAGLE3, vocabulary=32000)}


def find_draft(name: str) -> Draft:
    """An Eagle3 draft by its name, or by the folder of its checkpoint.

    Raises:
        InputError: neither.
    """
    if name in NAMED_DRAFTS:
        return NAMED_DRAFTS[name]
    try:
        return _read_draft(_config_of(name))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{short(name)} is none of {', '.join(NAMED_DRAFTS)}, and no folder with the config.json of an Eagle3 "
            f"draft ({error})"
        ) from None


def _read_draft(said: dict[str, Any]) -> Draft:
    """Sizes of a draft's config.json; raises ValueError where they are none."""
    _require(said, ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"))
    eagle, kinds = said.get("eagle_config") or {}, said.get("layer_types") or ["full_attention"]
    if not isinstance(eagle, dict):
        raise ValueError(f"eagle_config is {short(eagle)}, no object")
    ids = said.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids") or [1, 2, 3]
    for name, listed in (("layer_types", kinds), ("eagle_aux_hidden_state_layer_ids", ids)):
        if not isinstance(listed, list):
            raise ValueError(f"{name} is {short(listed)}, no list")
    hidden, heads = (_size(name, said[name]) for name in ("hidden_size", "num_attention_heads"))
    sizes = {
        "hidden": hidden, "intermediate": said["intermediate_size"], "heads": heads,
        "kv_heads": said.get("num_key_value_heads", heads), "head_dim": said.get("head_dim") or hidden // heads,
        "vocabulary": said.get("draft_vocab_size") or said["vocab_size"],
        "states": said.get("num_aux_hidden_states") or len(ids), "layers": said.get("num_hidden_layers", 1),
        "target_hidden": said.get("target_hidden_size") or hidden,
    }  # fmt: skip
    if kinds[0] == "sliding_attention":
        _require(said, ("sliding_window",))
        sizes["sliding_window"] = said["sliding_window"]
    for name, value in sizes.items():
        _size(name, value)
    _require_groups(heads, sizes["kv_heads"])
    if not eagle.get("use_aux_hidden_state", True):
        sizes["states"] = 0
    return Draft(
        window=sizes.pop("sliding_window", 0), bias=bool(said.get("attention_bias", False)),
        norm_output=bool(said.get("norm_output", False)), **sizes,
    )  # fmt: skip


def find(name: str) -> Model:
    """A model by its name, or by the folder of its checkpoint.

    Raises:
        InputError: neither.
    """
    if name in NAMED:
        return NAMED[name]
    try:
        return _read(_config_of(name))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{short(name)} is none of {', '.join(NAMED)}, and no folder with the config.json of a gpt-oss model "
            f"({error})"
        ) from None


def _config_of(folder: str) -> dict[str, Any]:
    """The object in the config.json of a folder; raises OSError or ValueError where there is none."""
    from jitmx.cache import files  # which families, that take sizes from here, have no use for

    found = files.read(Path(folder) / "config.json", _LARGEST, follow=True) if folder else None
    if found is None:
        raise FileNotFoundError("there is no such file")
    try:
        said = json.loads(found[0])
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(said, dict):
        raise ValueError("it is no JSON object")
    return said


def _read(config: dict[str, Any]) -> Model:
    """Sizes of a config.json, which may lack what attention alone needs; raises ValueError where they are none."""
    said: dict[str, Any] = {"sliding_window": GPT_OSS_120B.window, "model_type": _MODEL_TYPE} | config
    if said["model_type"] != _MODEL_TYPE:
        raise ValueError(f"its model_type is {short(said['model_type'])}, not {_MODEL_TYPE!r}")
    _require(said, _CONFIG)
    for name, field in _CONFIG.items():
        if field != "bias":
            _size(name, said[name])
        elif not isinstance(said[name], bool):
            raise ValueError(f"{name} is {short(said[name])}, neither true nor false")
    _require_groups(said["num_attention_heads"], said["num_key_value_heads"])
    return Model(**{field: said[name] for name, field in _CONFIG.items()})


def _require(said: dict[str, Any], names: Iterable[str]) -> None:
    if missing := [name for name in names if name not in said]:
        raise ValueError(f"it has no {' and no '.join(missing)}")


def _size(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value < _MOST:
        raise ValueError(f"{name} is {short(value)}, no whole number from 1 to {_MOST - 1}")
    return value


def _require_groups(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}")
