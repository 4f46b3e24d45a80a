"""Launching on the card: a variant by itself, on tensors, where nothing else has a say in what runs; and any source."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from jitmx import arch
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from jitmx.runtime import driver
from jitmx.runtime.plan import Step
from jitmx.toolchain import nvrtc

TARGET = arch.parse("sm_90a")


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


def launch_on_card(
    source: str, entry: str, blocks: int, threads: int, parameters: Sequence[Any], target: arch.Arch = TARGET
) -> None:
    """Compile and run a kernel; `parameters` are ctypes values."""
    torch.cuda.synchronize()
    function = driver.module_function(driver.load_module(nvrtc.compile(source, nvrtc.options(target)).image), entry)
    listed = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
    config = driver.LaunchConfig(blocks, 1, 1, threads, 1, 1, 0, None, None, 0)
    code = driver.library().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function), ctypes.byref(listed), None
    )
    driver.check(code, f"launching {entry}")
    torch.cuda.synchronize()
