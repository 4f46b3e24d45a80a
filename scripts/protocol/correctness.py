"""Level 2: logits and greedy tokens of jitmx beside stock backends and transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.protocol import agreement, engines, metadata, worker
from scripts.protocol import reference as references
from scripts.protocol.configurations import Configuration
from scripts.protocol.levels import Asked
from scripts.protocol.report import Report

# Sizes of prompts that reach one token, one block, more than a window, and a chunk of prefill.
_LENGTHS = (1, 2, 5, 17, 33, 64, 100, 128, 129, 200, 256, 300, 511, 512, 700, 1024)
# Sizes of prompts of which all but the last token is in the KV cache: whole blocks of 16, and one token more. The
# first are looked at alone, as a batch of 1 decodes; the others all at once.
_CACHED = (33, 65, 97, 129, 177, 257, 321, 513, *(17 + 16 * k for k in range(16)))
_CACHED_ALONE = 8
# Chains are continued one at a time up to this number, and so many at a time from there on.
_CHAINS_ALONE, _CHAINS_AT_ONCE = 4, 30


def correctness(
    asked: Asked,
    stock: tuple[Configuration, Configuration],
    *,
    also: Sequence[Configuration] = (),
    steps: int,
    chains: int,
    reference: str | Path | None,
    together: bool = False,
) -> Report:
    """Level 2: logits and greedy tokens of jitmx, stock backends, and transformers in float32.

    Greedy tokens are judged by how far two stock engines part that differ wherever jitmx differs from the first of
    them. Two compiled backends share every dense layer, the router, and what a compiled graph rounds, so the second
    one runs uncompiled.

    Args:
        stock: two stock backends.
        also: further configurations of jitmx, judged beside the same stock engines.
        steps: greedy tokens a prompt.
        chains: prompts that are continued.
        reference: where transformers runs, or a file of `reference.write`; None leaves it out, and jitmx is compared
            with the stock backends alone.
        together: start the engines at once; they share the card.
    """
    ours = tuple(dict.fromkeys((asked.ours, *also)))
    apart = stock[0], replace(stock[1], eager=True)
    every = tuple(dict.fromkeys((*ours, *stock, *apart)))
    said = reference.name if isinstance(reference, Path) else reference
    report = asked.report(
        "2", sets=[item.name for item in ours], stock=[item.name for item in stock], steps=steps, reference=said
    )
    prompts, cached = reference_prompts(asked.place.model, asked.seed)
    kept = references.read(reference, asked.place.model, [*prompts, *cached]) if isinstance(reference, Path) else None
    starts = worker.random_prompts(engines.vocabulary(asked.place.model), [32] * chains, asked.seed + 1)
    # The prompts of `cached` are asked for twice: the second time all but the last token is known.
    place = replace(asked.place, options={"enable_prefix_caching": True, **asked.place.options})

    def tasks(name: str) -> list[dict[str, Any]]:
        into = place.out / name
        return [
            {"task": "logits", "prompts": prompts, "groups": [1] * len(prompts), "into": f"{into}.logits.npy"},
            {"task": "logits", "as": "cached", "prompts": cached, "twice": True, "into": f"{into}.cached.npy",
             "groups": worker.groups(len(cached), _CACHED_ALONE, len(cached))},
            {"task": "greedy", "prompts": starts, "tokens": steps,
             "groups": worker.groups(chains, _CHAINS_ALONE, _CHAINS_AT_ONCE)},
        ]  # fmt: skip

    chosen: dict[str, list[list[int]]] = {}
    startup: dict[str, Any] = {}
    report.results["startup"] = startup
    with engines.each(place, every, tasks, together=together) as results:
        for item, found in results:
            chosen[item.name], startup[item.name] = found["greedy"], found["startup"]
            known = found["cached"]["known"]
            wanted = [len(prompt) - 1 for prompt in cached]
            report.check("one token alone", known == wanted, f"{item.name}: {known} tokens were in the cache")
            report.check_attention(item.name, item.attention_by, found["startup"])
            if item.layers:
                report.check_warm_up(f"{item.name}, warm-up", found["late"])
    if isinstance(reference, str):
        kept = references.make(place, [*prompts, *cached], reference)
    tables = _tables(report, [place.out / item.name for item in every], kept, len(prompts))
    if any(item.served - {"moe"} for item in ours):
        # Where it is not, what is measured is also what rounding these weights to MXFP4 loses.
        report.results["dense_on_grid"] = metadata.field(lambda: _on_grid(place.model))
    first, second = (item.name for item in stock)
    for item in ours:
        agreement.judge_logits(report, tables["logits"], item.name, (first, second))
        agreement.judge_logits(report, tables["cached"], item.name, (first, second), "logits of one token")
        agreement.judge_greedy(report, chosen, item.name, [one.name for one in apart], steps)
    return report


def _tables(report: Report, engines_out: Sequence[Path], kept: Any, whole: int) -> dict[str, dict[str, Any]]:
    """Logits [prompts, vocabulary] by what was asked for and by engine, found finite or not.

    Args:
        engines_out: where each engine has left its own, without what was asked for and the suffix.
        kept: those of transformers, of whole prompts and then of cached ones, or None.
        whole: how many prompts are whole.
    """
    import numpy as np

    tables = {what: {path.name: np.load(f"{path}.{what}.npy") for path in engines_out} for what in ("logits", "cached")}
    if kept is not None:
        tables["logits"]["transformers"], tables["cached"]["transformers"] = np.split(kept, [whole])
    for name in tables["logits"]:
        bad = sum(int((~np.isfinite(table[name])).sum()) for table in tables.values())
        report.check("logits are finite", bad == 0, f"{name}: {bad} are not")
    return tables


def reference_prompts(model: Path, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts after which level 2 looks at logits: read whole, and with all but their last token known."""
    vocab = engines.vocabulary(model)
    return worker.random_prompts(vocab, list(_LENGTHS), seed), worker.random_prompts(vocab, list(_CACHED), seed)


def _on_grid(model: Path) -> bool:
    """Whether MXFP4 holds the dense weights of a checkpoint exactly."""
    from scripts.protocol import checkpoint

    return checkpoint.dense_on_grid(model)
