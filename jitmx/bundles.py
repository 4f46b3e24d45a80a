"""Bundles of variants, compiled here where the cache has them not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jitmx import build, resources
from jitmx.build import Built
from jitmx.cache import bundle
from jitmx.cache.bundle import Kernel
from jitmx.cache.manifest import Scan
from jitmx.errors import ToolchainError
from jitmx.registry.render import render
from jitmx.registry.spec import Variant


def of(built: Iterable[Built], asked: Mapping[str, Any], key: Any = None) -> bytes:
    """A bundle of kernels that were built: the same bytes wherever, whenever and in whichever order that was.

    Args:
        asked: what the kernels are for, as JSON: the bundle tells it to whoever looks.
        key: signs the bundle (`keys.private_key`); None leaves that to later.

    Raises:
        RenderError: a template has changed since.
    """
    release = resources.release()
    kernels = {one.key: Kernel(one.record, one.image, render(one.variant)).undated(release) for one in built}
    ordered = [kernels[name] for name in sorted(kernels)]
    compilers = sorted({(kernel.record.inputs["nvrtc"], kernel.record.inputs["nvrtc_digest"]) for kernel in ordered})
    made = {
        "jitmx": release,
        "arches": sorted({kernel.record.arch for kernel in ordered}),
        "nvrtc": [{"release": release, "digest": digest} for release, digest in compilers],
        "for": dict(asked),
    }
    scans = {scan.digest: scan for one in built if (scan := _scan(one.variant, one.key))}
    return bundle.make(ordered, [scans[name] for name in sorted(scans)], made, key)


def _scan(variant: Variant, key: str) -> Scan | None:
    """Which headers a variant's source includes, for readers that must not ask a compiler; None where it is not known.

    Code of another NVRTC than the one here, which is found by its source, is found without.
    """
    try:
        inputs, source = build.key_inputs(variant)
    except ToolchainError:
        return None
    digest = build.scan_digest(source, inputs.options)
    return Scan(digest, build.named(inputs)["source_digest"], dict(inputs.headers)) if inputs.key == key else None
