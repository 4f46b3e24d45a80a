"""Many kernels built at once, in threads, their contracts checked in groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass

from jitmx import build, machine, settings
from jitmx.build import Built, Found
from jitmx.errors import JitmxError, ToolchainError
from jitmx.registry.spec import Variant
from jitmx.toolchain import cubin


@dataclass(frozen=True)
class Failed:
    """A variant that could not be built, why, and how long it took to find out in milliseconds."""

    variant: Variant
    error: JitmxError
    milliseconds: float


def build_all(
    variants: Iterable[Variant],
    *,
    jobs: int | None = None,
    on_result: Callable[[Built | Failed], None] | None = None,
    allow_compile: bool | None = True,
    strict: bool = True,
) -> list[Built | Failed]:
    """Build many variants at once, in threads: NVRTC releases the GIL.

    What is in the cache is looked up in this thread, since threads would wait for one another to do it. Machine code of
    several kernels is disassembled by one run of nvdisasm, which takes longer to start than most of them to compile.

    Args:
        jobs: compiles at once; by default JITMX_JOBS, else as many as cores and memory bear.
        on_result: called in this thread with each result as it comes.
        allow_compile, strict: as for `build.obtain`.

    Returns:
        The results in the order of `variants`; what could not be built is among them, not raised.

    Raises:
        CacheError: the cache directory must not be used.
    """
    build.kernel_store()
    ordered = list(variants)
    workers = jobs or settings.current().jobs or machine.compiles_at_once()
    results: list[Built | Failed | None] = [None] * len(ordered)
    unheld = _Unheld(len(ordered))

    def take(found: list[tuple[int, Built | Failed]]) -> None:
        for i, result in found:
            results[i] = result
            if on_result:
                on_result(result)

    with ThreadPoolExecutor(max(1, min(workers, len(ordered))), thread_name_prefix="jitmx-build") as pool:
        try:
            pending = []
            for i, variant in enumerate(ordered):
                known = None
                with suppress(JitmxError):  # it is met again, and told of
                    known = build.known(variant)
                if known:
                    take(_placed(i, known, unheld if strict else None))
                    continue
                # The interpreter may end meanwhile, and refuse the rest.
                pending.append(pool.submit(_attempt, i, variant, allow_compile, unheld if strict else None))
            for future in as_completed(pending):
                take(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [result for result in results if result is not None]


class _Unheld:
    """Kernels whose contracts are to be checked together: so many of a target, or those left when all are there."""

    together = 64

    def __init__(self, total: int) -> None:
        self._left = total
        self._lock = threading.Lock()
        self._groups: dict[str, list[tuple[int, Found]]] = {}

    def add(self, place: int, found: Found | None) -> list[list[tuple[int, Found]]]:
        """Take one of the kernels, by its place in the results, or None for what needs no check; give who is due."""
        with self._lock:
            self._left -= 1
            if found is not None:
                self._groups.setdefault(found.variant.arch.name, []).append((place, found))
            due = [name for name, group in self._groups.items() if not self._left or len(group) >= self.together]
            return [self._groups.pop(name) for name in due]


def _attempt(
    place: int, variant: Variant, allow_compile: bool | None, unheld: _Unheld | None
) -> list[tuple[int, Built | Failed]]:
    """Results that this task came to, by place: of its own variant, of none yet, or of those that waited with it."""
    started = time.perf_counter()
    try:
        found = build.find(variant, allow_compile)
    except JitmxError as error:
        return [(place, _failed(variant, error, started)), *_due(place, None, unheld)]
    return _placed(place, found, unheld)


def _placed(place: int, found: Found, unheld: _Unheld | None) -> list[tuple[int, Built | Failed]]:
    """Results that a kernel is, or those that waited with it to be held to their contracts."""
    started = time.perf_counter()
    if unheld is not None and not found.held:
        return _due(place, found, unheld)
    result: Built | Failed
    try:
        result = build.hold(found, strict=unheld is not None)
    except JitmxError as error:
        result = _failed(found.variant, error, started)
    return [(place, result), *_due(place, None, unheld)]


def _failed(variant: Variant, error: JitmxError, started: float) -> Failed:
    return Failed(variant, error, (time.perf_counter() - started) * 1e3)


def _due(place: int, waits: Found | None, unheld: _Unheld | None) -> list[tuple[int, Built | Failed]]:
    """Results of those that are to be held to their contracts now."""
    groups = unheld.add(place, waits) if unheld else []
    return [result for group in groups for result in _hold_all(group)]


def _hold_all(group: list[tuple[int, Found]]) -> list[tuple[int, Built | Failed]]:
    """Each with its contract checked; all are for one target."""
    listed: list[list[str] | None]
    try:
        listed = [*cubin.sass_of([found.entry.image for _, found in group], group[0][1].variant.arch.name)]
    except ToolchainError:
        listed = [None] * len(group)  # each is disassembled by itself then, and says what is wrong with it
    results: list[tuple[int, Built | Failed]] = []
    for (place, found), sass in zip(group, listed, strict=True):
        try:
            results.append((place, build.hold(found, strict=True, sass=sass)))
        except JitmxError as error:
            results.append((place, Failed(found.variant, error, found.milliseconds)))
    return results
