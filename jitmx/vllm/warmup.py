"""Every kernel that a layer's calls can launch, compiled and loaded before vLLM profiles, captures or serves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from jitmx import batch, build, settings
from jitmx.ops.checks import HALF_DTYPES
from jitmx.ops.linear import operand
from jitmx.registry.spec import Variant
from jitmx.runtime import load
from jitmx.serving.linear import of_linear
from jitmx.serving.needed import Needed, variants
from jitmx.vllm import ahead, facts, monitor, packing
from jitmx.vllm.log import logger


@dataclass(frozen=True)
class Kernel:
    """A kernel on a device, as vLLM's registry of what to warm tells them apart."""

    identity: str
    device: int | None
    variant: Variant = field(compare=False, repr=False)


def device_of(device: torch.device) -> int | None:
    """The number of a CUDA device, or None for another."""
    return torch.device(device).index or 0 if device.type == "cuda" else None


_ready: set[Kernel] = set()


def prepare(needed: Needed) -> None:
    """Have every kernel of a layer compiled and loaded, now and where vLLM warms kernels.

    All layers of a model share them: the first does the work, or waits for what `ahead` has begun of it.

    Raises:
        NotWarmedError: a kernel is not in the cache, and JITMX_MODE=required; the message gives the command for it.
        JitmxError: a kernel cannot be compiled or loaded.
    """
    started = time.perf_counter()
    built = ahead.take(needed)
    _prepare(KERNELS.get_warmup_keys(needed), started, built)
    KERNELS.register_warmup(needed=needed)


def prepare_packing(layer: Any, format: str) -> None:
    """The same for what quantizes and packs the weight of a layer of `jitmx.vllm.linear`."""
    n, k = layer.weight.shape
    for needed in _of(layer, layer.weight.device, n, k, format)[:-1]:
        prepare(needed)


def prepare_product(layer: Any) -> None:
    """The same for the product of such a layer."""
    n, k, layout = layer.jitmx_packed
    format, _, scale_range = operand.parts(layout)
    rows = {"row_range": layer.jitmx_row_range} if hasattr(layer, "jitmx_row_range") else {}
    for needed in _of(layer, layer.weight.device, n, k, format, scale_range, **rows)[-1:]:
        prepare(needed)


def begin_linear(layer: Any, format: str, scale_range: str) -> None:
    """Begin with what a layer of `jitmx.vllm.linear` that is being built will ask for."""
    n, k = layer.weight.shape
    for needed in _of(layer, torch.get_default_device(), n, k, format, scale_range):
        ahead.begin(needed)


def _of(
    layer: Any,
    device: torch.device,
    n: int,
    k: int,
    format: str,
    scale_range: str = "normal",
    row_range: str = "narrow",
) -> tuple[Needed, ...]:
    """What a dense layer needs, its product last; nothing where there is no target."""
    arch, _ = facts.target()
    config = get_current_vllm_config_or_none()
    if arch is None or config is None:
        return ()
    # The ranks that share a row-parallel product add its bias once.
    bias = getattr(layer, "bias", None) is not None and not getattr(layer, "skip_bias_add", False)
    bias = bias and not (isinstance(layer, RowParallelLinear) and layer.tp_rank)
    return of_linear(
        arch, device_of(device), config.scheduler_config.max_num_batched_tokens, n, k, format,
        dtype=HALF_DTYPES[layer.weight.dtype], bias=bias, scale_range=scale_range,
        activation=layer.quant_method.activation, row_range=row_range, **layer.quant_method.extras,
    )  # fmt: skip


def _prepare(kernels: Iterable[Kernel], started: float, built: dict[str, build.Built] | None = None) -> None:
    """Have kernels compiled and loaded; the log says how long a layer waited for them, from `started`.

    Args:
        built: what is compiled already, by identity.
    """
    missing = [kernel for kernel in kernels if kernel not in _ready]
    if not missing:
        return
    found = dict(built or {})
    unknown = [kernel.variant for kernel in missing if kernel.identity not in found]
    progress = ahead.Progress(len(unknown))
    results = batch.build_all(unknown, allow_compile=None, strict=False, on_result=progress.step)
    failed = [result for result in results if isinstance(result, batch.Failed)]
    for result in failed:
        logger.error("jitmx: %s", result.error)
    if failed:
        error = failed[0].error
        if len(failed) > 1:
            error.message += f" ({len(failed)} of {len(missing)} kernels failed; each is in the log)"
        raise error
    found |= {result.variant.identity: result for result in results if isinstance(result, build.Built)}
    with monitor.warming():
        for kernel in missing:
            if kernel.device is not None:
                load.function(kernel.variant, kernel.device, found[kernel.identity])
    _ready.update(missing)
    logger.info(
        "jitmx: %d kernels for %s are ready after %.1f s, %d of them compiled now (cache %s)", len(missing),
        missing[0].variant.arch, time.perf_counter() - started,
        sum(found[kernel.identity].status == "compiled" for kernel in missing), settings.current().cache_dir,
    )  # fmt: skip


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
        _prepare(compile_keys, time.perf_counter())
        packing.say()
        monitor.seal()


KERNELS = _JitmxKernels()
