"""Warm-up by a model's sizes makes what vLLM's layers of that model ask for, no kernel less and none more."""

# ruff: noqa: E402

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from click.testing import CliRunner
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.sample.sampler import Sampler

from jitmx import arch, models, settings
from jitmx.cli import main
from jitmx.serving.model import of_model
from jitmx.serving.needed import Needed
from jitmx.toolchain import nvrtc
from jitmx.vllm import monitor, packing, warmup
from jitmx.vllm.request import requested
from vllm_ranks import TESTS, Ranks

TARGET = arch.parse("sm_90")
LORA = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["o_proj"]}
ALL = {"mxfp4_layers": "all"}


def by_sizes(folder: Path, options: Any = None, *, lora: bool = False, **more: Any) -> set[Needed]:
    asked = requested(options)
    how = {"fuse_norm": asked.fuse_norm, "all_scales": asked.all_scales, "x_format": asked.x_format}
    model = models.find(str(folder))
    return set(of_model(model, TARGET, asked.served(lora), lora=lora, **how, **more))


@pytest.mark.parametrize(
    ("options", "engine", "environ"),
    [
        (None, {}, {}),
        (ALL, {}, {}),
        (ALL | {"fuse_norm": False}, {}, {}),
        (ALL | {"all_scales": True}, {}, {}),
        ({"mxfp4_layers": "moe,qkv,lm_head:mxfp8"}, {}, {}),
        ({"mxfp4_layers": "moe,qkv:mxfp8,o"}, {}, {}),
        (ALL, LORA, {}),
        (None, {}, {"JITMX_MXFP4_LAYERS": "moe,o", "VLLM_MXFP4_QUANTIZE_QKV": "1"}),
        ({"moe_activation": "mxfp8"}, {}, {}),
    ],
)
def test_layers_by_sizes_are_those_that_vllm_builds(
    host: Any, monkeypatch: pytest.MonkeyPatch, options: Any, engine: dict[str, Any], environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings.reload()
    said = {} if options is None else {"jitmx": options}
    with simulated_card.on_cpu("sm_90a"):
        host.build(load=True, max_num_batched_tokens=512, additional_config=said, **engine)
    assert set(host.warmed) == by_sizes(host.folder, options, tokens=512, lora=bool(engine))
    assert set(host.begun) == set(host.warmed)


_RANK = """
import os, sys
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
sys.path.insert(0, sys.argv[1])
rank, meeting, folder, warmed, begun = int(sys.argv[2]), sys.argv[3], sys.argv[4], [], []
import simulated_card, torch, vllm_world
torch.accelerator.empty_cache = lambda: None
import jitmx.vllm
from jitmx import arch
from jitmx.vllm import ahead, facts, warmup
facts.target = lambda: (arch.parse("sm_90"), "")
warmup.prepare, ahead.begin = warmed.append, begun.append
jitmx.vllm.register()
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
config = EngineArgs(
    model=folder, dtype="bfloat16", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True,
    tensor_parallel_size=2, distributed_executor_backend="mp", max_num_batched_tokens=512,
    additional_config={"jitmx": {"mxfp4_layers": "all"}},
).create_engine_config()
config.parallel_config.rank = rank
with vllm_world.world(rank, 2, meeting), set_current_vllm_config(config), simulated_card.on_cpu("sm_90a"):
    get_model(vllm_config=config)
assert set(begun) == set(warmed), (begun, warmed)
open(f"{meeting}.{rank}", "w").write("\\n".join(sorted(set(map(repr, warmed)))))
"""


def test_layers_of_two_ranks_by_sizes_are_those_that_vllm_builds_in_two_processes(
    host: Any, ranks: Ranks, tmp_path: Path
) -> None:
    meeting = str(tmp_path / "meeting")
    ranks.run(_RANK, [[str(TESTS), str(rank), meeting, str(host.folder)] for rank in range(2)], tmp_path)
    found = {line for rank in range(2) for line in Path(f"{meeting}.{rank}").read_text().splitlines()}
    assert found == set(map(repr, by_sizes(host.folder, ALL, tokens=512, ranks=2))) and len(found) == 6


def test_a_cache_that_warmup_filled_by_a_models_name_serves_it_where_nothing_may_be_compiled(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warmup, "_ready", set())
    monkeypatch.setattr(packing, "_took", [])
    monkeypatch.setattr(packing, "_spent", [])
    monkeypatch.setattr(monitor, "_sealed", None)
    settings.reload()
    words = ["--model", str(host.folder), "--layers", "all", "--tokens", "16", "--json", "-q"]
    done = CliRunner().invoke(main, ["warmup", "--arch", "sm_90", *words])
    assert done.exit_code == 0, done.output
    kernels = json.loads(done.stdout)
    assert kernels["failed"] == 0 and kernels["compiled"] == len(kernels["kernels"])
    monkeypatch.setenv("JITMX_MODE", "required")
    settings.reload()
    for name in ("compile", "scan"):
        monkeypatch.setattr(nvrtc, name, None)
    monkeypatch.setattr(warmup, "prepare", host.prepare)
    config = host.config(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=16, additional_config={"jitmx": ALL})
    registry = JitWarmupRegistry(config)
    with vllm_world.world(), set_current_vllm_config(config), registry.activate(), simulated_card.on_cpu("sm_90a"):
        model = get_model(vllm_config=config)
        made = Sampler.__new__(Sampler)
        made.needs_logits_processing = np.zeros(4, bool)
        state = resolve_model_state_cls(config, model)(config, model, None, torch.device("cpu"))
        assert state.custom_sampler(made) is not None
    registry.warmup()
    # Two layers of QKV, O and two weights of experts, and the head.
    (said,) = (message for _, message in host.said if "weights were packed in" in message)
    times = re.fullmatch(r"jitmx: 9 weights were packed in ([\d.]+) s, of ([\d.]+) s that layers took with .*", said)
    assert times and 0 < float(times[1]) <= float(times[2]), said
    # And every kernel that was made is one that was asked for.
    assert {one.variant.name for one in warmup._ready} == {one["name"] for one in kernels["kernels"]}
