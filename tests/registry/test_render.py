"""Rendering: every knob reaches the code, nothing is rendered as nothing, and a source says what it is."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import meta

from jitmx import arch, resources
from jitmx.errors import RenderError
from jitmx.registry import render as rendering
from jitmx.registry.arguments import Arguments, writes
from jitmx.registry.contract import Contract
from jitmx.registry.render import header, render
from jitmx.registry.spec import KernelSpec, Knobs, Variant, knob
from strategies import OF_EACH, SPEC_NAMES, SPECS, arches_of, changed, sampled, usual, variants

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

PAIRS = [(spec, target) for spec in SPECS for target in arches_of(spec)]
PAIR_NAMES = [f"{spec.family}.{spec.name}-{target}" for spec, target in PAIRS]

# Knobs that select nothing beside certain others: fp16 has no room to fold scales into decoding, whatever their range.
IDLE = {(name, "scale_range", "fp16") for name in ("linear.gemv", "linear.tile") if name in SPEC_NAMES}


# Knobs that can change together with two others at least, such as the shape of a block with its warps.
TIED = {
    "attention.decode": {"row_tiles"},
    "linear.scaled": {"atom", "blocks_per_sm", "warps_m", "warps_n"},
    "linear.stream": {"ahead", "chunk", "predecode", "resident", "share", "split_k", "stages", "sums", "whole"},
    "linear.tile": {"warps_m"},
    "linear.splitk": {"dtype", "scale_range"},
    "linear.wgmma": {"dtype", "scale_range"},
    "linear.wgmma_fp8": {"dtype", "scale_range"},
    "moe.fused": {"scale_range"},
    "moe.fused_fp8": {"activation", "scale_range"},
    "moe.scaled": {"atom", "blocks_per_sm", "warps_m", "warps_n"},
    "moe.wgmma": {"scale_range"},
    "moe.wgmma_fp8": {"activation", "product", "scale_range"},
    "routing.route": {"normalized"},
}


@functools.cache
def code(variant: Variant) -> bytes:
    """Digest of the rendered source without its comments: of what the compiler sees, but for the layout of lines."""
    return hashlib.sha256(" ".join(_COMMENT.sub(" ", render(variant)).split()).encode()).digest()


def idle(variant: Variant, name: str) -> bool:
    """Whether knob `name` is known to select nothing beside the other knobs."""
    dtype = variant.knobs.as_dict().get("dtype")
    return (f"{variant.spec.family}.{variant.spec.name}", name, dtype) in IDLE


def least(variant: Variant) -> Variant:
    """`variant` with as little in flight as can be, which leaves its other knobs room."""
    for name in ("chunk", "stages"):
        if hasattr(variant.knobs, name):
            variant = changed(variant, **{name: 1}) or variant
    return variant


def beside_another(variant: Variant, name: str) -> bool:
    """Whether knob `name` has another legal value where one more knob changes with it."""
    items = dataclasses.fields(variant.knobs)
    own = next(item for item in items if item.name == name)
    pairs = (
        (value, item.name, other)
        for value in sampled(own)
        if value != getattr(variant.knobs, name)
        for item in items
        if item is not own
        for other in sampled(item)
    )
    return any(changed(variant, **{name: value, more: other}) for value, more, other in pairs)


def neighbours(variant: Variant) -> list[tuple[str, Variant]]:
    """Every legal variant that differs from `variant` in one knob, and that knob's name."""
    found = []
    for item in dataclasses.fields(variant.knobs):
        for value in sampled(item):
            other = changed(variant, **{item.name: value})
            if other is not None and other != variant:
                found.append((item.name, other))
    return found


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
@settings(max_examples=5)
@given(data=st.data())
def test_changing_any_one_knob_changes_the_code_beyond_its_comments(spec: KernelSpec, data: st.DataObject) -> None:
    variant = data.draw(variants(spec))
    before = code(variant)
    for name, other in neighbours(variant):
        assert (code(other) == before) == idle(variant, name), name


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize(("spec", "target"), PAIRS, ids=PAIR_NAMES)
def test_each_value_of_each_knob_is_rendered_as_code_of_its_own(spec: KernelSpec, target: arch.Arch) -> None:
    variant = least(usual(spec, target))
    met = [(name, code(other)) for name, other in neighbours(variant)]
    assert len({text for _, text in met} | {code(variant)}) == len(met) + 1
    missed = {item.name for item in dataclasses.fields(spec.knobs)} - {name for name, _ in met}
    missed = {name for name in missed if not beside_another(variant, name)}
    # What sm_90 brought leaves older targets no choice, and clusters are left out on sm_12x.
    since = {"copy", "late", "parts", "pdl", "pieces", "reduction", "splits", "window"}
    older = set() if "tma" in target.features else since
    older |= set() if "cvt_e4m3" in target.features else {"cache"}
    alone = set() if target.major in (9, 10) else {"cluster", "exchange"}
    assert missed <= older | alone | TIED.get(f"{spec.family}.{spec.name}", set())


def test_the_only_knobs_that_ever_select_nothing_are_those_listed(nightly: bool) -> None:
    found = set()
    for spec in SPECS:
        for target in arches_of(spec)[:: 1 if nightly else 4]:
            named = "dtype" in {item.name for item in dataclasses.fields(spec.knobs)}
            for dtype in ("bf16", "fp16", "fp32") if named else (None,):
                variant = changed(usual(spec, target), dtype=dtype) if named else usual(spec, target)
                if variant is not None:
                    before = code(variant)
                    found |= {
                        (f"{spec.family}.{spec.name}", name, dtype)
                        for name, other in neighbours(variant)
                        if code(other) == before
                    }
    assert found == IDLE


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
@OF_EACH
@given(data=st.data())
def test_a_source_opens_with_kernel_target_and_every_knob(spec: KernelSpec, data: st.DataObject) -> None:
    variant = data.draw(variants(spec))
    lines = render(variant).splitlines()
    assert lines[0] == f"// {spec.family}.{spec.name} for {variant.arch.name}, rendered by jitmx"
    knobs = {
        name: ("false", "true")[value] if isinstance(value, bool) else value
        for name, value in variant.knobs.as_dict().items()
    }
    assert lines[1 : 1 + len(knobs)] == [f"//   {name} = {text}" for name, text in knobs.items()]


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
@OF_EACH
@given(data=st.data())
def test_behind_that_comes_the_struct_that_the_kernel_takes(spec: KernelSpec, data: st.DataObject) -> None:
    variant = data.draw(variants(spec))
    source, fields = render(variant), variant.arguments
    assert source.startswith(header(variant) + fields.source)
    assert re.search(rf" {spec.entry}\(const (__grid_constant__ )?{fields.name} args\)", source)
    assert ("__grid_constant__" in source) >= bool(fields.maps)  # a copy in local memory would not be a tensor map's


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
@OF_EACH
@given(data=st.data())
def test_rendering_is_repeatable_and_leaves_nothing_of_the_template_language(
    spec: KernelSpec, data: st.DataObject
) -> None:
    variant = data.draw(variants(spec))
    source = render(variant)
    assert source == render(variant)
    assert source.endswith("}\n")
    assert not re.search(r"\{[%#]|[%#]\}|\{\{-? | -?\}\}", source)
    assert f" {spec.entry}(" in source
    assert f"__launch_bounds__({variant.threads}" in source


@dataclasses.dataclass(frozen=True)
class ToyKnobs(Knobs):
    width: int = knob(4, low=1, doc="a number")
    wide: bool = knob(False, doc="a flag")
    kind: str = knob("plain", choices=("plain", "fancy"), doc="a word")


ARGUMENTS = Arguments("ToyArguments", writes("out", "[1]", "int"))
TOY = KernelSpec(
    family="toy",
    name="kernel",
    knobs=ToyKnobs,
    contract=lambda knobs, target: Contract(),
    shared_bytes=lambda knobs: 4096 * knobs.width,
    threads=lambda knobs: 32,
    entry="toy",
    arguments=lambda knobs: ARGUMENTS,
)


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    """Renders a template's text with the toy kernel's knobs."""

    def run(text: str, **knobs: Any) -> str:
        (tmp_path / "toy").mkdir(exist_ok=True)
        (tmp_path / "toy" / "kernel.cu.j2").write_text(text)
        variant = TOY.variant(arch.parse("sm_121"), **knobs)
        return render(variant, tmp_path).removeprefix(header(variant) + ARGUMENTS.source)

    return run


@pytest.mark.parametrize(
    "text",
    [
        "int x = {{ heigth }};\n",
        "{% if heigth %}\nint x;\n{% endif %}\n",
        "{% for i in heigth %}\n{% endfor %}\n",
        "int x = {{ arch.heigth }};\n",
        "int x = {{ {'plain': 1}[heigth] }};\n",
        "int x = {{ {'other': 1}[kind] }};\n",
        "int x = {{ heigth + 1 }};\n",
        "{{ 'yes' if heigth == 4 else 'no' }}\n",
    ],
)
def test_a_name_that_does_not_exist_is_an_error_that_names_the_file(toy: Any, text: str) -> None:
    with pytest.raises(RenderError, match=r"^toy/kernel\.cu\.j2: .*(heigth|'plain')"):
        toy(text)


def test_a_syntax_error_names_file_and_line(toy: Any) -> None:
    with pytest.raises(RenderError, match=r"^toy/kernel\.cu\.j2:2: "):
        toy("int x;\n{% iff wide %}\nint y;\n")


def test_a_syntax_error_in_a_file_that_a_template_includes_names_that_file(toy: Any, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "part.j2").write_text("int x;\nint y;\n{% endif %}\n")
    with pytest.raises(RenderError, match=r"^toy/part\.j2:3: "):
        toy('{% include "toy/part.j2" %}\n')


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"toy/kernel\.cu\.j2"):
        render(TOY.variant(arch.parse("sm_121")), tmp_path)


def test_knobs_become_literals_of_c(toy: Any) -> None:
    assert toy("{{ width | cxx }} {{ wide | cxx }}\n", wide=True) == "4 true\n"
    assert toy("{{ wide | cxx }}\n") == "false\n"
    with pytest.raises(RenderError, match=r"^toy/kernel\.cu\.j2: 'plain' has no C\+\+ literal"):
        toy("{{ kind | cxx }}\n")


def test_a_template_sees_target_threads_and_shared_memory(toy: Any) -> None:
    text = "{{ arch.name }} {{ arch.number }} {{ threads }} {{ shared_bytes }} {{ 'tma' in arch.features }}\n"
    assert toy(text) == "sm_121a 1210 32 16384 True\n"


def test_every_template_belongs_to_a_kernel() -> None:
    root = resources.directory("templates")
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.cu.j2")}
    assert found == {spec.template for spec in SPECS}


def files(pattern: str) -> dict[str, str]:
    """Texts of the files below templates/ whose names match, by path."""
    root = resources.directory("templates")
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(root.rglob(pattern))}


def parts() -> dict[str, str]:
    """Texts of the files that templates take in, by path."""
    return {name: text for name, text in files("*.j2").items() if not name.endswith(".cu.j2")}


def test_every_part_is_taken_in_by_a_template_and_opens_with_a_comment_that_is_not_rendered() -> None:
    taken = {name for text in files("*.j2").values() for name in re.findall(r'"([^"]+\.j2)"', text)}
    assert parts().keys() == taken
    assert {name for name, text in parts().items() if not text.startswith("{#")} == set()


def test_parts_name_what_they_take() -> None:
    """Knobs are parameters of a part's macros; constants of the template stand in its opening comment."""
    headers = " ".join(files("*.cuh").values())
    for name, text in parts().items():
        if name.startswith("linear/stream_"):  # frames, which blocks fill in
            continue
        assert meta.find_undeclared_variables(jinja2.Environment().parse(text)) == set(), name
        comment, code = text.split("#}", 1)
        constants = set(re.findall(r"(?<![.:\w])k[A-Z]\w*", re.sub(r"//[^\n]*", "", code)))
        own = {one for one in constants if re.search(rf"\b{one} = |[<,] *(?:int|bool) {one}\b", code + headers)}
        assert constants - own - set(re.findall(r"\w+", comment)) == set(), name


def test_threads_that_render_one_kernel_read_its_template_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "templates"
    root.symlink_to(resources.directory("templates"))
    read: list[str] = []
    get_source = jinja2.FileSystemLoader.get_source

    def slow(loader: jinja2.FileSystemLoader, environment: jinja2.Environment, name: str) -> Any:
        read.append(name)
        time.sleep(0.05)
        return get_source(loader, environment, name)

    monkeypatch.setattr(jinja2.FileSystemLoader, "get_source", slow)
    variant = usual(SPECS[0], arches_of(SPECS[0])[0])
    with ThreadPoolExecutor(8) as pool:
        sources = set(pool.map(lambda _: render(variant, root), range(8)))
    assert SPECS[0].template in read and len(read) == len(set(read))
    assert sources == {render(variant)}


def test_a_child_forked_while_another_thread_renders_does_not_wait_for_it() -> None:
    variant = usual(*PAIRS[0])
    with rendering._lock:  # as a thread holds it that the child does not have
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            status = 1
            try:
                status = 0 if render(variant) else 1
            finally:
                os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
