"""What was loaded after serving began: nothing, where warm-up did its work.

`late()` names each kernel that had to be loaded, and maybe compiled, for a request. Each is logged once. What an engine
loads as it starts beside one that serves in this process (`warming`) is not among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jitmx.runtime import load
from jitmx.vllm.log import logger

_sealed: frozenset[tuple[str, int]] | None = None
_seen = 0


def seal() -> None:
    """From now on every kernel that is loaded comes late."""
    global _sealed, _seen
    _sealed = frozenset(load.loaded())
    _seen = len(_sealed)


@contextlib.contextmanager
def warming() -> Iterator[None]:
    """Kernels that are loaded within do not come late."""
    global _sealed, _seen
    look()
    before = frozenset(load.loaded())
    yield
    if _sealed is not None:
        _sealed |= frozenset(load.loaded()) - before
        _seen = len(load.loaded())


def late() -> tuple[str, ...]:
    """Kernels that were loaded since `seal`; empty before it."""
    before = _sealed
    return () if before is None else tuple(loaded[0] for loaded in load.loaded() if loaded not in before)


def look() -> None:
    """Log what came late since the last look. Costs a comparison where nothing did."""
    global _seen
    if _sealed is None or len(load.loaded()) == _seen:
        return
    new, _seen = late(), len(load.loaded())
    logger.warning("jitmx loaded kernels for a request, which warm-up should have had: %s", ", ".join(new))
