"""Which code timings are of: an edit to any file that goes into a kernel makes those of a journal void."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jitmx import arch, kernels, resources
from jitmx.bench.tuning import code_digest
from jitmx.dispatch.choose import choose
from jitmx.registry import render


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the templates, in their place."""
    place, real = tmp_path / "templates", resources.directory
    shutil.copytree(real("templates"), place)
    monkeypatch.setattr(resources, "directory", lambda name: place if name == "templates" else real(name))
    return place


def test_every_file_that_a_template_takes_in_counts(templates: Path) -> None:
    loader = render._environment(templates).loader
    assert loader is not None
    loaded, get_source = set(), loader.get_source
    loader.get_source = lambda environment, name: (loaded.add(name), get_source(environment, name))[1]  # type: ignore[method-assign]
    for target in map(arch.parse, ("sm_80", "sm_90", "sm_121")):
        for problem in kernels.family("linear").typical(target):
            render.render(choose("linear", problem, target).variant, templates)
    assert {"linear/tile.cu.j2", "linear/tile_parts.j2", "linear/stream_frame.j2"} <= loaded
    for name in loaded:
        before = code_digest("linear")
        templates.joinpath(name).write_text("// other\n")
        assert code_digest("linear") != before, name


@pytest.mark.parametrize(
    ("op", "name", "counts"),
    [
        ("linear", "include/jitmx/ptx.cuh", True),
        ("linear", "moe/grouped.cu.j2", False),
        ("moe", "routing/sort.cu.j2", True),
        ("moe", "linear/tile.cu.j2", False),
    ],
)
def test_what_is_timed_counts_and_nothing_else(op: str, name: str, counts: bool, templates: Path) -> None:
    before = code_digest(op)
    templates.joinpath(name).write_text("// other\n")
    assert (code_digest(op) != before) == counts
