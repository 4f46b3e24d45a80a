"""`jitmx report`: kernels, evidence, times, cache, settings and toolchain as one page of HTML."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitmx import settings
from jitmx.cli import output, targets
from jitmx.cli.options import NamedPath, arch_option, family_option, json_option
from jitmx.errors import CacheError

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.registry.spec import Variant
    from jitmx.report.page import Section


def _served(arch: Arch, family_names: tuple[str, ...]) -> Iterator[tuple[Any, bool]]:
    """Choices of typical calls on a target, one for each variant, and whether it is all that its call runs."""
    from jitmx import kernels
    from jitmx.dispatch import choose

    seen = set()
    for name in family_names or tuple(kernels.families()):
        for problem in kernels.family(name).typical(arch):
            first = choose.choose(name, problem, arch)
            others = choose.companions(first)
            for choice in (first, *others):
                if choice.variant.identity not in seen:
                    seen.add(choice.variant.identity)
                    yield choice, not others


def _measured(arch: Arch) -> dict[str, list[Any]]:
    """Measured figures of a target by the variant that was timed."""
    from jitmx.costs import measured

    figures, found = measured.load(), dict[str, list[Any]]()
    for figure in figures.figures if figures.arch == arch.name else ():
        found.setdefault(figure.kernel, []).append(figure)
    return found


def _times(arch: Arch, family_names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Predicted, and where there are any measured, times of the typical calls, with what they move and compute."""
    from jitmx.costs import cards, launches
    from jitmx.dispatch.call import Launch

    if arch.name not in cards.CARDS:
        return []
    card, figures, rows = cards.of(arch), _measured(arch), []
    for choice, alone in _served(arch, family_names):
        one = launches.price(Launch(choice), card, simulate=False)
        if one.work is None or one.prediction is None:
            continue
        asked = choice.problem.as_dict()
        timed = figures.get(choice.variant.name, ()) if alone else ()
        figure = next((item for item in timed if item.rows == 1 and item.problem.items() <= asked.items()), None)
        us = figure.us if figure else one.prediction.us
        moved = one.work.bytes + one.work.cached
        usual = type(choice.problem)().as_dict()
        rows.append({
            "kernel": choice.variant.name, "arch": arch.name, "family": choice.variant.spec.family,
            "call": " ".join(f"{k}={output.knob(v)}" for k, v in asked.items() if v != usual[k]) or "the typical call",
            "mb": moved / 1e6, "gflop": one.work.flops / 1e9, "instructions": one.instructions,
            "predicted": one.prediction.us, "measured": figure.us if figure else None, "bound": one.prediction.bound,
            "gbps": moved / us / 1e3, "teraflops": one.work.flops / us / 1e6, "roof": _roof(one, card, us),
        })  # fmt: skip
    return rows


def _roof(one: Any, card: Any, us: float) -> float:
    """Share of what memory or tensor cores allow."""
    rate = max(card.mma_tflops.value, card.wgmma_tflops.value)
    least = max((one.work.bytes + one.work.cached) / card.memory_gbps.value / 1e3, one.work.flops / rate / 1e6)
    return float(least / us * 100)


def _gathered(arches: tuple[Arch, ...], family_names: tuple[str, ...]) -> dict[str, Any]:
    """All that the page says, in plain data."""
    from jitmx import ledger
    from jitmx.cache import stats, store, verify
    from jitmx.cli import checks, env, variants

    cache, book = store.current(), ledger.known()
    records = variants.latest(cache)
    chosen: list[Variant] = targets.default_variants(arches, family_names)
    current = settings.current()
    try:
        report: verify.Report | None = verify.verify(cache, ledger=ledger.damage)
        trouble = ""
    except (CacheError, OSError) as error:
        report, trouble = None, str(error)
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arches": [arch.name for arch in arches],
        "variants": [variants.row(variant, records, book) for variant in chosen],
        "times": [row for arch in arches for row in _times(arch, family_names)],
        "cache": {
            **stats.measure(cache),
            "findings": [asdict(item) | {"path": str(item.path)} for item in report.findings] if report else [],
            "verified": {"records": report.records, "objects": report.objects} if report else None,
            "trouble": trouble,
        },
        "settings": [
            {
                "name": setting.name,
                "value": env.as_text(current.value(setting.field)),
                "source": settings.origin(setting.field),
                "help": setting.help,
            }
            for setting in settings.table()
        ],
        "checks": [asdict(check) for check in checks.run(gpu=False)],
    }


def _sections(found: dict[str, Any]) -> list[Section]:
    """The page's parts."""
    from jitmx.cli import variants
    from jitmx.report.page import Column, Section, Table

    kernels = Table(
        "Default kernels, with resource use and evidence",
        (Column("name", "Kernel"), Column("arch", "Target"), Column("registers", "Registers", True),
         Column("spill_bytes", "Spilled", True, "B a thread"),
         Column("shared_bytes", "Shared memory", True, "B a block"),
         Column("evidence", "Evidence"), Column("knobs", "Knobs")),
        [
            row | {
                "evidence": variants.evidence_words(row["evidence"]),
                "knobs": " ".join(f"{name}={output.knob(value)}" for name, value in row["knobs"].items()),
            }
            for row in found["variants"]
        ],
    )  # fmt: skip
    times = Table(
        "Typical calls: what they move and compute, and how long they take",
        (Column("kernel", "Kernel"), Column("arch", "Target"), Column("call", "Call"),
         Column("mb", "Moved", True, "MB"),
         Column("gflop", "Products", True, "GFLOP"), Column("instructions", "Instructions", True, "of warps"),
         Column("predicted", "Predicted", True, "us"), Column("measured", "Measured", True, "us"),
         Column("gbps", "Bandwidth", True, "GB/s"), Column("teraflops", "Rate", True, "TFLOP/s"),
         Column("roof", "Of the roof", True, "%"), Column("bound", "Bound by")),
        found["times"],
        "The cost model has parameters for none of these targets.",
    )  # fmt: skip
    counts: dict[str, int] = {}
    for row in found["variants"]:
        counts[row["evidence"]["kind"]] = counts.get(row["evidence"]["kind"], 0) + 1
    said = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    held = sum(row["key"] is not None for row in found["variants"])
    return [
        Section(
            "Kernels",
            [
                f"Of {len(found['variants'])} kernels {held} are in the cache. Evidence: {said}.",
                "Hardware means that it ran on the card named and was compared, simulated that it ran on the CPU, "
                "compiled that its contract is met. Evidence belongs to the exact code.",
            ],
            tables=[kernels],
        ),
        Section(
            "Times and roofline",
            [
                "Times are of one launch in a chain of launches that depend on one another. A measured one is of the "
                "card that the cost model stands for; all others are predicted. Operations are those of products, with "
                "rows that only fill up an instruction.",
            ],
            _plots(found),
            [times],
        ),
        _cache(found["cache"]),
        Section(
            "Settings",
            tables=[
                Table(
                    "Settings, and where each value comes from",
                    (Column("name", "Setting"), Column("value", "Value"), Column("source", "Source"),
                     Column("help", "What it is for")),
                    [row | {"value": row["value"] or None} for row in found["settings"]],
                )
            ],
        ),
        Section(
            "Toolchain and machine",
            tables=[
                Table(
                    "What `jitmx doctor` finds",
                    (Column("name", "Check"), Column("status", "Status"), Column("found", "Found"),
                     Column("remedy", "Remedy")),
                    [row | {"remedy": row["remedy"] or None} for row in found["checks"]],
                )
            ],
        ),
    ]  # fmt: skip


def _plots(found: dict[str, Any]) -> list[Any]:
    from jitmx.arch import parse
    from jitmx.costs import cards
    from jitmx.report import roofline
    from jitmx.report.page import Plot

    plots = []
    for number, name in enumerate(dict.fromkeys(row["arch"] for row in found["times"])):
        card = cards.of(parse(name))
        roof = roofline.Roof(
            f"{card.name} ({name})", card.memory_gbps.value, max(card.mma_tflops.value, card.wgmma_tflops.value)
        )
        points = [
            roofline.Point(
                f"{row['kernel']}, {row['call']}", row["family"], row["gflop"] * 1e3 / row["mb"], row["teraflops"],
                row["measured"] is not None,
            )
            for row in found["times"]
            if row["arch"] == name and row["gflop"]
        ]  # fmt: skip
        if points:
            caption = (
                f"{roof.card}: filled marks are measured, hollow ones predicted. The dashed line is what memory and "
            )
            plots.append(Plot(roofline.draw(points, roof, number), caption + "tensor cores allow."))
    return plots


def _cache(cache: dict[str, Any]) -> Section:
    from jitmx.report.page import Column, Section, Table

    if cache["path"] is None:
        text = "Nothing is kept on disk."
    else:
        text = f"{cache['path']}: {cache['entries']['count']} entries, {output.size(cache['bytes'])}."
    checked = cache["verified"]
    said = f"It cannot be checked: {cache['trouble']}"
    if checked:
        said = f"{checked['records']} records and {checked['objects']} objects were checked: "
        said += f"{len(cache['findings']) or 'no'} finding{'s' if len(cache['findings']) != 1 else ''}."
    kinds = [{"kind": kind, **held} for kind, held in cache["files"].items()]
    layers = [{"path": path, "count": count} for path, count in cache["layers"].items()]
    number = (Column("count", "Files", True), Column("bytes", "Size", True, "B"))
    return Section(
        "Cache",
        [text, said],
        tables=[
            Table("Files by kind", (Column("kind", "Kind"), *number), kinds, "It holds no file."),
            Table("Site caches", (Column("path", "Folder"), Column("count", "Entries", True)), layers),
            Table(
                "Findings",
                (Column("kind", "Kind"), Column("what", "What"), Column("path", "File")),
                cache["findings"],
            ),
        ],
    )


@click.command(
    "report",
    short_help="One page of HTML: kernels, evidence, times, cache, settings.",
    epilog="""\b
Examples:
  jitmx report --arch sm_121 -o report.html
  jitmx report --arch sm_90,sm_121 --family linear -o linear.html
  jitmx report --arch sm_90 --json | jq '.times[] | {kernel, predicted, measured}'

\b
The page is one file that loads nothing, for a browser of any width, in light or dark. Tables are sorted by a click on
a header. It shows paths, settings and versions of this machine: look it over before you pass it on.
""",
)
@click.option(
    "-o", "--output", "path", type=NamedPath(dir_okay=False, allow_dash=True, path_type=Path),
    help="The file to write, - for standard output: required without --json.",
)  # fmt: skip
@arch_option()
@family_option
@json_option
def command(path: Path | None, targets_asked: tuple[Arch, ...], family_names: tuple[str, ...], as_json: bool) -> None:
    """Write a page about the default kernels of a target, and about this machine.

    Kernels with evidence, registers, shared memory and spills; predicted or measured times against the roofline of the
    target's card; what the cache holds and whether it is sound; settings with their sources; the toolchain. Needs no
    GPU, and compiles nothing.
    """
    from importlib.metadata import version

    from jitmx.report import page

    if path is None and not as_json:
        raise click.UsageError("nothing says where the page goes; pass -o FILE")
    streamed = str(path) == "-"
    if streamed and as_json:
        raise click.UsageError("-o - and --json both ask for standard output; leave one out, or pass -o FILE")
    if path is not None and not streamed:
        output.check_writable(path)
    arches = targets.resolve(targets_asked)
    found = _gathered(arches, family_names)
    if path is not None:
        facts = {"Made": found["made"], "jitmx": version("jitmx"), "Targets": ", ".join(found["arches"])}
        text = page.render("jitmx report", facts, _sections(found))
        if streamed:
            output.stream(text.encode())
        else:
            output.write(path, text.encode())
    if as_json:
        output.emit(found)
    else:
        place = "standard output" if streamed else path
        output.say(f"{place}: {len(found['variants'])} kernels of {', '.join(found['arches'])}", err=streamed)
