"""`jitmx bench`: what the kernels reach on the present card."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitmx.cli import output
from jitmx.cli.options import json_option
from jitmx.errors import DriverError, KnobError

if TYPE_CHECKING:
    from jitmx.ops.benchmarks import Ceilings

WHAT = ("linear", "quantize", "launch")


def _numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers such as 1,2,4,8") from None
    if min(numbers) < 1:
        raise click.BadParameter(f"{min(numbers)} is below 1")
    return numbers


@click.command(
    "bench",
    epilog="""\b
Examples:
  jitmx bench                             every benchmark
  jitmx bench linear -m 1,8               gpt-oss-120b's dense products at 1 and 8 rows
  jitmx bench linear -n 4096 -k 4096 --plot roofline.png
  jitmx bench launch --json               host time of a warm call

\b
linear    medians in CUDA graphs of dependent calls over weights that rotate past the L2, beside cuBLAS in bf16
quantize  64 MB of bf16 to each format and back
launch    host time a call
Read, copy and matmul rates are measured in the same run.
""",
)
@click.argument("what", type=click.Choice(WHAT), nargs=-1)
@click.option("-m", "rows", default="1,2,4,8", callback=_numbers, help="Row counts for linear.", show_default=True)
@click.option("-n", "n", type=click.IntRange(1), help="Output features, instead of gpt-oss-120b's shapes; with -k.")
@click.option("-k", "k", type=click.IntRange(32), help="Input features, a multiple of 32; with -n.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw linear against the roofline into this PNG."
)
@json_option
def command(
    what: tuple[str, ...], rows: tuple[int, ...], n: int | None, k: int | None, plot: Path | None, as_json: bool
) -> None:
    """Measure the kernels on the present card."""
    if (n is None) != (k is None):
        raise click.UsageError("-n and -k go together")
    if k is not None and k % 32:
        raise click.UsageError(
            f"-k {k} is not a multiple of 32; the nearest are {k // 32 * 32} and {k // 32 * 32 + 32}"
        )
    wanted = what or WHAT
    if plot and "linear" not in wanted:
        raise click.UsageError("--plot draws linear; name it among the benchmarks")
    if plot:
        _require_matplotlib()
    try:
        import torch
    except ImportError:
        raise KnobError("bench needs torch; install it with: pip install 'jitmx[torch]'") from None
    if not torch.cuda.is_available():
        raise DriverError("bench needs a GPU that torch can use, and there is none here; `jitmx doctor --gpu` says why")

    from jitmx.ops import benchmarks

    limits = benchmarks.ceilings()
    payload: dict[str, Any] = {"ceilings": dataclasses.asdict(limits)}
    if "linear" in wanted:
        shapes = [("", n, k)] if n and k else [(name, *shape) for name, shape in benchmarks.GPT_OSS.items()]
        payload["linear"] = benchmarks.bench_linear(shapes, rows)
    if "quantize" in wanted:
        payload["quantize"] = benchmarks.bench_quantize()
    if "launch" in wanted:
        payload["launch"] = benchmarks.bench_launch()
    if plot:
        _draw(payload["linear"], limits, plot)
    if as_json:
        output.emit(payload)
    else:
        _show(payload, limits)


def _show(payload: dict[str, Any], limits: Ceilings) -> None:
    click.echo(
        f"{limits.card}: read {limits.read / 1e12:.2f} TB/s, copy {limits.copy / 1e12:.2f} TB/s, "
        f"bf16 matmul {limits.matmul / 1e12:.0f} TFLOP/s, measured in this run"
    )
    if "linear" in payload:
        click.echo()
        output.table(
            ("SHAPE", "N", "K", "M", "US", "TB/S", "OF READ", "CUBLAS BF16 US", "SPEED-UP"),
            [
                (
                    row["name"], row["n"], row["k"], row["m"],
                    f"{row['us']:.2f}", f"{row['bytes'] / row['us'] / 1e6:.2f}",
                    f"{row['bytes'] / row['us'] * 1e6 / limits.read:.0%}", f"{row['cublas_us']:.2f}",
                    f"{row['cublas_us'] / row['us']:.2f}",
                )
                for row in payload["linear"]
            ],
            right=("N", "K", "M", "US", "TB/S", "OF READ", "CUBLAS BF16 US", "SPEED-UP"),
        )  # fmt: skip
    if "quantize" in payload:
        click.echo()
        output.table(
            ("QUANTIZE, 64 MB", "US", "TB/S", "OF COPY"),
            [
                (
                    row["name"], f"{row['us']:.1f}", f"{row['bytes'] / row['us'] / 1e6:.2f}",
                    f"{row['bytes'] / row['us'] * 1e6 / limits.copy:.0%}",
                )
                for row in payload["quantize"]
            ],
            right=("US", "TB/S", "OF COPY"),
        )  # fmt: skip
    if "launch" in payload:
        click.echo()
        output.table(
            ("HOST TIME OF A WARM CALL", "US"),
            [(row["name"], f"{row['us']:.2f}") for row in payload["launch"]],
            right=("US",),
        )


def _require_matplotlib() -> None:
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise KnobError("--plot needs matplotlib; install it with: pip install 'jitmx[bench]'")


def _draw(rows: list[dict[str, Any]], limits: Ceilings, path: Path) -> None:
    """TFLOP/s over operations a byte, under the roof of this run's read bandwidth and matmul rate."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    intensity = np.geomspace(1, 1e4, 200)
    axes.loglog(
        intensity,
        np.minimum(intensity * limits.read, limits.matmul) / 1e12,
        color="black",
        label="roof, measured in this run",
    )
    for name, marker in zip(dict.fromkeys((row["name"], row["n"], row["k"]) for row in rows), "osD^vP*X", strict=False):
        mine = [row for row in rows if (row["name"], row["n"], row["k"]) == name]
        x = [row["flops"] / row["bytes"] for row in mine]
        axes.loglog(
            x,
            [row["flops"] / row["us"] / 1e6 for row in mine],
            marker=marker,
            label=f"jitmx {name[0]} [{name[1]}, {name[2]}]",
        )
        for row, at in zip(mine, x, strict=True):
            axes.annotate(
                f"m={row['m']}",
                (at, row["flops"] / row["us"] / 1e6),
                textcoords="offset points",
                xytext=(4, -10),
                fontsize=7,
            )
    axes.set(
        xlabel="operations a byte of packed weight, X and Y", ylabel="TFLOP/s", title=f"jitmx linear on {limits.card}"
    )
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
