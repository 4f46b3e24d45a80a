"""Level 2: logits and greedy tokens of jitmx beside stock backends and transformers in float32."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scripts.protocol import agreement, engines, metadata, needle, worker
from scripts.protocol import reference as references
from scripts.protocol.configurations import Configuration
from scripts.protocol.levels import Asked
from scripts.protocol.report import ProtocolError, Report

# Sizes of prompts that reach one token, one block, more than a window, and a chunk of prefill.
_LENGTHS = (1, 2, 5, 17, 33, 64, 100, 128, 129, 200, 256, 300, 511, 512, 700, 1024)
# Sizes of prompts of which all but the last token is in the KV cache: whole blocks of 16, and one token more. The
# first are looked at alone, as a batch of 1 decodes; the others all at once.
_CACHED = (33, 65, 97, 129, 177, 257, 321, 513, *(17 + 16 * k for k in range(16)))
_CACHED_ALONE = 8
# Long prompts are looked at in both ways.
_LONG_ALONE = 4
# Chains are continued one at a time up to this number, and so many at a time from there on.
_CHAINS_ALONE, _CHAINS_AT_ONCE = 4, 30


class _Look(NamedTuple):
    """A task for logits.

    Attributes:
        name: what the report calls them.
        prompts: which of `reference_prompts`.
        alone: of prompts of which all but the last token is known, so many one by one, the others at once; None: they
            are read, one by one.
    """

    name: str
    prompts: str
    alone: int | None = None


_LOOKS = {
    "logits": _Look("logits", "whole"),
    "cached": _Look("logits of one token", "cached", _CACHED_ALONE),
    "long": _Look("logits of long prompts", "long"),
    "long cached": _Look("logits of one token behind long prompts", "long", _LONG_ALONE),
}


def correctness(
    asked: Asked,
    stock: tuple[Configuration, Configuration],
    *,
    also: Sequence[Configuration] = (),
    steps: int,
    chains: int,
    reference: str | Path | None,
    long_tokens: int | None = None,
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
        long_tokens: of prompts with a needle, 0 for none; None: `needle.TOKENS` where the engine takes so many.
        together: start the engines at once; they share the card.

    Raises:
        ProtocolError: the engine takes no prompts of so many tokens.
    """
    ours = tuple(dict.fromkeys((asked.ours, *also)))
    apart = stock[0], replace(stock[1], eager=True)
    every = tuple(dict.fromkeys((*ours, *stock, *apart)))
    said = reference.name if isinstance(reference, Path) else reference
    most = {**engines.DEFAULTS, **asked.place.options}["max_model_len"]
    room = most - 1 if isinstance(most, int) else 0
    if long_tokens is None:
        long_tokens = needle.TOKENS if room > needle.TOKENS else 0
    report = asked.report(
        "2", sets=[item.name for item in ours], stock=[item.name for item in stock], steps=steps, reference=said,
        long_tokens=long_tokens,
    )  # fmt: skip
    prompts = reference_prompts(asked.place.model, asked.seed, long_tokens)
    every_prompt = list(itertools.chain(*prompts.values()))
    longest = max(map(len, every_prompt))
    if long_tokens and longest > room:
        raise ProtocolError(f"{longest} tokens and an answer need --engine max_model_len={longest + 1} or more")
    kept = references.read(reference, asked.place.model, every_prompt) if isinstance(reference, Path) else None
    looks = {what: look for what, look in _LOOKS.items() if look.prompts in prompts}
    starts = worker.random_prompts(engines.vocabulary(asked.place.model), [32] * chains, asked.seed + 1)
    # What is cached is asked for twice: the second time all but the last token is known.
    place = replace(asked.place, options={"enable_prefix_caching": True, **asked.place.options})

    def tasks(name: str) -> list[dict[str, Any]]:
        def logits(what: str, look: _Look) -> dict[str, Any]:
            given = prompts[look.prompts]
            return {
                "task": "logits", "as": what, "prompts": given, "twice": look.alone is not None,
                "groups": worker.groups(len(given), len(given) if look.alone is None else look.alone, len(given)),
                "into": str(place.out / f"{name}.{what}.npy"),
            }  # fmt: skip

        return [
            *(logits(*item) for item in looks.items()),
            {"task": "greedy", "prompts": starts, "tokens": steps,
             "groups": worker.groups(chains, _CHAINS_ALONE, _CHAINS_AT_ONCE)},
        ]  # fmt: skip

    chosen: dict[str, list[list[int]]] = {}
    startup: dict[str, Any] = {}
    report.results["startup"] = startup
    with engines.each(place, every, tasks, together=together) as results:
        for item, found in results:
            chosen[item.name], startup[item.name] = found["greedy"], found["startup"]
            for what in (what for what, look in looks.items() if look.alone is not None):
                known, wanted = found[what]["known"], [len(prompt) - 1 for prompt in prompts[looks[what].prompts]]
                report.check("one token alone", known == wanted, f"{item.name}: {known} tokens were in the cache")
            report.check_attention(item.name, item.attention_by, found["startup"])
            if item.layers:
                report.check_warm_up(f"{item.name}, warm-up", found["late"])
    if isinstance(reference, str):
        kept = references.make(place, every_prompt, reference)
    rows = None if kept is None else _rows(kept, prompts)
    tables = _tables(report, [place.out / item.name for item in every], looks, rows)
    if any(item.served - {"moe"} for item in ours):
        # Where it is not, what is measured is also what rounding these weights to MXFP4 loses.
        report.results["dense_on_grid"] = metadata.field(lambda: _on_grid(place.model))
    first, second = (item.name for item in stock)
    for item in ours:
        bounds = {
            what: agreement.judge_logits(report, tables[what], item.name, (first, second), look.name)
            for what, look in looks.items()
        }
        agreement.judge_greedy(report, chosen, item.name, [one.name for one in apart], steps)
    for what, look in looks.items():
        if look.prompts == "long":
            measured = tables[what].get("transformers", tables[what][first])
            needle.judge(report, look.name, measured, bounds[what])
    return report


def _tables(
    report: Report, engines_out: Sequence[Path], looks: Mapping[str, _Look], kept: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Logits [prompts, vocabulary] by what was asked for and by engine, found finite or not.

    Args:
        engines_out: where each engine has left its own, without what was asked for and the suffix.
        kept: those of transformers by prompts, or None.
    """
    import numpy as np

    tables = {what: {path.name: np.load(f"{path}.{what}.npy") for path in engines_out} for what in looks}
    if kept is not None:
        for what, look in looks.items():
            tables[what]["transformers"] = kept[look.prompts]
    for name in tables["logits"]:
        bad = sum(int((~np.isfinite(table[name])).sum()) for table in tables.values())
        report.check("logits are finite", bad == 0, f"{name}: {bad} are not")
    return tables


def _rows(kept: Any, prompts: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Rows of a table by the prompts that they are of."""
    import numpy as np

    ends = itertools.accumulate(map(len, prompts.values()))
    return dict(zip(prompts, np.split(kept, list(ends)[:-1]), strict=True))


def reference_prompts(model: Path, seed: int, long_tokens: int) -> dict[str, list[list[int]]]:
    """Prompts after which level 2 looks at logits: read whole, known but for the last token, long where asked for."""
    vocab = engines.vocabulary(model)
    found = {
        "whole": worker.random_prompts(vocab, list(_LENGTHS), seed),
        "cached": worker.random_prompts(vocab, list(_CACHED), seed),
        "long": needle.prompts(vocab, long_tokens, seed),
    }
    return {name: prompts for name, prompts in found.items() if prompts}


def _on_grid(model: Path) -> bool:
    """Whether MXFP4 holds the dense weights of a checkpoint exactly."""
    from scripts.protocol import checkpoint

    return checkpoint.dense_on_grid(model)
