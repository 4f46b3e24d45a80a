"""Plans: the launches of a call, bound once for calls that are alike.

The first call of a kind checks everything and makes a plan; a warm call is a look-up and its steps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jitmx import settings
from jitmx.errors import KnobError
from jitmx.registry.arguments import Number
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from jitmx.runtime import card

_Plan = TypeVar("_Plan")


class Step:
    """One launch of a plan.

    Args:
        variant: what to launch; compiled and loaded here if need be.
        device: its number.
        launch: geometry.
        fixed: fields of the arguments that no call changes.
        takes: those that calls give, in the order of the struct; by default all others. Fields that are neither are 0,
            but for a workspace, which is brought.
        dependent: whether it may begin while the launch before it is at work, where its kernel can (`pdl`).

    Attributes:
        variant: what is launched.
        run: launches on torch's current stream of the device; takes the values of `takes`.

    Raises:
        KnobError: a block needs more shared memory than the target has.
        CaptureError: the kernel is not loaded yet, and a CUDA graph is being captured.
    """

    __slots__ = ("_bound", "_takes", "run", "variant")

    def __init__(
        self, variant: Variant, device: int, launch: Launch, fixed: Mapping[str, Number],
        takes: Sequence[str] | None = None, *, dependent: bool = True,
    ) -> None:  # fmt: skip
        if launch.shared_bytes > variant.arch.shared_bytes:
            raise KnobError(
                f"{variant.name} needs {launch.shared_bytes} B of shared memory for this call; a "
                f"block on {variant.arch} has at most {variant.arch.shared_bytes} B",
                "choose knobs that need less, or fewer rows",
            )
        if takes is None:
            own = {*fixed, "workspace", *(field.name for field in variant.arguments.maps)}
            takes = [name for name in variant.arguments.fields if name not in own]
        self.variant, self._takes = variant, tuple(takes)
        self._bound = device, launch, fixed, dependent
        self.run: Callable[..., None] = card.bind(
            variant, device, launch, self._takes, fixed, dependent=dependent
        )  # fmt: skip

    def packed(self, *values: Number) -> Callable[[], None]:
        """`run` with these values, which are packed once for all launches of it."""
        device, launch, fixed, dependent = self._bound
        all_fixed = {**fixed, **dict(zip(self._takes, values, strict=True))}
        return card.bind(self.variant, device, launch, (), all_fixed, dependent=dependent)

    def __call__(self, **values: Number) -> None:
        """Launch with fields by name; those that are not given are 0. `run` is quicker."""
        self.run(*[values.pop(name, 0) for name in self._takes])
        if values:
            raise TypeError(f"{self.variant.name} does not take {', '.join(values)}; it takes {', '.join(self._takes)}")


class Plan:
    """The launches of one kind of call.

    Attributes:
        steps: in order.
    """

    steps: tuple[Step, ...] = ()

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What it launches."""
        return tuple(step.variant for step in self.steps)


class Plans(dict[Any, Any]):
    """Plans by all that decides them. They are forgotten where settings change, so that a warm call need not ask.

    Args:
        most: plans that are kept; row counts vary from call to call where prompts are read.
    """

    __slots__ = ("__weakref__", "_most")

    def __init__(self, most: int = 1024) -> None:
        super().__init__()
        self._most = most
        with _lock:
            _all[id(self)] = self

    def remember(self, key: Any, plan: _Plan) -> _Plan:
        """Keep a plan, and return it."""
        if len(self) >= self._most:
            self.clear()
        self[key] = plan
        return plan


_lock = threading.Lock()
_all: weakref.WeakValueDictionary[int, Plans] = weakref.WeakValueDictionary()


def _forget() -> None:
    with _lock:
        known = list(_all.values())
    for plans in known:
        plans.clear()


settings.when_changed(_forget)
card.when_changed(_forget)
