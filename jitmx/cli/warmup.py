"""`jitmx warmup`: compile kernels of a target ahead of time."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from jitmx import settings
from jitmx.cache import store
from jitmx.cli import output, served, shapes, targets
from jitmx.cli.failures import report, worst
from jitmx.cli.options import FieldLetters, arch_option, family_option, jobs_option, json_option, quiet_option
from jitmx.cli.progress import Progress
from jitmx.errors import ContractError
from jitmx.quoting import short

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.batch import Failed
    from jitmx.build import Built
    from jitmx.cache.manifest import Record
    from jitmx.cli.served import ServedModel
    from jitmx.registry.spec import Variant


def _row(result: Built | Failed) -> dict[str, Any]:
    from jitmx import build

    record: Record | None = None
    if isinstance(result, build.Built):
        record = result.record
    elif isinstance(result.error, ContractError):
        # Code that breaks its contract is kept all the same: show what it takes.
        entry = store.current().lookup(build.key_inputs(result.variant)[0].key)
        record = None if entry is None else entry.record
    return {
        "name": result.variant.name,
        "family": result.variant.spec.family,
        "key": record and record.key,
        "status": result.status if isinstance(result, build.Built) else "failed",
        "ms": round(result.milliseconds, 3),
        **({} if isinstance(result, build.Built) else {"error": result.error.message, "remedy": result.error.remedy}),
        **targets.resource_use(result.variant, record),
    }


def _words(result: Built | Failed) -> str:
    row = _row(result)
    if row["status"] == "failed":
        return f"failed   {row['name']} for {result.variant.arch}"
    resources = f"{row['registers']} registers, {row['shared_bytes']} B shared, {row['spill_bytes']} B spilled"
    return f"{row['status']:<8} {row['name']} for {result.variant.arch}: {row['ms']:.0f} ms, {resources}"


def _lost(results: list[Built | Failed]) -> tuple[int, int]:
    """How many of the kernels that were built are only in this process's memory, and how many of these for good: where
    a newer jitmx has its record in their place."""
    from jitmx import build

    cache = store.current()
    found = {result.key: cache.lookup(result.key) for result in results if isinstance(result, build.Built)}
    lost = [key for key, entry in found.items() if entry is None or entry.root is None]
    return len(lost), sum(cache.own is not None and cache.own.holds_newer(key) for key in lost)


def _asked(
    arches: tuple[Arch, ...], words: tuple[str, ...], kernel: str | None, family_names: tuple[str, ...]
) -> list[Variant]:
    """The variants that the command line asks for."""
    if family_names and (kernel or words):
        raise click.UsageError("--family is for default kernels; leave it out beside an operator or --variant")
    if kernel:
        return targets.exact_variants(arches, kernel, words)
    if not words:
        return targets.default_variants(arches, family_names)
    op, *fields = words
    if "=" in op:
        raise click.UsageError(f"{short(op)} needs an operator before it: jitmx warmup OP NAME=VALUE ...")
    from jitmx import kernels

    family = kernels.family(op)
    rest, lists = shapes.read_values(op, family.problem, tuple(fields), family.axes)
    calls = [{**rest, **dict(zip(lists, values, strict=True))} for values in itertools.product(*lists.values())]
    return targets.call_variants(arches, op, calls)


@click.command(
    "warmup",
    cls=FieldLetters,
    short_help="Compile kernels of a target ahead of time.",
    epilog="""\b
Examples:
  jitmx warmup --arch sm_121
  jitmx warmup --arch sm_90,sm_120 --family linear --jobs 2
  jitmx warmup --arch sm_90 linear -m 1,2,4,8 -n 4096 -k 4096 bias=0 dtype=fp16
  jitmx warmup --arch sm_90 attention batch=1,16,64 context=2048,8192 queries=1 sinks=sinks_bf16
  jitmx warmup --arch sm_90 --model gpt-oss-120b --layers moe,qkv,o,lm_head
  jitmx warmup --arch sm_90 --model gpt-oss-120b --draft gpt-oss-120b-eagle3 --draft-layers all
  jitmx warmup --arch sm_90 --variant linear.gemv m=2 bias=1 split_k=8
  jitmx warmup -q --json > warmed.json

\b
Exit codes: 0 every kernel is in the cache; 1 a kernel breaks its contract or cannot be kept; 3 one does not
compile.
With --json each kernel has "name", "family", "key", "status" (compiled, hit or failed), "ms", "registers",
"spill_bytes" and "shared_bytes" (what a block takes; where that grows with the problem, of the smallest); one that
failed "error" and "remedy"; with several targets also "arch".
""",
)
@click.argument("words", nargs=-1, metavar="[OP] [NAME=VALUE]...")
@click.option("--variant", "kernel", metavar="KERNEL", help="Just this kernel, with knobs NAME=VALUE; others default.")
@served.model_options
@arch_option()
@family_option
@jobs_option
@quiet_option
@json_option
def command(
    words: tuple[str, ...],
    kernel: str | None,
    model: ServedModel | None,
    targets_asked: tuple[Arch, ...],
    family_names: tuple[str, ...],
    jobs: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compile kernels of a target into the cache, and check their contracts.

    Without OP, every default kernel: what the typical calls of each operator take. With OP, what its calls with these
    fields take, read as `jitmx explain` reads them; -m 4 is short for m=4, and rows, of attention also context and
    queries, may have several values, -m 1,4.
    With --variant, that kernel with these knobs and no other. With --model, everything that vLLM loads when it serves
    the model, so that JITMX_MODE=required serves from this cache.

    Needs no GPU, no driver and no nvcc. Kernels that are in the cache already are hits.
    """
    started = time.perf_counter()
    if settings.current().mode == "off":
        raise click.UsageError("JITMX_MODE=off keeps nothing on disk, so there is nothing to warm; unset it.")
    arches = targets.resolve(targets_asked)
    if model is not None and (words or kernel or family_names):
        raise click.UsageError("--model says what to warm; leave out operators, sizes, --variant and --family")
    from jitmx import batch
    from jitmx.toolchain import nvrtc

    with ThreadPoolExecutor(1) as beside:
        # Which NVRTC is here takes a process that starts and a file that is read: kernels are chosen meanwhile. What
        # is wrong with it, building says.
        if not (words or kernel):
            beside.submit(nvrtc.identity)
        variants = _asked(arches, words, kernel, family_names) if model is None else model.variants(arches)

    if not variants:
        output.say(f"nothing is asked for: {served.NOTHING}", err=True)
    with Progress(len(variants), f"Warming {', '.join(map(str, arches))}", quiet=quiet) as progress:
        results = batch.build_all(variants, jobs=jobs, on_result=lambda result: progress.step(_words(result)))
    rows = [_row(result) for result in results]
    counts = {status: sum(row["status"] == status for row in rows) for status in ("compiled", "hit", "failed")}
    wall = time.perf_counter() - started
    name = ",".join(map(str, arches))
    if as_json:
        if len(arches) > 1:
            rows = [row | {"arch": str(result.variant.arch)} for row, result in zip(rows, results, strict=True)]
        output.emit(
            {
                "arch": name,
                "kernels": rows,
                "compiled": counts["compiled"],
                "hits": counts["hit"],
                "failed": counts["failed"],
                "wall_s": round(wall, 3),
            }
        )
    else:
        totals = f"{counts['compiled']} compiled, {counts['hit']} hits, {counts['failed']} failed"
        output.say(f"{name}: {len(rows)} kernels, {totals}, {wall:.1f} s; cache {settings.current().cache_dir}")
    failures = [(result.variant.name, result.error) for result in results if isinstance(result, batch.Failed)]
    codes = [report(failures)] if failures else []
    lost, newer = _lost(results)
    if lost:
        why = "free space there, make it writable, or" if lost > newer else ""
        if newer:
            why = f"a newer jitmx has its own records of {newer} there, which stay; {why}".rstrip()
        output.say(
            f"Error: {lost} of {len(rows)} kernels could not be kept in {settings.current().cache_dir} and end with "
            f"this process: {why} name another directory in JITMX_CACHE_DIR",
            err=True,
        )
        codes.append(1)
    if codes:
        raise click.exceptions.Exit(worst(codes))
