"""From a variant to machine code: look up, lock, look up again, compile, check the contract, publish.

However many processes and threads ask for a kernel at once, one of them compiles it. What goes wrong with the disk or
with another process costs time, never the kernel: see `jitmx.cache.store` for what may happen at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jitmx import logs, resources, settings
from jitmx.cache import remote as remotes
from jitmx.cache import store as stores
from jitmx.cache.bundle import Kernel
from jitmx.cache.manifest import Inputs, Outputs, Record, Scan
from jitmx.cache.store import Entry, Store
from jitmx.cache.why import Subject, changes
from jitmx.errors import ArchError, CompileError, ContractError, NotWarmedError, ToolchainError
from jitmx.registry.fingerprint import Fingerprint
from jitmx.registry.key import SCHEMA, KeyInputs, digest, frame
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.toolchain import cubin, headers, nvrtc

logger = logging.getLogger("jitmx.build")

Status = Literal["compiled", "hit"]

# JITMX_MODE=off: nothing is read from or written to disk, and each kernel is compiled once in a process.
_memory_only = Store(None)


@dataclass(frozen=True)
class Built:
    """Machine code of a variant.

    Attributes:
        key: under which it is cached; `record` says what it was made from.
        image: the cubin.
        status: whether this call compiled it, or found it.
        milliseconds: how long this call took.
    """

    variant: Variant
    key: str
    image: bytes
    record: Record
    status: Status
    milliseconds: float

    @property
    def breaches(self) -> tuple[str, ...]:
        """Each promise of its contract that the machine code breaks, in words."""
        return tuple(self.record.outputs["breaches"])


@dataclass(frozen=True)
class Found:
    """Machine code of a variant, looked up or compiled, whose contract may not have been checked.

    Attributes:
        source: rendered.
        entry: of the cache.
        status, milliseconds: as for `Built`.
    """

    variant: Variant
    source: str
    entry: Entry
    status: Status
    milliseconds: float

    @property
    def held(self) -> bool:
        """Whether the record tells of the present contract: it is no part of the key, and may have changed."""
        return self.entry.record.outputs["contract"] == _contract(self.variant)


def key_inputs(variant: Variant) -> tuple[KeyInputs, str]:
    """Everything that shapes the machine code of `variant`, and its rendered source.

    Which headers the source includes is remembered on disk, so only a source never seen before takes the compiler.

    Raises:
        RenderError, ArchError, ToolchainError, CompileError: its inputs cannot be had.
    """
    source = render(variant)
    inputs = _inputs(variant, source, kernel_store(), may_scan=True)
    assert inputs is not None
    return inputs, source


def obtain(variant: Variant, *, allow_compile: bool | None = None, strict: bool = False) -> Built:
    """Machine code of `variant`, from the cache or compiled now.

    Where no usable compiler is at hand, and where compiling is not allowed, code that another NVRTC made of the same
    source, headers and options serves.

    Args:
        allow_compile: whether to compile what is missing; by default, whether JITMX_MODE is not "required".
        strict: hold the machine code to its whole contract, and raise where it breaks it. Otherwise only registers and
            spills are looked at, with a warning: disassembling takes longer than compiling. Code that breaks its
            contract computes the same, so it is kept, and finding the breach again takes no compile.

    Raises:
        NotWarmedError: it is not cached, and must not be compiled.
        CompileError: NVRTC refused the source; the message shows where, and where the source was kept.
        ContractError: `strict`, and a promise is broken; the message lists each breach.
        RenderError, ArchError, ToolchainError: it cannot be compiled here.
        CacheError: the cache directory must not be used.
    """
    return hold(find(variant, allow_compile), strict)


def find(variant: Variant, allow_compile: bool | None) -> Found:
    """What `obtain` does before the contract is checked; it raises the same but ContractError."""
    started = time.perf_counter()
    store, made_from = kernel_store(), Fingerprint(variant)
    # Reading a template takes Jinja longer than all else that finding a kernel takes.
    known = store.rendered(made_from.digest)
    source = render(variant) if known is None else known
    remember = known is None and made_from.holds()
    if allow_compile is None:
        allow_compile = settings.current().mode != "required"
    entry, status = _find_or_compile(variant, source, store, allow_compile)
    if remember and allow_compile:
        store.keep_rendered(made_from.digest, source)
    return Found(variant, source, entry, status, (time.perf_counter() - started) * 1e3)


def known(variant: Variant) -> Found | None:
    """What `find` finds in the cache as it lies there; None where that takes a template, a compiler or another host.

    Raises:
        RenderError, ArchError, ToolchainError, CacheError: as `obtain`.
    """
    started = time.perf_counter()
    store = kernel_store()
    if (source := store.rendered(Fingerprint(variant).digest)) is None:
        return None
    if (found := _known_headers(store, scan_digest(source, nvrtc.options(variant.arch)))) is None:
        return None
    entry = store.lookup(_key_inputs(variant, source, found).key)
    return Found(variant, source, entry, "hit", (time.perf_counter() - started) * 1e3) if entry else None


def hold(found: Found, strict: bool, sass: list[str] | None = None) -> Built:
    """What was found, held to its contract as `obtain` says.

    Args:
        sass: its instructions, where they are known already.

    Raises:
        ContractError, ToolchainError: as for `obtain`.
    """
    started = time.perf_counter()
    variant, entry = found.variant, found.entry
    if strict:
        store = kernel_store()
        store.keep_source(found.source)
        if not found.held:
            if sass is None and variant.spec.contract(variant.knobs, variant.arch).needs_sass:
                sass = cubin.sass(entry.image)
            record = _judged(variant, entry.record, sass)
            if entry.root in (store.root, None):
                store.publish(record, entry.image, found.source)
            entry = dataclasses.replace(entry, record=record)
    took = found.milliseconds + (time.perf_counter() - started) * 1e3
    built = Built(variant, entry.record.key, entry.image, entry.record, found.status, took)
    if built.breaches:
        message = f"{variant.name} for {variant.arch} breaks its contract: {'; '.join(built.breaches)}"
        if strict:
            raise ContractError(message)
        if found.status == "compiled":
            logger.warning("%s", message)
    return built


def named(inputs: KeyInputs) -> Inputs:
    """The inputs as a record holds them: the source by its digest."""
    return Inputs(
        schema=SCHEMA,
        family=inputs.family,
        source_digest=digest(inputs.source.encode()),
        headers=dict(inputs.headers),
        options=list(inputs.options),
        arch=inputs.arch,
        nvrtc=inputs.nvrtc,
        nvrtc_digest=inputs.nvrtc_digest,
    )


def scan_digest(source: str, options: Sequence[str]) -> str:
    """Under what it is remembered which headers a source includes.

    Raises:
        ToolchainError: there is no NVRTC.
    """
    here = nvrtc.identity()
    # A header that appears may take the place of another under a relative name, so the names count too.
    own = headers.pool().own_names
    return frame(
        [
            ("source", source.encode()),
            *(("option", option.encode()) for option in options),
            *(("own", name.encode()) for name in own),
            ("nvrtc", here.version.encode()),
            ("nvrtc_digest", here.digest.encode()),
        ]
    )


def header_digest(name: str) -> str | None:
    """SHA-256 of a header as it is now; None where it cannot be had."""
    try:
        return headers.pool().digest(name)
    except ToolchainError:
        return None


def unchanged(known: Mapping[str, str]) -> bool:
    """Whether headers are what they were, by name and SHA-256."""
    return all(header_digest(name) == digest for name, digest in known.items())


def kernel_store() -> Store:
    """Where kernels are kept as the settings are now.

    Raises:
        CacheError: the cache directory must not be used.
    """
    now = settings.current()
    logs.follow(now)
    return _memory_only if now.mode == "off" else stores.current()


def _find_or_compile(variant: Variant, source: str, store: Store, allow_compile: bool) -> tuple[Entry, Status]:
    try:
        inputs = _inputs(variant, source, store, may_scan=allow_compile)
    except CompileError:
        raise
    except (ToolchainError, ArchError) as error:
        if entry := _by_source(variant, source, store):
            return entry, "hit"
        if allow_compile:
            raise
        raise _not_warmed(variant, None, store) from error
    if inputs and (entry := store.lookup(inputs.key)):
        return entry, "hit"
    if not allow_compile:
        if entry := (inputs and _fetch(inputs.key, store)) or _by_source(variant, source, store):
            return entry, "hit"
        raise _not_warmed(variant, inputs, store)
    assert inputs is not None
    key = inputs.key
    with _alone(store, key, lambda: store.lookup(key) is not None):
        if entry := store.lookup(key):
            return entry, "hit"
        remote = remotes.current()
        if remote is None:
            return _compile(variant, inputs, source, store), "compiled"
        # Others of this host wait for as long as this one waits and compiles.
        with remote.alone(key, settings.current().lock_timeout / 2) as found:
            if found:
                return _take(found, store), "hit"
            entry = _compile(variant, inputs, source, store)
            remote.put(Kernel(entry.record, entry.image, source))
            return entry, "compiled"


def _fetch(key: str, store: Store) -> Entry | None:
    """The entry of `key` from the remote cache, one process at a time."""
    remote = remotes.current()
    if remote is None:
        return None
    with _alone(store, key, lambda: store.lookup(key) is not None):
        if entry := store.lookup(key):
            return entry
        found = remote.entry(key)
        return _take(found, store) if found else None


def _take(found: Kernel, store: Store) -> Entry:
    """Keep what came from the remote cache."""
    store.publish(found.record, found.image, found.source)
    return Entry(found.record, found.image, store.root)


def _inputs(variant: Variant, source: str, store: Store, *, may_scan: bool) -> KeyInputs | None:
    """The inputs of the key; None where the headers are not known and finding them out is not allowed."""
    nvrtc.check_target(variant.arch)
    options = nvrtc.options(variant.arch)
    scan = scan_digest(source, options)
    found = _known_headers(store, scan)
    if found is None:
        remote = remotes.current()
        if not may_scan and remote is None:
            return None
        with _alone(store, scan, lambda: _known_headers(store, scan) is not None):
            found = _known_headers(store, scan)
            if found is None and remote and (there := remote.scan(scan)) and unchanged(there.headers):
                found = there.headers
                store.keep_scan(scan, found, there.source_digest)
            if found is None and may_scan:
                found = nvrtc.scan(source, options, keep_source=functools.partial(store.keep_failed, variant.name))
                store.keep_scan(scan, found, digest(source.encode()))
                if remote:
                    remote.put_scan(Scan(scan, digest(source.encode()), found))
        if found is None:
            return None
    return _key_inputs(variant, source, found)


def _key_inputs(variant: Variant, source: str, headers: Mapping[str, str]) -> KeyInputs:
    here, options = nvrtc.identity(), nvrtc.options(variant.arch)
    return KeyInputs(variant.spec.family, source, headers, options, variant.arch.name, here.version, here.digest)


def _known_headers(store: Store, scan: str) -> dict[str, str] | None:
    """The headers remembered for `scan`, if each of them still is what it was."""
    found = store.scan(scan)
    return found if found is not None and unchanged(found) else None


def _by_source(variant: Variant, source: str, store: Store) -> Entry | None:
    """What any NVRTC made of the source. CUDA's headers may be missing as the compiler may, but not those of jitmx."""

    def present(name: str) -> str | None:
        return header_digest(name) or ("gone" if name.startswith(headers.OWN) else None)

    return store.by_source(digest(source.encode()), variant.arch.name, nvrtc.options(variant.arch), present)


def _compile(variant: Variant, inputs: KeyInputs, source: str, store: Store) -> Entry:
    keep = functools.partial(store.keep_failed, variant.name)
    compiled = nvrtc.compile(source, inputs.options, keep_source=keep)
    info = cubin.read(compiled.image)
    kernel = info.kernel(variant.spec.entry)
    outputs = Outputs(
        object=digest(compiled.image),
        size=len(compiled.image),
        entries=[kernel.name for kernel in info.kernels],
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        stack_bytes=kernel.stack_bytes,
        shared_bytes=kernel.shared_bytes,
        compile_ms=round(compiled.milliseconds, 3),
        contract={},
        breaches=[],
    )
    record = Record(
        key=inputs.key,
        name=variant.name,
        family=variant.spec.family,
        kernel=variant.spec.name,
        knobs=variant.knobs.as_dict(),
        identity=variant.identity,
        arch=variant.arch.name,
        entry=variant.spec.entry,
        inputs=named(inputs),
        outputs=outputs,
        created=round(time.time(), 3),
        jitmx=resources.release(),
    )
    record = _judged(variant, record, None)
    store.publish(record, compiled.image, source)
    logger.info(
        "compiled %s for %s in %.0f ms: %d registers, %d B spilled, %d B shared",
        variant.name, variant.arch, compiled.milliseconds, kernel.registers, kernel.spill_bytes, kernel.shared_bytes,
    )  # fmt: skip
    return Entry(record, compiled.image, store.root)


def _contract(variant: Variant) -> dict[str, Any]:
    """The contract as a record gives it back."""
    stated = dataclasses.asdict(variant.spec.contract(variant.knobs, variant.arch))
    values: dict[str, Any] = json.loads(json.dumps(stated))
    return values


def _judged(variant: Variant, record: Record, sass: Sequence[str] | None) -> Record:
    """`record` with the breaches of its contract; the contract itself is entered only where all of it was checked.

    Args:
        sass: the instructions; None where they are not known, and only registers and spills are.
    """
    contract = variant.spec.contract(variant.knobs, variant.arch)
    complete = sass is not None or not contract.needs_sass
    held = contract if complete else dataclasses.replace(contract, require=(), forbid=())
    outputs = record.outputs
    breaches = held.breaches(registers=outputs["registers"], spill_bytes=outputs["spill_bytes"], sass=sass or ())
    stated = _contract(variant) if complete else {}
    return dataclasses.replace(record, outputs={**outputs, "contract": stated, "breaches": breaches})


def _not_warmed(variant: Variant, inputs: KeyInputs | None, store: Store) -> NotWarmedError:
    where = f"the kernel cache {store.root}" if store.root else "this process's memory"
    said = f"{variant.name} for {variant.arch} is not in {where}"
    kin = [record for record in store.records() if record.identity == variant.identity]
    if inputs and any(record.key == inputs.key for record in kin):
        said += " (there is a record of it, but its machine code is missing or damaged)"
    elif kin and inputs:
        newest = max(kin, key=lambda record: record.created)
        differing = changes(Subject.of(newest), Subject(variant.knobs.as_dict(), named(inputs)))
        said += f" (there is one of which since changed: {'; '.join(differing)})"
    return NotWarmedError(
        f"{said}, and it must not be compiled now (JITMX_MODE={settings.current().mode})",
        f"compile it before serving: {variant.warm_up_command}",
    )


_flights: dict[str, threading.Lock] = {}
# A thread of the parent that held one of these does not exist in a forked child.
os.register_at_fork(after_in_child=_flights.clear)


@contextlib.contextmanager
def _alone(store: Store, key: str, until: Callable[[], bool]) -> Iterator[None]:
    """One thread of one process at a time, as far as locks can be had in time; waiting ends when `until` comes true."""
    patience = settings.current().lock_timeout
    lock = _flights.setdefault(key, threading.Lock())
    held = lock.acquire(timeout=patience)
    try:
        with store.lock(key, patience, until=until):
            yield
    finally:
        if held:
            lock.release()
