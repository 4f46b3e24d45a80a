"""The reference of level 2 is transformers in float32 on the checkpoint as it is."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="checkpoints are safetensors files: pip install safetensors")

from jitmx.registry.case import relative_l2
from scripts.protocol import __main__ as protocol
from scripts.protocol import agreement, checkpoint, correctness, needle, worker
from scripts.protocol import reference as references
from scripts.protocol.engines import Place
from scripts.protocol.report import ProtocolError, Report
from scripts.protocol.sizes import PRESETS

# Asked without importing it, which takes seconds of each process of a run.
HERE = importlib.util.find_spec("transformers") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="the reference is transformers' GptOss")
TINY = PRESETS["tiny"]
FAKE = Path(__file__).parent / "fake"
ALL = "jitmx-moe+qkv+o+lm_head"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("reference") / "tiny", TINY, on_grid=True).folder


def test_its_greedy_tokens_are_the_largest_of_its_logits(model: Path) -> None:
    prompt = worker.random_prompts(TINY.vocab, [12], 0)[0]
    engine = worker.Reference({"model": str(model), "device": "cpu"})
    (tokens,) = engine.greedy([prompt], 4)
    assert len(tokens) == 4
    for k, token in enumerate(tokens):
        (row,), known = engine.logits([prompt + tokens[:k]])
        assert known == [0]
        assert row.shape == (TINY.vocab,) and row.dtype == np.float32 and int(row.argmax()) == token


def test_a_prompt_that_is_read_in_parts_has_the_logits_of_one_that_is_read_at_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = worker.Reference({"model": str(model), "device": "cpu"})
    prompts = worker.random_prompts(TINY.vocab, [401, 300], 0)  # more than two windows
    whole, _ = engine.logits(prompts)
    monkeypatch.setattr(worker, "CHUNK", 150)
    parts, _ = engine.logits(prompts)
    assert relative_l2(np.stack(parts), np.stack(whole)) < 1e-5


def test_whoever_ignores_a_quarter_with_a_needle_or_all_far_tokens_fails_and_rounding_does_not(model: Path) -> None:
    engine = worker.Reference({"model": str(model), "device": "cpu"})
    prompts = needle.prompts(TINY.vocab, 2000, 0)
    assert len(prompts) == 8 and {len(prompt) for prompt in prompts} == {2001}
    wanted = np.stack(engine.logits(prompts)[0])
    source = np.random.default_rng(0)
    # As far as bf16 takes engines from float32.
    stock = [wanted + 0.005 * wanted.std() * source.standard_normal(wanted.shape) for _ in range(3)]
    near = [stock[2], np.stack(engine.logits([prompt[-1000:] for prompt in prompts])[0])]
    # The last quarter's needle alone: the two prompts that have it there.
    start = 3 * 2001 // 4
    near.append(np.stack([*stock[2][:6], *engine.logits([p[:start] + p[start + 400 :] for p in prompts[6:]])[0]]))
    for ours, passes in zip(near, (True, False, False), strict=True):
        report = Report("2", {})
        tables = {"ours": ours, "a": stock[0], "b": stock[1], "transformers": wanted}
        bound = agreement.judge_logits(report, tables, "ours", ("a", "b"))
        needle.judge(report, "logits", wanted, bound)
        assert {check.name: check.passed for check in report.checks} == {"logits": passes, "far tokens count": True}


def test_a_checkpoint_that_lacks_a_tensor_is_refused(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.self_attn.sinks"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(RuntimeError, match=r"sinks"):
        worker.Reference({"model": str(broken), "device": "cpu"})


def asked_prompts(model: Path, seed: int = 0, long_tokens: int = 0) -> list[list[int]]:
    """Those that level 2 looks at."""
    return list(itertools.chain(*correctness.reference_prompts(model, seed, long_tokens).values()))


def test_level_2_takes_its_reference_from_a_file_of_the_same_checkpoint_and_prompts_alone(
    run: Any, call: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / "long.npz"
    said = run("protocol.sh", "reference", long, "--model", model, "--out", tmp_path / "ref", "--long-tokens", 400)
    assert json.loads(said.stdout)["shape"] == [48, TINY.vocab]
    # They came from a process of its own, by way of files, and are those of one in this process.
    engine, asked = worker.Reference({"model": str(model), "device": "cpu"}), asked_prompts(model, long_tokens=400)
    here = [engine.logits([asked[at]])[0][0] for at in (0, 47)]
    np.testing.assert_allclose(np.load(long)["logits"][[0, 47]], here, rtol=1e-4, atol=1e-4)
    # Without long prompts it is the same rows but for the last.
    kept, table = tmp_path / "kept.npz", np.load(long)["logits"][:40]
    monkeypatch.setattr(references, "make", lambda *_: table)
    references.write(kept, Place(model, tmp_path, {}, 200.0), asked_prompts(model), "cpu")

    def level(folder: Path, *words: object, code: int) -> str:
        asked = ("--model", folder, "--out", tmp_path / "out", "--steps", 8, "--chains", 5, "--reference", kept)
        with monkeypatch.context() as patch:
            patch.setattr(protocol.signal, "signal", lambda *_: None)
            patch.syspath_prepend(FAKE)
            patch.setenv("PYTHONPATH", f"{FAKE}{os.pathsep}{FAKE.parents[2]}")
            return str(call(protocol.main, "level2", *asked, *words, code=code).stderr)

    # The same checkpoint in other files, and one with other values.
    split = checkpoint.write(tmp_path / "split", TINY, on_grid=True, shard_bytes=1 << 18).folder
    np.testing.assert_array_equal(references.read(kept, split, asked_prompts(split)), table)
    other = checkpoint.write(tmp_path / "other", TINY, on_grid=True, seed=1).folder
    assert "was made of another checkpoint" in level(other, code=2)
    for prompts in (asked_prompts(model, seed=1), asked_prompts(model, long_tokens=400)):
        with pytest.raises(ProtocolError, match=r"another prompts; .* this --seed and these --long-tokens"):
            references.read(kept, model, prompts)
    level(model, "--reference", long, "--long-tokens", 400, code=1)  # the stand-in's logits have nothing of the model
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["about"]["reference"] == "long.npz"
    for what in ("logits", "logits of one token", "logits of long prompts"):
        assert report["results"][what][ALL]["against"] == "transformers in float32"
    assert len(report["results"]["logits of long prompts"][ALL]["prompts"][ALL]) == 8
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(ProtocolError, match="holds no reference"):
        references.read(kept, model, asked_prompts(model))


def test_level_2_with_a_reference_compares_every_engine_with_it(run: Any, tmp_path: Path) -> None:
    fake = {"PYTHONPATH": str(Path(__file__).parent / "fake")}
    words = ("--synthetic", "tiny", "--out", tmp_path / "out", "--steps", 8, "--chains", 5)
    run("test_level2_correctness.sh", *words, **fake)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    errors = report["results"]["logits"][ALL]["relative_l2"]
    assert set(errors) == {ALL, "stock-triton", "stock-marlin", "stock-marlin-eager"}
    # The stand-in knows nothing of the model, and says so to the reference.
    assert all(error > 0.5 for error in errors.values())
    assert report["metadata"]["model"]["value"]["bytes"] > 0
    assert report["results"]["dense_on_grid"] == {"value": True}
