"""Synthetic Eagle3 drafts have the shapes of published ones; of the bigram pair what is accepted is known."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="checkpoints are safetensors files: pip install safetensors")

from safetensors.torch import load_file

from jitmx.errors import InputError
from scripts import make_draft
from scripts.protocol import bigram, checkpoint, drafts
from scripts.protocol.drafts import PRESETS, DraftSizes

TINY = PRESETS["tiny-reduced"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("preset", "head", "ids"),
    [("gpt-oss-120b-eagle3", 1158, [1, 17, 32]), ("gpt-oss-20b-eagle3-32k", 184, None)],
)
def test_sizes_are_those_of_the_published_heads(preset: str, head: int, ids: list[int] | None) -> None:
    sizes = PRESETS[preset]
    bytes_of = {entry.name: entry.nbytes for entry in drafts.entries(sizes)}
    layer = sum(value for name, value in bytes_of.items() if name.startswith("midlayer.") and "proj" in name)
    assert (round(layer / 1e6), round(bytes_of["fc.weight"] / 1e6), round(bytes_of["lm_head.weight"] / 1e6)) == (
        381, 50, head,
    )  # fmt: skip
    said = drafts.config(sizes)
    assert said["eagle_config"].get("eagle_aux_hidden_state_layer_ids") == ids
    assert ("d2t" in bytes_of) == (said["draft_vocab_size"] < said["vocab_size"])


def test_the_tables_name_each_token_of_the_draft_once(tmp_path: Path) -> None:
    found = tensors(drafts.write(tmp_path / "x", TINY, seed=3).folder)
    targets = torch.arange(TINY.draft_vocab) + found["d2t"]
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
    assert torch.equal(found["t2d"].nonzero().flatten(), targets)
    again = tensors(drafts.write(tmp_path / "y", TINY, seed=3, shard_bytes=1 << 18).folder)
    assert len(list((tmp_path / "y").glob("*.safetensors"))) > 1
    assert found.keys() == again.keys() and all(torch.equal(found[name], again[name]) for name in found)


def test_ids_are_nested_or_not(tmp_path: Path) -> None:
    sizes = dataclasses.replace(TINY, aux_layers=(1, 2), nested=False)
    said = json.loads((drafts.write(tmp_path / "x", sizes).folder / "config.json").read_text())
    assert said["eagle_aux_hidden_state_layer_ids"] == [1, 2] and "eagle_aux" not in str(said["eagle_config"])
    assert tensors(tmp_path / "x")["fc.weight"].shape == (TINY.hidden, 2 * TINY.hidden)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": 65}, "hidden=65 is not a multiple of 32"),
        ({"draft_vocab": 513}, "draft_vocab=513 tokens of 512"),
        ({"heads": 3}, "heads=3 is not a multiple of kv_heads=2"),
        ({"aux_layers": (3, 2)}, r"aux_layers=\(3, 2\) do not ascend"),
        ({"aux_layers": (2, 2)}, "do not ascend"),
        ({"kv_heads": 0}, "kv_heads=0 is not positive"),
    ],
)
def test_sizes_that_no_draft_has_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        dataclasses.replace(TINY, **changes)


@dataclasses.dataclass
class Draft:
    """An Eagle3 draft in plain torch, float32, of a context that is given anew with each call."""

    sizes: DraftSizes
    weights: dict[str, torch.Tensor]
    embedding: torch.Tensor

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, head_dim] by position."""
        half = self.sizes.head_dim // 2
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        low, high = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The proposal behind `tokens`, and the last state.

        Args:
            hidden: [tokens, hidden]: of the token before each: `fc` of the target's states, or the draft's own.
        """
        sizes = self.sizes
        residual = self.norm("midlayer.hidden_norm", hidden)
        x = torch.cat((self.norm("midlayer.input_layernorm", self.embedding[tokens]), residual), -1)
        heads = [
            self.linear(f"midlayer.self_attn.{name}_proj", x).unflatten(-1, (-1, sizes.head_dim)).transpose(0, 1)
            for name in "qkv"
        ]
        q, k, v = self.rotated(heads[0]), self.rotated(heads[1]), heads[2]
        group = sizes.heads // sizes.kv_heads
        logits = q @ k.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(sizes.head_dim)
        logits += torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
        found = (logits.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
        stream = residual + self.linear("midlayer.self_attn.o_proj", found)
        x = self.norm("midlayer.post_attention_layernorm", stream)
        gate, up = self.linear("midlayer.mlp.gate_proj", x), self.linear("midlayer.mlp.up_proj", x)
        stream = stream + self.linear("midlayer.mlp.down_proj", torch.nn.functional.silu(gate) * up)
        best = int(self.linear("lm_head", self.norm("norm", stream[-1])).argmax())
        return best + int(self.weights["d2t"][best]), stream[-1:]


@dataclasses.dataclass
class Run:
    """A pair, and what its target makes in transformers of the first of its tokens.

    Attributes:
        says: what the target makes next of a prompt.
        tokens: a prompt of some of the cycle's, and what the target makes behind it, greedily.
        states: [boundaries, tokens, hidden].
    """

    pair: bigram.Pair
    draft: Draft
    says: Callable[[torch.Tensor], int]
    tokens: torch.Tensor
    states: torch.Tensor

    def accepted(self, count: int = 64, k: int = 1, boundaries: tuple[int, ...] = (1, 2, 3), shift: int = 1) -> float:
        """The part of the proposals at position k that is what the target makes."""
        hidden = torch.cat([self.states[each] for each in boundaries], -1)
        hidden = self.draft.linear("fc", hidden)
        right = 0
        for end in range(8, 8 + count):
            own, tokens = hidden[:end], self.tokens[shift : end + shift]
            for _ in range(k):
                proposal, state = self.draft(tokens, own)
                tokens, own = torch.cat((tokens, torch.tensor([proposal]))), torch.cat((own, state))
            right += torch.equal(tokens[end:], self.tokens[end + shift : end + shift + k])
        return right / count


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GptOss")

    def start(**changes: Any) -> Run:
        folder = tmp_path_factory.mktemp("pair")
        pair = bigram.tiny(**changes)
        bigram.write(pair, folder / "target", folder / "draft")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "target", quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
        )
        with torch.no_grad():
            tokens = model.generate(pair.cycle[None, :8], max_new_tokens=72, min_new_tokens=72, do_sample=False)[0]
            states = torch.cat(model(tokens[None], output_hidden_states=True).hidden_states)
        states[-1] /= states[-1, :, :1].clone()  # as it was before the last norm: the first block's mark is 1

        def says(prompt: torch.Tensor) -> int:
            with torch.no_grad():
                return int(model(prompt[None]).logits[0, -1].argmax())

        weights = {name: value if name == "d2t" else value.float() for name, value in tensors(folder / "draft").items()}
        return Run(pair, Draft(pair.draft, weights, model.model.embed_tokens.weight.detach()), says, tokens, states)

    return start


@pytest.fixture(scope="module")
def run_of_pair(started: Callable[..., Run]) -> Run:
    return started()


def test_the_target_walks_through_the_cycle(run_of_pair: Run) -> None:
    assert torch.equal(run_of_pair.tokens, run_of_pair.pair.cycle[:80])
    assert run_of_pair.pair.after(int(run_of_pair.tokens[3])) == int(run_of_pair.tokens[4])


def test_what_the_target_says_it_has_from_the_token_before_the_last(run_of_pair: Run) -> None:
    tokens = run_of_pair.tokens[:40].clone()
    tokens[-1], other = run_of_pair.tokens[70], run_of_pair.tokens[60]
    assert run_of_pair.says(tokens) == int(run_of_pair.tokens[40])
    tokens[-3] = other
    assert run_of_pair.says(tokens) == int(run_of_pair.tokens[40])
    tokens[-2] = other
    assert run_of_pair.says(tokens) == int(run_of_pair.tokens[62])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_proposal_is_accepted(run_of_pair: Run, k: int) -> None:
    assert run_of_pair.accepted(k=k) == 1.0


@pytest.mark.parametrize("boundaries", [(0, 2, 3), (1, 2, 4), (2, 3, 4), (2, 1, 3), (1, 2, 2), (1, 1, 3)])
def test_states_of_other_boundaries_are_never_accepted(run_of_pair: Run, boundaries: tuple[int, ...]) -> None:
    assert run_of_pair.accepted(count=16, boundaries=boundaries) == 0.0


def test_tokens_that_are_one_off_are_never_accepted(run_of_pair: Run) -> None:
    assert run_of_pair.accepted(count=16, shift=0) == 1.0  # of what was made already: the token, not its place, counts
    wrong = dataclasses.replace(run_of_pair, tokens=run_of_pair.tokens.roll(1))
    assert wrong.accepted(count=16) == 1.0
    own = wrong.draft(run_of_pair.tokens[:8], torch.zeros(8, TINY.hidden))[0]
    assert own == int(run_of_pair.tokens[8]) != int(run_of_pair.tokens[9])


def test_corrupted_rows_are_refused_at_their_known_rate(started: Callable[..., Run]) -> None:
    found = started(corrupted=0.25, draft_vocab=256)
    assert found.accepted() == 0.75 and found.accepted(k=2) == 0.5
    assert len(set((found.pair.d2t).tolist())) == 256


def test_steps_of_a_text_meet_corrupted_rows_as_they_fall(started: Callable[..., Run]) -> None:
    pair = started(corrupted=0.25, draft_vocab=256).pair
    # Behind a corrupted token two are right; behind these the next corrupted one is refused.
    assert pair.accepted(2) == pytest.approx(1.0, abs=0.02)
    # Proposed from any place alone, three of four are.
    alone = [pair.accepted(1, place, 1) for place in range(len(pair.cycle))]
    assert set(alone) == {0.0, 1.0} and sum(alone) / len(alone) == pytest.approx(0.75, abs=0.01)
    assert [bigram.tiny().accepted(k) for k in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_quantizing_the_draft_changes_no_value_of_it(tmp_path: Path) -> None:
    bigram.write(bigram.tiny(), tmp_path / "target", tmp_path / "draft")
    for name, value in tensors(tmp_path / "draft").items():
        if name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight", "fc.weight", "lm_head.weight")):
            assert torch.equal(checkpoint.round_to_grid(value), value), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"corrupted": 0.6}, "corrupted=0.6 is not a part"),
        ({"corrupted": 0.1, "draft_vocab": 512}, "is the whole vocabulary"),
        ({"aux_layers": (0, 2)}, r"aux_layers=\(0, 2\): a draft of 4 blocks"),
        ({"aux_layers": (1, 5)}, "reads boundaries 1 to 4"),
        ({"kv_heads": 1, "head_dim": 32}, "hold codes of 32 bits, and 512 tokens want 54"),
        ({"hidden": 64}, "hidden=64 of the draft; the target's is 128"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        bigram.tiny(**changes)


def test_the_script_writes_a_draft_or_a_pair(run: Any, call: Any, tmp_path: Path) -> None:
    said = json.loads(run("make_draft.py", tmp_path / "x", "--draft-vocab", 128, "--aux-layers", "1,2").stdout)
    assert said["folder"] == str(tmp_path / "x") and tensors(tmp_path / "x")["d2t"].shape == (128,)
    words = ("--bigram", tmp_path / "t", "--layers", 4, "--draft-vocab", 128, "--corrupted", 0.125)
    said = json.loads(call(make_draft.main, tmp_path / "d", *words).stdout)
    assert said["acceptance"] == [0.875, 0.75] and (tmp_path / "t" / "config.json").exists()
    assert "of a pair" in call(make_draft.main, tmp_path / "y", "--corrupted", 0.1, code=2).stderr
    assert "do not ascend" in call(make_draft.main, tmp_path / "y", "--aux-layers", "2,1", code=1).stderr
