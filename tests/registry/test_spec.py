"""Knobs and variants: what is illegal is refused with the limit it breaks, what is legal has a name of its own."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import arch
from jitmx.cli import targets
from jitmx.errors import KnobError
from jitmx.kernels.linear.gemv import SPEC as GEMV
from jitmx.kernels.linear.gemv import GemvKnobs
from jitmx.kernels.moe.combine import CombineKnobs
from jitmx.registry.spec import KernelSpec, Knobs, Variant, knob
from strategies import ARCHES, OF_EACH, SPEC_NAMES, SPECS, arches_of, changed, sampled, usual, values, variants

SM_80, SM_121 = arch.parse("sm_80"), arch.parse("sm_121")


def on_ampere(**knobs: Any) -> object:
    return GEMV.variant(SM_80, **{"copy": "async", "pdl": False, **knobs})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GEMV.variant(SM_121, chunk=17), "chunk=17 is above its limit; the nearest legal value is 16"),
        (lambda: GEMV.variant(SM_121, chunk=0), "chunk=0 is below its limit; the nearest legal value is 1"),
        (lambda: GEMV.variant(SM_121, stages=40), "stages=40 is above its limit; the nearest legal value is 16"),
        (lambda: GEMV.variant(SM_121, m=3), "m=3 is not one of 1, 2, 4, 8; the nearest is 2"),
        (lambda: GEMV.variant(SM_121, warps=10), "is not one of 1, 2, 4, 5, 8, 9, 12, 15, 16; the nearest is 9"),
        (lambda: GEMV.variant(SM_121, dtype="fp32"), "dtype='fp32' is not one of bf16, fp16"),
        (lambda: GEMV.variant(SM_121, warps=8, split_k=3), "does not divide warps=8; the nearest that does is 2"),
        (
            lambda: GEMV.variant(SM_121, warps=16, split_k=16, chunk=1, blocks_per_sm=4),
            "over 48 warps a multiprocessor; the nearest legal value is 3",
        ),
        (lambda: on_ampere(copy="bulk"), "copy='bulk' needs sm_90 or newer; on sm_80 use copy='async'"),
        (lambda: on_ampere(pdl=True), "pdl=True needs sm_90 or newer; sm_80 has no .*; use pdl=False"),
    ],
)
def test_an_illegal_choice_names_its_limit_and_the_nearest_legal_one(make: Any, said: str) -> None:
    with pytest.raises(KnobError) as error:
        make()
    before, _, after = said.partition(".*")
    assert before in str(error.value) and after in str(error.value)


def _numbers(spec: KernelSpec) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(spec.knobs) if type(item.default) is int]


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if _numbers(spec)], ids=lambda spec: f"{spec.family}.{spec.name}"
)
@OF_EACH
@given(data=st.data())
def test_a_number_that_is_no_choice_is_answered_with_the_nearest_that_is(spec: KernelSpec, data: st.DataObject) -> None:
    item = data.draw(st.sampled_from(_numbers(spec)))
    value = data.draw(st.integers(-1000, 1000).filter(lambda value: value not in values(item)))
    with pytest.raises(KnobError, match=rf"{item.name}={value} is .*; the nearest (legal value )?is -?\d+$") as error:
        spec.knobs(**{item.name: value})
    nearest = int(str(error.value).split()[-1])
    assert nearest in values(item)
    legal = values(item)
    ends = (legal[0], legal[-1]) if isinstance(legal, range) else legal  # a value outside is nearest to an end
    assert abs(nearest - value) == min(abs(choice - value) for choice in ends)


@pytest.mark.parametrize(
    ("knobs", "type_"),
    [
        ({"m": True}, "a whole number"),
        ({"m": "1"}, "a whole number"),
        ({"m": 1.0}, "a whole number"),
        ({"m": None}, "a whole number"),
        ({"bias": 1}, "true or false"),
        ({"bias": "true"}, "true or false"),
        ({"residual": 2}, "true or false or pair"),
        ({"dtype": 16}, "text"),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(knobs: dict[str, Any], type_: str) -> None:
    ((name, value),) = knobs.items()
    with pytest.raises(KnobError) as error:
        GEMV.variant(SM_121, **knobs)
    assert str(error.value) == f"linear.gemv.{name}={value!r} is not {type_}"


def test_an_unknown_knob_is_answered_with_the_knobs_there_are() -> None:
    listed = ", ".join(item.name for item in dataclasses.fields(GemvKnobs))
    with pytest.raises(KnobError) as error:
        GEMV.variant(SM_121, tile=4)
    assert str(error.value) == f"linear.gemv has no knob 'tile'; its knobs: {listed}"
    with pytest.raises(KnobError) as error:
        GemvKnobs.from_text({"tile": "4"})
    assert str(error.value) == f"linear.gemv has no knob 'tile'; its knobs: {listed}"


@pytest.mark.parametrize("target", ARCHES, ids=str)
def test_shared_memory_beyond_the_chip_names_what_is_needed_and_what_there_is(target: arch.Arch) -> None:
    knobs = {"chunk": 16, "stages": 16, "warps": 4, "split_k": 4, "blocks_per_sm": 1, "stage_x": False}
    # 16 stages of 16 tiles of 544 bytes for each of 4 warps, and two buffers of 16 sums a warp.
    need = 16 * 16 * 544 * 4 + 2 * 4 * 16 * 4
    with pytest.raises(KnobError) as error:
        GEMV.variant(target, **knobs, copy="async", pdl=False)
    said = str(error.value)
    assert f"needs {need} B of shared memory; a block on {target} has at most {target.shared_bytes} B" in said
    stages = int(said.rpartition("the nearest legal value is stages=")[2])
    GEMV.variant(target, **{**knobs, "stages": stages}, copy="async", pdl=False)
    with pytest.raises(KnobError, match=f"stages={stages}$"):
        GEMV.variant(target, **{**knobs, "stages": stages + 1}, copy="async", pdl=False)


def test_knobs_that_no_number_of_stages_makes_fit_are_told_so() -> None:
    with pytest.raises(KnobError, match="with the other knobs as they are, not even stages=1 fits"):
        GEMV.variant(SM_121, chunk=16, stages=2, warps=16, split_k=1, blocks_per_sm=1)


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
@OF_EACH
@given(data=st.data())
def test_text_is_read_back_as_the_value_it_was_written_from(spec: KernelSpec, data: st.DataObject) -> None:
    knobs = data.draw(variants(spec)).knobs
    assert spec.knobs.from_text({name: str(value) for name, value in knobs.as_dict().items()}) == knobs
    one = data.draw(st.sampled_from(sorted(knobs.as_dict())))
    assert spec.knobs.from_text({one: str(getattr(knobs, one))}, base=knobs) == knobs


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"m": "two"}, "linear.gemv.m='two' is not a whole number"),
        ({"bias": "maybe"}, "linear.gemv.bias='maybe' is not 0 or 1"),
        ({"m": "3"}, "linear.gemv.m=3 is not one of 1, 2, 4, 8; the nearest is 2"),
        ({"m": "1", "bias": "pair"}, "linear.gemv.bias='pair' is not 0 or 1"),
        ({"engine": "wgmma"}, "linear.gemv.engine='wgmma' is not one of fma, mma"),
    ],
)
def test_text_that_is_no_value_of_its_knob_is_refused(pairs: dict[str, str], said: str) -> None:
    with pytest.raises(KnobError) as error:
        GemvKnobs.from_text(pairs)
    assert str(error.value) == said


def test_a_flag_with_a_word_beside_it_takes_that_and_no_other() -> None:
    for text, value in (("0", False), ("true", True), ("pair", "pair")):
        assert CombineKnobs.from_text({"residual": text}).residual == value
    with pytest.raises(KnobError, match=r"moe\.combine\.residual='both' is not 0 or 1 or pair"):
        CombineKnobs.from_text({"residual": "both"})
    for value in ("both", 1):
        with pytest.raises(KnobError, match=f"moe.combine.residual={value!r} is not"):
            CombineKnobs(residual=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
@OF_EACH
@given(data=st.data())
def test_two_variants_share_name_or_identity_only_if_they_are_equal(spec: KernelSpec, data: st.DataObject) -> None:
    one = data.draw(variants(spec))
    # A neighbour as often as a stranger: names that clash are those of variants that are nearly the same.
    name = data.draw(st.sampled_from(sorted(one.knobs.as_dict())))
    item = next(item for item in dataclasses.fields(spec.knobs) if item.name == name)
    neighbour = changed(one, **{name: data.draw(st.sampled_from(values(item)))})
    for other in (neighbour or one, data.draw(variants(spec, (one.arch,)))):
        assert (one.name == other.name) == (one == other)
        assert (one.identity == other.identity) == (one == other)


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
def test_no_two_knobs_of_a_kernel_share_a_text_in_names(spec: KernelSpec) -> None:
    # Knobs alone, whether or not they go with the others.
    loose = dataclasses.replace(spec, check=lambda knobs, target: None, shared_bytes=lambda knobs: 0)
    owners: dict[str, str] = {}
    items = dataclasses.fields(spec.knobs)
    # Two numbers that tests do not take can clash only where one knob's name is another's with digits behind.
    names = [item.name for item in items]
    assert not [one for one in names for other in names if re.fullmatch(rf"{re.escape(other)}\d+", one)]
    for item in items:
        for value in set(sampled(item)) - {item.default}:
            text = Variant(loose, spec.knobs(**{item.name: value}), ARCHES[-1]).name
            assert text.startswith(f"{spec.family}.{spec.name}.") and "-" not in text
            assert owners.setdefault(text, item.name) == item.name


def test_names_and_identities_are_unique_over_all_kernels_and_targets() -> None:
    usuals = [usual(spec, target) for spec in SPECS for target in arches_of(spec)]
    assert len({variant.identity for variant in usuals}) == len(usuals)
    assert len({(variant.name, variant.arch.name) for variant in usuals}) == len(usuals)


def test_an_identity_is_the_same_in_another_process() -> None:
    script = (
        "from jitmx import arch; from jitmx.kernels.linear.gemv import SPEC as GEMV; "
        "print(GEMV.variant(arch.parse('sm_121'), m=4, bias=True).identity)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == GEMV.variant(SM_121, m=4, bias=True).identity


@dataclass(frozen=True)
class Bounded(Knobs):
    low: int = knob(4, low=2, doc="two or more")
    high: int = knob(4, high=8, doc="eight or less")


@given(st.integers(-100, 100))
def test_a_bound_holds_on_its_side_only(value: int) -> None:
    for name, legal, nearest in (("low", value >= 2, 2), ("high", value <= 8, 8)):
        if legal:
            assert getattr(Bounded(**{name: value}), name) == value
        else:
            with pytest.raises(KnobError, match=f"the nearest legal value is {nearest}$"):
                Bounded(**{name: value})


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_NAMES)
@OF_EACH
@given(data=st.data())
def test_the_warm_up_command_names_exactly_its_variant(spec: KernelSpec, data: st.DataObject) -> None:
    variant = data.draw(variants(spec))
    words = variant.warm_up_command.split()
    assert words[:6] == ["jitmx", "warmup", "--arch", variant.arch.name, "--variant", f"{spec.family}.{spec.name}"]
    assert targets.exact_variants((variant.arch,), words[5], tuple(words[6:])) == [variant]


def test_what_was_made_once_does_not_stand_for_an_equal_value_of_another_type() -> None:
    target = arch.parse("sm_90")
    made = GEMV.variant(target, pdl=True, stages=2)
    assert GEMV.variant(target, pdl=True, stages=2) is made
    for illegal in ({"pdl": 1, "stages": 2}, {"pdl": True, "stages": 2.0}, {"pdl": True, "stages": [2]}):
        with pytest.raises(KnobError, match=r"is not (true or false|a whole number)$"):
            GEMV.variant(target, **illegal)
    with pytest.raises(KnobError, match="has no knob 'stage'"):
        GEMV.variant(target, pdl=True, stage=2)
