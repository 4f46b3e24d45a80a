"""Count the instructions of the variants that the cost model is about, and fit its parameters to measured times.

    python scripts/fit_cost_model.py            print the parameters, and how far the model is off
    python scripts/fit_cost_model.py --count    first count anew what `tactics/counts.json` has: minutes
    python scripts/fit_cost_model.py --missing  first count what it lacks, and leave out what nobody asks for

Fitted are the parameters that `jitmx/costs/cards.py` calls so, to those figures of `tactics/measured.json` that have
fit=true; the others are held out. What is made small is the sum of e^2 (0.05 + |e|)^2, e the logarithm of predicted
over measured: large errors count for more than many small ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx import arch as arches
from jitmx import costs, json_rows, kernels
from jitmx.cache import files
from jitmx.costs import cards, counts, measured, predict
from jitmx.costs.cards import Card, Parameter
from jitmx.costs.launches import Priced
from jitmx.dispatch import call, choose
from jitmx.kernels.moe import MoeProblem
from jitmx.models import EXPERT_LAYERS, GPT_OSS_120B, NAMED, NAMED_DRAFTS
from jitmx.serving import draft_step, model_step

Array = npt.NDArray[np.float64]
START = {"start_us": 0.2, "cluster_us": 0.5, "grid_us": 2.0, "fill_us": 0.6, "exposed_gbps": 60.0, "issued": 1.0,
         "alone": 1.0, "unhidden": 0.1}  # fmt: skip
BATCHES, CONTEXT = (1, 4, 16, 64), 2048
DRAFTED = (1, 2, 3, 4)  # rows of a request that has a draft
EXPERT_ROWS = (64, 256, 512, 1024, 2048, 8192)  # of layers of experts in E4M3


def with_parameters(card: Card, values: dict[str, float]) -> Card:
    """The card with other values of some parameters."""
    found = {name: Parameter(value, card.parameters[name].source, True) for name, value in values.items()}
    return dataclasses.replace(card, **found)  # type: ignore[arg-type]


def errors(pairs: Sequence[tuple[float, list[Priced]]], card: Card) -> Array:
    """Logarithms of predicted over measured times."""
    return np.array([math.log(_us(priced, card) / us) for us, priced in pairs])


def _us(priced: list[Priced], card: Card) -> float:
    total = 0.0
    for one in priced:
        assert one.work is not None
        of_units = (one.instructions or 0.0) - one.of_blocks
        total += one.times * predict.predict(one.work, of_units, card, of_blocks=one.of_blocks).us
    return total


def fit(pairs: Sequence[tuple[float, list[Priced]]], card: Card, turns: int = 80) -> dict[str, float]:
    """Parameters by Levenberg and Marquardt's method, in steps of their logarithms."""
    names, x = list(START), np.array(list(START.values()))

    def residuals(values: Array) -> Array:
        error = errors(pairs, with_parameters(card, dict(zip(names, map(float, values), strict=True))))
        return np.asarray(error * (0.05 + np.abs(error)))

    damping, found = 1e-2, residuals(x)
    for _ in range(turns):
        steps = [x * np.exp(1e-4 * (np.arange(len(x)) == number)) for number in range(len(x))]
        slope = np.array([(residuals(step) - found) / 1e-4 for step in steps]).T
        for _ in range(8):
            step = np.linalg.solve(slope.T @ slope + damping * np.eye(len(x)), -slope.T @ found)
            tried = x * np.exp(np.clip(step, -0.3, 0.3))
            there = residuals(tried)
            if there @ there < found @ found:
                x, found, damping = tried, there, damping / 3
                break
            damping = min(damping * 4, 1e9)
    return {name: float(f"{value:.4g}") for name, value in zip(names, x, strict=True)}


def pairs_of(figures: measured.Figures, **wanted: Any) -> list[tuple[float, list[Priced]]]:
    """Measured times and priced launches of the figures with these attributes, of variants that serve still."""
    found = []
    for figure in figures.figures:
        if all(getattr(figure, name) == value for name, value in wanted.items()):
            priced = measured.priced(figure, figures.arch)
            if priced is not None and all(one.work is not None for one in priced):
                found.append((figure.us, priced))
    return found


def asked() -> Iterator[tuple[Any, Any]]:
    """Variants with problems that are to be counted: of the figures, and on each card of typical calls and of
    steps of the models, of several rows and of their drafts too."""
    figures = measured.load()
    for figure in figures.figures:
        for launch in call.explain(figure.op, arches.parse(figures.arch), **figure.problem).launches:
            yield launch.choice.variant, launch.choice.problem
    for name in cards.CARDS:
        target = arches.parse(name)
        for op, family in kernels.families().items():
            for problem in family.typical(target):
                first = choose.choose(op, problem, target)
                for choice in (first, *choose.companions(first)):
                    yield choice.variant, choice.problem
        for layer, rows in itertools.product(EXPERT_LAYERS.values(), EXPERT_ROWS):
            problem = MoeProblem.on(target, m=rows, x_format="fp8", **dataclasses.asdict(layer))
            first = choose.choose("moe", problem, target)
            for choice in (first, *choose.companions(first)):
                yield choice.variant, choice.problem
        for model in NAMED.values():
            for batch in BATCHES:
                for part in model_step.parts(model, target, batch, CONTEXT):
                    yield part.launch.choice.variant, part.launch.choice.problem
        for rows in DRAFTED:
            verified = model_step.parts(GPT_OSS_120B, target, 1, CONTEXT, rows=rows)
            drafted = (draft_step.parts(draft, target, 1, CONTEXT, rows=rows) for draft in NAMED_DRAFTS.values())
            for part in (*verified, *itertools.chain.from_iterable(drafted)):
                yield part.launch.choice.variant, part.launch.choice.problem


def count_anew(known: dict[str, counts.Count]) -> None:
    """Write `tactics/counts.json`.

    Args:
        known: counts by their keys, which are taken as they are.
    """
    rows: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for variant, problem in asked():
        if costs.of(variant.spec.family) is None or (key := counts.key(variant, problem)) in seen:
            continue
        seen.add(key)
        found = known.get(key) or counts.counted(variant, problem)
        if found is not None:
            arch, digest, of = key.split(" ")
            rows[key] = {
                "arch": arch, "kernel": variant.name, "source_digest": digest, "of": of, "unit": found.unit,
                "block": found.block,
            }  # fmt: skip
            if key not in known:
                print(f"{arch} {variant.name}: {found.unit:.1f} a unit, {found.block:.0f} a block", file=sys.stderr)
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (rows[key]["arch"], rows[key]["kernel"], key))]
    document = {"schema_version": counts.SCHEMA_VERSION, "counts": ordered}
    files.write(counts.path(), json_rows.text(document, "counts").encode(), permissions=0o644)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="count instructions anew first")
    parser.add_argument("--missing", action="store_true", help="count those of code that is not counted first")
    words = parser.parse_args(arguments)
    if words.count or words.missing:
        count_anew({} if words.count else counts.load(counts.path()))
        counts._known.cache_clear()
    figures = measured.load()
    card = cards.of(arches.parse(figures.arch))
    values = fit(pairs_of(figures, kind="decode", fit=True), card)
    print("\n".join(f"    {name}=_fitted({value:g})," for name, value in values.items()))
    fitted = with_parameters(card, values)
    for name, wanted in (("fitted to", {"fit": True}), ("held out", {"fit": False})):
        error = np.exp(errors(pairs_of(figures, kind="decode", **wanted), fitted)) - 1
        print(f"{name}: {len(error)} figures, rms {np.sqrt(np.mean(error**2)):.1%}, worst {np.abs(error).max():.1%}")
    for figure in figures.figures:
        priced = measured.priced(figure, figures.arch)
        said = "another variant serves this now" if priced is None else ""
        if priced is not None and all(one.work for one in priced):
            us = _us(priced, fitted)
            said = f"{us:9.2f} us {us / figure.us - 1:+6.1%}"
        asked_of = ", ".join(f"{name}={value}" for name, value in figure.problem.items())
        print(f"{figure.op:<10}{asked_of[:60]:<62}{figure.us:9.2f} us  {said}{'  fit' if figure.fit else ''}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
