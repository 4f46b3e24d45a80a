"""`jitmx.linear` on the card, against float64."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable

import pytest
import torch

import jitmx
from jitmx import build
from jitmx.dispatch.choose import choose, default_variants
from jitmx.errors import CaptureError, InputError, KnobError
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.linear.arguments import PAIR_GATE
from jitmx.ops.linear import run
from jitmx.runtime import card, load

GATE = 0.005  # relative L2 of W4A16 against float64, rounding of the output included
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SHAPES = {"qkv": (5120, 2880), "o": (2880, 4096), "lm_head": (201088, 2880)}

Evidence = Callable[[object, float | None, str], None]
Environment = Callable[..., None]


class Weight:
    """A random MXFP4 weight [n, k], packed, with its product in float64."""

    def __init__(self, n: int, k: int, scales: tuple[int, int] = (117, 124), encoding: str | None = None) -> None:
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        self.tensor = jitmx.MXTensor(codes, torch.randint(*scales, (n, k // 32), device="cuda").to(torch.uint8))
        self.packed = jitmx.pack_weight(self.tensor, encoding=encoding)

    def times(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        table = torch.tensor(E2M1, dtype=torch.float64, device="cuda")
        parts = []
        for codes, scales in zip(self.tensor.codes.split(8192), self.tensor.scales.split(8192), strict=True):
            values = table[torch.stack([codes & 15, codes >> 4], -1).long()].view(*scales.shape, 32)
            powers = torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - 127))
            parts.append(x.double() @ (values * powers[..., None]).flatten(1).T)
        y = torch.cat(parts, -1)
        return y if bias is None else y + bias.double()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "with_bias"), [("qkv", True), ("qkv", False), ("o", True), ("o", False), ("lm_head", False)]
)
def test_gpt_oss_shapes_are_within_the_gate_eagerly_and_replayed_from_a_graph(
    shape: str, with_bias: bool, m: int, evidence: Evidence
) -> None:
    n, k = SHAPES[shape]
    weight = Weight(n, k)
    bias = torch.randn(n, device="cuda").bfloat16() if with_bias else None
    x = torch.randn(m, k, device="cuda").bfloat16()
    y = jitmx.linear(x, weight.packed, bias, out=poisoned(m, n))
    eager = error(y, weight.times(x, bias))
    assert eager <= GATE

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jitmx.linear(x, weight.packed, bias, out=y)
    x.copy_(torch.randn(m, k, device="cuda"))
    y.fill_(torch.nan)
    graph.replay()
    replayed = error(y, weight.times(x, bias))
    assert replayed <= GATE
    problem = LinearProblem(m, n, k, "bf16", bias is not None, weight.packed.encoding)
    variant = choose("linear", problem, card.arch(0), multiprocessors=card.multiprocessors(0)).variant
    evidence(variant, max(eager, replayed), f"[{n}, {k}] m={m}, eager and graph replay")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["fma", "mma"])
@pytest.mark.parametrize("encoding", ["rotated", "nibble"])
@pytest.mark.parametrize("copying", ["bulk", "async"])
def test_every_engine_encoding_and_copy_agrees_with_float64_on_ragged_shapes(
    copying: str, encoding: str, engine: str, dtype: torch.dtype, environment: Environment, evidence: Evidence
) -> None:
    # Sums of eight rows leave no registers for more blocks.
    environment(JITMX_LINEAR_KNOBS=f"kernel=gemv,engine={engine},copy={copying},blocks_per_sm=2")
    for n, k in ((1, 32), (17, 96), (100, 64), (129, 2880), (2051, 544)):
        for scales in ((100, 130), (0, 140)):
            weight = Weight(n, k, scales, encoding)
            for m in (1, 2, 3, 5, 8, 11):
                x = torch.randn(m, k, device="cuda", dtype=dtype)
                bias = torch.randn(n, device="cuda", dtype=dtype)
                for b in (None, bias):
                    y = jitmx.linear(x, weight.packed, b, out=poisoned(m, n, dtype=dtype))
                    wanted = weight.times(x, b)
                    in_range = wanted.abs() <= torch.finfo(dtype).max
                    wrong = (y.double() - wanted)[in_range].norm()
                    floor = (
                        torch.finfo(dtype).smallest_normal * 2**-10 * m * n
                    )  # what fp16 outputs near zero cannot show
                    assert wrong <= GATE * wanted[in_range].norm() + floor, (n, k, m, scales)
                    problem = LinearProblem(
                        m,
                        n,
                        k,
                        {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype],
                        b is not None,
                        encoding,
                        weight.packed.scale_range,
                    )
                    variant = choose("linear", problem, card.arch(0), multiprocessors=card.multiprocessors(0)).variant
                    scale = float(wanted[in_range].norm())
                    evidence(variant, float(wrong) / scale if scale > floor else 0.0, "ragged shapes")


@pytest.mark.parametrize(
    "knobs",
    [
        "split_k=1,warps=4,chunk=5",
        "split_k=2,warps=4,stages=3,chunk=1",
        "split_k=5,warps=15,chunk=3,blocks_per_sm=1",
        "stage_x=0,blocks_per_sm=1",
        "pdl=0,blocks_per_sm=1",
        "split_k=1,warps=12,chunk=9,unroll=3,blocks_per_sm=1",
    ],
)
@pytest.mark.parametrize("engine", ["fma", "mma"])
def test_every_way_to_split_the_work_agrees_with_float64(engine: str, knobs: str, environment: Environment) -> None:
    environment(JITMX_LINEAR_KNOBS=f"kernel=gemv,engine={engine},{knobs}")
    for n, k in ((5120, 2880), (40000, 384)):
        weight = Weight(n, k)
        for m in (1, 7):
            x = torch.randn(m, k, device="cuda").bfloat16()
            assert error(jitmx.linear(x, weight.packed, out=poisoned(m, n)), weight.times(x)) <= GATE


@pytest.mark.parametrize("m", [0, 1, 9, 16, 33])
def test_any_number_of_rows_in_any_leading_shape_works(m: int) -> None:
    weight = Weight(320, 256)
    x = torch.randn(m, 2, 256, device="cuda").bfloat16()
    y = jitmx.linear(x, weight.packed)
    assert y.shape == (m, 2, 320)
    if m:
        assert error(y, weight.times(x)) <= GATE


@pytest.mark.parametrize(("n", "k"), [(1, 32), (17, 96), (320, 2880)])
def test_there_is_no_gap_among_row_counts(n: int, k: int) -> None:
    weight = Weight(n, k)
    x = torch.randn(300, k, device="cuda").bfloat16()
    bias = torch.randn(n, device="cuda").bfloat16()
    wanted = weight.times(x, bias)
    for m in range(1, 301):
        y = jitmx.linear(x[:m], weight.packed, bias, out=poisoned(m, n))
        assert error(y, wanted[:m]) <= GATE, m


@pytest.mark.parametrize("shape", ["qkv", "o"])
@pytest.mark.parametrize("m", [16, 64, 512, 8192])
def test_many_rows_of_gpt_oss_are_within_the_gate_eagerly_and_replayed(shape: str, m: int, evidence: Evidence) -> None:
    n, k = SHAPES[shape]
    weight, x, y = Weight(n, k), torch.randn(m, k, device="cuda").bfloat16(), poisoned(m, n)
    wanted = weight.times(x)
    eager = error(jitmx.linear(x, weight.packed, out=y), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            jitmx.linear(x, weight.packed, out=y)
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
    replayed = error(y, wanted)
    assert max(eager, replayed) <= GATE
    problem = LinearProblem(m, n, k, encoding=weight.packed.encoding)
    variant = choose("linear", problem, card.arch(0), multiprocessors=card.multiprocessors(0)).variant
    evidence(variant, max(eager, replayed), f"[{n}, {k}] m={m}, eager and graph replay")


@pytest.mark.parametrize("residual", [False, True, "pair"])
@pytest.mark.parametrize("shape", ["qkv", "o"])
@pytest.mark.parametrize("m", [1, 2, 7, 13, 17, 32, 45, 64, 77, 128, 200, 300, 400, 509, 512])
def test_bias_and_residuals_of_gpt_oss_are_added_at_every_number_of_rows(
    m: int, shape: str, residual: bool | str, evidence: Evidence
) -> None:
    n, k = SHAPES[shape]
    weight, x = Weight(n, k), torch.randn(m, k, device="cuda").bfloat16()
    bias, added = torch.randn(n, device="cuda").bfloat16(), torch.randn(m, n, device="cuda").bfloat16()
    low = added * 2.0**-9
    out = poisoned(*((2,) if residual == "pair" else ()), m, n)
    given = {"residual": added if residual else None, "residual_lo": low if residual == "pair" else None}
    wanted = weight.times(x, bias) + sum(t.double() for t in given.values() if t is not None)
    found = run(x, weight.packed, bias, out, **given)
    worst = error(found.double().sum(0) if residual == "pair" else found, wanted)
    assert worst <= (PAIR_GATE if residual == "pair" else GATE)
    problem = LinearProblem(m, n, k, bias=True, residual=residual, encoding=weight.packed.encoding)
    chosen = choose("linear", problem, card.arch(0), multiprocessors=card.multiprocessors(0))
    evidence(chosen.variant, worst, f"[{n}, {k}] m={m}")


def test_k_too_long_for_shared_memory_is_read_from_global_memory() -> None:
    weight = Weight(64, 32768)
    x = torch.randn(8, 32768, device="cuda").bfloat16()
    assert error(jitmx.linear(x, weight.packed, out=poisoned(8, 64)), weight.times(x)) <= GATE


# Kernels, and rows that they take, with what their documented range of magnitudes is.
MAGNITUDES = [
    *((kernel, m, magnitude) for kernel, m in (("gemv", 4), ("tile", 4), ("wgmma", 64)) for magnitude in (1e-30, 1e30)),
    *((kernel, m, magnitude)
      for kernel, m in (("gemv", 1), ("stream", 1), ("stream", 4), ("stream", 8), ("tile", 8), ("wgmma", 64))
      for magnitude in (2.0**-60, 2.0**63)),
    *(("stream,scaling=post", m, magnitude) for m in (1, 8) for magnitude in (1e-30, 1e30)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "m", "magnitude", "scales"),
    [(*one, scales) for scales in ((126, 128), (0, 140)) for one in MAGNITUDES
     if one[0] != "wgmma" or scales[0]],  # wgmma takes normal scales only
)  # fmt: skip
def test_magnitudes_of_the_documented_range_keep_their_precision(
    kernel: str, m: int, magnitude: float, scales: tuple[int, int], environment: Environment
) -> None:
    environment(JITMX_LINEAR_KNOBS=f"kernel={kernel}")
    weight = Weight(256, 512, scales)
    x = (torch.rand(m, 512, device="cuda") * 2 - 1).bfloat16() * magnitude
    assert x.isfinite().all() and error(jitmx.linear(x, weight.packed), weight.times(x)) <= GATE


@pytest.mark.parametrize("m", [1, 4, 16, 70])
@pytest.mark.parametrize(
    ("magnitude", "scales"), [(2.0**-24, (130, 134)), (2.0**-14, (127, 131)), (4096.0, (117, 121))]
)
def test_float16_of_any_magnitude_keeps_its_precision(m: int, magnitude: float, scales: tuple[int, int]) -> None:
    """Down to its subnormals; what comes out has to be in its range as well."""
    weight = Weight(256, 512, scales)
    x = (torch.randint(-8, 9, (m, 512), device="cuda") * magnitude).half()
    wanted = weight.times(x)
    assert wanted.abs().max() < 65504
    floor = 2.0**-25 * wanted.numel() ** 0.5  # half of the least fp16
    assert (jitmx.linear(x, weight.packed).double() - wanted).norm() <= GATE * wanted.norm() + floor


def test_a_nan_scale_makes_its_rows_nan_and_no_others() -> None:
    weight = Weight(64, 128)
    scales = weight.tensor.scales.clone()
    scales[5, 2] = 255
    packed = jitmx.pack_weight((weight.tensor.codes | 1, scales))
    y = jitmx.linear(torch.randn(3, 128, device="cuda").bfloat16(), packed)
    assert y[:, 5].isnan().all() and not y[:, :5].isnan().any() and not y[:, 6:].isnan().any()


def test_a_nan_in_x_stays_in_its_row() -> None:
    weight = Weight(64, 128)
    x = torch.randn(4, 128, device="cuda").bfloat16()
    x[2, 7] = torch.nan
    y = jitmx.linear(x, weight.packed)
    assert y[2].isnan().all() and not y[[0, 1, 3]].isnan().any()


def test_results_are_bit_identical_over_100_runs() -> None:
    weight = Weight(5120, 2880)
    x = torch.randn(4, 2880, device="cuda").bfloat16()
    first = jitmx.linear(x, weight.packed)
    for _ in range(100):
        assert torch.equal(jitmx.linear(x, weight.packed), first)


def test_calls_that_feed_one_another_wait_for_one_another() -> None:
    """Dependent launches prefetch weights; none may read activations that are not written yet."""
    weight = Weight(2880, 2880, (112, 116))
    x = torch.randn(1, 2880, device="cuda").bfloat16()
    serial = x
    for _ in range(50):
        serial = jitmx.linear(serial, weight.packed)
        torch.cuda.synchronize()
    chained = x
    for _ in range(50):
        chained = jitmx.linear(chained, weight.packed)
    assert torch.equal(serial, chained)


@pytest.mark.parametrize("m", [1, 3, 17, 64, 300])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (33, 96), (40000, 2880)])
def test_bringing_another_weight_to_the_l2_changes_neither_product(m: int, n: int, k: int) -> None:
    first, later = Weight(n, k), Weight(2880, 4096)
    mxfp8 = jitmx.pack_weight(jitmx.quantize(torch.randn(17, 32, device="cuda"), "mxfp8"))
    x, attended = (torch.randn(m, columns, device="cuda").bfloat16() for columns in (k, 4096))
    wanted = jitmx.linear(x, first.packed)
    for prefetch in (later.packed, mxfp8):
        found = jitmx.linear(x, first.packed, out=poisoned(m, n), prefetch=prefetch)
        assert torch.equal(found, wanted)
    assert error(jitmx.linear(attended, later.packed, out=poisoned(m, 2880)), later.times(attended)) < GATE


def test_a_stream_of_ones_own_and_threads_work() -> None:
    weight = Weight(512, 512)
    failures: list[object] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                x = torch.randn(2, 512, device="cuda").bfloat16()
                if not error(jitmx.linear(x, weight.packed), weight.times(x)) <= GATE:
                    failures.append(x)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_loading_during_capture_is_refused_with_kernel_and_command(environment: Environment) -> None:
    weight = Weight(208, 224)
    x = torch.randn(1, 224, device="cuda").bfloat16()
    environment(JITMX_LINEAR_KNOBS="kernel=gemv,stages=7,chunk=1,unroll=1")  # a variant that nothing else loads
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(
            CaptureError, match=r"linear\.gemv.*not loaded yet.*jitmx warmup --arch sm_90a --variant linear\.gemv"
        ),
        torch.cuda.graph(graph),
    ):
        jitmx.linear(x, weight.packed)
    torch.cuda.synchronize()
    assert error(jitmx.linear(x, weight.packed), weight.times(x)) <= GATE


def test_inputs_that_do_not_fit_are_refused_with_the_reason() -> None:
    weight = Weight(64, 128).packed
    x = torch.randn(2, 128, device="cuda").bfloat16()
    bias = torch.randn(64, device="cuda").bfloat16()
    jitmx.linear(x, weight, bias)  # a plan exists: the warm path must refuse as well
    long = torch.randn(300, device="cuda").bfloat16()
    cases: list[tuple[dict[str, object], str]] = [
        ({"x": x.float()}, "linear takes bfloat16 or float16"),
        ({"x": x.cpu()}, "jitmx runs on CUDA tensors"),
        ({"x": x[:, :64]}, "last dimension must be k=128"),
        ({"x": torch.randn(2, 256, device="cuda").bfloat16()[:, ::2]}, "not contiguous"),
        ({"x": long[1:257].view(2, 128)}, "no multiple of 16 bytes"),
        ({"x": x.clone().requires_grad_()}, "requires a gradient"),
        ({"bias": bias.float()}, r"bias is float32 \[64\]"),
        ({"bias": bias[:63]}, r"must be contiguous bfloat16 \[64\]"),
        ({"bias": bias.cpu()}, "jitmx runs on CUDA tensors"),
        ({"out": torch.empty(2, 63, device="cuda").bfloat16()}, r"out is bfloat16 \[2, 63\]"),
        ({"out": torch.empty(2, 64, device="cuda")}, "out is float32"),
        ({"out": torch.empty(64, 2, device="cuda").bfloat16().T}, "strides"),
        ({"out": [1]}, "out is a list, not a torch tensor"),
        ({"bias": 1.0}, "bias is a float, not a torch tensor"),
        ({"bias": bias.clone().requires_grad_()}, "bias requires a gradient"),
    ]
    for change, message in cases:
        with pytest.raises(InputError, match=message):
            jitmx.linear(**{"x": x, "weight": weight, "bias": bias, **change})  # type: ignore[arg-type]
    torch.cuda.synchronize()


def test_a_product_over_its_own_input_is_refused() -> None:
    weight = Weight(128, 128).packed
    x = torch.randn(2, 128, device="cuda").bfloat16()
    with pytest.raises(InputError, match="out overlaps x"):
        jitmx.linear(x, weight, out=x)


def test_knobs_that_cannot_serve_the_shape_are_refused_before_launch(environment: Environment) -> None:
    weight = Weight(64, 128).packed
    environment(JITMX_LINEAR_KNOBS="kernel=gemv,split_k=8,warps=8")
    with pytest.raises(KnobError, match="split_k=8 is over the 2 tiles of k=128; the nearest legal value is 2"):
        jitmx.linear(torch.randn(1, 128, device="cuda").bfloat16(), weight)


def test_shapes_that_share_a_kernel_do_not_take_each_other_s_shared_memory() -> None:
    """Dynamic shared memory is a property of the function, which launches of every k share."""
    weights = [Weight(28672, k) for k in (5760, 2880, 5760)]
    xs = [torch.randn(1, weight.packed.k, device="cuda").bfloat16() for weight in weights]
    for _ in range(2):
        for x, weight in zip(xs, weights, strict=True):
            assert error(jitmx.linear(x, weight.packed), weight.times(x)) <= GATE


def test_a_thread_whose_first_cuda_call_is_a_launch_works() -> None:
    weight = Weight(512, 512)
    x, out = torch.randn(2, 512, device="cuda").bfloat16(), poisoned(2, 512)
    jitmx.linear(x, weight.packed, out=out)
    out.fill_(torch.nan)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            jitmx.linear(x, weight.packed, out=out)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures, failures
    assert error(out, weight.times(x)) <= GATE


def test_copies_of_a_packed_weight_launch_on_their_own_memory() -> None:
    weight = Weight(320, 256)
    x = torch.randn(1, 256, device="cuda").bfloat16()
    wanted = weight.times(x)
    assert error(jitmx.linear(x, weight.packed), wanted) <= GATE
    copies = [copy.deepcopy(weight.packed), pickle.loads(pickle.dumps(weight.packed))]
    copies.append(dataclasses.replace(weight.packed, words=weight.packed.words.clone()))
    weight.packed.words.zero_()
    torch.cuda.synchronize()
    for again in copies:
        assert not again.plans
        assert error(jitmx.linear(x, again), wanted) <= GATE


def test_packing_during_capture_is_refused() -> None:
    weight = Weight(64, 64)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="pack weights when the model is loaded"), torch.cuda.graph(graph):
        jitmx.pack_weight(weight.tensor)


def test_the_default_variants_of_this_card_compile_and_load() -> None:
    arch = card.arch(0)
    for family in ("linear", "quantize"):
        for variant in default_variants(family, arch):
            assert build.obtain(variant, strict=True).breaches == ()
            assert load.function(variant, 0)
