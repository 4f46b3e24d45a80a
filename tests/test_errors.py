"""Errors say what is wrong and what to do in fields of their own, and keep both from process to process."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from jitmx import errors

PACKAGE = Path(errors.__file__).parent
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.JitmxError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_errors_text_is_its_message_and_behind_it_the_remedy(kind: type[errors.JitmxError]) -> None:
    error = kind("m=0 is below its limit", "the nearest legal value is 1")
    assert (error.message, error.remedy) == ("m=0 is below its limit", "the nearest legal value is 1")
    assert str(error) == "m=0 is below its limit; the nearest legal value is 1"
    assert "the nearest legal value is 1" in repr(error)
    plain = kind("m=0 is below its limit")
    assert (str(plain), plain.remedy) == ("m=0 is below its limit", "")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_from_another_process_has_all_its_fields(kind: type[errors.JitmxError]) -> None:
    error = kind("no", "yes")
    error.message += " (1 of 2)"
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind and vars(found) == vars(error) and str(found) == "no (1 of 2); yes"


def asks_text(node: ast.AST) -> bool:
    """Whether this looks into the text of an exception: `... in str(error)`, `str(error).startswith(...)`."""
    if isinstance(node, ast.Compare):
        return any(ast.unparse(one) == "str(error)" for one in (node.left, *node.comparators))
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "str(error)"
        and node.func.attr in ("startswith", "endswith", "partition", "rpartition", "find", "index", "split")
    )  # fmt: skip


def test_no_code_decides_on_the_text_of_an_error() -> None:
    assert asks_text(ast.parse("'a' in str(error)", mode="eval").body)
    assert asks_text(ast.parse("str(error).partition(';')", mode="eval").body)
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if asks_text(node)
    ]
    assert found == []
