"""The kernels that an Eagle3 draft of a served model launches, and those that accept what it proposes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jitmx.arch import Arch
from jitmx.dispatch import call as calls
from jitmx.dispatch.call import Launch
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.linear.layout import TILE_ROWS
from jitmx.kernels.norm import NormProblem
from jitmx.kernels.norm import takes as norm_takes
from jitmx.kernels.pack import encoding_on
from jitmx.kernels.tree.problem import TreeProblem
from jitmx.models import Draft
from jitmx.serving.attention import Attention
from jitmx.serving.linear import NORMED_ROWS, gains, norm, of_linear
from jitmx.serving.needed import Needed, chosen
from jitmx.serving.sampler import Sampler


@dataclass(frozen=True)
class Argmax(Needed):
    """Which output feature of a product with a packed weight is largest, as a draft model's head asks.

    Attributes:
        n, k, dtype, weight, encoding, scale_range: as in `LinearProblem`.
        normed: the head normalises what it reads.
    """

    n: int
    k: int
    dtype: str
    weight: str
    encoding: str
    scale_range: str
    normed: bool = False

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, or where no kernel compares so many rows those of the product; the norm, where they have none."""
        fused = self.normed and m <= NORMED_ROWS
        problem = LinearProblem(
            m, self.n, self.k, self.dtype, encoding=self.encoding, scale_range=self.scale_range, weight=self.weight,
            norm=fused, argmax=True,
        )  # fmt: skip
        yield from calls.call("linear", problem, arch, multiprocessors=multiprocessors).launches
        if self.normed and not fused:
            yield from norm(self.k, self.dtype, arch, multiprocessors)


@dataclass(frozen=True)
class DraftInputs(Needed):
    """What the first layer of a draft reads: norms of its tokens' embeddings and of the target's states.

    Attributes:
        hidden, dtype: of both.
    """

    hidden: int
    dtype: str

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, of any number of tokens."""
        yield chosen("norm", NormProblem(self.hidden, self.dtype, concat=True), arch, multiprocessors)


@dataclass(frozen=True)
class Acceptance(Needed):
    """What a greedy target accepts of drafts; `rows` are the most that are verified in a step.

    Attributes:
        vocab, dtype: of the target's logits.
    """

    vocab: int
    dtype: str

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """The target's token of every row, and which drafts are as these."""
        yield from Sampler(self.arch, self.device, m, self.vocab, self.dtype).made(m, arch, multiprocessors)
        yield chosen("tree", TreeProblem("accept", m), arch, multiprocessors)


def gates(n: int, format: str) -> bool:
    """Whether n gates and ups in a format meet in their product: a tile has 8 of each."""
    return format == "mxfp4" and n % TILE_ROWS == 0


def of_draft(
    draft: Draft,
    arch: Arch,
    served: Mapping[str, str],
    *,
    tokens: int,
    requests: int,
    ranks: int = 1,
    fuse_norm: bool = True,
    all_scales: bool = False,
    head: str | None = None,
    attention: AttentionProblem | None = None,
) -> list[Needed]:
    """What the layers of an Eagle3 draft need as vLLM builds them, each once.

    Args:
        served: the format of each kind of layer that jitmx serves (`layers.DRAFT_KINDS`).
        tokens, ranks, fuse_norm, all_scales, attention: as for `of_model`.
        requests: of a batch at most (max_num_seqs).
        head: the format of the target's head where a draft whose head repeats it has that.

    Raises:
        InputError: sizes that the ranks do not divide.
    """
    shard, scales = draft.on_rank(ranks), "full" if all_scales else "normal"
    fused = (
        fuse_norm and ranks == 1 and served.keys() >= {"o", "gate_up", "down"}
        and gains(arch, *shard.dense["gate_up"], served["gate_up"])
    )  # fmt: skip
    extras: dict[str, dict[str, Any]] = {"gate_up": {}}
    if fused:
        extras = {"o": {"residual": "pair"}, "gate_up": {"norm": True}, "down": {"residual": "pair"}}
    if "gate_up" in served and gates(shard.dense["gate_up"][0], served["gate_up"]):
        extras["gate_up"] |= {"swiglu": True}
    found: list[Needed] = (
        [DraftInputs(arch.name, None, tokens, draft.hidden, "bf16")] if fused and norm_takes(draft.hidden) else []
    )
    for kind in shard.dense:
        own = draft.bias and kind in ("qkv", "o")
        biases = {own, own and (kind == "qkv" or ranks == 1)}  # of O only the first rank adds it
        for (n, k), bias in itertools.product(shard.products(kind), biases if kind in served else ()):
            found += of_linear(
                arch, None, tokens, n, k, served[kind], bias=bias, scale_range=scales, **extras.get(kind, {})
            )
    if ranks == 1:
        for format in dict.fromkeys(filter(None, (served.get("lm_head"), head))):
            encoding, normed = encoding_on(arch, format), fused and not draft.norm_output
            sizes = draft.vocabulary, draft.hidden
            found.append(Argmax(arch.name, None, requests, *sizes, "bf16", format, encoding, scales, normed))
    if attention is not None:
        rope: dict[str, Any] = {"rope": "neox", "rotary": draft.head_dim} if fused else {}
        layer = replace(
            attention, kv_heads=shard.kv_heads, group=shard.heads // shard.kv_heads, head_dim=draft.head_dim,
            sinks="no_sinks", window=draft.window, **rope,
        )  # fmt: skip
        found.append(Attention(arch.name, None, tokens, layer))
    return list(dict.fromkeys(found))
