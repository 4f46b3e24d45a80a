"""The command line as a whole: help, errors, exit codes and what it costs to start."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest

from clock import AGAIN, assert_costs
from jitmx import errors, models, workers
from jitmx.cli import main
from jitmx.cli.group import LazyGroup, exit_code
from jitmx.registry.spec import MAX_SIZE
from jitmx.sim import verify

pytestmark = AGAIN

VERBS = ("warmup", "variants", "explain", "verify", "bench", "tune", "report", "env", "doctor", "cache", "bundle")
GROUPS = {
    "cache": ("ls", "show", "why", "verify", "prune", "stats", "path"),
    "bundle": ("create", "inspect", "verify", "sign", "import", "list", "keygen"),
}
HEAVY = ("torch", "cupy", "cupy_backends", "numpy", "jinja2", "rich", "ml_dtypes", "fsspec", "cryptography")


def leaves(group: LazyGroup, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    found: dict[tuple[str, ...], click.Command] = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        assert verb is not None
        if isinstance(verb, LazyGroup):
            found |= leaves(verb, (*path, name))
        else:
            found[*path, name] = verb
    return found


def test_help_lists_every_verb_and_each_has_examples_and_json(run) -> None:
    said = run("--help").stdout
    assert all(verb in said for verb in VERBS)
    found = leaves(main)
    inner = {(group, verb) for group, verbs in GROUPS.items() for verb in verbs}
    assert set(found) == {(verb,) for verb in VERBS if verb not in GROUPS} | inner
    for path in found:
        text = run(*path, "--help").stdout
        assert "Examples:" in text and f"jitmx {' '.join(path)}" in text, path
        assert "--json" in text, path


def test_the_version_is_that_of_the_package(run) -> None:
    from importlib.metadata import version

    assert run("--version").stdout == f"jitmx {version('jitmx')}\n"


@pytest.mark.parametrize("group", [(), *((name,) for name in GROUPS)])
def test_a_group_without_a_verb_prints_its_help_and_nothing_else(run, group: tuple[str, ...]) -> None:
    assert run(*group, code=2).stderr == run(*group, "--help").stdout


def test_a_misspelt_verb_is_a_usage_error_that_names_the_nearest(run) -> None:
    assert "did you mean 'warmup'?" in run("warmpu", code=2).stderr
    assert "did you mean 'prune'?" in run("cache", "prnue", code=2).stderr


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.SettingError, 2),
        (errors.ArchError, 2),
        (errors.KnobError, 2),
        (errors.InputError, 2),
        (errors.RenderError, 3),
        (errors.ToolchainError, 3),
        (errors.CompileError, 3),
        (errors.ContractError, 1),
        (errors.CacheError, 1),
        (errors.BundleError, 1),
        (errors.SignatureError, 1),
        (errors.TacticError, 1),
        (errors.NotWarmedError, 1),
        (errors.CaptureError, 1),
        (errors.DriverError, 1),
    ],
)
def test_every_error_ends_in_its_message_and_exit_code_without_a_traceback(run, monkeypatch, kind, code) -> None:
    def fail(_self: click.Command, _context: click.Context) -> None:
        raise kind("the value, the rule, the remedy")

    monkeypatch.setattr(click.Command, "invoke", fail)
    assert exit_code(kind("")) == code
    for arguments in (("env",), ("cache", "ls")):
        result = run(*arguments, code=code)
        assert result.stdout == ""
        assert result.stderr == "Error: the value, the rule, the remedy\n"


def test_every_error_class_has_an_exit_code_of_its_kind() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.JitmxError)]
    assert len(kinds) >= 13
    assert {exit_code(kind("")) for kind in kinds} == {1, 2, 3}


def test_an_unknown_setting_stops_every_verb_but_help(run, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_CACHE_DIRR", "x")
    for arguments in (("env",), ("cache", "ls"), ("warmup", "--arch", "sm_121")):
        assert "did you mean JITMX_CACHE_DIR?" in run(*arguments, code=2).stderr
    run("--help")


@pytest.mark.parametrize(
    "arguments",
    [("cache", "ls"), ("cache", "stats"), ("cache", "path"), ("cache", "verify"), ("env",), ("bundle", "list")],
)
def test_verbs_of_the_cache_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    script = (
        "import sys\nfrom jitmx.cli import main\n"
        f"try:\n main({list(arguments)!r})\nexcept SystemExit as end:\n assert not end.code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def cache_of_forty(tmp_path: Path, record) -> Path:
    """A cache with forty entries, as many as a warm-up of one target leaves."""
    from jitmx.cache.store import Store

    store = Store(tmp_path / "forty")
    for number in range(40):
        store.publish(*record(f"linear.gemv.m{number}"))
    return tmp_path / "forty"


def test_cache_ls_takes_less_than_twice_what_click_alone_does(cache_of_forty: Path, read, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_CACHE_DIR", str(cache_of_forty))
    assert len(read("cache", "ls")["entries"]) == 40
    assert_costs("from jitmx.cli import main; main()", 2.0, "cache", "ls", "--json")


DIGITS = {"400": "9" * 400, "4301": "9" * 4301, "minus": "-" + "9" * 5000, "fraction": "0." + "9" * 5000 + "e"}
NUMBERS = [
    ("explain", "linear", "-m"), ("explain", "linear", "-n"), ("explain", "linear", "-k"),
    ("explain", "linear", "--sms"), ("warmup", "linear", "-m"), ("warmup", "linear", "-n"), ("warmup", "-j"),
    ("warmup", "--model", "gpt-oss-20b", "--ranks"), ("warmup", "--model", "gpt-oss-20b", "--tokens"),
    ("bench", "-m"), ("bench", "-n"), ("bench", "-k"), ("bench", "--seed"),
    ("tune", "linear", "-m"), ("tune", "linear", "-n"), ("tune", "linear", "--model", "gpt-oss-20b", "--seconds"),
    ("verify", "--jobs"), ("cache", "prune", "--size"), ("cache", "prune", "--age"), ("cache", "ls", "--arch"),
]  # fmt: skip


@pytest.mark.parametrize("digits", DIGITS.values(), ids=DIGITS)
@pytest.mark.parametrize("arguments", NUMBERS, ids=" ".join)
def test_a_number_of_any_length_is_a_usage_error_that_abbreviates_it(run, arguments, digits) -> None:
    unit = "d" if arguments[-1] == "--age" else ""
    assert len(run(*arguments, digits + unit, code=2).stderr) < 600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "linear", "--arch", "sm_90", "m=" + "9" * 5000), "m is a whole number from 1 to 2147483616"),
        (("explain", "linear", "--arch", "sm_90", "-m", "2147483648"), "m is a whole number from 1 to 2147483616"),
        (("explain", "moe", "--arch", "sm_90", "-m", "134217729"), "moe.m=134217729 is above its limit"),
        (("explain", "moe", "--arch", "sm_90", "intermediate=2147483616"), "is above its limit"),
        (("explain", "routing", "--arch", "sm_90", "-m", "134217729"), "routing.m=134217729 is above its limit"),
        (("warmup", "--arch", "sm_90", "--variant", "linear.gemv", "split_k=" + "9" * 5000), f"is over {MAX_SIZE}"),
        (("tune", "linear", "--model", "gpt-oss-20b", "--seconds", "nan"), "'nan' is no number of seconds above 0"),
    ],
)
def test_a_size_beyond_what_kernels_take_is_refused(run, arguments, said: str) -> None:
    message = run(*arguments, code=2).stderr
    assert said in message and len(message) < 1000


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": "64"}, {"num_attention_heads": True}, {"vocab_size": 10**400}, {"head_dim": 0}],
)
def test_a_checkpoint_with_sizes_that_are_none_is_refused_by_their_name(run, tmp_path: Path, changes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models.GPT_OSS_120B.config() | changes))
    said = run("warmup", "--arch", "sm_90", "--model", str(tmp_path), code=2).stderr
    assert f"{next(iter(changes))} is " in said and len(said) < 1000


def test_a_bad_ledger_that_is_named_is_refused_before_anything_is_simulated(run, tmp_path: Path, monkeypatch) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    monkeypatch.setattr(workers, "pool", lambda _count: pytest.fail("it simulates"))
    about = ("--arch", "sm_90", "--family", "bandwidth", "-q")
    said = run("verify", *about, "--ledger", str(bad), code=2).stderr
    assert f"Error: {bad} is not a ledger: " in said and "remove it, or name another file by --ledger" in said


def test_a_bad_ledger_of_the_machine_costs_a_warning_and_what_it_holds(
    run, read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "cache" / "ledger.json"
    bad.parent.mkdir()
    bad.write_text("{")
    monkeypatch.setattr(workers, "pool", lambda _count: ThreadPoolExecutor(1))
    monkeypatch.setattr(verify, "verify", lambda _variant: verify.Verdict(None, 0.0, 1, 1.0))
    about = ("--arch", "sm_90", "--family", "bandwidth")
    for verb in (("variants", *about), ("report", *about, "-o", str(tmp_path / "page")), ("verify", *about, "-q")):
        said = run(*verb).stderr
        assert said.count(f"{bad} is not a ledger") == 1 and "cache verify --repair` takes it out" in said
    assert bad.read_text() == "{" and "corrupt-ledger" in (tmp_path / "page").read_text()
    named = {check["name"]: check for check in read("doctor", code=1)["checks"]}
    assert named["ledger"]["status"] == "problem" and str(bad) in named["ledger"]["found"]
    assert "corrupt-ledger: the ledger cannot be used: it is no JSON" in run("cache", "verify", code=1).stdout
    assert "0 findings, 1 mended" in run("cache", "verify", "--repair").stdout
    assert not bad.exists() and "Warning" not in run("verify", *about, "-q").stderr and bad.exists()


def test_a_ledger_that_breaks_during_a_run_costs_a_warning_and_no_verdict(
    read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "ledger.json"

    def verified(_variant: object) -> verify.Verdict:
        ledger.write_text("{")
        return verify.Verdict("wrong", 0.0, 0, 0.0)

    monkeypatch.setattr(workers, "pool", lambda _count: ThreadPoolExecutor(1))
    monkeypatch.setattr(verify, "verify", verified)
    said = read("verify", "--arch", "sm_90", "--family", "bandwidth", "-q", "--ledger", str(ledger), code=1)
    assert {row["status"] for row in said["kernels"]} == {"fail"}
