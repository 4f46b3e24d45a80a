"""`jitmx explain`: which kernel a call takes, who decided, and what it should cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from jitmx.cli import output, shapes, targets
from jitmx.cli.options import Count, FieldLetters, arch_option, as_field, json_option, kv_cache_option
from jitmx.quoting import short

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.kernels import Family
    from jitmx.models import Model
    from jitmx.vllm.request import Request


def _rates(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> list[tuple[float, ...]]:
    found = []
    for text in texts:
        try:
            one = tuple(float(part) for part in text.split(","))
        except ValueError:
            one = ()
        if not 1 <= len(one) <= 16 or not all(1 >= a >= b >= 0 for a, b in zip((1.0, *one), one, strict=False)):
            raise click.BadParameter(f"{short(text)} is no list of up to 16 rates, each at most the one before it")
        found.append(one)
    return found


@click.command(
    "explain",
    cls=FieldLetters,
    short_help="Which kernel a call takes, who decided, and what it costs.",
    epilog="""\b
Examples:
  jitmx explain linear --arch sm_121 -m 1 -n 5120 -k 2880
  jitmx explain linear --arch sm_90 -m 4 -n 201088 -k 2880 bias=1 dtype=fp16 --json
  jitmx explain quantize --arch sm_121 format=mxfp8
  jitmx explain linear --arch sm_121 -m 64 -n 5120 -k 2880 activation=mxfp8 residual=1
  jitmx explain linear --arch sm_121 -m 65 -n 5120 -k 2880 norm=1
  JITMX_LINEAR_KNOBS=stages=2 jitmx explain linear --arch sm_121 -m 1 -n 5120 -k 2880
  JITMX_LINEAR_TILE=64x128x128s4 jitmx explain linear --arch sm_121 -m 512 -n 5120 -k 2880
  jitmx explain moe --arch sm_121 -m 16
  JITMX_MOE_TILE=64x128 jitmx explain moe --arch sm_121 -m 16 experts=32
  jitmx explain attention --arch sm_90 batch=64 context=8192 window=128 cache=e4m3
  jitmx explain attention --arch sm_90 batch=4 queries=2048
  jitmx explain moe --arch sm_121 -m 16 --cost
  jitmx explain moe --arch sm_121 -m 16,64,256,1024 --cost
  jitmx explain --model gpt-oss-120b --arch sm_121 --batch 16 --context 8192
  jitmx explain --model gpt-oss-120b --draft gpt-oss-120b-eagle3 --rates .74,.54 --arch sm_121
  jitmx explain --measured --arch sm_90
  jitmx explain --parameters --arch sm_121

\b
Order of precedence: argument, environment, your own table (JITMX_TACTICS), the shipped table, the heuristic.

\b
Costs, of each launch: MB of device memory at the least, warp instructions of PTX as the simulator counts them,
hand-overs (a launch that waits for the one before; between the blocks of a cluster; between all blocks; to the last
of some), predicted us in a chain of dependent launches, and what most of that is. docs/cost-model.md says how.
""",
)
@click.argument("op", required=False)
@click.argument("field", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--cost", is_flag=True, help="Also what each launch moves, executes and should take.")
@click.option(
    "--rows", type=Count(1, 1 << 24), default=1, help="With --cost: rows of a call whose problem has none (norm)."
)
@click.option(
    "--model", metavar="NAME", help="The cost of a step of decoding: gpt-oss-120b, gpt-oss-20b or a checkpoint."
)
@click.option("--batch", type=Count(1, 1 << 16), default=1, show_default=True, help="Of the model: requests.")
@click.option(
    "--context", type=Count(1, 1 << 24), default=2048, show_default=True, help="Of the model: tokens of each request."
)
@kv_cache_option("Of the model")
@click.option(
    "--draft", metavar="NAME",
    help="Of the model: with its Eagle3 draft in MXFP4, gpt-oss-120b-eagle3, gpt-oss-20b-eagle3-32k or a checkpoint.",
)  # fmt: skip
@click.option(
    "--rates", multiple=True, callback=_rates, metavar="A1,A2...",
    help="Of the draft: the part of proposals whose first 1, 2 ... tokens are accepted; repeatable  [default: .74,.54]",
)  # fmt: skip
@click.option("--measured", is_flag=True, help="The cost model beside every measured time that ships.")
@click.option("--parameters", is_flag=True, help="What the cost model knows of the target's card, and from where.")
@arch_option("Target, such as sm_121 (default: that of the GPU here, else JITMX_ARCH).")
@click.option(
    "--sms", "--multiprocessors", "sms", type=Count(1, 1 << 16),
    help="SM count (default: the GPU's here, else that of the target's card).",
)  # fmt: skip
@json_option
def command(
    op: str | None,
    field: tuple[str, ...],
    cost: bool,
    rows: int,
    model: str | None,
    batch: int,
    context: int,
    kv_cache_dtype: str,
    draft: str | None,
    rates: list[tuple[float, ...]],
    measured: bool,
    parameters: bool,
    targets_asked: tuple[Arch, ...],
    sms: int | None,
    as_json: bool,
) -> None:
    """Say which kernel and knobs a call of OP takes on a target, and which table or rule decided.

    Fields that are not given are those of the operator's first typical call, a layer of gpt-oss-120b; -m 4 is short for
    m=4. A tile in the environment is for calls whose kernel has one; of some families, such as moe, it also decides
    that a call runs on such a kernel.

    A step that no kernel has fused for so many rows, RMSNorm say, is listed as unfused, and the launch of what is left
    is explained. Other launches of the same call are listed last.

    --cost adds what each launch should take; with -m 16,64,256 it prints a line for each, beside its floor. --model, in
    place of OP, prices a whole step of decoding, with inputs rounded as JITMX_MOE_ACTIVATION and
    JITMX_LINEAR_ACTIVATION say for vLLM. --draft adds a step of the model's draft, verification of 1 to k + 1 rows, and
    what speculation gains with k drafts a step.
    """
    if sum(map(bool, (op, model, measured, parameters))) != 1:
        raise click.UsageError("give one of OP, --model, --measured and --parameters; `jitmx variants` lists operators")
    _require_read(model=model is not None, draft=draft is not None, op=op is not None, cost=op is not None and cost)
    if model is not None:
        cache = "e4m3" if kv_cache_dtype == "fp8" else "same"
        if draft is not None:
            _speculation(targets_asked, model, draft, batch, context, rates or [(0.74, 0.54)], cache, as_json)
        else:
            _step(targets_asked, model, batch, context, cache, as_json)
    elif op is None:
        (_measured if measured else _parameters)(targets_asked, as_json)
    else:
        _call(op, field, targets_asked, sms, as_json, rows if cost else None)


def _one(targets_asked: tuple[Arch, ...]) -> Arch:
    """The one target that is asked for.

    Raises:
        click.UsageError: there are several.
    """
    found = targets.resolve(targets_asked)
    if len(found) > 1:
        raise click.UsageError(f"{', '.join(map(str, found))}: explain one target at a time; pass one --arch")
    return found[0]


# Options that nothing reads but beside another, with what they are of and how that is said.
_BESIDE = {
    "batch": ("model", "a step: name the model by --model"),
    "context": ("model", "a step: name the model by --model"),
    "kv_cache_dtype": ("model", "a step: name the model by --model"),
    "draft": ("model", "a step: name the model by --model"),
    "rates": ("draft", "a draft: name it by --draft"),
    "rows": ("cost", "the cost of a call: name OP and pass --cost"),
    "sms": ("op", "a call: name OP"),
    "cost": ("op", "a call: name OP"),
}


def _given(name: str) -> bool:
    """Whether an option stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _require_read(**there: bool) -> None:
    """Raise UsageError for an option that nothing reads."""
    context = click.get_current_context()
    for name, (beside, said) in _BESIDE.items():
        if not there[beside] and _given(name):
            option, field = f"--{name.replace('_', '-')}", as_field(context, name)
            rest = f"give the operator's field as {field}" if field else f"leave {option} out"
            raise click.UsageError(f"{option} is of {said}, or {rest}")


def _require_rows_apart(family: Family, field: tuple[str, ...], *, cost: bool) -> None:
    """Raise UsageError for rows in a form that this call does not take, whose remedy is an option."""
    from jitmx import costs, kernels

    known = {item.name for item in dataclasses.fields(family.problem)}
    if cost and family.axes and _given("rows"):
        rows, first = click.get_current_context().params["rows"], family.axes[0]
        said = f"--rows is of operators whose calls have no field for rows; those of {family.name} are {first}={rows}"
        raise click.UsageError(said)
    for word in field:
        name, _, text = word.partition("=")
        if not cost and name in family.axes and len(text.replace(",", " ").split()) > 1:
            said = f"{short(word)}: without --cost {name} has one value; --cost takes several, a line each"
            raise click.UsageError(said)
        if not cost or family.axes or not costs.of(family.name) or name in known:
            continue
        if name in {other.axes[0] for other in map(kernels.family, kernels.families()) if other.axes}:
            raise click.UsageError(f"{short(word)} is no field of {family.name}; its rows are given by --rows {text}")


def _step(targets_asked: tuple[Arch, ...], model: str, batch: int, context: int, cache: str, as_json: bool) -> None:
    """The launches of a step."""
    from jitmx import models
    from jitmx.cli import cost
    from jitmx.costs import cards
    from jitmx.serving import model_step
    from jitmx.vllm.request import requested

    arch, asked = _one(targets_asked), requested()
    found = model_step.price(
        models.find(model), arch, batch, context, cache=cache, x_format=asked.x_format, activation=asked.activation
    )
    notes = _left_in_bf16(models.find(model), arch, batch, asked)
    if as_json:
        parameters = cost.card_dict(cards.of(arch))["parameters"]
        output.emit({"model": model, **found.to_dict(), "notes": notes, "parameters": parameters})
    else:
        cost.step(found, model)
        for note in notes:
            output.say(note)


def _left_in_bf16(model: Model, arch: Arch, tokens: int, asked: Request) -> list[str]:
    """Of a step, which inputs are not rounded though that is asked for, and why."""
    from jitmx import settings
    from jitmx.serving import rounded_inputs

    found = []
    if asked.x_format != rounded_inputs.x_format_of(tokens, model.experts, model.top, asked.x_format, arch):
        least = rounded_inputs.FP8_ROWS_AN_EXPERT["wgmma" in arch.features]
        said = f"{settings.origin('moe_activation')}={asked.moe_activation}"
        found.append(f"inputs of experts are in bf16: {said} is for {least} rows an expert and more on {arch}")
    if asked.activation != "none" and tokens < rounded_inputs.FP8_ROWS:
        said = f"{settings.origin('linear_activation')}={asked.linear_activation}"
        found.append(f"inputs of dense layers are in bf16: {said} is for {rounded_inputs.FP8_ROWS} tokens and more")
    return found


def _speculation(
    targets_asked: tuple[Arch, ...], model: str, draft: str, batch: int, context: int,
    rates: list[tuple[float, ...]], cache: str, as_json: bool,
) -> None:  # fmt: skip
    """A step of speculation."""
    from jitmx import models
    from jitmx.cli import cost
    from jitmx.costs import cards
    from jitmx.serving import draft_step
    from jitmx.vllm.request import requested

    arch, asked = _one(targets_asked), requested()
    found = draft_step.price(
        models.find(model), models.find_draft(draft), arch, batch, context, rates, cache=cache,
        x_format=asked.x_format, activation=asked.activation,
    )  # fmt: skip
    if as_json:
        said = {"model": model, "draft_model": draft, **found.to_dict()}
        output.emit({**said, "parameters": cost.card_dict(cards.of(arch))["parameters"]})
    else:
        cost.speculation(found, model, draft)


def _measured(targets_asked: tuple[Arch, ...], as_json: bool) -> None:
    """The model beside measured times."""
    from jitmx.cli import cost
    from jitmx.costs import launches, measured
    from jitmx.errors import ArchError

    figures = measured.load()
    arch = _one(targets_asked)
    if arch.name != figures.arch:
        raise ArchError(f"no measured times of {arch} ship with jitmx", f"they are of {figures.arch}; see --parameters")
    rows: list[tuple[measured.Figure, float | None]] = []
    for figure in figures.figures:
        priced = measured.priced(figure, figures.arch)
        known = priced is not None and all(one.prediction for one in priced)
        rows.append((figure, launches.total(priced) if priced is not None and known else None))
    if as_json:
        said = [{**dataclasses.asdict(figure), "predicted_us": us and round(us, 3)} for figure, us in rows]
        output.emit({"arch": figures.arch, "card": figures.card, "note": figures.note, "figures": said})
    else:
        cost.figures(figures, rows)


def _parameters(targets_asked: tuple[Arch, ...], as_json: bool) -> None:
    """What the model knows of a card."""
    from jitmx.cli import cost
    from jitmx.costs import cards

    card = cards.of(_one(targets_asked))
    if as_json:
        output.emit(cost.card_dict(card))
    else:
        cost.parameters(card)


def _rows(
    op: str, arch: Arch, count: int | None, name: str, values: Sequence[int], shape: dict[str, Any], rows: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Calls of several numbers of rows, with what they cost beside their floors."""
    from jitmx.cli import cost
    from jitmx.costs import cards, launches
    from jitmx.dispatch.call import explain

    card = cards.of(arch)
    found = []
    for value in values:
        priced = launches.of_call(explain(op, arch, multiprocessors=count, **shape, **{name: value}), card, rows)
        found.append((value, priced, launches.floor(priced, card)))
    if as_json:
        said = [
            {name: value, "cost": [one.to_dict() for one in priced], "us": round(launches.total(priced), 3),
             "floor_us": round(floor, 3)}
            for value, priced, floor in found
        ]  # fmt: skip
        output.emit({"arch": arch.name, "card": card.name, "calls": said})
    else:
        cost.rows(name, found, card)


def _call(
    op: str, field: tuple[str, ...], targets_asked: tuple[Arch, ...], sms: int | None, as_json: bool, rows: int | None
) -> None:
    """A call, with what it costs where `rows` is given."""
    from jitmx import kernels
    from jitmx.dispatch.call import explain

    family = kernels.family(op)
    _require_rows_apart(family, field, cost=rows is not None)
    lists: dict[str, tuple[int, ...]] = {}
    if rows is None:
        shape = shapes.read(op, family.problem, field)
    else:
        shape, lists = shapes.read_values(op, family.problem, field, family.axes)
    arch = _one(targets_asked)
    count = sms or next(iter(targets.multiprocessors(arch)), None)
    several = [name for name, values in lists.items() if len(values) > 1]
    shape |= {name: values[0] for name, values in lists.items() if name not in several}
    if several:
        if len(several) > 1:
            raise click.UsageError(f"{' and '.join(several)} have several values each; give one of them several")
        _rows(op, arch, count, several[0], lists[several[0]], shape, rows or 1, as_json)
        return
    explanation = explain(op, arch, multiprocessors=count, **shape)
    priced = None
    if rows is not None:
        from jitmx.cli import cost
        from jitmx.costs import cards, launches

        card = cards.of(arch)
        priced = launches.of_call(explanation, card, rows)
    if as_json:
        said = explanation.to_dict()
        if priced is not None:
            known = all(one.prediction for one in priced)
            us = round(launches.total(priced), 3) if known else None
            said |= {"cost": [one.to_dict() for one in priced], "us": us}
        output.emit(said)
        return
    for line in explanation.lines():
        output.say(line)
    if priced is not None:
        cost.call(priced, card)
