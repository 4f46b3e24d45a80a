"""A simulated card whose launches overlap as on a stream: who uses before its wait what another may still write fails.

A programmatic launch begins while those before it are at work, back to the last ordinary one, of torch's or one of
jitmx that does not depend, or to one that lets the next begin behind its own wait. What was written before is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jitmx.registry.arguments import Number
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from simulated_card import Simulated, on_cpu, ptx_of

_ALLOCATE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "set_")


@dataclass
class Chained(Simulated):
    """A card that knows what launches may still be writing.

    Attributes:
        written: starts of the memory that launches at work write.
        early: how many launches of jitmx have begun while others were at work.
        launching: whether what torch does is the simulator's.
    """

    written: set[int] = field(default_factory=set)
    early: int = 0
    launching: bool = False

    def bind(
        self, variant: Variant, device: int, launch: Launch, takes: Sequence[str], fixed: Mapping[str, Number], *,
        dependent: bool = True,
    ) -> Callable[..., None]:  # fmt: skip
        run = super().bind(variant, device, launch, takes, fixed)

        def chained(*values: Number) -> None:
            self.begins_early = dependent and getattr(variant.knobs, "pdl", False)
            run(*values)

        return chained

    def is_there(self, start: int) -> bool:
        return start not in self.written

    def launch(self, variant: Variant, launch: Launch, values: dict[str, Number]) -> None:
        self.early += self.begins_early
        if not self.begins_early:
            self.written.clear()
        fields = [item for item in variant.arguments.fields.values() if item.letter == "P" and values.get(item.name)]
        writes = [self.start_of(int(values[item.name])) for item in fields if not item.type.startswith("const")]
        self.launching = True
        try:
            super().launch(variant, launch, values)
        finally:
            self.launching = False
        if self.begins_early and _lets_go_behind_its_wait(variant):
            self.written.clear()  # when the next begins, this one alone is at work
        self.written.update(writes)


def _lets_go_behind_its_wait(variant: Variant) -> bool:
    """Whether a kernel's first `launch_dependents` stands behind a wait, as it does in the template."""
    text = ptx_of(variant)
    return 0 <= text.find("griddepcontrol.wait") < text.find("griddepcontrol.launch_dependents")


class _Ordinary(TorchDispatchMode):
    """Notes torch's launches, which begin when all before them have ended."""

    def __init__(self, card: Chained) -> None:
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        found = func(*args, **given)
        if self.card.launching or func.namespace != "aten" or func._opname in _ALLOCATE:
            return found
        schema = func._schema
        named = {item.name: value for item, value in zip(schema.arguments, args, strict=False)} | given
        wrote = [named.get(item.name) for item in schema.arguments if item.alias_info and item.alias_info.is_write]
        if not wrote:
            if any(item.alias_info for item in schema.returns):
                return found  # a view
            wrote = list(found) if isinstance(found, tuple | list) else [found]
        self.card.written = {item.untyped_storage().data_ptr() for item in wrote if isinstance(item, torch.Tensor)}
        return found


@contextlib.contextmanager
def on_stream(target: str = "sm_90a") -> Iterator[Chained]:
    """Operators and torch's own launches follow one another as on a stream of a card."""
    with on_cpu(target, Chained) as card:
        assert isinstance(card, Chained)
        with _Ordinary(card):
            yield card
