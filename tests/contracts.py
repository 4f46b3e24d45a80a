"""Machine code of kernels, held to their contracts and listed: many at once, as nvdisasm takes long to start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import evidence
from jitmx import batch
from jitmx.build import Built
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.toolchain import cubin, headers, nvrtc

T = TypeVar("T")
Look = Callable[[Built, list[str]], None]


def some(variants: Iterable[T], nightly: bool, every: int = 3) -> list[T]:
    """Of the variants of a sweep those to compile: one of so many, from the first on; in the nightly run all."""
    return list(variants)[:: 1 if nightly else every]


def keep_contracts(variants: Iterable[Variant], look: Look | None = None) -> None:
    """All do, by their machine code, or by evidence that is kept of what it is compiled from.

    Args:
        look: asserts what else holds of how each was built and of its instructions. It takes all that it knows from
            them: its own text, and that of jitmx's modules that it names, are part of what the evidence rests on.
    """
    asked = {(one.arch, one.name): one for one in variants}.values()
    proofs = {one: evidence.keeps(one, look) for one in asked}
    left = [one for one, proof in proofs.items() if evidence.anew or not evidence.kept().proven(proof)]
    found = within_contracts(left)
    if look and found:
        for built, lines in zip(found, listings(found), strict=True):
            look(built, lines)
    for built in found:
        evidence.note(built.variant, "compiled", note=evidence.said(look), proof=proofs[built.variant])


def see_in_ptx(variants: Iterable[Variant], look: Callable[[str], None]) -> None:
    """Have `look`, whose name is a claim, find no fault with the PTX of each, where no evidence says that it does not.

    Its own text, and that of jitmx's modules that it names, are part of what the evidence rests on.
    """
    for one in variants:
        proof = evidence.seen_in_ptx(one, look)
        if evidence.anew or not evidence.kept().proven(proof):
            look(nvrtc.compile_ptx(render(one), nvrtc.options(one.arch)))
            evidence.note(one, "compiled", note=evidence.said(look), proof=proof)


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


def claim(variant: Variant, *claims: str) -> None:
    """Have the compiler's front end check claims about a rendered source; CompileError where one does not hold."""
    source = render(variant) + "".join(f'static_assert({one}, "the claim");\n' for one in claims)
    pool = headers.pool()
    texts = {name: pool.text(name) for name in pool.closure(source)}
    nvrtc._run(source, texts, (*nvrtc.options(variant.arch), "--fdevice-syntax-only"), "")
