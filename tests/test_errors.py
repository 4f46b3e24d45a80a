"""Errors say what is wrong and what to do in fields of their own, and keep both from process to process."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from jitmx import errors

PACKAGE = Path(errors.__file__).parent
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.JitmxError)]

TEXTS = ("message", "reason", "remedy")
ASKING = ("startswith", "endswith", "partition", "rpartition", "find", "index", "split", "count", "removeprefix")
SEEN = (
    "'a' in str(error)", "str(error).partition(';')", "str(error) == 'a'", "reason.startswith(BREACH)",
    "fault.reason.endswith('a')", "'a' not in error.message", "re.search('a', str(error))",
)  # fmt: skip


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


def is_text(node: ast.AST) -> bool:
    """Whether this is the text of an exception: `str(error)`, `fault.reason`, or a name that such texts go by."""
    if isinstance(node, ast.Attribute):
        return node.attr in TEXTS
    if isinstance(node, ast.Call):
        return re.fullmatch(r"(str|repr)\((\w*error|fault|exc)\)", ast.unparse(node)) is not None
    return isinstance(node, ast.Name) and node.id in TEXTS


def asks_text(node: ast.AST) -> bool:
    """Whether this looks into the text of an exception: `... in str(error)`, `reason.startswith(...)`."""
    if isinstance(node, ast.Compare):
        ends = zip(node.ops, (node.left, *node.comparators), node.comparators, strict=False)
        return any(
            is_text(right) if isinstance(op, ast.In | ast.NotIn) else is_text(left) or is_text(right)
            for op, left, right in ends
            if not isinstance(op, ast.Is | ast.IsNot)
        )
    if not isinstance(node, ast.Call):
        return False
    if ast.unparse(node.func) in ("re.search", "re.match", "re.fullmatch", "re.findall"):
        return any(is_text(argument) for argument in node.args)
    return isinstance(node.func, ast.Attribute) and is_text(node.func.value) and node.func.attr in ASKING


def test_no_code_decides_on_the_text_of_an_error() -> None:
    for code in SEEN:
        assert asks_text(ast.parse(code, mode="eval").body), code
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if asks_text(node)
    ]
    assert found == []
