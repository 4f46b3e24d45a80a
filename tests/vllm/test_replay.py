"""Metadata of attention are made for every batch but one whose graph is replayed where nothing else reads them."""

# ruff: noqa: E402

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

vllm_world = pytest.importorskip("vllm_world")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup

from jitmx.vllm import replay, sampler
from jitmx.vllm.attention import JitmxAttentionBackend, JitmxAttentionMetadata, JitmxAttentionMetadataBuilder

HOST = torch.device("cpu")
NAMES = ["model.layers.0.attn.attn"], ["model.layers.1.attn.attn"]


class State:
    """The state of a model that jitmx serves, without the model, and groups of its cache with a layer each."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(speculative_config=None, kv_transfer_config=None)
        self.state = object.__new__(sampler._asking(DefaultModelState))
        vars(self.state).update(vllm_config=self.config, supports_mm_inputs=False, encoder_cache=None)
        self.state.__class__ = type("State", (type(self.state),), {"max_model_len": 64})
        spec: Any = SimpleNamespace(block_size=16)
        self.groups = [[AttentionGroup(JitmxAttentionBackend, names, spec, i)] for i, names in enumerate(NAMES)]
        for (group,) in self.groups:
            builder = object.__new__(JitmxAttentionMetadataBuilder)
            builder.page_size, builder._short, builder._few = 16, 8, 16
            group.metadata_builders = [builder]

    def made(self, mode: CUDAGraphMode = CUDAGraphMode.FULL, **more: Any) -> dict[str, Any]:
        batch = InputBatch.make_dummy(3, 3, InputBuffers(8, 64, HOST))
        tables = tuple(torch.zeros(3, 4, dtype=torch.int32) for _ in NAMES)
        caches = SimpleNamespace(kv_cache_groups=NAMES)
        found: dict[str, Any] = self.state.prepare_attn(
            batch, mode, tables, torch.zeros(2, 3, dtype=torch.int64), self.groups, caches, **more
        )
        return found


def is_whole(found: dict[str, Any]) -> bool:
    """Whether each layer has metadata, of jitmx's kind."""
    assert set(found) in (set(), {name for names in NAMES for name in names})
    return bool(found) and all(type(one) is JitmxAttentionMetadata for one in found.values())


def test_a_graph_that_is_replayed_has_no_metadata_made_and_every_other_batch_has() -> None:
    state = State()
    for _ in range(2):
        assert state.made() == {}
        assert is_whole(state.made(for_capture=True))
        assert is_whole(state.made(CUDAGraphMode.NONE)) and is_whole(state.made(CUDAGraphMode.PIECEWISE))


def test_they_are_made_anew_where_other_groups_take_the_place_of_those() -> None:
    state = State()
    assert state.made() == {}
    state.groups = State().groups
    state.groups[1][0].kernel_block_size = 16  # and its graph reads a table that is written as they are made
    state.groups[1][0].map_to_kernel_block_table = lambda table, _ubatch: table  # type: ignore[method-assign]
    assert is_whole(state.made())


@pytest.mark.parametrize("name", ["speculative_config", "kv_transfer_config"])
def test_a_draft_and_a_connector_have_them(name: str) -> None:
    state = State()
    setattr(state.config, name, SimpleNamespace())
    assert is_whole(state.made())


def test_a_batch_of_which_another_backend_has_layers_has_them_all() -> None:
    state = State()
    other = object.__new__(TritonAttentionMetadataBuilder)
    other.seq_threshold_3D = other.num_par_softmax_segments = other.max_seqs_64_segments = 0
    other.softmax_segm_output = other.softmax_segm_max = other.softmax_segm_expsum = torch.zeros(1)
    other.rswa_window = None
    state.groups[1][0].metadata_builders = [other]
    assert len(state.made()) == 2


def test_microbatches_have_them() -> None:
    state = State()
    builders = state.groups[0][0].metadata_builders
    builders.append(builders[0])
    assert is_whole(state.made())


def test_a_state_that_does_more_as_they_are_made_has_them_made() -> None:
    class Other(DefaultModelState):
        def prepare_attn(self, *_given: Any, **_more: Any) -> dict[str, Any]:
            return {"more": 1}

    state = State()
    state.state.__class__ = sampler._asking(Other)
    assert state.made() == {"more": 1}


def test_a_vllm_that_may_read_them_elsewhere_has_them_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replay.changed() == ()
    monkeypatch.setattr(replay, "_KNOWN_RUNNER", {**replay._KNOWN_RUNNER, "sample_tokens": "another"})
    replay.changed.cache_clear()
    try:
        assert replay.changed() == ("sample_tokens",) and is_whole(State().made())
    finally:
        replay.changed.cache_clear()
