"""`jitmx bench`: what the kernels reach on the present card."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitmx import models
from jitmx.cli import output, roofline, shapes, targets
from jitmx.cli.options import Count, json_option
from jitmx.registry.spec import MAX_SIZE

if TYPE_CHECKING:
    from jitmx.bench.benchmarks import Ceilings

WHAT = ("linear", "routing", "moe", "quantize", "launch")
PEERS = {
    "linear": ("humming", "marlin", "triton_kernels"), "moe": ("humming", "triton", "marlin"), "routing": ("torch",)
}  # fmt: skip
ALL_PEERS = tuple(dict.fromkeys(name for names in PEERS.values() for name in names))
FORMATS = ("bf16", "mxfp8", "mxfp6", "mxfp4")
ROWS = (1, 4, 16, 64, 512, 8192)
MOE_ROWS = (1, 4, 16, 64, 8192)


@click.command(
    "bench",
    epilog="""\b
Examples:
  jitmx bench                             every benchmark
  jitmx bench linear -m 1,8               gpt-oss-120b's dense products at 1 and 8 rows
  jitmx bench linear -n 4096 -k 4096 --plot roofline.png
  jitmx bench linear --peers humming      beside Humming only; --peers none: beside cuBLAS only
  jitmx bench routing -m 1,64             gpt-oss-120b's routers alone, beside torch's linear, topk and softmax
  jitmx bench moe --plot moe.png          gpt-oss-120b's experts, from router logits to the combined output
  jitmx bench moe --model gpt-oss-20b -m 1,16 --seed 7
  jitmx bench launch --json               host time of a warm call

\b
linear    medians in CUDA graphs of dependent calls over weights that rotate past the L2, beside cuBLAS in bf16 and
          the other libraries' MXFP4 products that are installed
routing   the same of router product, top-k and softmax, without and with RMSNorm whose rows are written as well: over
          routers that rotate past the L2, over as many as the model has, and with no launch started before the last one
          ended; ids are checked against torch.topk and weights against float64, and the floor has no launch in it
moe       the same of a layer of experts, each call with a routing of its own that spreads as a trained router's and
          whose experts no cache holds, beside vLLM's experts that can be imported; the floor is the bytes of the
          experts hit at the read rate, or the operations at the matmul rate
quantize  64 MB of bf16 to each format and back
launch    host time a call
Read, copy and matmul rates are measured in the same run.
""",
)
@click.argument("what", type=click.Choice(WHAT), nargs=-1)
@click.option(
    "-m", "rows", multiple=True, callback=shapes.size_list, metavar="M,...",
    help="Row counts for linear and routing (default: 1,4,16,64,512,8192, for an output layer up to 512) and moe "
    "(1,4,16,64,8192).",
)  # fmt: skip
@click.option(
    "--peers", "asked", default="all", show_default=True, metavar="NAME,...",
    help="Libraries beside cuBLAS: all, none, or of humming, marlin, triton_kernels; for moe humming, triton, marlin; "
    "for routing torch.",
)  # fmt: skip
@click.option(
    "--model", type=click.Choice(list(models.NAMED)), default="gpt-oss-120b", show_default=True,
    help="Whose experts for moe, and whose routers for routing.",
)  # fmt: skip
@click.option(
    "--x-format", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True,
    help="What moe's activations are rounded to.",
)  # fmt: skip
@click.option(
    "--seed", type=Count(0, (1 << 63) - 1), default=0, show_default=True,
    help="Of moe's routing, and of routing's routers.",
)  # fmt: skip
@click.option("-n", "n", type=Count(1, MAX_SIZE), help="Output features, instead of gpt-oss-120b's shapes; with -k.")
@click.option("-k", "k", type=Count(32, MAX_SIZE), help="Input features, a multiple of 32; with -n.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path),
    help="Draw linear or moe under the roofline into this PNG; of both, moe into another one beside it.",
)  # fmt: skip
@json_option
def command(
    what: tuple[str, ...],
    rows: tuple[int, ...],
    asked: str,
    model: str,
    x_format: str,
    seed: int,
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
    if plot and not {"linear", "moe"} & set(wanted):
        raise click.UsageError("--plot draws linear and moe; name one among the benchmarks")
    if plot:
        roofline.require_matplotlib()
        if not plot.parent.is_dir():
            raise click.UsageError(f"--plot {plot}: there is no folder {plot.parent}; make it, or name another")
    targets.require_gpu("bench")
    from jitmx.bench import benchmarks

    limits = benchmarks.ceilings()
    payload: dict[str, Any] = {"ceilings": dataclasses.asdict(limits)}
    if "linear" in wanted:
        sizes = [("", n, k)] if n and k else [(name, *shape) for name, shape in models.GPT_OSS_120B.dense.items()]
        payload["linear"] = [
            row
            for size in sizes
            for row in benchmarks.bench_linear([size], rows or shapes.usual_rows(size[1], ROWS), _of("linear", peers))
        ]
    if "routing" in wanted:
        payload["routing"] = _routing(model, rows or ROWS, limits, _of("routing", peers), seed)
    if "moe" in wanted:
        payload["moe"] = _moe(model, x_format, rows or MOE_ROWS, limits, _of("moe", peers), seed)
    if "quantize" in wanted:
        payload["quantize"] = benchmarks.bench_quantize()
    if "launch" in wanted:
        payload["launch"] = benchmarks.bench_launch()
    if plot and "linear" in payload:
        roofline.draw(payload["linear"], limits, plot)
    if plot and "moe" in payload:
        beside = plot.with_stem(f"{plot.stem}-moe") if "linear" in payload else plot
        roofline.draw_moe(payload["moe"]["rows"], payload["moe"]["model"], limits, beside)
    if as_json:
        output.emit(payload)
    else:
        _show(payload, limits)


def _peers(text: str) -> tuple[str, ...]:
    if text in ("all", "none"):
        return ALL_PEERS if text == "all" else ()
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in ALL_PEERS:
            raise click.UsageError(f"--peers {name} is not one of {', '.join(ALL_PEERS)}, all or none")
    return names


def _of(what: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the libraries that a benchmark can run."""
    return tuple(name for name in asked if name in PEERS[what])


def _moe(
    model: str, x_format: str, rows: tuple[int, ...], limits: Ceilings, peers: tuple[str, ...], seed: int
) -> dict[str, Any]:
    from jitmx.bench import moe as benchmarks_moe
    from jitmx.bench import moe_inputs

    shape = dataclasses.replace(moe_inputs.MODELS[model], x_format=x_format)
    found = benchmarks_moe.bench_moe(shape, rows, limits, peers, seed)
    return {"model": model, "seed": seed, "shape": dataclasses.asdict(shape), "rows": found}


def _routing(model: str, rows: tuple[int, ...], limits: Ceilings, peers: tuple[str, ...], seed: int) -> dict[str, Any]:
    from jitmx.bench import routing as benchmarks_routing

    shape = benchmarks_routing.MODELS[model]
    found = benchmarks_routing.bench_routing(shape, rows, limits, peers, seed)
    return {"model": model, "seed": seed, "shape": dataclasses.asdict(shape), "rows": found}


def _show(payload: dict[str, Any], limits: Ceilings) -> None:
    output.say(
        f"{limits.card}: read {limits.read / 1e12:.2f} TB/s, copy {limits.copy / 1e12:.2f} TB/s, "
        f"bf16 matmul {limits.matmul / 1e12:.0f} TFLOP/s, measured in this run"
    )
    if "linear" in payload:
        output.say()
        _show_linear(payload["linear"], limits)
    if "routing" in payload:
        output.say()
        _show_routing(payload["routing"])
    if "moe" in payload:
        output.say()
        _show_moe(payload["moe"], limits)
    if "quantize" in payload:
        output.say()
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
        output.say()
        output.table(
            ("HOST TIME OF A WARM CALL", "US"),
            [(row["name"], f"{row['us']:.2f}") for row in payload["launch"]],
            right=("US",),
        )


def _show_linear(rows: list[dict[str, Any]], limits: Ceilings) -> None:
    names = list(rows[0]["peers"])
    headers = ["SHAPE", "N", "K", "M", "KERNEL", "US", "TB/S", "OF READ", "TFLOP/S", "CUBLAS BF16 US", "SPEED-UP"]
    peers = [f"{name.upper()} US" for name in names]
    output.table(
        (*headers, *peers),
        [
            (
                row["name"], row["n"], row["k"], row["m"], row["kernel"], f"{row['us']:.2f}",
                f"{row['bytes'] / row['us'] / 1e6:.2f}", f"{row['bytes'] / row['us'] * 1e6 / limits.read:.0%}",
                f"{row['flops'] / row['us'] / 1e6:.1f}", f"{row['cublas_us']:.2f}",
                f"{row['cublas_us'] / row['us']:.2f}", *(_us(row, name) for name in names),
            )
            for row in rows
        ],
        right=(*headers[1:4], *headers[5:], *peers),
    )  # fmt: skip
    _show_reasons(rows)


def _show_moe(payload: dict[str, Any], limits: Ceilings) -> None:
    rows = payload["rows"]
    names = list(rows[0]["peers"])
    headers = ["M", "EXPERTS HIT", "KERNEL", "US", "FLOOR US", "OF FLOOR", "TB/S", "OF COPY", "TFLOP/S"]
    peers = [f"{name.upper()} US" for name in names]
    output.say(f"experts of {payload['model']}, from router logits to the combined output, seed {payload['seed']}")
    output.table(
        (*headers, *peers),
        [
            (
                row["m"], f"{row['hit']:.1f}", row["kernel"], f"{row['us']:.2f}", f"{row['floor_us']:.2f}",
                f"{row['floor_us'] / row['us']:.0%}", f"{row['bytes'] / row['us'] / 1e6:.2f}",
                f"{row['bytes'] / row['us'] * 1e6 / limits.copy:.0%}", f"{row['flops'] / row['us'] / 1e6:.1f}",
                *(_us(row, name) for name in names),
            )
            for row in rows
        ],
        right=(*headers[:2], *headers[3:], *peers),
    )  # fmt: skip
    _show_reasons(rows)


def _show_routing(payload: dict[str, Any]) -> None:
    rows, layers = payload["rows"], payload["shape"]["layers"]
    names = list(rows[0]["peers"])
    headers = ["M", "RMSNORM", "KERNEL", "US", "FLOOR US", "OF FLOOR", "TB/S", f"{layers} ROUTERS US", "NO OVERLAP US"]
    peers = [f"{name.upper()} US" for name in names]
    output.say(
        f"routers of {payload['model']} that rotate past the L2, top-k and softmax, seed {payload['seed']}; "
        f"and over {layers} only, and without launches that overlap"
    )
    output.table(
        (*headers, *peers),
        [
            (
                row["m"], "yes" if row["norm"] else None, row["kernel"], f"{row['us']:.2f}", f"{row['floor_us']:.2f}",
                f"{row['floor_us'] / row['us']:.0%}", f"{row['bytes'] / row['us'] / 1e6:.2f}",
                f"{row['model_us']:.2f}", f"{row['serial_us']:.2f}", *(_us(row, name) for name in names),
            )
            for row in rows
        ],
        right=(headers[0], *headers[3:], *peers),
    )  # fmt: skip
    _show_reasons(rows)


def _us(row: dict[str, Any], name: str) -> str | None:
    found = row["peers"][name]["us"]
    return None if found is None else f"{found:.2f}"


def _show_reasons(rows: list[dict[str, Any]]) -> None:
    """Why a library has no time, once each, on stderr."""
    for name in rows[0]["peers"]:
        reasons = dict.fromkeys(row["peers"][name]["reason"] for row in rows if row["peers"][name]["reason"])
        for text in reasons:
            output.say(f"{name}: {text}", err=True)
