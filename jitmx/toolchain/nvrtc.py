"""From CUDA source to machine code, by NVRTC in a process of its own. No device and no driver are needed.

A compile is hermetic. NVRTC opens files beside the source (that is, in the working directory) unless it is told not
to, so `--no-source-include` is always given; headers reach it in memory only; options that name files are refused; and
no environment variable of this process is seen by the one that compiles (`jitmx.toolchain.workers`).
It is also repeatable: symbols in anonymous namespaces and static variables are named after the program, whose name is
fixed, and possibly after a random number (not in NVRTC 13.0 to 13.5), whose seed is fixed too.

Which headers a source includes its text tells (`scan`), unless a directive stands within `#if`. Then NVRTC is asked:
each candidate gets a line that makes NVRTC report it. The compile that counts gets exactly these headers, untouched.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jitmx import settings
from jitmx.arch import Arch
from jitmx.errors import ArchError, CompileError, ToolchainError
from jitmx.toolchain import diagnostics, headers, library, workers
from jitmx.toolchain.worker import PROGRAM, Outcome

_NO_DISK = "--no-source-include"
_REPORT = "jitmx-include:"
_REPORTED = re.compile(rf'#pragma message: "{_REPORT}([^"\n]+)"')
_OPENS_FILES = re.compile(
    r"-{1,2}(I|isystem|include\b|include-path|pre-include|use-bundled-headers|pch|create-pch|use-pch|time\b|"
    r"fdevice-time-trace|optf|options-file)"
)
_ARCH = re.compile(r"(?:-arch|--gpu-architecture)=(?:sm|compute)_(\w+)")

# Keeps a source that NVRTC refused, and returns where, or None where it could not.
Keep = Callable[[str], str | None]


@dataclass(frozen=True)
class Identity:
    """The NVRTC that compiles.

    Attributes:
        version: its release, such as "13.5".
        digest: SHA-256 over the contents of the library and of its built-in declarations.
        path: where it lies. Never part of a key.
        targets: compute capabilities that it compiles for, 121 for 12.1.
        signature: of its files when the digest was theirs (`library.signature`).
    """

    version: str
    digest: str
    path: Path
    targets: tuple[int, ...] = ()
    signature: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What a compile gave.

    Attributes:
        image: the whole cubin, an ELF file.
        log: NVRTC's warnings and remarks; empty where there are none.
        milliseconds: wall time within NVRTC.
    """

    image: bytes
    log: str
    milliseconds: float


@functools.cache
def identity() -> Identity:
    """The NVRTC that compiles for this process. What it says of itself is remembered in `<cache>/toolchain.json`.

    Raises:
        ToolchainError: it is not installed or can't be read.
    """
    path = library.locate()
    parts = library.parts(path)
    current = settings.current()
    memo = None if current.mode == "off" else current.cache_dir / "toolchain.json"
    signature = library.signature(parts)
    found = library.identify(parts, lambda: workers.call(path, "describe"), memo)
    return Identity(found["version"], found["digest"], path, tuple(found["targets"]), tuple(map(tuple, signature)))


def check_target(arch: Arch) -> None:
    """Check that the NVRTC of this process compiles for `arch`.

    Raises:
        ArchError: it does not; the message names the release that does and the one present.
        ToolchainError: there is no NVRTC.
    """
    here = identity()
    present = tuple(int(part) for part in here.version.split("."))
    needed = f"{arch.nvrtc[0]}.{arch.nvrtc[1]}"
    if present < arch.nvrtc:
        raise ArchError(
            f"{arch} needs NVRTC {needed} or later; the one here is {here.version} ({here.path})",
            "pip install -U nvidia-cuda-nvrtc",
        )
    if arch.major * 10 + arch.minor not in here.targets:
        listed = ", ".join(f"sm_{target}" for target in here.targets)
        raise ArchError(
            f"NVRTC {here.version} ({here.path}) does not compile for {arch}, which NVRTC "
            f"{needed} is the first to do; it compiles for {listed}",
            "install a release of nvidia-cuda-nvrtc that has it",
        )


def options(arch: Arch) -> tuple[str, ...]:
    """The options that every kernel for `arch` is compiled with. They hold no paths.

    Multiplications and additions are fused (`--fmad=true`), denormals kept, division and square root rounded as IEEE
    says. NVRTC's own on-disk cache is off, and it leaves the stack limit of the process alone. Textures, surfaces and
    launches from device code are not declared (`--minimal`): no kernel here has them, and reading them takes time.
    """
    return (
        f"-arch={arch.name}",
        "-std=c++17",
        "--minimal",
        "--device-as-default-execution-space",  # NVRTC 13.0 takes a generic lambda for a host function without it
        "--define-macro=__builtin_offsetof(type,field)=__INTADDR__(&(((type*)0)->field))",  # which NVRTC 13.0 lacks
        "--fmad=true",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        "--frandom-seed=jitmx",
        "--modify-stack-limit=false",
        "--no-cache",
        _NO_DISK,
    )


def scan(source: str, options: Sequence[str], *, keep_source: Keep | None = None) -> dict[str, str]:
    """Every header that compiling `source` includes, directly or not: name to SHA-256 of the file, sorted by name.

    Where a directive stands within `#if`, this runs NVRTC's front end, and a source with a syntax error fails here
    already.

    Args:
        source, options, keep_source: as for `compile`.

    Raises:
        CompileError, ToolchainError: as `compile`.
    """
    pool = headers.pool()
    with _keeping(source, keep_source):
        return {name: pool.digest(name) for name in _included(pool, source, tuple(options))}


def compile(source: str, options: Sequence[str], *, keep_source: Keep | None = None) -> Compiled:
    """Machine code of `source`.

    Args:
        source: CUDA source. Its headers are those of `jitmx.toolchain.headers`.
        options: what `options()` gives, possibly with macros (`-DNAME=VALUE`) added.
        keep_source: called with the source where NVRTC refuses it; it keeps the source somewhere and returns where, or
            None where it could not.

    Raises:
        CompileError: NVRTC refuses the source. The message shows its log, the lines around each error and where the
            source was kept.
        ToolchainError: NVRTC can't be used; a header is nowhere to be found, or lies outside of what a hermetic
            compile may include; an option opens files.
    """
    options = tuple(options)
    pool = headers.pool()
    with _keeping(source, keep_source):
        texts = {name: pool.text(name) for name in _included(pool, source, options)}
        made = _run(source, texts, options, "CUBIN")
    if not made.output:
        raise ToolchainError(f"NVRTC makes no machine code for {_target(options)}; the options need -arch=sm_...")
    return Compiled(made.output, made.log, made.milliseconds)


def compile_ptx(source: str, options: Sequence[str]) -> str:
    """PTX of `source` for the target that `options` name, as it is before ptxas makes machine code of it.

    Raises:
        CompileError, ToolchainError: as `compile`.
    """
    virtual = tuple(f"-arch=compute_{match[1]}" if (match := _ARCH.fullmatch(option)) else option for option in options)
    _refuse(source, tuple(options))
    pool = headers.pool()
    # Nothing is kept of PTX, so that headers which are never included do no harm: asking which are takes a scan.
    made = _run(source, {name: pool.text(name) for name in pool.closure(source)}, virtual, "PTX")
    return made.output.rstrip(b"\0").decode()


@contextmanager
def _keeping(source: str, keep_source: Keep | None) -> Iterator[None]:
    """Keep a source that NVRTC refuses, and say where."""
    try:
        yield
    except CompileError as error:
        kept = keep_source(source) if keep_source else None
        where = f"the rendered source is kept at {kept}" if kept else "the rendered source is not kept"
        raise CompileError(f"{error}\n\n{where}", log=error.log, source_path=kept) from None


# Bounded, so that a process that compiles for days does not keep every source.
@functools.lru_cache(maxsize=64)
def _included(pool: headers.HeaderPool, source: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the headers that compiling `source` includes, sorted."""
    _refuse(source, options)
    known = pool.included(source)
    return tuple(_reported(pool, source, options, pool.closure(source)) if known is None else known)


def _reported(pool: headers.HeaderPool, source: str, options: tuple[str, ...], names: list[str]) -> list[str]:
    """Those of the headers `names` that NVRTC says it includes."""
    syntax = (*options, "--fdevice-syntax-only")
    texts = {name: pool.text(name) for name in names}
    marked = {name: f'#pragma message("{_REPORT}{name}")\n#line 1\n'.encode() + text for name, text in texts.items()}
    try:
        reported = set(_REPORTED.findall(_run(source, marked, syntax).log))
    except CompileError:
        # Once more without the marks, for a log that has nothing in it but what the source calls for.
        _run(source, texts, syntax)
        raise
    return [name for name in names if name in reported]


def _refuse(source: str, options: tuple[str, ...]) -> None:
    if "\0" in source:
        raise ToolchainError(
            f"the rendered source holds a NUL character at offset {source.index(chr(0))}, where "
            "NVRTC would stop reading",
            "take it out of the template",
        )
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise ToolchainError(
            f"the rendered source is no Unicode text: {error}", "take it out of the template"
        ) from None
    for option in options:
        if _OPENS_FILES.match(option):
            raise ToolchainError(f"{option} makes NVRTC open files, and what is in them would not be in the key")
    if _NO_DISK not in options:
        raise ToolchainError(f"{_NO_DISK} is missing from the options", "start from nvrtc.options(arch)")


def _run(source: str, texts: Mapping[str, bytes], options: tuple[str, ...], output: str = "") -> Outcome:
    """Compile `source` with exactly these headers, for one output or only for what NVRTC says."""
    here = identity()
    made: Outcome = workers.call(here.path, "compile", source, dict(texts), options, output)
    _require_same(here, made)
    if made.status:
        raise _failure(source, options, made.log, made.status)
    return made


def _require_same(here: Identity, made: Outcome) -> None:
    """Check that the library that compiled is the one that keys tell of."""
    seen = tuple(map(tuple, made.signature))
    if here.signature in (seen, ()):
        return
    # A link to a file, or a change of its mode, shows in the signature too.
    parts = library.parts(here.path)
    if library.signature(parts) != made.signature or library.digest(parts) != here.digest:
        raise ToolchainError(
            f"{here.path} was replaced on disk since this process first asked for it, and its "
            "code would be kept under the digest of what lay there then",
            "start the process again",
        )


def _failure(source: str, options: tuple[str, ...], log: str, status: str) -> ToolchainError:
    """The error for a compile that ended with `status`."""
    version = identity().version
    if "NVRTC_ERROR_COMPILATION" not in status:
        return ToolchainError(f"NVRTC {version} fails with {status} for {_target(options)}\n{log}".strip())
    missing = diagnostics.missing_header(log)
    if missing is not None:
        pool = headers.pool()
        owner = headers.SOURCE if missing.file == PROGRAM else missing.file
        return ToolchainError(
            f"there is no header {missing.name!r}, which {owner} includes on line {missing.line} "
            f"(looked in: {', '.join(map(str, pool.places()))})",
            headers.remedy(missing.name),
        )
    count = diagnostics.count_errors(log)
    title = f"NVRTC {version} refuses the source for {_target(options)}: {count} error{'s' if count > 1 else ''}"
    text = diagnostics.explain(log, lambda file: _text_of(file, source, options))
    return CompileError(f"{title}\n\n{text}", log=log)


def _text_of(file: str, source: str, options: tuple[str, ...]) -> str | None:
    """The text that a place in the log refers to."""
    if file == PROGRAM:
        return source
    if file == diagnostics.PTX:
        try:
            return compile_ptx(source, tuple(option for option in options if option != "--fdevice-syntax-only"))
        except ToolchainError:
            return None
    pool = headers.pool()
    return pool.text(file).decode(errors="replace") if file in pool else None


def _target(options: Sequence[str]) -> str:
    match = next(filter(None, map(_ARCH.fullmatch, options)), None)
    return f"sm_{match[1]}" if match else "no target"
