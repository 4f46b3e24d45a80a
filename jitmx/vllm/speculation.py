"""What vLLM's speculation does around a draft model: which states it reads, whose head it has, how it takes tokens."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.utils import replace_parameter
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils, utils
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from jitmx.errors import InputError
from jitmx.ops.linear import operand
from jitmx.vllm import draft, packing, warmup
from jitmx.vllm.linear import JitmxLinearMethod, pack
from jitmx.vllm.log import logger

_IDS = "eagle_aux_hidden_state_layer_ids"

_decide_head: Callable[[Any], Any] | None = None


def aux_layers(config: Any, layers: int) -> tuple[int, ...] | None:
    """Which states of the target an Eagle3 draft was trained on: those in front of these layers.

    Read at the top of its config.json and in `eagle_config`; None where neither says.

    Args:
        config: the draft's, as transformers reads it.
        layers: of the target.

    Raises:
        InputError: ids that are none, in an order that vLLM would change, of another number than fc reads, or different
            in the two places.
    """
    nested = getattr(config, "eagle_config", None)
    nested = nested if isinstance(nested, Mapping) else {}
    said = {
        place: ids
        for place, ids in ((_IDS, getattr(config, _IDS, None)), (f"eagle_config.{_IDS}", nested.get(_IDS)))
        if ids is not None
    }
    for place, ids in said.items():
        right = isinstance(ids, Sequence) and not isinstance(ids, str) and len(ids) > 0
        right = right and all(type(one) is int and 0 <= one <= layers for one in ids)
        if not right or list(ids) != sorted(set(ids)):
            raise InputError(
                f"the draft's {place} is {ids!r}, and must be numbers of the target's layers, 0 to {layers}, in order",
                "mend its config.json: with the states of other layers than it was trained on it guesses",
            )
    found = {tuple(ids) for ids in said.values()}
    if len(found) > 1:
        raise InputError(f"the draft names two choices of layers: {', '.join(f'{k}={v!r}' for k, v in said.items())}")
    if not found:
        return None
    (ids,) = found
    read = getattr(config, "num_aux_hidden_states", None) or len(nested.get(_IDS) or ()) or 3
    if len(ids) != read:
        raise InputError(f"the draft names {len(ids)} layers, {ids}, and its fc reads the states of {read}")
    return ids


def _read_aux(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(stock)
    def found(spec_config: Any) -> Any:
        model = getattr(spec_config, "draft_model_config", None)
        if not model or getattr(spec_config, "method", None) != "eagle3":
            return stock(spec_config)
        target = spec_config.target_model_config.get_total_num_hidden_layers()
        own = aux_layers(model.hf_config, target)
        if own is None:
            own = stock(spec_config)
        if not own:
            logger.warning(
                "the draft's config.json names no %s: vLLM takes the states in front of layers 2, %d and %d, which are "
                "right for a draft that was trained on these", _IDS, target // 2, target - 3,
            )  # fmt: skip
        return own

    found.jitmx = True  # type: ignore[attr-defined]
    return found


def same_head(own: Any, target: Any) -> bool | None:
    """Whether the head that a draft has loaded is that of the target; None where vLLM can tell.

    A packed weight is compared with a packed one; a weight in bf16 is packed as the target's is first.
    """
    packed = [isinstance(getattr(head, "quant_method", None), JitmxLinearMethod) and hasattr(head, "jitmx_packed")
              for head in (own, target)]  # fmt: skip
    if not packed[1]:
        return False if packed[0] else None
    n, k, layout = target.jitmx_packed
    if packed[0]:
        if own.jitmx_packed != target.jitmx_packed:
            return False
        words, scales = own.weight_packed, own.weight_scale
    else:
        weight = own.weight.data
        if tuple(weight.shape) != (n, k):
            return False
        made = pack(weight, operand.parts(layout)[0])
        words, scales = made.words, made.scales
    return bool(torch.equal(words, target.weight_packed) and torch.equal(scales, target.weight_scale))


def _shares(stock: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(stock)
    def found(eagle: Any, flag: str, own: Any, target: Any) -> bool:
        if flag == "has_own_lm_head" and getattr(eagle, flag, False) and own is not None and target is not None:
            same = same_head(own, target)
            if same is not None:
                if same:
                    logger.info("the draft's lm_head is the target's: it is kept once, packed")
                return same
        return stock(eagle, flag, own, target)

    found.jitmx = True  # type: ignore[attr-defined]
    return found


def _loads(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load_draft_model(self: Any, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        model = stock(self, target_model, target_attn_layer_names)
        if isinstance(model, draft.JitmxEagle3LlamaForCausalLM):
            finish(self, model, target_model)
        return model

    load_draft_model.jitmx = True  # type: ignore[attr-defined]
    return load_draft_model


def finish(speculator: Any, model: Any, target_model: Any) -> None:
    """Behind loading: a packed head where one was asked for, and tokens taken from it without logits."""
    config = speculator.vllm_config
    head: Any = model.lm_head
    target: Any = getattr(target_model, "lm_head", None)
    if head is target and _decide_head is not None and not isinstance(head.quant_method, JitmxLinearMethod):
        decision = _decide_head(head)
        if decision is not None and decision.format is not None:
            del model.lm_head
            model.lm_head = packed_copy(head, decision)
    if draft.argmax_weight(model) is None:
        return
    against = _against_top_tokens(speculator)
    if against:
        logger.info("the draft's logits are written: %s", against)
        return
    speculator.use_local_argmax_reduction = True
    warmup.prepare_top_tokens(config, model)
    logger.info("jitmx takes the draft's tokens from its head, without logits")


def _against_top_tokens(speculator: Any) -> str:
    """What needs a draft's logits, in words; empty where nothing does."""
    config = speculator.speculative_config
    checks = (
        (config.draft_sample_method == "greedy", f"draft_sample_method={config.draft_sample_method}"),
        (not speculator.use_acceptance_estimator, "acceptance is estimated from them"),
        (speculator.draft_watermarker is None, "drafts have watermarks"),
        (not config.use_heterogeneous_vocab, "draft and target have different vocabularies"),
    )
    return next((reason for fine, reason in checks if not fine), "")


def packed_copy(head: Any, decision: Any) -> Any:
    """A head with the weight of `head`, in bf16, packed: for a draft that has none of its own."""
    made = copy.copy(head)
    made._parameters = dict(head._parameters)
    method = JitmxLinearMethod(decision.format, "lm_head of the draft", head.quant_method, decision.all_scales)
    made.quant_method = method
    with packing.processing():
        warmup.prepare_packing(made, decision.format)
        with packing.timed():
            weight = pack(head.weight.data, decision.format)
    made.jitmx_packed = weight.n, weight.k, operand.layout(weight)
    replace_parameter(made, "weight_packed", weight.words)
    replace_parameter(made, "weight_scale", weight.scales)
    # Not replaced: the target's parameter would be written to.
    made._parameters["weight"] = torch.nn.Parameter(head.weight.data.new_full((1, 1), math.nan), requires_grad=False)
    made._already_called_process_weights_after_loading = True
    warmup.prepare_product(made)
    return made


def install(decide_head: Callable[[Any], Any]) -> None:
    """Have vLLM ask here. Again, it changes nothing.

    Args:
        decide_head: from a head in bf16 that a draft takes from the target to a Decision on a packed copy.
    """
    global _decide_head
    _decide_head = decide_head
    if not hasattr(eagle3_utils.get_eagle3_aux_layers_from_config, "jitmx"):
        eagle3_utils.get_eagle3_aux_layers_from_config = _read_aux(eagle3_utils.get_eagle3_aux_layers_from_config)
    if not hasattr(utils._should_share, "jitmx"):
        utils._should_share = _shares(utils._should_share)
    if not hasattr(EagleSpeculator.load_draft_model, "jitmx"):
        EagleSpeculator.load_draft_model = _loads(EagleSpeculator.load_draft_model)
