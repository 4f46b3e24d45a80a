"""vLLM's router layer, whose product jitmx takes into the experts' call where that is possible.

vLLM multiplies with the router's weight in traced code and chooses experts in an opaque operator. Where jitmx takes the
router over, the traced part yields nothing, and product, top-k and softmax are one launch inside.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

_NAME = "GateLinear"

# By name in the model: routers that no experts have asked for yet. A model makes a router right before its experts.
_made: weakref.WeakValueDictionary[str, RouterLinear] = weakref.WeakValueDictionary()


class RouterLinear(GateLinear):  # type: ignore[misc]
    """vLLM's router, which makes no logits once `taken`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken = False
        _made[self.prefix] = self

    def forward(self, x: torch.Tensor) -> Any:
        """Logits; or, where the experts make their own, a tensor without elements."""
        return x.new_empty(0) if self.taken else super().forward(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b, as vLLM computes it."""
        logits: torch.Tensor = super().forward(x)
        return logits


def install() -> None:
    """Have vLLM make RouterLinear for GateLinear. Again, it changes nothing; another plugin's class stays."""
    if _NAME not in op_registry_oot:
        GateLinear.register_oot(RouterLinear)


def take(experts: str) -> RouterLinear | None:
    """The router of the experts called `experts`, if jitmx can take it over; each is given once."""
    gate = _made.pop(experts.rpartition(".")[0] + ".router", None)
    if gate is None or not _can_be_taken(gate):
        return None
    return gate


def _can_be_taken(gate: Any) -> bool:
    return (
        isinstance(gate.quant_method, UnquantizedLinearMethod)
        and not gate.return_bias
        and not gate.skip_bias_add
        and gate.out_dtype is None
        and gate.weight.dtype == torch.bfloat16
        and gate.weight.shape[1] % 8 == 0
    )
