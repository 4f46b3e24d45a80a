"""`attention.append`: new keys and values are in the cache, bit for bit, wherever they are to go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from contracts import keep_contracts
from jitmx import arch
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError
from jitmx.kernels.attention import append
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict

TARGETS = ("sm_80", "sm_90a", "sm_120a", "sm_121a")
# The knobs that shape the code, each value with others in turn.
KNOBS: tuple[dict[str, Any], ...] = (
    {"rope": "neox", "rotary": 64},
    {"head_dim": 96, "rope": "interleaved", "rotary": 96, "dtype": "fp16", "table": "table_fp16", "page_size": 48},
    {"head_dim": 128, "cache": "e4m3", "rope": "neox", "rotary": 96, "table": "table_fp32", "warps": 2},
    {"head_dim": 256, "cache": "e4m3", "dtype": "fp16", "page_size": 32, "warps": 1},
    {"head_dim": 64, "rope": "interleaved", "rotary": 8, "warps": 8, "page_size": 16},
    {"head_dim": 96, "cache": "e4m3", "rope": "neox", "rotary": 16, "page_size": 160, "warps": 1},
)


def variant(target: str, **knobs: Any) -> Variant:
    return append.APPEND.variant(arch.parse(target), **knobs)


def suited(target: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """The knobs as a target takes them: sm_80 converts no E4M3, and has no dependent launch."""
    item = arch.parse(target)
    cache = knobs.get("cache", "same") if "cvt_e4m3" in item.features else "same"
    return {**knobs, "cache": cache, "pdl": "pdl" in item.features}


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(map(str, knobs.values())))
def test_what_the_cache_keeps_is_exact_on_every_target(
    target: str, knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]
) -> None:
    verdict = simulated(variant(target, **suited(target, knobs)))
    assert verdict.error == 0.0 and not verdict.untouched


@pytest.mark.parametrize("target", TARGETS)
def test_the_machine_code_keeps_its_contract(target: str) -> None:
    keep_contracts(variant(target, **suited(target, knobs)) for knobs in KNOBS)


def test_a_problem_of_this_step_is_served_by_it_and_by_nothing_else() -> None:
    problem = AttentionProblem(batch=3, queries=1000, step="append")
    chosen = choose("attention", problem, arch.parse("sm_90")).variant
    assert chosen.spec is append.APPEND
    with pytest.raises(KnobError, match="the kernel makes step=append, not step=attend"):
        append.fixed(AttentionProblem())
    assert append.launch(chosen.knobs, problem, 132).blocks == 750
    assert append.launch(chosen.knobs, AttentionProblem(64, queries=8192, step="append"), 132).blocks == 132 * 8


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"page_size": 24}, "page_size=24 is not a multiple of 16; the nearest legal value is 32"),
        ({"rope": "neox"}, "rope=neox with rotary=0; use rotary=0 with no_rope, and rotary > 0 else"),
        ({"rope": "neox", "rotary": 24}, "rotary=24 is not a multiple of 16 up to head_dim=64; .* value is 16"),
        ({"cache": "e4m3"}, "cache=e4m3 needs sm_89 or newer; sm_80 converts no E4M3; use cache=same"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule_and_the_remedy(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        variant("sm_80", **{"pdl": False, **knobs})
