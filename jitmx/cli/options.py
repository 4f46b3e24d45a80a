"""Options that several verbs share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from jitmx import arch as arches
from jitmx import setting_text
from jitmx.arch import Arch
from jitmx.errors import ArchError
from jitmx.quoting import short

_F = TypeVar("_F", bound=Callable[..., Any])


class FieldLetters(click.Command):
    """A verb that takes FIELD=VALUE words, and the same as options where it has none of that name.

    `-x VALUE` is short for `x=VALUE`, and `--name VALUE` for `name=VALUE` where some family's problems have the field.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {name for item in self.params if isinstance(item, click.Option) for name in item.opts}
        found, words, left = [], [], iter(args)
        for text in left:
            option, equals, value = text.partition("=")
            if text == "--":
                found += [text, *left]
            elif text.startswith("--") and option not in options and (field := _field(option)):
                if not equals:
                    value = next(left, "")
                if not value:
                    raise click.UsageError(f"{option} needs a value: it is the same as {field}=VALUE", ctx)
                words.append(f"{field}={value}")
            elif not re.match(r"-[A-Za-z]", text) or text[:2] in options:
                found.append(text)
            elif not (value := text[2:].removeprefix("=") or next(left, "")):
                raise click.UsageError(f"{text} needs a value: it is short for {text[1]}=VALUE", ctx)
            else:
                words.append(f"{text[1]}={value}")
        return super().parse_args(ctx, [*found, *words])


def as_field(context: click.Context, name: str) -> str:
    """An option's value as a field of the operator that is named, or an empty text where that has no such field."""
    from jitmx import kernels

    op = context.params.get("op") or next(iter(context.params.get("words", ())), "")
    family = kernels.families().get(op)
    there = family is not None and name in family.problem.__dataclass_fields__
    return f"{name}={context.params[name]}" if there else ""


def _field(option: str) -> str:
    """The field of some family's problems that a long option names, or an empty text."""
    from jitmx import kernels

    name = option[2:].replace("-", "_")
    return name if any(name in family.problem.__dataclass_fields__ for family in kernels.families().values()) else ""


_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_MOST_BYTES, _MOST_SECONDS = 1 << 60, 1e10


class NamedPath(click.Path):
    """A path that is not empty, which Python would take for the current directory, nor `-` unless `allow_dash`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("a path is empty; give one", param, ctx)
        if value == "-" and not self.allow_dash:
            self.fail("- stands for no stream here; name a file, or write ./- where one has this name", param, ctx)
        return super().convert(value, param, ctx)


class Count(click.IntRange):
    """A whole number within limits, whatever number of digits is passed."""

    def __init__(self, low: int, high: int, step: int = 1) -> None:
        super().__init__(low, high)
        self._low, self._high, self._step = low, high, step

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            found = value if isinstance(value, int) else setting_text.whole(value, self._low, self._high)
        except ValueError:
            self.fail(f"{short(value)} is no whole number from {self._low} to {self._high}", param, ctx)
        if found % self._step:
            self.fail(f"{found} is no multiple of {self._step}", param, ctx)
        return found


def _targets(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[Arch, ...]:
    try:
        found = [arches.parse(word) for value in values for word in value.replace(",", " ").split()]
    except ArchError as error:
        raise click.BadParameter(str(error)) from error
    return tuple(dict.fromkeys(found))


def _words(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for value in values for word in value.replace(",", " ").split()))


def counts(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """Reads whole numbers of 1 or more, repeated or separated by commas."""
    one = Count(1, 1 << 16)
    return tuple(one.convert(word, parameter, context) for word in _words(context, parameter, values))


def byte_count(_context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Reads `1G`, `500M` or `4096` as bytes; units are binary."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(
            f"{short(value)} is not a size; write bytes or a number with K, M, G or T, such as 500M", param=parameter
        )
    count = float(match[1]) * _BYTES[match[2].upper()]
    if count > _MOST_BYTES:
        said = f"{short(value)} is more than any disk holds; write a size such as 500M"
        raise click.BadParameter(said, param=parameter)
    return int(count)


def span(_context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Reads a number of seconds above 0."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_SECONDS:
        said = f"{short(value)} is no number of seconds above 0 and up to {_MOST_SECONDS:.0e}"
        raise click.BadParameter(said, param=parameter)
    return seconds


def duration(_context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Reads `30d`, `12h`, `90m`, `45s` or `2w` as seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(
            f"{short(value)} is not an age; write a number with s, m, h, d or w, such as 30d", param=parameter
        )
    seconds = float(match[1]) * _SECONDS[match[2].lower()]
    if seconds > _MOST_SECONDS:
        raise click.BadParameter(f"{short(value)} is over 300 years; write an age such as 30d", param=parameter)
    return seconds


_MANY_TARGETS = "Target, such as sm_121; repeat it or separate several by commas"


def arch_option(help: str = f"{_MANY_TARGETS} (default: the GPUs here, else JITMX_ARCH).") -> Callable[[_F], _F]:
    """`--arch`, repeatable and comma-separated; the verb receives `targets_asked: tuple[Arch, ...]`."""
    return click.option("--arch", "targets_asked", multiple=True, metavar="SM", callback=_targets, help=help)


def family_option(function: _F) -> _F:
    """`--family`, repeatable and comma-separated; the verb receives `family_names: tuple[str, ...]`."""
    return click.option(
        "--family",
        "family_names",
        multiple=True,
        metavar="NAME",
        callback=_words,
        help="Only this kernel family; repeat it or separate several by commas.",
    )(function)


def jobs_option(function: _F) -> _F:
    """`--jobs`; the verb receives `jobs: int | None`."""
    return click.option(
        "--jobs",
        "-j",
        type=Count(1, setting_text.MOST_JOBS),
        metavar="N",
        help="Compiles at once (default: JITMX_JOBS, else what cores and memory allow).",
    )(function)


def quiet_option(function: _F) -> _F:
    """`-q`; the verb receives `quiet: bool`."""
    return click.option("--quiet", "-q", is_flag=True, help="No progress on stderr; errors are still shown.")(function)


def kv_cache_option(of: str) -> Callable[[_F], _F]:
    """`--kv-cache-dtype`, said to be `of` something; the verb receives `kv_cache_dtype`, "auto" or "fp8"."""
    return click.option(
        "--kv-cache-dtype",
        type=click.Choice(["auto", "fp8", "fp8_e4m3"]),
        default="auto",
        callback=lambda _context, _parameter, value: value.removesuffix("_e4m3"),
        help=f"{of}: as in vLLM, where fp8 is fp8_e4m3.",
    )


def keys_option(function: _F) -> _F:
    """`--keys`, repeatable; the verb receives `key_places: tuple[Path, ...]`."""
    return click.option(
        "--keys",
        "key_places",
        multiple=True,
        type=NamedPath(path_type=Path),
        metavar="PATH",
        help="A public key (PEM), or a directory of them, one of which must have signed; instead of JITMX_BUNDLE_KEYS.",
    )(function)


def json_option(function: _F) -> _F:
    """`--json`; the verb receives `as_json: bool`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)
