"""A step of decoding of a served model: every launch in order, how often it is made, and what it costs.

The step is that of jitmx serving every layer: QKV, O, experts and output layer in MXFP4, attention over a bf16 or E4M3
cache, norms in launches where no product has them, and greedy sampling; one new token a request, or several rows where
drafts are verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitmx.arch import Arch
from jitmx.costs import cards, launches
from jitmx.costs.cards import Card
from jitmx.costs.launches import Priced
from jitmx.dispatch.call import Launch
from jitmx.layers import KINDS
from jitmx.models import Model
from jitmx.serving.attention import Attention, cached, choices
from jitmx.serving.draft import Acceptance
from jitmx.serving.experts import Experts
from jitmx.serving.linear import Linear, norm
from jitmx.serving.model import of_model
from jitmx.serving.needed import Needed
from jitmx.serving.sampler import Sampler

_PLACES = {"norm": 0, "routing": 1}  # of families within a layer, all others behind them


@dataclass(frozen=True)
class Part:
    """A launch of a step.

    Attributes:
        label: which layer it is of.
        layers: layers of the model that make it.
        launch: the launch of one of them.
    """

    label: str
    layers: int
    launch: Launch


@dataclass(frozen=True)
class Step:
    """A step, priced.

    Attributes:
        arch, card: its target, and the card whose parameters are used.
        batch, context: requests, and tokens of each with the new ones.
        launches: every launch, `times` over all layers.
    """

    arch: str
    card: str
    batch: int
    context: int
    launches: Sequence[Priced]

    @property
    def us(self) -> float:
        """Predicted us of all launches."""
        return launches.total(self.launches)

    @property
    def tokens_per_second(self) -> float:
        """Of all requests, where nothing but these launches takes time."""
        return self.batch / self.us * 1e6 if self.us else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "arch": self.arch, "card": self.card, "batch": self.batch, "context": self.context,
            "launches": [one.to_dict() for one in self.launches], "us": round(self.us, 1),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }  # fmt: skip


def parts(
    model: Model,
    arch: Arch,
    batch: int,
    context: int,
    *,
    cache: str = "same",
    rows: int = 1,
    multiprocessors: int | None = None,
    x_format: str = "bf16",
    activation: str = "none",
) -> Iterator[Part]:
    """Every launch of a step in the order of a block, with how many layers make it.

    Args:
        cache: as in `AttentionProblem`.
        rows: of a request: its new token, and drafts that are verified.
        x_format, activation: as in `of_model`.

    Raises:
        KnobError: no kernel serves a layer on the target.
    """
    count = multiprocessors or arch.multiprocessors
    attention = cached(batch, context, 16, cache)
    tokens = batch * rows
    needed = of_model(
        model, arch, dict.fromkeys(KINDS, "mxfp4"), tokens=tokens, attention=attention, x_format=x_format,
        activation=activation,
    )  # fmt: skip
    products = {(item.n, item.k): item for item in needed if isinstance(item, Linear) and item.bias == model.bias}
    heads = {(item.n, item.k): item for item in needed if isinstance(item, Linear) and not item.bias}
    experts = next(item for item in needed if isinstance(item, Experts))
    layers = [item.problem for item in needed if isinstance(item, Attention)]

    def of(label: str, many: int, item: Needed) -> Iterator[Part]:
        return of_layer(label, many, item, tokens, arch, count)

    yield from of("qkv", model.layers, products[model.qkv])
    for problem in layers:
        windowed = -(-model.layers // 2) if problem.window else model.layers // 2
        label = f"attention, window {problem.window}" if problem.window else "attention"
        asked = replace(problem, batch=batch, context=context, queries=rows)
        for choice in choices(asked, arch, count):
            yield Part(label, windowed, Launch(choice))
    yield from of("o", model.layers, products[model.o])
    yield from of("experts", model.layers, experts)
    yield from (Part("last norm", 1, one) for one in norm(model.hidden, "bf16", arch, count))
    yield from of("lm_head", 1, heads[model.lm_head])
    logits = arch.name, None, tokens, model.vocabulary, "bf16"
    if rows > 1:
        yield from of("acceptance", 1, Acceptance(*logits))
    else:
        yield from of("sampler", 1, Sampler(*logits))


def of_layer(label: str, many: int, item: Needed, tokens: int, arch: Arch, multiprocessors: int) -> Iterator[Part]:
    """The launches of a layer for so many tokens, which `many` layers of the model make."""
    made = list(item.made(tokens, arch, multiprocessors))
    # What another family makes comes before: the norm, and of experts their routing.
    last = max(made, key=lambda launch: _PLACES.get(launch.choice.variant.spec.family, len(_PLACES)))
    own = last.choice.variant.spec.family
    for launch in sorted(made, key=lambda launch: _PLACES.get(launch.choice.variant.spec.family, len(_PLACES))):
        family = launch.choice.variant.spec.family
        yield Part(label if family == own else f"{label}: {family}", many, launch)


def price(
    model: Model,
    arch: Arch,
    batch: int,
    context: int,
    *,
    cache: str = "same",
    rows: int = 1,
    x_format: str = "bf16",
    activation: str = "none",
) -> Step:
    """A step with what each launch costs.

    Args:
        cache, rows, x_format, activation: as for `parts`.

    Raises:
        ArchError: no card of the target has parameters.
        KnobError: no kernel serves a layer on the target.
    """
    card = cards.of(arch)
    made = parts(
        model, arch, batch, context, cache=cache, rows=rows, multiprocessors=card.multiprocessors, x_format=x_format,
        activation=activation,
    )  # fmt: skip
    return Step(arch.name, card.name, batch, context, priced(made, card, batch * rows))


def priced(made: Iterable[Part], card: Card, tokens: int) -> list[Priced]:
    """Launches with what each costs, `times` over all layers."""
    found = []
    for part in made:
        one = launches.price(part.launch, card, part.label, rows=tokens)
        found.append(replace(one, times=part.launch.times * part.layers))
    return found
