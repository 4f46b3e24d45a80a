"""`jitmx.rms_norm` on the card, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitmx
from jitmx.dispatch.choose import choose
from jitmx.errors import CaptureError, InputError
from jitmx.kernels.norm import NormProblem
from jitmx.ops import norm_concat
from jitmx.registry.spec import Variant
from jitmx.runtime import card, load
from rms_oracle import normalized, rounded_once

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = (1, 2, 5, 16, 64, 300, 2049, 8192)

Evidence = Callable[[object, float | None, str], None]


def check(y: torch.Tensor, exact: torch.Tensor) -> float:
    """It is rounded once; the error of all, relative L2."""
    assert rounded_once(y, exact)
    return float((y.double() - exact).norm() / exact.norm())


def inputs(rows: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + hidden)
    x = torch.randn(rows, hidden, device="cuda") * torch.exp2(torch.randint(-9, 9, (rows, 1), device="cuda"))
    return x.to(dtype), torch.randn(hidden, device="cuda").to(dtype)


def variant(hidden: int, dtype: str) -> Variant:
    return choose("norm", NormProblem(hidden, dtype), card.arch(0), multiprocessors=card.multiprocessors(0)).variant


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 64, 1000, 2880, 4096, 5120, 7168, 8192, 12288, 16384])
def test_any_number_of_rows_of_any_length_is_right(hidden: int, dtype: str, evidence: Evidence) -> None:
    worst = 0.0
    for rows in ROWS:
        x, weight = inputs(rows, hidden, DTYPES[dtype])
        worst = max(worst, check(jitmx.rms_norm(x, weight), normalized(x, weight)))
    evidence(variant(hidden, dtype), worst, f"hidden={hidden}, 1 to 8192 rows")


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_kind_come_out_as_torch_has_them_in_fp32(dtype: str) -> None:
    x, weight = inputs(8, 2880, DTYPES[dtype])
    x[0], x[1, 7], x[2, 2879], x[3, 0] = 0, torch.nan, torch.inf, -torch.inf
    x[4] = torch.finfo(x.dtype).max
    x[5] = torch.finfo(x.dtype).smallest_normal
    for epsilon in (1e-5, 0.25, 0.0):
        y = jitmx.rms_norm(x, weight, epsilon)
        exact = torch.nn.functional.rms_norm(x.float(), (2880,), weight.float(), epsilon).double()
        assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.to(y.dtype).isinf())
        there = exact.isfinite() & exact.to(y.dtype).isfinite()
        check(torch.where(there, y, 0), torch.where(there, exact, 0))


def test_rows_at_a_distance_and_in_place() -> None:
    wide, weight = inputs(40, 3 * 2880, torch.bfloat16)[0], inputs(1, 2880, torch.bfloat16)[1]
    for x in (wide[:, 2880:5760], wide[::3, :2880], wide[:1, :2880].expand(7, -1), wide.unflatten(1, (3, 2880))[:, 2]):
        check(jitmx.rms_norm(x, weight), normalized(x, weight))
    for rows in (3, 2000):
        x, _ = inputs(rows, 2880, torch.bfloat16)
        exact = normalized(x, weight)
        assert jitmx.rms_norm(x, weight, out=x) is x
        check(x, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 1000, 2880, 8192, 16384])
def test_rows_of_a_table_lie_beside_those_of_x(hidden: int, dtype: str, evidence: Evidence) -> None:
    worst, table = 0.0, inputs(4099, hidden, DTYPES[dtype])[0]
    for rows in (1, 3, 8, 300, 8192):
        (x, weight), first = inputs(rows, hidden, DTYPES[dtype]), inputs(1, hidden, DTYPES[dtype])[1].neg()
        ids = torch.randint(-1, 4099, (rows,), device="cuda")
        y, kept = norm_concat.run(ids, table, x, first, weight, 1e-5, True)
        short, none = norm_concat.run(ids.int(), table, x, first, weight, 1e-5)
        there = (ids >= 0)[:, None]
        halves = torch.where(there, normalized(table[ids.clamp(0)], first), 0), normalized(x, weight)
        worst = max(worst, check(y, torch.cat(halves, 1)))
        assert torch.equal(kept, y[:, hidden:]) and torch.equal(short, y) and none.shape == (0, hidden)
    problem = NormProblem(hidden, dtype, concat=True)
    made = choose("norm", problem, card.arch(0), multiprocessors=card.multiprocessors(0)).variant
    evidence(made, worst, f"hidden={hidden}, 1 to 8192 rows")


def test_ids_that_the_launch_before_wrote_are_read_behind_the_wait() -> None:
    table, weight = inputs(1000, 2880, torch.bfloat16)
    states, x = inputs(1, 2880, torch.bfloat16)[0], torch.randn(1, 2880, device="cuda").bfloat16()
    head = jitmx.pack_weight(jitmx.quantize(torch.randn(1000, 2880, device="cuda").bfloat16()))

    def step(x: torch.Tensor) -> torch.Tensor:
        return norm_concat.run(jitmx.linear_argmax(x, head), table, states, weight, weight, 1e-5)[0]

    step(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(x)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        y.fill_(torch.nan)
        graph.replay()
        check(y[:, :2880], normalized(table[jitmx.linear_argmax(x, head)], weight))


def test_a_chain_in_a_graph_reads_what_the_launch_before_it_wrote() -> None:
    """Dependent launches: each norm begins before the one before it has ended."""
    for rows in (1, 16, 600):
        x, weight = inputs(rows, 2880, torch.bfloat16)
        weights = [weight.roll(i) for i in range(40)]
        buffers = [torch.empty_like(x), torch.empty_like(x)]

        def chain(x: torch.Tensor, weights: list[torch.Tensor], buffers: list[torch.Tensor]) -> torch.Tensor:
            for number, weight in enumerate(weights):
                x = jitmx.rms_norm(x, weight, out=buffers[number % 2])
            return x

        expected = x
        for weight in weights:
            expected = jitmx.rms_norm(expected, weight)
            torch.cuda.synchronize()
        chain(x, weights, buffers)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(x, weights, buffers)
        for _ in range(20):
            found.fill_(torch.nan)
            graph.replay()
            assert torch.equal(found, expected)


def test_a_product_behind_it_reads_what_it_wrote() -> None:
    torch.manual_seed(0)
    w = jitmx.quantize(torch.randn(5120, 2880, device="cuda").bfloat16() / 50)
    packed, values = jitmx.pack_weight(w), jitmx.dequantize(w, torch.float32).double()
    for rows in (2, 16, 64):
        x, weight = inputs(rows, 2880, torch.bfloat16)
        jitmx.linear(jitmx.rms_norm(x, weight), packed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = jitmx.linear(jitmx.rms_norm(x, weight), packed)
        for _ in range(5):
            x.copy_(inputs(rows, 2880, torch.bfloat16)[0] * torch.randn(rows, 1, device="cuda"))
            graph.replay()
            exact = normalized(x, weight).to(torch.bfloat16).double() @ values.T
            assert float((y.double() - exact).norm() / exact.norm()) <= 0.005


def test_a_kernel_that_is_not_loaded_is_an_error_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_functions", {})  # nothing that other tests have loaded
    x, weight = inputs(3, 6136, torch.float16)  # a size of no other test
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=r"norm\.rms"), torch.cuda.graph(graph):
        jitmx.rms_norm(x, weight)


def test_inputs_that_do_not_fit_are_refused_with_the_reason() -> None:
    x, weight = inputs(4, 64, torch.bfloat16)
    for bad, message in (
        (x.float(), "rms_norm takes bfloat16 or float16"),
        (x[:, ::2], "values of a row must follow one another"),
        (x.flatten()[1:65], "no multiple of 16 bytes"),
        (x.cpu(), "jitmx runs on CUDA tensors"),
        (torch.zeros(1, 16392, device="cuda").bfloat16(), "16384 at most"),
    ):
        with pytest.raises(InputError, match=message):
            jitmx.rms_norm(bad, weight)
