"""The ledger: evidence holds for exactly the code and target that were checked."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from jitmx import ledger
from jitmx.cache import files
from jitmx.errors import TacticError
from jitmx.ledger import Entry, Ledger

CODE = "a" * 64


def entry(**changes: object) -> Entry:
    made = Entry(
        CODE,
        "sm_90a",
        "linear.gemv",
        "hardware",
        card="NVIDIA H200",
        date="2025-11-21",
        error=0.0018,
        note="all shapes",
    )
    return dataclasses.replace(made, **changes)


def test_evidence_is_found_by_code_and_target_and_by_nothing_less() -> None:
    book = Ledger([entry()])
    assert book.best(CODE, "sm_90a") == entry()
    assert book.best(CODE, "sm_121a") is None
    assert book.best("b" * 64, "sm_90a") is None


def test_the_strongest_evidence_counts_and_of_equals_the_latest() -> None:
    compiled = entry(evidence="compiled", date="2025-12-31")
    older, newer = entry(date="2025-11-20"), entry(date="2025-11-22")
    for order in ([compiled, older, newer], [newer, older, compiled]):
        assert Ledger(order).best(CODE, "sm_90a") == newer


def test_a_saved_ledger_reads_back_and_keeps_only_the_latest_of_equals(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    newer = entry(date="2025-11-22", error=None)
    ledger.save([newer, entry(), entry(arch="sm_121a", evidence="compiled", card="", date="")], path)
    assert [item.arch for item in ledger.load(path).entries] == ["sm_121a", "sm_90a"]
    assert ledger.load(path).best(CODE, "sm_90a") == newer


def test_of_one_code_what_differs_by_its_note_is_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    seen = [entry(evidence="compiled", card="", note=note, proof=proof) for note, proof in (("", "a"), ("loop", "b"))]
    ledger.save([*seen, entry(evidence="compiled", card="", note="loop", date="2025-11-22", proof="c")], path)
    assert [(one.note, one.proof) for one in ledger.load(path).entries] == [("", "a"), ("loop", "c")]


def test_saving_in_another_order_writes_the_same_bytes(tmp_path: Path) -> None:
    entries = [entry(), entry(arch="sm_120a"), entry(source_digest="b" * 64, kernel="quantize.encode")]
    ledger.save(entries, tmp_path / "one.json")
    ledger.save(reversed(entries), tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_a_missing_ledger_is_an_empty_one(tmp_path: Path) -> None:
    assert ledger.load(tmp_path / "none.json").entries == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is no JSON"), ("\x00", "it is no JSON"), ("[]", "it is no JSON object"),
        ("{}", "its schema version is no number"), ('{"schema_version": 1}', "its entries are no list"),
        ('{"schema_version": 1, "entries": 5}', "its entries are no list"),
        ('{"schema_version": 1, "entries": {"a": 1}}', "its entries are no list"),
        ('{"schema_version": 1, "entries": [7]}', "entry 0 is no object"),
        (
            '{"schema_version": 1, "entries": [{"arch": "a"}]}',
            "entry 0 has no source_digest and no kernel and no evidence",
        ),
        ('{"schema_version": 0, "entries": []}', "it has schema version 0; this jitmx reads 1"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_ledger_is_refused_by_its_path_in_plain_words(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(TacticError) as raised:
        ledger.load(path)
    assert raised.value.message == f"{path} is not a ledger: {said}" and raised.value.remedy == "mend or remove it"
    assert ledger.damage(path) == said


def test_a_later_schema_is_refused_naming_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text('{"schema_version": 9, "entries": []}')
    with pytest.raises(TacticError, match="version 9; this jitmx reads 1; upgrade jitmx, or remove it"):
        ledger.load(path)
    assert ledger.damage(path) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evidence": "believed"}, "'believed' is not one of compiled, simulated, hardware"),
        ({"source_digest": "abc"}, "'abc' is not 64 hexadecimal digits"),
        ({"card": ""}, "names no card or no date"),
        ({"colour": "red"}, "has 'colour', which no entry has"),
    ],
)
def test_a_bad_entry_is_refused_by_its_number_and_fault(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    path = tmp_path / "ledger.json"
    row = dataclasses.asdict(entry()) | changes
    path.write_text(json.dumps({"schema_version": 1, "entries": [dataclasses.asdict(entry()), row]}))
    with pytest.raises(TacticError, match=f"entry 1.*{said}"):
        ledger.load(path)


@pytest.mark.parametrize(
    "changes",
    [{name: value} for name in ("arch", "kernel", "card", "date", "note", "source_digest", "evidence")
     for value in (None, 5, [], {"a": 1}, "a\x1b[2Jb", "\ud800")]
    + [{"error": value} for value in ("0.1", [], True, -1, math.nan, math.inf)],
    ids=str,
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_by_its_entry(tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "ledger.json"
    rows = [dataclasses.asdict(entry()), dataclasses.asdict(entry()) | changes]
    path.write_text(json.dumps({"schema_version": 1, "entries": rows}))
    with pytest.raises(TacticError, match="entry 1: ") as raised:
        ledger.load(path)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe\x00",
        b"\xc3\x28",
        b"[" * 200_000,
        b'{"schema_version": 1, "entries": ' + b"[" * 200_000,
        b'{"schema_version": ' + b"[" * 990 + b"]" * 990 + b', "entries": []}',
        b'{"schema_version": 1, "entries": [[]]}',
        b'{"schema_version": 1, "entries": [7]}',
        b'{"schema_version": 1, "entries": {"a": 1}}',
        b'{"schema_version": "\\u001b[2J", "entries": []}',
        b'{"schema_version": 1' + b"0" * 5000 + b"}",
    ],
    ids=range(10),
)
def test_bytes_that_are_no_ledger_are_refused_and_end_in_no_traceback(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "ledger.json").write_bytes(data)
    with pytest.raises(TacticError, match=r"ledger\.json") as raised:
        ledger.load(tmp_path / "ledger.json")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("what", ["directory", "fifo", "terabyte"])
def test_what_is_no_file_of_a_ledgers_size_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ledger.json"
    match what:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "terabyte":
            path.touch()
            os.truncate(path, 1 << 40)
    with pytest.raises(TacticError, match="cannot be read as a ledger"):
        ledger.load(path)
    assert "it cannot be read" in str(ledger.damage(path))


def test_an_own_ledger_that_may_not_be_read_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_arguments: object, **_more: object) -> object:
        if path.parent == tmp_path:
            raise PermissionError(13, "Permission denied")
        return really(path, *_arguments, **_more)

    really = files.read
    monkeypatch.setattr(files, "read", refuse)
    monkeypatch.setattr(ledger, "own_path", lambda: tmp_path / "ledger.json")
    assert ledger.known().entries == ledger.load().entries


@pytest.mark.parametrize(
    ("text", "remedy"), [("{", "`jitmx cache verify --repair`"), ('{"schema_version": 9, "entries": []}', "upgrade")]
)
def test_an_own_ledger_that_cannot_be_used_costs_one_warning_with_its_name_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, remedy: str
) -> None:
    (tmp_path / "ledger.json").write_text(text)
    monkeypatch.setattr(ledger, "own_path", lambda: tmp_path / "ledger.json")
    assert ledger.known().entries == ledger.load().entries
    (said,) = [record.getMessage() for record in caplog.records if record.name == "jitmx.ledger"]
    assert str(tmp_path / "ledger.json") in said and remedy in said


def test_a_ledger_behind_a_link_is_read(tmp_path: Path) -> None:
    ledger.save([entry()], tmp_path / "target.json")
    (tmp_path / "ledger.json").symlink_to(tmp_path / "target.json")
    assert ledger.load(tmp_path / "ledger.json").entries == (entry(),)


def test_saving_behind_a_link_writes_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").symlink_to(tmp_path / "target.json")
    ledger.save([entry()], tmp_path / "ledger.json")
    assert (tmp_path / "ledger.json").is_symlink() and ledger.load(tmp_path / "target.json").entries == (entry(),)


def test_an_edit_to_an_included_header_withdraws_the_evidence(tmp_path: Path) -> None:
    folder = tmp_path / "jitmx"
    folder.mkdir()
    (folder / "outer.cuh").write_text('#include "jitmx/inner.cuh"\n')
    (folder / "inner.cuh").write_text('#include "jitmx/outer.cuh"\nint a;\n')
    (folder / "unused.cuh").write_text("int b;\n")
    source = '#include <cuda_fp16.h>\n#include "jitmx/outer.cuh"\n'
    before = ledger.digest(source, tmp_path)
    (folder / "unused.cuh").write_text("int c;\n")
    assert ledger.digest(source, tmp_path) == before
    (folder / "inner.cuh").write_text('#include "jitmx/outer.cuh"\nint d;\n')
    assert ledger.digest(source, tmp_path) != before
    assert ledger.digest(source + "\n", tmp_path) != ledger.digest(source, tmp_path)


def test_the_shipped_ledger_is_readable() -> None:
    assert isinstance(ledger.load(), Ledger)
