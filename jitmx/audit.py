"""What a cached entry would be made from now, and whether it would come out the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitmx import arch, build, kernels
from jitmx.cache.manifest import Record
from jitmx.cache.verify import Recompiled
from jitmx.cache.why import Subject
from jitmx.errors import ArchError, CompileError, JitmxError, RenderError
from jitmx.registry.key import KeyInputs
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.toolchain import nvrtc


def variant_of(record: Record) -> Variant | None:
    """The variant that `record` was compiled for, as this installation makes it; None where it no longer does."""
    return _variant(record.family, record.kernel, record.arch, record.knobs)


def _variant(family_name: str, kernel: str, target: str, knobs: Mapping[str, Any]) -> Variant | None:
    family = kernels.families().get(family_name)
    spec = next((spec for spec in family.specs if spec.name == kernel), None) if family else None
    if spec is None:
        return None
    try:
        return spec.variant(arch.parse(target), **knobs)
    except JitmxError:
        return None


def subject(variant: Variant) -> Subject:
    """What `variant` would be compiled from now, for `jitmx.cache.why.explain`.

    Raises:
        RenderError, ArchError, ToolchainError, CompileError: its inputs cannot be had.
    """
    return Subject(variant.knobs.as_dict(), build.named(build.key_inputs(variant)[0]))


def render_again(subject: Subject) -> str | None:
    """What the present templates make of `subject`, for `jitmx.cache.why`; None where they no longer do."""
    variant = _variant(subject.inputs["family"], subject.kernel, subject.inputs["arch"], subject.knobs)
    try:
        return None if variant is None else render(variant)
    except RenderError:
        return None


def is_reachable(record: Record) -> bool:
    """Whether a look-up by this installation would find `record`: same template, headers, options and NVRTC.

    An entry for a target that the NVRTC here does not compile for counts as reachable: nothing else can take its place.

    Raises:
        ToolchainError: there is no compiler, so that it cannot be known.
    """
    variant = variant_of(record)
    try:
        return variant is not None and build.key_inputs(variant)[0].key == record.key
    except ArchError:
        return True
    except (RenderError, CompileError):
        return False


def recompile(record: Record, source: str) -> Recompiled | None:
    """Compile the kept source of `record` again, for `jitmx.cache.verify`.

    None where the comparison would say nothing: another NVRTC or other headers than those of the record.

    Raises:
        JitmxError: it does not compile.
    """
    inputs = record.inputs
    here = nvrtc.identity()
    if (here.version, here.digest) != (inputs["nvrtc"], inputs["nvrtc_digest"]):
        return None
    if not build.unchanged(inputs["headers"]):
        return None
    options = tuple(inputs["options"])
    image = nvrtc.compile(source, options).image
    again = KeyInputs(
        inputs["family"], source, inputs["headers"], options, inputs["arch"], inputs["nvrtc"], inputs["nvrtc_digest"]
    )
    return Recompiled(again.key, image)
