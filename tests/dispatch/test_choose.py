"""Choosing: who may decide, in which order, and that the answer says who did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jitmx import arch, kernels, settings
from jitmx.arch import Arch
from jitmx.dispatch.call import call_variants, explain
from jitmx.dispatch.choice import Choice
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError, TacticError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.linear.arguments import ARGUMENTS
from jitmx.kernels.pack import PackProblem
from jitmx.registry.contract import Contract
from jitmx.registry.spec import KernelSpec, Knobs, knob

pytestmark = pytest.mark.usefixtures("only_gemv")

SM_90, SM_121 = arch.parse("sm_90"), arch.parse("sm_121")
QKV = LinearProblem(1, 5120, 2880)
ODD = LinearProblem(1, 5121, 2880)  # a shape that no table has
SOURCES = ("argument", "environment", "user table", "shipped table", "heuristic")

# `stages` that each source gives in turn; the shipped table and the heuristic have their own ideas.
ROW = {"when": {"m": [1, 1], "n": 5120, "k": 2880}, "kernel": "gemv", "knobs": {"stages": 4, "chunk": 2}, "us": 1.25}


def environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("JITMX_LINEAR_KNOBS", text)
    settings.reload()


def decided(choice: Choice) -> str:
    """The source that decided, of which there must be exactly one and which the text must name."""
    assert tuple(source.name for source in choice.sources) == SOURCES
    (name,) = [source.name for source in choice.sources if source.decided]
    assert choice.decided_by.name == name
    assert choice.to_dict()["decided_by"]["source"] == name
    lines = choice.lines()
    assert f"decided by  {name}: {choice.decided_by.detail}" in lines
    assert sum(line.startswith("  -> ") for line in lines) == 1
    assert any(line.startswith(f"  -> {name}") for line in lines)
    return name


@pytest.mark.parametrize("present", range(2**4))
def test_of_the_sources_that_say_something_the_first_by_authority_decides(
    present: int, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    said = {name for bit, name in enumerate(SOURCES[:4]) if present >> bit & 1}
    # Chunks are small enough to leave room for the stages.
    knobs = {"stages": 2, "chunk": 2} if "argument" in said else None
    if "environment" in said:
        environment(monkeypatch, "stages=3,chunk=2")
    if "user table" in said:
        write("sm_90a", ROW, {**ROW, "when": {"n": 5121}})
    problem = QKV if "shipped table" in said else ODD
    choice = choose("linear", problem, SM_90, knobs=knobs)
    first = next(name for name in SOURCES if name in said | {"heuristic"})
    assert decided(choice) == first
    if first in SOURCES[:3]:
        assert choice.variant.knobs.stages == {"argument": 2, "environment": 3, "user table": 4}[first]
    else:
        source = next(source for source in choice.sources if source.name == first)
        assert source.knobs is not None
        assert {name: getattr(choice.variant.knobs, name) for name in source.knobs} == source.knobs


def test_each_source_says_what_it_would_have_given(
    monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path], tactics_folder: Path
) -> None:
    details = {source.name: source.detail for source in choose("linear", ODD, SM_90).sources}
    assert details["argument"] == "knobs of the call: none"
    assert details["environment"] == "JITMX_LINEAR_KNOBS: none"
    assert details["user table"] == f"none for sm_90a under {tactics_folder}"
    assert details["shipped table"].startswith("no row fits (measured on NVIDIA H200, ")
    assert details["heuristic"] == "computed from shape and target, not measured"
    assert next(s.detail for s in choose("linear", ODD, arch.parse("sm_80")).sources if s.name == "shipped table") == (
        "none for sm_80"
    )
    environment(monkeypatch, "stages=3, chunk=2")
    write("sm_120a", ROW)
    choice = choose("linear", QKV, arch.parse("sm_120"), knobs={"unroll": 1})
    found = {source.name: (source.detail, source.knobs) for source in choice.sources}
    assert found["argument"] == ("knobs of the call", {"unroll": 1})
    assert found["environment"] == ("JITMX_LINEAR_KNOBS=stages=3,chunk=2", {"stages": 3, "chunk": 2})
    assert found["user table"] == ("measured on a card, 2026-01-02, code not recorded, 1.25 us", ROW["knobs"])
    assert "heuristic, not measured" in found["shipped table"][0] and found["shipped table"][1]
    assert choice.to_dict()["sources"][1]["knobs"] == {"stages": 3, "chunk": 2}


def test_every_family_has_a_variable_for_its_knobs() -> None:
    said = {source.name: source.detail for source in choose("pack", PackProblem(), SM_90).sources}
    assert said["environment"] == "JITMX_PACK_KNOBS: none"


def test_what_an_override_leaves_open_comes_from_the_source_below_it(
    monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    write("sm_90a", {**ROW, "knobs": {"stages": 4, "chunk": 2, "warps": 4, "split_k": 4}})
    environment(monkeypatch, "stages=3,unroll=1")
    knobs = choose("linear", QKV, SM_90, knobs={"unroll": 2}).variant.knobs
    assert (knobs.unroll, knobs.stages, knobs.chunk, knobs.warps, knobs.split_k) == (2, 3, 2, 4, 4)


def test_the_first_row_that_fits_decides(write: Callable[..., Path]) -> None:
    rows = [{**ROW, "when": when, "knobs": {"stages": stages, "chunk": 1}} for when, stages in (
        ({"m": [2, 3]}, 1), ({"m": [1, 8], "n": 64}, 2), ({"m": [1, 8], "dtype": "fp16"}, 3), ({}, 4),
    )]  # fmt: skip
    write("sm_90a", *rows)

    def stages(**shape: Any) -> int:
        return int(choose("linear", LinearProblem(**{"n": 64, "k": 4096, **shape}), SM_90).variant.knobs.stages)

    assert [stages(m=m) for m in (1, 2, 3, 4)] == [2, 1, 1, 2]
    assert stages(n=65, dtype="fp16") == 3
    assert stages(n=65) == 4


@pytest.mark.parametrize(
    ("knobs", "name", "wanted", "fixed"),
    [
        ({"m": 8}, "m", 8, 1),
        ({"dtype": "fp16"}, "dtype", "'fp16'", "'bf16'"),
        ({"bias": True}, "bias", True, False),
        ({"encoding": "nibble"}, "encoding", "'nibble'", "'rotated'"),
        ({"scale_range": "full"}, "scale_range", "'full'", "'normal'"),
    ],
)
def test_what_the_call_itself_fixes_cannot_be_overridden(
    knobs: dict[str, Any], name: str, wanted: Any, fixed: Any, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    said = f"{name}={wanted} cannot be overridden: the call itself fixes {name}={fixed}"
    with pytest.raises(KnobError) as error:
        choose("linear", QKV, SM_90, knobs=knobs)
    assert str(error.value) == said
    text = ",".join(f"{key}={value}" for key, value in knobs.items())
    environment(monkeypatch, text)
    with pytest.raises(KnobError) as error:
        choose("linear", QKV, SM_90)
    assert str(error.value) == f"JITMX_LINEAR_KNOBS={text}: {said}"
    monkeypatch.delenv("JITMX_LINEAR_KNOBS")
    settings.reload()
    path = write("sm_90a", {**ROW, "knobs": knobs})
    with pytest.raises(TacticError) as in_table:
        choose("linear", QKV, SM_90)
    assert str(in_table.value).startswith(f"{path}: the row for ") and said in str(in_table.value)


def test_an_override_may_repeat_what_the_call_fixes() -> None:
    assert decided(choose("linear", QKV, SM_90, knobs={"m": 1, "dtype": "bf16"})) == "argument"


@pytest.mark.parametrize(
    ("target", "text", "said"),
    [
        (SM_90, "stages=99", "linear.gemv.stages=99 is above its limit; the nearest legal "),
        (SM_90, "tile=4", "linear.gemv has no knob 'tile'; its knobs: m, dtype"),
        (SM_90, "pdl=perhaps", "linear.gemv.pdl='perhaps' is not 0 or 1"),
        (SM_121, "kernel=gemw", "'gemw' is no kernel of linear; its kernels: gemv, "),
        (SM_121, "kernel=wgmma", "kernel=wgmma cannot serve m=1, "),
        (SM_121, "warps=8,split_k=16", ""),
        (SM_121, "stages=16,chunk=16", ""),
    ],
)
def test_an_override_that_cannot_serve_is_refused_with_the_variable_and_the_rule(
    target: Arch, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, text)
    with pytest.raises(KnobError) as error:
        choose("linear", QKV, target)
    assert str(error.value).startswith(f"JITMX_LINEAR_KNOBS={text}: {said}")


@dataclass(frozen=True)
class ToyKnobs(Knobs):
    tile_m: int = knob(16, choices=(16, 64), doc="rows of X")
    tile_n: int = knob(64, choices=(64, 128), doc="rows of W")
    tile_k: int = knob(64, choices=(64, 128), doc="columns")
    stages: int = knob(2, low=1, high=8, doc="buffers")


def _square(m: int, n: int, k: int | None, stages: int | None) -> dict[str, int]:
    if m > n:
        raise KnobError(
            f"a tile of {m} rows of X by {n} of W is taller than wide", f"the nearest legal value is {n}x{n}"
        )
    return {"tile_m": m, "tile_n": n} | ({"tile_k": k} if k else {}) | ({"stages": stages} if stages else {})


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch, only_gemv: None) -> None:
    """`linear` with two kernels: gemv has no tile and is preferred up to 8 rows, tiled has one."""
    toys = tuple(
        Kernel(
            KernelSpec("linear", name, ToyKnobs, lambda *_: Contract(), lambda _: 32, lambda _: ARGUMENTS, entry="toy"),
            lambda _variant: (),
            heuristic=lambda _problem, _arch, _count: {"tile_k": 128},
            tile=tile,
        )
        for name, tile in (("gemv", None), ("tiled", _square))
    )
    family = dataclasses.replace(
        kernels.family("linear"),
        kernels=toys,
        heuristic=lambda problem, _arch, _count: ("gemv" if problem.m <= 8 else "tiled", {"tile_k": 128}),
    )
    monkeypatch.setattr(kernels, "families", lambda: {"linear": family})


def set_tile(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("JITMX_LINEAR_TILE", text)
    settings.reload()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("64x128", (64, 128, 128, 2)), ("16x64x64", (16, 64, 64, 2)), ("64x64s4", (64, 64, 128, 4))],
)
@pytest.mark.usefixtures("tiled")
def test_a_tile_in_the_environment_is_that_of_a_kernel_that_has_one(
    text: str, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, text)
    choice = choose("linear", dataclasses.replace(ODD, m=9), SM_90)
    assert tuple(choice.variant.knobs.as_dict().values()) == wanted
    assert decided(choice) == "environment" and choice.decided_by.detail == f"JITMX_LINEAR_TILE={text}"


@pytest.mark.usefixtures("tiled")
def test_a_tile_leaves_kernels_without_one_alone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, "64x128")
    choice = choose("linear", ODD, SM_90)
    assert (choice.variant.spec.name, choice.variant.knobs.tile_n, decided(choice)) == ("gemv", 64, "heuristic")
    assert choice.sources[1].detail == (
        "JITMX_LINEAR_TILE=64x128 does not apply, linear.gemv has no tile; JITMX_LINEAR_KNOBS: none"
    )


@pytest.mark.usefixtures("tiled")
def test_a_named_kernel_takes_the_tile_and_named_knobs_come_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, "16x128s4")
    environment(monkeypatch, "kernel=tiled,stages=3")
    choice = choose("linear", ODD, SM_90)
    assert (choice.variant.spec.name, *choice.variant.knobs.as_dict().values()) == ("tiled", 16, 128, 128, 3)
    assert choice.decided_by.detail == "JITMX_LINEAR_TILE=16x128s4,JITMX_LINEAR_KNOBS=kernel=tiled,stages=3"
    assert choose("linear", ODD, SM_90, knobs={"stages": 5}).variant.knobs.stages == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("64x32", "a tile of 64 rows of X by 32 of W is taller than wide; the nearest legal tile is 64x64"),
        ("48x128", "linear.tiled.tile_m=48 is not one of 16, 64; the nearest legal tile is 64x128"),
        ("64x128s9", "linear.tiled.stages=9 is above its limit; the nearest legal value is 8"),
    ],
)
@pytest.mark.usefixtures("tiled")
def test_an_illegal_tile_is_refused_with_the_variable_the_limit_and_the_nearest_that_is_legal(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, text)
    with pytest.raises(KnobError) as error:
        choose("linear", dataclasses.replace(ODD, m=64), SM_90)
    assert str(error.value) == f"JITMX_LINEAR_TILE={text}: {said}"


def test_a_named_kernel_that_does_not_serve_is_refused_with_those_that_do() -> None:
    with pytest.raises(KnobError, match=r"does not run on this target; on sm_121a these serve it: gemv$"):
        choose("linear", QKV, SM_121, knobs={"kernel": "wgmma"})


def test_what_a_call_sets_itself_is_not_laid_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, "stages=2")
    for knobs in ({"kernel": "wgmma"}, {"warps": 8, "split_k": 16}):
        with pytest.raises(KnobError) as error:
            choose("linear", QKV, SM_121, knobs=knobs)
        assert "JITMX_LINEAR_KNOBS" not in str(error.value)


def test_an_override_that_does_not_serve_the_shape_is_refused() -> None:
    with pytest.raises(KnobError, match="split_k=8 is over the 2 tiles of k=96"):
        choose("linear", LinearProblem(1, 64, 96), SM_90, knobs={"warps": 8, "split_k": 8})
    with pytest.raises(KnobError, match=r"needs .* B of shared memory; a block on sm_121a has at most 101376 B"):
        choose("linear", LinearProblem(8, 5120, 65_536, encoding="nibble"), SM_121, knobs={"stage_x": True})


def test_an_unknown_knob_of_a_call_is_answered_with_the_knobs_there_are() -> None:
    with pytest.raises(KnobError, match=r"linear.gemv has no knob 'tile'; its knobs: m, dtype, "):
        choose("linear", QKV, SM_90, knobs={"tile": 1})


@pytest.mark.parametrize(
    ("op", "shape", "said"),
    [
        ("lineer", {}, "'lineer' is not a kernel family; families: "),
        ("linear", {"rows": 4}, "linear problems have no 'rows'; they have m, n, k, "),
        ("linear", {"dtype": "fp64"}, "linear.dtype='fp64' is not one of bf16, fp16"),
        ("quantize", {"format": "mxfp5"}, "quantize.format='mxfp5' is not one of mxfp4, "),
        ("quantize", {"direction": "up"}, "quantize.direction='up' is not one of quantize, dequantize"),
        ("quantize", {"direction": "dequantize", "scale_rule": "up"}, "quantize.scale_rule='up' is not one of "),
        ("linear", {"k": 2881}, "linear.k=2881 is not a multiple of 32, "),
    ],
)
def test_a_question_about_what_there_is_not_is_answered_with_what_there_is(
    op: str, shape: dict[str, Any], said: str
) -> None:
    with pytest.raises(KnobError) as error:
        explain(op, SM_121, **shape)
    assert str(error.value).startswith(said)


def test_the_first_typical_call_decides_even_where_the_fields_have_other_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = LinearProblem(4, 64, 96, "fp16", True, "nibble", "full")
    family = dataclasses.replace(kernels.family("linear"), typical=lambda _arch: (first, QKV))
    monkeypatch.setattr(kernels, "families", lambda: {"linear": family})
    assert explain("linear", SM_90).problem == first
    assert explain("linear", SM_90, m=2).problem == dataclasses.replace(first, m=2)


@pytest.mark.parametrize(
    ("m", "passes"),
    [
        (1, [(1, 1)]), (8, [(8, 1)]), (9, [(8, 1), (1, 1)]), (16, [(8, 2)]), (19, [(8, 2), (4, 1)]),
        (23, [(8, 2), (8, 1)]),
    ],
)  # fmt: skip
def test_the_launches_of_a_call_are_its_full_passes_and_one_for_the_rows_left(
    m: int, passes: list[tuple[int, int]]
) -> None:
    made = explain("linear", SM_90, m=m).launches
    assert [(launch.choice.variant.knobs.m, launch.times) for launch in made] == passes
    assert set(call_variants("linear", SM_90, m=m)) == {launch.choice.variant for launch in made}
    assert len(call_variants("linear", SM_90, m=m)) == len({knob for knob, _ in passes})


@pytest.mark.parametrize(
    ("op", "fields", "encoding"),
    [("moe", {"x_format": "fp8"}, "nibble"), ("moe", {}, "rotated"), ("linear", {}, "rotated"),
     ("moe", {"x_format": "fp8", "encoding": "rotated"}, "rotated")],
)  # fmt: skip
def test_weights_are_packed_as_the_other_fields_of_a_call_would_have_them(
    op: str, fields: dict[str, str], encoding: str
) -> None:
    assert explain(op, SM_90, m=512, **fields).launches[0].choice.problem.as_dict()["encoding"] == encoding
