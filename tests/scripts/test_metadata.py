"""Metadata says what it could read, and why it could not read the rest."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import pytest

from scripts.protocol import metadata

NEEDS_CARD = ("gpus", "clocks", "driver", "cuda", "cudnn")


def fields(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    flat = {name: value for name, value in found.items() if name not in ("packages", "git", "about", "schema_version")}
    flat |= {f"packages.{name}": value for name, value in found["packages"].items()}
    return flat | {f"git.{name}": value for name, value in found["git"].items()}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Metadata on a machine without a card or its tools, as the script prints it."""
    import subprocess
    import sys

    script = Path(__file__).resolve().parents[2] / "scripts" / "collect_benchmark_metadata.sh"
    tools = tmp_path_factory.mktemp("tools")
    for name in ("bash", "dirname", "git"):
        found = next(p for folder in os.environ["PATH"].split(":") if (p := Path(folder) / name).exists())
        (tools / name).symlink_to(found)
    done = subprocess.run(
        ["bash", str(script), "--about", '{"vllm_flags": {"max_num_seqs": 2}}'],
        env={
            "PATH": str(tools), "PYTHON": sys.executable, "HOME": os.environ.get("HOME", "/root"), "VLLM_X": "1",
            "HF_TOKEN": "secret", "VLLM_API_KEY": "secret", "OTHER": "x", "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_field_has_a_value_or_a_reason_and_never_both_or_neither(bare: dict[str, Any]) -> None:
    assert bare["schema_version"] == 1
    for name, item in fields(bare).items():
        if item["value"] is None:
            assert set(item) == {"value", "reason"} and item["reason"], name
        else:
            assert set(item) == {"value"}, name


@pytest.mark.parametrize("name", NEEDS_CARD)
def test_without_a_card_its_fields_are_null_with_a_reason(bare: dict[str, Any], name: str) -> None:
    if name in ("cuda", "cudnn", "driver") and bare[name]["value"] is not None:
        pytest.skip("a driver, or torch for CUDA, is installed here")
    assert bare[name]["value"] is None and bare[name]["reason"]
    if name == "gpus":
        assert bare[name]["reason"] == "nvidia-smi is not on PATH"


def test_what_can_be_read_anywhere_is_read(bare: dict[str, Any]) -> None:
    for name in ("taken", "nvrtc", "cpu", "memory_bytes", "os", "python", "pip_freeze", "environment"):
        assert bare[name]["value"], name
    assert any(line.startswith("numpy==") for line in bare["pip_freeze"]["value"])
    assert bare["packages"]["torch"]["value"] and bare["about"] == {"vllm_flags": {"max_num_seqs": 2}}


def test_secrets_and_unrelated_variables_are_left_out(bare: dict[str, Any]) -> None:
    kept = bare["environment"]["value"]
    assert kept["VLLM_X"] == "1" and not {"HF_TOKEN", "VLLM_API_KEY", "OTHER", "HOME"} & kept.keys()
    assert "secret" not in json.dumps(bare)


def test_the_home_folder_is_written_as_a_tilde() -> None:
    found = metadata.environment({"JITMX_CACHE_DIR": f"{Path.home()}/cache"})
    assert found == {"JITMX_CACHE_DIR": "~/cache" if len(str(Path.home())) > 1 else f"{Path.home()}/cache"}


def test_a_card_is_read_as_the_tool_prints_it_and_what_it_does_not_support_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ["NVIDIA GB10", "12.1", "580.95", *["[N/A]"] * (len(metadata._SMI) - 3)]
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{', '.join(row)}'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    (card,) = metadata.field(metadata._gpus)["value"]
    assert card["name"] == "NVIDIA GB10" and card["compute_cap"] == "12.1" and card["power.limit"] is None
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2; exit 9\n")
    assert "status 9 and said: Failed to initialize NVML" in metadata.field(metadata._gpus)["reason"]


def checkpoint(folder: Path, body: bytes = b"\0" * 8) -> Path:
    folder.mkdir()
    head = json.dumps({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + body)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_model_is_told_by_its_configuration_and_what_its_files_say_they_hold(tmp_path: Path) -> None:
    one = metadata.digest_of(checkpoint(tmp_path / "a"), whole=True)
    same = metadata.digest_of(checkpoint(tmp_path / "b"), whole=True)
    other = metadata.digest_of(checkpoint(tmp_path / "c", b"\1" * 8), whole=True)
    assert one["config_sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert {k: v for k, v in one.items() if k != "name"} == {k: v for k, v in same.items() if k != "name"}
    assert one["headers_sha256"] == other["headers_sha256"] and one["weights_sha256"] != other["weights_sha256"]
    assert "weights_sha256" not in metadata.digest_of(tmp_path / "a")
    why = metadata.field(lambda: metadata.digest_of(tmp_path))["reason"]
    assert why.endswith("holds no config.json and *.safetensors")
    assert metadata.field(lambda: metadata.digest_of(None))["reason"] == "no model was given"
