"""Every default variant computes what it should, thread for thread, on targets of every generation."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmx import arch, kernels, ledger, resources
from jitmx.cli import targets
from jitmx.dispatch.choose import default_variants
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict

TARGETS = ("sm_80", "sm_90a", "sm_120a", "sm_121a")
FAMILIES = sorted(kernels.families())
# Of these a card has shown nearly all on Hopper; what it has not, a test of its own looks at.
SHOWN = ("attention", "moe", "routing")
GATES = {"attention": 0.004, "linear": 0.005, "moe": 0.06, "norm": 0.004, "routing": 1e-5}  # others are exact


@pytest.mark.parametrize(
    ("target", "family"),
    [(target, family) for target in TARGETS for family in FAMILIES if target != "sm_90a" or family not in SHOWN],
)
def test_every_default_variant_passes_its_cases_and_they_reach_its_code(
    target: str, family: str, simulated: Callable[[Variant], Verdict]
) -> None:
    """Together, for every process of a run lists all tests, and which variants there are takes seconds."""
    for variant in default_variants(family, arch.parse(target)):
        verdict = simulated(variant)
        assert verdict.error <= GATES.get(family, 0.0), f"{variant.name} for {variant.arch}"


@functools.cache
def verified(target: str) -> list[Variant]:
    return targets.verified_variants((arch.parse(target),), ())


@pytest.mark.parametrize("family", SHOWN)
def test_what_no_card_has_shown_of_a_family_is_simulated_on_hopper(
    family: str, simulated: Callable[[Variant], Verdict]
) -> None:
    """Of those whose sizes here leave branches of a kernel to other tests."""
    target, shipped = arch.parse("sm_90"), ledger.load()
    for variant in default_variants(family, target):
        shown = shipped.best(ledger.digest(render(variant)), target.name)
        if shown is None or shown.evidence != "hardware":
            simulated(variant, coverage=0.0)


def test_every_rarer_variant_is_legal_on_one_of_two_targets_and_no_default() -> None:
    named = {
        (f.name, k.spec.name, i) for f in kernels.families().values() for k in f.kernels for i in range(len(k.rarer))
    }
    legal = {
        (f.name, k.spec.name, i)
        for f in kernels.families().values()
        for k in f.kernels
        for i, knobs in enumerate(k.rarer)
        if any(k.spec.legal(arch.parse(target), **knobs) for target in TARGETS[1::2])
    }
    assert named == legal and len(named) >= 60
    rarer = [v for target in TARGETS[1::2] for f in kernels.families().values() for v in f.rarer(arch.parse(target))]
    assert len({variant.identity for variant in rarer}) == len(rarer)


@pytest.mark.parametrize("knob", ["residual", "activation", "scoring", "scale_rule", "bias", "copy", "encoding"])
def test_between_them_verified_variants_take_every_choice_of_a_word(knob: str) -> None:
    """Of knobs that choose between branches of templates, on two targets."""
    seen: dict[str, set[object]] = {}
    choices: dict[str, set[object]] = {}
    for target in TARGETS[1::2]:
        for variant in verified(target):
            for item in dataclasses.fields(variant.knobs):
                if item.name == knob:
                    name = f"{variant.spec.family}.{variant.spec.name}"
                    seen.setdefault(name, set()).add(str(getattr(variant.knobs, knob)))
                    all_of = item.metadata["choices"] or (False, True)
                    choices.setdefault(name, set()).update(map(str, all_of))
    assert {name: choices[name] - taken for name, taken in seen.items() if choices[name] - taken} == {}


_TAG = re.compile(r"\{%.*?%\}|\{#.*?#\}|\{\{.*?\}\}", re.DOTALL)
_MARK = re.compile(r"/\*@(.*?)@\*/")


def _marked(name: str, text: str) -> str:
    """A template with a comment behind each line of code that says which one it is."""
    lines, at = [], 0
    tags = [match.span() for match in _TAG.finditer(text)]
    for number, line in enumerate(text.split("\n"), 1):
        cut = any(first < place < last for first, last in tags for place in (at, at + len(line)))
        at += len(line) + 1
        code = line.strip() and not cut and not line.lstrip().startswith(("{%", "{#", "//", "#"))
        lines.append(f"{line} /*@{name}:{number}@*/" if code else line)
    return "\n".join(lines)


def test_every_line_of_a_template_is_in_a_variant_that_is_verified(tmp_path: Path) -> None:
    """On targets of two generations: a fault in a branch that none has would never be seen."""
    root, wanted = resources.directory("templates"), set[str]()
    for path in (*root.rglob("*.j2"),):
        name = path.relative_to(root).as_posix()
        marked = _marked(name, path.read_text())
        wanted.update(_MARK.findall(marked))
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(marked)
    found = {
        mark
        for target in TARGETS[1::2]
        for variant in verified(target)
        for mark in _MARK.findall(render(variant, tmp_path))
    }
    assert len(wanted) > 4000 and sorted(wanted - found) == []
