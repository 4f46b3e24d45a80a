"""A bundle that was made where no GPU is seen serves the card, and nothing is compiled on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jitmx
from jitmx.runtime import card

_PROJECT = Path(jitmx.__file__).parents[1]
_MODEL = ("--model", "gpt-oss-20b", "--layers", "moe,qkv,o,lm_head", "--tokens", "64")

_SERVE = """
import json, sys
import torch
import jitmx
from jitmx.cli.served import ServedModel
from jitmx.runtime import card, load
from jitmx.toolchain import nvrtc


def refuse(*arguments, **more):
    raise AssertionError("the compiler is called")


nvrtc.compile = nvrtc.scan = refuse
model = ServedModel("gpt-oss-20b", "moe,qkv,o,lm_head", 64, 1, False, 1024, 131072, 16, "auto")
variants = model.variants((card.arch(0),), (card.multiprocessors(0),))
torch.zeros(1, device="cuda")
for variant in variants:
    load.function(variant, 0)
w = torch.randn(201088, 2880, device="cuda", dtype=torch.bfloat16)
packed = jitmx.pack_weight(jitmx.quantize(w))
errors = []
for rows in (1, 3, 64):
    x = torch.randn(rows, 2880, device="cuda", dtype=torch.bfloat16)
    y, wanted = jitmx.linear(x, packed).float(), (x @ w.T).float()
    errors.append(float((y - wanted).norm() / wanted.norm()))
json.dump({"loaded": len(variants), "errors": errors}, sys.stdout)
"""


def test_a_bundle_made_without_a_gpu_serves_the_card_with_no_compile(tmp_path: Path) -> None:
    path = tmp_path / "gpt-oss.jitmx"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JITMX_")}
    clean |= {"PYTHONPATH": f"{_PROJECT}:{os.environ.get('PYTHONPATH', '')}"}
    target = ("--arch", str(card.arch(0)), "--multiprocessors", str(card.multiprocessors(0)))
    create = [sys.executable, "-m", "jitmx.cli", "bundle", "create", *_MODEL, *target, "-q", "-o", str(path)]
    build = clean | {"CUDA_VISIBLE_DEVICES": "", "JITMX_CACHE_DIR": str(tmp_path / "build")}
    done = subprocess.run(create, env=build, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    serve = clean | {
        "JITMX_MODE": "required", "JITMX_CACHE_DIR": str(tmp_path / "serve"), "JITMX_SITE_CACHE": str(path),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", _SERVE], env=serve, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["loaded"] > 10
    assert max(said["errors"]) < 0.2, "further from the product of the values than MXFP4 is"
    assert not list((tmp_path / "serve").rglob("*.cubin"))
