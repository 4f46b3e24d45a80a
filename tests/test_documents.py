"""What the documents tell readers to run, import and open exists."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import jitmx
from jitmx import kernels, settings
from jitmx.cli import main
from jitmx.cli.group import LazyGroup
from jitmx.cli.options import FieldLetters

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def verb(words: list[str]) -> click.Command | None:
    """The verb that the words after `jitmx` name, or None."""
    group: click.Command | None = main
    for word in words:
        if not isinstance(group, LazyGroup):
            break
        group = group.get_command(click.Context(group), word)
    return group


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_a_document_is_a_verb_with_these_options(document: Path) -> None:
    text = document.read_text()
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    inline = re.findall(r"`jitmx ([a-z][^`\n]*)`", text)
    for line in inline + re.findall(r"(?:^|&& )jitmx ([^&|#\n]*)", blocks, re.MULTILINE):
        words = line.split()
        command = verb(words)
        assert command is not None, f"jitmx {line}"
        if not isinstance(command, LazyGroup):
            options = {name for parameter in command.params for name in parameter.opts}
            used = {word for word in words if re.fullmatch(r"--?[a-z-]+", word)}
            if isinstance(command, FieldLetters):
                used = {word for word in used if word in options or len(word) > 2}
            assert used <= options, f"jitmx {line}"


def verbs(group: click.Command = main, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every verb."""
    if isinstance(group, LazyGroup):
        for name in group.list_commands(click.Context(group)):
            inner = group.get_command(click.Context(group), name)
            assert inner is not None
            yield from verbs(inner, (*names, name))
    yield names


@pytest.mark.parametrize("names", list(verbs()), ids=" ".join)
def test_every_example_of_a_help_text_can_be_called_as_it_stands(names: tuple[str, ...]) -> None:
    group = verb(list(names)) or main
    text = re.sub(r"\\\n\s*", "", group.epilog or "")
    examples = re.findall(r"^ +(?:\w+=\S+ )*jitmx (.*)$", text, re.MULTILINE)
    assert examples
    for line in examples:
        words = shlex.split(re.split(r" [|>] |   ", line)[0])
        command = verb(words)
        assert command is not None and not isinstance(command, LazyGroup), line
        left = words[1 + (words[0] in ("cache", "bundle")) :]
        command.make_context("jitmx", left)  # reads every value


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_name_in_the_readme_s_python_is_public() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = set(re.findall(r"\bjitmx\.(\w+)", "".join(blocks)))
    assert names and names <= set(jitmx.__all__)
    for block in blocks:
        compile(block, "README.md", "exec")


@pytest.mark.parametrize("name", [name for name in jitmx.__all__ if inspect.isfunction(getattr(jitmx, name))])
def test_a_public_operator_says_what_it_returns_and_raises_and_where_its_kernel_is(name: str) -> None:
    operator = getattr(jitmx, name)
    text = inspect.getdoc(operator) or ""
    missing = {said for said in ("Returns:", "Raises:", "Source:") if said not in text}
    missing -= {"Returns:"} if inspect.signature(operator).return_annotation == "None" else set()
    missing -= {"Source:"} if name == "interleave_gate_up" else set()  # torch's indexing
    assert missing == set()


@pytest.mark.parametrize("name", jitmx.__all__)
def test_what_a_docstring_names_as_source_and_reference_is_there(name: str) -> None:
    _, _, said = (inspect.getdoc(getattr(jitmx, name)) or "").partition("Source: ")
    template, _, reference = said.partition("\n")[0].rstrip(".").partition("; reference: ")
    for place in re.findall(r"(?:templates|jitmx)/[\w./]*\w", f"{template} {reference}"):
        assert (ROOT / place).exists(), place
    for dotted in re.findall(r"jitmx\.[\w.]*\w", reference):
        pkgutil.resolve_name(dotted)


def test_the_readme_opens_with_the_two_commands_that_set_everything_up() -> None:
    first = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first is not None
    assert first[1].splitlines() == [
        "pip install -e . && jitmx warmup --arch sm_121",
        "pip install -e '.[test]' && pytest",
    ]


@pytest.mark.parametrize("package", ["serving", "vllm"])
def test_a_package_that_lists_its_modules_lists_all(package: str) -> None:
    folder = ROOT / "jitmx" / package
    said = re.findall(r"^ *(\w+\.py) ", (folder / "__init__.py").read_text(), re.MULTILINE)
    assert sorted(said) == sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("family", kernels.families())
def test_every_kernel_of_a_family_is_in_its_row(family: str) -> None:
    (row,) = re.findall(rf"^\| `{family}` \|(.*)$", (ROOT / "docs" / "kernels.md").read_text(), re.MULTILINE)
    assert {one.spec.name for one in kernels.family(family).kernels} <= set(re.findall(r"`(\w+)`", row))


def setting_row(item: settings.Setting) -> tuple[str, str, str]:
    """Name, values and what it is for; those that every family has stand for all families."""
    for family in kernels.families():
        if item.field in (f"{family}_knobs", f"{family}_tile"):
            name = item.name.replace(family.upper(), "<FAMILY>")
            return name, item.choices, item.help.replace(f" {family} ", " `<family>` ")
    return item.name, item.choices, item.help


def test_every_setting_is_documented_as_the_table_has_it() -> None:
    rows = [line for line in (ROOT / "docs" / "settings.md").read_text().splitlines() if line.startswith("| `")]
    aliases: dict[tuple[str, str, str], list[str]] = {}
    for item in settings.TABLE:
        aliases.setdefault(setting_row(item), []).extend(f"`{alias}`" for alias in item.aliases)
    assert rows == [
        f"| `{name}` | {', '.join(also)} | {choices} | {said} |" for (name, choices, said), also in aliases.items()
    ]


def test_no_document_and_no_script_names_a_variable_that_jitmx_would_refuse() -> None:
    known = {item.name for item in settings.TABLE}
    files = [*DOCUMENTS, ROOT / ".ci" / "run", *(ROOT / "scripts").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh")]
    named = {(path.name, name) for path in files for name in re.findall(r"\bJITMX_[A-Z_]*[A-Z]\b", path.read_text())}
    assert {(path, name) for path, name in named if name not in known} == set()
