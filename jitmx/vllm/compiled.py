"""What vLLM's key for compiled code is told of jitmx: who serves which layer, by which operators, packed how.

That key looks neither at the environment of jitmx nor at weights, nor at code that is not traced, where operators are.
`additional_config` is part of it, and is read when a model is first called, behind loading.
"""

from __future__ import annotations

import functools
from typing import Any

_NAME = "jitmx_serves"


def add(config: Any, kind: str, format: str | None) -> None:
    """A kind of layer, and the format that jitmx serves it in, or None.

    Args:
        config: the VllmConfig of the model that is being built.
    """
    served = _served(config)
    if served is not None:
        served[kind] = format or served.get(kind, "")


def full_scales(config: Any, prefix: str) -> None:
    """A layer whose scales not all kernels take: compiled code names the layout that it was traced with.

    Args:
        config: as above, or None where there is none.
        prefix: of the layer.
    """
    served = None if config is None else _served(config)
    if served is not None:
        served["full_scales"] = sorted({*served.get("full_scales", ()), prefix})


def _served(config: Any) -> dict[str, Any] | None:
    """What has been told so far, to be added to; None where vLLM was given an object in the place of a dictionary."""
    if not isinstance(config.additional_config, dict):
        return None
    found: dict[str, Any] = config.additional_config.setdefault(_NAME, {"operators": operators()})
    return found


@functools.cache
def operators() -> str:
    """The operators that compiled code of this version may call, by digest."""
    import jitmx.operators
    import jitmx.vllm.products  # noqa: F401 - both define operators
    from jitmx.ops import custom

    return custom.digest()
