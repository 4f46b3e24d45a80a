"""Groups whose verbs are modules, and where whatever ends a command becomes a message and an exit code."""

from __future__ import annotations

import difflib
import errno
import importlib
import keyword
import sys
from collections.abc import Sequence
from typing import Any

import click

from jitmx import errors
from jitmx.cli import output, streams

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
INTERRUPTED = 130  # as shells say of a process that Ctrl-C has ended

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
        module = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = importlib.import_module(f"{self._package}.{module}").command
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
            output.say(f"Error: {error}", err=True)
            ctx.exit(exit_code(error))
        except KeyboardInterrupt:
            output.say("Interrupted", err=True)
            ctx.exit(INTERRUPTED)


class Program(LazyGroup):
    """The outermost group: it has streams to write to, and ends in an exit code whatever happens to them."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        streams.prepare()
        failed: OSError | None = None
        try:
            code = self._ended(args, prog_name, complete_var, **extra)
        except OSError as error:
            code, failed = 1, error
        unwritten = streams.settle(sys.stdout)
        failed = failed or unwritten
        if failed is not None:
            code = code or 1
            if failed.errno != errno.EPIPE:  # who closes a pipe early has read enough
                of_output = failed.filename is None and failed.errno in _UNWRITABLE
                said = f"the output could not be written ({failed.strerror})" if of_output else str(failed)
                output.say(f"Error: {said}", err=True)
        streams.settle(sys.stderr)
        sys.exit(code)

    def _ended(self, args: Sequence[str] | None, prog_name: str | None, complete_var: str | None, **extra: Any) -> int:
        """The exit code of a command, whose end it has told."""
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            return code if isinstance(code, int) else 0
        except (KeyboardInterrupt, click.Abort):
            output.say("Interrupted", err=True)
            return INTERRUPTED
        except click.ClickException as error:
            if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # before click 8.2 none is raised
                output.say(error.format_message(), err=True)
                return error.exit_code
            context = error.ctx if isinstance(error, click.UsageError) else None
            if context is not None:
                hint = f"Try '{context.command_path} --help' for help."
                output.say(f"{context.get_usage()}\n{hint}\n", err=True)
            output.say(f"Error: {error.format_message()}", err=True)
            return error.exit_code
