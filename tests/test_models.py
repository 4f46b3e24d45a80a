"""Sizes of models: as they are published, as a checkpoint has them, and as ranks share them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jitmx import models
from jitmx.errors import InputError
from jitmx.formats import BLOCK
from jitmx.models import GPT_OSS_20B, GPT_OSS_120B


def test_a_model_by_name_has_the_sizes_of_its_published_configuration() -> None:
    published = pytest.importorskip("transformers").GptOssConfig()
    assert all(getattr(published, name) == value for name, value in GPT_OSS_120B.config().items())
    assert (GPT_OSS_20B.layers, GPT_OSS_20B.experts) == (24, 32)
    assert models.find("gpt-oss-20b") is GPT_OSS_20B
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(GPT_OSS_120B.layers)]
    assert published.layer_types == kinds


def test_products_have_the_shapes_of_the_checkpoints_weights() -> None:
    assert GPT_OSS_120B.dense == {"qkv": (5120, 2880), "o": (2880, 4096), "lm_head": (201088, 2880)}


def test_a_checkpoint_has_the_sizes_that_its_configuration_says(tmp_path: Path) -> None:
    said = GPT_OSS_20B.config() | {"num_hidden_layers": 3, "vocab_size": 100, "attention_bias": False}
    del said["sliding_window"]  # which products do not depend on
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = models.find(str(tmp_path))
    assert found.config() == said | {"sliding_window": 128} and found.lm_head == (100, 2880)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'gpt-oss-7b' is none of gpt-oss-120b, gpt-oss-20b"):
        models.find("gpt-oss-7b")
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(InputError, match=r"intermediate_size"):
        models.find(str(tmp_path))
    (tmp_path / "config.json").write_text("[64]")
    with pytest.raises(InputError, match=r"no folder with the config.json of a gpt-oss model"):
        models.find(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 7}, "num_attention_heads is 64, no multiple of num_key_value_heads, 7"),
        ({"model_type": "llama"}, "its model_type is 'llama', not 'gpt_oss'"),
        ({"model_type": ["gpt_oss"]}, "its model_type is ['gpt_oss'], not 'gpt_oss'"),
        ({"attention_bias": 1}, "attention_bias is 1, neither true nor false"),
        ({"hidden_size": "2880"}, "hidden_size is '2880', no whole number from 1 to"),
    ],
    ids=str,
)
def test_a_configuration_that_no_gpt_oss_model_has_is_refused_by_the_field(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = GPT_OSS_120B.config() | {"model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.find(str(tmp_path)) == GPT_OSS_120B
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InputError, match=re.escape(f"config.json of a gpt-oss model ({said}")):
        models.find(str(tmp_path))


def test_fields_that_a_configuration_lacks_are_named_together(tmp_path: Path) -> None:
    config = GPT_OSS_120B.config()
    del config["attention_bias"], config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"\(it has no head_dim and no attention_bias\)"):
        models.find(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[64]", "{", "[" * 100_000, "\x00"])
def test_a_file_that_is_no_object_is_refused_in_plain_words(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for find in (models.find, models.find_draft):
        with pytest.raises(InputError, match=r"\(it is no JSON"):
            find(str(tmp_path))


def test_no_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_120B.config()))
    monkeypatch.chdir(tmp_path)
    assert models.find(".") == GPT_OSS_120B
    with pytest.raises(InputError, match="there is no such file"):
        models.find("")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, no whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64', no whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 8, no multiple of num_key_value_heads, 3"),
        ({"num_key_value_heads": None}, "kv_heads is None, no whole number"),
        ({"eagle_config": [1]}, "eagle_config is [1], no object"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "eagle_aux_hidden_state_layer_ids is 5, no list"),
        ({"layer_types": 5}, "layer_types is 5, no list"),
        ({"layer_types": ["sliding_attention"]}, "it has no sliding_window"),
    ],
    ids=str,
)
def test_a_configuration_that_no_draft_has_is_refused_by_the_field(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.find_draft(str(tmp_path)).head_dim == 8
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InputError, match=re.escape(f"config.json of an Eagle3 draft ({said}")):
        models.find_draft(str(tmp_path))


@pytest.mark.parametrize("window", [None, 0, "128", 1 << 40])
def test_a_draft_whose_window_is_none_is_refused(window: Any, tmp_path: Path) -> None:
    said = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 100,
        "layer_types": ["sliding_attention"], "sliding_window": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert models.find_draft(str(tmp_path)).window == 16
    (tmp_path / "config.json").write_text(json.dumps(said | {"sliding_window": window}))
    with pytest.raises(InputError, match=r"sliding_window is "):
        models.find_draft(str(tmp_path))


def test_ranks_share_heads_features_and_vocabulary() -> None:
    assert GPT_OSS_120B.on_rank(1) == GPT_OSS_120B
    shard = GPT_OSS_120B.on_rank(16)
    assert shard.qkv == ((4 + 2 * 1) * 64, 2880) and shard.o == (2880, 4 * 64)
    assert shard.intermediate == 192 and shard.intermediate % BLOCK == 0  # 180 are no whole blocks
    assert shard.vocabulary == 201088 // 16
    with pytest.raises(InputError, match=r"3 ranks do not divide 64 heads"):
        GPT_OSS_120B.on_rank(3)
