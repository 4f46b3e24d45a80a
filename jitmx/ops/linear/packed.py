"""Weights in the layout that every linear kernel reads.

docs/packed-layout.md draws it and says why. In short: tiles of 16 rows by 64 k, 512 bytes each, in which lane 4 g + t
finds rows g and g + 8, k = 8 t … 8 t + 7 of both 32-blocks, in one 16-byte load.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from jitmx import formats
from jitmx.errors import InputError
from jitmx.kernels.linear.layout import ENCODINGS, SCALE_RANGES, packed_tiles
from jitmx.kernels.linear.problem import WEIGHTS
from jitmx.ops import checks
from jitmx.ops.linear.row_words import PackedRows, RowWords
from jitmx.ops.mx import MXTensor
from jitmx.ops.pack import pack
from jitmx.quoting import short
from jitmx.runtime.plan import Plans


class Packed:
    """Words and scales as they lie in memory, and the launches planned for them."""

    words: torch.Tensor
    scales: torch.Tensor
    encoding: str
    scale_range: str
    n: int
    k: int

    def _tiles(self) -> tuple[int, int]:
        """Rows of tiles and tiles of k.

        Raises:
            InputError: n or k is no number of features.
        """
        checks.require_whole(n=self.n, k=self.k)
        if self.n < 1 or self.k < 1 or self.k % formats.BLOCK:
            raise InputError(
                f"n={short(self.n)} and k={short(self.k)}: n must be 1 or more, and k a multiple of {formats.BLOCK}"
            )
        return packed_tiles(self.n, self.k)

    def _require(self, what: str, remedy: str, tiles: tuple[int, ...], lanes: tuple[int, ...]) -> None:
        """Raise InputError unless words and scales are `what`: of so many tiles, a word of which has such lanes."""
        for name, shape in (("words", (*tiles, *lanes)), ("scales", (*tiles, 8))):
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
                raise InputError(f"{name} of {what} is {checks.shown(tensor)}; it must be int32 {list(shape)}", remedy)
            checks.require_layout(name, tensor)
        if self.words.device != self.scales.device:
            raise InputError(
                f"words are on {self.words.device} and scales on {self.scales.device}", "put both on one device"
            )
        if self.encoding not in ENCODINGS or self.scale_range not in SCALE_RANGES:
            raise InputError(
                f"encoding={self.encoding!r} must be rotated or nibble, scale_range={self.scale_range!r} normal or full"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "plans"}

    def clone(self) -> Self:
        """The same in memory of its own."""
        return replace(self, words=self.words.clone(), scales=self.scales.clone())  # type: ignore[type-var]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, plans=Plans())

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.words.device

    @property
    def addresses(self) -> tuple[int, int]:
        """Device addresses of words and scales."""
        return self.words.data_ptr(), self.scales.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        size: int = self.words.numel() * 4 + self.scales.numel() * 4
        return size


@dataclass(frozen=True, eq=False)
class PackedWeight(PackedRows, Packed):
    """A weight [n, k] in MXFP4 or MXFP8, packed for `jitmx.linear`.

    Attributes:
        words: int32 [tile rows, tiles of k, 32 lanes, 4]; for MXFP8 [tile rows, tiles of k, 2 blocks, 32 lanes, 4].
        scales: int32 [tile rows, tiles of k, 8], four E8M0 bytes each.
        n, k: output and input features.
        encoding: order of bits in a word, "rotated" or "nibble".
        scale_range: "normal" where every scale byte is within NORMAL_SCALES, else "full".
        format: "mxfp4" or "mxfp8".
    """

    words: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    encoding: str
    scale_range: str
    format: str = "mxfp4"
    _rows: list[RowWords] = field(default_factory=list, init=False, repr=False)
    # Launches that were planned for this very object: they hold its addresses, and go with no copy of it.
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    def __post_init__(self) -> None:
        tiles = self._tiles()
        if self.format not in WEIGHTS:
            raise InputError(f"format={self.format!r} of a packed weight is not one of {', '.join(WEIGHTS)}")
        lanes = (32, 4) if self.format == "mxfp4" else (2, 32, 4)
        self._require(f"a packed weight [{self.n}, {self.k}]", "use pack_weight", tiles, lanes)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k


def quantized(weight: object, dimensions: int) -> MXTensor:
    """A weight of so many dimensions as it was passed: an MXTensor, or MXFP4 codes and scales.

    Raises:
        InputError: it is neither.
    """
    if isinstance(weight, tuple) and len(weight) == 2:
        codes, scales = weight
        # Hugging Face's gpt-oss blocks have a dimension more.
        if isinstance(codes, torch.Tensor) and codes.dim() == dimensions + 1 and codes.shape[-1] == formats.BLOCK // 2:
            codes = codes.flatten(-2)
        weight = MXTensor(codes, scales)
    if not isinstance(weight, MXTensor):
        raise InputError(
            f"weight is a {type(weight).__name__}",
            "pass an MXTensor (jitmx.quantize(w, 'mxfp4')) or its (codes, scales)",
        )
    return weight


def pack_weight(weight: MXTensor | tuple[torch.Tensor, torch.Tensor], *, encoding: str | None = None) -> PackedWeight:
    """Pack an MXFP4 or MXFP8 weight, once, for every batch size.

    Args:
        weight: mxfp4 or mxfp8 [n, k], or the (codes, scales) of an mxfp4 one: uint8 [n, k / 2] with even k in the low
            nibble, and uint8 [n, k / 32]. k is a multiple of 32, n is any. The layout of Hugging Face's gpt-oss blocks,
            [n, k / 32, 16], is taken too.
        encoding: of mxfp4, "rotated" or "nibble"; by default what the weight's device wants. An mxfp8 weight has one
            layout.

    Returns:
        The packed weight on the same device; n is padded to 16 rows and k to 64. Work is complete on return, so that
        kernels may prefetch the weight ahead of their place in the stream. For the same reason, if you modify a
        packed weight later, synchronise before the next call.

    Raises:
        InputError: wrong format, dtype, shape or device.
        CaptureError: a CUDA graph is being captured.
        NotWarmedError: on a GPU, the kernel that packs is not in the cache, and JITMX_MODE=required.

    Source: templates/pack/pack.cu.j2; reference: jitmx.ops.pack.reference.
    """
    weight = quantized(weight, 2)
    if weight.format not in WEIGHTS:
        raise InputError(
            f"weight is {weight.format}; linear kernels take {' and '.join(WEIGHTS)} weights "
            "(jitmx.quantize(w, 'mxfp4'))"
        )
    if len(weight.shape) != 2:
        raise InputError(f"weight has shape {list(weight.shape)}; a linear weight is [n, k]")
    n, k = weight.shape
    if n == 0 or k == 0:
        raise InputError(f"weight has shape [{n}, {k}]; n and k must be 1 or more")
    if weight.format == "mxfp8":
        encoding = "rotated"
    words, scales, encoding, scale_range = pack(weight.codes[None], weight.scales[None], weight.format, encoding)
    return PackedWeight(words[0], scales[0], n, k, encoding, scale_range, weight.format)
