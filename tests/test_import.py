"""`import jitmx` costs next to nothing and touches no GPU."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import jitmx
from clock import AGAIN, assert_costs

pytestmark = AGAIN

ROOT = Path(jitmx.__file__).parent.parent


def python(code: str) -> str:
    """Run `code` in a process of its own, beside this package."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout


LIGHT = ["jitmx", "jitmx.settings, jitmx.arch", "jitmx.errors"]


@pytest.mark.parametrize(("modules", "most"), list(zip(LIGHT, (0.45, 0.92, 0.46), strict=True)))
def test_importing_takes_less_than_importing_click_does(modules: str, most: float) -> None:
    assert_costs(f"import {modules}", most)


@pytest.mark.parametrize("modules", LIGHT)
def test_importing_brings_in_no_torch_cupy_or_numpy(modules: str) -> None:
    loaded = json.loads(python(f"import {modules}, json, sys; print(json.dumps(list(sys.modules)))"))
    heavy = {
        "torch",
        "cupy",
        "cupy_backends",
        "numpy",
        "ml_dtypes",
        "jinja2",
        "rich",
        "filelock",
        "fsspec",
        "cryptography",
    }
    assert not heavy & {name.partition(".")[0] for name in loaded}


@pytest.mark.parametrize("modules", [*LIGHT, "jitmx.kernels, jitmx.build, jitmx.dispatch.choose, jitmx.cli"])
def test_importing_loads_no_library_of_cuda(modules: str) -> None:
    maps = python(f"import {modules}; print(open('/proc/self/maps').read())")
    assert "libc" in maps
    assert not [line for line in maps.splitlines() if "libcuda" in line or "libnvrtc" in line or "nvidia" in line]


def test_choosing_and_rendering_load_no_library_of_cuda_either() -> None:
    code = (
        "from jitmx import arch, registry; from jitmx.dispatch.call import explain; "
        "from jitmx.registry.render import render; render(explain('linear', arch.parse('sm_121')).choice.variant); "
        "print(open('/proc/self/maps').read())"
    )
    assert not [line for line in python(code).splitlines() if "libcuda" in line or "libnvrtc" in line]


def test_every_public_name_can_be_had_and_is_listed() -> None:
    assert sorted(jitmx.__all__) == jitmx.__all__
    for name in jitmx.__all__:
        assert getattr(jitmx, name).__doc__
        assert name in dir(jitmx)


def test_modules_and_version_are_there_without_an_import_of_their_own() -> None:
    code = "import jitmx; print(jitmx.nn.MXFP4Linear.__name__, jitmx.__version__)"
    assert python(code).split() == ["MXFP4Linear", importlib.metadata.version("jitmx")]


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'jitmx' has no attribute 'linnear'"):
        jitmx.linnear  # noqa: B018


def test_without_torch_an_operator_says_what_to_install() -> None:
    said = json.loads(python("""
import json, sys
sys.modules["torch"] = None
import jitmx
said = {}
for name in jitmx.__all__:
    try:
        getattr(jitmx, name)
    except ModuleNotFoundError as error:
        said[name] = [str(error), error.name]
print(json.dumps(said))
"""))  # fmt: skip
    remedy = "install it with: pip install 'jitmx[torch]'"
    assert said == {
        name: [f"jitmx.{name} takes torch, which is not installed; {remedy}", "torch"] for name in jitmx.__all__
    }


def imports(node: ast.AST) -> Iterator[str]:
    """Every name that a module imports wherever it does, types alone aside."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        for child in node.orelse:
            yield from imports(child)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


def graph(package: Path) -> dict[str, set[str]]:
    """The modules that each module of a package imports."""
    paths = {path.relative_to(package.parent).with_suffix(""): path for path in package.rglob("*.py")}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}

    def module_of(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {module_of(name) for name in imports(ast.parse(path.read_text()))} - {"", module}
        for module, path in modules.items()
    }


def packages() -> dict[str, int]:
    """The packages and modules that the table of docs/architecture.md names, with their rows."""
    _, _, text = (ROOT / "docs" / "architecture.md").read_text().partition("## Packages")
    rows = re.findall(r"^\| (`[^|]*) \|", text.partition("Outside of")[0], re.MULTILINE)
    return {
        name.removesuffix(".py"): row for row, cell in enumerate(rows) for name in re.findall(r"`([\w.]+)/?`", cell)
    }


def test_every_package_is_in_the_table_of_the_architecture() -> None:
    found = {path.parent.name for path in (ROOT / "jitmx").glob("*/__init__.py")}
    found |= {path.stem for path in (ROOT / "jitmx").glob("*.py")} - {"__init__"}
    assert found == set(packages())


def test_a_package_imports_only_from_its_own_row_of_the_table_and_those_above() -> None:
    rows = packages()
    wrong = {
        (name, other)
        for path in (ROOT / "jitmx").rglob("*.py")
        for name in path.relative_to(ROOT / "jitmx").with_suffix("").parts[:1]
        for imported in imports(ast.parse(path.read_text()))
        for other in re.findall(r"^jitmx\.(\w+)", imported)
        if other in rows and rows[other] > rows.get(name, len(rows))
    }
    assert wrong == set()


def test_no_modules_import_one_another_in_a_circle() -> None:
    found = graph(ROOT / "jitmx")
    assert "jitmx.errors" in found["jitmx.settings"] and len(found) > 100
    TopologicalSorter(found).prepare()


@pytest.mark.parametrize(
    "second",
    ["import jitmx.one", "def late():\n    from jitmx import one", "from jitmx.one import name as other"],
)
def test_a_circle_is_found_wherever_a_module_imports_the_other(tmp_path: Path, second: str) -> None:
    package = tmp_path / "jitmx"
    package.mkdir()
    for name, text in {"__init__": "", "one": "from jitmx import two", "two": second}.items():
        (package / f"{name}.py").write_text(text)
    with pytest.raises(CycleError):
        TopologicalSorter(graph(package)).prepare()
    (package / "two.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jitmx import one")
    TopologicalSorter(graph(package)).prepare()
