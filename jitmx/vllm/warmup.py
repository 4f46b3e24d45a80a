"""Every kernel that a layer's calls can launch, compiled and loaded before vLLM profiles, captures or serves."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from jitmx import arch as arches
from jitmx import build, settings
from jitmx.dispatch import choose
from jitmx.errors import JitmxError
from jitmx.kernels.moe import MoeProblem
from jitmx.kernels.routing import FEW_TOKENS, RoutingProblem
from jitmx.ops import checks
from jitmx.ops.routing_plan import parts
from jitmx.registry.spec import Variant
from jitmx.runtime import load
from jitmx.vllm import monitor
from jitmx.vllm.plugin import logger

_EVERY, _STEP = 512, 16  # rows up to which each number is asked for, and how many are skipped beyond
_SILENT = 5.0  # seconds between two lines of progress


@dataclass(frozen=True)
class Needed:
    """What decides the kernels of an expert layer, for any number of tokens up to `rows`.

    Attributes:
        arch: SM target.
        device: CUDA device number, or None where there is none to load onto.
        experts, local: experts that are routed to, and those whose weights are at hand. mapped: by an expert map.
        top, hidden, intermediate, bias, encoding, scale_range: as in `MoeProblem`.
        scoring: as for `jitmx.route`.
        routing: what the routing is made from: "hidden" states, "logits", or "ids" where vLLM makes it.
        router_bias: the router, where it was taken over, has a bias.
    """

    arch: str
    device: int | None
    rows: int
    experts: int
    local: int
    mapped: bool
    top: int
    hidden: int
    intermediate: int
    bias: bool
    encoding: str
    scale_range: str
    scoring: str
    routing: str
    router_bias: bool


@dataclass(frozen=True)
class Kernel:
    """A kernel on a device, as vLLM's registry of what to warm tells them apart."""

    identity: str
    device: int | None
    variant: Variant = field(compare=False, repr=False)


def device_of(device: torch.device) -> int | None:
    """The number of a CUDA device, or None for another."""
    return torch.device(device).index or 0 if device.type == "cuda" else None


@functools.lru_cache(maxsize=64)
def variants(needed: Needed) -> tuple[Variant, ...]:
    """Every variant that calls of a layer launch.

    The kernels of two numbers of tokens beyond 512 that lie within 16 of each other, and are the same, are taken to be
    those of the numbers between as well.
    """
    arch = arches.parse(needed.arch)
    count = arch.multiprocessors if needed.device is None else checks.multiprocessors(needed.device)
    found: dict[str, Variant] = {}
    for m in _rows(needed.rows):
        layer = MoeProblem(
            m, needed.local, needed.top, needed.hidden, needed.intermediate, bias=needed.bias,
            encoding=needed.encoding, scale_range=needed.scale_range,
        )  # fmt: skip
        tile = 0
        for choice in choose.launches("moe", layer, arch, multiprocessors=count):
            if isinstance(choice.problem, RoutingProblem):
                tile = choice.problem.tile
            else:
                found[choice.variant.identity] = choice.variant
        for problem in _routing(needed, m, tile):
            variant = choose.choose("routing", problem, arch, multiprocessors=count).variant
            found[variant.identity] = variant
    return tuple(found.values())


def _rows(most: int) -> Iterator[int]:
    yield from range(1, min(most, _EVERY) + 1)
    yield from range(_EVERY + _STEP, most, _STEP)
    if most > _EVERY:
        yield most


def _routing(needed: Needed, m: int, tile: int) -> Iterable[RoutingProblem]:
    """The launches that choose experts for m tokens, and list the tokens of each in tiles."""
    mapped = needed.mapped and tile > 0
    lists = RoutingProblem(m, needed.experts, needed.top, 8, "ids", mapped=mapped, tile=tile) if tile else None
    if needed.routing == "hidden" and m <= FEW_TOKENS:
        bias = "bias_bf16" if needed.router_bias else "none"
        yield RoutingProblem(
            m, needed.experts, needed.top, needed.hidden, "hidden", bias=bias, scoring=needed.scoring
        )
    elif needed.routing != "ids":
        logits = RoutingProblem(m, needed.experts, needed.top, 8, "logits", scoring=needed.scoring)
        yield from parts(replace(logits, mapped=mapped, tile=tile))
        return
    if lists is not None:
        yield lists


_ready: set[Kernel] = set()


def prepare(needed: Needed) -> None:
    """Have every kernel of a layer compiled and loaded. All layers of a model share them: the first does the work.

    Raises:
        NotWarmedError: a kernel is not in the cache, and JITMX_MODE=required; the message gives the command for it.
        JitmxError: a kernel cannot be compiled or loaded.
    """
    _prepare(Kernel(variant.identity, needed.device, variant) for variant in variants(needed))


def _prepare(kernels: Iterable[Kernel]) -> None:
    missing = [kernel for kernel in kernels if kernel not in _ready]
    if not missing:
        return
    started = time.perf_counter()
    progress = _Progress(len(missing))
    results = build.build_all(
        [kernel.variant for kernel in missing], allow_compile=None, strict=False, on_result=progress.step
    )
    failed = [result for result in results if isinstance(result, build.Failed)]
    for result in failed:
        logger.error("jitmx: %s", result.error)
    if failed:
        raise _of_many(failed[0].error, len(failed), len(missing))
    for kernel in missing:
        if kernel.device is not None:
            load.function(kernel.variant, kernel.device)
    _ready.update(missing)
    logger.info(
        "jitmx: %d kernels for %s are ready after %.1f s, %d of them compiled now (cache %s)", len(missing),
        missing[0].variant.arch, time.perf_counter() - started, progress.compiled, settings.current().cache_dir,
    )  # fmt: skip


def _of_many(error: JitmxError, failed: int, asked: int) -> JitmxError:
    """The first error, with how many there were."""
    if failed > 1:
        error.args = (f"{error} ({failed} of {asked} kernels cannot be had; each is in the log)", *error.args[1:])
    return error


class _Progress:
    """A line in the log every few seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._said = time.monotonic()
        self.compiled = 0

    def step(self, result: build.Built | build.Failed) -> None:
        """One kernel more."""
        self._done += 1
        self.compiled += isinstance(result, build.Built) and result.status == "compiled"
        if time.monotonic() - self._said >= _SILENT:
            self._said = time.monotonic()
            logger.info("jitmx: compiling kernels, %d of %d", self._done, self._total)


class _JitmxKernels(VllmJitKernel[Kernel]):  # type: ignore[misc]
    """jitmx's kernels in the list of what vLLM warms before it captures graphs."""

    CompileKey = Kernel

    def get_warmup_keys(self, needed: Needed) -> list[Kernel]:
        """Every kernel of a layer."""
        return [Kernel(variant.identity, needed.device, variant) for variant in variants(needed)]

    def compile(self, compile_key: Kernel) -> None:
        """Have one compiled and loaded."""
        self.compile_many([compile_key])

    def compile_many(self, compile_keys: Iterable[Kernel]) -> None:
        """Have all compiled and loaded; what is loaded after this comes late."""
        _prepare(compile_keys)
        monitor.seal()


KERNELS = _JitmxKernels()
