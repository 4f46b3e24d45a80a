"""`jitmx explain`: which kernel a call takes, and who decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from jitmx.cli import output, shapes, targets
from jitmx.cli.options import Count, FieldLetters, arch_option, json_option

if TYPE_CHECKING:
    from jitmx.arch import Arch


@click.command(
    "explain",
    cls=FieldLetters,
    short_help="Which kernel a call takes, and who decided.",
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

\b
Order of precedence: argument, environment, your own table (JITMX_TACTICS), the shipped table, the heuristic.
""",
)
@click.argument("op")
@click.argument("field", nargs=-1, metavar="[FIELD=VALUE]...")
@arch_option("Target, such as sm_121 (default: that of the GPU here, else JITMX_ARCH).")
@click.option(
    "--sms", type=Count(1, 1 << 16), help="SM count (default: the GPU's here, else that of the target's card)."
)
@json_option
def command(
    op: str,
    field: tuple[str, ...],
    targets_asked: tuple[Arch, ...],
    sms: int | None,
    as_json: bool,
) -> None:
    """Say which kernel and knobs a call of OP takes on a target, and which table or rule decided.

    Fields that are not given are those of the operator's first typical call, a layer of gpt-oss-120b; -m 4 is short for
    m=4. A tile in the environment also decides that a call runs on a kernel that has one.

    Where no kernel has a step of the call fused for so many rows, RMSNorm say, it says that this runs unfused, and
    explains the launch of what is left. Other launches that the same call makes are listed last.
    """
    from jitmx import kernels
    from jitmx.dispatch.call import explain

    shape = shapes.read(op, kernels.family(op).problem, field)
    found = targets.resolve(targets_asked)
    if len(found) > 1:
        raise click.UsageError(f"{', '.join(map(str, found))}: explain one target at a time; pass one --arch")
    count = sms or next(iter(targets.multiprocessors(found[0])), None)
    explanation = explain(op, found[0], multiprocessors=count, **shape)
    if as_json:
        output.emit(explanation.to_dict())
        return
    for line in explanation.lines():
        output.say(line)
