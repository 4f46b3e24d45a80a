"""`jitmx warmup`, `variants` and the cache verbs over kernels that are really compiled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jitmx import arch as arches
from jitmx import batch, build, errors, kernels, ledger, resources, settings
from jitmx.cache import manifest
from jitmx.cache import store as stores
from jitmx.cli import main
from jitmx.cli.served import ServedModel
from jitmx.dispatch import choose
from jitmx.errors import KnobError
from jitmx.kernels import Family, Problem
from jitmx.kernels.kernel import Kernel
from jitmx.registry.arguments import Arguments, number, writes
from jitmx.registry.contract import Contract
from jitmx.registry.render import render
from jitmx.registry.spec import KernelSpec, Knobs, Variant, knob
from jitmx.runtime import driver
from jitmx.toolchain import headers

HEADER = "#pragma once\n__device__ inline float twice(float x) { return x + x; }\n"
ADD = """#include "jitmx/toy.cuh"
extern "C" __global__ void toy_add(float* x) {
{% for step in range(steps) %}
  x[threadIdx.x + {{ step }}] = twice(x[threadIdx.x + {{ step }}]);
{% endfor %}
}
"""
BROKEN = 'extern "C" __global__ void toy_broken(float* x) {\n  *x = no_such_name;\n}\n'


@dataclass(frozen=True)
class ToyKnobs(Knobs):
    """Knobs of the kernels below."""

    steps: int = knob(1, choices=(1, 2, 4), doc="elements a thread")
    wide: bool = knob(False, doc="no difference to the code but a comment")


ARGUMENTS = Arguments("ToyArguments", writes("x", "[n]", "float"), number("n", "int"))


def spec(name: str, **contract: tuple[str, ...]) -> KernelSpec:
    return KernelSpec(
        family="toy", name=name, knobs=ToyKnobs, contract=lambda _knobs, _arch: Contract(**contract),
        check=lambda _knobs, _arch: None, shared_bytes=lambda knobs: 1024 * knobs.steps, threads=lambda _knobs: 32,
        entry=f"toy_{name}", arguments=lambda _knobs: ARGUMENTS,
    )  # fmt: skip


@dataclass(frozen=True)
class ToyProblem(Problem):
    """What a call of the kernels below asks for."""

    name: str = "add"
    steps: int = 1


def kernel(item: KernelSpec) -> Kernel:
    """A kernel that serves the problems of its name."""

    def fixed(problem: ToyProblem) -> dict[str, Any]:
        if problem.name != item.name:
            raise KnobError(f"it is not {problem.name}")
        return {"steps": problem.steps}

    return Kernel(item, lambda _variant: (), fixed=fixed, heuristic=tuned)


def tuned(_problem: ToyProblem, _arch: arches.Arch, multiprocessors: int) -> dict[str, Any]:
    """Wide on large chips."""
    return {"wide": multiprocessors > 150}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A family `toy` with `add` in two variants; `toy(spec, ...)` puts other kernels in its place."""
    templates, tactics = tmp_path / "templates", tmp_path / "tactics"
    (templates / "toy").mkdir(parents=True)
    (templates / "include" / "jitmx").mkdir(parents=True)
    tactics.mkdir()
    (templates / "toy" / "add.cu.j2").write_text(ADD)
    (templates / "toy" / "strict.cu.j2").write_text(ADD.replace("toy_add", "toy_strict"))
    (templates / "toy" / "broken.cu.j2").write_text(BROKEN)
    (templates / "include" / "jitmx" / "toy.cuh").write_text(HEADER)

    def use(*specs: KernelSpec) -> None:
        problems = tuple(ToyProblem(item.name, steps) for item in specs for steps in (1, 2))
        found = {
            "toy": Family(
                name="toy",
                summary="kernels for tests",
                kernels=tuple(map(kernel, specs)),
                problem=ToyProblem,
                typical=lambda _arch: problems,
            )
        }
        monkeypatch.setattr(kernels, "families", lambda: found)

    monkeypatch.setattr(resources, "directory", lambda name: tmp_path / name)
    headers.pool.cache_clear()
    use(spec("add"))
    yield use
    headers.pool.cache_clear()


KERNEL_MEMBERS = ["name", "family", "key", "status", "ms", "registers", "spill_bytes", "shared_bytes"]


def test_warmup_compiles_once_and_then_hits(read, toy) -> None:
    first = read("warmup", "--arch", "sm_121")
    assert list(first) == ["schema_version", "arch", "kernels", "compiled", "hits", "failed", "wall_s"]
    assert (first["arch"], first["compiled"], first["hits"], first["failed"]) == ("sm_121a", 2, 0, 0)
    assert [list(kernel) for kernel in first["kernels"]] == [KERNEL_MEMBERS] * 2
    assert [kernel["status"] for kernel in first["kernels"]] == ["compiled"] * 2
    again = read("warmup", "--arch", "sm_121")
    assert (again["compiled"], again["hits"], again["failed"]) == (0, 2, 0)
    same = [[kernel[part] for part in ("name", "key", "registers")] for kernel in first["kernels"]]
    assert same == [[kernel[part] for part in ("name", "key", "registers")] for kernel in again["kernels"]]
    assert all(kernel["registers"] > 0 and kernel["ms"] > 0 for kernel in first["kernels"])
    assert {entry["key"] for entry in read("cache", "ls")["entries"]} == {kernel["key"] for kernel in first["kernels"]}


def test_progress_is_on_stderr_data_on_stdout_and_quiet_is_silent(run, toy) -> None:
    loud = run("warmup", "--arch", "sm_121", "--json")
    assert [line.split("]")[0] for line in loud.stderr.splitlines()] == ["[1/2", "[2/2"]
    assert "compiled toy.add" in loud.stderr and "registers" in loud.stderr
    assert json.loads(loud.stdout)["hits"] == 0
    assert run("warmup", "--arch", "sm_121", "-q").stderr == ""
    assert run("warmup", "--arch", "sm_121", "-q").stdout.startswith("sm_121a: 2 kernels, 0 compiled, 2 hits, 0 failed")


def test_several_targets_are_warmed_together_and_named_for_each_kernel(read, toy) -> None:
    said = read("warmup", "--arch", "sm_121,sm_90", "--arch", "120f")
    assert said["arch"] == "sm_121a,sm_90a,sm_120f"
    assert [kernel["arch"] for kernel in said["kernels"]] == ["sm_121a"] * 2 + ["sm_90a"] * 2 + ["sm_120f"] * 2


def test_a_kernel_that_does_not_compile_exits_3_and_the_others_are_warmed(run, toy) -> None:
    toy(spec("add"), spec("broken"))
    result = run("warmup", "--arch", "sm_121", "--json", "-q", code=3)
    said = json.loads(result.stdout)
    assert (said["compiled"], said["failed"]) == (2, 2)
    failed = [kernel for kernel in said["kernels"] if kernel["status"] == "failed"]
    assert [kernel["name"] for kernel in failed] == ["toy.broken", "toy.broken.steps2"]
    assert {kernel["key"] for kernel in failed} == {kernel["registers"] for kernel in failed} == {None}
    assert 'identifier "no_such_name" is undefined' in result.stderr and "--> " in result.stderr
    assert all("no_such_name" in kernel["error"] and kernel["remedy"] == "" for kernel in failed)
    assert "Traceback" not in result.stderr
    kept = next(line.split()[-1] for line in result.stderr.splitlines() if "kept at" in line)
    assert "no_such_name" in Path(kept).read_text()


def test_an_unmet_contract_exits_1_names_the_promise_and_shows_what_the_code_takes(run, read, toy) -> None:
    toy(spec("strict", require=(r"HMMA",)))
    for _ in ("compiled", "found"):
        result = run("warmup", "--arch", "sm_121", "--json", code=1)
        said = json.loads(result.stdout)
        assert (said["failed"], said["kernels"][0]["status"]) == (2, "failed")
        assert said["kernels"][0]["registers"] > 0 and said["kernels"][0]["key"]
        assert "toy.strict for sm_121a breaks its contract: no instruction matches 'HMMA'" in result.stderr
    assert {finding["kind"] for finding in read("cache", "verify", code=1)["findings"]} == {"unmet-contract"}


def test_a_failed_compile_weighs_more_than_an_unmet_contract(run, toy) -> None:
    toy(spec("strict", require=(r"HMMA",)), spec("broken"))
    run("warmup", "--arch", "sm_121", code=3)


def test_one_failure_of_many_kernels_is_told_once(run, toy, tmp_path: Path) -> None:
    (tmp_path / "templates" / "toy" / "add.cu.j2").write_text("{{ no_such_knob }}")
    said = run("warmup", "--arch", "sm_121", "-q", code=3).stderr
    assert said.count("no_such_knob") == 1 and "toy.add (and 1 more)" in said


def test_without_a_target_the_error_names_the_option(run, toy, monkeypatch) -> None:
    def missing() -> list[driver.Device]:
        raise errors.DriverError("there is none")

    monkeypatch.setattr(driver, "devices", missing)
    said = run("warmup", code=2).stderr
    assert "--arch sm_121" in said and "JITMX_ARCH" in said


def test_the_target_is_that_of_the_gpu_here_and_else_that_of_the_variable(read, toy, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_ARCH", "sm_120,sm_121")
    monkeypatch.setattr(driver, "devices", list)
    assert read("warmup")["arch"] == "sm_120a,sm_121a"
    h200 = driver.Device(0, "NVIDIA H200", 9, 0, 132)
    monkeypatch.setattr(driver, "devices", lambda: [h200, dataclasses.replace(h200, index=1)])
    assert read("warmup")["arch"] == "sm_90a"


def test_a_gpu_with_another_sm_count_gets_the_kernels_that_it_will_choose(read, toy, monkeypatch) -> None:
    large = driver.Device(0, "a larger card", 12, 0, 188)
    monkeypatch.setattr(driver, "devices", lambda: [dataclasses.replace(large, multiprocessors=140)])
    names = {kernel["name"] for kernel in read("warmup")["kernels"]}
    assert names == {"toy.add", "toy.add.wide", "toy.add.steps2", "toy.add.steps2-wide"}
    assert read("explain", "toy")["knobs"]["wide"] is False
    assert read("explain", "toy", "--sms", "188")["knobs"]["wide"] is True


def test_warmup_of_an_operator_compiles_what_its_calls_take_and_no_more(run, read, toy, monkeypatch) -> None:
    names = [kernel["name"] for kernel in read("warmup", "--arch", "sm_121,sm_90", "toy", "steps=4")["kernels"]]
    assert names == ["toy.add.steps4"] * 2
    monkeypatch.setattr(driver, "devices", lambda: [driver.Device(0, "a large card", 12, 0, 188)])
    assert [kernel["name"] for kernel in read("warmup", "toy")["kernels"]] == ["toy.add.wide"]


def test_rows_may_be_a_list_and_share_kernels(run, read, monkeypatch, only_gemv) -> None:
    asked: list[str] = []

    def build_all(variants: list[Variant], **_options: Any) -> list[Any]:
        asked.extend(variant.name for variant in variants)
        return []

    monkeypatch.setattr(batch, "build_all", build_all)
    read("warmup", "--arch", "sm_90", "linear", "-m", "1,3,4", "-m", "9", "-n", "4096", "-k", "4096", "dtype=fp16")
    assert [name.split("-")[0] for name in asked] == ["linear.gemv.fp16", "linear.gemv.m4", "linear.gemv.m8"]
    said = run("warmup", "--arch", "sm_90", "linear", "-m", "1,x", code=2).stderr
    assert "'m=x': m is a whole number from 1 to 2147483616" in said


def test_the_command_of_an_error_compiles_the_kernel_that_was_missing(run, read, toy, monkeypatch) -> None:
    read("warmup", "--arch", "sm_121")
    monkeypatch.setenv("JITMX_MODE", "required")
    settings.reload()
    missing = kernels.family("toy").spec("add").variant(arches.parse("sm_121"), steps=4, wide=True)
    with pytest.raises(errors.NotWarmedError) as caught:
        build.obtain(missing)
    command = str(caught.value).partition("before serving: ")[2].split()
    assert command == ["jitmx", "warmup", "--arch", "sm_121a", "--variant", "toy.add", "steps=4", "wide=1"]
    assert [kernel["name"] for kernel in read(*command[1:])["kernels"]] == [missing.name]
    settings.reload()
    assert build.obtain(missing).status == "hit"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arch", "sm_70"), "the nearest it has is sm_80"),
        (("--arch", "turing"), "'turing' is not an SM target"),
        (("--arch", "sm_121", "--family", "toys"), "families: toy"),
        (("--arch", "sm_121", "--jobs", "0"), "--jobs"),
        (("--arch", "sm_121", "--model", "gpt-oss-120b", "--block-size", "24"), "24 is no multiple of 16"),
        (("--arch", "sm_121", "surplus"), "'surplus' is not a kernel family; families: toy"),
        (("--arch", "sm_121", "toy", "pace=1"), "'pace=1' is no field=value of toy; its fields: name, steps"),
        (("--arch", "sm_121", "toy", "-m", "1"), "'m=1' is no field=value of toy; its fields: name, steps"),
        (("--arch", "sm_121", "toy", "-s", "1,x"), "'s=1,x' is no field=value of toy"),
        (("--arch", "sm_121", "toy", "steps=x"), "steps is a whole number from 1 to 2147483616"),
        (("--arch", "sm_121", "-n", "64"), "'n=64' needs an operator before it"),
        (("--arch", "sm_121", "--family", "toy", "toy"), "--family is for default kernels"),
        (("--arch", "sm_121", "--variant", "toy"), "'toy' is no kernel; those of the family: toy.add"),
        (("--arch", "sm_121", "--variant", "toy.sub"), "'sub' is no kernel of toy"),
        (("--arch", "sm_121", "--variant", "toy.add", "steps=3"), "steps=3 is not one of 1, 2, 4"),
        (("--arch", "sm_121", "--variant", "toy.add", "pace=3"), "its knobs: steps, wide"),
        (("--arch", "sm_121", "--variant", "toy.add", "steps=1", "steps=2"), "steps is given twice"),
        (
            ("--arch", "sm_121", "--variant", "toy.add", "-k", "32"),
            "'k=32' is no knob=value of toy.add; its knobs: steps, wide",
        ),
    ],
)
def test_a_bad_argument_is_a_usage_error_that_names_the_choices(run, toy, arguments, said) -> None:
    assert said in run("warmup", *arguments, code=2).stderr


def test_with_the_disk_switched_off_there_is_nothing_to_warm(run, toy, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_MODE", "off")
    assert "JITMX_MODE=off" in run("warmup", "--arch", "sm_121", code=2).stderr


def test_warmup_compiles_where_serving_must_not(read, toy, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_MODE", "required")
    assert read("warmup", "--arch", "sm_121")["compiled"] == 2


def evidence(read, arch: str = "sm_121") -> list[str]:
    return [variant["evidence"]["kind"] for variant in read("variants", "--arch", arch)["variants"]]


def test_variants_tell_knobs_and_once_compiled_resources(run, read, toy) -> None:
    before = read("variants", "--arch", "sm_121")["variants"]
    assert [variant["knobs"] for variant in before] == [{"steps": 1, "wide": False}, {"steps": 2, "wide": False}]
    assert {variant["registers"] for variant in before} == {None} and evidence(read) == ["none"] * 2
    warmed = read("warmup", "--arch", "sm_121")["kernels"]
    after = read("variants", "--arch", "sm_121")["variants"]
    assert [variant["key"] for variant in after] == [kernel["key"] for kernel in warmed]
    for name in ("registers", "spill_bytes", "shared_bytes"):
        assert [variant[name] for variant in after] == [kernel[name] for kernel in warmed]
    assert [variant["shared_bytes"] for variant in after] == [1024, 2048]
    assert evidence(read) == ["compiled"] * 2 and evidence(read, "sm_90") == ["none"] * 2
    assert "steps=2" in run("variants", "--arch", "sm_121").stdout


def test_code_that_breaks_its_contract_is_no_evidence(run, read, toy) -> None:
    toy(spec("strict", require=(r"HMMA",)))
    run("warmup", "--arch", "sm_121", code=1)
    assert evidence(read) == ["none"] * 2


def test_the_ledger_s_evidence_is_shown_and_an_edited_header_withdraws_it(run, read, toy, tmp_path: Path) -> None:
    read("warmup", "--arch", "sm_90")
    variant = choose.default_variants("toy", arches.parse("sm_90"))[0]
    checked = ledger.digest(render(variant))
    entry = ledger.Entry(
        checked, "sm_90a", variant.name, "hardware", card="NVIDIA H200", date="2025-11-21", error=0.0018
    )
    ledger.save([entry], tmp_path / "tactics" / "ledger.json")
    assert evidence(read, "sm_90") == ["hardware", "compiled"]
    assert "hardware (NVIDIA H200, 2025-11-21, error 0.0018)" in run("variants", "--arch", "sm_90").stdout
    (tmp_path / "templates" / "include" / "jitmx" / "toy.cuh").write_text(HEADER + "// edited\n")
    headers.pool.cache_clear()
    assert evidence(read, "sm_90") == ["none"] * 2


def test_why_says_which_template_or_header_changed_and_that_the_entry_is_stale(run, read, toy, tmp_path: Path) -> None:
    key = read("warmup", "--arch", "sm_121")["kernels"][0]["key"]
    assert read("cache", "why", key)["current"]
    assert "It is current" in run("cache", "why", "toy.add").stdout
    (tmp_path / "templates" / "include" / "jitmx" / "toy.cuh").write_text(HEADER + "// edited\n")
    headers.pool.cache_clear()
    assert read("cache", "why", key)["changed_since"] == ["header jitmx/toy.cuh changed"]
    assert "stale" in run("cache", "why", key).stdout
    new = read("warmup", "--arch", "sm_121")["kernels"][0]["key"]
    said = read("cache", "why", "toy.add")
    assert (said["key"], said["predecessor"], said["changed"]) == (new, key, ["header jitmx/toy.cuh changed"])
    assert read("cache", "prune", "--unreachable", "--dry-run")["entries"] == 2
    assert read("cache", "prune", "--unreachable")["entries"] == 2
    assert {entry["key"] for entry in read("cache", "ls")["entries"]} >= {new}
    assert read("warmup", "--arch", "sm_121")["hits"] == 2


def test_nothing_is_pruned_as_unreachable_where_there_is_no_compiler_to_know_it(run, read, toy, monkeypatch) -> None:
    from jitmx.toolchain import nvrtc

    def missing() -> nvrtc.Identity:
        raise errors.ToolchainError("libnvrtc.so.13 is missing")

    read("warmup", "--arch", "sm_121")
    monkeypatch.setattr(nvrtc, "identity", missing)
    assert "libnvrtc.so.13 is missing" in run("cache", "prune", "--unreachable", code=3).stderr
    assert len(read("cache", "ls")["entries"]) == 2


def test_show_prints_the_machine_code(run, read, toy) -> None:
    read("warmup", "--arch", "sm_121")
    lines = read("cache", "show", "toy.add", "--sass")["sass"]
    assert any("FADD" in line for line in lines) and any("EXIT" in line for line in lines)
    shown = run("cache", "show", "toy.add", "--sass").stdout
    assert all(line in shown for line in lines)
    assert "sass" not in read("cache", "show", "toy.add")


def test_verify_recompiles_to_the_same_bytes(run, read, toy) -> None:
    read("warmup", "--arch", "sm_121")
    said = read("cache", "verify", "--recompile")
    assert (said["recompiled"], said["skipped"], said["findings"]) == (2, 0, [])
    assert "2 compiled again: 0 findings" in run("cache", "verify", "--recompile", "-q").stdout


def test_kernels_that_could_not_be_kept_are_a_finding(run, toy, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_CACHE_DIR", "/proc/jitmx-no-such-name")
    result = run("warmup", "--arch", "sm_121", "-q", "--json", code=1)
    assert json.loads(result.stdout)["compiled"] == 2
    assert "Error: 2 of 2 kernels could not be kept in /proc/jitmx-no-such-name" in result.stderr
    assert "JITMX_CACHE_DIR" in result.stderr and "Traceback" not in result.stderr


EVERY_VERB = """
import json
from click.testing import CliRunner
from jitmx.cache import manifest
from jitmx.cache import store as stores
from jitmx.cli import main

for line in (
    "cache ls", "cache stats", "cache verify", "cache prune --age 1d --dry-run", "cache path",
    "variants --arch sm_121 --family probe", "warmup --arch sm_121 --family probe -q", "doctor",
):
    result = CliRunner().invoke(main, line.split())
    print(json.dumps([line, result.exit_code, repr(result.exception), result.stderr]))
"""


def test_behind_a_directory_that_lets_nobody_in_every_verb_answers(project: Any, shut, tmp_path: Path) -> None:
    (tmp_path / "above").mkdir()
    preamble = shut(tmp_path / "above")
    done = project.run(preamble + EVERY_VERB, JITMX_CACHE_DIR=str(tmp_path / "above" / "cache"))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 8
    for line, code, exception, said in rows:
        verb = line.split()[0]
        # Kernels that end with the process, and a cache that nothing can be kept in or looked into, are findings.
        finds = verb in ("warmup", "doctor") or line == "cache verify"
        assert code == (1 if finds else 0), (line, exception, said)
        assert exception in ("None", "SystemExit(1)") and "Traceback" not in said, (line, exception, said)


def test_records_of_a_newer_jitmx_are_said_to_stand_in_the_way_and_stay(run, toy, tmp_path: Path) -> None:
    run("warmup", "--arch", "sm_121")
    first, second = (tmp_path / "cache" / "v1" / "actions").iterdir()
    newer = manifest.seal(manifest.unseal(first.read_bytes()) | {"schema_version": 99})
    first.write_bytes(newer)
    second.unlink()
    stores._stores.clear()  # as a process of its own would find it
    again = run("warmup", "--arch", "sm_121", code=1)
    assert again.stderr.splitlines()[-1] == (
        f"Error: 1 of 2 kernels could not be kept in {tmp_path / 'cache'} and end with this process: a newer jitmx has "
        "its own records of 1 there, which stay; name another directory in JITMX_CACHE_DIR"
    )
    assert first.read_bytes() == newer and second.is_file()
    assert run("cache", "verify").stdout.endswith(", 1 records of a newer jitmx left alone: 0 findings\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--layers", "qkv"), "--layers says how a model is served: name it by --model, or leave --layers out"),
        (("--tokens", "16384"), "--tokens says how a model is served"),
        (("--ranks", "2", "linear", "-m", "4"), "--ranks says how a model is served"),
        (("attention", "--context", "8192"), "--model, or give the operator's field as context=8192"),
        (("--context", "8192", "linear"), "name it by --model, or leave --context out"),
        (("--lora",), "--lora says how a model is served"),
        (("--model", "gpt-oss-20b", "--layers", "moe,qvk"), "--layers=moe,qvk: 'qvk' is none of moe, qkv, "),
        (("--model", "gpt-oss-20b", "--layers", ""), "--layers=: no layer is named; "),
    ],
)
def test_options_of_a_model_that_nothing_can_follow_are_refused_by_name(run, arguments, said: str) -> None:
    assert said in run("warmup", "--arch", "sm_121", *arguments, code=2).stderr


def test_fp8_e4m3_is_the_cache_that_fp8_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ServedModel, "variants", lambda model, _arches: asked.append(model) or [])
    for dtype in ("fp8", "fp8_e4m3", "auto"):
        words = ["warmup", "--arch", "sm_90", "--model", "gpt-oss-20b", "--kv-cache-dtype", dtype]
        assert CliRunner().invoke(main, words).exit_code == 0
    assert asked[0] == asked[1] != asked[2] and asked[0].about()["kv_cache_dtype"] == "fp8"


def test_warm_up_of_a_model_with_its_draft_makes_the_kernels_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITMX_DRAFT_LAYERS", "none")
    settings.reload()
    asked: dict[tuple[str, ...], set[str]] = {}
    kept: list[Any] = []
    monkeypatch.setattr(batch, "build_all", lambda variants, **_: kept.append(variants) or [])
    draft = "--draft", "gpt-oss-20b-eagle3-32k", "--draft-layers"
    for more in ((), (*draft, "fc"), (*draft, "fc,lm_head")):
        sizes = "--model", "gpt-oss-20b", "--tokens", "4", "--requests", "2"
        assert CliRunner().invoke(main, ["warmup", "--arch", "sm_90", *sizes, *more]).exit_code == 0
        asked[more] = {variant.identity for variant in kept[-1]}
        assert any(variant.name == "tree.accept" for variant in kept[-1]) is bool(more)
    plain, few, more_ = asked.values()
    assert plain < few < more_
    argmax = [v for v in kept[-1] if v.spec.family == "linear" and v.knobs.as_dict().get("argmax")]
    assert argmax
