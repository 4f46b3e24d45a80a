"""What another expert comes to, in layers that are drawn as those of a synthetic checkpoint."""

from __future__ import annotations

import numpy as np

from jitmx.kernels.moe.layout import interleave, reference
from jitmx.registry.case import Array, relative_l2
from scripts.protocol import apart
from scripts.protocol.report import Report
from scripts.protocol.sizes import Sizes, entries

ROWS = 200
SIZES = Sizes(hidden=256, intermediate=256, layers=2, experts=128, vocab=8)


def layers(source: np.random.Generator) -> list[dict[str, Array]]:
    """The router and experts of each layer, by the last part of their names."""
    found: list[dict[str, Array]] = [{} for _ in range(SIZES.layers)]
    for entry in entries(SIZES):
        if ".mlp." in entry.name:
            layer, name = int(entry.name.split(".")[2]), entry.name.partition(".mlp.")[2]
            found[layer][name] = entry.deviation * source.standard_normal(entry.shape)
    for made in found:
        for name in ("experts.gate_up_proj", "experts.gate_up_proj_bias"):
            made[name] = interleave(made[name])
    return found


def normed(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True))


def served(x: Array, model: list[dict[str, Array]], tied: int | None) -> Array:
    """What the output layer sees of tokens x, where in one layer the last expert gave way to the next, its equal."""
    for layer, made in enumerate(model):
        logits = normed(x) @ made["router.weight"].T + made["router.bias"]
        order = np.argsort(-logits, axis=1)
        ids, kept = order[:, : SIZES.top_k].copy(), np.take_along_axis(logits, order[:, : SIZES.top_k], axis=1)
        if layer == tied:
            ids[:, -1] = order[:, SIZES.top_k]
        weights = np.exp(kept) / np.exp(kept).sum(axis=1, keepdims=True)
        part = [made[f"experts.{name}"] for name in ("gate_up_proj", "down_proj")]
        bias = [made[f"experts.{name}_bias"] for name in ("gate_up_proj", "down_proj")]
        x = x + reference(normed(x), ids.astype(np.int32), weights, *part, *bias)
    return normed(x)


def test_another_expert_of_two_equals_makes_a_prompt_far_and_no_further_than_is_excused() -> None:
    source = np.random.default_rng(0)
    model, x = layers(source), source.standard_normal((ROWS, SIZES.hidden))
    clean = served(x, model, None)
    for tied in range(SIZES.layers):
        each = [relative_l2(*rows) for rows in zip(served(x, model, tied), clean, strict=True)]
        assert 0.1 < np.median(each) < 0.15, "0.12 of one prompt in eight is 0.043 of all"
        # Stock engines' logits are 0.0043 apart on short prompts.
        assert min(each) > apart.FAR * 0.0043 and max(each) <= apart.EXPERT


def test_logits_that_are_a_stock_engines_own_fail() -> None:
    table = np.random.default_rng(0).standard_normal((8, 10))
    found, report = apart.Apart.of(table, table, [[0]] * 8), Report("features", {})
    apart.judge(report, "long", found, found)
    assert not report.passed


def test_most_prompts_further_apart_than_short_ones_fail_although_some_are_nearer() -> None:
    lengths, report = range(8), Report("features", {})
    measure = apart.Apart([0.004] * 8, lengths, 0.004)
    apart.judge(report, "long", apart.Apart([0.0064] * 5 + [0.0004] * 3, lengths, 0.005), measure)
    assert not report.passed
