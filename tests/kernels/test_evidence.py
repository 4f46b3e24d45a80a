"""Evidence is found without a compile by all that a compile is made from, and by nothing less."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import contracts
import evidence
import mutation
from contracts import keep_contracts, see_in_ptx
from evidence import Verdicts, compiled_from, keeps, made_from
from jitmx import arch, batch
from jitmx.build import Built
from jitmx.errors import ToolchainError
from jitmx.kernels.quantize import FAMILY
from jitmx.ledger import Entry, Ledger
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.spec import Variant
from jitmx.sim import proof as proving
from jitmx.sim.verify import Verdict
from jitmx.toolchain import headers, nvrtc
from mutation import Mutation

ONE = FAMILY.spec("quantize").variant(arch.parse("sm_90"))
OTHER = FAMILY.spec("dequantize").variant(arch.parse("sm_90"))
FOUND = Verdict(None, 0.25, 3, 0.97, proof="1" * 64)


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is noted here is evidence of a kernel."""
    monkeypatch.setattr(evidence, "_noted", [])


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC is not to be asked for code."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ToolchainError("it was asked to compile")

    monkeypatch.setattr(nvrtc, "compile_ptx", refuse)
    monkeypatch.setattr(nvrtc, "compile", refuse)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the ledgers hold these entries, and no others."""

    def hold(*entries: Entry) -> None:
        monkeypatch.setattr(evidence, "kept", lambda: Ledger(entries))
        monkeypatch.setattr(evidence, "anew", False)

    return hold


def compiled(variant: Variant) -> Entry:
    return Entry("0" * 64, variant.arch.name, variant.name, "compiled", proof=keeps(variant))


def test_a_verdict_of_a_ledger_is_found_by_what_its_ptx_is_made_from(tmp_path: Path, uncompiled: None) -> None:
    entry = Entry("0" * 64, "sm_90a", ONE.name, "simulated", error=0.25, cases=3, coverage=0.97, proof=FOUND.proof,
                  made=made_from(ONE))  # fmt: skip
    verdicts = Verdicts(tmp_path / "verdicts", Ledger([entry]))
    assert verdicts.find(made_from(ONE)) == verdicts.find(FOUND.proof) == FOUND
    assert verdicts.find(made_from(OTHER)) is None


def test_a_verdict_of_this_run_is_found_so_too_and_a_failure_is_not(tmp_path: Path, uncompiled: None) -> None:
    Verdicts(tmp_path / "verdicts", None).keep(ONE, FOUND, made_from(ONE))
    Verdicts(tmp_path / "verdicts", None).keep(OTHER, dataclasses.replace(FOUND, failure="wrong"), made_from(OTHER))
    verdicts = Verdicts(tmp_path / "verdicts", None)
    assert verdicts.find(made_from(ONE)) == FOUND and verdicts.find(made_from(OTHER)) is None


def another_compiler(patch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(nvrtc.identity(), digest="0" * 64)
    patch.setattr(nvrtc, "identity", lambda: other)


def another_option(patch: pytest.MonkeyPatch) -> None:
    usual = nvrtc.options(ONE.arch)
    patch.setattr(nvrtc, "options", lambda target: (*usual, "--fmad=false"))


def another_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evidence, "render", lambda variant, really=evidence.render: f"{really(variant)}\n")


def another_header(patch: pytest.MonkeyPatch) -> None:
    really, last = headers.HeaderPool.digest, headers.pool().closure(evidence.render(ONE))[-1]
    patch.setattr(headers.HeaderPool, "digest", lambda pool, name: "0" * 64 if name == last else really(pool, name))


COMPILES = (another_compiler, another_option, another_source, another_header)


@pytest.mark.parametrize("change", COMPILES)
def test_whatever_a_compile_is_made_from_makes_another_digest(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compiled_from(ONE), made_from(ONE), keeps(ONE)
    assert before == (compiled_from(ONE), made_from(ONE), keeps(ONE))
    change(monkeypatch)
    assert not {*before} & {compiled_from(ONE), made_from(ONE), keeps(ONE)}


def test_another_simulator_or_case_makes_another_verdict_s_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before, really = made_from(ONE), proving._code
    with monkeypatch.context() as patch:
        patch.setattr(proving, "_code", lambda modules: really(modules) + b"0")
        evidence.judged.cache_clear()
        assert made_from(ONE) != before

    def cases(variant: Variant) -> Iterator[Case]:
        first, *others = made(variant)
        yield dataclasses.replace(first, gate=first.gate + 1)
        yield from others

    made = FAMILY.cases
    monkeypatch.setattr(type(FAMILY), "cases", lambda family, variant: cases(variant))
    evidence.judged.cache_clear()
    assert made_from(ONE) != before
    evidence.judged.cache_clear()


def test_a_contract_that_is_known_to_be_kept_takes_no_compile(uncompiled: None, known: Callable[..., None]) -> None:
    known(compiled(ONE))
    keep_contracts([ONE])
    with pytest.raises(AssertionError, match="it was asked to compile"):
        keep_contracts([ONE, OTHER])


def test_of_another_contract_or_disassembler_nothing_is_known(
    known: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    known(compiled(ONE))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0")
        assert not evidence.kept().proven(keeps(ONE))
    stricter = dataclasses.replace(ONE.spec, contract=lambda knobs, target: Contract(max_registers=1))
    with pytest.raises(AssertionError, match="registers a thread, over the 1 promised"):
        keep_contracts([dataclasses.replace(ONE, spec=stricter)])


def it_reads(built: Built, lines: list[str]) -> None:
    assert any(line.startswith("LDG") for line in lines)


def it_writes(built: Built, lines: list[str]) -> None:
    assert any(line.startswith("STG") for line in lines)


def by_another_function(built: Built, lines: list[str]) -> None:
    it_reads(built, lines)


def test_what_a_look_at_machine_code_found_stands_for_that_look_alone(
    known: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    known()
    noted: list[Entry] = []
    monkeypatch.setattr(evidence, "_noted", noted)
    keep_contracts([ONE], it_reads)
    assert [(entry.note, entry.proof) for entry in noted] == [("it reads", keeps(ONE, it_reads))]
    assert len({keeps(ONE), keeps(ONE, it_reads), keeps(ONE, it_writes)}) == 3
    known(*noted)
    monkeypatch.setattr(contracts, "within_contracts", lambda variants: pytest.fail("asked") if variants else [])
    keep_contracts([ONE], it_reads)
    for other in (None, it_writes):
        with pytest.raises(pytest.fail.Exception, match="asked"):
            keep_contracts([ONE], other)


def test_a_look_that_finds_fault_fails_and_is_not_noted(
    known: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(built: Built, lines: list[str]) -> None:
        assert not lines

    known()
    monkeypatch.setattr(evidence, "_noted", [])
    with pytest.raises(AssertionError):
        keep_contracts([ONE], nothing)
    assert evidence._noted == []


def test_a_look_takes_nothing_that_evidence_would_not_know_of() -> None:
    with pytest.raises(AssertionError, match="names it_reads, which evidence would not know of"):
        keeps(ONE, by_another_function)
    bound = 4

    def closed(built: Built, lines: list[str]) -> None:
        assert len(lines) > bound

    with pytest.raises(AssertionError, match="closed takes names from around it"):
        keeps(ONE, closed)


def test_what_another_compiler_makes_is_known_for_that_compiler_alone() -> None:
    here = keeps(ONE)
    assert keeps(ONE, compiler=nvrtc.identity().digest) == here != keeps(ONE, compiler="0" * 64)


def test_a_fault_that_was_caught_is_known_of_the_same_fault_in_the_same_kernel_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planted(name: str, place: Variant = ONE) -> Mutation:
        return Mutation("here", place, name, 'extern "C"', f'// {name}\nextern "C"')

    assert mutation.source(ONE).count('extern "C"') == 1
    one = planted("one")
    assert one.proof() == planted("one").proof() != planted("other").proof()
    assert made_from(ONE) != one.proof() != made_from(ONE, one.text()), "no verdict of a kernel that passed"
    other = dataclasses.replace(ONE, knobs=dataclasses.replace(ONE.knobs, pdl=not ONE.knobs.pdl))
    assert planted("one", other).proof() != one.proof()
    before = one.proof()
    monkeypatch.setattr(mutation, "fault", fault_by_another_judge)
    assert one.proof() != before


def fault_by_another_judge(place: Variant, text: str) -> str | None:
    return None


def test_where_all_is_to_be_seen_anew_contracts_are(
    known: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    known(compiled(ONE))
    monkeypatch.setattr(evidence, "anew", True)
    asked: list[Variant] = []

    def build_all(variants: Any) -> list[Any]:
        asked.extend(variants)
        return []

    monkeypatch.setattr(contracts.batch, "build_all", build_all)
    keep_contracts([ONE])
    assert asked == [ONE] and contracts.batch is batch


def test_what_keeps_its_contract_is_noted(known: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    known()
    noted: list[Entry] = []
    monkeypatch.setattr(evidence, "_noted", noted)
    keep_contracts([ONE])
    assert [(entry.evidence, entry.proof) for entry in noted] == [("compiled", keeps(ONE))]
    known(*noted)
    monkeypatch.setattr(contracts, "within_contracts", lambda variants: pytest.fail("asked") if variants else [])
    keep_contracts([ONE])


def case() -> Case:
    """A case that any variant of `quantize` passes."""
    return next(iter(FAMILY.cases(ONE)))


def test_a_case_of_a_test_s_own_that_passed_is_simulated_again_only_without_its_evidence(
    passes: Callable[..., None], known: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    known()
    noted: list[Entry] = []
    monkeypatch.setattr(evidence, "_noted", noted)
    passes(ONE, case())
    assert [entry.evidence for entry in noted] == ["compiled"] and case().name in noted[0].note
    known(*noted)
    monkeypatch.setattr(nvrtc, "compile_ptx", lambda *_: pytest.fail("asked"))
    passes(ONE, case())
    for other in (
        (OTHER, case()),
        (ONE, dataclasses.replace(case(), gate=0.5)),
        (ONE, case(), evidence.render(ONE) + "\n"),
    ):
        with pytest.raises(pytest.fail.Exception, match="asked"):
            passes(*other)
    known()
    with pytest.raises(pytest.fail.Exception, match="asked"):
        passes(ONE, case())
    known(*noted)
    monkeypatch.setattr(evidence, "anew", True)
    with pytest.raises(pytest.fail.Exception, match="asked"):
        passes(ONE, case())


def test_a_case_that_fails_is_not_noted(
    passes: Callable[..., None], known: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    known()
    with pytest.raises(AssertionError, match=r"is over the gate of -1"):
        passes(ONE, dataclasses.replace(case(), gate=-1.0))
    assert evidence._noted == []


def test_a_case_is_judged_by_what_evidence_knows_of(passes: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match=r"judged by .*test_evidence, which evidence would not know of"):
        passes(ONE, dataclasses.replace(case(), check=lambda outputs: 0.0))


def it_has_an_entry(ptx: str) -> None:
    assert ".entry" in ptx


def it_has_none(ptx: str) -> None:
    assert ".entry" not in ptx


def test_what_a_look_at_ptx_found_stands_for_that_look_alone_and_a_fault_is_not_noted(
    known: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    known()
    noted: list[Entry] = []
    monkeypatch.setattr(evidence, "_noted", noted)
    see_in_ptx([ONE], it_has_an_entry)
    with pytest.raises(AssertionError):
        see_in_ptx([ONE], it_has_none)
    assert [(entry.note, entry.proof) for entry in noted] == [
        ("it has an entry", evidence.seen_in_ptx(ONE, it_has_an_entry))
    ]
    known(*noted)
    monkeypatch.setattr(nvrtc, "compile_ptx", lambda *_: pytest.fail("asked"))
    see_in_ptx([ONE], it_has_an_entry)
    for other in (ONE, it_has_none), (OTHER, it_has_an_entry):
        with pytest.raises(pytest.fail.Exception, match="asked"):
            see_in_ptx([other[0]], other[1])


def test_what_makes_a_variant_s_cases_is_told_without_making_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(FAMILY), "cases", lambda family, variant: pytest.fail("made"))
    before, really, meaning = evidence.drawn([ONE]), proving._code, proving._meaning
    assert len({before, evidence.drawn([OTHER]), evidence.drawn([ONE, OTHER]), evidence.drawn([])}) == 4
    for name, other in (
        ("_code", lambda modules: really(modules) + b"0"),
        ("_meaning", lambda path: meaning(path) + (b"0" if path.name == "kernel.py" else b"")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(proving, name, other)
            assert evidence.drawn([ONE]) != before
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert evidence.drawn([ONE]) != before
