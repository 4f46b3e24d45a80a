"""The levels over a stand-in for vLLM that is told how to behave; each is run as users run it once."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from jitmx import settings
from scripts.protocol import __main__ as protocol
from scripts.protocol import configurations, engines
from scripts.protocol.configurations import Configuration
from scripts.protocol.report import SCHEMA_VERSION
from scripts.protocol.sizes import PRESETS, config

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FAKE = Path(__file__).parent / "fake"
# The levels themselves ask torch for nothing but versions; test_metadata.py asks the real one.
WITHOUT_TORCH = Path(__file__).parent / "without_torch"
LAYERS = PRESETS["tiny"].layers


def told(layers: str, attention: str = "auto") -> str:
    """What the stand-in calls a configuration."""
    ours = Configuration(tuple(layers.split(",")), attention=attention)
    return f"jitmx:{layers}" + ("+attention" if ours.attends else "")


ALL, ALL_ON = told("moe,qkv,o,lm_head"), told("moe,qkv,o,lm_head", "on")
MOE = told("moe")
OURS = "jitmx-moe+qkv+o+lm_head"
# Launches a pass of kernels with names as profilers give them.
PRODUCTS = {"jitmx_moe_decode": LAYERS, "jitmx_linear_gemv": 2 * LAYERS + 1, "jitmx_routing_route": LAYERS}
TRITON = {"_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu": LAYERS, "nvjet_tst_64x24_64x16_4x1_v_bz_bias_TNT": 9}
MARLIN = {"void marlin_moe_wna16::Marlin<1125899906909960l, 128, 1, 4, 8, false, 4, 2>(int4 const*)": 4}
ATTENDING = {f"jitmx_attention_{kernel}": LAYERS for kernel in ("decode", "append", "wgmma")}
JITMX = PRODUCTS | (ATTENDING if ALL == ALL_ON else {})
KERNELS = {ALL: JITMX, "triton": TRITON, "marlin": MARLIN}


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache in which NVRTC's digest is found by all but the first who ask."""
    return str(tmp_path_factory.mktemp("toolchain"))


@pytest.fixture
def level(run: Any, model: Path, tmp_path: Path, toolchain: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a level and give back its report: in this process, or `apart` by its script, with the real torch if asked.

    Engines and servers are processes of their own either way.
    """
    out = tmp_path / "out"

    def call(
        script: str, *words: object, code: int = 0, apart: bool = False, torch: bool = False, **told: Any
    ) -> dict[str, Any]:
        given = ("--model", model, "--out", out, *words)
        fake = {"FAKE_VLLM": json.dumps(told), "JITMX_CACHE_DIR": toolchain}
        if apart:
            path = str(FAKE) if torch else f"{FAKE}{os.pathsep}{WITHOUT_TORCH}"
            run(script, *given, code=code, PYTHONPATH=path, **fake)
        else:
            path = os.pathsep.join(map(str, (FAKE, WITHOUT_TORCH, SCRIPTS.parent)))
            with monkeypatch.context() as patch:
                patch.setattr(protocol.signal, "signal", lambda *_: None)
                patch.syspath_prepend(FAKE)  # for its entry points
                for name, value in {**fake, "PYTHONPATH": path}.items():
                    patch.setenv(name, value)
                settings.reload()
                done = CliRunner().invoke(protocol.main, [verb(script), *map(str, given)])
            assert done.exit_code == code, (done.output, done.exception)
        report: dict[str, Any] = json.loads((out / "report.json").read_text())
        assert report["schema_version"] == SCHEMA_VERSION and report["passed"] == (code == 0)
        assert set(report) == {"schema_version", "level", "passed", "about", "checks", "results", "metadata"}
        for check in report["checks"]:
            assert {name: type(value) for name, value in check.items()} == {"name": str, "passed": bool, "seen": str}
        assert report["about"]["environment"]["VLLM_PLUGINS"] and report["about"]["options"]["max_num_seqs"] == 64
        assert report["metadata"]["gpus"]["value"] or report["metadata"]["gpus"]["reason"]
        return report

    yield call
    settings.reload()


def verb(script: str) -> str:
    """What a script asks of the protocol."""
    found = re.search(r'/protocol\.sh" (\S+)', (SCRIPTS / script).read_text())
    assert found is not None, script
    return found[1]


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["passed"]]


def test_a_server_that_starts_answers_and_ends_passes_the_smoke_test(level: Any) -> None:
    report = level("test_level1_smoke.sh", "--layers", "moe", apart=True)
    assert report["level"] == "1" and report["results"]["ready_s"] > 0 and len(report["checks"]) == 6
    assert level("test_level1_smoke.sh", "--layers", "none", "--backend", "triton")["passed"]
    assert failed(level("test_level1_smoke.sh", "--layers", "moe,o:mxfp8", code=1)) == ["says what serves"]


def test_a_level_that_is_told_to_end_leaves_no_server_behind(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "scripts.protocol", "level3", "--model", str(model), "--out", str(out)]
    words += ["--requests", "100000"]
    environment = os.environ | {"FAKE_VLLM": "{}", "PYTHONPATH": os.pathsep.join([str(FAKE.parents[2]), str(FAKE)])}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, cwd=tmp_path) as level:
        server = None
        for _ in range(600):
            servers = [found for found in psutil.Process(level.pid).children() if "serve" in found.cmdline()]
            if servers and (out / "jitmx-moe+qkv+o+lm_head.server.log").read_text():
                server = servers[0]
                break
            time.sleep(0.05)
        assert server is not None and level.poll() is None
        level.terminate()
        assert level.wait(30) == 128 + signal.SIGTERM
    assert not server.is_running()


def test_a_report_says_how_long_each_phase_of_a_start_took(level: Any) -> None:
    wanted = {"loading_s": 0.5, "warmup_s": 7.65, "compilation_s": 2.99, "kernels_s": 0.2, "compiled": 0}
    words = ("--layers", "moe", "--attention", "off")
    assert level("test_level1_smoke.sh", *words)["results"]["startup"] == wanted | {"attention": "vLLM"}
    said = level("test_level1.5_kernel_validation.sh", kernels=KERNELS)["results"]["startup"]
    assert said["jitmx-moe+qkv+o+lm_head"].items() > wanted.items()


def test_a_traceback_that_vllm_warns_with_is_no_failure_and_any_other_is(level: Any) -> None:
    assert level("test_level1_smoke.sh", "--layers", "moe", tracebacks=["WARNING"])["passed"]
    report = level("test_level1_smoke.sh", "--layers", "moe", code=1, tracebacks=["WARNING", "ERROR"])
    assert failed(report) == ["the log has no failure"]


def test_a_proxy_in_the_environment_is_not_asked_for_a_server_of_this_machine(
    level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert level("test_level1_smoke.sh", "--layers", "moe", "--timeout", 30)["passed"]


def test_a_server_that_does_not_start_is_an_error_with_its_log(run: Any, model: Path, tmp_path: Path) -> None:
    fake = {"FAKE_VLLM": json.dumps({"fail": [MOE]}), "PYTHONPATH": str(FAKE)}
    words = ("--model", model, "--layers", "moe", "--out", tmp_path / "out")
    said = run("test_level1_smoke.sh", *words, code=2, **fake).stderr
    assert "ended with status 1 before it answered" in said and "was told to fail" in said


def test_the_kernels_of_the_configuration_pass_level_15_and_those_of_another_do_not(level: Any) -> None:
    report = level("test_level1.5_kernel_validation.sh", kernels=KERNELS, apart=True)
    assert {p["phase"] for p in report["results"]["profiles"]["jitmx-moe+qkv+o+lm_head"]} == {
        "decode 1", "decode 16", "prefill 512",
    }  # fmt: skip
    wrong = level("test_level1.5_kernel_validation.sh", kernels={ALL: TRITON}, code=1)
    assert any("jitmx serves the experts, not vLLM" in c["seen"] for c in wrong["checks"] if not c["passed"])


def test_a_profile_without_a_kernel_is_a_failure_not_a_pass(level: Any) -> None:
    report = level("test_level1.5_kernel_validation.sh", code=1)
    launches = [check for check in report["checks"] if not check["name"].endswith("warm-up")]
    assert len(launches) == 3 and all("0 launches were profiled" in check["seen"] for check in launches)


def test_attention_has_its_kernels_at_level_15_and_no_others(level: Any) -> None:
    words = ("--attention", "on")
    assert level("test_level1.5_kernel_validation.sh", *words, kernels={ALL_ON: PRODUCTS | ATTENDING})["passed"]
    wrong = level("test_level1.5_kernel_validation.sh", *words, kernels={ALL_ON: PRODUCTS}, code=1)
    said = [check["seen"] for check in wrong["checks"] if not check["passed"]]
    assert all("jitmx attention" in seen for seen in said) and len(said) == 2 + 2 + 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("test_level1_smoke.sh", ()),
        ("test_level2_correctness.sh", ("--reference", "none", "--steps", 4, "--chains", 5)),
        ("test_level3_stress.sh", ("--requests", 10, "--context", 512)),
    ],
)
def test_attention_that_vllm_serves_although_it_is_to_be_jitmxs_fails_a_level(
    level: Any, script: str, words: tuple[Any, ...]
) -> None:
    asked = (*words, "--layers", "moe", "--attention", "on")
    said = level(script, *asked)
    assert said["about"]["configuration"]["attention_by"] == "jitmx"
    missed = level(script, *asked, code=1, deaf=True)
    assert set(failed(missed)) == {"says what serves" if "level1" in script else "attention"}


def test_a_backend_that_is_named_for_attention_is_not_told_to_an_engine_with_jitmxs(level: Any) -> None:
    words = ("--reference", "none", "--steps", 4, "--chains", 5, "--attention", "on")
    report = level("test_level2_correctness.sh", *words, "--engine", 'attention_config={"backend":"FLASH_ATTN"}')
    assert {name: start["attention"] for name, start in report["results"]["startup"].items()} == {
        f"{OURS}-attn:on": "jitmx", "stock-triton": "vLLM", "stock-marlin": "vLLM", "stock-marlin-eager": "vLLM",
    }  # fmt: skip


def test_attention_on_and_off_are_judged_beside_the_same_stock_engines(level: Any) -> None:
    words = ("--reference", "none", "--steps", 100, "--chains", 8, "--attentions", "off,on")
    report = level("test_level2_correctness.sh", *words)
    assert report["about"]["sets"] == [f"{OURS}-attn:off", f"{OURS}-attn:on"]
    bad = level("test_level2_correctness.sh", *words, code=1, noise={ALL_ON: 0.2})
    said = [check for check in bad["checks"] if not check["passed"]]
    assert {check["name"] for check in said} == {"logits", "logits of one token", "greedy tokens"}
    assert all(check["seen"].startswith(f"{OURS}-attn:on:") for check in said)


LONG = ("--reference", "none", "--steps", 4, "--chains", 5, "--attention", "on", "--long-tokens", 400)
EVERY = (ALL_ON, "triton", "marlin", "marlin-eager")


def test_long_prompts_hold_engines_that_see_all_of_them_and_fail_one_that_does_not(level: Any) -> None:
    report = level("test_level2_correctness.sh", *LONG, sees=dict.fromkeys(EVERY, 1000))
    assert report["about"]["long_tokens"] == 400
    for what in ("logits of long prompts", "logits of one token behind long prompts"):
        bound = report["results"][what][f"{OURS}-attn:on"]["bound"]
        assert min(report["results"]["needle moves"][what]) > 4 * bound > 0
    assert sum(check["name"] == "one token alone" for check in report["checks"]) == 2 * len(EVERY)
    # The first 51 tokens of 401 are out of sight, which the first needle begins with.
    bad = level("test_level2_correctness.sh", *LONG, code=1, sees=dict.fromkeys(EVERY, 1000) | {ALL_ON: 350})
    assert {"logits of long prompts", "logits of one token behind long prompts"} <= set(failed(bad))


def test_long_prompts_whose_far_tokens_do_not_count_cannot_tell_and_fail(level: Any) -> None:
    report = level("test_level2_correctness.sh", *LONG, code=1)
    assert failed(report) == ["far tokens count"] * 2
    assert all("cannot tell" in check["seen"] for check in report["checks"] if not check["passed"])


def test_long_prompts_are_looked_at_where_the_engine_takes_them(run: Any, model: Path, level: Any) -> None:
    words = ("--reference", "none", "--steps", 4, "--chains", 5)
    assert level("test_level2_correctness.sh", *words)["about"]["long_tokens"] == 0
    said = run("test_level2_correctness.sh", "--model", model, *words, "--long-tokens", 20000, code=2).stderr
    assert "max_model_len=20002" in said
    assert "hold no needle" in run("test_level2_correctness.sh", "--model", model, "--long-tokens", 100, code=2).stderr
    long = level("test_level2_correctness.sh", *words, "--engine", "max_model_len=32768", code=1)  # it sees 4 tokens
    assert long["about"]["long_tokens"] == 20000 and failed(long) == ["far tokens count"] * 2


def test_logits_and_tokens_as_close_as_stock_backends_are_pass_and_worse_ones_do_not(level: Any) -> None:
    words = ("--reference", "none", "--steps", 200, "--chains", 8)
    good = level(
        "test_level2_correctness.sh", *words, apart=True, torch=True
    )  # which would read the checkpoint, were there one
    for what in ("logits", "logits of one token"):
        assert 0 < good["results"][what][OURS]["bound"] < 0.05
    assert good["results"]["dense_on_grid"]["value"] is None and good["results"]["dense_on_grid"]["reason"]
    engines = OURS, "stock-triton", "stock-marlin", "stock-marlin-eager"
    assert set(good["results"]["greedy"]["median"]) == {f"{a} and {b}" for a, b in itertools.combinations(engines, 2)}
    bad = level("test_level2_correctness.sh", *words, code=1, noise={ALL: 0.2})
    assert {"logits", "logits of one token", "greedy tokens"} <= set(failed(bad))


def test_dense_layers_are_judged_by_stock_engines_that_differ_in_them_and_experts_by_two_compiled_ones(
    level: Any,
) -> None:
    words = ("--reference", "none", "--steps", 100, "--chains", 24, "--sets", "moe;all")
    report = level("test_level2_correctness.sh", *words)
    assert report["about"]["sets"] == ["jitmx-moe", OURS]
    judged = {name: item["stock"] for name, item in report["results"]["greedy"]["judged"].items()}
    assert judged == {"jitmx-moe": ["stock-triton", "stock-marlin-eager"], OURS: ["stock-triton", "stock-marlin-eager"]}
    beside = report["results"]["greedy"]["judged"][OURS]["chance_beside"]
    assert len(beside) == 3 and beside["stock-triton and stock-marlin-eager"] >= 0.01
    assert all(len(shared) == 24 for shared in report["results"]["greedy"]["shared"].values())
    said = {check["seen"] for check in report["checks"] if check["name"] == "one token alone"}
    assert len(said) == 5 and any("jitmx-moe: [32, 64, 96" in seen for seen in said)
    bad = level("test_level2_correctness.sh", *words, code=1, noise={MOE: 0.2})
    assert all(check["seen"].startswith("jitmx-moe:") for check in bad["checks"] if not check["passed"])
    # Without prefix caching no prompt is known when it is asked for again.
    cold = level("test_level2_correctness.sh", *words, "--engine", "enable_prefix_caching=false", code=1)
    assert failed(cold) == ["one token alone"] * 5


def test_engines_of_level_2_start_together_where_that_is_asked_for(level: Any, tmp_path: Path) -> None:
    (tmp_path / "met").mkdir()
    words = ("--reference", "none", "--steps", 4, "--chains", 5, "--together")
    assert level("test_level2_correctness.sh", *words, meet=[str(tmp_path / "met"), 4])["passed"]
    assert len(list((tmp_path / "met").iterdir())) == 4


def test_a_logit_that_is_no_number_fails_level_2(level: Any) -> None:
    words = ("--reference", "none", "--steps", 4, "--chains", 5)
    report = level("test_level2_correctness.sh", *words, code=1, noise={ALL: float("nan")})
    assert "logits are finite" in failed(report)


def test_level_2_wants_two_different_stock_backends(run: Any, model: Path) -> None:
    said = run("test_level2_correctness.sh", "--model", model, "--stock", "triton", code=2).stderr
    assert "two different backends" in said


def test_stress_passes_a_steady_server(level: Any) -> None:
    report = level("test_level3_stress.sh", "--requests", 20, "--context", 512, apart=True)
    phases = ("in sequence", "4 at a time", "512 tokens of context")
    assert [report["results"][name]["requests"] for name in phases] == [20, 20, 1]


def test_a_compile_while_serving_fails_stress_and_is_named(level: Any) -> None:
    report = level("test_level3_stress.sh", "--requests", 20, "--context", 512, code=1, late=True)
    assert failed(report) == ["no compile while serving"]
    assert report["results"]["compiled_while_serving"] == ["moe.decode.m8"]


def test_answers_that_change_fail_stress(level: Any) -> None:
    report = level("test_level3_stress.sh", "--requests", 20, "--context", 512, code=1, flaky=True)
    assert "the same prompt, the same tokens" in failed(report)


def test_a_request_that_is_refused_fails_stress_and_the_rest_is_still_checked(level: Any) -> None:
    words = ("--requests", 10, "--context", 4096, "--engine", "max_model_len=1024")
    report = level("test_level3_stress.sh", *words, code=1)
    assert failed(report) == ["4096 tokens of context"]
    looked_at = {check["name"] for check in report["checks"]}
    assert {"still answers", "no compile while serving", "the log has no failure"} <= looked_at


def test_a_benchmark_measures_each_configuration_in_turn_and_gives_the_speed_up(level: Any) -> None:
    slow = {ALL: 0.001, "triton": 0.002, "marlin": 0.003}
    words = ("--batches", "1,4", "--prefill", "64", "--drift", 10)
    report = level("test_level4_benchmark.sh", *words, kernels=KERNELS, slow=slow, apart=True)
    results = report["results"]
    assert set(results["metrics"]) == {"jitmx-moe+qkv+o+lm_head", "stock-triton", "stock-marlin"}
    assert all(len(runs) == 2 for runs in results["runs"].values())
    assert all(ms > 0 for runs in results["host_loop_ms"].values() for pair in runs for ms in pair)
    # 1 ms a step beside 2 ms of the faster stock backend, and what the stand-in's arithmetic takes.
    assert 1.05 < results["speed_up"]["decode_1_tokens_s"] < 2.1
    assert {"ttft_p50_ms", "tpot_p99_ms", "itl_p99_ms", "e2e_p50_ms"} <= set(results["metrics"]["stock-triton"])
    lax = failed(level("test_level4_benchmark.sh", *words[:-1], 0, code=1, kernels=KERNELS, slow=slow))
    assert set(lax) == {"the card is steady"}
    assert "jitmx moe" in results["time_by_family"]["jitmx-moe+qkv+o+lm_head"]["decode 1"]


SECOND = ("--batches", "1", "--prefill", "64", "--drift", 10)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, toolchain: str) -> dict[str, str]:
    """What the engines of a benchmark of two rounds answered, by their names."""
    place = tmp_path_factory.mktemp("answers")
    (place / "config.json").write_text(json.dumps(config(PRESETS["tiny"])))
    slow = dict.fromkeys((ALL, "triton", "marlin"), 0.0005)
    words = ["bash", str(SCRIPTS / "test_level4_benchmark.sh"), "--model", str(place), "--out", str(place / "out")]
    environment = os.environ | {
        "PYTHON": sys.executable, "FAKE_VLLM": json.dumps({"kernels": KERNELS, "slow": slow}),
        "PYTHONPATH": f"{FAKE}{os.pathsep}{WITHOUT_TORCH}", "JITMX_CACHE_DIR": toolchain,
    }  # fmt: skip
    subprocess.run([*words, *map(str, SECOND)], env=environment, check=True, capture_output=True, timeout=240)
    found = {path.name.partition(".answer")[0]: path.read_text() for path in (place / "out").glob("*.answer.json")}
    assert len(found) == 6
    return found


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({}, []),
        ({"loading": {ALL: 1.4, "triton": 0.5, "marlin": 9.0}}, []),
        ({"loading": {ALL: 1.6, "triton": 0.5, "marlin": 9.0}}, ["start-up"]),
        ({"loading": {ALL: 2.0}, "warmup": {ALL: 3.4, "triton": 25.6, "marlin": 5.0}}, []),
        ({"loading": {ALL: 2.0}, "warmup": {ALL: 5.0, "triton": 25.6, "marlin": 5.4}}, ["start-up"]),
        ({"loading": {"marlin": None}}, ["start-up"]),
        ({"warm": False}, ["a warm start compiles nothing"]),
    ],
)
def test_a_second_start_with_jitmx_compiles_nothing_and_adds_a_second_at_most(
    call: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str],
    told: dict[str, Any], wanted: list[str],
) -> None:  # fmt: skip
    """In this process: engines answer what they did, and log what the stand-in is told of their starts."""
    spec = importlib.util.spec_from_file_location("stand_in", FAKE / "vllm" / "__init__.py")
    assert spec is not None and spec.loader is not None
    stand_in = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:  # it takes torch's place as well
        for name in ("torch", "torch.profiler"):
            patch.setitem(sys.modules, name, sys.modules.get(name))
        patch.setitem(sys.modules, "stand_in", stand_in)
        spec.loader.exec_module(stand_in)
    stand_in.TOLD = told

    @contextlib.contextmanager
    def working(place: Any, name: str, asked: dict[str, Any], environment: dict[str, str]) -> Iterator[Any]:
        ours = "jitmx" in asked["options"].get("additional_config", {})
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            stand_in.say_start(ALL if ours else asked["options"]["kernel_config"]["moe_backend"])
        place.out.mkdir(exist_ok=True)
        (place.out / f"{name}.log").write_text(said.getvalue())
        yield lambda: json.loads(answers[name])

    monkeypatch.setattr(engines, "_working", working)
    monkeypatch.setattr(configurations, "plugins", lambda *, with_jitmx: ["jitmx"] if with_jitmx else [])
    words = ("level4", "--model", model, "--out", tmp_path / "out", *SECOND)
    call(protocol.main, *words, code=bool(wanted))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert failed(report) == wanted
    assert {name: len(starts) for name, starts in report["results"]["startup"].items()} == {
        "jitmx-moe+qkv+o+lm_head": 2, "stock-triton": 2, "stock-marlin": 2,
    }  # fmt: skip


def test_the_first_starts_are_judged_where_caches_are_said_to_be_warm(level: Any) -> None:
    words = ("--batches", "1", "--prefill", "64", "--rounds", 1, "--requests", 2, "--stock", "triton")
    told = {"kernels": KERNELS, "warm": False, "slow": dict.fromkeys((ALL, "triton"), 0.0005)}
    assert level("test_level4_benchmark.sh", *words, **told)["about"]["workload"]["requests"] == 2
    assert failed(level("test_level4_benchmark.sh", *words, "--warm", code=1, **told)) == [
        "a warm start compiles nothing"
    ]


def test_a_benchmark_of_the_wrong_kernels_does_not_pass(level: Any) -> None:
    words = ("--batches", "1", "--prefill", "64", "--rounds", 1, "--stock", "triton")
    slow = dict.fromkeys((ALL, "triton"), 0.001)
    report = level("test_level4_benchmark.sh", *words, code=1, kernels={ALL: TRITON, "triton": TRITON}, slow=slow)
    assert report["results"]["metrics"] and not report["passed"]


def test_one_combination_that_does_not_start_leaves_the_matrix_its_other_rows(level: Any) -> None:
    slow = dict.fromkeys((MOE, ALL, "triton"), 0.001)
    kernels = KERNELS | {MOE: {"jitmx_moe_decode": LAYERS, "nvjet_tst_64x24_64x16_4x1_v_bz_bias_TNT": 5}}
    words = ("--sets", "moe;all", "--stock", "triton", "--batches", "1", "--prefill", "64")
    report = level("test_level6_matrix.sh", *words, code=1, kernels=kernels, slow=slow, fail=[MOE])
    rows = {row["configuration"]["name"]: row for row in report["results"]["rows"]}
    assert set(rows) == {"stock-triton", "jitmx-moe", "jitmx-moe+qkv+o+lm_head"}
    assert "was told to fail" in rows["jitmx-moe"]["error"] and rows["jitmx-moe"]["metrics"] is None
    assert rows["stock-triton"]["metrics"]["decode_1_tokens_s"] > 0
    assert failed(report) == ["jitmx-moe"]


def test_attention_is_an_axis_of_the_matrix(level: Any) -> None:
    slow = dict.fromkeys((told("moe", "off"), told("moe", "on"), "triton"), 0.001)
    experts = {"jitmx_moe_decode": LAYERS}
    kernels = {told("moe", "off"): experts, told("moe", "on"): experts | ATTENDING, "triton": TRITON}
    words = ("--sets", "moe", "--attentions", "off,on", "--stock", "triton", "--batches", "1", "--prefill", "64")
    rows = level("test_level6_matrix.sh", *words, kernels=kernels, slow=slow, apart=True)["results"]["rows"]
    assert [(row["configuration"]["name"], row["configuration"]["attention_by"]) for row in rows] == [
        ("stock-triton", "vLLM"), ("jitmx-moe-attn:off", "vLLM"), ("jitmx-moe-attn:on", "jitmx"),
    ]  # fmt: skip


def test_without_the_plugin_installed_a_level_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.protocol import configurations
    from scripts.protocol.report import ProtocolError

    monkeypatch.setattr(configurations, "entry_points", lambda group: ())
    with pytest.raises(ProtocolError, match=r"pip install -e '\.\[vllm\]'"):
        configurations.plugins(with_jitmx=True)
    assert configurations.plugins(with_jitmx=False) == []


def test_a_level_wants_a_model_or_a_synthetic_one(run: Any) -> None:
    assert "one of them" in run("test_level1_smoke.sh", code=2).stderr
