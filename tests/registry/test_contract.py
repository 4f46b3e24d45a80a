"""A contract finds every promise that machine code breaks, and no other."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx.registry.contract import Contract
from jitmx.registry.spec import KernelSpec
from strategies import SPEC_NAMES, SPECS, variants

SASS = ["LDG.E.128 R4, [R2.64]", "HMMA.16816.F32.BF16 R8, R4, R6, R8", "FFMA R1, R2, R3, R1", "EXIT"]
PATTERNS = [r"\bLDG\.E\.128", r"HMMA", r"\bFFMA\b", r"\bQMMA\b", r"UBLKCP", r"^EXIT$"]
FOUND = {pattern for pattern in PATTERNS if any(re.search(pattern, line) for line in SASS)}


@given(
    limit=st.integers(1, 255),
    registers=st.integers(1, 255),
    spill_limit=st.integers(0, 8),
    spill=st.integers(0, 16),
    require=st.lists(st.sampled_from(PATTERNS), unique=True),
    forbid=st.lists(st.sampled_from(PATTERNS), unique=True),
)
def test_each_broken_promise_is_one_breach_and_each_kept_one_is_none(
    limit: int, registers: int, spill_limit: int, spill: int, require: list[str], forbid: list[str]
) -> None:
    contract = Contract(limit, spill_limit, tuple(require), tuple(forbid))
    breaches = contract.breaches(registers=registers, spill_bytes=spill, sass=SASS)
    missing, hit = set(require) - FOUND, set(forbid) & FOUND
    assert len(breaches) == (registers > limit) + (spill > spill_limit) + len(missing) + len(hit)
    for pattern in missing | hit:
        assert any(repr(pattern) in breach for breach in breaches)


def test_a_breach_names_what_was_found_and_what_was_promised() -> None:
    contract = Contract(max_registers=64, require=(r"\bQMMA\b",), forbid=(r"FFMA",))
    assert contract.breaches(registers=80, spill_bytes=24, sass=SASS) == [
        "80 registers a thread, over the 64 promised",
        "24 B a thread spilled to local memory, over the 0 promised",
        r"no instruction matches '\\bQMMA\\b'",
        "'FFMA R1, R2, R3, R1' matches 'FFMA', which is ruled out",
    ]


def test_limits_themselves_are_kept_promises() -> None:
    contract = Contract(max_registers=64, max_spill_bytes=8, min_registers=64)
    assert contract.breaches(registers=64, spill_bytes=8) == []


def test_too_few_registers_to_share_out_are_a_breach() -> None:
    assert Contract(min_registers=128).breaches(registers=120, spill_bytes=0) == [
        "120 registers a thread, under the 128 that warps share out"
    ]


def test_an_instruction_is_required_even_where_there_is_no_machine_code_to_read() -> None:
    assert Contract(require=("LDG",)).breaches(registers=1, spill_bytes=0) == ["no instruction matches 'LDG'"]


def test_the_disassembly_may_be_read_once_only() -> None:
    contract = Contract(require=("LDG", "EXIT"), forbid=("FFMA",))
    once, often = iter(SASS), SASS
    assert contract.breaches(registers=1, spill_bytes=0, sass=once) == contract.breaches(
        registers=1, spill_bytes=0, sass=often
    )


@pytest.mark.parametrize(
    ("contract", "needs"),
    [(Contract(), False), (Contract(64, 8), False), (Contract(require=("A",)), True), (Contract(forbid=("A",)), True)],
)
def test_the_disassembly_is_asked_for_only_where_instructions_are_promised(contract: Contract, needs: bool) -> None:
    assert contract.needs_sass is needs


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
@given(data=st.data())
def test_every_variant_promises_registers_that_its_threads_can_have_and_no_spills(
    spec: KernelSpec, data: st.DataObject
) -> None:
    variant = data.draw(variants(spec))
    contract = spec.contract(variant.knobs, variant.arch)
    assert 0 < contract.max_registers <= 255
    assert contract.max_registers * variant.threads <= 65536
    # A router of many experts, or of 64 tokens with RMSNorm, leaves a thread few registers, and five of them spill.
    knobs, routes = variant.knobs.as_dict(), (spec.family, spec.name) == ("routing", "route")
    few = routes and (knobs["experts"] >= 256 or (knobs["norm"] and knobs["tokens"] == 64))
    # Sums of a head of 256 beside operands of E4M3 leave none for addresses that the loop does not need.
    wide = spec.family == "attention" and spec.name in ("decode", "prefill")
    wide = wide and knobs["head_dim"] == 256 and knobs["cache"] == "e4m3"
    assert contract.max_spill_bytes == (20 if few else 64 if wide else 0)
    assert contract.require
    for pattern in (*contract.require, *contract.forbid):
        re.compile(pattern)
