"""From a variant to CUDA source.

A template sees `arch`, `threads`, `shared_bytes` (that of the spec), and each knob by its name. An undefined name is an
error, never an empty string. The source opens with a comment that names kernel, target and knobs, so that a kept source
explains itself; then comes the struct that the kernel is launched with.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from jitmx import resources, settings
from jitmx.errors import RenderError
from jitmx.registry.key import frame
from jitmx.registry.spec import Variant

Stamp = tuple[int, int, int, int]  # times of content and of the file, size and number

_lock = threading.Lock()


def _unlock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_after_fork)


@dataclass(frozen=True)
class _Templates:
    """The templates of some folders, as they were read.

    Attributes:
        stamps: of each folder and file, what the file system says of it.
        environment: which renders them.
        digest: of all of them, and of what renders them.
    """

    stamps: Mapping[Path, Stamp | None]
    environment: jinja2.Environment
    digest: str


_read: dict[tuple[Path, ...], _Templates] = {}


def _templates(*roots: Path) -> _Templates:
    """Those of some folders as they are now: edited ones are read again. Of two of a name, that in the first folder."""
    known = _read.get(roots)
    if known is None or any(_stamp(path) != stamp for path, stamp in known.stamps.items()):
        known = _read[roots] = _read_all(roots)
    return known


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _read_all(roots: tuple[Path, ...]) -> _Templates:
    stamps: dict[Path, Stamp | None] = {}
    texts: dict[str, str] = {}
    for root in roots:
        files = sorted(root.rglob("*.j2"))
        folders = {parent for file in files for parent in file.parents if parent.is_relative_to(root)}
        stamps |= {path: _stamp(path) for path in (root, *folders, *files)}  # before they are read
        for file in files:
            texts.setdefault(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    parts = [(name, text.encode()) for name, text in sorted(texts.items())]
    renderer = [("jinja", jinja2.__version__.encode()), ("code", Path(__file__).read_bytes())]
    return _Templates(stamps, _environment(texts), frame(renderer + parts))


def _environment(texts: Mapping[str, str]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(texts),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["cxx"] = _cxx
    return environment


def _cxx(value: object) -> str:
    """A knob's value as a C++ literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise TypeError(f"{value!r} has no C++ literal; compare it in the template")


def header(variant: Variant) -> str:
    """The comment that opens the source."""
    lines = [f"// {variant.spec.family}.{variant.spec.name} for {variant.arch.name}, rendered by jitmx"]
    lines += [
        f"//   {name} = {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in variant.knobs.as_dict().items()
    ]
    return "\n".join(lines) + "\n"


class Rendering:
    """The source of a variant, known by what it is made from before it is made.

    Args:
        root: the folder of templates; by default that of this installation, and those of JITMX_FAMILIES.
    """

    def __init__(self, variant: Variant, root: Path | None = None) -> None:
        self._variant = variant
        roots = (root,) if root else resources.directories("templates", settings.current().families)
        with _lock:
            self._templates = _templates(*roots)
        self._seen = {
            "arch": variant.arch,
            "threads": variant.threads,
            "shared_bytes": variant.spec.shared_bytes(variant.knobs),
            **variant.knobs.as_dict(),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the templates, of what they see and of what renders them, 64 hexadecimal digits."""
        arch = {**dataclasses.asdict(self._variant.arch), "features": sorted(self._variant.arch.features)}
        return frame(
            [
                ("templates", self._templates.digest.encode()),
                ("template", self._variant.spec.template.encode()),
                ("header", header(self._variant).encode()),
                ("arguments", self._variant.arguments.source.encode()),
                *((name, repr(value).encode()) for name, value in sorted({**self._seen, "arch": arch}.items())),
            ]
        )

    def source(self) -> str:
        """CUDA source, ending in a newline.

        Raises:
            RenderError: the template is missing, has a syntax error, or uses a name that is no knob.
        """
        template = self._variant.spec.template
        try:
            # One thread at a time: reading a template takes Jinja several times as long as rendering it, and threads
            # that miss its cache together would each read the same ones.
            with _lock:
                body = self._templates.environment.get_template(template).render(self._seen)
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(f"{error.name or template}:{error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, TypeError) as error:
            raise RenderError(f"{template}: {error}") from error
        return header(self._variant) + self._variant.arguments.source + body


def render(variant: Variant, root: Path | None = None) -> str:
    """The source of a `Rendering`, which raises the same."""
    return Rendering(variant, root).source()
