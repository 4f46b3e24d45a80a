"""Synthetic checkpoints are what transformers and vLLM take for a gpt-oss model, and route as a trained one does."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors", reason="checkpoints are safetensors files: pip install safetensors")

from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from jitmx import formats
from jitmx.errors import InputError
from scripts import make_checkpoint
from scripts.protocol import checkpoint
from scripts.protocol.sizes import PRESETS, Sizes, config, entries

TINY = PRESETS["tiny"]
LAYER = "model.layers.1.mlp.experts"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def decoded(found: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    """Values [experts, rows, k] of an MXFP4 entry, by jitmx's reference arithmetic."""
    codes = formats.unpack_nibbles(found[f"{stem}_blocks"].numpy())
    scales = found[f"{stem}_scales"].numpy()
    flat = codes.reshape(*codes.shape[:2], -1)
    return torch.from_numpy(formats.dequantize(flat, scales, formats.get("mxfp4"))).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("made") / "tiny", TINY).folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """The model in transformers, dequantized, float32 on the CPU."""
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GptOss")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32,
        output_loading_info=True,
    )  # fmt: skip
    assert not any(info.values()), info
    return model.float().eval()


def test_transformers_finds_every_tensor_it_wants_and_no_other(reference: Any, folder: Path) -> None:
    found = tensors(folder)
    experts = reference.model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj.transpose(1, 2), decoded(found, f"{LAYER}.gate_up_proj"))
    assert torch.equal(experts.down_proj.transpose(1, 2), decoded(found, f"{LAYER}.down_proj"))
    assert torch.equal(experts.gate_up_proj_bias, found[f"{LAYER}.gate_up_proj_bias"].float())


def test_the_model_runs_in_transformers_and_keeps_the_scale_of_its_residual_stream(reference: Any) -> None:
    spread = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda module, given, out: spread.append(float(out.std())))
    tokens = torch.randint(0, TINY.vocab, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = reference(tokens).logits
    assert logits.shape == (4, 32, TINY.vocab) and logits.isfinite().all()
    assert len(spread) == TINY.layers and all(0.8 < value < 3 for value in spread), spread
    assert 1.5 < float(logits.std()) < 6


def test_the_tokens_of_a_batch_spread_over_the_experts_as_those_of_a_trained_router(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dataclasses.replace(TINY, experts=128, intermediate=32)
    made = checkpoint.write(tmp_path / "wide", sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        made.folder, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
    ).float()
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(lambda module, given, out: chosen.append(out[2]))
    tokens = torch.randperm(sizes.vocab, generator=torch.Generator().manual_seed(1))[:64].reshape(64, 1)
    with torch.no_grad():
        model(tokens)
    # Of 128 experts, 64 tokens that choose 4 each at random reach 111; dummy weights reach 4.
    assert all(95 <= int(experts.unique().numel()) <= 122 for experts in chosen), [c.unique().numel() for c in chosen]


@pytest.mark.timeout(200)
def test_vllm_s_own_loading_fills_every_parameter_with_these_bytes(folder: Path) -> None:
    for module in ("vllm", "compressed_tensors"):
        pytest.importorskip(module, reason="vLLM's loading needs vLLM and its dependencies", exc_type=ImportError)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_loading.py")), str(folder)],
        env=os.environ | dict.fromkeys(("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"), "1")
        | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""},
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["unloaded"] == []
    found, seen = tensors(folder), said["parameters"]

    def same(name: str, wanted: torch.Tensor) -> None:
        kept = wanted.contiguous()
        bytes_ = (kept.float() if kept.is_floating_point() else kept).numpy().tobytes()
        assert seen[name] == [list(wanted.shape), hashlib.sha256(bytes_).hexdigest()], name

    for layer in range(TINY.layers):
        stem = f"model.layers.{layer}"
        experts = f"{stem}.mlp.experts.routed_experts"
        for kind, name in (("w13", "gate_up_proj"), ("w2", "down_proj")):
            blocks = found[f"{stem}.mlp.experts.{name}_blocks"]
            same(f"{experts}.{kind}_weight", blocks.reshape(*blocks.shape[:2], -1))
            same(f"{experts}.{kind}_weight_scale", found[f"{stem}.mlp.experts.{name}_scales"])
            same(f"{experts}.{kind}_bias", found[f"{stem}.mlp.experts.{name}_bias"])
        for part in ("weight", "bias"):
            joined = torch.cat([found[f"{stem}.self_attn.{name}_proj.{part}"] for name in "qkv"])
            same(f"{stem}.attn.qkv_proj.{part}", joined)
            same(f"{stem}.attn.o_proj.{part}", found[f"{stem}.self_attn.o_proj.{part}"])
            same(f"{stem}.mlp.router.{part}", found[f"{stem}.mlp.router.{part}"])
        same(f"{stem}.attn.sinks", found[f"{stem}.self_attn.sinks"])
    same("lm_head.weight", found["lm_head.weight"])


def test_shards_hold_what_one_file_holds_and_the_index_says_where(folder: Path, tmp_path: Path) -> None:
    made = checkpoint.write(tmp_path / "split", TINY, shard_bytes=200_000)
    assert len(made.files) > 2
    whole, split = tensors(folder), tensors(made.folder)
    assert whole.keys() == split.keys() and all(torch.equal(whole[name], split[name]) for name in whole)
    index = json.loads((made.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.nbytes == sum(t.nbytes for t in whole.values())
    for file in made.files:
        held = load_file(made.folder / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == set(held)
        assert len(held) <= 2 or sum(t.nbytes for t in held.values()) <= 200_000


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    entry = next(item for item in entries(TINY) if item.kind == "mxfp4")
    first, again, other = (checkpoint.draw(entry, seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_expert_weights_have_the_deviation_that_keeps_their_inputs_scale(folder: Path) -> None:
    values = decoded(tensors(folder), f"{LAYER}.gate_up_proj")
    assert values.shape == (TINY.experts, 2 * TINY.intermediate, TINY.hidden)
    assert float(values.std()) == pytest.approx(TINY.hidden**-0.5, rel=0.05)


@given(st.integers(-130, 120), st.integers(0, 2**32 - 1))
def test_a_weight_on_the_grid_is_quantized_without_loss(exponent: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((4, 64)) * 2.0**exponent
    once = checkpoint.round_to_grid(torch.from_numpy(values).bfloat16())
    assert torch.equal(checkpoint.round_to_grid(once), once)


def test_rounding_a_checkpoint_s_dense_weights_leaves_the_rest_alone(folder: Path, tmp_path: Path) -> None:
    assert not checkpoint.dense_on_grid(folder)
    made = checkpoint.rounded_copy(folder, tmp_path / "rounded")
    assert checkpoint.dense_on_grid(made.folder)
    before, after = tensors(folder), tensors(made.folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    dense = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
    assert changed == {name for name in before if name == "lm_head.weight" or name.endswith(dense)}
    direct = tensors(checkpoint.write(tmp_path / "direct", TINY, on_grid=True).folder)
    assert all(torch.equal(after[name], direct[name]) for name in after)
    assert (made.folder / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_the_large_presets_are_gpt_oss_to_the_byte_count() -> None:
    # 60.8 GiB and 12.8 GiB of tensors are what the published checkpoints hold.
    assert sum(entry.nbytes for entry in entries(PRESETS["gpt-oss-120b"])) == 65_248_815_744
    assert sum(entry.nbytes for entry in entries(PRESETS["gpt-oss-20b"])) == 13_761_264_768


def test_the_tokenizer_gives_a_byte_a_token_and_text_back(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Grüße, 世界"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode()) and tokenizer.decode(tokens) == text
    assert tokenizer.eos_token_id == TINY.end_token == config(TINY)["eos_token_id"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden", 100, "hidden=100 is not a multiple of 32.*nearest is 96"),
        ("top_k", 9, "top_k=9 experts a token, of 8"),
        ("kv_heads", 3, "heads=4 is not a multiple of kv_heads=3"),
        ("layers", 0, "layers=0 is not positive"),
        ("positions", 2048, "below trained_positions=4096"),
    ],
)
def test_sizes_that_no_model_can_have_are_refused_by_name(field: str, value: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        dataclasses.replace(TINY, **{field: value})


def test_a_folder_with_files_is_never_written_into(folder: Path) -> None:
    with pytest.raises(InputError, match="is not empty"):
        checkpoint.write(folder, Sizes())


def test_what_has_no_room_for_a_tokenizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="vocab=64 has no room"):
        checkpoint.write(tmp_path / "x", Sizes(vocab=64))
    assert not (tmp_path / "x").exists()
    assert checkpoint.write(tmp_path / "x", Sizes(vocab=64), tokenizer=False).files == ("model.safetensors",)


def test_the_script_says_what_it_wrote_and_refuses_bad_sizes(run: Any, call: Any, tmp_path: Path) -> None:
    done = run("make_checkpoint.py", tmp_path / "x", "--hidden", 64, "--shard-mb", 0.1, "--no-tokenizer")
    said = json.loads(done.stdout)
    assert said["schema_version"] == 1 and len(said["files"]) > 1
    assert not (tmp_path / "x" / "tokenizer.json").exists()
    assert "not a multiple of 32" in call(make_checkpoint.main, tmp_path / "y", "--hidden", 65, code=1).stderr
    assert not (tmp_path / "y").exists()
