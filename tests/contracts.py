"""Machine code of kernels, held to their contracts and listed: many at once, as nvdisasm takes long to start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import evidence
from jitmx import batch
from jitmx.build import Built
from jitmx.registry.spec import Variant
from jitmx.toolchain import cubin

T = TypeVar("T")


def some(variants: Iterable[T], nightly: bool, every: int = 3) -> list[T]:
    """Of the variants of a sweep those to compile: one of so many, from the first on; in the nightly run all."""
    return list(variants)[:: 1 if nightly else every]


def keep_contracts(variants: Iterable[Variant]) -> None:
    """All do, by their machine code, or by evidence that is kept of what it is compiled from."""
    asked = {(one.arch, one.name): one for one in variants}.values()
    proofs = {one: evidence.keeps(one) for one in asked}
    left = [one for one, proof in proofs.items() if evidence.anew or not evidence.kept().proven(proof)]
    for built in within_contracts(left):
        evidence.note(built.variant, "compiled", proof=proofs[built.variant])


def within_contracts(variants: Iterable[Variant]) -> list[Built]:
    """How each was built, in order, those asked for twice once; all keep their contracts."""
    results = batch.build_all({(one.arch, one.name): one for one in variants}.values())
    built = [result for result in results if isinstance(result, Built)]
    failed = [str(result.error) for result in results if not isinstance(result, Built)]
    failed += [f"{one.variant.name}: {one.breaches}" for one in built if one.breaches]
    assert not failed, "\n".join(failed)
    return built


def listings(built: Iterable[Built]) -> list[list[str]]:
    """The instructions of each; all are for one target, and no two the same."""
    images = {one.image: one.variant.arch.name for one in built}
    (target,) = set(images.values())
    return cubin.sass_of([*images], target)
