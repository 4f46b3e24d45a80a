"""`jitmx bundle create`: kernels of a model, or of operators, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitmx.cache import bundle, keys
from jitmx.cli import failures, output, served, targets
from jitmx.cli.bundle import opening
from jitmx.cli.options import NamedPath, arch_option, counts, family_option, jobs_option, json_option, quiet_option
from jitmx.cli.progress import Progress

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.batch import Failed
    from jitmx.build import Built
    from jitmx.cli.served import ServedModel


@click.command(
    "create",
    short_help="Put the kernels of a model into one file.",
    epilog="""\b
Examples:
  jitmx bundle create --model gpt-oss-120b --arch sm_90,sm_121 -o gpt-oss.jitmx
  jitmx bundle create --model gpt-oss-120b --arch sm_90 --layers moe,qkv,o,lm_head --multiprocessors 114,132 \\
      --key release.key -o gpt-oss-h100.jitmx
  jitmx bundle create --arch sm_121 --family linear,moe -o linear.jitmx

\b
Exit codes: 0 the bundle is there; 1 a kernel breaks its contract, 3 one does not compile: nothing is written.
""",
)
@click.option("--output", "-o", "target", required=True, type=NamedPath(path_type=Path), help="The file to write.")
@served.model_options
@arch_option()
@family_option
@click.option(
    "--multiprocessors",
    multiple=True,
    metavar="N",
    callback=counts,
    help="Of the cards that are to be served; repeat it or separate several by commas (default: those of the card that "
    "a target stands for). Which kernels serve depends on it.",
)
@click.option("--key", type=NamedPath(path_type=Path), metavar="PATH", help="A private key (PEM) that signs it.")
@jobs_option
@quiet_option
@json_option
def command(
    target: Path,
    model: ServedModel | None,
    targets_asked: tuple[Arch, ...],
    family_names: tuple[str, ...],
    multiprocessors: tuple[int, ...],
    key: Path | None,
    jobs: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Put kernels into one file, compiling those that the cache has not.

    With --model, everything that vLLM loads when it serves the model with jitmx, so that JITMX_MODE=required serves
    from the bundle alone: the kernels that `jitmx warmup --model` compiles. Otherwise every default kernel, or those of
    --family. Needs no GPU; what GPUs are here makes no difference: the same command makes the same bytes.
    """
    if model is not None and family_names:
        raise click.UsageError("--model says which kernels; leave out --family")
    output.check_writable(target)
    private = keys.private_key(key) if key else None
    arches = targets.resolve(targets_asked)
    cards = {arch: multiprocessors or (arch.multiprocessors,) for arch in arches}
    variants = [
        variant
        for arch in arches
        for variant in (
            model.variants((arch,), cards[arch])
            if model
            else targets.default_variants((arch,), family_names, cards[arch])
        )
    ]
    if model and not variants:
        raise click.UsageError(f"a bundle of nothing is not written: {served.NOTHING}")
    from jitmx import batch, bundles

    asked: dict[str, Any] = model.about() if model else {"families": sorted(family_names) or "all"}
    asked["multiprocessors"] = {arch.name: sorted(set(cards[arch])) for arch in sorted(arches, key=str)}
    with Progress(len(variants), f"Bundling {', '.join(map(str, arches))}", quiet=quiet) as progress:
        results = batch.build_all(variants, jobs=jobs, on_result=lambda result: progress.step(_words(result)))
    if failed := [(one.variant.name, one.error) for one in results if isinstance(one, batch.Failed)]:
        code = failures.report(failed)
        output.say(f"Error: {target} is not written", err=True)
        raise click.exceptions.Exit(code)
    data = bundles.of([one for one in results if not isinstance(one, batch.Failed)], asked, private)
    output.write(target, data)
    made = bundle.of_bytes(str(target), data)
    if as_json:
        output.emit(opening.described(made) | {"size": len(data)})
        return
    count = len(made.of("record"))
    output.say(
        f"{target}: {count} kernels for {', '.join(map(str, arches))}, {output.size(len(data))}, "
        f"{opening.signed(made)}; digest {made.digest}"
    )


def _words(result: Built | Failed) -> str:
    from jitmx.build import Built

    status = result.status if isinstance(result, Built) else "failed"
    return f"{status:<8} {result.variant.name} for {result.variant.arch}: {result.milliseconds:.0f} ms"
