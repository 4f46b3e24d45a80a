"""`linear.wgmma` on a card of compute capability 9.0, against float64, launched by itself: no table has a say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitmx
from gpu.launching import call
from jitmx.kernels.linear import wgmma
from jitmx.kernels.linear.arguments import EPSILON
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.spec import Variant
from jitmx.runtime import card
from jitmx.runtime.plan import Step

GATE = 0.005  # relative L2 against float64, rounding of the output included
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Evidence = Callable[[Variant, float | None, str], None]


class Weight:
    """A random MXFP4 weight [n, k], packed, and its values in float64."""

    def __init__(self, n: int, k: int, encoding: str = "rotated") -> None:
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(117, 124, (n, k // 32), device="cuda").to(torch.uint8)
        self.packed = jitmx.pack_weight(jitmx.MXTensor(codes, scales), encoding=encoding)
        table = torch.tensor(E2M1, dtype=torch.float64, device="cuda")
        values = table[torch.stack([codes & 15, codes >> 4], -1).long()].view(n, k // 32, 32)
        self.values = (values * torch.exp2(scales.double() - 127)[..., None]).view(n, k)
        self.n, self.k = n, k


class Product:
    """A variant for a shape, ready to be launched."""

    def __init__(self, variant: Variant, m: int, n: int, k: int) -> None:
        self.shape = m, n
        fixed = {"epsilon": EPSILON, "rows": m, "n": n, "k": k}
        self.step = Step(
            variant, 0, wgmma.launch(variant.knobs, LinearProblem(m, n, k), card.multiprocessors(0)), fixed
        )

    def __call__(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = torch.full(self.shape, torch.nan, dtype=torch.bfloat16, device="cuda") if out is None else out
        packed = weight.packed
        call(self.step, x=x, weight=packed.words, scales=packed.scales, bias=bias, residual=residual, y=y)
        return y


def made(**knobs: Any) -> Variant:
    return wgmma.SPEC.variant(card.arch(0), **knobs)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def error(variant: Variant, weight: Weight, m: int) -> float:
    """Of a product of m random rows, twice with the same scratch memory, with what the variant adds to it."""
    product, worst = Product(variant, m, weight.n, weight.k), 0.0
    for _ in range(2):
        x = random(m, weight.k)
        wanted = x.double() @ weight.values.T
        bias = random(weight.n) if variant.knobs.bias else None
        residual = random(m, weight.n) if variant.knobs.residual else None
        for item in (bias, residual):
            wanted = wanted if item is None else wanted + item.double()
        worst = max(worst, relative(product(x, weight, bias, residual), wanted))
    return worst


TILES: tuple[dict[str, Any], ...] = (
    {"groups": 2, "tile_m": 48, "stages": 3, "ring": 2},
    {"groups": 2, "tile_m": 176},
    {"groups": 2, "tile_m": 192},
    {"groups": 2, "tile_m": 256, "stages": 5, "order": "x_first"},
    {"groups": 3, "tile_m": 64, "stages": 8},
    {"groups": 3, "tile_m": 128, "buffers": 3, "ring": 3},
    {"groups": 3, "tile_m": 192},
    {"groups": 4, "tile_m": 64, "ring": 8, "order": "x_first"},
    {"groups": 4, "tile_m": 96, "pdl": False},
    {"groups": 2, "tile_m": 128, "split_k": 2},
    {"groups": 3, "tile_m": 64, "split_k": 2, "order": "x_first"},
    {"groups": 3, "tile_m": 128, "split_k": 2, "stages": 4},
    {"groups": 2, "tile_m": 176, "split_k": 2, "schedule": "hybrid", "stages": 6, "ring": 4},
    {"groups": 4, "tile_m": 32, "ring": 6, "order": "x_first", "x": "image"},
    {"groups": 2, "tile_m": 64, "schedule": "stream_k"},
    {"groups": 2, "tile_m": 256, "stages": 5, "schedule": "stream_k"},
    {"groups": 3, "tile_m": 192, "schedule": "stream_k", "order": "x_first"},
    {"groups": 2, "tile_m": 176, "x": "image"},
    {"groups": 4, "tile_m": 64, "ring": 8, "order": "x_first", "x": "image"},
    {"groups": 3, "tile_m": 128, "split_k": 2, "stages": 4, "x": "image"},
)

RUNS: tuple[dict[str, Any], ...] = (
    {},
    {"groups": 2, "tile_m": 64, "split_k": 2},
    {"groups": 2, "tile_m": 176, "split_k": 2, "schedule": "hybrid", "stages": 6, "ring": 4},
    {"groups": 2, "tile_m": 128, "schedule": "stream_k"},
    {"groups": 2, "tile_m": 128, "x": "image"},
)


@pytest.mark.parametrize("extras", [{}, {"bias": True, "residual": True, "encoding": "nibble"}], ids=["plain", "all"])
@pytest.mark.parametrize("knobs", TILES, ids=str)
def test_every_tile_agrees_with_float64_on_ragged_shapes(
    knobs: dict[str, Any], extras: dict[str, Any], evidence: Evidence
) -> None:
    variant = made(**knobs, **extras)
    worst = 0.0
    for n, k in ((1, 96), (17, 2880), (200, 544), (2880, 4096), (5127, 128)):
        weight = Weight(n, k, variant.knobs.encoding)
        for m in (1, 7, 64, 131, 300, 1000):
            found = error(variant, weight, m)
            assert found <= GATE, (n, k, m)
            worst = max(worst, found)
    evidence(variant, worst, "ragged shapes")


@pytest.mark.parametrize("knobs", RUNS, ids=str)
def test_rows_from_1_to_300_have_no_gap(knobs: dict[str, Any]) -> None:
    variant, weight = made(**knobs), Weight(392, 160)
    assert max(error(variant, weight, m) for m in range(1, 301)) <= GATE


def test_a_single_block_of_k_works() -> None:
    variant, weight = made(bias=True), Weight(392, 32)
    assert max(error(variant, weight, m) for m in (1, 48, 129)) <= GATE


@pytest.mark.parametrize("m", [64, 128, 512, 2000])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096)])
def test_what_the_heuristic_chooses_for_gpt_oss_is_within_the_gate(n: int, k: int, m: int, evidence: Evidence) -> None:
    problem = LinearProblem(m, n, k, bias=True)
    tuned = wgmma.KERNEL.heuristic(problem, card.arch(0), card.multiprocessors(0))
    variant = made(**tuned, **wgmma.KERNEL.fixed(problem))
    found = error(variant, Weight(n, k), m)
    assert found <= GATE
    evidence(variant, found, f"[{n}, {k}] m={m}")


@pytest.mark.parametrize("knobs", RUNS, ids=str)
def test_a_hundred_runs_give_the_same_bits_whatever_ran_before(knobs: dict[str, Any]) -> None:
    variant, weight, other = made(**knobs), Weight(2880, 4096), Weight(5120, 2880)
    x, before = random(300, 4096), random(130, 2880)
    product, another = Product(variant, 300, 2880, 4096), Product(variant, 130, 5120, 2880)
    first = product(x, weight)
    for _ in range(100):
        another(before, other)
        assert torch.equal(product(x, weight), first)


@pytest.mark.parametrize("knobs", RUNS, ids=str)
def test_dependent_launches_in_a_graph_each_read_what_the_one_before_wrote(knobs: dict[str, Any]) -> None:
    """They overlap, and share scratch memory: each must wait for the one before with X, and need not with W."""
    weights, x = [Weight(2880, 2880) for _ in range(4)], random(200, 2880)
    buffers = [torch.empty_like(x) for _ in weights]
    product = Product(made(**knobs), 200, 2880, 2880)

    def chain() -> None:
        for source, weight, target in zip([x, *buffers], weights, buffers, strict=False):
            product(source, weight, out=target)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        x.copy_(random(200, 2880))
        graph.replay()
        for source, weight, found in zip([x, *buffers], weights, buffers, strict=False):
            assert relative(found, source.double() @ weight.values.T) <= GATE
