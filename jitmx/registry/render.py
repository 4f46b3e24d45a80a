"""From a variant to CUDA source.

A template sees `arch`, `threads`, `shared_bytes` (that of the spec), and each knob by its name. An undefined name is an
error, never an empty string. The source opens with a comment that names kernel, target and knobs, so that a kept source
explains itself; then comes the struct that the kernel is launched with.
"""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import jinja2

from jitmx import resources, settings
from jitmx.errors import RenderError
from jitmx.registry.spec import Variant

_lock = threading.Lock()


def _unlock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_after_fork)


@functools.cache
def _environment(*roots: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(roots),
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


def render(variant: Variant, root: Path | None = None) -> str:
    """CUDA source of `variant`, ending in a newline.

    Args:
        root: the folder of templates; by default that of this installation, and those of JITMX_FAMILIES.

    Raises:
        RenderError: the template is missing, has a syntax error, or uses a name that is no knob.
    """
    roots = (root,) if root else resources.directories("templates", settings.current().families)
    environment = _environment(*roots)
    try:
        # One thread at a time: reading a template takes Jinja several times as long as rendering it, and threads that
        # miss its cache together would each read the same ones.
        with _lock:
            body = environment.get_template(variant.spec.template).render(
                arch=variant.arch,
                threads=variant.threads,
                shared_bytes=variant.spec.shared_bytes(variant.knobs),
                **variant.knobs.as_dict(),
            )
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"{error.name or variant.spec.template}:{error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError) as error:
        raise RenderError(f"{variant.spec.template}: {error}") from error
    return header(variant) + variant.arguments.source + body
