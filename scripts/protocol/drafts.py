"""Synthetic Eagle3 drafts: random weights of a trained draft's scale, and a pair whose acceptance is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from jitmx import drafts
from jitmx.drafts import Draft
from jitmx.errors import InputError
from jitmx.formats import BLOCK
from scripts.protocol import checkpoint
from scripts.protocol.checkpoint import Tensors, Written
from scripts.protocol.sizes import Drawn, Sizes, config, entries

# The layers of the target in front of which the drafts known by name read its states.
AUX_LAYERS = {"eagle3-120b": (1, 17, 32), "eagle3-20b": (2, 12, 21)}


def default_layers(layers: int) -> tuple[int, ...]:
    """The layers that vLLM takes where a draft names none: near the first, in the middle, near the last."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))


def write(
    folder: Path, draft: Draft, layer_ids: tuple[int, ...], *, seed: int = 0, nested: bool = True, head: bool = True
) -> Written:
    """Write a draft with random weights into `folder`, made if need be.

    Args:
        layer_ids: of the target, in front of which the draft reads its states; as many as it reads.
        nested: they are named within eagle_config, as NVIDIA's drafts do; or at the top of config.json.
        head: it has one of its own, which it must have where its vocabulary is reduced.

    Raises:
        InputError: the folder holds files already, or sizes that do not go together.
    """
    if len(layer_ids) != draft.states or list(layer_ids) != sorted(set(layer_ids)):
        raise InputError(f"layer_ids={layer_ids} are no {draft.states} layers in order")
    if not head and draft.vocabulary != draft.target_vocabulary:
        raise InputError("a draft without a head takes the target's, and has its vocabulary")
    tensors: Tensors = {}
    for entry in _entries(draft):
        if head or entry.name != "lm_head.weight":
            tensors |= checkpoint.draw(entry, seed)
    if draft.vocabulary < draft.target_vocabulary:
        chosen = np.random.default_rng(seed).choice(draft.target_vocabulary, draft.vocabulary, replace=False)
        tensors |= reduced(np.sort(chosen), draft.target_vocabulary)
    return _save(folder, tensors, draft_config(draft, layer_ids, nested))


def reduced(tokens: np.ndarray[Any, Any], vocabulary: int) -> Tensors:
    """d2t and t2d of a draft whose tokens are these of the target's, in order."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def draft_config(draft: Draft, layer_ids: tuple[int, ...], nested: bool) -> dict[str, Any]:
    """The draft's `config.json`."""
    ids = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    found = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": draft.hidden,
        "intermediate_size": draft.intermediate,
        "num_hidden_layers": draft.layers,
        "num_attention_heads": draft.heads,
        "num_key_value_heads": draft.kv_heads,
        "head_dim": draft.head_dim,
        "hidden_act": "silu",
        "attention_bias": draft.bias,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "vocab_size": draft.target_vocabulary,
        "draft_vocab_size": draft.vocabulary,
        "tie_word_embeddings": False,
        "norm_output": draft.norm_output,
        "eagle_config": {"use_aux_hidden_state": True, **(ids if nested else {})},
    }
    return found if nested else found | ids | {"num_aux_hidden_states": draft.states}


def _entries(draft: Draft) -> Iterator[Drawn]:
    hidden, shapes = draft.hidden, draft.dense
    q, kv = draft.heads * draft.head_dim, draft.kv_heads * draft.head_dim
    yield Drawn("fc.weight", shapes["fc"], "bf16", shapes["fc"][1] ** -0.5)
    for layer in range(draft.layers):
        stem, read = ("midlayer", 2 * hidden) if layer == 0 else (f"layers.{layer}", hidden)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            yield Drawn(f"{stem}.{name}.weight", (hidden,), "ones")
        for name, n, k, gain in (
            ("self_attn.q_proj", q, read, 1.0), ("self_attn.k_proj", kv, read, 1.0),
            ("self_attn.v_proj", kv, read, 1.0), ("self_attn.o_proj", hidden, q, 0.5),
            ("mlp.gate_proj", draft.intermediate, hidden, 1.0),
            ("mlp.up_proj", draft.intermediate, hidden, 1.0), ("mlp.down_proj", hidden, draft.intermediate, 0.5),
        ):  # fmt: skip
            yield Drawn(f"{stem}.{name}.weight", (n, k), "bf16", gain * k**-0.5)
            if draft.bias and name.startswith("self_attn"):
                yield Drawn(f"{stem}.{name}.bias", (n,), "bf16", 0.1)
    yield Drawn("norm.weight", (hidden,), "ones")
    yield Drawn("lm_head.weight", (draft.vocabulary, hidden), "bf16", 3.0 * hidden**-0.5)


@dataclass(frozen=True)
class Bigram:
    """A target whose next token is the one behind the last in a ring, and a draft that knows it.

    Every weight is zero or a power of two, so that MXFP4 holds it: what is accepted says nothing of rounding, and all
    of d2t, and of which states the draft reads, in front of which layers and behind which token.

    Attributes:
        tokens: of the ring; the draft's are these. vocabulary: of the target.
        layers: of the target.
    """

    tokens: int = 320
    vocabulary: int = 384
    layers: int = 6

    def __post_init__(self) -> None:
        if not 8 <= self.tokens <= self.vocabulary - 2:
            raise InputError(f"tokens={self.tokens} are no 8 to {self.vocabulary - 2} of the vocabulary")
        if self.layers < 4:
            raise InputError(f"layers={self.layers}: three states in front of different layers take 4 or more")

    @property
    def ring(self) -> np.ndarray[Any, Any]:
        """The target's tokens in the order in which they follow one another: the last is followed by the first."""
        return np.random.default_rng(0).permutation(self.vocabulary - 2)[: self.tokens]

    @property
    def one(self) -> int:
        """The feature that every token's embedding has; behind it, one for each layer, and one that spoils a draft."""
        return self.vocabulary

    @property
    def hidden(self) -> int:
        """Features: one a token, and those behind."""
        return -(-(self.vocabulary + self.layers + 2) // 128) * 128

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """In front of which layers the draft reads states: none of the usual choice."""
        return (1, self.layers // 2, self.layers - 1)

    @property
    def sizes(self) -> Sizes:
        """Of the target."""
        return Sizes(
            hidden=self.hidden, intermediate=BLOCK, layers=self.layers, experts=4, top_k=2,
            heads=self.hidden // 64, kv_heads=self.hidden // 64, head_dim=64, vocab=self.vocabulary,
        )  # fmt: skip

    def draft(self, reduced: bool) -> Draft:
        """Of the draft."""
        return Draft(
            hidden=self.hidden, intermediate=128, layers=1, states=3, target_hidden=self.hidden,
            heads=self.hidden // 64, kv_heads=self.hidden // 64, head_dim=64,
            vocabulary=self.tokens if reduced else self.vocabulary, target_vocabulary=self.vocabulary,
        )  # fmt: skip

    def target_tensors(self) -> Tensors:
        """Of the target: blocks add a feature of their own and nothing else, and the head goes a token on."""
        found: Tensors = {}
        for entry in entries(self.sizes):
            tensors = checkpoint.draw(entry, 0)
            keep = entry.kind == "ones" or ".router." in entry.name or entry.name.endswith("sinks")
            found |= tensors if keep else {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        embed = found["model.embed_tokens.weight"]
        embed[range(self.vocabulary), range(self.vocabulary)] = 1
        embed[:, self.one] = 1
        for layer in range(self.layers):
            found[f"model.layers.{layer}.self_attn.o_proj.bias"][self.one + 1 + layer] = 1
        found["lm_head.weight"] = self._head()
        return found

    def _head(self) -> torch.Tensor:
        head, ring = torch.zeros(self.vocabulary, self.hidden, dtype=torch.bfloat16), self.ring
        head[np.roll(ring, -1), ring] = 1
        head[ring[0], self.one + 1 + self.layers] = 4
        return head

    def draft_tensors(self, reduced_vocabulary: bool, wrong: float = 0.0) -> Tensors:
        """Of the draft.

        Args:
            wrong: share of the draft's tokens that d2t takes to another than theirs: so many are rejected.
        """
        draft, hidden, words = self.draft(reduced_vocabulary), self.hidden, self.vocabulary
        kinds = _entries(draft)
        found = {e.name: (torch.ones if e.kind == "ones" else torch.zeros)(e.shape).bfloat16() for e in kinds}
        fc, spoils = found["fc.weight"], self.one + 1 + self.layers
        # The token behind the one whose states these are; and of each state whether it is in front of its layer.
        fc[np.roll(self.ring, -1), self.ring] = 1
        for place, layer in enumerate(self.layer_ids):
            own = place * hidden + self.one
            fc[spoils, own] += 64
            fc[spoils, own + layer] -= 64
            fc[spoils, own + 1 + layer] += 64
        # A token attends to those that are like it, takes their embedding, and drops the token before.
        signs = np.random.default_rng(1).choice([-1.0, 1.0], (hidden, words)).astype(np.float32)
        for name, scale in (("q", 0.25), ("k", 0.125)):
            found[f"midlayer.self_attn.{name}_proj.weight"][:, :words] = torch.from_numpy(signs) * scale
        every = range(words)
        value = found["midlayer.self_attn.v_proj.weight"]
        value[every, every] = 2
        value[every, range(hidden, hidden + words)] = -1
        found["midlayer.self_attn.o_proj.weight"][every, every] = 1
        head = self._head()
        tokens = np.sort(self.ring)
        found["lm_head.weight"] = head[tokens] if reduced_vocabulary else head
        if reduced_vocabulary:
            found |= reduced(tokens, words)
            spoiled = np.random.default_rng(2).permutation(self.tokens)[: round(wrong * self.tokens)]
            found["d2t"][spoiled] += torch.where(found["d2t"][spoiled] > 0, -1, 1)
        elif wrong:
            raise InputError("a draft of the target's own vocabulary has no d2t to be wrong")
        return found

    def write(self, target: Path, draft: Path, *, reduced_vocabulary: bool = True, wrong: float = 0.0) -> None:
        """Both checkpoints into folders, made if need be.

        Args:
            wrong: as for `draft_tensors`.

        Raises:
            InputError: a folder holds files already.
        """
        _save(target, self.target_tensors(), config(self.sizes))
        about = draft_config(self.draft(reduced_vocabulary), self.layer_ids, nested=True)
        _save(draft, self.draft_tensors(reduced_vocabulary, wrong), about | {"norm_before_residual": True})


def _save(folder: Path, tensors: Tensors, about: dict[str, Any]) -> Written:
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; name a new folder, or remove it first")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    return Written(folder, ("model.safetensors",), sum(tensor.nbytes for tensor in tensors.values()))


def named(name: str) -> tuple[Draft, tuple[int, ...]]:
    """Sizes of a draft known by name, and the layers whose states it reads."""
    return drafts.NAMED[name], AUX_LAYERS[name]
