"""What vLLM's speculation does around a draft model: which states it reads, whose head it has, how it takes tokens.

vLLM writes the logits of a reduced vocabulary into a row of the whole one and looks that through; here one launch
compares the products of a packed head, and one looks up the token that the best of them stands for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.utils import replace_parameter
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils, utils
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from jitmx.ops.checks import HALF_DTYPES
from jitmx.ops.linear import operand
from jitmx.serving.draft import Argmax
from jitmx.vllm import aux_layers, draft, facts, packing, warmup
from jitmx.vllm.attention import JitmxAttentionMetadata
from jitmx.vllm.linear import JitmxLinearMethod, pack
from jitmx.vllm.log import logger
from jitmx.vllm.policy import Decision

_decide_head: Callable[[Any], Decision] | None = None
# vLLM's, whose places are taken.
_stock_aux = eagle3_utils.get_eagle3_aux_layers_from_config
_stock_share = utils._should_share
_stock_load = EagleSpeculator.load_draft_model
_stock_fused_drafts = TargetDependentARSpeculator._generate_fused_drafts


def _aux_layers(spec_config: Any) -> tuple[int, ...] | None:
    """The boundaries of the target's blocks whose states a draft reads; None where its configuration has none."""
    found: tuple[int, ...] | None = _stock_aux(spec_config)
    return aux_layers.find(spec_config, found)


def _shares(eagle: Any, flag: str, draft: Any, target: Any) -> bool:
    """Whether a draft takes a layer of the target's for its own: where it has none, or the same."""
    if getattr(eagle, flag, False) and isinstance(getattr(target, "quant_method", None), JitmxLinearMethod):
        return draft is not None and _alike(draft, target)
    return bool(_stock_share(eagle, flag, draft, target))


def _alike(own: Any, target: Any) -> bool:
    """Whether a head is packed as one that is packed already is, now or if it were."""
    if isinstance(own.quant_method, JitmxLinearMethod):
        if own.jitmx_packed != target.jitmx_packed:
            return False
        words, scales = own.weight_packed, own.weight_scale
    else:
        n, k, layout = target.jitmx_packed
        if own.weight.shape != (n, k) or own.weight.dtype not in HALF_DTYPES:
            return False
        packed = pack(own.weight.data, operand.parts(layout)[0])
        words, scales = packed.words, packed.scales
    same = torch.equal(words, target.weight_packed) and torch.equal(scales, target.weight_scale)
    if same:
        logger.info("the draft model's lm_head is the target's: it is kept once, packed")
    return bool(same)


def _load(self: Any, target_model: Any, target_attn_layer_names: set[str]) -> Any:
    """The draft model of a speculator, whose tokens are taken by one launch where that can be."""
    model = _stock_load(self, target_model, target_attn_layer_names)
    if not draft.served(self.vllm_config):
        return model
    if not isinstance(model, Eagle3LlamaForCausalLM):
        draft.say_left(f"it is a {type(model).__name__}, and jitmx serves Eagle3 drafts of Llama blocks")
    elif isinstance(model, draft.JitmxEagle3LlamaForCausalLM):
        _take_head(model, target_model)
        _take_argmax(self, model)
        _number_steps(self, model)
    return model


def _take_head(model: Any, target_model: Any) -> None:
    """A packed copy of the target's head in bf16, where a draft has none of its own and one was asked for."""
    head: Any = model.lm_head
    target: Any = getattr(target_model, "lm_head", None)
    if head is not target or isinstance(head.quant_method, JitmxLinearMethod):
        return
    decision = None if _decide_head is None else _decide_head(head)
    if decision is not None and decision.format is not None:
        del model.lm_head
        model.lm_head = _packed_copy(head, decision)


def _packed_copy(head: Any, decision: Decision) -> Any:
    """A head with the weight of `head`, in bf16, packed."""
    made = copy.copy(head)
    made._parameters = dict(head._parameters)
    format = decision.format
    assert format is not None, "the policy has chosen one"
    method = JitmxLinearMethod(format, "lm_head of the draft", head.quant_method, decision.all_scales)
    made.quant_method = method
    with packing.processing():
        warmup.prepare_packing(made, format)
        with packing.timed():
            weight = pack(head.weight.data, format)
    made.jitmx_packed = weight.n, weight.k, operand.layout(weight)
    replace_parameter(made, "weight_packed", weight.words)
    replace_parameter(made, "weight_scale", weight.scales)
    # Not replaced: the target's parameter would be written to.
    made._parameters["weight"] = torch.nn.Parameter(head.weight.data.new_full((1, 1), math.nan), requires_grad=False)
    made._already_called_process_weights_after_loading = True
    warmup.prepare_product(made)
    return made


def _take_argmax(speculator: Any, model: Any) -> None:
    """Have a speculator take its tokens by `get_top_tokens`, and the kernels for that ready."""
    against = _against_argmax(speculator, model)
    if against:
        logger.info("vLLM takes the draft model's tokens of its logits: %s", against)
        return
    head, found = model.lm_head, facts.target()[0]
    _, k, layout = head.jitmx_packed
    format, encoding, scale_range = operand.parts(layout)
    assert found is not None, "no layer is served without a target"
    warmup.prepare(
        Argmax(
            found.name, warmup.device_of(head.weight_packed.device), speculator.max_num_reqs,
            model.logits_processor.org_vocab_size, k, HALF_DTYPES[head.weight.dtype], format, encoding, scale_range,
            model.jitmx_norm is not None,
        )
    )  # fmt: skip
    speculator.use_local_argmax_reduction = True
    logger.info("jitmx takes the draft model's tokens with the product of its head")


def _number_steps(speculator: Any, model: Any) -> None:
    """Numbers of a graph's steps, which nobody writes again; on 16 bytes each, as vLLM's own is."""
    steps = torch.arange(speculator.speculative_config.num_speculative_tokens, device=model.lm_head.weight.device)
    model.register_buffer("jitmx_steps", steps[:, None].repeat(1, 2), persistent=False)


class _StepTables:
    """vLLM's block tables, of which a step of a draft's graph finds the slots of its own tokens.

    vLLM's kernel marks all slots behind those as padding, up to the longest prompt that a step takes, by one block:
    that is most of its time.
    """

    def __init__(self, tables: Any) -> None:
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)

    def compute_slot_mappings(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, positions: torch.Tensor, num_tokens_padded: int
    ) -> torch.Tensor:
        """vLLM's, [groups, num_tokens_padded], where they are always."""
        found: torch.Tensor = self._tables.compute_slot_mappings(
            idx_mapping, query_start_loc, positions, num_tokens_padded,
            out=self._tables.slot_mappings[:, :num_tokens_padded],
        )  # fmt: skip
        return found


def _fused_drafts(
    self: Any, num_reqs: int, num_tokens_padded: int, attn_metadata: Any, slot_mappings: Any, *rest: Any, **named: Any
) -> None:
    """vLLM's drafts of a graph, with fewer launches a step.

    A draft's token lies where the block table has the last one of its request. Slots say the same of its position, if
    that advances with each token and no ranks share a context.
    """
    if not draft.served(self.vllm_config):
        _stock_fused_drafts(self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, *rest, **named)
        return
    tables, batches = self.block_tables, attn_metadata or {}
    own = all(isinstance(batch, JitmxAttentionMetadata) for batch in batches.values())
    if batches and own and self.advance_draft_positions and tables.cp_size == 1 and hasattr(self.model, "jitmx_steps"):
        attn_metadata = {name: replace(batch, slot_mapping=None) for name, batch in batches.items()}
        _own_drafts(self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, *rest, **named)
        return
    self.block_tables = _StepTables(tables)
    try:
        _stock_fused_drafts(self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, *rest, **named)
    finally:
        self.block_tables = tables


def _own_drafts(
    self: Any, num_reqs: int, num_tokens_padded: int, attn_metadata: Any, slot_mappings: Any, num_tokens_across_dp: Any,
    cudagraph_runtime_mode: Any, num_speculative_steps: int,
) -> None:  # fmt: skip
    """The same without slots, which attention finds itself; each step has its number in memory of its own."""
    written = self.current_draft_step
    try:
        for step in range(1, num_speculative_steps):
            self._update_draft_decode_metadata(attn_metadata, num_reqs)
            self.current_draft_step = self.model.jitmx_steps[step, 0]
            self._generate_draft(
                num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode,
                num_speculative_steps,
            )  # fmt: skip
    finally:
        self.current_draft_step = written


def _against_argmax(speculator: Any, model: Any) -> str:
    """What stands against taking tokens with the product of the head, in words; empty where nothing."""
    head, asked = model.lm_head, speculator.speculative_config
    checks = (
        (isinstance(head.quant_method, JitmxLinearMethod), "its head is vLLM's"),
        (speculator.draft_logits is None, "they are drawn at random (draft_sample_method)"),
        (not speculator.enable_adaptive_verification, "their logits say how sure it is (enable_adaptive_verification)"),
        (speculator.draft_watermarker is None, "they have watermarks"),
        (not asked.use_heterogeneous_vocab, "draft and target have different vocabularies (use_heterogeneous_vocab)"),
        (head.tp_size == 1, f"{head.tp_size} ranks share its head"),
        (draft.argmax_weight(model) is not None, "its logits are scaled by another than a positive number"),
    )
    return next((reason for fine, reason in checks if not fine), "")


def install(decide_head: Callable[[Any], Decision]) -> None:
    """Have vLLM ask here. Again, it changes nothing but the policy.

    Args:
        decide_head: from a head in bf16 that a draft takes from the target to who serves a packed copy.
    """
    global _decide_head
    _decide_head = decide_head
    for (owner, name), own in PATCHED.items():
        setattr(owner, name, own)


# By who has it and under which name: what is put in its place.
PATCHED: dict[tuple[Any, str], Any] = {
    (eagle3_utils, "get_eagle3_aux_layers_from_config"): _aux_layers,
    (utils, "_should_share"): _shares,
    (EagleSpeculator, "load_draft_model"): _load,
    (TargetDependentARSpeculator, "_generate_fused_drafts"): _fused_drafts,
}
