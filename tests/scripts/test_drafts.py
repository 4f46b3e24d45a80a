"""Synthetic drafts, the replay drafter, and what a benchmark of speculation makes of two greedy runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from jitmx import drafts
from jitmx.drafts import Draft
from jitmx.errors import InputError
from scripts import bench_speculation, make_draft
from scripts.protocol import drafts as checkpoints
from scripts.protocol.checkpoint import round_to_grid
from scripts.protocol.drafts import Bigram
from scripts.protocol.replay import Record

TINY = Draft(
    hidden=64, intermediate=96, layers=1, states=3, target_hidden=64, heads=2, kv_heads=1, head_dim=64, vocabulary=40,
    target_vocabulary=100,
)  # fmt: skip


@pytest.mark.parametrize("nested", [True, False])
def test_sizes_that_are_written_are_those_that_are_read(tmp_path: Path, nested: bool) -> None:
    sizes = replace(TINY, bias=True, norm_output=True)
    written = checkpoints.write(tmp_path / "draft", sizes, (1, 4, 7), nested=nested)
    assert drafts.find(str(written.folder)) == sizes
    tensors = load_file(written.folder / "model.safetensors")
    own = torch.arange(40) + tensors["d2t"]
    assert torch.equal(own, tensors["t2d"].nonzero().flatten()) and len(own) == 40
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (128, 128) and tensors["fc.weight"].shape == (64, 192)


def test_a_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    folders = [
        checkpoints.write(tmp_path / str(n), TINY, (1, 4, 7), seed=seed).folder for n, seed in enumerate((3, 3, 4))
    ]
    one, same, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert one == same != other


def test_drafts_known_by_name_have_the_sizes_of_the_published_ones() -> None:
    large, ids = checkpoints.named("eagle3-120b")
    assert ids == (1, 17, 32) and large.dense == {
        "qkv": (5120, 5760), "o": (2880, 4096), "gate_up": (34560, 2880), "down": (2880, 17280), "fc": (2880, 8640),
        "lm_head": (201088, 2880),
    }  # fmt: skip
    assert checkpoints.named("eagle3-20b")[0].vocabulary == 32000


@pytest.mark.parametrize("said", ["{}", "[]", '{"hidden_size": -1}', "no json"])
def test_a_folder_without_a_draft_is_refused(tmp_path: Path, said: str) -> None:
    (tmp_path / "config.json").write_text(said)
    with pytest.raises(InputError, match="Eagle3 draft"):
        drafts.find(str(tmp_path))


def test_mxfp4_holds_every_weight_of_the_pair_whose_acceptance_is_known() -> None:
    pair = Bigram(tokens=80, vocabulary=96, layers=4)
    for tensors in (pair.target_tensors(), pair.draft_tensors(True)):
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and tensor.dtype is torch.bfloat16 and "router" not in name:
                assert torch.equal(round_to_grid(tensor), tensor), name


@pytest.mark.parametrize("wrong", [0.0, 0.25, 1.0])
def test_so_many_rows_of_d2t_are_wrong(wrong: float) -> None:
    pair = Bigram(tokens=80, vocabulary=96, layers=4)
    right, found = (pair.draft_tensors(True, share)["d2t"] for share in (0.0, wrong))
    assert int((right != found).sum()) == wrong * 80
    tokens = torch.arange(80) + found
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 96


def test_the_script_writes_a_draft_and_a_pair(tmp_path: Path) -> None:
    run = CliRunner().invoke(make_draft.main, [str(tmp_path / "pair"), "--bigram", "--wrong", "0.25"])
    answer = json.loads(run.output)
    assert run.exit_code == 0 and answer["acceptance"] == 0.75
    assert drafts.find(answer["draft"]).vocabulary == 320 and (Path(answer["target"]) / "model.safetensors").is_file()
    run = CliRunner().invoke(make_draft.main, [str(tmp_path / "pair"), "--bigram", "--preset", "eagle3-20b"])
    assert run.exit_code == 2 and "one of" in run.output


def test_replayed_drafts_are_the_recorded_tokens_and_so_many_are_wrong() -> None:
    runs = [[5, 1, 2, 3, 4, 6, 7, 8], [9, 11, 12, 13, 14, 15, 16]]
    record = Record(runs, 20, torch.device("cpu"))
    firsts, known = torch.tensor([9, 5]), torch.tensor([3, 5])
    draw = torch.Generator().manual_seed(0)
    assert record.drafts(firsts, known, 3, 1.0, draw).tolist() == [[13, 14, 15], [6, 7, 8]]
    assert record.drafts(firsts, known, 2, 0.0, draw).tolist() == [[14, 15], [7, 8]]
    at_end = record.drafts(firsts, known + 10, 2, 1.0, draw)  # behind the record any token will do
    assert at_end.shape == (2, 2) and int(at_end.max()) < 20
    drawn = torch.cat([record.drafts(firsts, known, 2, 0.7, draw) for _ in range(2000)])
    right = torch.tensor([[13, 14], [6, 7]]).repeat(2000, 1)
    assert abs(float((drawn == right).double().mean()) - 0.7) < 0.02
    with pytest.raises(ValueError, match="same token"):
        Record([[1, 2], [1, 3]], 20, torch.device("cpu"))


def test_tokens_count_up_to_where_two_runs_part() -> None:
    found = bench_speculation.agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]])
    assert found == {"compared": 4, "parted": 1}
