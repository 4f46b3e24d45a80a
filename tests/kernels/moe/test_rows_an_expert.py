"""Which kernel makes a layer goes by the rows that an expert has, not by those of x."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import arch, settings
from jitmx.dispatch.call import explain
from jitmx.dispatch.choose import choose, companions
from jitmx.errors import TacticError
from jitmx.kernels.moe import MOST_READS, MoeProblem, layer
from jitmx.kernels.moe.problem import MAX_ROWS
from jitmx.models import EXPERT_LAYERS

HOPPER = arch.parse("sm_90")
EIGHT = {"experts": 8, "top": 2, "hidden": 4096, "intermediate": 14336}
# gpt-oss-120b: kernel and rows an item from so many rows of x on; what was tuned, and what the model found before rows
# an expert counted.
FEW = {
    "sm_80": {1: ("decode", 1), 2: ("decode", 2), 3: ("decode", 4), 5: ("decode", 8)},
    "sm_90": {1: ("token", None), 2: ("stream", 4), 33: ("stream", 8)},
    "sm_120": {1: ("decode", 1), 2: ("decode", 2), 3: ("decode", 4)},
}
TUNED = {
    1: {"warps": 11, "chunk": 9, "stages": 3, "unroll": 3},
    2: {"columns": 4, "scaling": "bare", "warps": 12, "chunk": 9, "stages": 2, "unroll": 9, "handshake": "data"},
    3: {"columns": 4, "scaling": "bare", "warps": 12, "chunk": 9, "stages": 2, "unroll": 3, "handshake": "data"},
    17: {"columns": 4, "scaling": "bare", "warps": 12, "chunk": 12, "stages": 2, "unroll": 3, "handshake": "data"},
    33: {"columns": 8, "scaling": "bare", "warps": 12, "chunk": 9, "stages": 2, "unroll": 3, "handshake": "data"},
}  # fmt: skip


def last(table: dict[int, Any], m: int) -> Any:
    return table[max(first for first in table if first <= m)]


@pytest.mark.parametrize("target", FEW)
@pytest.mark.parametrize("m", range(1, MAX_ROWS + 1))
def test_gpt_oss_120b_takes_up_to_64_rows_in_one_launch_with_what_was_tuned(target: str, m: int) -> None:
    found = choose("moe", MoeProblem.on(arch.parse(target), m=m), arch.parse(target)).variant
    assert (found.spec.name, getattr(found.knobs, "columns", None)) == last(FEW[target], m)
    if target == "sm_90":
        assert found.knobs.as_dict().items() >= {**last(TUNED, m), "pdl": True}.items()


@pytest.mark.parametrize(
    ("rows", "shape", "kernel"),
    [
        (64, EIGHT, "fused"),  # 16 rows an expert
        (8, EIGHT, "fused"),  # 2, and two rows an item is what shared memory holds
        (4, EIGHT, "stream"),
        (64, {"experts": 32}, "fused"),  # 8
        (33, {"experts": 32}, "fused"),
        (20, {"experts": 32}, "fused"),
        (16, {"experts": 32}, "stream"),  # by a table
        (14, {"experts": 32}, "stream"),  # 2.1
        (64, {"experts": 128, "top": 8, "hidden": 2048, "intermediate": 768}, "fused"),
        (28, {"experts": 128, "top": 8, "hidden": 2048, "intermediate": 768}, "stream"),
        (32, {"experts": 128, "top": 8, "hidden": 2048, "intermediate": 768}, "fused"),  # 2.3
        (256, {"experts": 128, "top": 8, "hidden": 2048, "intermediate": 768}, "fused"),
        (64, {"experts": 256, "top": 8, "hidden": 7168, "intermediate": 2048}, "fused"),
        (65, {}, "fused"),  # 2.3
        (384, {}, "fused"),
        (64, EIGHT | {"scale_range": "full"}, "grouped"),
        (64, {"experts": 513, "top": 8, "hidden": 4096, "intermediate": 14336}, "stream"),  # lists have 512 at most
    ],
)
def test_experts_of_many_rows_read_their_weights_once(rows: int, shape: dict[str, Any], kernel: str) -> None:
    found = choose("moe", MoeProblem(rows, **shape), HOPPER)
    assert found.variant.spec.name == kernel
    if kernel in ("grouped", "fused"):  # with the launches that go with it
        names = [one.variant.spec.name for one in companions(found)]
        assert names[1:] == (["gather", "combine"] if kernel == "fused" else ["grouped", "combine"])


@given(
    problem=st.builds(
        MoeProblem, m=st.integers(1, MAX_ROWS), experts=st.integers(1, 64), top=st.integers(1, 8),
        hidden=st.just(32), intermediate=st.just(32),
    ),
    columns=st.sampled_from((1, 2, 4, 8)),
)  # fmt: skip
def test_reads_of_a_weight_are_those_of_rows_that_choose_experts(problem: MoeProblem, columns: int) -> None:
    found = layer.reads(problem, columns)
    rows = problem.m * min(problem.top, problem.experts) / problem.experts  # an expert's, hit or not
    some = 1 - (1 - min(problem.top / problem.experts, 1)) ** problem.m
    assert max(1.0, rows / some / columns) - 1e-9 <= found <= rows / some + 1e-9
    assert columns > 1 or found == pytest.approx(rows / some)


def test_reads_come_out_as_counted_on_random_routing() -> None:
    generator, problem = np.random.default_rng(3), MoeProblem(64, 32, 4, 2880, 2880)
    chosen = generator.random((2000, 64, 32)).argsort(-1)[..., :4]
    counts = np.apply_along_axis(np.bincount, 1, chosen.reshape(2000, -1), minlength=32)
    assert layer.reads(problem, 8) == pytest.approx(np.ceil(counts / 8).sum() / (counts > 0).sum(), rel=0.01)
    assert layer.reads(problem, 8) > MOST_READS > layer.reads(MoeProblem(64), 8)


def test_few_experts_leave_no_turn_half_empty() -> None:
    """Of eight experts of 4096 rows of W2, tiles of 320 are 104 for 132 multiprocessors, of 256 they are 128."""
    up, down = (MoeProblem(64, **EIGHT, product=product) for product in ("up", "down"))
    assert choose("moe", down, HOPPER, knobs={"kernel": "wgmma"}).variant.knobs.tile_n == 256
    assert choose("moe", up, HOPPER, knobs={"kernel": "wgmma"}).variant.knobs.tile_n == 320


@pytest.mark.parametrize("name", EXPERT_LAYERS)
def test_explain_says_how_many_rows_an_expert_has(name: str) -> None:
    layer_of = EXPERT_LAYERS[name]
    said = explain("moe", HOPPER, m=256, experts=layer_of.experts, top=layer_of.top)
    hit = layer_of.experts * (1 - (1 - 1 / layer_of.experts) ** (256 * layer_of.top))
    assert f"rows an expert  {256 * layer_of.top / hit:.4g}" in said.lines()
    derived = json.loads(json.dumps(said.to_dict()))["derived"]
    assert math.isclose(derived["rows_an_expert"], 256 * layer_of.top / hit)


def test_a_table_may_go_by_rows_an_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(low: Any) -> None:
        when = {"rows_an_expert": [low, 100], "product": "layer"}
        row = {"when": when, "kernel": "wgmma", "knobs": {"tile_m": 128, "grain": 32, "tile_n": 128, "stages": 4}}
        table = {"schema_version": 1, "family": "moe", "arch": "sm_90a", "origin": {"kind": "heuristic"}, "rows": [row]}
        path = tmp_path / str(low) / "sm_90a" / "moe.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(table))
        monkeypatch.setenv("JITMX_TACTICS", str(tmp_path / str(low)))
        settings.reload()

    write(15.5)
    try:
        chosen = choose("moe", MoeProblem(64, **EIGHT), HOPPER)
        assert (chosen.decided_by.name, chosen.variant.knobs.tile_m) == ("user table", 128)
        assert choose("moe", MoeProblem(60, **EIGHT), HOPPER).decided_by.name == "heuristic"  # 15 rows
        write("fifteen")
        with pytest.raises(TacticError, match=r"rows_an_expert is \['fifteen', 100\], no \[low, high\] of numbers"):
            choose("moe", MoeProblem(64, **EIGHT), HOPPER)
    finally:
        monkeypatch.undo()
        settings.reload()
