"""`jitmx env`: every setting with its value and where that came from."""

from __future__ import annotations

from pathlib import Path

from jitmx import settings


def test_every_setting_is_listed_with_its_default(run, read) -> None:
    said = read("env")["settings"]
    assert [row["name"] for row in said] == [setting.name for setting in settings.TABLE]
    assert {row["source"] for row in said if row["name"] != "JITMX_CACHE_DIR"} == {"default"}
    text = run("env").stdout
    assert all(setting.name in text and setting.help in text for setting in settings.TABLE)


def test_a_value_names_the_variable_that_it_came_from(read, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHINFER_NVCC_THREADS", "3")
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", "1")
    monkeypatch.setenv("JITMX_LOG_LEVEL", "4")
    monkeypatch.setenv("JITMX_ARCH", "sm_121 sm_90")
    monkeypatch.setenv("JITMX_SITE_CACHE", f"{tmp_path}/a:{tmp_path}/b")
    monkeypatch.setenv("JITMX_LINEAR_KNOBS", "split_k=8,stages=6")
    rows = {row["name"]: (row["value"], row["source"]) for row in read("env")["settings"]}
    assert rows["JITMX_JOBS"] == (3, "FLASHINFER_NVCC_THREADS")
    assert rows["JITMX_LOG_LEVEL"] == (4, "JITMX_LOG_LEVEL")
    assert rows["JITMX_ARCH"] == (["sm_121a", "sm_90a"], "JITMX_ARCH")
    assert rows["JITMX_SITE_CACHE"] == ([f"{tmp_path}/a", f"{tmp_path}/b"], "JITMX_SITE_CACHE")
    assert rows["JITMX_LINEAR_KNOBS"] == (["split_k=8", "stages=6"], "JITMX_LINEAR_KNOBS")


def test_what_is_printed_can_be_set_again(run, monkeypatch, tmp_path: Path) -> None:
    variables = {
        "JITMX_ARCH": "sm_121a,sm_90a",
        "JITMX_SITE_CACHE": f"{tmp_path}/a:{tmp_path}/b",
        "JITMX_LINEAR_KNOBS": "split_k=8,stages=6",
        "JITMX_ALLOW_SHARED_CACHE": "1",
        "JITMX_MODE": "required",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines = {line.split()[0]: line.split()[1] for line in run("env").stdout.splitlines()}
    assert {name: lines[name] for name in variables} == variables
