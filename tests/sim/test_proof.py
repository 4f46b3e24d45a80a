"""Evidence of the simulator stands while what it rests on stays: PTX, cases, the code of simulator and family."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evidence import Verdicts
from jitmx import arch, kernels
from jitmx.kernels.quantize import FAMILY
from jitmx.ledger import Entry, Ledger
from jitmx.registry.arguments import Arguments, number
from jitmx.registry.case import Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.registry.tensor_map import TensorMap
from jitmx.sim import proof as proving
from jitmx.sim import verify as verifying
from jitmx.sim.proof import proof
from jitmx.sim.verify import Verdict, verify
from jitmx.toolchain import nvrtc

SM_90 = arch.parse("sm_90")
ONE = FAMILY.spec("quantize").variant(SM_90)


def ptx_of(variant: Variant) -> str:
    return nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))


@pytest.fixture(scope="module")
def ptx() -> str:
    return ptx_of(ONE)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(FAMILY.cases(ONE))


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The cases that the simulator really ran."""
    ran: list[str] = []
    really = verifying.launch

    def launch(case: Case, *rest: Any, **more: Any) -> Any:
        ran.append(case.name)
        return really(case, *rest, **more)

    monkeypatch.setattr(verifying, "launch", launch)
    yield ran


def entry_of(verdict: Verdict, **changes: object) -> Entry:
    return Entry("0" * 64, "sm_90a", ONE.name, "simulated", proof=verdict.proof, cases=verdict.cases, coverage=1.0)


def test_evidence_on_the_same_proof_stands_and_nothing_is_simulated(tmp_path: Path, simulations: list[str]) -> None:
    first = verify(ONE)
    assert first.passed and len(simulations) == first.cases > 0
    simulations.clear()
    again = verify(ONE, Verdicts(tmp_path / "verdicts", Ledger([entry_of(first)])).find)
    assert again.passed and (again.cases, again.coverage, again.proof) == (first.cases, 1.0, first.proof)
    assert simulations == []


def test_a_variant_without_evidence_is_simulated(tmp_path: Path, simulations: list[str]) -> None:
    other = verify(FAMILY.spec("dequantize").variant(SM_90))
    simulations.clear()
    verdict = verify(ONE, Verdicts(tmp_path / "verdicts", Ledger([entry_of(other)])).find)
    assert verdict.passed and len(simulations) == verdict.cases
    simulations.clear()
    assert verify(ONE, Verdicts(tmp_path / "verdicts", None).find).passed
    assert len(simulations) == verdict.cases


def test_what_one_process_of_a_run_found_another_does_not_simulate(tmp_path: Path, simulations: list[str]) -> None:
    verdict = verify(ONE)
    Verdicts(tmp_path / "verdicts", None).keep(ONE, verdict)
    simulations.clear()
    assert verify(ONE, Verdicts(tmp_path / "verdicts", None).find) == dataclasses.replace(
        verdict, report=None, uncovered=(), seconds=0.0
    )
    assert simulations == []


def test_a_failure_is_never_kept(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "verdicts", None)
    verdicts.keep(ONE, Verdict("wrong", 1.0, 1, 1.0, proof="0" * 64))
    assert verdicts.find("0" * 64) is None


def test_the_target_is_no_part_of_a_proof_and_every_other_line_is(ptx: str, cases: list[Case]) -> None:
    wanted = proof(ONE, ptx, cases)
    assert proof(ONE, re.sub(r"(?m)^\.target .*$", ".target sm_121a", ptx), cases) == wanted
    instruction = next(line for line in ptx.splitlines() if "ld.global" in line)
    assert proof(ONE, ptx.replace(instruction, instruction.replace("ld.global", "ld.volatile.global")), cases) != wanted
    assert proof(ONE, f"{ptx}\n", cases) != wanted


def changed(data: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    other = data.copy()
    other.view(np.uint8).reshape(-1)[-1] ^= 1
    return other


def with_launch(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, launch=dataclasses.replace(case.launch, **changes))


def with_x(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, values={**case.values, "x": dataclasses.replace(case.values["x"], **changes)})


@pytest.mark.parametrize(
    "change",
    [
        lambda case: with_launch(case, blocks=case.launch.blocks + 1),
        lambda case: with_launch(case, cluster=case.launch.cluster + 1),
        lambda case: with_launch(case, shared_bytes=case.launch.shared_bytes + 16),
        lambda case: with_launch(case, maps={"x_map": TensorMap("bf16", (64, 8), (64, 8))}),
        lambda case: dataclasses.replace(case, resident=7),
        lambda case: dataclasses.replace(case, gate=case.gate / 2 + 0.001),
        lambda case: dataclasses.replace(case, values={**case.values, "vectors": 12345}),
        lambda case: with_x(case, data=changed(case.values["x"].data)),
        lambda case: with_x(case, constant=True),
        lambda case: with_x(case, early=True),
        lambda case: with_x(case, ahead=True),
        lambda case: dataclasses.replace(case, fixed=("vectors",)),
        lambda case: dataclasses.replace(case, again=lambda: case),
    ],
)
def test_any_change_of_a_case_is_another_proof(change: Callable[[Case], Case], ptx: str, cases: list[Case]) -> None:
    assert proof(ONE, ptx, [change(cases[0]), *cases[1:]]) != proof(ONE, ptx, cases)


def test_a_field_of_the_arguments_that_lies_elsewhere_is_another_proof(ptx: str, cases: list[Case]) -> None:
    own = ONE.arguments
    moved = Arguments(own.name, number("before", "int"), *own.fields.values())
    other = dataclasses.replace(ONE, spec=dataclasses.replace(ONE.spec, arguments=lambda knobs: moved))
    assert proof(other, ptx, cases) != proof(ONE, ptx, cases)


def test_a_case_more_or_less_is_another_proof(ptx: str, cases: list[Case]) -> None:
    assert len({proof(ONE, ptx, some) for some in (cases, cases[1:], [*cases, cases[0]], cases[::-1])}) == 4


# What files mean and import by their texts: most are the same in every copy of the package.
_MEANT: dict[bytes, Any] = {}
_IMPORTED: dict[bytes, Any] = {}


def _remembering(read: Callable[[Path], Any], found: dict[bytes, Any]) -> Callable[[Path], Any]:
    """`read`, asked once for each text."""
    read = getattr(read, "__wrapped__", read)

    def once(path: Path) -> Any:
        text = path.read_bytes()
        if text not in found:
            found[text] = read(path)
        return found[text]

    return once


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """Edits a file of a copy of the package: `copied("sim/alu.py", old, new)`."""
    package = tmp_path / "jitmx"
    for path in proving._PACKAGE.rglob("*.py"):
        place = package / path.relative_to(proving._PACKAGE)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(path.read_text())
    monkeypatch.setattr(proving, "_PACKAGE", package)
    for name, found in (("_imported", _IMPORTED), ("_meaning", _MEANT)):
        monkeypatch.setattr(proving, name, _remembering(getattr(proving, name), found))

    def forget() -> None:
        for cached in (proving._code, proving._parsed):
            cached.cache_clear()

    def edit(name: str, old: str, new: str) -> None:
        text = (package / name).read_text()
        assert old in text
        (package / name).write_text(text.replace(old, new, 1))
        forget()

    forget()
    yield edit
    forget()


@pytest.mark.parametrize(
    ("name", "old", "new", "counts"),
    [
        ("sim/memory.py", "class Memory", "class Other", True),
        ("registry/case.py", "float(np.mean(found != wanted))", "0.0", True),
        ("formats.py", "import numpy", "import math\nimport numpy", True),
        ("registry/arguments.py", "packed = bytearray(self.size)", "packed = bytearray(self.size + 1)", True),
        ("registry/tensor_map.py", "1 <= size <= 256", "1 <= size <= 257", True),
        ("kernels/quantize.py", "gate=", "resident=1, gate=", True),
        ("kernels/moe/token.py", "import", "import sys\nimport", False),
        ("models.py", "import", "import sys\nimport", False),
        ("kernels/norm/problem.py", "import", "import sys\nimport", False),
        ("cli/verify.py", "import", "import sys\nimport", False),
        ("sim/memory.py", '"""', '"""Said otherwise. ', False),
        ("kernels/quantize.py", "\n\n\n", "\n\n\n# A comment.\n\n", False),
    ],
)
def test_code_that_makes_or_judges_cases_counts_and_no_other_does(
    name: str, old: str, new: str, counts: bool, ptx: str, cases: list[Case], copied: Callable[[str, str, str], None]
) -> None:
    before = proof(ONE, ptx, cases)
    copied(name, old, new)
    assert (proof(ONE, ptx, cases) != before) == counts


def test_of_a_family_the_modules_that_the_kernel_s_cases_import_count_and_its_other_kernels_do_not(
    copied: Callable[[str, str, str], None],
) -> None:
    norm = kernels.family("norm")

    def proofs() -> dict[str, str]:
        return {name: proof(norm.spec(name).variant(SM_90), "", []) for name in ("rms", "rows")}

    before = proofs()
    copied("kernels/norm/rows.py", "import", "import sys\nimport")
    assert proofs()["rms"] == before["rms"] and proofs()["rows"] != before["rows"]
    copied("kernels/norm/rms.py", "import", "import sys\nimport")  # whose reference both are judged by
    assert proofs()["rms"] != before["rms"]
    before = proofs()
    copied("kernels/fp8_rows.py", "import", "import sys\nimport")
    assert proofs()["rms"] == before["rms"] and proofs()["rows"] != before["rows"]


def test_kept_evidence_is_of_proofs_that_somebody_could_find_again() -> None:
    """Not that they are of today: what has changed since is simulated by other tests."""
    from evidence import kept

    proven = [entry for entry in kept().entries if entry.proof]
    assert all(re.fullmatch("[0-9a-f]{64}", text) for entry in proven for text in (entry.proof, entry.made) if text)
    assert {entry.evidence for entry in proven} <= {"simulated", "compiled"}
    assert all(entry.cases and entry.coverage for entry in proven if entry.evidence == "simulated")
    assert set(kernels.families()) >= {entry.kernel.partition(".")[0] for entry in kept().entries}
