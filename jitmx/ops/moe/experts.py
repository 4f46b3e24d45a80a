"""MXFP4 weights of experts in the layout that `moe` reads: that of `linear`, one expert after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from jitmx.errors import InputError
from jitmx.ops.linear.packed import Packed, quantized
from jitmx.ops.linear.row_words import PackedRows, RowWords
from jitmx.ops.mx import MXTensor
from jitmx.ops.pack import pack
from jitmx.runtime.plan import Plans

ROWS = ("as_is", "halves")


@dataclass(frozen=True, eq=False)
class PackedExperts(PackedRows, Packed):
    """Weights [experts, n, k] in MXFP4, packed for `jitmx.moe`.

    Attributes:
        words: int32 [experts, tile rows, tiles of k, 32 lanes, 4].
        scales: int32 [experts, tile rows, tiles of k, 8], four E8M0 bytes each.
        n, k: output and input features of an expert.
        encoding: order of bits in a word, "rotated" or "nibble".
        scale_range: "normal" where every scale byte is within NORMAL_SCALES, else "full".
    """

    words: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    encoding: str
    scale_range: str
    _rows: list[RowWords] = field(default_factory=list, init=False, repr=False)
    # Launches that were planned for this very object: they hold its addresses, and go with no copy of it.
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    def __post_init__(self) -> None:
        tiles = self._tiles()
        experts = self.words.shape[0] if isinstance(self.words, torch.Tensor) and self.words.dim() else 0
        what = f"packed experts [{experts}, {self.n}, {self.k}]"
        self._require(what, "use pack_experts", (experts, *tiles), (32, 4))

    @property
    def experts(self) -> int:
        """How many there are."""
        return int(self.words.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, n, k)."""
        return self.experts, self.n, self.k


def pack_experts(
    weight: MXTensor | tuple[torch.Tensor, torch.Tensor], *, rows: str = "as_is", encoding: str | None = None
) -> PackedExperts:
    """Pack the MXFP4 weights of all experts of a layer, once, for every batch size.

    Args:
        weight: mxfp4 [experts, n, k], or its (codes, scales): uint8 [experts, n, k / 2] with even k in the low nibble,
            and uint8 [experts, n, k / 32]. The layout of Hugging Face's gpt-oss blocks, [experts, n, k / 32, 16], is
            taken too. `jitmx.moe` wants interleaved gate and up rows in W13, as gpt-oss stores them.
        rows: "as_is", or "halves" where all gate rows come before all up rows: they are interleaved. The bias has to be
            interleaved as well: `b.view(experts, 2, -1).transpose(1, 2).reshape(experts, -1)`.
        encoding: "rotated" or "nibble"; by default what the weights' device wants.

    Returns:
        The packed weights on the same device, expert by expert as `jitmx.pack_weight` packs one. Work is complete on
        return.

    Raises:
        InputError: wrong format, dtype, shape or device.
        CaptureError: a CUDA graph is being captured.
        NotWarmedError: on a GPU, the kernel that packs is not in the cache, and JITMX_MODE=required.

    Source: templates/pack/pack.cu.j2; reference: jitmx.ops.pack.reference.
    """
    weight = quantized(weight, 3)
    if weight.format != "mxfp4":
        raise InputError(f"weight is {weight.format}; moe kernels take mxfp4 weights (jitmx.quantize(w, 'mxfp4'))")
    if len(weight.shape) != 3 or 0 in weight.shape:
        raise InputError(f"weight has shape {list(weight.shape)}; experts' weights are [experts, n, k], each 1 or more")
    if rows not in ROWS:
        raise InputError(f"rows={rows!r} is not one of {', '.join(ROWS)}")
    _, n, k = weight.shape
    if rows == "halves" and n % 2:
        raise InputError(f"rows='halves' of n={n} rows; n must be even: gate and up rows are interleaved")

    words, scales, encoding, scale_range = pack(weight.codes, weight.scales, "mxfp4", encoding, halves=rows == "halves")
    return PackedExperts(words, scales, n, k, encoding, scale_range)
