"""What tests of the scripts share: the checkout on the path, and scripts run as users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(ROOT))

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script of scripts/ by name, with this interpreter; `code` is the exit status that must come."""

    def call(name: str, *words: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        script = SCRIPTS / name
        command = [sys.executable, str(script)] if script.suffix == ".py" else ["bash", str(script)]
        done = subprocess.run(
            [*command, *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"PYTHON": sys.executable, "JITMX_CACHE_DIR": str(tmp_path / "cache")} | environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=240,
        )
        assert done.returncode == code, f"{name} gave {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
        return done

    return call


@pytest.fixture
def call() -> Callable[..., Result]:
    """Call a script's command within this process, which has imported torch; `code` as of `run`."""

    def call(main: Any, *words: object, code: int = 0) -> Result:
        done = CliRunner().invoke(main, list(map(str, words)))
        assert done.exit_code == code, (done.output, done.exception)
        return done

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a checkpoint as far as a stand-in for vLLM looks into one: its sizes."""
    from scripts.protocol.sizes import PRESETS, config

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(PRESETS["tiny"])))
    return folder
