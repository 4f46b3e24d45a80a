"""A target that walks through a cycle of tokens, and an Eagle3 draft that proposes just the token that is next.

How often a draft is accepted says nothing where weights are random. Of this pair nearly every proposal is, and what is
wrong in an engine costs that: the draft reads the token by attention, so that a token or a position one off proposes
another; it checks that the states of the target that it is given are of the boundaries it asks for, in its order, and
proposes one wrong token where they are not; and its tokens stand for the target's by d2t, of which rows are corrupted
on request.

A token's embedding is a code of ±1. What the target says it reads in its cache: its second block attends to the token
before the last, adds the code of that louder than the last's own, and the head compares it with that of each token's
last but one predecessor. So keys or values that are not what they must be, such as those of a draft that was refused,
make another text. Apart from that attention and experts add nothing but a mark: block l adds 1 to feature l. Every
weight but the random ones of parts that add nothing is a value that MXFP4 holds, so that quantizing changes no token.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jitmx.errors import InputError
from scripts.protocol import checkpoint, drafts
from scripts.protocol.drafts import DraftSizes
from scripts.protocol.sizes import Drawn, Sizes, config

# Features of the draft's stream: 1 where it has the target's states, and what is wrong with these.
_ANCHOR, _FAULT = 0, 1
# What a query and a key are, in each pair of features that the target turns fast: as far apart as 1 token they go
# together, and any other distance has exp(60) times less, up to 131072 tokens.
_REACH = 24.0
_LOUD = 8.0  # what the code that was looked up is times, beside the last token's own
# Bits of a code for each that a token's number has: the codes of two tokens agree in less than 5 of 6.
_BITS = 6


@dataclass(frozen=True)
class Pair:
    """The two models.

    Attributes:
        target, draft: their sizes.
        seed: the same seed gives the same pair.
        corrupted: of the tokens in `cycle`, the part whose row of d2t names another token, evenly spread over it: that
            part of first proposals is refused, and twice it of seconds. 0 to 0.5.

    Raises:
        InputError: sizes that leave a code too few features, or a pair that does not fit together.
    """

    target: Sizes
    draft: DraftSizes
    seed: int = 0
    corrupted: float = 0.0

    def __post_init__(self) -> None:
        target, draft = self.target, self.draft
        for name in ("hidden", "vocab"):
            if getattr(draft, name) != getattr(target, name):
                raise InputError(f"{name}={getattr(draft, name)} of the draft; the target's is {getattr(target, name)}")
        if not draft.aux_layers or draft.aux_layers[0] < 1 or draft.aux_layers[-1] > target.layers:
            raise InputError(
                f"aux_layers={draft.aux_layers}: a draft of {target.layers} blocks reads boundaries 1 to "
                f"{target.layers}, and names them"
            )
        if not 0 <= self.corrupted <= 0.5:
            raise InputError(f"corrupted={self.corrupted} is not a part from 0 to 0.5")
        if self.corrupted and not draft.reduced:
            raise InputError(f"draft_vocab={draft.draft_vocab} is the whole vocabulary, which has no d2t to corrupt")
        wanted = math.ceil(_BITS * math.log2(target.vocab))
        if self.bits < wanted:
            raise InputError(
                f"{target.hidden} hidden features and {draft.kv_heads} KV heads of {draft.head_dim} hold codes of "
                f"{self.bits} bits, and {target.vocab} tokens want {wanted}; give more of them, or fewer tokens"
            )

    @property
    def first(self) -> int:
        """The first feature of a code."""
        return max(self.target.layers, 2)

    @property
    def bits(self) -> int:
        """Features of a code: whole KV heads of the draft."""
        most = min(self.draft.kv_heads * self.draft.head_dim, self.target.hidden - self.first)
        return most // self.draft.head_dim * self.draft.head_dim

    @property
    def codes(self) -> torch.Tensor:
        """Of every token, ±1, bfloat16 [vocab, bits]."""
        generator = np.random.default_rng([self.seed, 1])
        signs = generator.integers(0, 2, (self.target.vocab, self.bits), dtype=np.int8) * 2 - 1
        return torch.from_numpy(signs).bfloat16()

    @property
    def proposed(self) -> torch.Tensor:
        """The target's token of each of the draft's, as its rows of weights have them; d2t may say otherwise."""
        return drafts.proposed(self.draft, self.seed)

    @property
    def cycle(self) -> torch.Tensor:
        """The tokens in the order that the target makes them, without end; the draft has each."""
        usable = self.proposed[self.proposed < self.target.vocab - 2][:-1]
        return usable[torch.from_numpy(np.random.default_rng([self.seed, 2]).permutation(len(usable)))]

    @property
    def refusing(self) -> int:
        """The draft's number of the token that it proposes where the target's states are others than it asks for."""
        return int((self.proposed < self.target.vocab - 2).sum()) - 1

    @property
    def d2t(self) -> torch.Tensor:
        """The draft's table, with rows corrupted: each names the token of the next corrupted one."""
        targets, cycle = self.proposed.clone(), self.cycle
        steps = torch.arange(len(cycle) + 1).double() * self.corrupted
        chosen = torch.searchsorted(targets, cycle[steps.floor().diff() > 0])
        targets[chosen] = targets[chosen.roll(1)]
        return targets

    def accepted(self, k: int, start: int = 0, count: int | None = None) -> float:
        """Tokens that are accepted of k proposed ones, on the average of the steps that make a text.

        A step ends with the first that is refused, and the next begins behind it: steps do not fall on corrupted rows
        as often as tokens do.

        Args:
            start: place in `cycle` of the text's first token.
            count: its tokens; by default as many as are in the cycle.
        """
        refused = (self.d2t[torch.searchsorted(self.proposed, self.cycle)] != self.cycle).tolist()
        place, end, steps = start, start + (len(refused) if count is None else count), 0
        while place < end:
            right = next((at for at in range(k) if refused[(place + at) % len(refused)]), k)
            place, steps = place + right + 1, steps + 1
        return (place - start) / steps - 1

    @property
    def looking(self) -> int:
        """The target's block that attends to the token before the last; attention of others adds nothing."""
        return min(1, self.target.layers - 1)

    def after(self, token: int) -> int:
        """The token that the target makes of one of `cycle`."""
        cycle = self.cycle.tolist()
        return int(cycle[(cycle.index(token) + 1) % len(cycle)])


def write(pair: Pair, target: Path, draft: Path, *, shard_bytes: int = 5 << 30) -> tuple[checkpoint.Written, ...]:
    """Write both models, each into a folder that is made if need be.

    Raises:
        InputError: a folder holds files already.
    """
    checkpoint.require_empty(draft)
    made = checkpoint.write(
        target, pair.target, seed=pair.seed, shard_bytes=shard_bytes, make=lambda entry: _target(pair, entry),
        tokenizer=pair.target.vocab >= 258,
    )  # fmt: skip
    settings = drafts.config(pair.draft) | {
        # The stream of a proposal must not have the tokens of those before it, which `hidden_norm` takes out.
        "norm_before_residual": True,
        checkpoint.MADE: {"seed": pair.seed, "corrupted": pair.corrupted, "shard_bytes": shard_bytes},
    }
    own = checkpoint.save(
        draft, list(drafts.entries(pair.draft)), lambda entry: _draft(pair, entry), settings, shard_bytes
    )  # fmt: skip
    return made, own


def _target(pair: Pair, entry: Drawn) -> checkpoint.Tensors:
    name = entry.name
    zeros = torch.zeros(entry.shape, dtype=torch.bfloat16)
    code = slice(pair.first, pair.first + pair.bits)
    if name.startswith(f"model.layers.{pair.looking}.self_attn.") and "sinks" not in name:
        return {name: _looking_back(pair, name.split(".self_attn.")[1], zeros)}
    if name.endswith((".o_proj.weight", ".o_proj.bias")):
        return {name: zeros}
    if name.endswith(".down_proj"):
        drawn = checkpoint.draw(entry, pair.seed)
        return {
            part: torch.zeros_like(tensor) + (127 if part.endswith("scales") else 0) for part, tensor in drawn.items()
        }
    if name.endswith(".down_proj_bias"):
        zeros[:, int(name.split(".")[2])] = 1
        return {name: zeros}
    if name == "model.embed_tokens.weight":
        zeros[:, code] = pair.codes
        return {name: zeros}
    if name == "lm_head.weight":
        zeros[pair.cycle.roll(-2), code] = pair.codes[pair.cycle]
        return {name: zeros}
    return checkpoint.draw(entry, pair.seed)


def _looking_back(pair: Pair, part: str, zeros: torch.Tensor) -> torch.Tensor:
    """A tensor of attention to the token before: queries and keys are biases, turned by that distance."""
    sizes, features = pair.target, torch.arange(pair.bits)
    fast = torch.arange(sizes.head_dim // 8)  # pairs of features, of these YaRN stretches none
    angles = config(sizes)["rope_theta"] ** (-2.0 * fast / sizes.head_dim)
    heads = zeros.view(-1, sizes.head_dim) if part.endswith(".bias") else zeros
    if part == "q_proj.bias":
        heads[:, fast] = _REACH
    elif part == "k_proj.bias":
        heads[:, fast] = (_REACH * angles.cos()).bfloat16()
        heads[:, fast + sizes.head_dim // 2] = (_REACH * angles.sin()).bfloat16()
    elif part == "v_proj.weight":
        zeros[features, pair.first + features] = 1
    elif part == "o_proj.weight":
        zeros[pair.first + features, _first_heads(sizes, features)] = _LOUD
    return zeros


def _draft(pair: Pair, entry: Drawn) -> checkpoint.Tensors:
    name, sizes = entry.name, pair.draft
    if entry.kind in ("d2t", "t2d"):
        targets = pair.d2t if name == "d2t" else pair.proposed
        return {name: drafts.mapping(name, targets, sizes.vocab)}
    part = name.removeprefix("midlayer.").removesuffix(".weight")
    weight = torch.zeros(entry.shape, dtype=torch.bfloat16)
    features = torch.arange(pair.bits)
    if part == "fc":
        last = (sizes.aux_states - 1) * sizes.hidden
        weight[_ANCHOR, last] = 1  # the first block's mark
        weight[_FAULT, last] = sizes.aux_states
        for state, boundary in enumerate(sizes.aux_layers):  # the last mark that is there, and the first that is not
            weight[_FAULT, state * sizes.hidden + boundary - 1] -= 1
            if boundary < pair.target.layers:
                weight[_FAULT, state * sizes.hidden + boundary] += 1
    elif part == "hidden_norm":
        weight[[_ANCHOR, _FAULT]] = 1
    elif part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        rows = _first_heads(sizes, features) if part.endswith("q_proj") else features
        weight[rows, pair.first + features] = 1 if part.endswith("v_proj") else _sharpness(pair)
    elif part == "self_attn.o_proj":
        weight[pair.first + features, _first_heads(sizes, features)] = 1
    elif part == "lm_head":
        cycle = pair.cycle
        rows = torch.searchsorted(pair.proposed, cycle.roll(-1))
        weight[rows, pair.first : pair.first + pair.bits] = pair.codes[cycle]
        # With right states the anchor keeps it below every token, with one wrong it is above all.
        strength = 2.0 ** math.ceil(math.log2(_BITS * math.sqrt(pair.bits)))
        weight[pair.refusing, [_ANCHOR, _FAULT]] = torch.tensor([-strength / 2, strength], dtype=torch.bfloat16)
    elif part != "mlp.down_proj":
        return checkpoint.draw(entry, pair.seed)
    return {name: weight}


def _first_heads(sizes: Sizes | DraftSizes, features: torch.Tensor) -> torch.Tensor:
    """Where the first query head of each KV head has the features of that KV head."""
    group = sizes.heads // sizes.kv_heads
    return features // sizes.head_dim * group * sizes.head_dim + features % sizes.head_dim


def _sharpness(pair: Pair) -> float:
    """What queries and keys are codes times: a token attends to itself, by 40 over what others get."""
    spread = pair.draft.hidden / pair.bits * math.sqrt(pair.draft.head_dim)
    return float(2.0 ** math.ceil(math.log2(math.sqrt(40 / spread))))


def tiny(**changes: Any) -> Pair:
    """The smallest pair that the tests use; `changes` are of `Pair`, or of its draft."""
    own = {name: changes.pop(name) for name in list(changes) if name in ("corrupted", "seed")}
    target = dataclasses.replace(Sizes(), layers=4)
    return Pair(target, drafts.of_target(target, **({"aux_layers": (1, 2, 3), "draft_vocab": 320} | changes)), **own)
