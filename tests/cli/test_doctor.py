"""`jitmx doctor`: what is broken is a problem with a remedy, and nothing else is."""

from __future__ import annotations

import errno
import json
import os
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from jitmx import settings
from jitmx.cache import bundle
from jitmx.cli import checks
from jitmx.errors import DriverError, ToolchainError
from jitmx.runtime import driver
from jitmx.toolchain import cubin, headers, nvrtc


def by_name(document: dict) -> dict[str, dict]:
    return {check["name"]: check for check in document["checks"]}


def no_driver() -> None:
    raise DriverError("libcuda.so.1 cannot be loaded", "install the driver to run kernels")


@pytest.fixture
def without_gpu(monkeypatch) -> None:
    monkeypatch.setattr(driver, "devices", no_driver)


@pytest.fixture
def with_gpu(monkeypatch) -> None:
    device = driver.Device(0, "NVIDIA H200", 9, 0, 132)
    monkeypatch.setattr(driver, "devices", lambda: [device])
    monkeypatch.setattr(driver, "version", lambda: (13, 0))


def test_a_machine_that_can_compile_has_no_problem(read, run, without_gpu) -> None:
    said = read("doctor")
    assert said["problems"] == 0
    found = by_name(said)
    assert nvrtc.identity().version in found["NVRTC"]["found"]
    assert "sm_121a" in found["targets"]["found"]
    assert {
        found[name]["status"] for name in ("NVRTC", "headers", "compile", "nvdisasm", "templates", "cache", "clock")
    } == {"ok"}
    text = run("doctor").stdout
    assert all(name in text for name in found) and text.endswith("0 problems\n")


def test_a_missing_driver_is_a_note_and_with_gpu_a_problem(read, without_gpu) -> None:
    assert by_name(read("doctor"))["driver"]["status"] == "note"
    found = by_name(read("doctor", "--gpu", code=1))["driver"]
    assert (found["status"], found["remedy"]) == ("problem", "install the driver to run kernels")


def test_a_gpu_is_named_with_its_target(read, with_gpu) -> None:
    found = by_name(read("doctor"))
    assert "NVIDIA H200" in found["GPU"]["found"] and "sm_90a" in found["GPU"]["found"]
    assert "CUDA 13.0" in found["driver"]["found"]


def test_a_gpu_without_a_target_is_reported_with_the_targets_there_are(read, with_gpu, monkeypatch) -> None:
    monkeypatch.setattr(driver, "devices", lambda: [driver.Device(0, "Tesla V100", 7, 0, 80)])
    found = by_name(read("doctor", "--gpu", code=1))["GPU"]
    assert found["status"] == "problem" and "7.0" in found["remedy"] and "sm_90a" in found["remedy"]


def test_a_driver_of_an_older_cuda_than_nvrtc_is_a_problem(with_gpu, monkeypatch, read) -> None:
    monkeypatch.setattr(driver, "version", lambda: (12, 8))
    problems = [check for check in read("doctor", code=1)["checks"] if check["status"] == "problem"]
    assert [check["name"] for check in problems] == ["driver"]
    assert "CUDA 12" in problems[0]["found"] and "install a driver for CUDA 13" in problems[0]["remedy"]


def test_a_driver_without_gpus_says_where_to_look(read, monkeypatch) -> None:
    monkeypatch.setattr(driver, "devices", list)
    monkeypatch.setattr(driver, "version", lambda: (13, 0))
    assert "CUDA_VISIBLE_DEVICES" in by_name(read("doctor"))["GPU"]["remedy"]


def test_without_nvrtc_the_remedy_is_its_package(read, without_gpu, monkeypatch) -> None:
    def missing() -> None:
        raise ToolchainError("libnvrtc.so.13 is missing")

    monkeypatch.setattr(nvrtc, "identity", missing)
    found = by_name(read("doctor", code=1))
    assert found["NVRTC"]["status"] == "problem" and "nvidia-cuda-nvrtc" in found["NVRTC"]["remedy"]
    assert "compile" not in found and found["cache"]["status"] == "ok"


def test_missing_headers_are_named_with_their_package(read, without_gpu, monkeypatch) -> None:
    monkeypatch.setattr(headers.HeaderPool, "__contains__", lambda _pool, name: name != "cuda_fp4.h")
    found = by_name(read("doctor", code=1))["headers"]
    assert found["found"] == "missing: cuda_fp4.h" and "nvidia-cuda-runtime" in found["remedy"]


def test_an_nvrtc_too_old_for_a_target_is_a_note_that_names_the_release(read, without_gpu, monkeypatch) -> None:
    here = nvrtc.identity()
    old = nvrtc.Identity("12.4", here.digest, here.path, (80, 86, 89, 90))
    monkeypatch.setattr(nvrtc, "identity", lambda: old)
    refused = [check for check in read("doctor")["checks"] if check["name"] == "targets" and check["status"] == "note"]
    assert any("sm_121a" in check["found"] and "12.9" in check["found"] for check in refused)


@pytest.mark.parametrize(
    ("part", "name", "package"), [("compile", "compile", "nvidia-cuda-runtime"), ("sass", "nvdisasm", "nvdisasm")]
)
def test_a_broken_tool_is_a_problem_that_names_its_package(read, without_gpu, monkeypatch, part, name, package) -> None:
    def broken(*_arguments: object) -> None:
        raise ToolchainError("it does not work")

    monkeypatch.setattr(nvrtc if part == "compile" else cubin, part, broken)
    found = by_name(read("doctor", code=1))[name]
    assert found["status"] == "problem" and package in found["remedy"]


def test_a_bad_setting_is_the_finding_and_stops_the_rest(read, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_MODE", "sometimes")
    said = read("doctor", code=1)
    assert [check["name"] for check in said["checks"]] == ["settings"]
    assert "'sometimes' is not auto, required or off" in said["checks"][0]["found"]


def test_two_cupy_wheels_are_a_problem(read, without_gpu, monkeypatch) -> None:
    real = list(metadata.distributions())
    other = SimpleNamespace(metadata={"Name": "cupy-cuda12x"})
    monkeypatch.setattr(metadata, "distributions", lambda: [*real, other])
    found = by_name(read("doctor", code=1))["CuPy"]
    assert "cupy-cuda12x and cupy-cuda13x" in found["found"] and "pip uninstall" in found["remedy"]


def statuses(path: Path, **options) -> dict[str, checks.Check]:
    return {check.name: check for check in checks.check_directory(path, **{"allow_shared": False, **options})}


def test_a_cache_that_does_not_exist_yet_is_fine_and_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache"
    assert statuses(path)["cache"].status == "ok"
    assert not path.parent.exists()


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    assert statuses(tmp_path)["cache"].status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_others_can_write_is_refused_unless_allowed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = statuses(tmp_path)["cache"]
    assert found.status == "problem" and "0777" in found.found
    assert "rm -r" not in found.remedy and "chmod go-w" in found.remedy
    assert statuses(tmp_path, allow_shared=True)["cache"].status == "ok"


def test_a_file_in_the_cache_s_place_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    found = statuses(tmp_path / "cache")["cache"]
    assert found.status == "problem" and found.found.endswith("/cache is not a directory")
    assert found.remedy == "name one in JITMX_CACHE_DIR, or remove that file"
    assert "JITMX_CACHE_DIR" in statuses(tmp_path / "cache" / "below")["cache"].remedy


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch) -> None:
    if os.geteuid() == 0:
        # Root writes everywhere but to the kernel's own file systems.
        found = statuses(Path("/proc/self"))["cache"]
    else:
        tmp_path.chmod(0o500)
        found = statuses(tmp_path)["cache"]
    assert found.status == "problem" and "every process compiles anew" in found.found


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "mount it writable, or"),
        (errno.ENOSPC, "free some space there, or"),
        (errno.EDQUOT, "free some of your quota there, or"),
        (errno.EACCES, "chmod u+rwx"),
    ],
)
def test_the_remedy_is_that_of_what_keeps_the_cache_from_being_written(
    tmp_path: Path, monkeypatch, number: int, remedy: str
) -> None:
    def refuse(**_options) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    found = statuses(tmp_path)["cache"]
    assert found.status == "problem" and os.strerror(number) in found.found and found.remedy.startswith(remedy)


@pytest.mark.parametrize(("shift", "word"), [(-120.0, "120 s ahead of"), (3600.0, "3600 s behind")])
def test_a_clock_that_disagrees_with_the_file_system_is_a_problem(tmp_path: Path, shift: float, word: str) -> None:
    found = statuses(tmp_path, now=lambda: time.time() + shift)["clock"]
    assert found.status == "problem" and word in found.found and "NTP" in found.remedy


def test_a_disk_almost_full_is_a_problem(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    found = statuses(tmp_path)["disk"]
    assert found.status == "problem" and "prune" in found.remedy


def test_mode_off_is_a_note(read, without_gpu, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_MODE", "off")
    assert by_name(read("doctor"))["cache"]["status"] == "note"


def test_bundles_and_the_remote_cache_are_looked_at_where_there_are_any(
    read, without_gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record
) -> None:
    assert not {"bundle", "remote"} & by_name(read("doctor")).keys()
    made = tmp_path / "made.jitmx"
    made.write_bytes(bundle.make([bundle.Kernel(*record())], [], {}))
    monkeypatch.setenv("JITMX_SITE_CACHE", str(made))
    monkeypatch.setenv("JITMX_REMOTE_CACHE", f"file://{tmp_path}/shared")
    settings.reload()
    found = by_name(read("doctor"))
    assert found["bundle"]["status"] == found["remote"]["status"] == "ok" and "1 kernels" in found["bundle"]["found"]
    made.write_bytes(b"")
    monkeypatch.setenv("JITMX_REMOTE_CACHE", "http://127.0.0.1:9/none")
    settings.reload()
    found = by_name(read("doctor", code=1))
    assert found["bundle"]["status"] == found["remote"]["status"] == "problem"
    assert "is refused" in found["bundle"]["found"] and "127.0.0.1:9" in found["remote"]["found"]
    monkeypatch.setenv("JITMX_REMOTE_CACHE", "foo://bar")
    settings.reload()
    found = by_name(read("doctor", code=1))["remote"]
    assert "foo://bar: " in found["found"] and "JITMX_REMOTE_CACHE" in found["remedy"]
    monkeypatch.setenv("JITMX_BUNDLE_KEYS", str(tmp_path / "absent"))
    settings.reload()
    assert "there is no public key" in by_name(read("doctor", code=1))["remote"]["found"]


def test_writing_to_a_remote_cache_that_no_setting_names_is_a_note(
    read, without_gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITMX_REMOTE_WRITE", "1")
    settings.reload()
    found = by_name(read("doctor"))["remote"]
    assert found["status"] == "note" and "JITMX_REMOTE_WRITE does nothing" in found["found"]
    assert "JITMX_REMOTE_CACHE" in found["remedy"]


@pytest.mark.parametrize(
    ("variable", "name", "remedy"),
    [
        ("JITMX_SITE_CACHE", "site cache", "take it out of JITMX_SITE_CACHE"),
        ("JITMX_BUNDLE_KEYS", "bundle keys", "unset JITMX_BUNDLE_KEYS"),
        ("JITMX_SIGNING_KEY", "signing key", "unset JITMX_SIGNING_KEY"),
        ("JITMX_TACTICS", "tables", "unset JITMX_TACTICS"),
    ],
)
def test_a_place_that_a_setting_names_and_that_is_not_there_is_a_problem(
    read, without_gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str, remedy: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "absent"))
    settings.reload()
    said = read("doctor", code=1)
    found = by_name(said)[name]
    assert said["problems"] == 1 and found["status"] == "problem"
    assert str(tmp_path / "absent") in found["found"] and remedy in found["remedy"]


def test_keys_and_tables_that_serve_are_fine_and_those_that_cannot_be_read_are_problems(
    read, run, without_gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("bundle", "keygen", str(tmp_path / "own"))
    table = tmp_path / "tactics" / "sm_90a" / "moe.json"
    table.parent.mkdir(parents=True)
    origin = {"kind": "heuristic", "note": ""}
    table.write_text(json.dumps({"schema_version": 1, "family": "moe", "arch": "sm_90a", "origin": origin, "rows": []}))
    monkeypatch.setenv("JITMX_BUNDLE_KEYS", str(tmp_path / "own.pub"))
    monkeypatch.setenv("JITMX_SIGNING_KEY", str(tmp_path / "own.key"))
    monkeypatch.setenv("JITMX_TACTICS", str(tmp_path / "tactics"))
    settings.reload()
    names = ("bundle keys", "signing key", "tables")
    assert {by_name(read("doctor"))[name]["status"] for name in names} == {"ok"}
    for path in (table, tmp_path / "own.pub", tmp_path / "own.key"):
        path.write_text("{")
    found = by_name(read("doctor", code=1))
    for name, path in zip(names, (tmp_path / "own.pub", tmp_path / "own.key", table), strict=True):
        assert found[name]["status"] == "problem" and str(path) in found[name]["found"] and found[name]["remedy"]


@pytest.mark.parametrize(
    ("place", "found", "remedy"),
    [
        ("sm_121/linear.json", "is not read: tables of sm_121 are those in sm_121a/", "rename the folder to sm_121a"),
        ("sm_121a/linaer.json", "is not read: linaer is no family (families: ", "rename it or move it away"),
        ("linear.json", "is of no target, so no call reads it", "move it to "),
        ("hopper/linear.json", "is not read: hopper is no target (targets: sm_80, ", "move it away"),
        (
            "sm_121a/linear.json",
            ": row 0 never applies: linear.wgmma does not run on sm_121a",
            "mend the row, or take ",
        ),
    ],
)
def test_tables_that_no_call_reads_and_rows_that_serve_none_are_problems(
    read, without_gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, found: str, remedy: str
) -> None:
    path = tmp_path / "tactics" / place
    path.parent.mkdir(parents=True)
    row = {"when": {"m": 1}, "kernel": "wgmma", "knobs": {}}
    table = {"schema_version": 1, "family": "linear", "arch": "sm_121a", "origin": {"kind": "measured"}, "rows": [row]}
    path.write_text(json.dumps(table))
    monkeypatch.setenv("JITMX_TACTICS", str(tmp_path / "tactics"))
    settings.reload()
    said = read("doctor", code=1)
    finding = by_name(said)["tables"]
    assert said["problems"] == 1 and finding["status"] == "problem"
    assert finding["found"].startswith(f"{path}") and found in finding["found"] and remedy in finding["remedy"]
