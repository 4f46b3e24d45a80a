"""Tuning tables: what ships is whole and legal, and what is wrong with a table is said with its path."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jitmx import arch, kernels, resources, settings
from jitmx.dispatch import tactics
from jitmx.dispatch.choose import _guess, choose
from jitmx.dispatch.journal import Journal
from jitmx.errors import KnobError, TacticError
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.moe import USUAL_ROWS
from jitmx.kernels.quantize import QuantizeProblem

ROOT = resources.directory("tactics")
TABLES = sorted(ROOT.glob("sm_*/*.json"))
NAMES = [f"{path.parent.name}-{path.stem}" for path in TABLES]
SHAPES = ((5120, 2880), (2880, 4096), (201088, 2880))  # of gpt-oss-120b: QKV, O, lm_head
ROW = {"when": {"m": 1}, "kernel": "gemv", "knobs": {"stages": 2}}
QKV = LinearProblem(1, 5120, 2880)
SM_90 = arch.parse("sm_90")
Write = Callable[..., Path]


def load(path: Path) -> tactics.Table:
    """A shipped table, as its place says."""
    return tactics.load(path, kernels.family(path.stem), arch.parse(path.parent.name))


def test_tables_are_shipped_for_the_targets_that_jitmx_is_tuned_for() -> None:
    assert set(NAMES) == {"sm_90a-linear", "sm_90a-moe", "sm_121a-moe"}


@pytest.mark.parametrize("path", TABLES, ids=NAMES)
def test_every_row_of_a_shipped_table_is_legal_and_met_by_some_problem(path: Path) -> None:
    table, family, target = load(path), kernels.family(path.stem), arch.parse(path.parent.name)
    assert table.rows
    for row in table.rows:
        ends = [
            {name: wanted[end] if isinstance(wanted, list) else wanted for name, wanted in row.when.items()}
            for end in (0, 1)
        ]
        for shape in ends:
            problem = family.problem.on(target, **shape)
            # A row for another kernel may come before it: then it is for calls that name its own.
            assert next(other for other in table.rows if other.fits(problem) and other.kernel == row.kernel) is row
            variant = family.spec(row.kernel).variant(target, **{**row.knobs, **family.fixed(problem, row.kernel)})
            family.check(problem, variant)
            assert not row.knobs.keys() & family.fixed(problem, row.kernel).keys()
            first = next(other for other in table.rows if other.fits(problem))
            assert choose(path.stem, problem, target, knobs={"kernel": row.kernel}).variant == variant
            assert (choose(path.stem, problem, target).variant == variant) == (first is row)


@pytest.mark.parametrize("residual", [False, True, "pair"])
@pytest.mark.parametrize("path", [path for path in TABLES if path.stem == "linear"], ids=str)
def test_every_row_serves_what_may_be_added_to_a_product(path: Path, residual: bool | str) -> None:
    target = arch.parse(path.parent.name)
    for row in load(path).rows:
        if residual == "pair" and row.when.get("activation", "none") != "none":
            continue  # no kernel of quantized activations adds a pair
        for m, bias in itertools.product(row.when["m"], (False, True)):
            shape = {**row.when, "m": m, "bias": bias, "residual": residual}
            problem = LinearProblem.on(target, **shape)
            chosen = choose("linear", problem, target)  # an illegal row is an error
            assert chosen.variant.knobs.as_dict().get("residual", residual) == residual


@pytest.mark.parametrize("path", [path for path in TABLES if path.stem == "linear"], ids=str)
@pytest.mark.parametrize("m", range(1, 9))
def test_a_shipped_table_decides_for_every_dense_product_of_gpt_oss(path: Path, m: int) -> None:
    target = arch.parse(path.parent.name)
    for n, k in SHAPES:
        for bias in (False, True):
            for dtype in ("bf16", "fp16"):
                for scale_range in ("normal", "full"):
                    shape = {"m": m, "n": n, "k": k, "bias": bias, "dtype": dtype, "scale_range": scale_range}
                    choice = choose("linear", LinearProblem.on(target, **shape), target)
                    # What is best for these says nothing of other types.
                    covered = (dtype, scale_range) == ("bf16", "normal")
                    assert choice.decided_by.name == ("shipped table" if covered else "heuristic")


@pytest.mark.parametrize("path", TABLES, ids=NAMES)
def test_a_measured_table_names_card_and_date_and_times_every_row(path: Path) -> None:
    table = load(path)
    if table.origin["kind"] == "measured":
        assert table.origin["card"] and table.origin["driver"] and table.origin["date"]
        assert all(row.us and row.us > 0 for row in table.rows)
        code = f"code {table.origin['code'][:12]}" if "code" in table.origin else "code not recorded"
        assert table.provenance == f"measured on {table.origin['card']}, {table.origin['date']}, {code}"
    else:
        assert table.provenance.startswith("heuristic, not measured: ")
        assert all(row.us is None for row in table.rows)


@pytest.mark.parametrize("path", TABLES, ids=NAMES)
def test_a_measured_row_says_the_same_whatever_the_defaults_of_knobs_become(path: Path) -> None:
    table, family, target = load(path), kernels.family(path.stem), arch.parse(path.parent.name)
    for row in table.rows if table.origin["kind"] == "measured" else ():
        shape = {name: wanted[1] if isinstance(wanted, list) else wanted for name, wanted in row.when.items()}
        knobs = {item.name for item in dataclasses.fields(family.spec(row.kernel).knobs)}
        assert row.knobs.keys() == knobs - family.fixed(family.problem.on(target, **shape), row.kernel).keys()


def test_no_table_of_a_target_that_was_never_measured_claims_to_be() -> None:
    assert {name: load(path).origin["kind"] for name, path in zip(NAMES, TABLES, strict=True)} == {
        "sm_90a-linear": "measured", "sm_90a-moe": "measured", "sm_121a-moe": "heuristic"
    }  # fmt: skip


@pytest.mark.parametrize("path", [path for path in TABLES if path.parent.name != "sm_90a"], ids=str)
def test_a_table_that_was_not_measured_says_what_the_heuristic_does_not(path: Path) -> None:
    """A row that repeats the heuristic stands only before one that is asked for by the name of its kernel."""
    table, family, target = load(path), kernels.family(path.stem), arch.parse(path.parent.name)
    for number, row in enumerate(table.rows):
        low, high = row.when["m"]
        problems = [family.problem.on(target, **{**row.when, "m": m}) for m in USUAL_ROWS if low <= m <= high]
        guesses = [_guess(family, problem, target, target.multiprocessors, row.kernel) for problem in problems]
        behind = [other for other in table.rows[number + 1 :] if other.fits(problems[0]) and other.kernel != row.kernel]
        assert behind or any(guess != (row.kernel, row.knobs) for guess in guesses), row.when


def test_rows_of_products_say_for_which_type_and_scales_they_are() -> None:
    """Sums of fp16 and of full scales take registers that tiles chosen for bf16 have not left over."""
    for path in TABLES:
        if path.stem == "linear":
            assert all({"dtype", "scale_range"} <= set(row.when) for row in load(path).rows), path


def test_tiles_of_quantized_experts_on_gb10_are_64_rows_up_to_16_tokens_and_128_above() -> None:
    chip, family = arch.parse("sm_121"), kernels.family("moe")
    for m in (1, 7, 16, 17, 64, 65, 300, 8192):  # a quantized layer goes by expert however few rows it has
        for experts in (32, 128):
            for product in ("layer", "up", "down"):
                problem = family.problem.on(chip, m=m, experts=experts, product=product, x_format="mxfp8")
                choice = choose("moe", problem, chip)
                knobs = choice.variant.knobs
                assert (knobs.tile_m, knobs.tile_n) == ((64, 128) if m <= 16 else (128, 128))
                table = next(source for source in choice.sources if source.name == "shipped table")
                assert table.detail.startswith("heuristic, not measured: cost model for GB10: 48 multiprocessors, 240 ")


@pytest.mark.parametrize("experts", [32, 128])
def test_tiles_of_experts_in_bf16_on_gb10_follow_rows_an_expert(experts: int) -> None:
    chip, family = arch.parse("sm_121"), kernels.family("moe")
    served = choose("moe", family.problem.on(chip, m=16, experts=experts), chip)
    assert (served.variant.spec.name, served.decided_by.name) == ("decode", "heuristic")
    for m in (64, 65, 300, 1024):
        problem = family.problem.on(chip, m=m, experts=experts)
        choice = choose("moe", problem, chip)
        assert (choice.variant.spec.name, choice.decided_by.name) == ("grouped", "heuristic")
        assert choice.variant.knobs.tile_m <= max(64, 4 * problem.rows_an_expert)


@pytest.fixture
def script() -> ModuleType:
    """scripts/heuristic_tactics.py as a module."""
    path = Path(__file__).parents[2] / "scripts" / "heuristic_tactics.py"
    found = importlib.util.spec_from_file_location("heuristic_tactics", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_heuristic_tables_are_what_the_cost_model_gives_today(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["heuristic_tactics.py", str(tmp_path)])
    script.main()
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.json")}
    kept = {path.relative_to(ROOT): path.read_text() for path in TABLES if load(path).origin["kind"] == "heuristic"}
    assert made == kept


def test_the_users_table_is_read_beside_the_shipped_one(write: Write, tactics_folder: Path) -> None:
    path = write("sm_90a", ROW)
    own, shipped = tactics.tables(kernels.family("linear"), SM_90, tactics_folder, (ROOT,))
    assert own is not None and shipped is not None
    assert (own.path, shipped.path) == (path, ROOT / "sm_90a" / "linear.json")
    assert tactics.tables(kernels.family("linear"), arch.parse("sm_86"), tactics_folder, (ROOT,)) == (None, None)


def test_tables_read_from_one_folder_do_not_stand_for_those_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(resources, "directory", (tmp_path / "elsewhere").joinpath)
        assert choose("linear", QKV, SM_90).decided_by.name == "heuristic"
    assert choose("linear", QKV, SM_90).decided_by.name == "shipped table"


def test_the_shipped_table_is_not_taken_for_the_users_where_the_users_folder_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JITMX_TACTICS", str(ROOT.parent))
    settings.reload()
    assert choose("linear", QKV, SM_90).decided_by.name == "shipped table"


def test_a_folder_that_cannot_be_looked_into_holds_no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JITMX_TACTICS", str(tmp_path / ("x" * 300)))
    settings.reload()
    assert choose("linear", QKV, SM_90).decided_by.name == "shipped table"


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({}, True),
        ({"m": 4}, True),
        ({"m": 5}, False),
        ({"m": [4, 4]}, True),
        ({"m": [1, 4]}, True),
        ({"m": [4, 8]}, True),
        ({"m": [5, 8]}, False),
        ({"m": [1, 3]}, False),
        ({"dtype": "bf16", "bias": False}, True),
        ({"dtype": "fp16"}, False),
        ({"bias": True}, False),
        ({"m": 4, "n": 5121}, False),
    ],
)
def test_a_row_fits_where_all_it_asks_for_holds_ends_of_ranges_included(wanted: dict[str, Any], fits: bool) -> None:
    assert tactics.Row(wanted, "gemv", {}, None).fits(LinearProblem(4, 5120, 2880)) is fits


def test_a_row_of_a_kernel_that_cannot_serve_the_problem_is_passed_over(write: Write, tactics_folder: Path) -> None:
    rows = [{"when": {"format": "mxfp4"}, "kernel": "dequantize", "knobs": {"pdl": False}}]
    write("sm_90a", *rows, family="quantize").rename(tactics_folder / "sm_90a" / "quantize.json")
    back, there = (choose("quantize", QuantizeProblem(way), SM_90) for way in ("dequantize", "quantize"))
    assert back.decided_by.name == "user table" and not back.variant.knobs.pdl
    assert there.decided_by.name == "heuristic" and there.variant.spec.name == "quantize"
    assert next(s.detail for s in there.sources if s.name == "user table").startswith("no row fits (measured on ")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schema_version": 2}, "schema_version 2 is not 1"),
        ({"family": "quantize"}, "is for quantize on sm_90a, not for linear on sm_90a"),
        ({"arch": "sm_121a"}, "is for linear on sm_121a, not for linear on sm_90a"),
        ({"arch": "sm_90"}, "is for linear on sm_90, not for linear on sm_90a"),
        ({"origin": {"kind": "guessed"}}, "origin kind 'guessed' is not one of measured, heuristic"),
        ({"origin": None}, "is no tuning table (its origin is no object); mend or remove it"),
        ({"origin": {}}, "is no tuning table (its origin has no kind); mend or remove it"),
        ({"rows": 3}, "is no tuning table (its rows are no list); mend or remove it"),
        ({"rows": {}}, "is no tuning table (its rows are no list); mend or remove it"),
        ({"row": []}, "has 'row', which nothing reads; its keys: schema_version, family, arch, origin, rows; mend or"),
        ({"rows": [ROW | {"knob": {}}]}, "row 0 has 'knob', which nothing reads; its keys: when, kernel, knobs, us, "),
        ({"rows": [ROW | {"when": {"m": [9, 1]}}]}, "row 0: m is [9, 1], whose low is above its high; write [1, 9]"),
        ({"rows": [3]}, "row 0 is no object with `when` and `knobs`, objects both"),
        ({"rows": [{"when": {}, "kernel": "gemv"}]}, "row 0 is no object with"),
        ({"rows": [ROW, ROW | {"when": [["m", 1]]}]}, "row 1 is no object with"),
        ({"rows": [ROW | {"when": {"rows": 1}}]}, "row 0 asks for rows; linear problems have activation, argmax, "),
        ({"rows": [ROW, ROW | {"when": {"m": [1]}}]}, "row 1: m is [1], neither a whole number nor [low, high]"),
        ({"rows": [ROW | {"when": {"m": [1, 2, 3]}}]}, "row 0: m is [1, 2, 3], neither a whole number nor [low, high]"),
        ({"rows": [ROW | {"when": {"m": ["1", 2]}}]}, "row 0: m is ['1', 2], neither a whole number nor [low, high]"),
        ({"rows": [ROW | {"when": {"m": True}}]}, "row 0: m is True, neither a whole number nor [low, high]"),
        ({"rows": [ROW | {"when": {"dtype": 16}}]}, "row 0: dtype is 16, neither text nor [low, high]"),
        ({"rows": [ROW | {"kernel": "gemm"}]}, "row 0: 'gemm' is no kernel of linear; its kernels: gemv"),
        ({"rows": [ROW | {"knobs": ["stages"]}]}, "row 0 is no object with"),
        ({"rows": [ROW | {"knobs": {"stages": [2]}}]}, "row 0: knobs must be numbers, texts, true or false"),
        ({"rows": [ROW | {"kernel": ["gemv"]}]}, "row 0: ['gemv'] is no kernel of linear"),
        ({"rows": [ROW | {"us": float("nan")}]}, "row 0: us and spread must be numbers"),
        ({"rows": [ROW | {"us": 10**400}]}, "row 0: us and spread must be numbers"),
        ({"origin": {"kind": "measured", "code": 3}}, "code of its origin is no text"),
        ({"rows": [ROW | {"us": "fast"}]}, "row 0: us and spread must be numbers"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_its_path_and_the_reason(
    fields: dict[str, Any], said: str, write: Write
) -> None:
    path = write("sm_90a", **fields)
    with pytest.raises(TacticError) as error:
        choose("linear", QKV, SM_90)
    assert str(path) in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"{}" * 2, "no JSON: Extra data: line 1 column 3 (char 2)"),
        (b"[]", "it is no object"),
        (b"null", "it is no object"),
        (b"3", "it is no object"),
        (b"\xff\xfe", "no JSON: "),
        (b'{"a": 1\xff}', "no text in UTF-8: invalid start byte at byte 7"),
        (b"{}", "it has no schema_version"),
        (b'{"schema_version": 1}', "it has no family and no arch and no origin and no rows"),
    ],
)
def test_a_file_that_is_no_table_at_all_is_refused_with_its_path_in_plain_words(
    content: bytes, said: str, write: Write
) -> None:
    path = write("sm_90a")
    path.write_bytes(content)
    with pytest.raises(TacticError) as error:
        choose("linear", QKV, SM_90)
    assert str(error.value).startswith(f"{path} is no tuning table ({said}")
    assert str(error.value).endswith("; mend or remove it") and "Error" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"when": {"encoding": "foo"}}, "never applies: encoding='foo' is not one of rotated, nibble"),
        ({"when": {"dtype": ["g", "h"]}}, "never applies: dtype=['g', 'h'] is not one of bf16, fp16"),
        ({"when": {"k": 16}}, "never applies: k=16 is beyond the limits of linear problems"),
        ({"when": {"m": [-3, 0]}}, "never applies: m=[-3, 0] is beyond the limits of linear problems"),
        ({"when": {"m": [1 << 31, 1 << 40]}}, "never applies: m=[2147483648, 1099511627776] is beyond the limits"),
        ({"kernel": "wgmma"}, "never applies: linear.wgmma does not run on sm_121a"),
        ({"knobs": {"split": 8}}, "is illegal: linear.gemv has no knob 'split'; its knobs: "),
        ({"knobs": {"stages": 99}}, "is illegal: linear.gemv.stages=99 is above its limit"),
    ],
)
def test_a_row_that_serves_no_call_is_found_out_and_passed_over(row: dict[str, Any], said: str, write: Write) -> None:
    family, target = kernels.family("linear"), arch.parse("sm_121")
    path = write("sm_121a", ROW, ROW | {"when": {"m": 2}} | row)
    (found,) = tactics.idle(tactics.load(path, family, target), family, target)
    assert found.startswith(f"{path}: row 1 {said}")
    served = choose("linear", LinearProblem.on(target), target)
    assert served.decided_by.name == "user table" and served.variant.knobs.stages == 2


@pytest.mark.parametrize("path", TABLES, ids=NAMES)
def test_every_row_of_a_shipped_table_may_serve_a_call(path: Path) -> None:
    assert tactics.idle(load(path), kernels.family(path.stem), arch.parse(path.parent.name)) == []


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"stages": 99}, "linear.gemv.stages=99 is above its limit; the nearest legal value is 16"),
        ({"stages": "2"}, "linear.gemv.stages='2' is not a whole number"),
        ({"tile": 4}, "linear.gemv has no knob 'tile'; its knobs: m, dtype"),
        ({"warps": 8, "split_k": 3}, "split_k=3 does not divide warps=8"),
        ({"chunk": 16, "stages": 16}, "B of shared memory; a block on sm_90a has at most 232448 B"),
    ],
)
def test_an_illegal_row_is_refused_with_path_row_and_rule(knobs: dict[str, Any], said: str, write: Write) -> None:
    path = write("sm_90a", ROW | {"knobs": knobs})
    with pytest.raises(TacticError) as error:
        choose("linear", QKV, SM_90)
    assert str(error.value).startswith(f"{path}: the row for {{'m': 1}} is illegal: ")
    assert said in str(error.value) and str(error.value).endswith("measure anew: jitmx tune linear")
    assert isinstance(error.value.__cause__, KnobError)


def test_a_row_that_cannot_serve_the_shape_it_claims_is_refused_with_path_and_reason(write: Write) -> None:
    path = write("sm_90a", ROW | {"knobs": {"warps": 8, "split_k": 8, "stage_x": True}})
    with pytest.raises(TacticError, match="split_k=8 is over the 2 tiles of k=96") as error:
        choose("linear", LinearProblem(1, 64, 96), SM_90)
    assert str(path) in str(error.value)


def test_a_broken_table_of_one_target_leaves_the_others_alone(write: Write) -> None:
    write("sm_90a").write_text("{")
    assert choose("linear", QKV, arch.parse("sm_121")).decided_by.name == "heuristic"


def test_the_shipped_table_may_be_taken_over_as_ones_own(write: Write) -> None:
    shipped = choose("linear", QKV, SM_90)
    write("sm_90a").write_text((ROOT / "sm_90a" / "linear.json").read_text())
    own = choose("linear", QKV, SM_90)
    assert (shipped.decided_by.name, own.decided_by.name) == ("shipped table", "user table")
    assert shipped.decided_by.detail == own.decided_by.detail and shipped.variant == own.variant


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def _deep(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def _bytes(path: Path) -> None:
    path.write_bytes(b'{"schema_version": 1\xff}')


PUT_THERE = [_fifo, _folder, _huge, _deep, _bytes]


@pytest.mark.parametrize("put", PUT_THERE)
@pytest.mark.timeout(30)
def test_what_no_table_can_be_in_the_place_of_one_is_an_error_that_names_it(put: Any, write: Write) -> None:
    path = write("sm_90a")
    path.unlink()
    put(path)
    tactics.tables.cache_clear()
    with pytest.raises(TacticError) as error:
        choose("linear", QKV, SM_90)
    assert f"{path} is no tuning table" in str(error.value)
    with pytest.raises(TacticError, match="is no tuning table"):
        tactics.merged(path, kernels.family("linear"), SM_90, {"kind": "measured"}, [])


@pytest.mark.parametrize("put", [_fifo, _folder, _huge])
@pytest.mark.timeout(30)
def test_what_no_journal_can_be_in_the_place_of_one_is_an_error_that_names_it(put: Any, tmp_path: Path) -> None:
    put(tmp_path / "journal")
    with pytest.raises(TacticError, match=f"{tmp_path}/journal: the journal of the run cannot be kept there"):
        Journal(tmp_path / "journal", {}).__enter__()


TASK, CANDIDATE = json.dumps([{"m": 1}, {"m": 4}]), json.dumps(["gemv", {}])
FINISHED = {"kernel": "gemv", "knobs": {}, "us": 4.5, "spread": 0.0, "stable": True, "tried": 1, "failed": 0}


@pytest.mark.parametrize(
    "entry",
    [
        {"us": 4.5}, {"task": TASK, "us": 4.5}, {"task": 4, "candidate": CANDIDATE, "us": 4.5},
        {"task": ["a"], "candidate": CANDIDATE, "us": 4.5}, {"task": "[", "candidate": CANDIDATE, "us": 4.5},
        {"task": TASK, "candidate": "4", "us": 4.5}, {"task": TASK, "candidate": CANDIDATE, "us": "fast"},
        {"task": TASK, "candidate": CANDIDATE, "us": 10**400}, {"task": TASK, "candidate": CANDIDATE, "us": None},
        {"task": TASK, "candidate": CANDIDATE, "round": True}, {"task": TASK, "candidate": CANDIDATE, "launching": 1},
        {"task": TASK, "candidate": CANDIDATE, "round": float("inf")}, {"task": TASK, "row": []},
        {"task": TASK, "row": FINISHED | {"knobs": 3}}, {"task": TASK, "row": {"kernel": "gemv"}},
        {"task": "[" * 5000, "candidate": CANDIDATE, "us": 4.5},
    ],
)  # fmt: skip
def test_a_line_that_is_no_outcome_is_an_error_that_names_journal_and_line(entry: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, {}) as journal:
        journal.finished(TASK, FINISHED)
        journal._append(entry)
    with pytest.raises(TacticError, match=f"{path}: line 3 is no outcome of a run"):
        Journal(path, {}).__enter__()
