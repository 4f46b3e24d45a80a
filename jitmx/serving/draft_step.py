"""A step of speculative decoding with an Eagle3 draft: what its parts cost, and what it gains at given acceptance.

A step verifies k drafts and the token before them, k + 1 rows, and drafts k anew: the draft's first step reads these
rows through fc, the others have a row each and no fc. Of acceptance a step makes 1 + a1 + a2 + ... tokens, where ak is
the part of proposals whose first k tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitmx.arch import Arch
from jitmx.costs import cards
from jitmx.dispatch.call import Launch
from jitmx.layers import DRAFT_KINDS
from jitmx.models import Draft, Model
from jitmx.serving import model_step
from jitmx.serving.attention import Attention, cached, choices
from jitmx.serving.draft import Argmax, DraftInputs, of_draft
from jitmx.serving.linear import Linear
from jitmx.serving.model_step import Part, Step

# What a step of speculation takes outside of graphs: some 25 launches of vLLM's, and the host. Counted, not measured.
HOST_US = 60.0
# By how much fewer experts the rows of one request hit than as many rows that choose on their own: published, at most.
FEWER_EXPERTS = 0.31


@dataclass(frozen=True)
class Gain:
    """What speculation gains.

    Attributes:
        k: drafts a step.
        rates: of each position the part of proposals that is accepted up to there.
        us: predicted us of a step, its launches and `HOST_US`.
        gain: times the speed of decoding without a draft, where rows choose experts on their own.
        gain_shared: the same where rows of a request hit `FEWER_EXPERTS` fewer.
    """

    k: int
    rates: tuple[float, ...]
    us: float
    gain: float
    gain_shared: float

    @property
    def tokens(self) -> float:
        """Tokens a step."""
        return 1 + sum(self.rates)


@dataclass(frozen=True)
class Speculation:
    """A step of speculation, priced.

    Attributes:
        draft: a step of the draft with one row a request, fc included.
        verify: by rows of a request, a step of the target.
        gains: of each k and its rates.
        host_us, fewer_experts: `HOST_US` and `FEWER_EXPERTS`.
    """

    draft: Step
    verify: Mapping[int, Step]
    gains: Sequence[Gain]
    host_us: float = HOST_US
    fewer_experts: float = FEWER_EXPERTS

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        gains = [
            {"k": one.k, "rates": list(one.rates), "tokens": round(one.tokens, 3), "us": round(one.us, 1),
             "gain": round(one.gain, 3), "gain_shared": round(one.gain_shared, 3)}
            for one in self.gains
        ]  # fmt: skip
        return {
            "draft": self.draft.to_dict(), "verify_us": {str(rows): round(step.us, 1) for rows, step in
                                                         self.verify.items()},
            "host_us": self.host_us, "fewer_experts": self.fewer_experts, "gains": gains,
        }  # fmt: skip


def parts(
    draft: Draft, arch: Arch, batch: int, context: int, *, rows: int = 1, first: bool = True, cache: str = "same",
    multiprocessors: int | None = None,
) -> Iterator[Part]:  # fmt: skip
    """Every launch of a draft's step in order, but for vLLM's own between steps.

    Args:
        rows: of a request.
        first: the step reads the target's states.
        cache: as in `AttentionProblem`.

    Raises:
        KnobError: no kernel serves a layer on the target.
    """
    count, tokens = multiprocessors or arch.multiprocessors, batch * rows
    needed = of_draft(
        draft, arch, dict.fromkeys(DRAFT_KINDS, "mxfp4"), tokens=tokens, requests=batch,
        attention=cached(batch, context, 16, cache),
    )  # fmt: skip
    products = {(item.n, item.k): item for item in needed if isinstance(item, Linear)}
    (head,) = [item for item in needed if isinstance(item, Argmax)]
    (seen,) = [item.problem for item in needed if isinstance(item, Attention)]

    def of(kind: str) -> Iterator[Part]:
        return model_step.of_layer(kind, draft.layers, products[draft.dense[kind]], tokens, arch, count)

    if first and draft.states:
        yield from (replace(part, layers=1) for part in of("fc"))
    for item in needed:
        if isinstance(item, DraftInputs):
            yield from model_step.of_layer("inputs", 1, item, tokens, arch, count)
    yield from of("qkv")
    for choice in choices(replace(seen, queries=rows), arch, count):
        yield Part("attention", draft.layers, Launch(choice))
    for kind in ("o", "gate_up", "down"):
        yield from of(kind)
    yield from model_step.of_layer("lm_head", 1, head, batch, arch, count)


def price(
    model: Model, draft: Draft, arch: Arch, batch: int, context: int, rates: Sequence[tuple[float, ...]], *,
    cache: str = "same", x_format: str = "bf16", activation: str = "none",
) -> Speculation:  # fmt: skip
    """A step of speculation, with as many drafts as each acceptance has positions, and with fewer.

    Args:
        cache: as in `AttentionProblem`, of the model and of the draft.
        x_format, activation: as for `model_step.parts`.
        rates: of each position the part of proposals that is accepted up to there.

    Raises:
        ArchError: no card of the target has parameters.
        KnobError: no kernel serves a layer on the target.
    """
    card = cards.of(arch)
    most = max(map(len, rates))
    verify = {
        rows: model_step.price(
            model, arch, batch, context, cache=cache, rows=rows, x_format=x_format, activation=activation
        )
        for rows in range(1, most + 2)
    }

    def step(rows: int, first: bool) -> Step:
        made = parts(draft, arch, batch, context, rows=rows, first=first, cache=cache,
                     multiprocessors=card.multiprocessors)  # fmt: skip
        return Step(arch.name, card.name, batch, context, model_step.priced(made, card, batch * rows))

    following = step(1, False).us
    gains = []
    for given in rates:
        for k in range(1, len(given) + 1):
            drafting = step(k + 1, True).us + (k - 1) * following + HOST_US
            own = given[:k]
            us, shared = (one + drafting for one in (verify[k + 1].us, _shared(verify[1], verify[k + 1], model, k + 1)))
            alone = (1 + sum(own)) * verify[1].us  # us that its tokens take one by one
            gains.append(Gain(k, own, us, alone / us, alone / shared))
    return Speculation(step(1, True), verify, gains)


def _shared(alone: Step, verify: Step, model: Model, rows: int) -> float:
    """Us of a verification whose rows hit fewer experts: what experts take goes by how many are hit."""
    one, many = (_experts(step) for step in (alone, verify))
    first, all_ = (_hit(model, step.batch * count) for step, count in ((alone, 1), (verify, rows)))
    hit = max(first, all_ * (1 - FEWER_EXPERTS))
    return verify.us - (many - one) * (all_ - hit) / (all_ - first)


def _experts(step: Step) -> float:
    return sum(one.us for one in step.launches if one.label == "experts")


def _hit(model: Model, rows: int) -> float:
    """Experts that so many rows hit where each chooses on its own."""
    return model.experts * (1 - (1 - model.top / model.experts) ** rows)
