"""Bundles of variants, compiled here where the cache has them not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from jitmx import build, resources
from jitmx.build import Built
from jitmx.cache import bundle
from jitmx.cache.bundle import Kernel
from jitmx.cache.manifest import Scan
from jitmx.errors import ToolchainError
from jitmx.registry.fingerprint import Fingerprint
from jitmx.registry.key import digest
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
    scans = {scan.digest: scan for one in built for scan in _scans(one.variant, one.key)}
    return bundle.make(ordered, [scans[name] for name in sorted(scans)], made, key)


def _scans(variant: Variant, key: str) -> list[Scan]:
    """What a variant's source is rendered from, and which headers it includes: for readers that need ask neither
    templates nor a compiler, who may have none.

    Headers are left out where they are not known; code of another NVRTC than the one here is found by its source.
    """
    made_from, rendered = Fingerprint(variant), render(variant)
    found = [Scan(made_from.digest, digest(rendered.encode()), {})] if made_from.holds() else []
    with suppress(ToolchainError):
        inputs, source = build.key_inputs(variant)
        if inputs.key == key:
            own = build.scan_digest(source, inputs.options)
            found.append(Scan(own, build.named(inputs)["source_digest"], dict(inputs.headers)))
    return found
