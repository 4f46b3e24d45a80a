"""`jitmx bench`: what the kernels reach on the present card."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from jitmx import models
from jitmx.cli import output, shapes, targets
from jitmx.cli.options import Count, FieldLetters, NamedPath, json_option
from jitmx.errors import KnobError
from jitmx.quoting import short

if TYPE_CHECKING:
    from jitmx.bench.benchmark import Ceilings
    from jitmx.kernels.benchmark import Benchmark


class _Benchmarks(FieldLetters):
    """The verb, whose help lists what there is to be measured."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        from jitmx import bench

        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, _described(one)) for name, one in bench.known().items()])


def _described(benchmark: Benchmark) -> str:
    fields = f" Fields: {', '.join(benchmark.fields)}." if benchmark.fields else ""
    peers = f" Libraries: {', '.join(benchmark.peers)}." if benchmark.peers else ""
    return f"{benchmark.what}.{fields}{peers}"


@click.command(
    "bench",
    cls=_Benchmarks,
    epilog="""\b
Examples:
  jitmx bench                             every benchmark
  jitmx bench linear -m 1,8               gpt-oss-120b's dense products at 1 and 8 rows
  jitmx bench linear -n 4096 -k 4096 --plot roofline.png
  jitmx bench linear --peers humming      beside Humming only; --peers none: beside cuBLAS only
  jitmx bench routing -m 1,64             gpt-oss-120b's routers alone, beside torch's linear, topk and softmax
  jitmx bench moe --plot moe.png          gpt-oss-120b's experts, from router logits to the combined output
  jitmx bench moe --model gpt-oss-20b -m 1,16 x_format=mxfp8 --seed 7
  jitmx bench moe --model mixtral-8x7b -m 16,64
  jitmx bench moe --experts 8 --top 2 --hidden 4096 --intermediate 14336 -m 64
  jitmx bench attention --peers fa3       gpt-oss-120b's attention: decoding, verification, prompts; beside FA3
  jitmx bench attention batch=1,16 context=2048,65536 cache=e4m3 window=0
  jitmx bench block batch=1,16            gpt-oss-120b's blocks in one graph, and what each launch adds
  jitmx bench launch --json               host time of a warm call

\b
FIELD=VALUE says what is measured, for the benchmarks that have the field; --experts 8 is the same as experts=8, and
-m 4 as m=4.
Read, copy and matmul rates are measured in the same run.
""",
)
@click.argument("words", nargs=-1, metavar="[WHAT]... [FIELD=VALUE]...")
@click.option(
    "--peers", "asked", default="all", show_default=True, metavar="NAME,...",
    help="Libraries beside jitmx: all, none, or some of those that the benchmarks measured name.",
)  # fmt: skip
@click.option(
    "--model", type=click.Choice(list(models.EXPERT_LAYERS), case_sensitive=False), default="gpt-oss-120b",
    show_default=True, help="Whose layers are measured, where the benchmark is of a model's; sizes that are given win.",
)  # fmt: skip
@click.option(
    "--seed", type=Count(0, (1 << 63) - 1), default=0, show_default=True, help="Of what is random in a benchmark."
)
@click.option(
    "--plot", type=NamedPath(dir_okay=False, path_type=Path),
    help="Draw what can be drawn under the roofline into this PNG; of several, the others into PNGs beside it.",
)  # fmt: skip
@json_option
def command(words: tuple[str, ...], asked: str, model: str, seed: int, plot: Path | None, as_json: bool) -> None:
    """Measure the kernels on the present card."""
    from jitmx import bench

    known = bench.known()
    names = dict.fromkeys(word for word in words if "=" not in word)
    for name in names:
        if name not in known:
            raise click.UsageError(f"{short(name)} is not one of {', '.join(known)}")
    wanted = {name: known[name] for name in names or known}
    fields = _fields(wanted, tuple(word for word in words if "=" in word))
    for name, one in wanted.items():
        if one.device and model not in one.models:
            raise click.UsageError(f"{name} is not measured of {model}; its models: {', '.join(one.models)}")
    peers = _peers(asked, wanted)
    drawn = [name for name, one in wanted.items() if one.drawn]
    if plot:
        _require_plot(plot, drawn, [name for name, one in known.items() if one.drawn])
    from jitmx.bench import benchmark

    limits, payload = None, {}
    if any(one.device for one in wanted.values()):
        targets.require_gpu("bench")
        limits = benchmark.ceilings()
        payload["ceilings"] = dataclasses.asdict(limits)
    modules = {name: _module(name, one) for name, one in wanted.items()}
    for name, one in wanted.items():
        beside = tuple(peer for peer in peers if peer in one.peers)
        payload[name] = modules[name].bench(benchmark.Asked(fields[name], model, seed, beside, limits))
    for place, name in enumerate(drawn if plot else ()):
        assert plot is not None
        modules[name].draw(payload[name], limits, plot.with_stem(f"{plot.stem}-{name}") if place else plot)
    if as_json:
        output.emit(payload)
    else:
        _show({name: modules[name].tables(payload[name], limits) for name in wanted}, limits)


def _module(name: str, benchmark: Benchmark) -> ModuleType:
    """The module that measures.

    Raises:
        KnobError: there is none of the name that the family gives.
    """
    try:
        return importlib.import_module(benchmark.module)
    except ModuleNotFoundError as error:
        if error.name != benchmark.module:
            raise
        raise KnobError(f"{name} is to be measured by {benchmark.module}, and there is no such module") from None


def _fields(wanted: Mapping[str, Benchmark], words: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What is given of each benchmark, of the words that are meant for it."""
    from jitmx import kernels

    names = dict.fromkeys(field for one in wanted.values() for field in one.fields)
    for word in words:
        if word.partition("=")[0] not in names:
            said = ", ".join(names) or "none"
            raise click.UsageError(f"{short(word)} is no field=value of {', '.join(wanted)}; fields: {said}")
    found: dict[str, dict[str, Any]] = {}
    for name, one in wanted.items():
        mine = tuple(word for word in words if word.partition("=")[0] in one.fields)
        found[name] = {}
        if mine:
            family = kernels.family(one.family or name)
            values, lists = shapes.read_values(family.name, family.problem, mine, family.axes)
            family.problem(**values)
            found[name] = {**values, **lists}
        one.check(found[name])
    return found


def _peers(text: str, wanted: Mapping[str, Benchmark]) -> tuple[str, ...]:
    """The libraries that are asked for, of those that the benchmarks have."""
    there = tuple(dict.fromkeys(name for one in wanted.values() for name in one.peers))
    if text in ("all", "none"):
        return there if text == "all" else ()
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in there:
            said = ", ".join((*there, "all or none"))
            raise click.UsageError(f"--peers {name} is no library of {', '.join(wanted)}; choices: {said}")
    return names


def _require_plot(plot: Path, drawn: list[str], able: list[str]) -> None:
    """Refuse a plot that could not be drawn before anything is measured."""
    if not drawn:
        raise click.UsageError(f"--plot draws {' and '.join(able)}; name one among the benchmarks")
    from jitmx.bench import roofline

    roofline.require_matplotlib()
    if not plot.parent.is_dir():
        raise click.UsageError(f"--plot {plot}: there is no folder {plot.parent}; make it, or name another")


def _show(found: Mapping[str, Any], limits: Ceilings | None) -> None:
    if limits is not None:
        output.say(
            f"{limits.card}: read {limits.read / 1e12:.2f} TB/s, copy {limits.copy / 1e12:.2f} TB/s, "
            f"bf16 matmul {limits.matmul / 1e12:.0f} TFLOP/s, measured in this run"
        )
    for tables in found.values():
        for table in tables:
            output.say()
            if table.title:
                output.say(table.title)
            output.table(table.headers, table.rows, right=table.right)
            for note in table.notes:
                output.say(note, err=True)
