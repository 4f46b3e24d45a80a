"""What a step need not prepare where its graph is replayed: the metadata of attention, which no one then reads.

vLLM makes it anew in every step, for each group of the cache and each layer. A graph of jitmx's attention reads vLLM's
own buffers, which are written by then.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils, kv_connector
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup

from jitmx.vllm import hooks
from jitmx.vllm.attention import JitmxAttentionMetadataBuilder

# By digest, what was read to say so: who makes metadata, who takes them, and what replays a graph.
_KNOWN = {
    "DefaultModelState.prepare_attn": (DefaultModelState.prepare_attn, "b101c1c9ac27bcc9"),
    "AttentionGroup": (AttentionGroup, "de0778debf6ddb35"),
    "CudaGraphManager.run_fullgraph": (cudagraph_utils.CudaGraphManager.run_fullgraph, "f8d3c96772dc2587"),
    "KVConnector": (kv_connector.KVConnector, "f095ea40ca763902"),
}
# Likewise, of the runner; importing its module takes long, and is done by the time that there is a state of a model.
_KNOWN_RUNNER = {
    "execute_model": "d0b54f52cfdf1b91",
    "sample_tokens": "3534013a843f70b8",
    "_dummy_run": "4605d12eed3812c3",
}


class Replays:
    """What is put before the class of a model's state."""

    vllm_config: Any
    jitmx_unread: tuple[Any, bool] = None, False

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, slot_mappings: Any, attn_groups: Any,
        kv_cache_config: Any, for_capture: bool = False, *rest: Any, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Metadata of each layer by its name; none for a graph that is replayed where nothing else reads them."""
        if cudagraph_mode is CUDAGraphMode.FULL and not for_capture:
            groups, unread = self.jitmx_unread
            if groups is not attn_groups:  # vLLM makes them once, when the cache is allocated
                unread = not _read(type(self), self.vllm_config, attn_groups)
                self.jitmx_unread = attn_groups, unread
            if unread:
                return {}
        found: dict[str, Any] = super().prepare_attn(  # type: ignore[misc]
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture, *rest,
            **more,
        )  # fmt: skip
        return found


def _read(state: type[Any], config: Any, groups: list[list[Any]]) -> bool:
    """Whether anything reads metadata, or what is written while they are made, when a graph is replayed."""
    every = [group for some in groups for group in some]
    return not (
        super(Replays, state).prepare_attn is DefaultModelState.prepare_attn
        and config.speculative_config is None  # a draft's metadata follow from these
        and config.kv_transfer_config is None
        and all(group.kernel_block_size is None for group in every)  # else it has a table for its graph
        and all(type(one) is JitmxAttentionMetadataBuilder for group in every for one in group.metadata_builders)
        and all(len(group.metadata_builders) == 1 for group in every)
        and not changed()
    )


@functools.cache
def changed() -> tuple[str, ...]:
    """Which functions of vLLM are not as they were when this was written from them."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    known = _KNOWN | {name: (getattr(GPUModelRunner, name, None), digest) for name, digest in _KNOWN_RUNNER.items()}
    return hooks.changed(known)
