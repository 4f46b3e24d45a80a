"""Groups whose verbs are modules, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from jitmx import errors

# First match decides, so a subclass stands before its base.
_EXIT_CODES: tuple[tuple[type[errors.JitmxError], int], ...] = (
    (errors.SettingError, 2),
    (errors.ArchError, 2),
    (errors.KnobError, 2),
    (errors.InputError, 2),
    (errors.RenderError, 3),
    (errors.ToolchainError, 3),
    (errors.JitmxError, 1),
)


def exit_code(error: errors.JitmxError) -> int:
    """What the process exits with for `error`: 2 for usage, 3 where nothing could be compiled, 1 for anything found."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


class LazyGroup(click.Group):
    """A group that imports `package`.`verb` when the verb is called; the module's `command` is the verb."""

    def __init__(self, *args: Any, package: str, verbs: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        command = importlib.import_module(f"{self._package}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._verbs and not name.startswith("-"):
            close = difflib.get_close_matches(name, self._verbs, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"verbs: {', '.join(self._verbs)}"
            ctx.fail(f"no verb {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except errors.JitmxError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(exit_code(error))
