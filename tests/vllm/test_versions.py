"""The releases of vLLM that the plugin is for: said once, and held to. No vLLM."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from jitmx.vllm import versions

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1", "0.33.0+cpu", "0.33.1.dev7+gabcdef", "0.33.2rc1"])
def test_supported_releases_are_served(version: str) -> None:
    assert versions.refusal(version) is None


@pytest.mark.parametrize("version", ["0.32.3", "0.34.0", "0.34.0.dev1", "1.0", "0.33.0rc1"])
def test_others_are_refused_with_the_range(version: str) -> None:
    if version == "0.33.0rc1":  # before the release that the plugin was written for
        assert versions.refusal(version) is not None
        return
    assert versions.refusal(version) == f"vLLM {version} is not one of vllm>=0.33,<0.34, which this jitmx is for"


def test_a_version_that_cannot_be_read_is_refused() -> None:
    refused = versions.refusal("today's")
    assert refused is not None and "cannot be read" in refused


def test_vllm_that_is_no_installed_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    refused = versions.refusal()
    assert refused is not None and "not known" in refused


def test_the_extra_asks_for_the_same_releases() -> None:
    assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm{versions.SUPPORTED}"]


def test_the_entry_point_is_the_one_function() -> None:
    assert PROJECT["entry-points"]["vllm.general_plugins"] == {"jitmx": "jitmx.vllm:register"}
