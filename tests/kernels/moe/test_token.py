"""`moe.token` computes the layer of one row, thread for thread and in any order, from ids and from router logits."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keep_contracts
from jitmx import arch, kernels
from jitmx.errors import KnobError
from jitmx.kernels.moe import MoeProblem
from jitmx.kernels.moe.arguments import Routing, make_case
from jitmx.kernels.moe.token import KERNEL, SPEC
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict, run
from jitmx.toolchain import nvrtc
from strategies import examples

Orders = Callable[[], Iterator[None]]

FAMILY = kernels.family("moe")
HOPPER = arch.parse("sm_90")
SMALL = {"hidden_blocks": 5, "inner_blocks": 3, "warps": 4, "chunk": 2, "stages": 2, "unroll": 1}

SAMPLE: dict[str, dict[str, Any]] = {
    "ids": SMALL | {"top": 3},
    "no bias, a residual": SMALL | {"inner_blocks": 7, "warps": 8, "stages": 3, "bias": False, "residual": True},
    "bias and residual, silu": SMALL | {"residual": True, "activation": "silu", "unroll": 2},
    "a pair": SMALL | {"residual": "pair"},
    "neither, and five experts": SMALL | {"hidden_blocks": 3, "bias": False, "top": 5},
    "logits in bf16": SMALL | {"routing": "bf16"},
    "few logits in bf16, softmax over all": SMALL | {"routing": "bf16", "experts": 9, "scoring": "softmax_all"},
    "logits in fp16": SMALL | {"routing": "fp16", "chunk": 3, "unroll": 3},
    "logits in fp32": SMALL | {"inner_blocks": 5, "top": 2, "routing": "fp32", "experts": 33, "scoring": "softmax_all"},
    "all scales, nibbles": SMALL | {"scale_range": "full", "encoding": "nibble", "pdl": False, "warps": 12},
}


def variant(**knobs: Any) -> Variant:
    return SPEC.variant(HOPPER, **knobs)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_variant_passes_its_cases_and_they_reach_its_code(name: str, simulated: Callable[[Variant], Verdict]) -> None:
    assert simulated(variant(**SAMPLE[name])).error <= 0.006


def test_the_order_in_which_warps_run_changes_no_bit(orders: Orders) -> None:
    one = variant(**SMALL)
    problem = MoeProblem(1, 3, 4, one.knobs.hidden, one.knobs.intermediate)
    routing = Routing(np.array([[2, 0, 1, 2]], np.int32))
    case = make_case(one, FAMILY.launch(one, problem, 3), problem, routing, 0)
    ptx = nvrtc.compile_ptx(render(one), nvrtc.options(HOPPER))
    found: list[npt.NDArray[Any]] = []

    def kept(outputs: Any) -> float:
        found.append(outputs[0].view(np.uint16).copy())
        return case.check(outputs)

    for _ in orders():
        assert run(dataclasses.replace(case, check=kept), one, ptx)[0] <= case.gate
    assert len(found) == 3 and all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"        while \(lacks_half.*\n", ""),
        (r"          sum \+= take\(.*\);", ""),
        (r"    mbarrier_wait\(shared_address\(&shared\.full.*\);", ""),
        (r"  mbarrier_wait\(shared_address\(&shared\.added_full.*\);", ""),
        (r"  mbarrier_wait\(barrier, 0u\);", ""),
        (r"      parts\[unit\.part\(\)\]\[g \+ 8\] = column\.z;", ""),
        (
            r"(?s)  mbarrier_arrive\(barrier\);(.*)32 \* \(y < 0",
            r"  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);\1(y < 0",
        ),
        (r"(?s)(    UnitSums sums = .*)(    mbarrier_arrive\(shared_address\(&shared\.empty.*?\n)", r"\2\1"),
        (r"    __syncwarp\(\);  // the next unit's.*\n", ""),
        (r"(?s) &&\s+\(state\.round == 0 \|\|\s+mbarrier_passed\(.*?, \(state\.round - 1\) & 1u\)\)", ""),
    ],
    ids=[
        "h",
        "ends of rows",
        "weights",
        "biases",
        "a row of all units",
        "half of a row",
        "lanes that store sums",
        "lanes that read a stage",
        "lanes that read h",
        "a stage that is read",
    ],
)
def test_what_is_not_waited_for_or_added_is_found(caught: Callable[[Variant, str], bool], old: str, new: str) -> None:
    cut, count = re.subn(old, new, render(variant(**SMALL)))
    assert count
    assert caught(variant(**SMALL), cut)


NUMBERS = -3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, np.inf, -np.inf, np.nan
LOGITS = st.lists(st.sampled_from(NUMBERS), min_size=9, max_size=9)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.nightly)])
@settings(max_examples=examples(6), deadline=None)
@given(values=LOGITS)
def test_equal_logits_go_by_ids_and_no_number_is_chosen_last(dtype: str, values: list[float]) -> None:
    """Weights among infinities are NaN; then all of y is."""
    from jitmx.kernels.routing.cases import STORED, choose

    one = variant(**SMALL, routing=dtype, experts=9)
    logits = np.array([values]).astype(STORED[dtype])
    ids, weights = choose(logits, 4, "softmax_topk")
    problem = MoeProblem(1, 9, 4, one.knobs.hidden, one.knobs.intermediate)
    case = make_case(one, FAMILY.launch(one, problem, 2), problem, Routing(ids, None, None, logits, weights), 0)

    def check(outputs: Any) -> float:
        if np.isfinite(weights).all():
            return case.check(outputs)
        return 0.0 if np.isnan(outputs[0].astype(np.float32)).all() else 1.0

    ptx = nvrtc.compile_ptx(render(one), nvrtc.options(HOPPER))
    assert run(dataclasses.replace(case, check=check), one, ptx)[0] <= case.gate


@pytest.mark.parametrize("routing", ["ids", "bf16"])
def test_the_machine_code_of_a_large_layer_keeps_its_contract(routing: str) -> None:
    problem = MoeProblem(1, routing=routing)
    tried = KERNEL.candidates(problem, HOPPER, HOPPER.multiprocessors)
    made = [SPEC.variant(HOPPER, **knobs, **KERNEL.fixed(problem)) for knobs in tried]
    assert all(FAMILY.launch(one, problem, 132).shared_bytes <= HOPPER.shared_bytes for one in made)
    keep_contracts(made)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"experts": 64}, "experts=64 is of logits, and routing=ids; say by routing= what they are"),
        ({"routing": "bf16", "experts": 3}, "top=4 is over experts=3"),
        ({"chunk": 2}, "unroll=3 is more than chunk=2"),
        ({"hidden_blocks": 513}, "hidden_blocks=513 is above its limit; the nearest legal value is 512"),
    ],
)
def test_knobs_that_do_not_fit_are_refused_with_the_remedy(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        variant(**knobs)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (MoeProblem(2), "moe.token takes 1 rows of top=4 at most, not m=2; use kernel=stream, or pass fewer rows"),
        (MoeProblem(1, experts=600, routing="fp32"), "logits of m=1 rows and experts=600 are chosen from by a launch"),
        (MoeProblem(1, hidden=16416), "moe.token takes at most 16384 columns, not hidden=16416"),
        (MoeProblem(1, x_format="mxfp8"), "moe.token does not take x_format='mxfp8', only bf16"),
    ],
)
def test_what_it_does_not_make_is_refused(problem: MoeProblem, said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        FAMILY.fixed(problem, "token")
