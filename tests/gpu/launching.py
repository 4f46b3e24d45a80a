"""Launching a variant on the card by itself, on tensors: no operator, table or preference has a say in what runs."""

from __future__ import annotations

import dataclasses

import torch

from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from jitmx.runtime.plan import Step


def given_workspace(variant: Variant, launch: Launch) -> Step:
    """A step on device 0 whose calls give the workspace, too, so that a test can look into it."""
    maps = {field.name for field in variant.arguments.maps}
    takes = [name for name in variant.arguments.fields if name not in maps]
    return Step(variant, 0, dataclasses.replace(launch, workspace=0), {}, takes)


def call(step: Step, **given: torch.Tensor | float | None) -> None:
    """Launch with tensors and numbers by field; None is a tensor that a call does without."""
    step(
        **{
            name: item.data_ptr() if isinstance(item, torch.Tensor) else item
            for name, item in given.items()
            if item is not None
        }
    )
