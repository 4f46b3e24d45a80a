"""The cost model is right where times were measured, and every number of it says where it comes from."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import arch, costs, kernels
from jitmx.costs import cards, counts, launches, measured, predict
from jitmx.costs.launches import Priced
from jitmx.costs.work import Work
from jitmx.dispatch import call
from jitmx.errors import ArchError, TacticError
from jitmx.models import GPT_OSS_120B
from jitmx.serving import model_step

ROOT = Path(__file__).parents[2]
FIGURES = measured.load()
WITHIN = 0.15
MANY_WITHIN = {"routing": 0.25}  # else a fifth


def predicted(figure: measured.Figure) -> float | None:
    """What the model says of a figure; None where another variant than the one that was timed serves now."""
    found = measured.priced(figure, FIGURES.arch)
    return None if found is None or any(one.work is None for one in found) else launches.total(found)


def told(figure: measured.Figure) -> str:
    words = [f"{name}={value}" for name, value in figure.problem.items()]
    return " ".join([figure.op, *words, *([f"rows={figure.rows}"] if figure.rows > 1 else [])])


PREDICTED = [(figure, predicted(figure)) for figure in FIGURES.figures]
KNOWN = [(figure, us) for figure, us in PREDICTED if us is not None]


def of_kind(kind: str) -> pytest.MarkDecorator:
    """Figures of a kind, with what the model says of each."""
    some = [pytest.param(figure, us, id=told(figure)) for figure, us in KNOWN if figure.kind == kind]
    return pytest.mark.parametrize(("figure", "us"), some)


@of_kind("decode")
def test_a_decode_kernel_is_predicted_within_15_percent_of_its_time_on_an_h200(figure, us) -> None:
    assert abs(us / figure.us - 1) <= WITHIN, f"{told(figure)}: {us:.2f} us, measured {figure.us}"


@of_kind("many")
def test_many_rows_are_predicted_within_a_fifth_and_routing_within_a_quarter(figure, us) -> None:
    most = MANY_WITHIN.get(figure.op, 0.2)
    assert abs(us / figure.us - 1) <= most, f"{told(figure)}: {us:.2f} us, measured {figure.us}"


def test_the_model_is_held_against_more_figures_than_it_has_parameters_fitted_to_them() -> None:
    decode = [figure for figure, _ in KNOWN if figure.kind == "decode"]
    held = [figure for figure in decode if not figure.fit]
    fitted = [name for name, item in cards.H200.parameters.items() if item.fitted]
    assert len(held) >= 20 and len(held) >= len(decode) // 2, "too few of the figures are of variants that serve still"
    assert 0 < len(fitted) * 4 <= sum(figure.fit for figure in FIGURES.figures)
    assert {figure.op for figure in held} >= {"linear", "moe", "attention", "routing"}


def test_held_out_figures_are_no_further_off_than_those_fitted_to() -> None:
    def rms(fit: bool) -> float:
        off = [us / figure.us - 1 for figure, us in KNOWN if figure.kind == "decode" and figure.fit == fit]
        return math.sqrt(sum(one * one for one in off) / len(off))

    assert rms(False) <= 1.2 * rms(True) and rms(False) < 0.1


def test_every_figure_of_the_log_stands_in_the_log() -> None:
    log = (ROOT / "docs" / "perf-log.md").read_text()
    for figure in FIGURES.figures:
        name, _, section = figure.source.partition(", ")
        assert (ROOT / name).is_file(), figure.source
        if name == "docs/perf-log.md":
            text = log.partition(f"## {section}")[2].partition("\n## ")[0]
            number = f"{figure.us:g}"
            spelled = {number, f"{figure.us:.2f}", f"{figure.us / 1e3:g}", f"{figure.us / 1e3:.2f}"}
            assert any(re.search(rf"(?<![\d.]){re.escape(one)}(?![\d])", text) for one in spelled), told(figure)


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_cost_model", ROOT / "scripts" / "fit_cost_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_fitted_parameters_are_those_that_the_script_finds(fitting) -> None:
    pairs = fitting.pairs_of(FIGURES, kind="decode", fit=True)
    if len(pairs) < sum(figure.fit for figure in FIGURES.figures if figure.kind == "decode"):
        pytest.skip("other variants serve some of the figures' calls now")
    found = fitting.fit(pairs, cards.H200)
    here = {name: item.value for name, item in cards.H200.parameters.items() if item.fitted}
    assert found.keys() == here.keys()
    for name, value in found.items():
        assert here[name] == pytest.approx(value, rel=0.05, abs=0.01), name


@pytest.mark.parametrize("card", cards.CARDS.values(), ids=lambda card: card.arch)
def test_every_parameter_of_a_card_says_where_it_comes_from(card) -> None:
    assert len(card.parameters) == sum(item.type == "Parameter" for item in dataclasses.fields(card))
    for name, item in card.parameters.items():
        assert item.source and item.value >= 0, name
        assert item.fitted == item.source.startswith("fitted"), name
    target = arch.parse(card.arch)
    assert card.multiprocessors == target.multiprocessors == sum(card.groups)
    assert card.start_us.value <= card.launch_us.value and card.block_gbps.value <= card.port_gbps.value
    assert card.memory_gbps.value == pytest.approx(target.memory_gbps, rel=0.02)


def test_clusters_lie_within_a_group_of_multiprocessors() -> None:
    assert cards.H200.room(1) == 132 and cards.H200.room(16) == 7 * 16
    assert cards.H200.room(8) == 15 * 8  # so two launches of 64 blocks have no room beside each other


def test_a_multiprocessor_reads_by_what_it_has_on_its_way_up_to_its_port() -> None:
    card, moved = cards.H200, 1e6  # bytes of one multiprocessor

    def us(under_way: float) -> float:
        return predict.predict(Work(bytes=moved, under_way=under_way), 0.0, card).memory_us

    assert us(0) == us(65536) == pytest.approx(moved / card.block_gbps.value / 1e3)
    assert us(98304) == pytest.approx(us(0) / 1.5)
    assert us(1e6) == us(2e6) == pytest.approx(moved / card.port_gbps.value / 1e3)


def test_what_fills_rings_together_adds_to_instructions_and_not_to_memory() -> None:
    card = cards.H200
    some = Work(bytes=42e6, busy=132, blocks=132)  # 10 us of memory
    filling = dataclasses.replace(some, ramp=0.5)
    few, many = 1e6, 1e8
    shown = card.unhidden.value * 5  # of the 5 us, even where memory takes longer
    assert predict.predict(filling, few, card).us == pytest.approx(
        predict.predict(some, few, card).us + shown, rel=0.01
    )
    assert predict.predict(filling, many, card).us == pytest.approx(predict.predict(some, many, card).us + 5, rel=0.02)


def test_the_next_launch_finds_room_beside_small_blocks_and_none_beside_large_clusters() -> None:
    common = {"sinks": "sinks_bf16", "rope": "neox"}

    def work(**shape: int) -> Work:
        found = launches.of_call(call.explain("attention", arch.parse("sm_90a"), **shape, **common))[0].work
        assert found is not None
        return found

    window, cluster, grid = work(batch=16, window=128), work(batch=1, context=8192), work(batch=16, context=8192)
    assert window.early and window.fills == 2 and not window.ramp
    assert cluster.beside and not cluster.early and cluster.fills == 3
    assert not grid.early and grid.ramp and not grid.merges  # a block a KV head: there is nothing to merge
    assert work(batch=1, context=65536).merges


@pytest.mark.parametrize(("cache", "value_bytes", "most"), [("same", 2, 1.12), ("e4m3", 1, 1.15)])
@pytest.mark.parametrize("batch", [1, 2, 3, 16])
def test_on_gb10_decoding_behind_2048_tokens_and_more_takes_little_longer_than_its_bytes(
    batch: int, cache: str, value_bytes: int, most: float
) -> None:
    card = cards.of(arch.parse("sm_121a"))
    for context in (2048, 8192, 65536):
        shape = {"batch": batch, "context": context, "cache": cache, "sinks": "sinks_bf16", "rope": "neox"}
        us = launches.total(launches.of_call(call.explain("attention", arch.parse("sm_121a"), **shape)))
        floor = batch * context * 2 * 8 * 64 * value_bytes / (card.memory_gbps.value * 1e3)
        assert 1 < us / floor <= most


@pytest.mark.parametrize(("target", "batch"), [("sm_90a", 64), ("sm_121a", 1)])
def test_every_block_of_a_launch_that_is_counted_has_work(target: str, batch: int) -> None:
    shape = {"batch": batch, "context": 2048, "cache": "e4m3", "sinks": "sinks_bf16", "rope": "neox"}
    choice = call.explain("attention", arch.parse(target), **shape).choice
    found = counts.count(choice.variant, choice.problem)
    # Of 16 tokens by a warp that decodes E4M3, and not of a block that has work in one of the two launches alone.
    assert 200 < found.unit < 400 and 2000 < found.block < 6000


def test_a_target_without_parameters_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(ArchError, match=r"no parameters for sm_80; it has them for sm_90a .*sm_121a"):
        cards.of(arch.parse("sm_80"))


numbers = st.floats(0, 1e9)


@given(
    st.builds(
        Work, bytes=numbers, flops=numbers, exposed=st.floats(0, 1e6), cached=numbers, early=numbers,
        busy=st.integers(1, 132), spread=st.floats(1, 4), clusters=st.integers(0, 3), grids=st.integers(0, 3),
        fills=st.integers(0, 3), rounds=st.floats(1, 10), warps=st.just(0.0) | st.floats(0.25, 64),
        beside=st.booleans(), block_warps=st.just(0.0) | st.floats(0.25, 64), under_way=st.floats(0, 1e6),
        ramp=st.floats(0, 1),
    ),
    st.floats(0, 1e9), st.sampled_from(list(cards.CARDS.values())),
)  # fmt: skip
def test_a_prediction_is_never_below_memory_s_floor_and_never_less_for_more_work(work, instructions, card) -> None:
    found = predict.predict(work, instructions, card)
    assert math.isfinite(found.us) and found.us >= card.launch_us.value - card.start_us.value
    assert found.us >= work.bytes / card.memory_gbps.value / 1e3 * (1 - 1e-9)
    for more in ("bytes", "flops", "exposed", "clusters", "grids", "rounds"):
        heavier = dataclasses.replace(work, **{more: getattr(work, more) * 2 + 1})
        assert predict.predict(heavier, instructions, card).us >= found.us * (1 - 1e-9), more
    assert predict.predict(work, instructions * 2, card).us >= found.us * (1 - 1e-9)
    assert predict.predict(work, instructions, card, of_blocks=instructions).us >= found.us * (1 - 1e-9)


@pytest.mark.parametrize(
    ("target", "op", "shape"),
    [
        ("sm_90a", "linear", {"m": 1, "n": 5120, "k": 2880, "bias": True}),
        ("sm_121a", "attention", {"batch": 4, "context": 2048, "sinks": "sinks_bf16"}),
        ("sm_121a", "moe", {"m": 2}),
        pytest.param("sm_121a", "moe", {"m": 512, "x_format": "fp8"}, marks=pytest.mark.nightly),
    ],
)
def test_counts_that_ship_are_what_the_simulator_counts_now(target, op, shape) -> None:
    choice = call.explain(op, arch.parse(target), **shape).choice
    known = counts.load(counts.path()).get(counts.key(choice.variant, choice.problem))
    if known is None:
        pytest.skip("its code is another than the one that was counted")
    assert counts.counted(choice.variant, choice.problem) == known


@pytest.mark.nightly(by_day=("fp8", "mxfp4"))
@pytest.mark.parametrize("x_format", ["fp8", "mxfp8", "mxfp6", "mxfp4"])
def test_experts_of_rounded_inputs_are_priced_by_their_bytes_and_the_rate_of_their_products(x_format) -> None:
    target = arch.parse("sm_121")
    few, many = (launches.of_call(call.explain("moe", target, m=m, x_format=x_format)) for m in (512, 8192))
    for priced in (few, many):
        assert all(one.prediction is not None for one in priced)
        names = [one.choice.variant.spec.name for one in priced]
        assert names == ["scaled", "sort", "scaled", "combine"] and all(priced[at].instructions for at in (0, 2))
    weights = 128 * (360 + 180) * 45 * 544
    assert weights < sum(one.work.bytes for one in few) < 1.1 * weights  # of x, h and y 512 rows have little
    assert launches.total(few) == pytest.approx(weights / 240e3, rel=0.1)
    # Operations of 8192 rows, at bf16's rate divided by what the format's is of it.
    faster = {"mxfp4": 4}.get(x_format, 2)
    assert sum(one.work.needed for one in many) == pytest.approx(2 * 8192 * 4 * 3 * 2880**2 / faster)
    assert all(one.prediction.us >= one.prediction.products_us for one in many)


def test_a_twin_of_block_scaled_products_is_no_quicker_than_bf16() -> None:
    found = call.explain("moe", arch.parse("sm_90"), m=512, x_format="mxfp8")
    plain = call.explain("moe", arch.parse("sm_90"), m=512, scale_range="full")  # by mma.sync as well
    times = [
        next(one for one in launches.of_call(each) if one.choice.variant.spec.name in ("scaled", "grouped"))
        for each in (found, plain)
    ]
    assert found.choice.variant.knobs.atom == "twin"
    assert times[0].work.needed == pytest.approx(times[1].work.needed)
    assert times[0].prediction.us >= times[1].prediction.us


@given(rows=st.integers(1, 9000), more=st.integers(1, 9000), x_format=st.sampled_from(["mxfp8", "mxfp6", "mxfp4"]))
def test_more_rows_of_rounded_inputs_never_take_less_of_one_variant(rows, more, x_format) -> None:
    target, cost = arch.parse("sm_121"), costs.of("moe")
    choice = call.explain("moe", target, m=rows, x_format=x_format).choice
    problem = choice.problem
    larger = dataclasses.replace(problem, m=rows + more)
    small, large = (cost.work(choice.variant, one, 1, 48) for one in (problem, larger))
    for name in ("bytes", "flops", "needed", "units", "rounds"):
        assert getattr(large, name) >= getattr(small, name) * (1 - 1e-6), name
    assert small.flops >= small.needed * (1 - 1e-6) and small.spread >= 1


def test_twice_the_tokens_are_twice_the_instructions_beside_what_blocks_have_anyway() -> None:
    target = arch.parse("sm_121a")
    small, large = (
        launches.of_call(call.explain("attention", target, batch=4, context=tokens, sinks="sinks_bf16"))[0]
        for tokens in (8192, 16384)
    )
    assert small.choice.variant == large.choice.variant and small.instructions and large.instructions
    assert 1.95 * small.instructions < large.instructions < 2 * small.instructions


def test_code_that_nobody_has_counted_is_counted_once_for_all_problems_that_count_alike(monkeypatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(counts, "_known", dict)
    monkeypatch.setattr(counts, "_counted_here", {})
    monkeypatch.setattr(counts, "counted", lambda variant, problem: asked.append(problem) or counts.Count(7.0, 3.0))
    found = [
        call.explain("attention", arch.parse("sm_121a"), batch=4, context=tokens, sinks="sinks_bf16").choice
        for tokens in (8192, 16384)
    ]
    made = [counts.count(choice.variant, choice.problem) for choice in found]
    assert made == [counts.Count(7.0, 3.0)] * 2 and len(asked) == 1
    assert counts.count(found[0].variant, found[0].problem, simulate=False) is None


def test_a_family_without_a_declaration_has_no_cost_and_says_so() -> None:
    assert costs.of("quantize") is None
    priced = launches.of_call(call.explain("quantize", arch.parse("sm_90a")))
    assert priced[0].work is None and priced[0].us == 0
    assert priced[0].to_dict()["us"] is None


@pytest.mark.parametrize("target", cards.CARDS)
@pytest.mark.parametrize(("batch", "context"), [(1, 2048), (16, 8192)])
def test_a_step_has_every_layer_as_often_as_the_model_has_it(target, batch, context) -> None:
    step = model_step.price(GPT_OSS_120B, arch.parse(target), batch, context)
    times: dict[str, int] = {}
    for one in step.launches:
        times[one.label] = one.times
        assert one.prediction is not None, one.choice.variant.name
    assert {times[label] for label in ("qkv", "o", "experts", "experts: routing")} == {36}
    assert times["attention"] == times["attention, window 128"] == 18
    assert times["lm_head"] == times["sampler"] == 1
    assert step.us == pytest.approx(sum(one.us for one in step.launches))
    assert [one.label for one in step.launches].index("experts: routing") < list(times).index("experts")
    weights = sum(one.work.bytes * one.times for one in step.launches if one.work)
    assert step.us >= weights / cards.CARDS[target].memory_gbps.value / 1e3


def test_a_step_of_one_request_is_predicted_as_its_graph_was_measured() -> None:
    # docs/perf-log.md, The engine's step: 1.284 ms replayed back to back, behind some hundred tokens.
    step = model_step.price(GPT_OSS_120B, arch.parse("sm_90a"), 1, 256)
    assert step.us / 1e3 == pytest.approx(1.284, rel=0.15)


DAMAGED = [b"", b"[]", b"{", b'{"schema_version": 2}', b'{"schema_version": 1, "counts": [{}]}',
           b'{"schema_version": 1, "counts": [{"arch": "a", "source_digest": "b", "of": "", "unit": NaN, "block": 0}]}',
           b"[" * 100_000]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED)
def test_damaged_counts_and_figures_are_named(data, tmp_path) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(data)
    with pytest.raises(TacticError, match="holds no counts of instructions"):
        counts.load(path)
    with pytest.raises(TacticError, match="holds no measured figures"):
        measured.load(path)


@pytest.mark.parametrize("change", [{"us": -1}, {"us": "3"}, {"kind": "other"}, {"problem": []}, {"fit": 1}, {"x": 1}])
def test_a_figure_of_another_form_is_refused(change, tmp_path) -> None:
    row = {"op": "linear", "problem": {}, "kernel": "k", "us": 1.0, "kind": "decode", "fit": True, "source": "s"}
    path = tmp_path / "measured.json"
    document = {"schema_version": 1, "arch": "sm_90a", "card": "c", "note": "n", "figures": [row | change]}
    path.write_text(json.dumps(document))
    with pytest.raises(TacticError, match="holds no measured figures"):
        measured.load(path)


def test_every_kernel_of_a_step_names_what_bounds_it() -> None:
    bounds = {"memory", "instructions", "products", "hand-overs", "model"}
    for name in kernels.families():
        if costs.of(name) is not None:
            for problem in kernels.family(name).typical(arch.parse("sm_121a"))[:2]:
                found: list[Priced] = launches.of_call(
                    call.call(name, problem, arch.parse("sm_121a"), multiprocessors=48)
                )
                assert all(one.prediction.bound in bounds for one in found if one.prediction), name
