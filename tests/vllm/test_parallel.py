"""Experts over data parallel ranks, each a process: vLLM gathers tokens and logits, and adds up what ranks make."""

# ruff: noqa: E402

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

vllm_world = pytest.importorskip("vllm_world")

from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from jitmx.kernels.moe.arguments import GATE
from jitmx.vllm import facts
from vllm_ranks import TESTS, Ranks
from vllm_world import decoded, error

Checkpoint = tuple[Path, dict[str, torch.Tensor]]
# Tokens of each data parallel rank, call by call: of both, and of one while the other waits.
CALLS = [[3, 2], [2, 0]]

_RANK = """
import json, os, sys
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
sys.path.insert(0, sys.argv[1])
rank, meeting, folder, options, calls = int(sys.argv[2]), sys.argv[3], sys.argv[4], *map(json.loads, sys.argv[5:])
import simulated_card, torch, vllm_world
torch.accelerator.empty_cache = lambda: None
import jitmx.vllm
from jitmx import arch
from jitmx.vllm import ahead, facts, warmup
warmed = []
facts.target = lambda: (arch.parse("sm_90"), "")
warmup.prepare, ahead.begin = warmed.append, lambda needed: None
jitmx.vllm.register()
from torch import distributed
from vllm.config import set_current_vllm_config
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model

# What vLLM has for GPUs only.
def all_gatherv(self, x, dim=0, sizes=None):
    if isinstance(x, list):
        return [all_gatherv(self, item, dim, sizes) for item in x]
    parts = [x.clone() if i == self.rank_in_group else x.new_empty(n, *x.shape[1:]) for i, n in enumerate(sizes)]
    for source, part in zip(self.ranks, parts):
        distributed.broadcast(part, source, group=self.device_group)
    return torch.cat(parts)

def reduce_scatterv(self, x, dim=0, sizes=None):
    y = x.float()
    distributed.all_reduce(y, group=self.device_group)
    return y.to(x.dtype).split(sizes)[self.rank_in_group]

CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
config = EngineArgs(
    model=folder, dtype="bfloat16", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True,
    distributed_executor_backend="mp", max_num_batched_tokens=255, **options,
).create_engine_config()
parallel = config.parallel_config
parallel.distributed_executor_backend = "external_launcher"  # one process group for all
tensor, size = parallel.tensor_parallel_size, parallel.tensor_parallel_size * parallel.data_parallel_size
parallel.rank, parallel.data_parallel_rank = rank % tensor, rank // tensor
found = []
with vllm_world.world(rank, size, meeting, config), simulated_card.on_cpu("sm_90a"), torch.no_grad():
    model = get_model(vllm_config=config)
    for tokens in calls:
        mine = tokens[parallel.data_parallel_rank]
        x = torch.randn(mine, 64, generator=torch.Generator().manual_seed(parallel.data_parallel_rank)).bfloat16()
        across = torch.tensor(tokens, dtype=torch.int32)
        with set_forward_context(None, config, num_tokens=mine, num_tokens_across_dp=across):
            found.append((x, model.model.layers[0].mlp(x)))
experts = model.model.layers[0].mlp.experts.routed_experts
torch.save({"found": found, "warmed": repr(warmed[-1]), "local": experts.w13_weight.shape[0],
            "method": type(experts.quant_method).__name__}, f"{meeting}.{rank}")
"""


def ranks_of(ranks: Ranks, folder: Path, meeting: Path, size: int, **options: Any) -> list[dict[str, Any]]:
    """What so many ranks have made of `CALLS`."""
    given = [str(meeting), str(folder), json.dumps(options), json.dumps(CALLS)]
    ranks.run(_RANK, [[str(TESTS), str(rank), *given] for rank in range(size)], meeting.parent)
    return [torch.load(f"{meeting}.{rank}") for rank in range(size)]


def expected(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    """What transformers makes of the experts of the first layer."""
    folder, tensors = checkpoint
    prefix = "model.layers.0.mlp."
    mlp = GptOssMLP(GptOssConfig.from_pretrained(folder)).double()
    state = {f"router.{part}": tensors[f"{prefix}router.{part}"].double() for part in ("weight", "bias")}
    for name in ("gate_up_proj", "down_proj"):
        state[f"experts.{name}"] = decoded(tensors, f"{prefix}experts.{name}").transpose(1, 2)
        state[f"experts.{name}_bias"] = tensors[f"{prefix}experts.{name}_bias"].double()
    mlp.load_state_dict(state)
    with torch.no_grad():
        y = mlp(x.double()[None])
    return (y[0] if isinstance(y, tuple) else y)[0]


@pytest.mark.parametrize(
    ("options", "size", "local", "rows"),
    [
        # Ranks share each expert.
        ({"data_parallel_size": 2}, 2, 4, 510),
        # Each has two experts of four.
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, 2, 2, 510),
        # Tensor parallel ranks split the tokens of their data parallel rank; each has one expert.
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}, 4, 1, 512),
    ],
    ids=["data", "data and experts", "data, tensor and experts"],
)
def test_data_parallel_ranks_have_their_own_tokens_back_even_where_some_have_none(
    host: Any, ranks: Ranks, checkpoint: Checkpoint, tmp_path: Path, options: dict[str, Any], size: int, local: int,
    rows: int,
) -> None:  # fmt: skip
    for rank in ranks_of(ranks, checkpoint[0], tmp_path / "meeting", size, **options):
        assert (rank["method"], rank["local"]) == ("JitmxMoEMethod", local)
        assert f"rows={rows}, experts=4, local={local}, mapped={local < 4}," in rank["warmed"]
        assert "routing='logits'" in rank["warmed"]
        for x, y in rank["found"]:
            assert y.shape == x.shape
            assert len(x) == 0 or error(y, expected(checkpoint, x)) < GATE


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nixl_ep", "flashinfer_nvlink_one_sided"])
def test_ranks_that_exchange_tokens_by_other_kernels_leave_the_experts_to_vllm(host: Any, backend: str) -> None:
    layer = host.build().model.layers[0].mlp.experts.routed_experts
    alone = layer.moe_config.moe_parallel_config
    shared = replace(alone, dp_size=2, ep_size=2, use_ep=True)
    layer.moe_config.moe_parallel_config = shared
    assert facts.against_moe(layer) == ""
    layer.moe_config.moe_parallel_config = replace(shared, all2all_backend=backend)
    remedy = "with --all2all-backend allgather_reducescatter jitmx serves the experts"
    assert facts.against_moe(layer) == f"ranks exchange tokens by {backend}; {remedy}"
    layer.moe_config.moe_parallel_config = replace(shared, enable_eplb=True)
    assert "EPLB" in facts.against_moe(layer)
