"""docs/cost-model.md says what its commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jitmx import settings
from scripts import refresh_outputs

DOCUMENT = Path(__file__).parents[2] / "docs" / "cost-model.md"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path))
    settings.reload()
    yield
    monkeypatch.undo()
    settings.current.cache_clear()


def test_blocks_of_output_are_what_their_commands_print() -> None:
    text = DOCUMENT.read_text()
    assert refresh_outputs.refreshed(text) == text, "python scripts/refresh_outputs.py docs/cost-model.md"


def test_the_page_has_both_cards_and_the_measured_figures() -> None:
    commands = re.findall(r"^\$ jitmx (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert {"explain --measured --arch sm_90", "explain --parameters --arch sm_121"} <= set(commands)
    for target in ("sm_90", "sm_121"):
        assert any("--model gpt-oss-120b" in command and target in command for command in commands)


def test_a_command_that_fails_is_no_output() -> None:
    with pytest.raises(RuntimeError, match="exit 2"):
        refresh_outputs.refreshed("```console\n$ jitmx explain --nothing\n```")
