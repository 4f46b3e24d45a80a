"""Packing on the card: the bits that torch makes there, in new memory and in place, at the speed of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import jitmx
from jitmx import settings
from jitmx.bench import timing
from jitmx.errors import CaptureError, NotWarmedError
from jitmx.kernels.pack import PackKnobs
from jitmx.ops import pack
from jitmx.ops.pack import in_place, into, scale_range, watch
from jitmx.ops.pack import reference as pack_torch
from jitmx.runtime import card, load

CUDA = torch.device("cuda:0")
LAYOUTS = [("mxfp4", "rotated"), ("mxfp4", "nibble"), ("mxfp8", "rotated")]
# gpt-oss-120b, a shard of one of its four ranks, and ragged shapes; experts, n, k.
SHAPES = [(8, 5760, 2880), (8, 2880, 2880), (8, 2880, 736), (1, 5120, 2880), (1, 2880, 4096), (3, 33, 96), (2, 1, 32),
          (1, 40, 32800)]  # fmt: skip

Evidence = Callable[[object, float | None, str], None]


def weights(
    experts: int, n: int, k: int, format: str, low: int = 0, high: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of any bits, a fiftieth of the blocks zeros, and scales from `low` to below `high`."""
    width = k // 2 if format == "mxfp4" else k
    codes = torch.randint(0, 256, (experts, n, width), dtype=torch.uint8, device=CUDA)
    empty = torch.rand((experts, n, k // 32, 1), device=CUDA) < 0.02
    codes.unflatten(-1, (k // 32, -1)).masked_fill_(empty, 0x80)
    return codes, torch.randint(low, high, (experts, n, k // 32), dtype=torch.uint8, device=CUDA)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("format", "encoding"), LAYOUTS)
def test_the_kernel_packs_to_the_bits_that_torch_does(
    shape: tuple[int, int, int], format: str, encoding: str, evidence: Evidence
) -> None:
    codes, scales = weights(*shape, format)
    for halves in (False, True) if shape[1] % 2 == 0 else (False,):
        words, packed, _, found = pack.pack(codes, scales, format, encoding, halves=halves)
        wanted = pack_torch.pack(codes, scales, format, encoding, halves=halves)
        assert torch.equal(words, wanted[0]) and torch.equal(packed, wanted[1])
        assert (found == "full") == wanted[2]
    variant = pack._step(pack.PackProblem(format, encoding), 0, *shape, False).variant
    assert isinstance(variant.knobs, PackKnobs)
    evidence(variant, None, "all shapes, to the bit")


@pytest.mark.parametrize(("format", "encoding"), LAYOUTS)
def test_scales_are_watched_at_both_ends(format: str, encoding: str) -> None:
    low, high = (2, 128) if format == "mxfp4" else (10, 134)
    codes, scales = weights(2, 48, 128, format)
    if format == "mxfp8":
        codes.clamp_(max=0x7E)
    codes[1, 47, -1] = 1
    for value, wanted in ((low, "normal"), (high, "normal"), (low - 1, "full"), (high + 1, "full"), (255, "full")):
        scales.fill_(low)
        scales[1, 47, 3] = value
        assert pack.pack(codes, scales, format, encoding)[3] == wanted


def test_a_layer_is_packed_into_its_own_memory_with_none_beside_it() -> None:
    codes, scales = weights(16, 2880, 2880, "mxfp4", low=120)
    wanted = pack_torch.pack(codes, scales, "mxfp4", "rotated")
    words = codes.view(-1).view(torch.int32).view(wanted[0].shape)
    packed = scales.view(-1).view(torch.int32).view(wanted[1].shape)
    assert in_place(codes, scales, words, packed, "mxfp4")
    seen = watch(CUDA)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    into(codes, scales, words, packed, seen, "mxfp4", "rotated")
    assert scale_range(seen) == "full" and torch.cuda.max_memory_allocated() == before
    assert torch.equal(words, wanted[0]) and torch.equal(packed, wanted[1])


@pytest.fixture
def nothing_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that may not compile, with an empty cache and nothing loaded."""
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JITMX_MODE", "required")
    monkeypatch.setattr(load, "_functions", {})
    settings.reload()
    yield
    monkeypatch.undo()
    settings.reload()


def test_what_is_not_warm_is_an_error_that_names_the_command(nothing_warm: None) -> None:
    with pytest.raises(NotWarmedError, match=r"jitmx warmup --arch \w+ --variant pack\.pack"):
        jitmx.pack_weight((torch.zeros((16, 32), dtype=torch.uint8, device=CUDA), torch.zeros(
            (16, 2), dtype=torch.uint8, device=CUDA)))  # fmt: skip


def test_packing_while_a_graph_is_captured_is_an_error() -> None:
    codes, scales = weights(2, 16, 64, "mxfp4")
    with pytest.raises(CaptureError, match="when the model is loaded"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        jitmx.pack_experts((codes, scales))


@pytest.mark.alone
@pytest.mark.skipif("H200" not in torch.cuda.get_device_name(), reason="figures are stated for the H200")
@pytest.mark.parametrize(("low", "high"), [(110, 128), (0, 256)], ids=["folded in", "beyond"])
def test_experts_are_packed_in_place_at_80_percent_of_a_copy(low: int, high: int) -> None:
    codes, scales = weights(128, 5760, 2880, "mxfp4", low, high)
    assert card.arch(0).name == "sm_90a"
    words = codes.view(-1).view(torch.int32).view(128, 360, 45, 32, 4)
    packed = scales.view(-1).view(torch.int32).view(128, 360, 45, 8)
    seen, calls = watch(CUDA), 8  # behind one another, so that the host is not timed
    into(codes, scales, words, packed, seen, "mxfp4", "rotated")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        into(codes, scales, words, packed, seen, "mxfp4", "rotated")
    end.record()
    torch.cuda.synchronize()
    moved = 2 * (codes.numel() + scales.numel()) * calls
    assert moved / start.elapsed_time(end) * 1e3 >= 0.8 * timing.copy_bandwidth()
