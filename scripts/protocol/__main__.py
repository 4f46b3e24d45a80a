"""Command line of the protocol; scripts/test_level*.sh and others are names for its verbs."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from jitmx.errors import JitmxError
from scripts.protocol import configurations, correctness, features, figures, levels, metadata, needle, regression
from scripts.protocol import reference as references
from scripts.protocol.configurations import Configuration
from scripts.protocol.engines import Place
from scripts.protocol.levels import Asked
from scripts.protocol.report import FAILED, SCHEMA_VERSION, ProtocolError, Report, load, save
from scripts.protocol.sizes import PRESETS

_F = TypeVar("_F", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False, path_type=Path)
_OLD_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)
_OLD_FOLDER = click.Path(file_okay=False, exists=True, path_type=Path)


class _Group(click.Group):
    """Turns what is raised on purpose into a message, and a report into a file, a line and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        signal.signal(signal.SIGTERM, _end)
        try:
            return super().invoke(ctx)
        except (ProtocolError, JitmxError) as error:
            raise click.UsageError(str(error), ctx) from None


def _end(number: int, frame: object) -> None:
    """A level that is told to end ends its engines on the way out."""
    raise SystemExit(128 + number)


@click.group(cls=_Group, context_settings={"show_default": True, "max_content_width": 120})
def main() -> None:
    """The test protocol around vLLM with jitmx. Exit codes: 0 passed, 1 a check failed, 2 it could not be run."""


def _numbers(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{text!r} is no list of positive numbers such as 1,16,64")
    return found


def _options(context: click.Context, option: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE, such as max_model_len=32768")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _common(level: str) -> Callable[[_F], _F]:
    """The options that every level takes that starts an engine."""

    def add(function: _F) -> _F:
        for option in reversed(
            (
                click.option("--model", type=_OLD_FOLDER, help="Folder of a gpt-oss checkpoint."),
                click.option(
                    "--synthetic", type=click.Choice(list(PRESETS)),
                    help="Make a checkpoint with random weights instead, its dense weights on the MXFP4 grid.",
                ),
                click.option(
                    "--layers", default="all",
                    help="What jitmx serves: moe,qkv,o,lm_head (dense ones with :mxfp8), all, or none for stock vLLM.",
                ),
                click.option(
                    "--backend", type=click.Choice(configurations.STOCK), default="auto",
                    help="vLLM's for the experts, where jitmx does not serve them.",
                ),
                click.option(
                    "--activation", type=click.Choice(configurations.ACTIVATIONS), default="bf16",
                    help="What jitmx's experts round their inputs to.",
                ),
                click.option("--tile", default="auto", help="Tile of jitmx's experts, such as 64x128."),
                click.option(
                    "--attention", type=click.Choice(configurations.ATTENTION), default="auto",
                    help="Jitmx's, vLLM's (off), or what jitmx takes by default.",
                ),
                click.option(
                    "--speculate", type=_OLD_FOLDER,
                    help="Folder of an Eagle3 draft (scripts/make_draft.py), with which engines that are tested draft.",
                ),
                click.option("--drafts", type=click.IntRange(1), default=2, help="Of --speculate: tokens a step."),
                click.option("--draft-layers", default="all", help="Of --speculate: what jitmx serves of the draft."),
                click.option(
                    "--out", type=_FOLDER, default=f"protocol-out/{level}", help="Folder for logs and report.json."
                ),
                click.option(
                    "--engine", "options", multiple=True, callback=_options, metavar="NAME=VALUE",
                    help="An argument of vLLM's engine, VALUE in JSON; repeatable.",
                ),
                click.option("--seed", default=0, help="Of prompts."),
                click.option("--timeout", default=3600.0, help="Seconds that one engine may take, start included."),
            )
        ):  # fmt: skip
            function = option(function)
        return function

    return add


def _asked(given: dict[str, Any]) -> Any:
    """What a level is asked for, from the options of `_common`, which are taken out of `given`."""
    model, preset, out = given.pop("model"), given.pop("synthetic"), given.pop("out").resolve()
    if (model is None) == (preset is None):
        raise ProtocolError("give --model FOLDER or --synthetic PRESET, one of them")
    fields = {name: given.pop(name) for name in ("backend", "activation", "tile", "attention")}
    served, draft = configurations.layers(given.pop("layers")), given.pop("speculate")
    drafts, of_draft = given.pop("drafts"), given.pop("draft_layers")
    if draft is not None:
        fields |= {"speculate": str(draft.resolve()), "drafts": drafts, "draft": of_draft if served else "none"}
    ours = Configuration(served, **fields)
    if preset is not None:
        model = out / f"model-{preset}"
        if not (model / "config.json").is_file():
            from scripts.protocol import checkpoint

            checkpoint.write(model, PRESETS[preset], on_grid=True)
    return Asked(Place(model.resolve(), out, given.pop("options"), given.pop("timeout")), ours, given.pop("seed"))


def _finish(report: Report, path: Path, model: Path | None = None) -> None:
    report.metadata = metadata.collect(model)
    save(report.payload(), path)
    failed = [check for check in report.checks if not check.passed]
    verdict = "passed" if report.passed else "FAILED"
    click.echo(f"level {report.level} {verdict}: {len(failed)} of {len(report.checks)} checks failed; {path}")
    if not report.passed:
        raise click.exceptions.Exit(FAILED)


def _run(level: Callable[..., Report], given: dict[str, Any], **more: Any) -> None:
    asked = _asked(given)
    report = level(asked, **{name: value(asked) if callable(value) else value for name, value in more.items()}, **given)
    _finish(report, asked.place.out / "report.json", asked.place.model)


_attentions_option = click.option(
    "--attentions", help="Of on, off and auto, separated by commas, over --attention; each with every choice of layers."
)
_stock_option = click.option(
    "--stock", default="triton,marlin", help="Stock backends to compare with, separated by commas."
)


def _stock(text: str) -> tuple[Configuration, ...]:
    return tuple(Configuration(backend=name.strip()) for name in text.split(","))


def _layers_and_attention(given: dict[str, Any], sets: str, attentions: str | None) -> list[tuple[str, str]]:
    """Every choice of layers with every one of attention."""
    of = (given["attention"] if attentions is None else attentions).split(",")
    return [(text, attention.strip()) for text, attention in itertools.product(sets.split(";"), of)]


@main.command()
@_common("level1")
def level1(**given: Any) -> None:
    """Smoke: a server starts, answers, says what serves, and ends when told to."""
    _run(levels.smoke, given)


@main.command("level1.5")
@_common("level1.5")
@click.option("--batches", default="1,16", callback=_numbers, help="Batches to decode.")
@click.option("--prompts", default="512", callback=_numbers, help="Prompts to prefill, tokens.")
def level15(**given: Any) -> None:
    """Kernel path: the kernels that ran are those of the configuration, and no other's. A gate for any figure."""
    _run(levels.kernel_path, given)


@main.command()
@_common("level2")
@_stock_option
@click.option("--sets", help="Choices of layers, separated by ';', over --layers; the stock engines are the same.")
@click.option("--steps", type=click.IntRange(1), default=1000, help="Greedy tokens after a prompt.")
@click.option("--chains", type=click.IntRange(5), default=64, help="Prompts that are continued.")
@click.option(
    "--reference",
    default="cpu",
    help="Where transformers runs in float32: cpu, cuda, or none; or a file that the verb reference wrote.",
)
@_attentions_option
@click.option(
    "--long-tokens",
    type=click.IntRange(0),
    show_default=f"{needle.TOKENS} where max_model_len allows",
    help="Tokens of prompts with a needle; 0: none.",
)
@click.option("--together", is_flag=True, help="Start all engines at once; --engine gives each its share of the card.")
def level2(stock: str, sets: str | None, attentions: str | None, reference: str, **given: Any) -> None:
    """Correctness: logits and greedy tokens beside stock backends and transformers in float32."""
    backends = _stock(stock)
    if len(backends) != 2 or len(set(backends)) != 2:
        raise ProtocolError(f"--stock {stock}: two different backends are wanted; their distance is the measure")
    pairs = _layers_and_attention(given, given["layers"] if sets is None else sets, attentions)
    (given["layers"], given["attention"]), *more = pairs
    also = [
        Configuration(configurations.layers(text), given["backend"], given["activation"], given["tile"], attention)
        for text, attention in more
    ]
    kept = Path(reference) if reference.endswith(".npz") else reference
    wanted = None if reference == "none" else kept
    _run(correctness.correctness, given, stock=backends, also=also, reference=wanted)


@main.command("reference")
@click.argument("file", type=_FILE)
@click.option("--model", type=_OLD_FOLDER, required=True, help="Folder of a gpt-oss checkpoint.")
@click.option("--device", default="cpu", help="Where transformers runs: cpu or cuda.")
@click.option("--seed", default=0, help="Of prompts.")
@click.option("--long-tokens", type=click.IntRange(0), default=0, help="Of level 2's prompts with a needle; 0: none.")
@click.option("--timeout", default=3600.0, help="Seconds that it may take.")
@click.option("--out", type=_FOLDER, default="protocol-out/reference", help="Folder for its log.")
def reference_file(
    file: Path, model: Path, device: str, seed: int, long_tokens: int, timeout: float, out: Path
) -> None:
    """Float32 logits for level 2 into FILE (.npz), for a machine that has no room for transformers.

    It serves --reference of level 2 on the same checkpoint, seed and long tokens.
    """
    if file.suffix != ".npz":
        raise ProtocolError(f"{file}: a reference is named .npz")
    place = Place(model.resolve(), out.resolve(), {}, timeout)
    prompts = itertools.chain(*correctness.reference_prompts(place.model, seed, long_tokens).values())
    click.echo(json.dumps(references.write(file, place, list(prompts), device)))


@main.command("features")
@_common("features")
@click.option("--stock", default="marlin", help="The stock backend; vLLM's Triton experts take no LoRA.")
@click.option("--steps", type=click.IntRange(1), default=64, help="Greedy tokens after a prompt, with the adapter.")
@click.option("--together", is_flag=True, help="Start both engines at once; --engine gives each its share of the card.")
def features_of_vllm(stock: str, **given: Any) -> None:
    """Features: LoRA, prefix caching and chunked prefill beside a stock backend with the same."""
    _run(features.features, given, stock=Configuration(backend=stock))


@main.command()
@_common("level3")
@click.option("--requests", type=click.IntRange(10), default=100, help="Requests in sequence, and as many in parallel.")
@click.option("--parallel", type=click.IntRange(2), default=4, help="Requests at a time.")
@click.option("--context", type=click.IntRange(128), default=16384, help="Tokens of the long request.")
def level3(**given: Any) -> None:
    """Stress: many requests, several at a time, a long context; no crash and no compile while serving."""
    _run(levels.stress, given)


@main.command()
@_common("level4")
@_stock_option
@click.option("--batches", default="1,4,16,64", callback=_numbers, help="Batches to decode.")
@click.option("--prefill", default="2048,8192", callback=_numbers, help="Prompts to prefill, tokens.")
@click.option("--rounds", type=click.IntRange(1), default=2, help="Engines of each configuration, in turn.")
@click.option(
    "--drift", type=click.FloatRange(min=0), default=figures.DRIFT, help="Between decode rates of one configuration."
)
@click.option("--requests", type=click.IntRange(1), default=20, help="Requests alone, for latencies.")
@click.option("--warm", is_flag=True, help="Caches are warm already: first starts are judged as well.")
def level4(stock: str, batches: tuple[int, ...], prefill: tuple[int, ...], requests: int, **given: Any) -> None:
    """Benchmark: decode and prefill of stock vLLM and jitmx side by side."""
    _run(levels.benchmark, given, stock=_stock(stock), workload=figures.Workload(batches, prefill, requests=requests))


@main.command()
@click.argument("current", type=_OLD_FILE)
@click.option("--baseline", type=_FILE, required=True, help="The stored report of level 4.")
@click.option("--store", is_flag=True, help="Make CURRENT the baseline instead of comparing.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=regression.TOLERANCE, help="Share that may be lost.")
@click.option("--anywhere", is_flag=True, help="Compare although card, model or workload differ.")
@click.option("--out", type=_FILE, default="protocol-out/level5/report.json", help="The report.")
def level5(current: Path, baseline: Path, store: bool, tolerance: float, anywhere: bool, out: Path) -> None:
    """Regression: CURRENT, a report of level 4, against a stored one."""
    now = load(current, "4")
    if store:
        if not now["passed"]:
            raise ProtocolError(f"{current} failed its own checks; a baseline is a report that passed")
        save(now, baseline)
        click.echo(f"{baseline} is the baseline")
        return
    _finish(regression.compare(now, load(baseline, "4"), tolerance=tolerance, anywhere=anywhere), out)


@main.command()
@_common("level6")
@click.option("--sets", default="moe;moe,qkv,o;all", help="Choices of layers, separated by ';'; over --layers.")
@click.option("--activations", default="bf16", help="Formats of the experts' inputs, separated by commas.")
@click.option("--tiles", default="auto", help="Tiles, separated by commas.")
@_attentions_option
@_stock_option
@click.option("--batches", default="1,16", callback=_numbers, help="Batches to decode.")
@click.option("--prefill", default="2048", callback=_numbers, help="Prompts to prefill, tokens.")
def level6(
    sets: str,
    activations: str,
    tiles: str,
    attentions: str | None,
    stock: str,
    batches: tuple[int, ...],
    prefill: tuple[int, ...],
    **given: Any,
) -> None:
    """Matrix: every combination of layers, attention, activation and tile, and stock backends beside them."""
    pairs = _layers_and_attention(given, sets, attentions)
    combinations = [
        Configuration(configurations.layers(text), given["backend"], activation.strip(), tile.strip(), attention)
        for (text, attention), activation, tile in itertools.product(pairs, activations.split(","), tiles.split(","))
    ]
    rows = [*_stock(stock), *dict.fromkeys(combinations)]
    workload = figures.Workload(batches, prefill, decode_tokens=64, requests=5, rounds=1)
    _run(levels.matrix, given, configurations=rows, workload=workload)


@main.command("metadata")
@click.option("--model", type=_OLD_FOLDER, help="Also digests of this checkpoint.")
@click.option("--whole", is_flag=True, help="Read every byte of the model's weights for its digest.")
@click.option("--about", type=json.loads, default="{}", metavar="JSON", help="Flags and workload to keep beside it.")
@click.option("--out", type=_FILE, help="Write there instead of stdout.")
def metadata_of_this_machine(model: Path | None, whole: bool, about: dict[str, Any], out: Path | None) -> None:
    """What a figure depends on: card, driver, clocks, software, environment, model."""
    found = {"schema_version": SCHEMA_VERSION, **metadata.collect(model, whole=whole, about=about)}
    if out is None:
        click.echo(json.dumps(found, indent=2))
    else:
        save(found, out)


@main.command()
@click.option("--stages", help="Some of simulator,tests,sanitizer,tune,bench,moe, instead of all that can be run here.")
@click.option("--out", type=_FOLDER, default="protocol-out/card", help="Folder for all that it writes; summary.json.")
@click.option("--scale", type=click.FloatRange(min=0, min_open=True), default=1.0, help="Multiplies every time limit.")
@click.option("--without-card", is_flag=True, help="Run where no GPU is found: for the stages that need none.")
def card(stages: str | None, out: Path, scale: float, without_card: bool) -> None:
    """Everything that someone with a card can show, stage by stage; a stage that fails does not lose the others."""
    from scripts.protocol import card as stages_of

    report = stages_of.run(
        stages_of.choose(stages), out.resolve(), scale=scale, without_card=without_card, all_of_them=stages is not None
    )
    _finish(report, out.resolve() / "summary.json")


if __name__ == "__main__":
    main(prog_name="protocol")
