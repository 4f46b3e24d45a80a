"""Faults planted in real kernels: the simulator and the kernels' own cases catch them (`mutation.py`)."""

from __future__ import annotations

import zlib

import pytest

import mutations_attention
import mutations_experts
import mutations_experts_more
import mutations_far
import mutations_linear_more
import mutations_order
import mutations_products
import mutations_prompts
import mutations_sequences
import mutations_streams
import mutations_values
import mutations_warpgroups
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
    mutations_order,
    mutations_sequences,
    mutations_values,
)
VARIANTS = {where: place for catalogue in _CATALOGUES for where, place in catalogue.VARIANTS.items()}
MUTATIONS = tuple(mutation for catalogue in _CATALOGUES for mutation in catalogue.MUTATIONS)
_ESCAPED = {name for catalogue in _CATALOGUES for name, _ in catalogue.ESCAPES}


_NIGHTLY = (mutations_experts_more, mutations_far, mutations_linear_more, mutations_sequences, mutations_values)
_OFTEN = {where for catalogue in _CATALOGUES if catalogue not in _NIGHTLY for where in catalogue.VARIANTS}


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=() if where in _OFTEN else pytest.mark.nightly) for where in VARIANTS]
)
def test_without_a_fault_every_case_passes(where: str) -> None:
    assert fault(VARIANTS[where], source(VARIANTS[where])) is None


def _shared_out(mutation: Mutation) -> object:
    """The larger catalogues, and of the others every second fault by a digest of its name, are for the nightly run."""
    nightly = any(mutation in catalogue.MUTATIONS for catalogue in _NIGHTLY) or zlib.crc32(mutation.id.encode()) & 1
    return pytest.param(mutation, marks=pytest.mark.nightly if nightly else (), id=mutation.id)


@pytest.mark.parametrize("mutation", [_shared_out(m) for m in MUTATIONS if m.id not in _ESCAPED])
def test_a_planted_fault_is_caught(mutation: Mutation) -> None:
    said = mutation.fault()
    assert said is not None
    assert "not know" not in said, "the simulator lacks an instruction, which is no catch"


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.id in _ESCAPED], ids=lambda m: m.id)
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
