"""Work inside one engine, in a process of its own: `python -m scripts.protocol.worker ASKED.json ANSWER.json`.

ASKED names the engine, its arguments and tasks in order; ANSWER holds a result a task, under its name or its `as`. The
engine is made once, so that starting it is paid once; the process ends with it, so that no memory of one configuration
is left to the next.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.protocol import profiles
from scripts.protocol.report import save

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Row = npt.NDArray[np.float32]

# For every engine: nothing that asks the network, and no sampler that FlashInfer would have to build first.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
# Tokens that the reference reads at a time.
CHUNK = 1024
# For an engine that is not a server: one process, so that the profiler sees its kernels.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Engine:
    """vLLM's engine, and what a level asks of it. Prompts are lists of token numbers.

    Args:
        options: arguments of `vllm.LLM`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.plugins import load_general_plugins

        started = time.perf_counter()
        load_general_plugins()  # the engine would do so next
        self.plugins_s = time.perf_counter() - started
        self._llm: Any = LLM(**options)
        self._config: Any = self._llm.llm_engine.vllm_config
        self.startup_s = time.perf_counter() - started
        self._params: Any = SamplingParams
        config = self._config.model_config.hf_config
        self.vocab, self.layers = int(config.vocab_size), int(config.num_hidden_layers)
        self._requests = 0

    def prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        """Random prompts, the same from a seed."""
        return random_prompts(self.vocab, [tokens] * count, seed)

    def generate(self, prompts: list[list[int]], tokens: int, adapter: str | None = None, **sampling: Any) -> list[Any]:
        """What vLLM answers, one a prompt: exactly `tokens` greedy tokens each.

        Args:
            adapter: folder of a LoRA adapter that is applied.
        """
        params = self._params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        with_lora = {}
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            with_lora["lora_request"] = LoRARequest("adapter", 1, adapter)
        answers: list[Any] = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False, **with_lora
        )
        for answer in answers:
            found = len(answer.outputs[0].token_ids)
            if found != tokens:
                raise RuntimeError(f"a completion has {found} tokens; {tokens} were asked for")
        return answers

    def logits(self, prompts: list[list[int]], adapter: str | None = None) -> tuple[list[Row], list[int]]:
        """Logits [vocab] after each prompt, all asked for at once, and how many of its tokens were known."""
        import numpy as np

        rows, known = [], []
        for answer in self.generate(prompts, 1, adapter, logprobs=-1, flat_logprobs=True):
            flat = answer.outputs[0].logprobs
            span = slice(flat.start_indices[0], flat.end_indices[0])
            row = np.full(self.vocab, np.nan, np.float32)
            row[np.asarray(flat.token_ids[span])] = np.asarray(flat.logprobs[span], np.float32)
            rows.append(row)
            known.append(answer.num_cached_tokens or 0)
        return rows, known

    def greedy(self, prompts: list[list[int]], tokens: int, adapter: str | None = None) -> list[list[int]]:
        """The most likely token after each prompt, so many times, all prompts at once."""
        return [list(answer.outputs[0].token_ids) for answer in self.generate(prompts, tokens, adapter)]

    def memory(self) -> dict[str, int] | None:
        """Bytes that torch had allocated at most, and those of the KV cache among them; None without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return None
        held: dict[int, int] = {}
        for layer in self._config.compilation_config.static_forward_context.values():
            found = getattr(layer, "kv_cache", ())
            for tensor in found if isinstance(found, (list, tuple)) else (found,):
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return {"peak_bytes": int(torch.cuda.max_memory_allocated()), "cache_bytes": sum(held.values())}

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Wall time of `generate`."""
        started = time.perf_counter()
        self.generate(prompts, tokens)
        return time.perf_counter() - started

    def arrivals(self, prompt: list[int], tokens: int) -> list[float]:
        """Seconds from the request to each token, for one request alone."""
        engine = self._llm.llm_engine
        params = self._params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._requests += 1
        found: list[float] = []
        started = time.perf_counter()
        engine.add_request(f"protocol-{self._requests}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for answer in engine.step():
                new = len(answer.outputs[0].token_ids) - len(found)
                found += [time.perf_counter() - started] * new
        return found


class Reference:
    """transformers' gpt-oss in float32, MXFP4 weights decoded: what every engine is compared with.

    `CHUNK` tokens of a prompt are read at a time, so that their attention to all before them has room.

    Args:
        options: `model`, a folder, and `device`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, Mxfp4Config

        started = time.perf_counter()
        model, info = AutoModelForCausalLM.from_pretrained(
            options["model"], quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32,
            attn_implementation="eager", output_loading_info=True,
        )  # fmt: skip
        if any(info.values()):
            raise RuntimeError(f"transformers did not take the checkpoint as it is: {info}")
        self._model: Any = model.float().to(options["device"]).eval()
        self.startup_s, self.plugins_s = time.perf_counter() - started, 0.0
        self.vocab, self.layers = int(model.config.vocab_size), int(model.config.num_hidden_layers)

    def logits(self, prompts: list[list[int]], adapter: None = None) -> tuple[list[Row], list[int]]:
        """Logits [vocab] of the token after each prompt, one after another; nothing is known before."""
        import torch

        rows: list[Row] = []
        with torch.inference_mode():
            for prompt in prompts:
                cache = None
                for some in torch.tensor([prompt], device=self._model.device).split(CHUNK, dim=1):
                    answer = self._model(some, past_key_values=cache, use_cache=True, logits_to_keep=1)
                    cache = answer.past_key_values
                rows.append(answer.logits[0, -1].float().cpu().numpy())
        return rows, [0] * len(rows)

    def greedy(self, prompts: list[list[int]], tokens: int, adapter: None = None) -> list[list[int]]:
        """The most likely token after each prompt, so many times; prompts of one length."""
        import torch

        with torch.inference_mode():
            given = torch.tensor(prompts, device=self._model.device)
            found = self._model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        new: list[list[int]] = found[:, given.shape[1] :].tolist()
        return new


def random_prompts(vocab: int, lengths: list[int], seed: int) -> list[list[int]]:
    """Prompts of these lengths, the same from a seed; the last two tokens of the vocabulary are special."""
    source = random.Random(f"{seed}/{lengths}")
    return [[source.randrange(vocab - 2) for _ in range(length)] for length in lengths]


def profile(engine: Engine, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels of decoding at some batches and of some prompts, by torch's profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    found = []
    for phase, batch, prompt, tokens in [
        *((f"decode {batch}", batch, 16, asked["tokens"]) for batch in asked["batches"]),
        *((f"prefill {prompt}", 1, prompt, 1) for prompt in asked["prompts"]),
    ]:
        prompts = engine.prompts(batch, prompt, asked["seed"])
        engine.generate(prompts, 2)
        with record(activities=[ProfilerActivity.CUDA]) as trace:
            engine.generate(prompts, tokens)
        events = [(e.name, float(e.device_time_total)) for e in trace.events() if e.device_type.name == "CUDA"]
        kernels = ((name, us) for name, us in events if not name.startswith(("Memcpy", "Memset")))
        found.append(profiles.of_events(phase, kernels, tokens, engine.layers).as_dict())
    return found


def groups(count: int, alone: int, at_once: int) -> list[int]:
    """Sizes of groups in which `count` prompts are asked for: the first `alone` one by one, then so many at once."""
    rest = max(0, count - alone)
    sizes = [1] * min(count, alone) + [at_once] * (rest // at_once)
    return sizes + [rest % at_once] * (rest % at_once > 0)


def _grouped(asked: dict[str, Any]) -> Iterator[list[list[int]]]:
    """The prompts of a task, in its groups."""
    assert sum(asked["groups"]) == len(asked["prompts"]), "every prompt is in a group"
    left = iter(asked["prompts"])
    for size in asked["groups"]:
        yield list(itertools.islice(left, size))


def logits(engine: Engine | Reference, asked: dict[str, Any]) -> dict[str, Any]:
    """Logits [vocab] of the token after each prompt, into the NumPy file `asked["into"]`.

    Where `twice` is asked for, what is kept is of the second time, when the cache knows the prompt.
    """
    import numpy as np

    table, known = [], []
    for prompts in _grouped(asked):
        for _ in range(1 + asked.get("twice", False)):
            rows, cached = engine.logits(prompts, asked.get("adapter"))
        table += rows
        known += cached
    np.save(asked["into"], np.stack(table))
    return {"shape": [len(table), len(table[0])], "finite": bool(np.isfinite(table).all()), "known": known}


def greedy(engine: Engine | Reference, asked: dict[str, Any]) -> list[list[int]]:
    """Greedy tokens after each prompt, in groups of prompts at a time."""
    return [row for some in _grouped(asked) for row in engine.greedy(some, asked["tokens"], asked.get("adapter"))]


def bench(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """Decode and prefill rates, latencies of one request alone, and memory.

    A decode step is the slope between two lengths of output, so that prefill and the host's start fall out.
    """
    host = [host_loop()]
    rounds, prompt, long = asked["rounds"], asked["decode_prompt"], asked["decode_tokens"]
    short, seed = 8, asked["seed"]
    engine.seconds(engine.prompts(1, 512, seed), 8)
    decode = []
    for batch in asked["batches"]:
        prompts = engine.prompts(batch, prompt, seed)
        engine.seconds(prompts, 4)
        step = (
            min(engine.seconds(prompts, short + long) for _ in range(rounds))
            - min(engine.seconds(prompts, short) for _ in range(rounds))
        ) / long
        decode.append({"batch": batch, "ms_step": step * 1e3, "tokens_s": batch / step})
    prefill = []
    for tokens in asked["prefill"]:
        best = min(engine.seconds(engine.prompts(1, tokens, seed + k), 1) for k in range(rounds + 1))
        prefill.append({"prompt": tokens, "ms": best * 1e3, "tokens_s": tokens / best})
    lone = [engine.arrivals(engine.prompts(1, asked["prompt"], seed + k)[0], 32) for k in range(asked["requests"])]
    return {
        "host_loop_ms": [*host, host_loop()],
        "decode": decode,
        "prefill": prefill,
        "latency": {
            "ttft_ms": spread([times[0] * 1e3 for times in lone]),
            "tpot_ms": spread([(times[-1] - times[0]) / (len(times) - 1) * 1e3 for times in lone]),
            "itl_ms": spread([(b - a) * 1e3 for times in lone for a, b in itertools.pairwise(times)]),
            "e2e_ms": spread([times[-1] * 1e3 for times in lone]),
        },
        "memory": engine.memory(),
    }


def host_loop() -> float:
    """Milliseconds of a fixed loop in Python, best of five: hosts with two clock states show which one they are in."""
    return min(timeit.repeat(lambda: sum(range(200_000)), number=1, repeat=5)) * 1e3


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and count."""
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": statistics.median(ordered), "p99": last, "count": len(ordered)}


def late() -> list[str]:
    """Kernels of jitmx that were loaded for a request, after warm-up; none where its plugin is not at work."""
    monitor: Any = sys.modules.get("jitmx.vllm.monitor")
    return [] if monitor is None else list(monitor.late())


TASKS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "profile": profile, "logits": logits, "greedy": greedy, "bench": bench
}  # fmt: skip


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    engines: dict[str, type[Engine] | type[Reference]] = {"vllm": Engine, "transformers": Reference}
    engine = engines[asked["engine"]](asked["options"])
    answers = {task.get("as", task["task"]): TASKS[task["task"]](engine, task) for task in asked["tasks"]}
    about = {
        "startup_s": engine.startup_s, "plugins_s": engine.plugins_s, "layers": engine.layers, "vocab": engine.vocab,
        "late": late(),
    }  # fmt: skip
    save({**about, **answers}, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
