"""Decode with and without speculation in vLLM engines, one after another, each in a process of its own.

python scripts/bench_speculation.py OUT --target gpt-oss-120b --draft DRAFT --rates .74,.54 --rates .60,.36 --stock
python scripts/bench_speculation.py OUT --target gpt-oss-120b --draft DRAFT --replay .6 --replay .7 --replay .8 --k 3

DRAFT is a folder that scripts/make_draft.py wrote. The target's weights are random (`load_format=dummy`), with
routing spread as a trained model's, unless --target is a folder with weights. --rates are chances that vLLM accepts
the first, the second and so on of the drafts (`rejection_sample_method="synthetic"`), the same for stock vLLM and
jitmx. --replay puts the tokens of a recorded greedy run in the place of the draft's, each right with that chance
where those before it are.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.protocol import replay, worker
from scripts.protocol.configurations import Configuration, layers
from scripts.protocol.report import SCHEMA_VERSION, ProtocolError
from scripts.protocol.sizes import PRESETS, config

ROOT = Path(__file__).resolve().parent.parent
PROMPT, SHORT, LONG = 128, 96, 352
_CHILD = "SPECULATION_ENGINE"  # says that this process is one of those that are measured


def speculative(draft: str, k: int, rates: list[float] | None) -> dict[str, Any]:
    """vLLM's speculative_config.

    Args:
        k: drafts a step.
        rates: that so many drafts are accepted, or None: what the target says decides.
    """
    found: dict[str, Any] = {
        "method": "eagle3", "model": draft, "num_speculative_tokens": k, "draft_load_config": {"load_format": "auto"},
    }  # fmt: skip
    if rates is not None:
        found |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates[:k]}
    return found


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """What one engine does: milliseconds a token of one request at each batch, and tokens a step."""
    from vllm import LLM, SamplingParams

    engine = LLM(**asked["options"], worker_extension_cls=replay.EXTENSION, disable_log_stats=False)
    if asked["spread"]:
        engine.collective_rpc("spread_routing")
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    most = max(asked["batches"])
    prompts = worker.random_prompts(vocabulary - 1, [PROMPT] * most, asked["seed"])
    for number, prompt in enumerate(prompts):
        prompt[0] = number + 1  # by which a recorded run is found
    if asked["replay"] is not None:
        engine.collective_rpc("replay", args=(json.loads(Path(asked["record"]).read_text()), asked["replay"]))

    def generate(batch: int, tokens: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts[:batch]]
        began = time.perf_counter()
        answers = engine.generate(given, params, use_tqdm=False)
        return time.perf_counter() - began, [list(answer.outputs[0].token_ids) for answer in answers]

    def counted() -> dict[str, float]:
        names = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}
        return {names[item.name]: item.value for item in engine.get_metrics() if item.name in names}

    figures, texts = [], []
    for batch in asked["batches"]:
        generate(batch, SHORT)
        before = counted()
        times = {tokens: min(generate(batch, tokens)[0] for _ in range(asked["rounds"])) for tokens in (SHORT, LONG)}
        texts = generate(batch, LONG)[1]
        after = counted()
        drafts = after.get("drafts", 0) - before.get("drafts", 0)
        accepted = after.get("accepted", 0) - before.get("accepted", 0)
        ms = (times[LONG] - times[SHORT]) / (LONG - SHORT) * 1e3
        figures.append({
            "batch": batch, "ms_token": ms, "tokens_s": batch / ms * 1e3,
            "tokens_step": 1 + accepted / drafts if drafts else 1.0,
        })  # fmt: skip
    if asked["keep"]:
        runs = [prompt + text for prompt, text in zip(prompts, texts, strict=False)]
        Path(asked["record"]).write_text(json.dumps(runs))
    return {"figures": figures, "tokens": texts[: asked["batches"][-1]]}


def agreement(plain: list[list[int]], speculated: list[list[int]]) -> dict[str, int]:
    """Of greedy tokens with and without speculation: how many were compared, and where they part for the first time.

    Behind the first that differs a text is another: two logits nearer than the products' rounding may have done that.
    """
    firsts = [next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), len(own))
              for own, other in zip(plain, speculated, strict=True)]  # fmt: skip
    lengths = [len(own) for own in plain]
    return {"compared": sum(firsts), "parted": sum(f < n for f, n in zip(firsts, lengths, strict=True))}


def _target(target: str, out: Path) -> tuple[str, bool]:
    """The folder of a target, and whether its weights are to be drawn by vLLM."""
    if target not in PRESETS:
        return str(Path(target).resolve()), False
    folder = out / f"target-{target}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(PRESETS[target])))
    return str(folder), True


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as .74,.54") from None


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--target", default="gpt-oss-120b", help="A preset, with random weights, or the folder of a checkpoint.")
@click.option("--draft", required=True, type=click.Path(exists=True, file_okay=False), help="Folder of its draft.")
@click.option("--rates", multiple=True, help="Chances that vLLM accepts the first, second ... draft, as .74,.54.")
@click.option("--replay", "replayed", multiple=True, type=click.FloatRange(0, 1), help="Chance that a draft is right.")
@click.option("--k", default="1,2", help="Drafts a step, separated by commas.")
@click.option("--layers", "served", default="all", help="Layers of the target that jitmx serves.")
@click.option("--draft-layers", default="all", help="Layers of the draft that jitmx serves.")
@click.option("--attention", type=click.Choice(["auto", "on", "off"]), default="auto", help="Jitmx's attention.")
@click.option("--stock", is_flag=True, help="Stock vLLM with the same rates beside it.")
@click.option("--backend", default="auto", help="Of --stock: vLLM's for the experts.")
@click.option("--batches", default="1", help="Requests at a time, separated by commas.")
@click.option("--rounds", default=4, help="The quickest of so many counts.")
@click.option("--seed", default=0, help="Of prompts.")
@click.option("--engine", type=json.loads, default="{}", help="More arguments of vLLM's engine, as JSON.")
def main(
    out: Path, target: str, draft: str, rates: tuple[str, ...], replayed: tuple[float, ...], k: str, served: str,
    draft_layers: str, attention: str, stock: bool, backend: str, batches: str, rounds: int, seed: int,
    engine: dict[str, Any],
) -> None:  # fmt: skip
    """Print a line an engine, and write all into OUT/speculation.json."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    folder, dummy = _target(target, out)
    steps = [int(number) for number in _numbers(k)]
    ours = Configuration(layers(served), attention=attention, draft=draft_layers)
    ways: list[tuple[str, Configuration]] = [("jitmx", ours)]
    if stock:
        ways.append(("stock", Configuration(backend=backend)))
    cases: list[tuple[int, list[float] | None, float | None]] = [(0, None, None)]
    cases += [(n, _numbers(text), None) for text, n in itertools.product(rates, steps) if len(_numbers(text)) >= n]
    cases += [(n, None, rate) for rate, n in itertools.product(replayed, steps)]
    results: list[dict[str, Any]] = []
    for name, way in ways:
        record, plain = out / f"{name}.record.json", None
        for n, accepted, rate in cases:
            options = {
                "model": folder, "skip_tokenizer_init": True, "max_num_seqs": 64, "max_model_len": 16384,
                "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9, "enable_prefix_caching": False,
                **({"load_format": "dummy"} if dummy else {}),
                **({"speculative_config": speculative(str(Path(draft).resolve()), n, accepted)} if n else {}),
                **way.engine(), **engine,
            }  # fmt: skip
            asked = {
                "options": options, "batches": [int(b) for b in _numbers(batches)], "rounds": rounds, "seed": seed,
                "spread": dummy, "replay": rate, "record": str(record), "keep": n == 0,
            }  # fmt: skip
            label = f"{name} k={n}" + (f" rates={accepted[:n]}" if accepted else "") + (f" p={rate}" if rate else "")
            found = _apart(asked, way, out / f"{len(results):02}.log")
            row = {"label": label, "served_by": name, "k": n, "rates": accepted, "replay": rate, **found}
            plain = found if n == 0 else plain
            assert plain is not None, "the first engine has no draft"
            for own, base in zip(row["figures"], plain["figures"], strict=True):
                own["speedup"] = base["ms_token"] / own["ms_token"]
            if rate is not None:
                row["agreement"] = agreement(plain["tokens"], found["tokens"])
            results.append(row)
            for own in row["figures"]:
                click.echo(
                    f"{label:44} batch {own['batch']:3} {own['tokens_s']:9.1f} tok/s  {own['tokens_step']:.2f} tokens "
                    f"a step  {own['speedup']:.3f} x" + (f"  {row['agreement']}" if "agreement" in row else "")
                )
    for row in results:
        row.pop("tokens")
    (out / "speculation.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, "results": results}, indent=1))


def _apart(asked: dict[str, Any], way: Configuration, log: Path) -> dict[str, Any]:
    """`measure` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(asked))
        environment = way.environment() | worker.ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
        with log.open("wb") as sink:
            command = [sys.executable, __file__, str(question), str(answer)]
            done = subprocess.run(command, env=environment | {_CHILD: "1"}, stdout=sink, stderr=sink, check=False)
        if done.returncode or not answer.is_file():
            raise ProtocolError(f"an engine ended with status {done.returncode}; see {log}")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


if __name__ == "__main__":
    if os.environ.pop(_CHILD, ""):
        Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        try:
            main(standalone_mode=False)
        except (click.ClickException, ProtocolError) as error:
            sys.exit(f"Error: {error.format_message() if isinstance(error, click.ClickException) else error}")
