"""Loading compiled variants onto a device, once, and keeping them there.

Unloading a module while a CUDA graph is captured is illegal, and graphs hold on to kernels: a module that was loaded
stays loaded for the life of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection

from jitmx import build
from jitmx.build import Built
from jitmx.errors import CaptureError, InputError
from jitmx.registry.spec import Variant
from jitmx.runtime import driver

_lock = threading.RLock()
_functions: dict[tuple[str, int], int] = {}


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    # A forked child has no CUDA context of its parent's.
    _functions.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def loaded() -> Collection[tuple[str, int]]:
    """Identity and device of every variant that was loaded in this process; seen as it grows."""
    return _functions.keys()


def capturing() -> bool:
    """Whether torch's current stream is recording a CUDA graph."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def function(variant: Variant, device: int, built: Built | None = None) -> int:
    """CUfunction of `variant` on the device numbered `device`, compiled and loaded if need be.

    Args:
        built: its machine code, where that is at hand; otherwise it is obtained.

    Raises:
        CaptureError: it would have to be compiled or loaded while a graph is being captured.
        InputError: the variant's target does not run on the device.
        DriverError: the driver refuses to load it.
    """
    key = (variant.identity, device)
    loaded = _functions.get(key)
    if loaded is not None:
        return loaded
    if capturing():
        raise CaptureError(
            f"{variant.name} is not loaded yet, and loading is illegal while a CUDA graph is captured",
            "call the operator once with this shape before capture, or compile it with "
            f"`{variant.warm_up_command}` and load it before capture",
        )
    with _lock:
        loaded = _functions.get(key)
        if loaded is None:
            loaded = _functions[key] = _load(variant, device, built)
    return loaded


def _load(variant: Variant, device: int, built: Built | None) -> int:
    import torch

    capability = torch.cuda.get_device_capability(device)
    if not variant.arch.runs_on(*capability):
        raise InputError(
            f"{variant.name} is compiled for {variant.arch}, which does not run on cuda:{device} "
            f"(compute capability {capability[0]}.{capability[1]})"
        )
    built = build.obtain(variant) if built is None else built
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # creates the context where nothing has yet, and makes it current
        function = driver.module_function(driver.load_module(built.image), variant.spec.entry)
        # Once, and as far as the chip goes: the function is shared by launches of every size.
        driver.allow_dynamic_shared(function, variant.arch.shared_bytes - built.record.outputs["shared_bytes"])
        return function
