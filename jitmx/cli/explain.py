"""`jitmx explain`: which kernel a call takes, and who decided."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from jitmx.cli import output, targets
from jitmx.cli.options import arch_option, json_option

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.kernels import Problem


def _read(op: str, problem: type[Problem], words: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a problem from `name=value` words, each read as the type of its field."""
    fields = {item.name: item.default for item in dataclasses.fields(problem)}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in fields:
            raise click.UsageError(f"{word!r} is no field=value of {op}; its fields: {', '.join(fields)}")
        default = fields[name]
        if isinstance(default, bool):
            if text.lower() not in ("0", "1", "false", "true"):
                raise click.UsageError(f"{word!r}: {name} is 0 or 1")
            found[name] = text.lower() in ("1", "true")
        elif isinstance(default, int):
            if not text.isdecimal() or int(text) < 1:
                raise click.UsageError(f"{word!r}: {name} is a whole number of 1 or more")
            found[name] = int(text)
        else:
            found[name] = text
    return found


@click.command(
    "explain",
    short_help="Which kernel a call takes, and who decided.",
    epilog="""\b
Examples:
  jitmx explain linear --arch sm_121 -m 1 -n 5120 -k 2880
  jitmx explain linear --arch sm_90 -m 4 -n 201088 -k 2880 bias=1 dtype=fp16 --json
  jitmx explain quantize --arch sm_121 format=mxfp8
  JITMX_LINEAR_KNOBS=stages=2 jitmx explain linear --arch sm_121 -m 1 -n 5120 -k 2880

\b
Order of authority: argument, environment, your own table (JITMX_TACTICS), the shipped table, the heuristic.
""",
)
@click.argument("op")
@click.argument("field", nargs=-1, metavar="[FIELD=VALUE]...")
@arch_option("Target, such as sm_121 (default: that of the GPU here, else JITMX_ARCH).")
@click.option("-m", "m", type=click.IntRange(min=1), help="Rows of the activations: the same as m=...")
@click.option("-n", "n", type=click.IntRange(min=1), help="Output features: the same as n=...")
@click.option("-k", "k", type=click.IntRange(min=1), help="Input features: the same as k=...")
@click.option(
    "--sms", type=click.IntRange(min=1), help="SM count (default: the GPU's here, else that of the target's card)."
)
@json_option
def command(
    op: str,
    field: tuple[str, ...],
    targets_asked: tuple[Arch, ...],
    m: int | None,
    n: int | None,
    k: int | None,
    sms: int | None,
    as_json: bool,
) -> None:
    """Say which kernel and knobs a call of OP takes on a target, and which table or rule decided.

    Fields that are not given are those of the operator's first typical call.
    """
    from jitmx import kernels
    from jitmx.dispatch import choose

    shape = {name: value for name, value in (("m", m), ("n", n), ("k", k)) if value is not None}
    shape |= _read(op, kernels.family(op).problem, field)
    found = targets.resolve(targets_asked)
    if len(found) > 1:
        raise click.UsageError(f"{', '.join(map(str, found))}: explain one target at a time; pass one --arch")
    count = sms or next(iter(targets.multiprocessors(found[0])), None)
    explanation = choose.explain(op, found[0], multiprocessors=count, **shape)
    if as_json:
        output.emit(explanation.to_dict())
        return
    for line in explanation.lines():
        click.echo(line)
