"""Faults planted in real kernels: the simulator and the kernels' own cases catch them (`mutation.py`)."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

import evidence
import mutations_attention
import mutations_experts
import mutations_experts_more
import mutations_far
import mutations_fp8
import mutations_fused
import mutations_linear_more
import mutations_mlp
import mutations_norm
import mutations_order
import mutations_products
import mutations_prompts
import mutations_sampling
import mutations_sequences
import mutations_streams
import mutations_tree
import mutations_values
import mutations_warpgroups
from evidence import compiled_from
from jitmx.registry.key import frame
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict
from jitmx.toolchain import nvrtc
from mutation import Mutation, fault, source

_CATALOGUES = (
    mutations_attention,
    mutations_streams,
    mutations_products,
    mutations_prompts,
    mutations_warpgroups,
    mutations_linear_more,
    mutations_experts,
    mutations_experts_more,
    mutations_far,
    mutations_fp8,
    mutations_fused,
    mutations_norm,
    mutations_order,
    mutations_sampling,
    mutations_sequences,
    mutations_mlp,
    mutations_tree,
    mutations_values,
)
VARIANTS = {where: place for catalogue in _CATALOGUES for where, place in catalogue.VARIANTS.items()}
MUTATIONS = tuple(mutation for catalogue in _CATALOGUES for mutation in catalogue.MUTATIONS)
_ESCAPED = {name for catalogue in _CATALOGUES for name, _ in catalogue.ESCAPES}


_NIGHTLY = (
    mutations_experts_more,
    mutations_far,
    mutations_fp8,
    mutations_fused,
    mutations_linear_more,
    mutations_sequences,
    mutations_values,
)
_OFTEN = {where for catalogue in _CATALOGUES if catalogue not in _NIGHTLY for where in catalogue.VARIANTS}
# Of each kernel one place, whose source is shown to compile to the same, with its headers in.
_FIRST = {*{(one.spec.family, one.spec.name): where for where, one in VARIANTS.items() if where in _OFTEN}.values()}


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=() if where in _OFTEN else pytest.mark.nightly) for where in VARIANTS]
)
def test_without_a_fault_every_case_passes(where: str, simulated: Callable[[Variant], Verdict], nightly: bool) -> None:
    place, text = VARIANTS[where], source(VARIANTS[where])
    if nightly:
        assert fault(place, text) is None
        return
    # Evidence of the kernel as it is, kept or of another catalogue's place, is of the same code with its headers in.
    if where in _FIRST:
        _compiles_to_the_same(place, text)
    simulated(place, coverage=0.0)


def _compiles_to_the_same(place: Variant, text: str) -> None:
    """A source with its headers written out, as the kernel itself does; or evidence says so of both."""
    both = (compiled_from(place), compiled_from(place, source=text))
    proof = frame([("the same PTX", digest.encode()) for digest in both])
    if not evidence.anew and evidence.kept().proven(proof):
        return
    options = nvrtc.options(place.arch)
    assert nvrtc.compile_ptx(text, options) == nvrtc.compile_ptx(render(place), options)
    evidence.note(place, "compiled", text, note="with its headers written out the same", proof=proof)


def _kernel(mutation: Mutation) -> str:
    return f"{mutation.place.spec.family}.{mutation.place.spec.name}"


def _soon() -> set[str]:
    """Faults that are not for the nightly run alone, by a digest of their names: of each place of the smaller
    catalogues an eighth, and one of each kernel and of each catalogue that would have none.
    """
    drawn = sorted((m for m in MUTATIONS if m.id not in _ESCAPED), key=lambda one: zlib.crc32(one.id.encode()))
    taken: list[Mutation] = []
    for where in _OFTEN:
        own = [mutation for mutation in drawn if mutation.where == where]
        taken += own[: -(-len(own) // 8)]
    for catalogue in _CATALOGUES:
        own = [mutation for mutation in drawn if mutation.where in catalogue.VARIANTS]
        kernels = {_kernel(mutation) for mutation in taken}
        first = {_kernel(mutation): mutation for mutation in own[::-1]}
        taken += [mutation for kernel, mutation in first.items() if kernel not in kernels]
        if not any(mutation.where in catalogue.VARIANTS for mutation in taken):
            taken.append(own[0])
    return {mutation.id for mutation in taken}


_SOON = _soon()


def _shared_out(mutation: Mutation, soon: bool) -> object:
    return pytest.param(mutation, marks=() if soon else pytest.mark.nightly, id=mutation.id)


def test_every_fault_has_its_place_in_todays_kernels() -> None:
    """Without compiling: kernels change by day, and most faults are planted at night."""
    assert [m.id for m in MUTATIONS if source(m.place).count(m.old) != 1] == []


@pytest.mark.parametrize("mutation", [_shared_out(m, m.id in _SOON) for m in MUTATIONS if m.id not in _ESCAPED])
def test_a_planted_fault_is_caught(mutation: Mutation) -> None:
    """By the simulator and the cases as they are, or by evidence that they caught it in the same kernel."""
    proof = mutation.proof()
    if not evidence.anew and evidence.kept().proven(proof):
        return
    said = mutation.fault()
    assert said is not None
    assert "not know" not in said, "the simulator lacks an instruction, which is no catch"
    evidence.note(mutation.place, "compiled", mutation.text(), note=f"caught: {mutation.id}", proof=proof)


def test_every_catalogue_and_every_kernel_has_a_fault_that_does_not_wait_for_the_night() -> None:
    taken = [mutation for mutation in MUTATIONS if mutation.id in _SOON]
    assert {_kernel(mutation) for mutation in taken} == {_kernel(m) for m in MUTATIONS if m.id not in _ESCAPED}
    assert all(any(mutation.where in catalogue.VARIANTS for mutation in taken) for catalogue in _CATALOGUES)
    assert {mutation.where for mutation in taken} >= _OFTEN and len(taken) >= 100


@pytest.mark.parametrize("mutation", [_shared_out(m, m.where in _OFTEN) for m in MUTATIONS if m.id in _ESCAPED])
def test_a_known_escape_is_still_one(mutation: Mutation) -> None:
    assert mutation.fault() is None, "it is caught now: take it off ESCAPES"


def test_there_are_many_mutations_and_few_escape() -> None:
    names = [mutation.id for mutation in MUTATIONS]
    assert len(VARIANTS) == sum(len(catalogue.VARIANTS) for catalogue in _CATALOGUES), "two catalogues share a name"
    assert len(set(names)) == len(names) >= 60
    assert set(names) >= _ESCAPED, "an escape names no mutation"
    for catalogue in _CATALOGUES:
        own = {mutation.id for mutation in catalogue.MUTATIONS}
        assert len(_ESCAPED & own) <= 0.05 * len(own)
