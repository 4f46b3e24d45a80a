"""The kernels that an Eagle3 draft model launches: those of its layer, and the head that takes its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.dispatch.call import decomposition
from jitmx.drafts import Draft
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.linear.steps import rows_at_once
from jitmx.kernels.sampling import SamplingProblem
from jitmx.kernels.tree.problem import TreeProblem
from jitmx.model_kernels import NORMED_ROWS, Attention, Linear, Needed, gains, norm_launch, of_linear
from jitmx.registry.spec import Variant


@dataclass(frozen=True)
class TopTokens(Needed):
    """Tokens of a packed head, taken without logits: `rows` are requests at most.

    Attributes:
        n, k, dtype, weight, encoding, scale_range: as in `LinearProblem`.
        norm: the head normalises what it reads.
    """

    n: int
    k: int
    dtype: str
    weight: str
    encoding: str
    scale_range: str
    norm: bool = False

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """The norm, where it is no part of the product, and the product that compares, or those that are compared."""
        fused = self.norm and m <= NORMED_ROWS
        problem = LinearProblem(
            m, self.n, self.k, self.dtype, False, self.encoding, self.scale_range, self.weight, norm=fused, argmax=True
        )
        unfused = decomposition("linear", problem, arch).unfused
        if self.norm and (not fused or "norm" in unfused):
            yield from norm_launch(self.k, self.dtype, arch, multiprocessors)
        problem = replace(problem, norm=fused and "norm" not in unfused, argmax="argmax" not in unfused)
        parts = [problem]
        if not problem.argmax:
            passes, rest = divmod(m, rows_at_once(self.n))
            parts = [replace(problem, m=rows_at_once(self.n))] * bool(passes) + [replace(problem, m=rest)] * bool(rest)
        for part in parts:
            for choice, _ in choose.split("linear", part, arch, multiprocessors=multiprocessors):
                yield choice.variant


@dataclass(frozen=True)
class Acceptance(Needed):
    """What a greedy target accepts of drafts: `rows` are requests at most.

    Attributes:
        each: rows of a request at most: its drafts, and one.
        vocab, dtype: of the target's logits.
    """

    each: int
    vocab: int
    dtype: str

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """The target's tokens of every row, and which drafts are as these."""
        for rows in range(m, m * self.each + 1):
            problem = SamplingProblem(rows, self.vocab, self.dtype)
            yield choose.choose("sampling", problem, arch, multiprocessors=multiprocessors).variant
        yield choose.choose("tree", TreeProblem("accept", m), arch, multiprocessors=multiprocessors).variant

    def every(self, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """Those of every number of rows."""
        for m in {1, 2, self.rows}:
            yield choose.choose("tree", TreeProblem("accept", m), arch, multiprocessors=multiprocessors).variant
        sampled = replace(self, each=1)
        for m in _counts(self.rows * self.each):
            yield from sampled.launches(m, arch, multiprocessors)


def _counts(most: int) -> Iterator[int]:
    yield from (m for m in range(1, most + 1) if m <= 128 or m % 32 == 0 or m == most)


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
    attention: AttentionProblem | None = None,
) -> list[Needed]:
    """What the layers of an Eagle3 draft need as vLLM builds them, each once.

    Args:
        served: the format of each kind of layer that jitmx serves (`layers.DRAFT_KINDS`).
        tokens: of a forward pass at most. requests: at most (max_num_seqs).
        ranks, fuse_norm, all_scales, attention: as for `model_kernels.of_model`.

    Raises:
        InputError: sizes that the ranks do not divide.
    """
    shard = draft.on_rank(ranks)
    scales = "full" if all_scales else "normal"
    fused = (
        fuse_norm and ranks == 1 and served.keys() >= {"o", "gate_up", "down"}
        and gains(arch, *shard.dense["gate_up"], served["gate_up"])
    )  # fmt: skip
    extras: dict[str, dict[str, Any]] = {}
    if fused:
        extras = {"o": {"residual": "pair"}, "gate_up": {"norm": True}, "down": {"residual": "pair"}}
    found: list[Needed] = []
    for kind, format in served.items():
        bias = draft.bias and kind in ("qkv", "o")
        for n, k in shard.products(kind):
            for biased in {bias, bias and ranks == 1} if kind == "o" else {bias}:
                found += of_linear(
                    arch, None, tokens, n, k, format, bias=biased, scale_range=scales, **extras.get(kind, {})
                )
    if "lm_head" in served and ranks == 1:
        product = of_linear(
            arch, None, requests, *draft.dense["lm_head"], served["lm_head"], bias=False, scale_range=scales
        )[-1]
        assert isinstance(product, Linear)
        found.append(top_tokens(product, draft.vocabulary, fused and not draft.norm_output))
    if attention is not None:
        rope: dict[str, Any] = {"rope": "neox", "rotary": draft.head_dim} if fused else {}
        layer = replace(
            attention, kv_heads=shard.kv_heads, group=shard.heads // shard.kv_heads, head_dim=draft.head_dim,
            sinks="no_sinks", window=draft.window, **rope,
        )  # fmt: skip
        found.append(Attention(arch.name, None, tokens, layer))
    return list(dict.fromkeys(found))


def top_tokens(product: Linear, vocabulary: int, norm: bool) -> TopTokens:
    """Tokens of a head whose product, padding included, is this one."""
    return TopTokens(
        product.arch, product.device, product.rows, vocabulary, product.k, product.dtype, product.weight,
        product.encoding, product.scale_range, norm,
    )  # fmt: skip
