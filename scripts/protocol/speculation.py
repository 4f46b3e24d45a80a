"""What speculation gains in an engine: steps and tokens of gpt-oss with an Eagle3 draft and without, jitmx and stock.

Random weights accept nothing, so that acceptance is given: vLLM's synthetic rejection takes each position of a proposal
with a stated probability, the same for every engine. The pair of `bigram` has acceptance of its own, which is measured.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.protocol.report import ProtocolError

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("jitmx", "stock")
_ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # in the caller's process scheduling stands in the way of the GPU
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model sends a function there
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Batches of up to eight requests, each with up to three proposed tokens.
_GRAPHS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
_COUNTERS = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}
# Tokens of the shorter run and of the longer, whose difference is decoding alone.
_SHORT, _LONG, _RUNS = 96, 352, 4


@dataclass(frozen=True)
class Engine:
    """One engine to time.

    Attributes:
        side: "jitmx" or "stock".
        k: tokens that are proposed a step, 0 without speculation.
        rates: the part of proposals whose first 1, 2 ... k tokens are accepted; empty where that is not given.
        options: arguments of vllm.LLM.
    """

    side: str
    k: int
    rates: tuple[float, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """A text that no other has."""
        return f"{self.side} k={self.k}" + (f" {' '.join(f'{rate:g}' for rate in self.rates)}" if self.rates else "")


def engine(
    side: str, target: Path, draft: Path, k: int, rates: Sequence[float] = (), *, layers: str = "all",
    draft_layers: str = "all", real: bool = False, more: Mapping[str, Any] | None = None,
) -> Engine:  # fmt: skip
    """An engine of a target and its draft.

    Args:
        rates: of synthetic acceptance; as many as k, or more.
        layers, draft_layers: that jitmx serves, where the side is its.
        real: the target's weights are its checkpoint's, not random ones.
        more: arguments of vllm.LLM, over these.

    Raises:
        ProtocolError: fewer rates than tokens.
    """
    if rates and len(rates) < k:
        raise ProtocolError(f"{len(rates)} rates for {k} tokens: give one a position")
    options: dict[str, Any] = {
        "model": str(target), "load_format": "auto" if real else "dummy", "skip_tokenizer_init": True,
        "max_num_seqs": 8, "max_num_batched_tokens": 8192, "max_model_len": 8192, "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False, "disable_log_stats": False, "seed": 0,
        "compilation_config": {"cudagraph_capture_sizes": _GRAPHS},
    }  # fmt: skip
    if side == "jitmx":
        own = {"mxfp4_layers": layers, **({"draft_layers": draft_layers} if k else {})}
        options["additional_config"] = {"jitmx": own}
    else:
        options["attention_config"] = {"backend": "FLASH_ATTN"}
    if k:
        options["speculative_config"] = {
            "method": "eagle3", "model": str(draft), "num_speculative_tokens": k,
            # Dummy weights of a draft have no d2t, and count as a draft without a head.
            "draft_load_config": {"load_format": "auto"},
        }  # fmt: skip
        if rates:
            options["speculative_config"] |= {
                "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates[:k])
            }  # fmt: skip
    return Engine(side, k, tuple(rates[:k]), options | dict(more or {}))


def run(one: Engine, batches: Sequence[int], *, prompts: Sequence[Sequence[int]] = (), log: Path) -> dict[str, Any]:
    """What `work` finds, in a process of its own.

    Raises:
        ProtocolError: it failed; the message has the end of its log.
    """
    asked = asdict(one) | {"batches": list(batches), "prompts": [list(each) for each in prompts]}
    environ = os.environ | _ENVIRON | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if one.side == "stock":
        environ["VLLM_PLUGINS"] = ""
    log.parent.mkdir(parents=True, exist_ok=True)
    result = log.with_suffix(".json")
    with log.open("w") as output:
        words = [sys.executable, "-m", "scripts.protocol.speculation", str(result), json.dumps(asked)]
        done = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=ROOT, check=False)
    if done.returncode or not result.is_file():
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise ProtocolError(f"{one.name} ended with {done.returncode}; {log}:\n{end}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def gains(found: Mapping[str, Mapping[str, Any]], engines: Iterable[Engine], batch: int) -> list[dict[str, Any]]:
    """A row an engine: tokens a second, a step's time, tokens a step, and how many times the speed without speculation.

    Args:
        found: by the name of each engine, what `run` found.
    """
    rows = []
    engines = list(engines)
    alone = {one.side: found[one.name]["batches"][str(batch)]["tok_s"] for one in engines if not one.k}
    for one in engines:
        own = found[one.name]["batches"][str(batch)]
        gain = round(own["tok_s"] / alone[one.side], 3) if one.side in alone else None
        rows.append({"side": one.side, "k": one.k, "rates": list(one.rates), **own, "gain": gain})
    return rows


def differing(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> int:
    """How many texts of two engines part somewhere."""
    return sum(list(a) != list(b) for a, b in zip(first, second, strict=True))


def work(asked: Mapping[str, Any]) -> dict[str, Any]:  # pragma: no cover - an engine on a card
    """Figures of one engine: by batch tokens a second, milliseconds a step and tokens a step; texts of prompts."""
    from vllm import LLM, SamplingParams

    llm = LLM(**asked["options"])
    if asked["options"]["load_format"] == "dummy":
        llm.apply_model(_spread_routing)
    counts = {"drafts": 0, "accepted": 0}

    def count() -> dict[str, int]:
        by_name = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        return {name: int(by_name.get(counter, 0)) for name, counter in _COUNTERS.items()}

    def generate(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin, [list(one.outputs[0].token_ids) for one in done]

    random.seed(0)
    most = _vocabulary(asked["options"]["model"]) - 1000
    found: dict[str, Any] = {"batches": {}, "texts": []}
    for batch in asked["batches"]:
        prompts = [[random.randrange(min(1000, most // 2), most) for _ in range(128)] for _ in range(batch)]
        generate(prompts, 8)
        before = count()
        took = {tokens: min(generate(prompts, tokens)[0] for _ in range(_RUNS)) for tokens in (_SHORT, _LONG)}
        counts = {name: value - before[name] for name, value in count().items()}
        a_step = 1 + counts["accepted"] / counts["drafts"] if counts["drafts"] else 1.0
        seconds = (took[_LONG] - took[_SHORT]) / (_LONG - _SHORT)
        found["batches"][str(batch)] = {
            "tok_s": round(batch / seconds, 1), "ms_step": round(seconds * a_step * 1e3, 3),
            "tokens_step": round(a_step, 3),
        }  # fmt: skip
    if asked["prompts"]:
        before = count()
        found["texts"] = generate(asked["prompts"], 256)[1]
        found["counts"] = {name: value - before[name] for name, value in count().items()}
    return found


def _vocabulary(folder: str) -> int:  # pragma: no cover - of an engine on a card
    return int(json.loads((Path(folder) / "config.json").read_text())["vocab_size"])


def _spread_routing(model: Any) -> int:  # pragma: no cover - in an engine on a card
    """Give norms, embeddings and router a trained model's scale: dummy ones send all tokens to the same experts."""
    import torch

    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            continue
        if "norm" in name:
            parameter.data.fill_(1.0)
        elif "embed" in name:
            parameter.data.normal_()
        elif "router" in name and parameter.dim() == 2:
            parameter.data.normal_(0, 0.02)
        elif "router" in name:
            parameter.data.zero_()
    return 0


if __name__ == "__main__":  # pragma: no cover - `run` starts it
    Path(sys.argv[1]).write_text(json.dumps(work(json.loads(sys.argv[2]))))
