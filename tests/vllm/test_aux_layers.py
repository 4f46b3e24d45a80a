"""Which of the target's states an Eagle3 draft reads: as config.json says, wherever it does, or refused."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

vllm_world = pytest.importorskip("vllm_world")

from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

from jitmx.errors import InputError
from jitmx.vllm import aux_layers, speculation
from scripts.protocol import drafts

NAME = "eagle_aux_hidden_state_layer_ids"


def speculative(**config: Any) -> Any:
    """A SpeculativeConfig as far as this looks at it, of a target with 36 layers."""
    return SimpleNamespace(
        method="eagle3", draft_model_config=SimpleNamespace(model="a-draft", hf_config=SimpleNamespace(**config)),
        target_model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 36),
    )  # fmt: skip


def nested(*ids: Any) -> dict[str, Any]:
    return {NAME: list(ids), "use_aux_hidden_state": True}


def find(config: Any) -> Any:
    return aux_layers.find(config, speculation._stock_aux(config))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"eagle_config": nested(1, 17, 32)}, (1, 17, 32)),
        ({NAME: [24, 30, 36]}, (24, 30, 36)),
        ({NAME: [2, 4], "eagle_config": nested(2, 4), "num_aux_hidden_states": 2}, (2, 4)),
        ({"eagle_config": {"layer_ids": [5, 6, 7]}}, (5, 6, 7)),
        ({"eagle_config": nested(0, 35)}, (0, 35)),
        ({"eagle_config": None}, None),
        ({}, None),
    ],
)
def test_ids_are_read_wherever_they_are(host: Any, config: dict[str, Any], wanted: Any) -> None:
    given = speculative(**config)
    assert find(given) == wanted
    inner = (config.get("eagle_config") or {}).get(NAME)
    if inner:  # where vLLM's key for compiled code looks
        assert getattr(given.draft_model_config.hf_config, NAME) == inner and find(given) == wanted
    silent = [line for line in host.said if "does not say which of the target's states it reads" in line[1]]
    assert [level for level, _ in silent] == (["WARNING"] if wanted is None else [])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"eagle_config": nested(17, 1, 32)}, r"=\[17, 1, 32\]: vLLM reads the states .* in ascending order, 0 to 36"),
        ({"eagle_config": nested(1, 1, 32)}, "once each"),
        ({"eagle_config": nested(1, 37)}, "0 to 36"),
        ({NAME: [-1, 3]}, "0 to 36"),
        (
            {NAME: [1, 2, 3], "eagle_config": nested(1, 2, 4)},
            r"says .*=\[1, 2, 3\], and within eagle_config \[1, 2, 4\]",
        ),
        ({"eagle_config": nested(1, 2), "num_aux_hidden_states": 3}, "num_aux_hidden_states=3"),
        ({"eagle_config": nested("1", 2)}, "is no list of numbers"),
        ({"eagle_config": {NAME: 3}}, "is no list of numbers"),
    ],
)
def test_ids_that_vllm_would_read_otherwise_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        find(speculative(**config))


def test_other_methods_keep_what_vllm_finds() -> None:
    given = speculative(eagle_config=nested(1, 2))
    given.method = "dflash"
    assert find(given) is None


@pytest.mark.parametrize("flat", [False, True])
def test_a_target_gives_the_states_that_its_draft_names(host: Any, tmp_path: Path, flat: bool) -> None:
    sizes = drafts.DraftSizes(
        hidden=64, intermediate=96, vocab=100, draft_vocab=64, positions=512, aux_layers=(0, 2), nested=not flat
    )  # fmt: skip
    folder = drafts.write(tmp_path / "x", dataclasses.replace(sizes)).folder
    method = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 1}
    model = host.build(speculative_config=method)
    eagle3_utils.set_eagle3_aux_hidden_state_layers(model, model.vllm_config.speculative_config)
    assert model.model.aux_hidden_state_layers == (0, 2)
