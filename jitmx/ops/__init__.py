"""Operators on torch tensors, one file a family."""

from __future__ import annotations

from jitmx import resources, settings

__path__ = resources.extended(__path__, "ops", settings.current().families)
