"""Every verb where neither torch, vLLM nor transformers is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# As where they are not installed, also for whoever asks only whether they are.
SCRIPT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, Missing())
from jitmx.cli import main
main(prog_name="jitmx")
"""
ARCH = ("--arch", "sm_90")
pytestmark = pytest.mark.usefixtures("toolchain")
INSTALL = "needs torch; install it with: pip install 'jitmx[torch]'\n"


def jitmx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=os.environ, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip


def test_a_model_s_kernels_are_warmed_without_torch() -> None:
    done = jitmx("warmup", *ARCH, "--model", "gpt-oss-120b", "--tokens", "1", "-q", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["kernels"]) >= 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("warmup", *ARCH, "--variant", "quantize.quantize"), ("variants", *ARCH, "--family", "quantize"),
        ("explain", "moe", *ARCH), ("verify", *ARCH, "--family", "bandwidth", "-q"), ("env",), ("doctor",),
        ("cache", "ls"), ("cache", "verify", "--recompile"),
        *(
            pytest.param(words, marks=pytest.mark.nightly)
            for words in (
                ("cache", "why", "quantize.quantize"), ("cache", "show", "quantize.quantize"),
                ("cache", "prune", "--unreachable"), ("cache", "stats"), ("cache", "path"),
            )
        ),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_verb_that_needs_no_torch_works_without_it(process, arguments: tuple[str, ...]) -> None:
    if len(arguments) == 3 and arguments[1] in ("why", "show"):
        process("warmup", *ARCH, "--variant", "quantize.quantize")
    done = jitmx(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench",), ("bench", "moe"), ("tune", "linear", "--model", "gpt-oss-120b"),
        ("tune", "moe", "--model", "gpt-oss-20b"), ("tune", "linear", "-n", "64", "-k", "64", "-m", "1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_verb_that_needs_torch_says_so_in_one_line(arguments: tuple[str, ...]) -> None:
    done = jitmx(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {arguments[0]} {INSTALL}")
