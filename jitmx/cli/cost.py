"""What `jitmx explain` prints of costs: launches of a call or a step, the model beside measured times, parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitmx.cli import output

if TYPE_CHECKING:
    from jitmx.costs.cards import Card
    from jitmx.costs.launches import Priced
    from jitmx.costs.measured import Figure, Figures
    from jitmx.serving.draft_step import Speculation
    from jitmx.serving.model_step import Step

_RIGHT = ("TIMES", "MB", "INSTRUCTIONS", "US", "ALL US", "MEASURED", "PREDICTED", "OFF")


def handovers(priced: Priced) -> str:
    """Hand-overs of a launch in words: `launch, 2 grid`."""
    kinds = priced.handovers.items()
    return ", ".join(kind if times == 1 else f"{times:.3g} {kind}" for kind, times in kinds)


def _row(one: Priced) -> tuple[object, ...]:
    head = (one.label, one.choice.variant.name, one.times)
    if one.work is None or one.prediction is None:
        return (*head, None, None, None, None, None, "no cost is declared")
    moved = (one.work.bytes + one.work.cached) / 1e6
    counted = None if one.instructions is None else f"{one.instructions / 1e6:.2f} M"
    us = one.prediction.us
    return (
        *head, f"{moved:.2f}", counted, handovers(one), f"{us:.2f}", f"{one.us:.1f}", one.prediction.bound
    )  # fmt: skip


def launches(found: Sequence[Priced]) -> None:
    """Print a line a launch."""
    headers: tuple[str, ...] = (
        "LAYER",
        "KERNEL",
        "TIMES",
        "MB",
        "INSTRUCTIONS",
        "HAND-OVERS",
        "US",
        "ALL US",
        "BOUND BY",
    )
    rows = [_row(one) for one in found]
    if not any(one.label for one in found):
        headers, rows = headers[1:], [row[1:] for row in rows]
    output.table(headers, rows, right=_RIGHT)


def call(found: Sequence[Priced], card: Card) -> None:
    """Print what the launches of a call cost."""
    output.say()
    launches(found)
    unknown = sum(one.prediction is None for one in found)
    if unknown:
        output.say(f"not predicted for {card.name}: no cost is declared of {unknown} of the {len(found)} launches")
        return
    us = sum(one.us for one in found)
    output.say(f"predicted for {card.name}: {us:.2f} us in a chain of calls that depend on one another")


def rows(name: str, found: Sequence[tuple[int, Sequence[Priced], float]], card: Card) -> None:
    """Print a line for each number of rows: what serves it, what that costs and what it takes at the least.

    Args:
        name: of the field that counts rows.
    """
    said: list[tuple[object, ...]] = []
    for count, priced, floor in found:
        kernel, launches = priced[0].choice.variant.name, sum(one.times for one in priced)
        if any(one.prediction is None for one in priced):  # no cost is declared of a kernel
            said.append((count, kernel, launches, None, None, None))
            continue
        us = sum(one.us for one in priced)
        said.append((count, kernel, launches, f"{us:.1f}", f"{floor:.1f}", f"{us / floor:.2f}"))
    headers = (name.upper(), "KERNEL", "LAUNCHES", "US", "FLOOR US", "OF FLOOR")
    output.table(headers, said, right=(name.upper(), "LAUNCHES", "US", "FLOOR US", "OF FLOOR"))
    output.say(
        f"predicted for {card.name}; the floor: bytes at the memory's rate, or operations in bf16 at the products'"
    )


def step(found: Step, name: str) -> None:
    """Print what a step costs."""
    output.say(
        f"{name} on {found.card} ({found.arch}), a step of batch {found.batch} behind {found.context} tokens a request:"
    )
    launches(found.launches)
    output.say(
        f"predicted: {found.us / 1e3:.3f} ms a step, {found.tokens_per_second:.0f} tokens a second where nothing but "
        "these launches takes time"
    )


def speculation(found: Speculation, model: str, draft: str) -> None:
    """Print what a step of speculation costs, and gains."""
    step = found.draft
    output.say(
        f"{model} with {draft} on {step.card} ({step.arch}), batch {step.batch} behind {step.context} tokens a "
        "request, a step of the draft:"
    )
    launches(step.launches)
    output.say(f"predicted: {step.us / 1e3:.3f} ms a step of the draft with one row a request")
    output.say("")
    rows = [(count, f"{one.us / 1e3:.3f}") for count, one in found.verify.items()]
    output.table(("ROWS A REQUEST", "MS"), rows, right=("ROWS A REQUEST", "MS"))
    output.say("")
    headers = "DRAFTS", "ACCEPTED", "TOKENS A STEP", "MS", "GAIN", "GAIN, SHARED"
    gains = [
        (one.k, " ".join(f"{rate:g}" for rate in one.rates), f"{one.tokens:.2f}", f"{one.us / 1e3:.3f}",
         f"{one.gain:.2f}", f"{one.gain_shared:.2f}")
        for one in found.gains
    ]  # fmt: skip
    output.table(headers, gains, right=(*headers[:1], *headers[2:]))
    output.say(
        f"gains are over decoding without a draft, {found.host_us:.0f} us a step outside of graphs included; "
        f"shared: rows of a request hit {found.fewer_experts:.0%} fewer experts than if each chose on its own"
    )


def figures(found: Figures, rows: Sequence[tuple[Figure, float | None]]) -> None:
    """Print the model beside measured times; None where another variant serves the call now."""
    said = []
    for figure, us in rows:
        fields = {**figure.problem, **({"rows": figure.rows} if figure.rows > 1 else {})}
        problem = ", ".join(f"{name}={output.knob(value)}" for name, value in fields.items())
        off = None if us is None else f"{us / figure.us - 1:+.1%}"
        use = "fitted to" if figure.fit else "held out" if figure.kind == "decode" else "beyond decoding"
        said.append((figure.op, problem, f"{figure.us:.2f}", None if us is None else f"{us:.2f}", off, use))
    output.say(f"{found.card} ({found.arch}), us")
    output.table(("OP", "CALL", "MEASURED", "PREDICTED", "OFF", "USE"), said, right=_RIGHT)
    for use, kind, fit in (
        ("fitted to", "decode", True),
        ("held out", "decode", False),
        ("beyond decoding", "many", False),
    ):
        offs = [abs(us / one.us - 1) for one, us in rows if us is not None and one.kind == kind and one.fit == fit]
        if offs:
            within = sum(off <= 0.15 for off in offs)
            mean = sum(off * off for off in offs) ** 0.5 / len(offs) ** 0.5
            output.say(f"{use}: {len(offs)} figures, {within} within 15 %, rms {mean:.1%}, worst {max(offs):.1%}")


def parameters(card: Card) -> None:
    """Print what the model knows of a card, and from where."""
    output.say(f"{card.name} ({card.arch}), {card.multiprocessors} multiprocessors")
    rows = [(name, f"{item.value:.4g}", item.source) for name, item in card.parameters.items()]
    output.table(("PARAMETER", "VALUE", "SOURCE"), rows, right=("VALUE",))


def card_dict(card: Card) -> dict[str, Any]:
    """A card's parameters for `--json`."""
    found = {
        name: {"value": item.value, "source": item.source, "fitted": item.fitted}
        for name, item in card.parameters.items()
    }
    return {"card": card.name, "arch": card.arch, "multiprocessors": card.multiprocessors, "parameters": found}
