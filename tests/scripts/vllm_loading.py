"""Load a checkpoint into vLLM's own gpt-oss model on the CPU and print what its parameters hold, as JSON.

    VLLM_TARGET_DEVICE=cpu python vllm_loading.py FOLDER

Every MXFP4 backend of vLLM needs a device, so one is named to the MoE layer outright; weights are made and loaded by
vLLM's code, and nothing is run.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, backend_to_kernel_cls
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model


def digest(tensor: torch.Tensor) -> str:
    kept = tensor.detach().contiguous()
    return hashlib.sha256((kept.float() if kept.is_floating_point() else kept).numpy().tobytes()).hexdigest()


def main() -> None:
    backend = Mxfp4MoeBackend.EMULATION
    mxfp4.select_mxfp4_moe_backend = lambda moe: (backend, backend_to_kernel_cls(backend)[0])
    asked = EngineArgs(model=sys.argv[1], enforce_eager=True, max_model_len=512, dtype="bfloat16")
    engine = asked.create_engine_config()
    with set_current_vllm_config(engine), tempfile.NamedTemporaryFile() as meeting:
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{meeting.name}", backend="gloo"
        )
        initialize_model_parallel(1, 1)
        model = initialize_model(engine, model_config=engine.model_config)
        loaded = model.load_weights(get_model_loader(engine.load_config).get_all_weights(engine.model_config, model))
        parameters = dict(model.named_parameters())
        print(
            json.dumps(
                {
                    "unloaded": sorted(set(parameters) - set(loaded)),
                    "parameters": {name: [list(value.shape), digest(value)] for name, value in parameters.items()},
                }
            )
        )


if __name__ == "__main__":
    main()
