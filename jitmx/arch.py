"""SM targets: names, limits and features.

`sm_90`, `sm_120` and `sm_121` mean their `a` forms: the instructions that make the chip worth targeting (wgmma,
block-scaled MMA) do not assemble without the suffix. The suffix is part of every cache key, because the ELF flags of a
cubin cannot tell `sm_121a` from `sm_121`.

Limits are from the CUDA C++ Programming Guide, "Compute Capabilities"; multiprocessor counts are those of the cards
that jitmx is tuned for (H200: 132, RTX PRO 6000: 188, GB10: 48) and are replaced by the device's own at run time.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from jitmx.errors import ArchError
from jitmx.quoting import short


@dataclass(frozen=True, order=True)
class Arch:
    """One SM target.

    Attributes:
        major, minor: compute capability, 12 and 1 for GB10.
        suffix: "a" (this chip only), "f" (this family) or "".
        shared_bytes: most shared memory a block may use, bytes.
        multiprocessors: SM count that heuristics assume where no device is present.
        memory_gbps: DRAM read bandwidth that heuristics assume, GB/s.
        nvrtc: first NVRTC release that targets it.
        features: names that templates and kernel rules ask for.
    """

    major: int
    minor: int
    suffix: str
    shared_bytes: int
    multiprocessors: int
    memory_gbps: int
    nvrtc: tuple[int, int]
    features: frozenset[str]

    @property
    def name(self) -> str:
        """`sm_121a`: what NVRTC is told and what cache keys hold."""
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def number(self) -> int:
        """Compute capability as __CUDA_ARCH__ spells it: 1210."""
        return self.major * 100 + self.minor * 10

    def __str__(self) -> str:
        return self.name

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a cubin for this target loads on a device of compute capability `major.minor`."""
        if self.suffix == "a":
            return (major, minor) == (self.major, self.minor)
        return major == self.major and minor >= self.minor


_AMPERE = frozenset({"cp_async", "mma_bf16", "redux"})
_ADA = _AMPERE | {"cvt_e4m3"}
_HOPPER = _ADA | {"pdl", "tma", "mbarrier", "cluster", "setmaxnreg"}
_BLACKWELL = _HOPPER | {"cvt_e2m1", "cvt_ue8m0"}


SUPPORTED: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch(8, 0, "", 166_912, 108, 1_800, (11, 1), _AMPERE),
        Arch(8, 6, "", 101_376, 84, 850, (11, 1), _AMPERE),
        Arch(8, 9, "", 101_376, 142, 860, (11, 8), _ADA),
        Arch(9, 0, "a", 232_448, 132, 4_200, (12, 0), _HOPPER | {"wgmma"}),
        Arch(10, 0, "a", 232_448, 148, 7_000, (12, 8), _BLACKWELL | {"tcgen05"}),
        Arch(10, 3, "a", 232_448, 148, 7_000, (12, 9), _BLACKWELL | {"tcgen05"}),
        Arch(12, 0, "a", 101_376, 188, 1_600, (12, 8), _BLACKWELL | {"mma_block_scale"}),
        Arch(12, 0, "f", 101_376, 188, 1_600, (12, 9), _BLACKWELL | {"mma_block_scale"}),
        Arch(12, 1, "a", 101_376, 48, 240, (12, 9), _BLACKWELL | {"mma_block_scale"}),
    )
}

# Spellings without a suffix, and the target that each means.
_PREFERRED = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a", "sm_120": "sm_120a", "sm_121": "sm_121a"}
_SPELLING = re.compile(r"(?:sm_?|compute_)?(\d{1,2})[._]?(\d)([af]?)", re.IGNORECASE)


@functools.cache
def parse(text: str) -> Arch:
    """The target that `text` names: `sm_121`, `121a`, `12.1`, `12.1a` and `compute_121` are all `sm_121a`.

    Raises:
        ArchError: not an SM target, or not one that jitmx has kernels for.
    """
    match = _SPELLING.fullmatch(text.strip())
    known = ", ".join(SUPPORTED)
    if match is None:
        raise ArchError(f"{short(text)} is not an SM target", f"write one of: {known}")
    name = f"sm_{int(match[1])}{match[2]}{match[3].lower()}"
    name = _PREFERRED.get(name, name)
    if name not in SUPPORTED:
        number = int(match[1]) * 100 + int(match[2]) * 10
        nearest = min(SUPPORTED.values(), key=lambda arch: abs(arch.number - number))
        raise ArchError(f"jitmx has no kernels for {name}", f"the nearest it has is {nearest} (all: {known})")
    return SUPPORTED[name]


def of_device(major: int, minor: int) -> Arch:
    """The target for a device of compute capability `major.minor`.

    Raises:
        ArchError: no target of jitmx runs on such a device.
    """
    candidates = [arch for arch in SUPPORTED.values() if arch.runs_on(major, minor)]
    if not candidates:
        raise ArchError(
            f"no target of jitmx runs on compute capability {major}.{minor} (targets: {', '.join(SUPPORTED)})"
        )
    return max(candidates, key=lambda arch: (arch.minor, arch.suffix == "a"))
