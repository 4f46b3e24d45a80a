"""`bandwidth`: what the memory of a card yields, for rooflines.

Kernels:
    read   reads a buffer and stores nothing

Floor: the bytes read over the bandwidth that is to be measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jitmx.kernels import Family, Problem
from jitmx.kernels.kernel import Kernel
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Knobs, Variant, knob

STORED_SUM = 0x9E3779B9  # as in the template


@dataclass(frozen=True)
class ReadKnobs(Knobs):
    """Compile-time choices of `bandwidth.read`."""

    block: int = knob(512, choices=(128, 256, 512), doc="threads a block")
    unroll: int = knob(8, choices=(1, 2, 4, 8), doc="loads of 16 bytes a thread under way")


@dataclass(frozen=True)
class ReadProblem(Problem):
    """One measurement of the read bandwidth."""


ARGUMENTS = Arguments(
    "ReadArguments",
    reads("data", "[vectors]", "Vec4"),
    writes("sink", "[1]: a sum that hardly ever is stored", "unsigned int"),
    number("vectors", "unsigned long long"),
)

READ = KernelSpec(
    family="bandwidth",
    name="read",
    knobs=ReadKnobs,
    contract=lambda knobs, arch: Contract(max_registers=64, require=(r"\bLDG\.E\..*128",)),
    threads=lambda knobs: knobs.block,
    arguments=lambda knobs: ARGUMENTS,
)


def _cases(variant: Variant) -> Iterator[Case]:
    """Sizes below, at and above one round of the grid, and the one sum that is stored."""
    generator = np.random.default_rng(0)
    for vectors in (0, 1, 700, 2 * variant.knobs.block * variant.knobs.unroll + 3):
        data = generator.integers(0, 2**31, (vectors, 4), np.uint32)  # the stored sum has its top bit set: none has
        yield _case(f"{vectors} vectors", data, stored=False)
    # A thread stores it when it has read each of its vectors once: of two whole rounds, and of one and single ones.
    threads = 2 * variant.knobs.block
    vectors = (2 * variant.knobs.unroll - 1) * threads + 2
    for thread in (1, threads - 1):
        data = generator.integers(0, 2**31, (vectors, 4), np.uint32)
        data[thread, 3] ^= np.bitwise_xor.reduce(data[thread::threads], axis=None) ^ np.uint32(STORED_SUM)
        yield _case(f"the sum of {vectors} vectors that thread {thread} stores", data, stored=True)
    stored = np.array([[STORED_SUM, 0, 0, 0]], np.uint32)
    yield _case("the stored sum", stored, stored=True)
    # A vector behind 2^32 others, which the last block reads, or the first one in its second round.
    block, blocks = variant.knobs.block, (1 << 32) // variant.knobs.block + 1
    for before, runs in (((blocks - 1) * block, blocks - 1), (blocks * block, 0)):
        case = _case(f"the last of {before + 1} vectors", stored, stored=True)
        data, at = stored, np.array([before])
        if runs == 0:
            data = np.concatenate([np.zeros((block, 4), np.uint32), stored])
            at = np.append(np.arange(block), before)
        values = {**case.values, "data": Buffer(data).spread(at * 16, (before + 1) * 16), "vectors": before + 1}
        yield dataclasses.replace(case, launch=Launch(blocks), values=values, blocks=(runs,))


def _case(name: str, data: npt.NDArray[np.uint32], *, stored: bool) -> Case:
    sink = Buffer(np.zeros(1, np.uint32), output=stored)
    return Case(
        name=name,
        launch=Launch(2),
        values={"data": Buffer(data), "sink": sink, "vectors": len(data)},
        check=lambda outputs: float(stored and outputs[0][0] != STORED_SUM),
        gate=0.0,
    )


FAMILY = Family(
    name="bandwidth",
    summary="what the card's memory yields, for rooflines",
    kernels=(Kernel(READ, _cases),),
    problem=ReadProblem,
    typical=lambda arch: (ReadProblem(),),
)
