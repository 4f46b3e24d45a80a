"""The cost model: what a launch should take, from the work that its family declares and a card's parameters.

A module here with the name of a family has

    COST: Cost      the work of a launch, and small launches that are counted (work.py)

Families of others (JITMX_FAMILIES) have theirs in `costs/` of their folder. docs/cost-model.md says what the model is,
and what it makes of two cards.
"""

from __future__ import annotations

import functools
import importlib.util

from jitmx import kernels, resources, settings
from jitmx.costs.work import Cost

__path__ = resources.extended(__path__, "costs", settings.current().families)


@functools.cache
def of(family: str) -> Cost | None:
    """What a family declares of its cost, or None where it declares nothing.

    Raises:
        KnobError: there is no such family.
    """
    name = f"{__name__}.{kernels.family(family).name}"
    if importlib.util.find_spec(name) is None:
        return None
    found = getattr(importlib.import_module(name), "COST", None)
    return found if isinstance(found, Cost) else None
