"""What vLLM does around the layers that jitmx serves: LoRA, prefix caching, chunked prefill.

jitmx and a stock backend run in engines that have all of it on. How far their logits are apart on short prompts is the
measure: with an adapter, after a prefix that the cache knows, and after a prompt that is read in chunks they may be
`apart.SLACK` times as far apart, but for one prompt of eight, which a tie of experts may have parted. That an adapter
was applied at all shows in logits that are far from those without it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.protocol import agreement, apart, engines, worker
from scripts.protocol.configurations import Configuration
from scripts.protocol.levels import Asked
from scripts.protocol.report import Report

# What the adapter does to logits is at least so many times what engines are apart.
SEEN = 5.0
CHUNK = 256
RANK = 8
# Eight prompts each, two at least beyond any border: a window of 128, a chunk, a chunk of one token, a whole last one.
_SHORT = (5, 17, 33, 64, 100, 129, 200, 250)
_CACHED = (17, 33, 65, 97, 129, 145, 193, 241)
_LONG = (513, 600, 768, 1000, 1023, 1024, 1281, 1500)
# The same prompts as of "unknown", asked for again.
_KNOWN = ("known", "known, with others")
_OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": True, "max_num_batched_tokens": CHUNK, "max_num_seqs": 16, "max_model_len": 4096,
    "enable_chunked_prefill": True, "enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": ["o_proj"],
}  # fmt: skip


def features(asked: Asked, stock: Configuration, *, steps: int = 64, together: bool = False) -> Report:
    """Logits and greedy tokens of jitmx and a stock backend with LoRA, prefix caching and chunked prefill on.

    Args:
        stock: the stock backend.
        steps: greedy tokens after each of 8 prompts; how many are shared is told, not judged.
        together: start both engines at once.
    """
    import numpy as np

    place = replace(asked.place, options={**_OPTIONS, **asked.place.options})
    report = replace(asked, place=place).report("features", stock=stock.name, chunk=CHUNK, steps=steps)
    vocab = engines.vocabulary(place.model)
    short, cached, long = (worker.random_prompts(vocab, list(n), asked.seed) for n in (_SHORT, _CACHED, _LONG))
    adapter = write_adapter(place.out / "adapter", place.model)

    def tasks(name: str) -> list[dict[str, Any]]:
        def task(what: str, prompts: list[list[int]], **more: Any) -> dict[str, Any]:
            into = str(place.out / f"{name}.{what}.npy")
            return {"task": "logits", "as": what, "prompts": prompts, "groups": [1] * len(prompts), "into": into} | more

        return [
            task("short", short), task("adapter", short, adapter=str(adapter)), task("unknown", cached),
            task("known", cached), task("known, with others", cached, groups=[len(cached)]), task("long", long),
            {"task": "greedy", "prompts": short, "tokens": steps, "groups": [1] * 4 + [4], "adapter": str(adapter)},
        ]  # fmt: skip

    both = asked.ours, stock
    with engines.each(place, both, tasks, together=together) as results:
        found = {item.name: result for item, result in results}
    tables = {
        (what, item.name): np.load(place.out / f"{item.name}.{what}.npy")
        for what in ("short", "adapter", "unknown", *_KNOWN, "long")
        for item in both
    }
    ours, other = asked.ours.name, stock.name
    said = (place.out / f"{ours}.log").read_text(errors="replace")
    report.check("jitmx serves the experts", "jitmx serves moe in mxfp4" in said, "by the log of its engine")
    report.check_warm_up("warm-up", found[ours]["late"])
    for item in both:
        report.check_attention(item.name, item.attention_by, found[item.name]["startup"])
    wanted = [len(prompt) - 1 for prompt in cached]
    for item, what in itertools.product(both, _KNOWN):
        known = found[item.name][what]["known"]
        report.check("a prefix is known", known == wanted, f"{item.name}, {what}: {known} tokens were in the cache")
    bad = [f"{name}, {what}" for (what, name), table in tables.items() if not np.isfinite(table).all()]
    report.check("logits are finite", not bad, "; ".join(bad) or "all are")

    asked_for = {"short": short, "adapter": short, "long": long} | dict.fromkeys(("unknown", *_KNOWN), cached)
    judge(report, tables, (ours, other), asked_for)
    report.results["startup"] = {name: result["startup"] for name, result in found.items()}
    shared = [agreement.shared(*pair) for pair in zip(found[ours]["greedy"], found[other]["greedy"], strict=True)]
    report.results["greedy"] = {"steps": steps, "shared": shared}
    return report


def judge(
    report: Report,
    tables: Mapping[tuple[str, str], Any],
    names: tuple[str, str],
    prompts: Mapping[str, Sequence[Sequence[int]]],
) -> None:
    """Hold logits of jitmx to those of a stock engine, and those behind a known prefix to those of the same engine.

    Args:
        tables: logits [prompts, vocabulary] by what was asked for and by engine.
        names: of jitmx's engine and of the stock engine.
        prompts: by what was asked for.
    """

    def between(one: tuple[str, str], two: tuple[str, str]) -> apart.Apart:
        return apart.Apart.of(tables[one], tables[two], prompts[one[0]])

    ours, other = names
    pairs = {what: between((what, ours), (what, other)) for what in prompts}
    again = {what: {name: between((what, name), ("unknown", name)) for name in names} for what in _KNOWN}
    moved = {name: between(("adapter", name), ("short", name)) for name in names}
    measure = pairs["short"]
    changed = {k for both in again.values() for one in both.values() for k in one.far(measure)}
    for what, pair in pairs.items():
        apart.judge(report, what, pair, measure, changed if what in ("unknown", *_KNOWN) else ())
    for what, both in again.items():
        apart.judge_same(report, "a known prefix changes nothing", what, both[ours], both[other], measure)
    least = {name: min(one.each) for name, one in moved.items()}
    seen = f"it moves each prompt's logits by {least} at least, wanted over {SEEN} times {measure.median:.4g}"
    report.check("the adapter is applied", min(least.values()) > SEEN * measure.median, seen)
    report.results |= {
        "apart": {what: one.as_dict(measure) for what, one in pairs.items()},
        "from unknown": {what: {n: one.as_dict(measure) for n, one in both.items()} for what, both in again.items()},
        "adapter": {name: one.as_dict(measure) for name, one in moved.items()},
    }


def write_adapter(folder: Path, model: Path, seed: int = 0) -> Path:
    """A LoRA adapter on the output projection of every layer's attention, in PEFT's layout; gives back its folder.

    Args:
        model: folder of the checkpoint that it is for.
    """
    import torch
    from safetensors.torch import save_file

    sizes = json.loads((model / "config.json").read_text())
    k, n = sizes["num_attention_heads"] * sizes["head_dim"], sizes["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(sizes["num_hidden_layers"]):
        stem = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        for name, rows, columns in (("lora_A", RANK, k), ("lora_B", n, RANK)):
            values = torch.randn(rows, columns, generator=generator) * columns**-0.5
            tensors[f"{stem}.{name}.weight"] = values.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    about = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"], "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
    return folder
