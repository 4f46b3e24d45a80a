"""A family in a folder of its own: one module, one template, one operator, one table; every verb knows it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jitmx
from jitmx import kernels, settings
from jitmx.errors import SettingError
from known_nvrtc import remember

TOY = Path(__file__).parent / "toy"
ROOT = Path(jitmx.__file__).parent

# `jitmx tune` on a card that there is not: what times is the family's own, in a process of its own as always.
TUNE = """
import sys
from jitmx import arch
from jitmx.bench import tuning
from jitmx.cli import main, targets
from jitmx.runtime import card

if __name__ == "__main__":
    targets.require_gpu = lambda verb: None
    card.arch = lambda device: arch.parse("sm_90")
    card.multiprocessors = lambda device: 132
    tuning.origin = lambda: {"kind": "measured", "card": "a card", "driver": "1.2"}
    sys.argv = ["jitmx", *sys.argv[1:]]
    main()
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The family, somewhere else than in this repository."""
    return shutil.copytree(TOY, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture
def run(folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a Python program in a process that knows the folder, by default the command line."""
    remember(tmp_path_factory, tmp_path / "cache")
    known = {name for setting in settings.TABLE for name in (setting.name, *setting.aliases)}
    environment = {name: value for name, value in os.environ.items() if name not in known} | {
        "JITMX_FAMILIES": str(folder), "JITMX_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": "",
        "JITMX_TACTICS": str(tmp_path / "tactics"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT.parent),
    }  # fmt: skip

    def run(*words: str, program: tuple[str, ...] = ("-m", "jitmx.cli"), code: int = 0, **more: str) -> Any:
        done = subprocess.run(
            [sys.executable, *program, *words], cwd=tmp_path, env=environment | more, capture_output=True, text=True,
            check=False, timeout=300, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done

    return run


def read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_warm_up_variants_verify_and_the_cache_know_it(run: Run, folder: Path) -> None:
    names = ["toy.scale.block64", "toy.scale"]  # of its table, and of its heuristic
    warmed = read(run("warmup", "--arch", "sm_90", "--family", "toy", "-q", "--json"))
    assert [(row["name"], row["status"]) for row in warmed["kernels"]] == [(name, "compiled") for name in names]
    rows = read(run("variants", "--arch", "sm_90", "--family", "toy", "--json"))["variants"]
    assert [(row["name"], row["evidence"]["kind"]) for row in rows] == [(name, "compiled") for name in names]
    assert "toy.scale" in run("warmup", "--arch", "sm_90", "-q", "--variant", "toy.scale", "factor=3", "--json").stdout

    verified = read(run("verify", "--arch", "sm_90", "--family", "toy", "-q", "--json"))
    assert [(row["name"], row["status"]) for row in verified["kernels"]] == [(name, "pass") for name in names]
    rows = read(run("variants", "--arch", "sm_90", "--family", "toy", "--json"))["variants"]
    assert {row["evidence"]["kind"] for row in rows} == {"simulated"}

    listed = read(run("cache", "ls", "--json"))["entries"]
    assert {entry["family"] for entry in listed} == {"toy"} and len(listed) == 3
    key = rows[0]["key"]
    shown = read(run("cache", "show", key, "--json"))
    assert shown["record"]["family"] == "toy" and "toy_scale" in Path(shown["source_path"]).read_text()
    assert run("cache", "verify").returncode == 0

    template = folder / "templates" / "toy" / "scale.cu.j2"
    template.write_text(template.read_text().replace("a thread a value", "one thread a value"))
    assert "stale, and its next use compiles it again: template source changed" in run("cache", "why", key).stdout


def test_explain_names_its_table_its_variable_and_its_heuristic(run: Run) -> None:
    told = read(run("explain", "toy", "--arch", "sm_90", "rows=5", "--json"))
    assert (told["decided_by"]["source"], told["knobs"]["block"]) == ("shipped table", 64)
    told = read(run("explain", "toy", "--arch", "sm_90", "rows=8", "--json"))
    assert (told["decided_by"]["source"], told["knobs"]["block"]) == ("heuristic", 256)  # that of the bucket
    told = read(run("explain", "toy", "--arch", "sm_90", "rows=5", "--json", JITMX_TOY_KNOBS="block=256"))
    assert told["decided_by"]["detail"] == "JITMX_TOY_KNOBS=block=256" and told["knobs"]["block"] == 256
    assert "JITMX_TOY_KNOBS" in run("env").stdout
    assert "JITMX_TOY_KNOB is not a setting of jitmx" in run("env", code=2, JITMX_TOY_KNOB="block=256").stderr


def test_a_run_of_tune_times_its_candidates_and_the_table_decides(run: Run, tmp_path: Path) -> None:
    compiled = read(run("tune", "toy", "columns=64", "--compile-only", "--arch", "sm_90", "-q", "--json"))
    assert (compiled["rows"], compiled["fit"], compiled["failed"]) == (2, 3, 0)
    program = tmp_path / "on_a_card.py"
    program.write_text(TUNE)
    said = run("tune", "toy", "columns=64", "rows=2,300", program=(str(program),))
    assert "[1/2] x2 rows=2: 2.00 us, scale" in said.stderr
    table = json.loads((tmp_path / "tactics" / "sm_90a" / "toy.json").read_text())
    assert [(row["when"], row["knobs"]) for row in table["rows"]] == [
        ({"rows": [1, 2], "columns": 64, "factor": 2}, {"block": 128}),
        ({"rows": [3, 300], "columns": 64, "factor": 2}, {"block": 128}),
    ]
    told = read(run("explain", "toy", "--arch", "sm_90", "rows=200", "columns=64", "--json"))
    assert (told["decided_by"]["source"], told["knobs"]["block"]) == ("user table", 128)
    assert "give columns=" in run("tune", "toy", "rows=1", code=2).stderr


def test_its_benchmark_runs_and_is_in_the_help(run: Run) -> None:
    found = read(run("bench", "toy", "rows=1,4", "columns=256", "--json"))
    assert found["toy"] == [{"rows": 1, "bytes": 2048}, {"rows": 4, "bytes": 8192}] and "ceilings" not in found
    assert run("bench", "toy").stdout.split()[:4] == ["ROWS", "BYTES", "1", "8192"]
    assert "bytes that a call moves. Fields: rows, columns." in " ".join(run("bench", "--help").stdout.split())


def test_what_it_declares_of_its_cost_is_what_explain_and_report_say(run: Run, tmp_path: Path) -> None:
    found = read(run("explain", "toy", "rows=1024", "columns=1024", "--arch", "sm_90", "--cost", "--json"))
    assert [one["bytes"] for one in found["cost"]] == [8 << 20]
    assert found["cost"][0]["instructions"] > (1 << 20) / 32 and found["us"] > (8 << 20) / 4.15e6
    run("report", "--arch", "sm_90", "--family", "toy", "-o", str(tmp_path / "toy.html"))
    assert "toy.scale" in (tmp_path / "toy.html").read_text()


def test_its_operator_is_a_module_of_jitmx(run: Run) -> None:
    call = "import torch; from jitmx.ops.toy import scale; scale(torch.ones(2, 3), 2)"
    assert "x is float32 [2, 3] on cpu; jitmx runs on CUDA tensors" in run(program=("-c", call), code=1).stderr


def test_a_folder_without_a_family_or_with_one_that_is_there_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(SettingError, match=rf"JITMX_FAMILIES='?{tmp_path}.*has no family: no module in kernels/"):
        settings.read({"JITMX_FAMILIES": str(tmp_path)})
    with pytest.raises(SettingError, match="has a family toy, and there is one already; rename it"):
        settings.read({"JITMX_FAMILIES": f"{folder}:{TOY}"})
    for name in ("kernels/linear.py", "ops/linear.py"):
        (folder / name).write_text("")
        with pytest.raises(SettingError, match=f"{name} has the name of a module of jitmx; rename it"):
            settings.read({"JITMX_FAMILIES": str(folder)})
        (folder / name).unlink()


def test_what_an_author_forgets_is_said_in_a_line(run: Run, folder: Path) -> None:
    module = folder / "kernels" / "toy.py"
    text = module.read_text()
    (folder / "bench" / "toy.py").unlink()
    said = run("bench", "toy", code=2).stderr
    assert said == "Error: toy is to be measured by jitmx.bench.toy, and there is no such module\n"
    module.write_text(text.replace("FAMILY = ", "MINE = "))
    said = run("variants", "toy", "--arch", "sm_121", code=2).stderr
    assert said == "Error: the module jitmx.kernels.toy declares no FAMILY; assign a Family to that name there\n"
    module.write_text(text.replace('FAMILY = Family(\n    name="toy"', 'FAMILY = Family(\n    name="linear"'))
    said = run("variants", "linear", "--arch", "sm_121", code=2).stderr
    assert "the module jitmx.kernels.toy declares a family 'linear'; give the family, its module" in said


def test_nothing_is_loaded_from_a_folder_that_no_setting_names() -> None:
    assert "toy" not in kernels.families() and "jitmx.kernels.toy" not in sys.modules


@pytest.mark.parametrize("room", ["dispatch", "cli"])
def test_dispatch_and_the_command_line_name_no_family_and_none_of_their_fields(room: str) -> None:
    names = set(kernels.families())
    said = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)) if text in {*names, "m"} or text.partition(".")[0] in names:
                    said.append((path.name, node.lineno, text))
                case ast.Attribute(attr="m"):
                    said.append((path.name, node.lineno, ".m"))
                case ast.ImportFrom(module=str(module)) if module.startswith("jitmx.kernels."):
                    found = module.split(".")[2] in names
                    said += [(path.name, node.lineno, module)] * found
                case ast.ImportFrom(module="jitmx.kernels", names=imported):
                    said += [(path.name, node.lineno, one.name) for one in imported if one.name in names]
    assert [item for item in said if item[::2] != ("options.py", "m")] == []  # minutes of an age


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('not today')", "line 3: the family toy cannot be loaded (RuntimeError: not today)"),
        ("def", "line 3: the family toy cannot be loaded (SyntaxError: "),
        ("import absent_module", "line 3: the family toy cannot be loaded (ModuleNotFoundError: No module named "),
        ("raise SystemExit(7)", "line 3: the family toy cannot be loaded (SystemExit: 7)"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_an_error_with_its_line_and_doctor_names_it(
    code: str, said: str, run: Run, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tactics" / "sm_90a").mkdir(parents=True)
    (tmp_path / "tactics" / "sm_90a" / "linear.json").write_text("{")
    module = folder / "kernels" / "toy.py"
    assert "toy of your own, beside" in run("doctor", code=1).stdout
    module.write_text(f'"""A family."""\n\n{code}\n')
    remedy = "correct it, or take its folder out of JITMX_FAMILIES"
    for words in (("explain", "linear", "--arch", "sm_90"), ("variants", "--arch", "sm_90")):
        told = run(*words, code=2).stderr
        assert f"Error: {module}, {said}" in told and told.endswith(f"; {remedy}\n") and "Traceback" not in told
    checks = read(run("doctor", "--json", code=1))["checks"]
    (found,) = (check for check in checks if check["name"] == "families")
    assert found["status"] == "problem" and said in found["found"] and found["remedy"] == remedy


def test_a_module_that_declares_no_family_is_a_problem_of_doctor(run: Run, folder: Path) -> None:
    (folder / "kernels" / "toy.py").write_text('"""Nothing."""\n')
    checks = read(run("doctor", "--json", code=1))["checks"]
    (found,) = (check for check in checks if check["name"] == "families")
    assert "declares no FAMILY" in found["found"] and "assign a Family" in found["remedy"]
