"""The figures that the kernels must reach, on the card that they are stated for, against ceilings of the same run."""

from __future__ import annotations

import pytest
import torch

from jitmx.bench import linear, norm, quantize, timing
from jitmx.bench import routing as benchmarks_routing
from jitmx.bench.benchmark import Asked
from jitmx.bench.routing import ALLOWED, Chain, Routers
from jitmx.models import GPT_OSS_120B
from jitmx.ops.linear.packed import pack_weight

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif("H200" not in torch.cuda.get_device_name(), reason="figures are stated for the H200"),
]


@pytest.mark.parametrize(("shape", "limit"), [("qkv", 4.5e-6), ("o", 4.0e-6)])
def test_a_small_product_of_one_row_takes_microseconds_in_a_chain(shape: str, limit: float) -> None:
    weights = linear.rotated(pack_weight(linear.random_weight(*GPT_OSS_120B.dense[shape])))
    assert linear.time_linear(weights, 1) <= limit


def test_lm_head_reads_at_85_percent_of_what_memory_yields() -> None:
    weights = linear.rotated(pack_weight(linear.random_weight(*GPT_OSS_120B.dense["lm_head"])))
    assert weights[0].nbytes / linear.time_linear(weights, 1) >= 0.85 * timing.read_bandwidth()


def test_quantizing_64_mb_runs_at_75_percent_of_a_copy() -> None:
    copy = timing.copy_bandwidth()
    for row in quantize.bench(Asked()):
        assert row["bytes"] / row["us"] * 1e6 >= 0.75 * copy, row


@pytest.mark.parametrize("m", [9, 16, 40])
def test_a_time_in_a_chain_is_no_shorter_than_reading_the_weight_takes(m: int) -> None:
    weights = linear.rotated(pack_weight(linear.random_weight(2880, 4096)))
    assert linear.time_linear(weights, m) >= weights[0].nbytes / (1.1 * timing.read_bandwidth())


def test_routing_of_one_row_takes_3_microseconds_with_its_product_over_routers_that_no_cache_holds() -> None:
    routers = Routers(benchmarks_routing.MODELS["gpt-oss-120b"])
    spent, _ = Chain(routers, 1, norm=False).time(benchmarks_routing.jitmx_way(routers, 1, norm=False), ALLOWED)
    assert spent <= 3e-6


@pytest.mark.parametrize(("m", "limit"), [(16, 2.0e-6), (64, 2.2e-6)])
def test_a_norm_of_few_rows_takes_two_microseconds_in_a_chain(m: int, limit: float) -> None:
    weights = [torch.ones(GPT_OSS_120B.hidden, device="cuda").bfloat16() for _ in range(72)]
    assert norm.seconds(norm.jitmx_way, m, weights) <= limit


def test_a_norm_of_many_rows_runs_at_80_percent_of_a_copy() -> None:
    copy = timing.copy_bandwidth()
    weights = [torch.ones(GPT_OSS_120B.hidden, device="cuda").bfloat16() for _ in range(72)]
    moved = 2 * 8192 * GPT_OSS_120B.hidden * 2
    assert moved / norm.seconds(norm.jitmx_way, 8192, weights) >= 0.8 * copy
