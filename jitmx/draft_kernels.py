"""The kernels that an Eagle3 draft of a served model launches, for who has them made before they are launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jitmx.arch import Arch
from jitmx.dispatch import call as calls
from jitmx.dispatch.call import Launch
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.pack import encoding_on
from jitmx.model_kernels import Attention, Needed, of_linear
from jitmx.models import Draft


@dataclass(frozen=True)
class Argmax(Needed):
    """Which output feature of a product with a packed weight is largest, as a draft model's head asks.

    Attributes:
        n, k, dtype, weight, encoding, scale_range: as in `LinearProblem`.
    """

    n: int
    k: int
    dtype: str
    weight: str
    encoding: str
    scale_range: str

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, or where no kernel compares so many rows those of the product."""
        problem = LinearProblem(
            m, self.n, self.k, self.dtype, encoding=self.encoding, scale_range=self.scale_range, weight=self.weight,
            argmax=True,
        )  # fmt: skip
        yield from calls.call("linear", problem, arch, multiprocessors=multiprocessors).launches


def of_draft(
    draft: Draft,
    arch: Arch,
    served: Mapping[str, str],
    *,
    tokens: int,
    requests: int,
    ranks: int = 1,
    all_scales: bool = False,
    head: str | None = None,
    attention: AttentionProblem | None = None,
) -> list[Needed]:
    """What the layers of an Eagle3 draft need as vLLM builds them, each once.

    Args:
        served: the format of each kind of layer that jitmx serves (`layers.DRAFT_KINDS`).
        tokens, ranks, all_scales, attention: as for `of_model`.
        requests: of a batch at most (max_num_seqs).
        head: the format of the target's head where a draft whose head repeats it has that.

    Raises:
        InputError: sizes that the ranks do not divide.
    """
    shard, scales = draft.on_rank(ranks), "full" if all_scales else "normal"
    found: list[Needed] = []
    for kind, (n, k) in shard.dense.items():
        own = draft.bias and kind in ("qkv", "o")
        biases = {own, own and (kind == "qkv" or ranks == 1)}  # of O only the first rank adds it
        for bias in biases if kind in served else ():
            found += of_linear(arch, None, tokens, n, k, served[kind], bias=bias, scale_range=scales)
    if ranks == 1 and shard.vocabulary == draft.vocabulary:
        for format in dict.fromkeys(filter(None, (served.get("lm_head"), head))):
            encoding = encoding_on(arch, format)
            found.append(
                Argmax(arch.name, None, requests, *shard.dense["lm_head"], "bf16", format, encoding, scales)
            )  # fmt: skip
    if attention is not None:
        layer = replace(
            attention, kv_heads=shard.kv_heads, group=shard.heads // shard.kv_heads, head_dim=draft.head_dim,
            sinks="no_sinks", window=draft.window,
        )  # fmt: skip
        found.append(Attention(arch.name, None, tokens, layer))
    return list(dict.fromkeys(found))
