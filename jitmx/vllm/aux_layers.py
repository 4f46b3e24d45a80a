"""Which states of the target an Eagle3 draft reads, as its config.json says wherever it does.

Published drafts have the numbers of the layers beside their sizes, or within `eagle_config`. vLLM's runner reads the
first only, and takes (2, half of the layers, all but 3) where there are none: a draft that was trained on others is
rarely right then, and nothing says so.
"""

from __future__ import annotations

import functools
from typing import Any

from jitmx.errors import InputError
from jitmx.vllm.log import logger

_NAME = "eagle_aux_hidden_state_layer_ids"


def find(spec_config: Any, stock: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The boundaries between the target's blocks whose states a draft reads, 0 before the first; or None for vLLM's.

    What is found nested is also put where vLLM's key for compiled code looks.

    Args:
        spec_config: the SpeculativeConfig.
        stock: what vLLM has found.

    Raises:
        InputError: there are two lists, or one that vLLM would read otherwise than the draft was trained.
    """
    model = getattr(spec_config, "draft_model_config", None)
    if model is None or spec_config.method != "eagle3":
        return stock
    config = model.hf_config
    nested = getattr(config, "eagle_config", None) or {}
    inner = nested.get(_NAME) if isinstance(nested, dict) else None
    if not stock and not inner:
        _say_none(model.model)
        return None
    found = tuple(stock or _checked(inner, model.model))
    if stock and inner and tuple(inner) != found:
        raise InputError(
            f"{model.model}: config.json says {_NAME}={list(found)}, and within eagle_config {list(inner)}",
            "leave the one that the draft was trained on",
        )
    layers = spec_config.target_model_config.get_total_num_hidden_layers()
    if list(found) != sorted(set(found)) or found[0] < 0 or found[-1] > layers:
        raise InputError(
            f"{model.model}: {_NAME}={list(found)}: vLLM reads the states of a model with {layers} layers once each, "
            f"in ascending order, 0 to {layers}",
            "the draft's fc has to be of states in that order",
        )
    count = getattr(config, "num_aux_hidden_states", None)
    if count is not None and count != len(found):
        raise InputError(f"{model.model}: {_NAME}={list(found)}, and num_aux_hidden_states={count}", "correct one")
    if not stock:
        setattr(config, _NAME, list(found))
        _say_nested(found)
    return found


def _checked(value: Any, model: str) -> list[int]:
    if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
        raise InputError(f"{model}: {_NAME}={value!r} within eagle_config is no list of numbers")
    return list(value)


@functools.cache
def _say_nested(found: tuple[int, ...]) -> None:
    logger.info("jitmx has the draft model read the states %s, as its eagle_config says", list(found))


@functools.cache
def _say_none(model: str) -> None:
    logger.warning(
        "%s does not say which of the target's states it reads (%s): vLLM takes those of its default, which a draft "
        "that was trained on others is rarely right with", model, _NAME,
    )  # fmt: skip
