"""`jitmx bench`: its table and its plot, from figures of the test's own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jitmx import bench as benchmarks
from jitmx import models
from jitmx.bench import attention_peers, benchmark, linear, moe_inputs, moe_peers, roofline
from jitmx.bench import moe as benchmarks_moe
from jitmx.bench import norm as benchmarks_norm
from jitmx.bench import routing as benchmarks_routing
from jitmx.bench import topk as benchmarks_topk
from jitmx.bench import tree as benchmarks_tree
from jitmx.bench.benchmark import Ceilings
from jitmx.bench.peers import PEERS
from jitmx.cli import bench
from jitmx.errors import DriverError
from jitmx.kernels.linear import usual_rows

LIMITS = Ceilings("a card", read=4e12, copy=4e12, matmul=7e14)


def row(m: int, us: float, humming: float | None, shape: tuple[str, int, int] = ("qkv", 5120, 2880)) -> dict[str, Any]:
    name, n, k = shape
    reason = None if humming is not None else "humming.layer cannot be imported"
    return {
        "name": name, "n": n, "k": k, "m": m, "kernel": "gemv", "us": us, "bytes": n * k * 17 // 32 + m * (n + k) * 2,
        "flops": 2 * m * n * k, "cublas_us": 4 * us, "peers": {"humming": {"us": humming, "reason": reason}},
    }  # fmt: skip


def test_an_absent_library_is_a_dash_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    bench._show({"linear": linear.tables([row(1, 2.5, 9.25), row(4, 3.0, None)], LIMITS)}, LIMITS)
    out, err = capsys.readouterr()
    header, first, second = [line.split() for line in out.splitlines() if line][1:4]
    assert header[-2:] == ["HUMMING", "US"] and "KERNEL" in header and "TFLOP/S" in header
    assert first[-2:] == ["4.00", "9.25"] and second[-1] == "–"
    assert err == "humming: humming.layer cannot be imported\n"


def test_a_line_of_the_plot_holds_what_was_measured() -> None:
    rows = [row(1, 2.5, None), row(4, 3.0, 9.5), row(16, 4.0, None)]
    assert roofline.lines(rows) == {
        "jitmx": [(1, 2.5), (4, 3.0), (16, 4.0)],
        "cuBLAS bf16": [(1, 10.0), (4, 12.0), (16, 16.0)],
        "humming": [(4, 9.5)],
    }
    assert "humming" not in roofline.lines(rows[:1])


def test_the_plot_is_a_png_with_a_column_a_shape(tmp_path: Path) -> None:
    shapes = (("qkv", 5120, 2880), ("o", 2880, 4096), ("", 64, 64))
    widths = []
    for count in (1, 3):
        path = tmp_path / f"{count}.png"
        linear.draw([row(m, m + 1.0, 9.0, shape) for shape in shapes[:count] for m in (1, 16, 512)], LIMITS, path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        widths.append(int.from_bytes(data[16:20], "big"))
    assert widths[1] > 2 * widths[0]


def moe_row(m: int, us: float, marlin: float | None) -> dict[str, Any]:
    shape = moe_inputs.MODELS["gpt-oss-120b"]
    hit = {1: 4.0, 16: 51.25}[m]
    peers = {"marlin": {"us": marlin, "reason": None if marlin else "kernel does not support current device"}}
    floors = LIMITS.floors(shape.bytes(m, hit), shape.flops(m))
    return {"m": m, "hit": hit, "kernel": "decode", "us": us, **floors, "peers": peers}


def test_a_layer_of_experts_is_shown_beside_its_floor(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [moe_row(1, 26.5, 53.0), moe_row(16, 339.25, None)]
    # 4 experts of 13.2 MB and their biases, at 4 TB/s; 51.25 of them.
    assert [round(row["floor_us"], 2) for row in rows] == [13.24, 169.64]
    assert rows[0]["floor_us"] == rows[0]["memory_us"] > rows[0]["compute_us"] > 0
    bench._show({"moe": benchmarks_moe.tables({"model": "gpt-oss-120b", "seed": 3, "rows": rows}, LIMITS)}, None)
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines() if line]
    assert "gpt-oss-120b," in lines[0] and lines[0][-2:] == ["seed", "3"]
    assert lines[2][:6] == ["1", "4.0", "decode", "26.50", "13.24", "50%"] and lines[2][-1] == "53.00"
    assert lines[3][-1] == "–" and err == "marlin: kernel does not support current device\n"


def test_many_rows_are_bound_by_operations() -> None:
    shape = moe_inputs.MODELS["gpt-oss-120b"]
    found = LIMITS.floors(shape.bytes(8192, 128.0), shape.flops(8192))
    assert found["floor_us"] == found["compute_us"] == pytest.approx(6 * 8192 * 4 * 2880 * 2880 / 7e14 * 1e6)


def test_the_plot_of_a_layer_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "moe.png"
    payload = {"model": "gpt-oss-120b", "rows": [moe_row(1, 26.5, 53.0), moe_row(16, 339.25, None)]}
    benchmarks_moe.draw(payload, LIMITS, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def routing_row(m: int, norm: bool, us: float, other: float | None) -> dict[str, Any]:
    shape = benchmarks_routing.MODELS["gpt-oss-120b"]
    peers = {"torch": {"us": other, "reason": None if other else "OutOfMemoryError: no room"}}
    times = {"us": us, "model_us": us - 0.25, "serial_us": us + 1.5, "error": 3e-7}
    row = {"m": m, "norm": norm, "kernel": "route", **times, "peers": peers}
    return row | LIMITS.floors(shape.bytes(m, norm), shape.flops(m))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a card of the test's own was asked of routing, which it answers with two rows."""
    found: list[tuple[Any, ...]] = []

    def bench_routing(*arguments: Any) -> list[dict[str, Any]]:
        found.append(arguments)
        names = arguments[3]
        rows = routing_row(1, False, 2.75, 17.5), routing_row(1, True, 3.5, None)
        return [row | {"peers": {name: row["peers"][name] for name in names}} for row in rows]

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(benchmark, "ceilings", lambda: LIMITS)
    monkeypatch.setattr(benchmarks_routing, "bench_routing", bench_routing)
    return found


def test_routing_is_shown_beside_its_floor_and_torch(run: Any, asked: list[tuple[Any, ...]]) -> None:
    said = run("bench", "routing", "-m", "1", "--seed", "5")
    assert asked == [(benchmarks_routing.MODELS["gpt-oss-120b"], (1,), LIMITS, ("torch",), 5)]
    title, header, plain, normed = [line for line in said.stdout.splitlines() if line][1:]
    assert title.startswith("routers of gpt-oss-120b that rotate past the L2") and "seed 5" in title
    assert header.split("  ")[-1] == "TORCH US" and "36 ROUTERS US  NO OVERLAP US" in header
    # 0.74 MB at 4 TB/s is 0.19 us.
    assert plain.split() == ["1", "–", "route", "2.75", "0.19", "7%", "0.27", "2.50", "4.25", "17.50"]
    assert normed.split() == ["1", "yes", "route", "3.50", "0.19", "5%", "0.22", "3.25", "5.00", "–"]
    assert said.stderr == "torch: OutOfMemoryError: no room\n"


def test_routing_as_json_has_its_model_and_every_row(read: Any, asked: list[tuple[Any, ...]]) -> None:
    said = read("bench", "routing", "--model", "gpt-oss-20b", "--peers", "none")
    shape = {"experts": 32, "top": 4, "hidden": 2880, "layers": 24}
    assert said["ceilings"]["read"] == 4e12 and set(said) == {"schema_version", "ceilings", "routing"}
    assert {name: said["routing"][name] for name in ("model", "seed", "shape")} == {
        "model": "gpt-oss-20b", "seed": 0, "shape": shape,
    }  # fmt: skip
    assert [row["norm"] for row in said["routing"]["rows"]] == [False, True]
    assert asked[0][1:] == (benchmarks_routing.ROWS, LIMITS, (), 0)


def test_default_rows_reach_prefill_except_for_an_output_layer() -> None:
    assert usual_rows(5120, linear.ROWS) == (1, 4, 16, 64, 512, 8192)
    assert usual_rows(201088, linear.ROWS) == (1, 4, 16, 64, 512)


def test_libraries_are_chosen_by_name() -> None:
    known = benchmarks.known()
    there = {
        "attention": tuple(attention_peers.PEERS),
        "linear": tuple(PEERS),
        "moe": moe_peers.PEERS,
        "norm": tuple(benchmarks_norm.PEERS),
        "routing": tuple(benchmarks_routing.PEERS),
        "topk": tuple(benchmarks_topk.PEERS),
        "tree": benchmarks_tree.PEERS,
    }
    assert {name: one.peers for name, one in known.items() if one.peers} == there
    assert set(bench._peers("all", known)) == {name for names in there.values() for name in names}
    assert bench._peers("none", known) == () and bench._peers("marlin,humming,marlin", known) == ("marlin", "humming")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("linear", "-n", "64"), "n is given alone; n and k go together"),
        (("linear", "-n", "64", "-k", "65"), "k=65 is not a multiple of 32"),
        (("linear", "-m", "1,x"), "'m=x': m is a whole number from 1 to 2147483616"),
        (("linear", "-m", "0"), "'m=0': m is a whole number from 1 to 2147483616"),
        (("routing", "quantize", "n=64"), "'n=64' is no field=value of routing, quantize; fields: m"),
        (("moe", "x_format=int8"), "x_format='int8' is not one of bf16, mxfp8, mxfp6, mxfp4"),
        (("linear", "--plot", "absent/x.png"), "--plot absent/x.png: there is no folder absent"),
        (("linear", "--peers", "cutlass"), "--peers cutlass is no library of linear; choices: humming, marlin, "),
        (("moe", "--model", "gpt-5"), "gpt-oss-120b"),
        (("attention", "queries=300", "context=256"), "context=256 is less than its queries=300"),
        (("attention", "cache=fp8"), "cache='fp8' is not one of same, e4m3"),
        (("attention", "head_dim=64"), "'head_dim=64' is no field=value of attention; fields: batch, context"),
        (("quantize", "--plot", "x.png"), "--plot draws linear and moe"),
        (("routing", "--plot", "x.png"), "--plot draws linear and moe"),
        (("gemm",), "'gemm' is not one of attention, linear, moe, norm, quantize, routing, topk, tree, block, launch"),
    ],
)
def test_a_bad_argument_is_a_usage_error_that_names_the_choices(run: Any, arguments: Any, said: str) -> None:
    assert said in run("bench", *arguments, code=2).stderr


def test_a_library_that_no_benchmark_asked_for_has_is_refused(run: Any) -> None:
    said = run("bench", "linear", "--peers", "fa3", code=2).stderr
    assert f"--peers fa3 is no library of linear; choices: {', '.join(PEERS)}, all or none" in said
    said = run("bench", "launch", "--peers", "humming", code=2).stderr
    assert "--peers humming is no library of launch; choices: all or none" in said
    known = benchmarks.known()
    assert bench._peers("fa3", {name: known[name] for name in ("linear", "attention")}) == ("fa3",)


def test_every_example_of_its_help_lacks_nothing_but_a_gpu(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(verb: str) -> None:
        raise DriverError("no GPU here")

    monkeypatch.setattr(bench.targets, "require_gpu", none)
    monkeypatch.setattr("jitmx.bench.roofline.require_matplotlib", lambda: None)
    shown = re.findall(r"^ +jitmx (bench.*?)(?:  .*)?$", run("bench", "--help").stdout, re.MULTILINE)
    assert len(shown) >= 10
    for example in shown:
        assert "no GPU here" in run(*example.split(), code=1).stderr, example


def test_without_a_gpu_it_says_so(process: Callable[..., Any]) -> None:
    done = process("bench", "linear", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "bench needs a GPU that torch can use" in done.stderr


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a card of the test's own was asked of experts, which it answers with a row."""
    found: list[tuple[Any, ...]] = []

    def bench_moe(*arguments: Any) -> list[dict[str, Any]]:
        found.append(arguments)
        return [moe_row(16, 339.25, None)]

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(benchmark, "ceilings", lambda: LIMITS)
    monkeypatch.setattr(benchmarks_moe, "bench_moe", bench_moe)
    return found


def test_experts_of_any_sizes_are_measured(run: Any, read: Any, layers: list[tuple[Any, ...]]) -> None:
    sizes: dict[str, Any] = {"experts": 8, "top": 2, "hidden": 4096, "intermediate": 14336}
    said = run("bench", "moe", *(f"--{name}={size}" for name, size in sizes.items()), "-m", "16,64")
    (shape, rows, *_), usual = layers[0], moe_inputs.LayerShape()
    assert shape == moe_inputs.LayerShape(**sizes) and rows == (16, 64) and shape.bias == usual.bias
    assert "experts 8 x [4096, 14336] top 2, swiglu_oai, from router logits" in said.stdout
    payload = read("bench", "moe", "--experts", "8", "--x-format", "mxfp8")["moe"]
    assert payload["model"] is None and payload["shape"]["experts"] == 8 and payload["shape"]["x_format"] == "mxfp8"


@pytest.mark.parametrize("name", models.EXPERT_LAYERS)
def test_experts_of_models_are_measured_by_name(name: str, read: Any, layers: list[tuple[Any, ...]]) -> None:
    payload = read("bench", "moe", "--model", name.upper(), "x_format=mxfp8")["moe"]
    assert payload["model"] == name and payload["shape"]["hidden"] == models.EXPERT_LAYERS[name].hidden
    assert layers[0][0] == dataclasses.replace(moe_inputs.MODELS[name], x_format="mxfp8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("attention", "--model", "mixtral-8x7b"), "attention is not measured of mixtral-8x7b; its models: gpt-"),
        (("moe", "--experts"), "--experts needs a value: it is the same as experts=VALUE"),
        (("moe", "--experts", "eight"), "experts is a whole number from 1"),
        (("moe", "--expert", "8"), "No such option"),
        (("linear", "--experts", "8"), "'experts=8' is no field=value of linear"),
        (("moe", "hidden=100"), "hidden=100 is not a multiple of 32"),
        (("moe", "--experts", "2"), "top=4 is over experts=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_of_experts_is_refused(
    words: tuple[str, ...], said: str, run: Any, layers: list[tuple[Any, ...]]
) -> None:
    assert said in run("bench", *words, code=2).stderr
    assert not layers
