"""Stands in for vLLM where there is no GPU: the calls that the protocol makes, answered from a few lines of arithmetic.

What it serves is told by its arguments, as vLLM is told; how it misbehaves, by the variable FAKE_VLLM, JSON:

    noise    configuration to the relative error of its logits (stock backends differ by 0.01 by default)
    kernels  configuration to {kernel name: launches a pass}, what a profiler is to see
    slow     configuration to the seconds of a decode step
    loading  configuration to the seconds that it says loading took (0.5 by default; null: it says nothing)
    warmup   the same of warm-up (7.65)
    warm     whether jitmx's kernels are in its cache (true by default)
    meet     a folder and a number: an engine starts when so many have come there
    fail     configurations whose engine does not start
    late     whether a server compiles a kernel while it serves
    tracebacks  levels of log, each of a line with a traceback that a server writes
    flaky    whether a server's answers change from request to request
    lora     whether an adapter that is asked for is applied (true by default)
    long     configuration to the error of its logits after prompts over 500 tokens
    at       configuration to {tokens of a prompt: error of its logits after prompts of that length}
    at_known the same, only where the cache knows how the prompt starts
    sees     configuration to how many of the last tokens its logits depend on (4 by default)
    deaf     whether vLLM serves attention although jitmx was asked to

A configuration is the stock backend, or `jitmx:` with its layers, and `+attention` where that is jitmx's.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

TOLD = json.loads(os.environ.get("FAKE_VLLM", "{}"))


def name_of(options: dict) -> str:
    """Of the configuration."""
    asked = options.get("additional_config", {}).get("jitmx")
    layers = None if asked is None else asked["mxfp4_layers"]
    if os.environ.get("VLLM_NO_USAGE_STATS") != "1" or os.environ.get("HF_HUB_OFFLINE") != "1":
        raise RuntimeError("an engine of a test asks the network")
    plugins = os.environ.get("VLLM_PLUGINS", "").split(",")
    if (layers is not None) != ("jitmx" in plugins):
        raise RuntimeError(f"layers {layers!r} are asked for, and the plugins are {plugins}")
    name = f"jitmx:{layers}" if layers else options.get("kernel_config", {}).get("moe_backend", "auto")
    if asked is not None:
        from jitmx.vllm.request import requested  # most of what a stock engine would take to start

        if requested(asked, environ={}).serves_attention():
            if "backend" in options.get("attention_config", {}):
                raise RuntimeError(f"jitmx's attention is asked for, and a backend in {options['attention_config']}")
            name += "+attention"
    return name + ("-eager" if options.get("enforce_eager") else "")


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
    logprobs: int | None = None
    flat_logprobs: bool = False


class Model:
    """Logits that depend on the last tokens, and an error that depends on the configuration."""

    def __init__(self, options: dict) -> None:
        self.name = name_of(options)
        self.adapter = None
        self.config = json.loads((Path(options["model"]) / "config.json").read_text())
        if self.name in TOLD.get("fail", []):
            raise RuntimeError(f"the engine of {self.name} was told to fail")
        if "meet" in TOLD:
            folder, count = Path(TOLD["meet"][0]), TOLD["meet"][1]
            (folder / self.name).touch()
            until = time.monotonic() + 20
            while len(list(folder.iterdir())) < count:
                if time.monotonic() > until:
                    raise RuntimeError(f"{self.name} is alone")
                time.sleep(0.05)
        self.noise = TOLD.get("noise", {}).get(self.name, 0.01)
        self.kernels = TOLD.get("kernels", {}).get(self.name, {})

    def logits(self, tokens: list[int], cached: int = 0) -> np.ndarray:
        seen = tokens[-TOLD.get("sees", {}).get(self.name, 4) :]
        seed = sum(token * 31**k for k, token in enumerate(seen)) + len(tokens)
        clean = np.random.default_rng(seed).standard_normal(self.config["vocab_size"])
        if self.adapter is not None:
            clean += 0.5 * np.random.default_rng([seed, 1]).standard_normal(clean.size)
        salt = sum(map(ord, self.name))
        noise = TOLD.get("long", {}).get(self.name, self.noise) if len(tokens) > 500 else self.noise
        for at in ("at", "at_known") if cached else ("at",):
            noise = TOLD.get(at, {}).get(self.name, {}).get(str(len(tokens)), noise)
        return clean + noise * np.random.default_rng([seed, salt]).standard_normal(clean.size)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


def blocks(prompt: list[int]) -> dict[int, int]:
    """Where each block of 16 tokens ends that lies before the last one, by a hash of all tokens up to there."""
    found, block = {}, 0
    for end in range(16, len(prompt), 16):
        block = hash((block, *prompt[end - 16 : end]))
        found[block] = end
    return found


@dataclass
class Flat:
    token_ids: list[int]
    logprobs: list[float]
    start_indices: list[int] = field(default_factory=lambda: [0])

    @property
    def end_indices(self) -> list[int]:
        return [len(self.token_ids)]


_ran: dict[str, int] = {}


def say_start(name: str) -> None:
    """What an engine logs of its start."""
    if name.startswith("jitmx"):
        print("jitmx serves moe in mxfp4 on sm_90a (by default)")
        for kind in ("attention", "attention within a window") if "+attention" in name and "deaf" not in TOLD else ():
            print(f"jitmx serves {kind} in bfloat16 on sm_90a (by additional_config's attention)")
        compiled = 0 if TOLD.get("warm", True) else 11
        print(f"jitmx: 11 kernels for sm_90a are ready after 0.2 s, {compiled} of them compiled now (cache x)")
    loading = TOLD.get("loading", {}).get(name, 0.5)
    if loading is not None:
        print(f"(MainProcess pid=7) INFO 11-21 19:01:59 Model loading took 3.86 GiB memory and {loading:.6f} seconds")
    warmup = TOLD.get("warmup", {}).get(name, 7.65)
    print(f"init engine (profile, create kv cache, warmup model) took {warmup:.2f} s (compilation: 2.99 s)", flush=True)


class LLM:
    def __init__(self, **options: object) -> None:
        self.model = Model(options)
        self.options = options
        self.known: set[int] = set()
        hf = types.SimpleNamespace(**self.model.config)
        config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(hf_config=hf),
            compilation_config=types.SimpleNamespace(static_forward_context={}),
        )
        self.llm_engine = Loop(self, config)
        say_start(self.model.name)

    def generate(
        self, prompts: list[dict], params: SamplingParams, use_tqdm: bool, lora_request: object = None
    ) -> list:
        self.model.adapter = lora_request if TOLD.get("lora", True) else None
        for kernel, launches in self.model.kernels.items():
            _ran[kernel] = _ran.get(kernel, 0) + launches * params.max_tokens
        time.sleep(params.max_tokens * TOLD.get("slow", {}).get(self.model.name, 0.0))
        return [self.answer(prompt["prompt_token_ids"], params) for prompt in prompts]

    def answer(self, prompt: list[int], params: SamplingParams) -> types.SimpleNamespace:
        tokens = self.model.greedy(prompt, params.max_tokens)
        logprobs = None
        caching = self.options["enable_prefix_caching"]
        ends = blocks(prompt) if caching else {}
        cached = max((end for block, end in ends.items() if block in self.known), default=0)
        self.known.update(ends)
        if params.logprobs == -1:
            row = self.model.logits(prompt, cached)
            order = np.argsort(-row)
            logprobs = Flat([tokens[0], *order.tolist()], [row[tokens[0]], *row[order].tolist()])
        output = types.SimpleNamespace(token_ids=tokens, logprobs=logprobs)
        return types.SimpleNamespace(outputs=[output], num_cached_tokens=cached)


class Loop:
    """One request at a time, a token a step."""

    def __init__(self, llm: LLM, vllm_config: types.SimpleNamespace) -> None:
        self.llm, self.vllm_config, self.left = llm, vllm_config, []

    def add_request(self, request_id: str, prompt: dict, params: SamplingParams) -> None:
        assert not self.left, "one request at a time"
        self.made = self.llm.answer(prompt["prompt_token_ids"], params).outputs[0].token_ids
        self.left = list(range(1, len(self.made) + 1))

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list:
        found = self.made[: self.left.pop(0)]
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=found)])]


class Recorded:
    """In torch's profiler's place: the kernels that engines were told to have run."""

    def __init__(self, activities: object) -> None:
        _ran.clear()

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        self.seen = dict(_ran)

    def events(self) -> list:
        card = types.SimpleNamespace(name="CUDA")
        return [
            types.SimpleNamespace(name=name, device_type=card, device_time_total=2.0)
            for name, count in self.seen.items()
            for _ in range(count)
        ]


# In torch's place too: importing it would be most of what a test takes.
torch, torch_profiler = types.ModuleType("torch"), types.ModuleType("torch.profiler")
torch.cuda = types.SimpleNamespace(is_available=lambda: False)
torch_profiler.profile, torch_profiler.ProfilerActivity = Recorded, types.SimpleNamespace(CUDA="CUDA")
sys.modules |= {"torch": torch, "torch.profiler": torch_profiler}
