"""Print, as JSON, what of this vLLM the protocol relies on: `VLLM_TARGET_DEVICE=cpu python vllm_interface.py WORD…`.

WORDs are options of `vllm serve`; they are read by vLLM's own parser.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path

import vllm
from vllm import LLM
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

# Where vLLM says how long a phase of its start took, and the words.
SAID = {
    "v1/worker/gpu/model_runner.py": "Model loading took %s GiB memory and %.6f seconds",
    "v1/worker/gpu_model_runner.py": "Model loading took %s GiB memory and %.6f seconds",
    "v1/engine/core.py": "init engine (profile, create kv cache, warmup model) took ",
}


def main() -> None:
    served = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
    print(
        json.dumps(
            {
                "engine": [item.name for item in dataclasses.fields(EngineArgs)],
                "sampling": list(inspect.signature(SamplingParams).parameters),
                "answer": list(inspect.signature(RequestOutput).parameters),
                "generate": list(inspect.signature(LLM.generate).parameters),
                "adapter": list(inspect.signature(LoRARequest).parameters)[:3],
                "output": [item.name for item in dataclasses.fields(CompletionOutput)],
                "logprobs": [item.name for item in dataclasses.fields(FlatLogprobs)],
                "completion": list(CompletionRequest.model_fields),
                "add_request": list(inspect.signature(LLMEngine.add_request).parameters),
                "compilation": [item.name for item in dataclasses.fields(CompilationConfig)],
                "keeps_its_configuration": "self.vllm_config = " in inspect.getsource(LLMEngine.__init__),
                "plugins": list(inspect.signature(load_general_plugins).parameters),
                "silent": [
                    name for name, words in SAID.items() if words not in (Path(vllm.__path__[0]) / name).read_text()
                ],
                "loop": [name for name in ("step", "has_unfinished_requests") if hasattr(LLMEngine, name)],
                "served": {name: str(getattr(served, name)) for name in ("additional_config", "max_model_len", "seed")},
            }
        )
    )


if __name__ == "__main__":
    main()
