"""Kernels that could not be had: what is said of them, and the exit code that they call for."""

from __future__ import annotations

from collections.abc import Iterable

from jitmx.cli import output
from jitmx.cli.group import exit_code
from jitmx.errors import JitmxError

# A kernel that does not compile weighs more than one that breaks its contract, and that more than a bad request.
_SEVERITY = (2, 1, 3)


def worst(codes: Iterable[int]) -> int:
    """Of several exit codes the one to end with."""
    return max(codes, key=_SEVERITY.index)


def report(failures: list[tuple[str, JitmxError]]) -> int:
    """Show each failure once, whichever number of kernels it hit; the exit code that the worst of them calls for."""
    kernels: dict[str, list[str]] = {}
    for name, error in failures:
        kernels.setdefault(str(error), []).append(name)
    for message, names in kernels.items():
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        output.say(f"Error: {names[0]}{others}: {message}", err=True)
    return worst(exit_code(error) for _, error in failures)
