"""Which targets and kernels a verb is about: those asked for, else what this machine suggests."""

from __future__ import annotations

import click

from jitmx import arch as arches
from jitmx import settings
from jitmx.arch import Arch
from jitmx.errors import DriverError
from jitmx.registry.spec import Variant
from jitmx.runtime import driver


def devices() -> list[driver.Device]:
    """The GPUs here; none where there is no driver or it does not work, which is for `jitmx doctor` to tell."""
    try:
        return driver.devices()
    except DriverError:
        return []


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


def default_variants(targets: tuple[Arch, ...], family_names: tuple[str, ...]) -> list[Variant]:
    """Every default variant of the families (all where none is named) on each target, targets outermost.

    They are those of the card that a target stands for, and those of the GPUs here where these have another SM count.

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
        for count in dict.fromkeys((target.multiprocessors, *multiprocessors(target)))
        for variant in choose.default_variants(name, target, multiprocessors=count)
    }
    if not found:
        raise click.UsageError(f"{', '.join(chosen)}: no variant for {', '.join(map(str, targets))}")
    return list(found.values())
