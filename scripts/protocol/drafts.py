"""Sizes of Eagle3 draft models of gpt-oss, their `config.json`, and checkpoints of them with random weights.

The names and shapes are those that vLLM's `LlamaForCausalLMEagle3` loads. A draft has no embedding: it looks tokens up
in the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jitmx import models
from jitmx.errors import InputError
from jitmx.formats import BLOCK
from scripts.protocol import checkpoint
from scripts.protocol.sizes import Drawn, Sizes

# Hidden states of the target that a draft reads, each of another boundary between its blocks.
AUX_STATES = 3
# Spread of the logits over a normalized token, and what a layer adds to the stream, as for a target's.
_OUTPUT_SPREAD = 3.0
_GAIN = 0.5


@dataclass(frozen=True)
class DraftSizes:
    """What fixes the shape of every tensor of an Eagle3 draft of one layer.

    Attributes:
        hidden: features of its stream, and of the target's; a multiple of 32.
        intermediate: features of its MLP; a multiple of 32.
        heads, kv_heads, head_dim: of its attention; `heads` is a multiple of `kv_heads`.
        vocab: of the target, whose tokens it reads.
        draft_vocab: tokens that it can propose, `vocab` at most. Fewer have a table d2t, from its tokens to the
            target's, and t2d, which of the target's it has.
        positions: longest context.
        aux_layers: boundaries of the target's blocks whose states it reads, 0 before the first; ascending. Where empty,
            config.json has none, and an engine takes its own: in vLLM 2, half of the layers, and all but 3.
        nested: config.json has aux_layers within eagle_config, as NVIDIA's has them; else beside the sizes.
    """

    hidden: int = 128
    intermediate: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512
    draft_vocab: int = 512
    positions: int = 131072
    aux_layers: tuple[int, ...] = ()
    nested: bool = True

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name not in ("aux_layers", "nested") and value < 1:
                raise InputError(f"{item.name}={value} is not positive; give 1 or more")
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if value % BLOCK:
                near = max(BLOCK, round(value / BLOCK) * BLOCK)
                raise InputError(f"{name}={value} is not a multiple of {BLOCK}, an MXFP4 block; the nearest is {near}")
        if self.heads % self.kv_heads:
            raise InputError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs")
        if self.draft_vocab > self.vocab:
            raise InputError(f"draft_vocab={self.draft_vocab} tokens of {self.vocab}; give {self.vocab} at most")
        if any(low >= high for low, high in zip((-1, *self.aux_layers), self.aux_layers, strict=False)):
            raise InputError(f"aux_layers={self.aux_layers} do not ascend from 0 or more; give each boundary once")

    @property
    def reduced(self) -> bool:
        """Whether it proposes only some of the target's tokens."""
        return self.draft_vocab < self.vocab

    @property
    def aux_states(self) -> int:
        """Hidden states of the target that it reads."""
        return len(self.aux_layers) or AUX_STATES


def _of(draft: models.Draft, **changes: Any) -> DraftSizes:
    return DraftSizes(
        draft.hidden, draft.intermediate, draft.heads, draft.kv_heads, draft.head_dim, models.GPT_OSS_120B.vocabulary,
        draft.vocabulary, **changes,
    )  # fmt: skip


# NVIDIA's for the 120b reads these states; SpecForge's for the 20b does not say which.
_AUX = {"gpt-oss-120b-eagle3": (1, 17, 32), "gpt-oss-20b-eagle3-32k": ()}
_NAMED = {name: _of(draft, aux_layers=_AUX[name]) for name, draft in models.NAMED_DRAFTS.items()}
PRESETS = {
    "tiny": DraftSizes(),
    "tiny-reduced": DraftSizes(draft_vocab=320),
    # Of the target of that name: its hidden size and vocabulary, and a fourth of the layer.
    "gpt-oss-slice": dataclasses.replace(
        _NAMED["gpt-oss-120b-eagle3"], intermediate=4320, vocab=16384, draft_vocab=4096, aux_layers=(0, 1, 2)
    ),
    **_NAMED,
}


def of_target(target: Sizes, **changes: Any) -> DraftSizes:
    """A draft whose sizes are those of a target where `changes` says no other."""
    own = {name: getattr(target, name) for name in ("hidden", "heads", "kv_heads", "head_dim", "vocab", "positions")}
    return DraftSizes(**{**own, "intermediate": 2 * target.intermediate, "draft_vocab": target.vocab} | changes)


def config(sizes: DraftSizes) -> dict[str, Any]:
    """The draft's `config.json`."""
    ids = list(sizes.aux_layers)
    own = {"use_aux_hidden_state": True} | ({"eagle_aux_hidden_state_layer_ids": ids} if ids and sizes.nested else {})
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": sizes.vocab,
        "draft_vocab_size": sizes.draft_vocab,
        "tie_word_embeddings": False,
        "use_cache": True,
        "eagle_config": own,
        **({"eagle_aux_hidden_state_layer_ids": ids} if ids and not sizes.nested else {}),
    }


def entries(sizes: DraftSizes, head: bool = True) -> Iterator[Drawn]:
    """Every entry of the checkpoint that is drawn.

    Args:
        head: it has one of its own.
    """
    hidden, inner = sizes.hidden, sizes.intermediate
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    states = sizes.aux_states * hidden
    yield Drawn("fc.weight", (hidden, states), "grid", states**-0.5)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield Drawn(f"midlayer.{name}.weight", (hidden,), "ones")
    for name, rows, columns, gain in (
        ("self_attn.q_proj", q, 2 * hidden, 1.0), ("self_attn.k_proj", kv, 2 * hidden, 1.0),
        ("self_attn.v_proj", kv, 2 * hidden, 1.0), ("self_attn.o_proj", hidden, q, _GAIN),
        ("mlp.gate_proj", inner, hidden, 1.0), ("mlp.up_proj", inner, hidden, 1.0),
        ("mlp.down_proj", hidden, inner, _GAIN),
    ):  # fmt: skip
        yield Drawn(f"midlayer.{name}.weight", (rows, columns), "grid", gain * columns**-0.5)
    yield Drawn("norm.weight", (hidden,), "ones")
    if head:
        yield Drawn("lm_head.weight", (sizes.draft_vocab, hidden), "grid", _OUTPUT_SPREAD * hidden**-0.5)
    if sizes.reduced:
        yield Drawn("d2t", (sizes.draft_vocab,), "d2t")
        yield Drawn("t2d", (sizes.vocab,), "t2d")


def proposed(sizes: DraftSizes, seed: int) -> torch.Tensor:
    """The target's token of each of the draft's, int64 [draft_vocab], ascending."""
    generator = np.random.default_rng([seed, sizes.vocab, sizes.draft_vocab])
    found = np.sort(generator.choice(sizes.vocab, sizes.draft_vocab, replace=False))
    return torch.from_numpy(found.astype(np.int64))


def mapping(name: str, targets: torch.Tensor, vocab: int) -> torch.Tensor:
    """The table of that name, "d2t" or "t2d", of a draft whose tokens stand for these of the target."""
    if name == "d2t":
        return targets - torch.arange(len(targets))
    found = torch.zeros(vocab, dtype=torch.bool)
    found[targets] = True
    return found


def write(
    folder: Path, sizes: DraftSizes, *, seed: int = 0, on_grid: bool = False, head: bool = True,
    shard_bytes: int = 5 << 30,
) -> checkpoint.Written:  # fmt: skip
    """Write a draft with random weights into `folder`, made if need be; the same bytes from a seed.

    Args:
        on_grid, shard_bytes: as for a target's checkpoint.
        head: it has one of its own; else an engine gives it the target's, whose vocabulary it then has.

    Raises:
        InputError: the folder holds files already, or a reduced vocabulary has no head.
    """
    if sizes.reduced and not head:
        raise InputError(f"draft_vocab={sizes.draft_vocab} of {sizes.vocab} tokens takes a head of its own")

    def make(entry: Drawn) -> checkpoint.Tensors:
        if entry.kind in ("d2t", "t2d"):
            return {entry.name: mapping(entry.name, proposed(sizes, seed), sizes.vocab)}
        return checkpoint.draw(entry, seed, on_grid)

    checkpoint.require_empty(folder)
    made = {"seed": seed, "on_grid": on_grid, "shard_bytes": shard_bytes}
    return checkpoint.save(
        folder, list(entries(sizes, head)), make, config(sizes) | {checkpoint.MADE: made}, shard_bytes
    )  # fmt: skip
