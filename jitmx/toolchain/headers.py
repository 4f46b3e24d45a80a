"""The headers that a kernel may include, held in memory, so that nothing else on the machine can reach a compile.

A name that starts with `jitmx/` is a file below `templates/include/`; any other is a file of the CUDA headers wheel.
NVRTC finds an in-memory header by the exact text of the directive, so a directive that is relative to its own file
(`"mma.hpp"` within `crt/mma.h`) is rewritten to the full name; nothing else in a header is touched, and digests are
those of the file as it lies on disk.

A pool reads each file once and keeps it. Key and code of one process therefore see the same text, whatever happens
to the file in between; an edited header counts from the next process on.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

from jitmx import resources
from jitmx.errors import ToolchainError
from jitmx.toolchain import wheels

OWN = "jitmx/"
SOURCE = "the rendered source"
_WHEEL = "nvidia-cuda-runtime"

_INCLUDE = re.compile(rb'^([ \t]*#[ \t]*include(?:_next)?[ \t]*)(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)

# What a directive can't be in: raw strings, strings, characters, comments.
_OPAQUE = re.compile(
    r'R"([^()\\\s]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL
)
_MENTION = re.compile(r"^.*?(?P<word>include).*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"(?:#|%:)\s*(include|include_next)\b\s*(.*)", re.DOTALL)
_CONDITION = re.compile(r"^[ \t]*(?:#|%:)[ \t]*(if|ifdef|ifndef|endif)\b", re.MULTILINE)
_SPELLED = re.compile(r'(?:"([^"]+)"|<([^>]+)>)\s*')


@dataclass(frozen=True)
class Directive:
    """One include directive: its line (from 1), the name as it is spelled, whether it stands between quotes, and
    whether within a branch of `#if`."""

    line: int
    name: str
    quoted: bool
    branched: bool


@dataclass(frozen=True)
class _Header:
    """One file: its digest, its text with relative directives rewritten, what it may include, and whether it surely
    includes all of that."""

    digest: str
    text: bytes
    includes: tuple[str, ...]
    surely: bool


class HeaderPool:
    """Every header that kernels may include.

    Args:
        own: the directory that holds `jitmx/`; by default `templates/include` of this installation.
        cuda: directories of CUDA headers, searched in order; by default those of the installed wheels.
    """

    def __init__(self, own: Path | None = None, cuda: tuple[Path, ...] | None = None) -> None:
        self._own = own
        self._cuda = cuda
        self._read: dict[str, _Header | None] = {}

    def digest(self, name: str) -> str:
        """SHA-256 of the file behind `name`, 64 hexadecimal digits.

        Raises:
            ToolchainError: there is no such header.
        """
        return self._require(name).digest

    def text(self, name: str) -> bytes:
        """The text of `name` as NVRTC gets it: the file with relative include directives rewritten to full names.

        Raises:
            ToolchainError: there is no such header.
        """
        return self._require(name).text

    def __contains__(self, name: str) -> bool:
        return self._header(name) is not None

    def closure(self, source: str) -> list[str]:
        """Every header that `source` may include, directly or not, sorted.

        This goes by the text alone: branches of `#if` are all taken, so the list is a superset of what a compile
        includes. A header that the pool lacks is left out, since its directive may lie in a branch not taken.

        Raises:
            ToolchainError: the source, or a header of jitmx, does what a hermetic compile can't allow; see
                `directives`.
        """
        return self._reachable(source)[0]

    def included(self, source: str) -> list[str] | None:
        """What compiling `source` includes, sorted, where the text alone tells: no directive stands within `#if`, and
        no header is missing. Else None.

        Raises:
            ToolchainError: as `closure`.
        """
        found, surely = self._reachable(source)
        return found if surely else None

    def _reachable(self, source: str) -> tuple[list[str], bool]:
        """The closure of `source`, and whether a compile surely includes all of it."""
        found: set[str] = set()
        first = directives(source, SOURCE)
        surely = not any(directive.branched for directive in first)
        pending = [directive.name for directive in first]
        while pending:
            name = pending.pop()
            if name in found:
                continue
            if (header := self._header(name)) is None:
                surely = False
                continue
            found.add(name)
            surely = surely and header.surely
            pending.extend(header.includes)
        return sorted(found), surely

    @functools.cached_property
    def own_names(self) -> tuple[str, ...]:
        """The names of jitmx's own headers, without their folders, sorted."""
        return tuple(sorted(path.name for path in self.places()[0].glob("**/*")))

    def places(self) -> list[Path]:
        """The directories that headers come from."""
        return [self._own_root() / OWN, *self._cuda_roots()]

    def _require(self, name: str) -> _Header:
        header = self._header(name)
        if header is None:
            looked = ", ".join(map(str, self.places()))
            raise ToolchainError(f"there is no header {name!r} (looked in: {looked})", remedy(name))
        return header

    def _header(self, name: str) -> _Header | None:
        if name not in self._read:
            # Threads may read the same file at once; setdefault makes all of them keep the first text.
            self._read.setdefault(name, self._load(name))
        return self._read[name]

    def _load(self, name: str) -> _Header | None:
        path = self._path(name)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ToolchainError(
                f"the header {name} cannot be read: {error}", "make it readable or reinstall"
            ) from error
        if b"\0" in data:
            raise ToolchainError(f"the header {path} holds a NUL byte, where NVRTC would stop reading", "reinstall it")
        found: list[str] = []

        def rewrite(match: re.Match[bytes]) -> bytes:
            spelled = (match[2] or match[3]).decode(errors="replace")
            full = self._resolve(name, spelled) if match[2] else spelled
            found.append(full)
            return match[0] if full == spelled else match[1] + b'"' + full.encode() + b'"'

        text = _INCLUDE.sub(rewrite, data)
        surely = False
        if name.startswith(OWN):
            # The wheels' own headers are trusted, and too large to be read this closely each time.
            read = directives(data.decode(errors="replace"), name)
            names = [self._resolve(name, each.name) if each.quoted else each.name for each in read]
            surely = set(found) <= set(names) and not any(each.branched for each in read)
            found += names
        return _Header(hashlib.sha256(data).hexdigest(), text, tuple(dict.fromkeys(found)), surely)

    def _resolve(self, includer: str, spelled: str) -> str:
        """The full name that `"spelled"` has within `includer`: the file beside it first, as C++ compilers do."""
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(includer), spelled))
        return beside if self._path(beside) is not None else spelled

    def _path(self, name: str) -> Path | None:
        if name.startswith(("/", "../")) or posixpath.normpath(name) != name:
            return None
        roots = (self._own_root(),) if name.startswith(OWN) else self._cuda_roots()
        # os.path, unlike pathlib, says no to a name that is too long for the file system.
        return next((root / name for root in roots if os.path.isfile(root / name)), None)  # noqa: PTH113

    def _own_root(self) -> Path:
        return self._own if self._own is not None else resources.directory("templates") / "include"

    def _cuda_roots(self) -> tuple[Path, ...]:
        if self._cuda is None:
            self._cuda = tuple(root / "include" for root in wheels.roots() if (root / "include").is_dir())
        return self._cuda


@functools.cache
def pool() -> HeaderPool:
    """The pool of this process."""
    return HeaderPool()


def directives(text: str, owner: str) -> list[Directive]:
    """Every include directive in `text`, whichever branch of `#if` it is in, but none within comments and strings.

    Args:
        owner: what `text` is, for errors.

    Raises:
        ToolchainError: a directive that names its header by a macro, an absolute path or a path that leaves the
            pool, since NVRTC would open such a file from disk and the key would not know of it; or `__has_include`,
            whose answer the key would not know of either.
    """
    # As in the standard: first lines that end in a backslash are joined, then comments become blanks.
    pieces = re.split(r"\\\r?\n", text)
    joined = "".join(pieces)
    joints = list(itertools.accumulate(map(len, pieces)))[:-1]
    # Blanks of the same length, so that places in the text stay what they are.
    blanked = _OPAQUE.sub(lambda match: match[0] if match[0][0] == '"' else " " * len(match[0]), joined)
    found: list[Directive] = []
    depth, conditions = 0, _CONDITION.finditer(blanked)
    condition = next(conditions, None)
    for match in _MENTION.finditer(blanked):
        while condition is not None and condition.start() < match.start("word"):
            depth += -1 if condition[1] == "endif" else 1
            condition = next(conditions, None)
        line = 1 + joined.count("\n", 0, match.start("word")) + bisect.bisect_right(joints, match.start("word"))
        found += _read(match[0].strip(), line, f"{owner}, line {line}", branched=depth != 0)
    return found


def _read(content: str, line: int, where: str, *, branched: bool) -> list[Directive]:
    if content.startswith(("#", "%:")) and "__has_include" in content:
        raise ToolchainError(
            f"{where}: __has_include makes the kernel depend on what is installed besides what it includes",
            "include the header, or do without it",
        )
    match = _DIRECTIVE.match(content)
    if match is None:
        return []
    spelled = _SPELLED.fullmatch(match[2])
    if spelled is None:
        raise ToolchainError(
            f"{where}: #{match[1]} {match[2]} does not spell its header out, so the headers of "
            "the kernel cannot be known before it is compiled",
            "write the name between quotes",
        )
    name = spelled[1] or spelled[2]
    _check(name, f"{where}: #{match[1]}")
    return [Directive(line, name, quoted=spelled[1] is not None, branched=branched)]


def _check(name: str, where: str) -> None:
    if name.startswith("/") or posixpath.normpath(name).split("/")[0] == "..":
        raise ToolchainError(
            f"{where} {name!r} leaves the headers of jitmx and CUDA, so the kernel would depend on this machine",
            f"put the header below templates/include/{OWN} and include it as {OWN}{posixpath.basename(name)}",
        )


def remedy(name: str) -> str:
    """What to do about a header that is nowhere to be found."""
    if name.startswith(OWN):
        return f"check its spelling, or add templates/include/{name}"
    if name.startswith("crt/"):
        return "pip install nvidia-cuda-crt"
    return f"check its spelling, or pip install -U {_WHEEL} (there is no C++ standard library in a kernel)"
