"""The loop of docs/speculation.md with a small target and a draft that knows a part of it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch

DOCUMENT = Path(__file__).parent.parent / "docs" / "speculation.md"
VOCAB, HIDDEN, HEADS, LAYERS, PROMPT = 96, 64, 2, 2, 5
SHAPE = {"width": 3, "depth": 3, "nodes": 10}


@functools.cache
def code() -> dict[str, Any]:
    """What the document's Python defines."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(DOCUMENT), "exec"), names)  # the code that readers are shown
    return names


class World:
    """A target of random weights, and a draft that has its embedding and head alone: what follows a token by itself."""

    def __init__(self, batch: int, room: int, device: str = "cpu", seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float) -> torch.Tensor:
            return (torch.randn(shape, generator=draw) * scale).bfloat16().to(device)

        self.embed, self.head = normal(VOCAB, HIDDEN, scale=1.0), normal(HIDDEN, VOCAB, scale=0.5)
        self.layers = [
            (normal(HIDDEN, (HEADS + 2) * 64, scale=0.15), normal(HEADS * 64, HIDDEN, scale=0.05))
            for _ in range(LAYERS)
        ]
        angles = torch.arange(room + 16)[:, None] * 0.3 ** torch.arange(32)
        self.rope = torch.cat([angles.cos(), angles.sin()], 1).to(device)
        each = -(-room // 16)
        self.block_table = torch.randperm(batch * each, generator=draw).view(batch, each).int().to(device)
        self.prompts = torch.randint(0, VOCAB, (batch, PROMPT), generator=draw).to(device)

    def target(self) -> Any:
        """With empty caches."""
        return code()["Target"](self.embed, self.head, self.layers, self.rope, self.block_table.numel())

    def draft(self, tokens: torch.Tensor) -> torch.Tensor:
        """What follows each token, without what came before it."""
        return (self.embed[tokens] @ self.head).float().log_softmax(-1)

    def generate(self, count: int, **shape: int) -> tuple[list[list[int]], list[list[int]]]:
        """By the loop."""
        found: tuple[list[list[int]], list[list[int]]] = code()["generate"](
            self.target(), self.draft, self.prompts, self.block_table, count, **{**SHAPE, **shape}
        )
        return found

    def alone(self, tokens: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the target says in causal order at each place of these tokens, and how far below it each of them is."""
        taken = torch.tensor(tokens, device=self.prompts.device)
        inputs = torch.cat([self.prompts, taken], 1)
        batch, length = inputs.shape
        positions = torch.arange(length, device=inputs.device).repeat(batch, 1)
        seq_lens = torch.full((batch,), length, dtype=torch.int32, device=inputs.device)
        logits = self.target()(inputs, positions, seq_lens, self.block_table).float()[:, PROMPT - 1 : -1]
        best, says = logits.max(-1)
        return says, best - logits.gather(-1, taken[..., None])[..., 0]
