"""`jitmx bench`: what the kernels reach on the present card."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitmx.cli import output, roofline, shapes
from jitmx.cli.options import json_option
from jitmx.errors import DriverError, KnobError

if TYPE_CHECKING:
    from jitmx.ops.benchmarks import Ceilings

WHAT = ("linear", "quantize", "launch")
PEERS = ("humming", "marlin", "triton_kernels")
ROWS = (1, 4, 16, 64, 512, 8192)


@click.command(
    "bench",
    epilog="""\b
Examples:
  jitmx bench                             every benchmark
  jitmx bench linear -m 1,8               gpt-oss-120b's dense products at 1 and 8 rows
  jitmx bench linear -n 4096 -k 4096 --plot roofline.png
  jitmx bench linear --peers humming      beside Humming only; --peers none: beside cuBLAS only
  jitmx bench launch --json               host time of a warm call

\b
linear    medians in CUDA graphs of dependent calls over weights that rotate past the L2, beside cuBLAS in bf16 and
          the other libraries' MXFP4 products that are installed
quantize  64 MB of bf16 to each format and back
launch    host time a call
Read, copy and matmul rates are measured in the same run.
""",
)
@click.argument("what", type=click.Choice(WHAT), nargs=-1)
@click.option(
    "-m", "rows", multiple=True, callback=shapes.size_list, metavar="M,...",
    help="Row counts for linear (default: 1,4,16,64,512,8192, for an output layer up to 512).",
)  # fmt: skip
@click.option(
    "--peers", "asked", default="all", show_default=True, metavar="NAME,...",
    help="Libraries beside cuBLAS: all, none, or of humming, marlin, triton_kernels.",
)  # fmt: skip
@click.option("-n", "n", type=click.IntRange(1), help="Output features, instead of gpt-oss-120b's shapes; with -k.")
@click.option("-k", "k", type=click.IntRange(32), help="Input features, a multiple of 32; with -n.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw linear under the roofline into this PNG."
)
@json_option
def command(
    what: tuple[str, ...],
    rows: tuple[int, ...],
    asked: str,
    n: int | None,
    k: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure the kernels on the present card."""
    if (n is None) != (k is None):
        raise click.UsageError("-n and -k go together")
    if k is not None and k % 32:
        raise click.UsageError(
            f"-k {k} is not a multiple of 32; the nearest are {k // 32 * 32} and {k // 32 * 32 + 32}"
        )
    peers = _peers(asked)
    wanted = what or WHAT
    if plot and "linear" not in wanted:
        raise click.UsageError("--plot draws linear; name it among the benchmarks")
    if plot:
        roofline.require_matplotlib()
        if not plot.parent.is_dir():
            raise click.UsageError(f"--plot {plot}: there is no folder {plot.parent}; make it, or name another")
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
        sizes = [("", n, k)] if n and k else [(name, *shape) for name, shape in benchmarks.GPT_OSS.items()]
        payload["linear"] = [
            row
            for size in sizes
            for row in benchmarks.bench_linear([size], rows or shapes.usual_rows(size[1], ROWS), peers)
        ]
    if "quantize" in wanted:
        payload["quantize"] = benchmarks.bench_quantize()
    if "launch" in wanted:
        payload["launch"] = benchmarks.bench_launch()
    if plot:
        roofline.draw(payload["linear"], limits, plot)
    if as_json:
        output.emit(payload)
    else:
        _show(payload, limits)


def _peers(text: str) -> tuple[str, ...]:
    if text in ("all", "none"):
        return PEERS if text == "all" else ()
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in PEERS:
            raise click.UsageError(f"--peers {name} is not one of {', '.join(PEERS)}, all or none")
    return names


def _show(payload: dict[str, Any], limits: Ceilings) -> None:
    click.echo(
        f"{limits.card}: read {limits.read / 1e12:.2f} TB/s, copy {limits.copy / 1e12:.2f} TB/s, "
        f"bf16 matmul {limits.matmul / 1e12:.0f} TFLOP/s, measured in this run"
    )
    if "linear" in payload:
        click.echo()
        _show_linear(payload["linear"], limits)
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


def _show_linear(rows: list[dict[str, Any]], limits: Ceilings) -> None:
    names = list(rows[0]["peers"])
    headers = ["SHAPE", "N", "K", "M", "KERNEL", "US", "TB/S", "OF READ", "TFLOP/S", "CUBLAS BF16 US", "SPEED-UP"]
    peers = [f"{name.upper()} US" for name in names]

    def us(row: dict[str, Any], name: str) -> str | None:
        found = row["peers"][name]["us"]
        return None if found is None else f"{found:.2f}"

    output.table(
        (*headers, *peers),
        [
            (
                row["name"], row["n"], row["k"], row["m"], row["kernel"], f"{row['us']:.2f}",
                f"{row['bytes'] / row['us'] / 1e6:.2f}", f"{row['bytes'] / row['us'] * 1e6 / limits.read:.0%}",
                f"{row['flops'] / row['us'] / 1e6:.1f}", f"{row['cublas_us']:.2f}",
                f"{row['cublas_us'] / row['us']:.2f}", *(us(row, name) for name in names),
            )
            for row in rows
        ],
        right=(*headers[1:4], *headers[5:], *peers),
    )  # fmt: skip
    for name in names:
        reasons = dict.fromkeys(row["peers"][name]["reason"] for row in rows if row["peers"][name]["reason"])
        for text in reasons:
            click.echo(f"{name}: {text}", err=True)
