"""A kernel family as small as one can be, which tests add to a copy of the package: it multiplies by a constant."""

from __future__ import annotations

from dataclasses import dataclass

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family, Problem
from jitmx.kernels.kernel import Kernel
from jitmx.registry.arguments import Arguments, number, writes
from jitmx.registry.contract import Contract
from jitmx.registry.spec import KernelSpec, Knobs, knob


@dataclass(frozen=True)
class ScaleKnobs(Knobs):
    factor: int = knob(2, low=1, high=1_000_000, doc="what to multiply by")
    registers: int = knob(255, low=1, high=255, doc="registers a thread that the contract promises, at most")
    half: bool = knob(False, doc="add x rounded to half precision, which takes a CUDA header")


def _check(knobs: ScaleKnobs, arch: Arch) -> None:
    if knobs.factor == 13:
        raise KnobError("13 is no factor; the nearest legal value is 12")


ARGUMENTS = Arguments("ProbeArguments", writes("x", "[n]", "float"), number("n", "int"))
SCALE = KernelSpec(
    family="probe",
    name="scale",
    knobs=ScaleKnobs,
    contract=lambda knobs, arch: Contract(max_registers=knobs.registers, require=(r"FMUL|FADD|FFMA",)),
    check=_check,
    shared_bytes=lambda knobs: 0,
    threads=lambda knobs: 256,
    entry="probe_scale",
    arguments=lambda knobs: ARGUMENTS,
)


@dataclass(frozen=True)
class ScaleProblem(Problem):
    factor: int = 2


FAMILY = Family(
    name="probe",
    summary="multiply by a constant",
    kernels=(Kernel(SCALE, lambda variant: (), fixed=lambda problem: {"factor": problem.factor}),),
    problem=ScaleProblem,
    typical=lambda arch: tuple(map(ScaleProblem, (2, 3, 4))),
)
