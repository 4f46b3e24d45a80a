"""`jitmx warmup`: compile kernels of a target ahead of time."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from jitmx import settings
from jitmx.cache import store
from jitmx.cli import output, shapes, targets
from jitmx.cli.group import exit_code
from jitmx.cli.options import Count, FieldLetters, arch_option, family_option, jobs_option, json_option, quiet_option
from jitmx.cli.progress import Progress
from jitmx.errors import ContractError, JitmxError, SettingError
from jitmx.quoting import short

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.batch import Failed
    from jitmx.build import Built
    from jitmx.cache.manifest import Record
    from jitmx.registry.spec import Variant


# A kernel that does not compile weighs more than one that breaks its contract, and that more than a bad request.
_SEVERITY = (2, 1, 3)


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


def _report(failures: list[tuple[str, JitmxError]]) -> int:
    """Show each failure once, whichever number of kernels it hit; the exit code that the worst of them calls for."""
    kernels: dict[str, list[str]] = {}
    for name, error in failures:
        kernels.setdefault(str(error), []).append(name)
    for message, names in kernels.items():
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        output.say(f"Error: {names[0]}{others}: {message}", err=True)
    return max((exit_code(error) for _, error in failures), key=_SEVERITY.index)


def _lost(results: list[Built | Failed]) -> tuple[int, int]:
    """How many of the kernels that were built are only in this process's memory, and how many of these for good: where
    a newer jitmx has its record in their place."""
    from jitmx import build

    cache = store.current()
    found = {result.key: cache.lookup(result.key) for result in results if isinstance(result, build.Built)}
    lost = [key for key, entry in found.items() if entry is None or entry.root is None]
    return len(lost), sum(cache.own is not None and cache.own.holds_newer(key) for key in lost)


def _served(
    arches: tuple[Arch, ...], name: str, layers: str | None, tokens: int, ranks: int, lora: bool, cache: dict[str, Any],
    draft: dict[str, Any],
) -> list[Variant]:  # fmt: skip
    """The variants that vLLM asks for when it serves a model with jitmx.

    Args:
        cache: batch, context, page_size and cache of its attention, as in `AttentionProblem`.
        draft: the name of its draft model or None, the layers that jitmx serves or None, and its drafts a step.
    """
    from jitmx import draft_kernels, drafts, model_kernels, models, sampling_kernels
    from jitmx.layers import DRAFT_FORMATS, parse
    from jitmx.vllm import policy

    try:
        parse("none" if layers is None else layers)
    except SettingError as error:
        raise click.UsageError(f"--layers={layers}: {error}") from error
    if draft["layers"] is not None:
        try:
            parse(draft["layers"], DRAFT_FORMATS)
        except SettingError as error:
            raise click.UsageError(f"--draft-layers={draft['layers']}: {error}") from error
    given = {"mxfp4_layers": layers, "draft_layers": draft["layers"]}
    asked = policy.request({name: value for name, value in given.items() if value is not None} or None)
    how: dict[str, Any] = {
        "tokens": tokens, "ranks": ranks, "lora": lora, "fuse_norm": asked.fuse_norm, "all_scales": asked.all_scales,
        "x_format": asked.x_format,
    }  # fmt: skip
    most = model_kernels.cached(**cache) if asked.serves_attention else None
    model, served = models.find(name), asked.served(lora)
    needed = [model_kernels.of_model(model, arch, served, attention=most, **how) for arch in arches]
    if asked.samples:
        for arch, own in zip(arches, needed, strict=True):
            own.append(sampling_kernels.Sampler(arch.name, None, cache["batch"], model.vocabulary, "bf16"))
            if draft["name"] is not None:
                each = draft["steps"] + 1
                own.append(draft_kernels.Acceptance(arch.name, None, cache["batch"], each, model.vocabulary, "bf16"))
    if draft["name"] is not None:
        drafter = drafts.find(draft["name"])
        for arch, own in zip(arches, needed, strict=True):
            own += draft_kernels.of_draft(
                drafter, arch, asked.draft_layers, tokens=tokens, requests=cache["batch"], ranks=ranks,
                fuse_norm=asked.fuse_norm, all_scales=asked.all_scales, attention=most,
            )  # fmt: skip
    return targets.served_variants(arches, needed)


def _given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _require_no_model_option() -> None:
    """Without a model nothing reads the options that say how it is served."""
    for name in (
        "draft",
        "draft_layers",
        "draft_tokens",
        "layers",
        "tokens",
        "ranks",
        "lora",
        "requests",
        "context",
        "block_size",
        "kv_cache_dtype",
    ):
        if _given(name):
            name = name.replace("_", "-")
            raise click.UsageError(f"--{name} says how a model is served: name it by --model, or leave --{name} out")


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
  jitmx warmup --arch sm_90 --model gpt-oss-120b --draft eagle3-120b --draft-layers all
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
@click.option(
    "--model", metavar="NAME", help="Just what vLLM loads to serve it: gpt-oss-120b, gpt-oss-20b or a checkpoint."
)
@click.option("--layers", help="Of the model: those that jitmx serves, instead of JITMX_MXFP4_LAYERS.")
@click.option(
    "--tokens", type=Count(1, 1 << 24), default=16384, show_default=True,
    help="Of the model: tokens of a forward pass at most (vLLM's max_num_batched_tokens).",
)  # fmt: skip
@click.option(
    "--draft", metavar="NAME",
    help="Also of its Eagle3 draft: eagle3-120b (NVIDIA's sizes), eagle3-20b (SpecForge's) or a checkpoint.",
)  # fmt: skip
@click.option("--draft-layers", help="Of the draft: those that jitmx serves, instead of JITMX_DRAFT_LAYERS.")
@click.option(
    "--draft-tokens", type=Count(1, 64), default=3, show_default=True,
    help="Of the draft: vLLM's num_speculative_tokens, at most.",
)  # fmt: skip
@click.option("--ranks", type=Count(1, 1 << 16), default=1, help="Of the model: vLLM's tensor_parallel_size.")
@click.option("--lora", is_flag=True, help="Of the model: with LoRA on, on layers other than the experts.")
@click.option(
    "--requests",
    type=Count(1, 1 << 16),
    default=1024,
    show_default=True,
    help="Of its attention, where JITMX_ATTENTION is on, and its sampler: vLLM's max_num_seqs.",
)
@click.option(
    "--context",
    type=Count(1, 1 << 24),
    default=131072,
    show_default=True,
    help="Of its attention: tokens of a request at most (vLLM's max_model_len).",
)
@click.option(
    "--block-size",
    type=Count(16, 1 << 16),
    default=16,
    show_default=True,
    help="Of its attention: tokens of a page (vLLM's block_size), a multiple of 16.",
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto", help="Of its attention: as in vLLM."
)
@arch_option()
@family_option
@jobs_option
@quiet_option
@json_option
def command(
    words: tuple[str, ...],
    kernel: str | None,
    model: str | None,
    layers: str | None,
    tokens: int,
    draft: str | None,
    draft_layers: str | None,
    draft_tokens: int,
    ranks: int,
    lora: bool,
    requests: int,
    context: int,
    block_size: int,
    kv_cache_dtype: str,
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
    if model is None:
        _require_no_model_option()
        variants = _asked(arches, words, kernel, family_names)
    else:
        if words or kernel or family_names:
            raise click.UsageError("--model says what to warm; leave out operators, sizes, --variant and --family")
        stored = "e4m3" if kv_cache_dtype == "fp8" else "same"
        cache = {"batch": requests, "context": context, "page_size": block_size, "cache": stored}
        if draft is None and (draft_layers is not None or _given("draft_tokens")):
            raise click.UsageError("--draft-layers and --draft-tokens are of a draft: name it by --draft")
        drafter = {"name": draft, "layers": draft_layers, "steps": draft_tokens}
        variants = _served(arches, model, layers, tokens, ranks, lora, cache, drafter)
    from jitmx import batch

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
    codes = [_report(failures)] if failures else []
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
        raise click.exceptions.Exit(max(codes, key=_SEVERITY.index))
