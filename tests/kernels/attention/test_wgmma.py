"""`attention.wgmma`: as right as `attention.prefill`, and its products run beside the softmax."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from contracts import keep_contracts
from jitmx import arch, kernels
from jitmx.build import Built
from jitmx.errors import KnobError
from jitmx.kernels.attention import wgmma
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict

HOPPER = arch.parse("sm_90")
KNOBS: tuple[dict[str, Any], ...] = (
    {"sinks": "sinks_bf16", "rope": "neox", "rotary": 64, "keys": 128},
    {"sinks": "sinks_bf16", "rope": "neox", "rotary": 64, "windowed": True, "rows": 64, "blocks_per_sm": 3},
    {"sinks": "sinks_bf16", "rope": "neox", "rotary": 64, "rows": 256},
    {"sinks": "sinks_bf16", "rope": "neox", "rotary": 64, "rows": 256, "cache": "e4m3"},
    {"cache": "e4m3", "dtype": "fp16", "head_dim": 128, "group": 5, "windowed": True, "soft_cap": True,
     "page_size": 48, "rows": 128},
    {"head_dim": 128, "group": 3, "dtype": "fp16", "soft_cap": True, "page_size": 48, "rows": 64, "stages": 5},
    {"head_dim": 128, "group": 16, "windowed": True, "rows": 128, "keys": 128, "rope": "interleaved", "rotary": 96,
     "table": "table_fp32", "sinks": "sinks_fp32"},
    {"group": 1, "rows": 192, "windowed": True, "page_size": 32, "stages": 4, "pdl": False},
    {"group": 5, "dtype": "fp16", "sinks": "sinks_fp16", "keys": 128, "stages": 4, "rope": "neox", "rotary": 32},
)  # fmt: skip


def variant(**knobs: Any) -> Variant:
    return wgmma.WGMMA.variant(HOPPER, **knobs)


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(map(str, knobs.values())))
def test_it_is_right(knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]) -> None:
    assert not simulated(variant(**knobs)).untouched


def powers_are_made_before_the_wait_for_weighed_values(built: Built, lines: list[str]) -> None:
    begin = max(i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line)
    behind = (i for i, line in enumerate(lines) if i > begin and "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line)
    assert sum("MUFU.EX2" in line for line in lines[begin : next(behind)]) >= 32


def test_powers_are_made_before_the_wait_for_weighed_values() -> None:
    one = variant(sinks="sinks_bf16", rope="neox", rotary=64, rows=256)
    keep_contracts([one], powers_are_made_before_the_wait_for_weighed_values)


def products_of_a_tile_follow_one_another_without_a_wait(built: Built, lines: list[str]) -> None:
    products = (built.variant.knobs.head_dim + built.variant.knobs.keys) // 16
    kinds = [text.split()[0] for text in lines if re.match(r"HGMMA|WARPGROUP", text)]
    loop = ["WARPGROUP.ARRIVE"] + ["HGMMA"] * products + ["WARPGROUP.DEPBAR.LE"] * 2
    found = [kind.split(".64x")[0] for kind in kinds]
    assert any(found[i : i + len(loop)] == loop for i in range(len(found))), built.variant.name


def test_the_machine_code_spills_nothing_and_does_not_wait_between_the_products_of_a_tile() -> None:
    """Those of keys and those of values are under way together; only then come waits, for one group and for all."""
    keep_contracts((variant(**knobs) for knobs in KNOBS), products_of_a_tile_follow_one_another_without_a_wait)


@pytest.mark.parametrize("queries", [1, 500, 9000])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_candidates_are_legal_and_their_blocks_have_all_rows(queries: int, window: int, head_dim: int) -> None:
    problem = AttentionProblem(queries=queries, window=window, head_dim=head_dim, append=False)
    assert "wgmma" in kernels.family("attention").serving(problem, HOPPER)
    tried = wgmma.candidates(problem, HOPPER, 132)
    assert wgmma.heuristic(problem, HOPPER, 132) in tried
    for knobs in tried:
        one = variant(**knobs, **wgmma.fixed(problem))
        assert wgmma.launch(one.knobs, problem, 132).blocks * one.knobs.rows >= 8 * queries * problem.group


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"head_dim": 96}, "does not take head_dim=96, only 64, 128; use attention.prefill"),
        ({"dtype": "fp16", "qk": "qk_fp16"}, "does not take qk=qk_fp16, only qk_fp32; use attention.prefill"),
        ({"mask": 32}, "does not take mask=32, only 0; use attention.decode"),
        ({"step": "append"}, "the kernel makes step=attend, not step=append"),
    ],
)
def test_what_another_kernel_takes_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        wgmma.fixed(AttentionProblem(queries=100, **fields))


def test_a_target_without_products_of_warpgroups_and_too_few_registers_are_refused() -> None:
    with pytest.raises(KnobError, match="needs products of warpgroups; sm_120a has none; use attention"):
        wgmma.WGMMA.variant(arch.parse("sm_120"))
    with pytest.raises(KnobError, match="keys=128 of head_dim=64 take 157 registers a thread, over 72"):
        variant(keys=128, blocks_per_sm=2)
    with pytest.raises(KnobError, match="page_size=40 is not a multiple of 16; the nearest legal value is 48"):
        variant(page_size=40)
    with pytest.raises(KnobError, match="keys=32 of cache=e4m3: each of four warps converts 16 tokens; use keys=64"):
        variant(keys=32, cache="e4m3")
