"""Which targets and kernels a verb is about: those asked for, else what this machine suggests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from jitmx import arch as arches
from jitmx import settings
from jitmx.arch import Arch
from jitmx.cli import shapes
from jitmx.errors import DriverError, KnobError
from jitmx.quoting import short
from jitmx.registry.spec import Variant
from jitmx.runtime import driver

if TYPE_CHECKING:
    from jitmx.cache.manifest import Record
    from jitmx.serving.needed import Needed


def devices() -> list[driver.Device]:
    """The GPUs here; none where there is no driver or it does not work, which is for `jitmx doctor` to tell."""
    try:
        return driver.devices()
    except DriverError:
        return []


def require_gpu(verb: str) -> None:
    """`verb` measures by torch on a GPU.

    Raises:
        KnobError: torch is not installed.
        DriverError: there is no GPU that it can use.
    """
    try:
        import torch
    except ImportError as error:
        if error.name != "torch":
            raise DriverError(f"{verb} needs torch, which cannot be imported ({error})", "install it anew") from error
        raise KnobError(f"{verb} needs torch", "install it with: pip install 'jitmx[torch]'") from None
    if not torch.cuda.is_available():
        raise DriverError(
            f"{verb} needs a GPU that torch can use, and there is none here", "`jitmx doctor --gpu` says why"
        )


def resolve(asked: tuple[Arch, ...]) -> tuple[Arch, ...]:
    """The targets asked for; else those of the GPUs here; else JITMX_ARCH.

    Raises:
        click.UsageError: none of the three names a target.
        ArchError: a GPU that no target runs on.
    """
    if asked:
        return asked
    here = devices()
    if here:
        return tuple(dict.fromkeys(arches.of_device(device.major, device.minor) for device in here))
    named = tuple(dict.fromkeys(map(arches.parse, settings.current().arches)))
    if not named:
        raise click.UsageError(
            "no target: there is no GPU here and JITMX_ARCH is not set. Pass --arch, for example --arch sm_121 "
            f"(targets: {', '.join(arches.SUPPORTED)})."
        )
    return named


def multiprocessors(target: Arch) -> list[int]:
    """SM counts of the GPUs here that run `target`, which choices depend on; empty where there is none."""
    here = (device for device in devices() if target.runs_on(device.major, device.minor))
    return list(dict.fromkeys(device.multiprocessors for device in here))


def _counts(target: Arch) -> list[int]:
    """SM counts to choose for: that of the card that `target` stands for, and those of the GPUs here."""
    return list(dict.fromkeys((target.multiprocessors, *multiprocessors(target))))


def call_variants(targets: tuple[Arch, ...], op: str, asked: list[dict[str, Any]]) -> list[Variant]:
    """Every variant that calls of `op` with these shapes launch on each target, on the cards as for default variants.

    Raises:
        KnobError: an unknown family, or a shape that it does not take.
    """
    from jitmx.dispatch import call

    found = {
        variant.identity: variant
        for target in targets
        for shape in asked
        for count in _counts(target)
        for variant in call.call_variants(op, target, multiprocessors=count, **shape)
    }
    return list(found.values())


def served_variants(
    targets: tuple[Arch, ...], layers: list[list[Needed]], counts: tuple[int, ...] = ()
) -> list[Variant]:
    """Every variant that the calls of a served model's layers launch, on the cards as for default variants.

    Args:
        layers: those of a model, for each target.
        counts: SM counts to choose for; by default those of the cards as for default variants.
    """
    from jitmx.serving.needed import variants

    found = {
        variant.identity: variant
        for target, asked in zip(targets, layers, strict=True)
        for layer in asked
        for count in counts or _counts(target)
        for variant in variants(layer, count)
    }
    return list(found.values())


def exact_variants(targets: tuple[Arch, ...], kernel: str, words: tuple[str, ...]) -> list[Variant]:
    """The one variant of `kernel`, such as linear.gemv, with the knobs in `words`, on each target.

    Raises:
        KnobError: an unknown kernel, or knobs that it does not take.
        click.UsageError: words that are no knobs.
    """
    from jitmx import kernels

    family, dot, name = kernel.partition(".")
    found = kernels.family(family)
    if not dot:
        listed = ", ".join(f"{family}.{spec.name}" for spec in found.specs)
        raise click.UsageError(f"{short(kernel)} is no kernel; those of the family: {listed}")
    spec = found.spec(name)
    names = [item.name for item in dataclasses.fields(spec.knobs)]
    knobs = spec.knobs.from_text(shapes.pairs(words, kernel, names, "knob"))
    return [Variant(spec, knobs, target) for target in targets]


def default_variants(
    targets: tuple[Arch, ...], family_names: tuple[str, ...], counts: tuple[int, ...] = ()
) -> list[Variant]:
    """Every default variant of the families (all where none is named) on each target, targets outermost.

    They are those of the card that a target stands for, and those of the GPUs here where these have another SM count;
    or those of cards with the SM counts that are given.

    Raises:
        KnobError: an unknown family.
        click.UsageError: the families have no variant for the targets.
    """
    from jitmx import kernels
    from jitmx.dispatch import choose

    chosen = [kernels.family(name).name for name in family_names] or list(kernels.families())
    found = {
        variant.identity: variant
        for target in targets
        for name in chosen
        for count in counts or _counts(target)
        for variant in choose.default_variants(name, target, multiprocessors=count)
    }
    if not found:
        raise click.UsageError(f"{', '.join(chosen)}: no variant for {', '.join(map(str, targets))}")
    return list(found.values())


def verified_variants(targets: tuple[Arch, ...], family_names: tuple[str, ...]) -> list[Variant]:
    """The default variants, and those that reach what these have not (`Kernel.rarer`); raises as for them."""
    from jitmx import kernels

    found = {variant.identity: variant for variant in default_variants(targets, family_names)}
    for target in targets:
        for name in family_names or kernels.families():
            found |= {variant.identity: variant for variant in kernels.family(name).rarer(target)}
    return list(found.values())


def resource_use(variant: Variant, record: Record | None) -> dict[str, int | None]:
    """Registers and spilled bytes a thread, and shared memory a block; None where the kernel was not compiled.

    Shared memory is what the code declares and what a launch asks for, of the smallest problem where it grows with it.
    """
    if record is None:
        return dict.fromkeys(("registers", "spill_bytes", "shared_bytes"))
    found: dict[str, Any] = {name: record.outputs[name] for name in ("registers", "spill_bytes", "shared_bytes")}
    return found | {"shared_bytes": found["shared_bytes"] + variant.spec.shared_bytes(variant.knobs)}
