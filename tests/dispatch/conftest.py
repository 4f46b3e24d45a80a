"""No setting of the caller's, and a folder of the test's own for the user's tables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jitmx import settings
from jitmx.dispatch import tactics


@pytest.fixture(autouse=True)
def tactics_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where JITMX_TACTICS points; empty."""
    for name in {name for setting in settings.TABLE for name in (setting.name, *setting.aliases)} & os.environ.keys():
        monkeypatch.delenv(name)
    folder = tmp_path / "tactics"
    monkeypatch.setenv("JITMX_TACTICS", str(folder))
    settings.reload()
    yield folder
    monkeypatch.undo()
    settings.current.cache_clear()


@pytest.fixture
def write(tactics_folder: Path) -> Callable[..., Path]:
    """Writes the user's table of `linear`: `write("sm_90a", row, row)`, with other fields by name."""

    def make(target: str, *rows: Any, **fields: Any) -> Path:
        path = tactics_folder / target / "linear.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {
            "schema_version": 1, "family": "linear", "arch": target,
            "origin": {"kind": "measured", "card": "a card", "date": "2026-01-02"}, "rows": rows,
        }  # fmt: skip
        path.write_text(json.dumps(table | fields))
        tactics.tables.cache_clear()  # a process reads tables once
        return path

    return make
