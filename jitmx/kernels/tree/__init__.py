"""`tree`: chains and trees of drafts, from a draft's scores to what a target accepts of them.

Kernels:
    pack     masks of bytes to bits
    plan     masks, depths, positions, links and paths, from parents
    build    the best of scored candidates as a tree, and its plan
    verify   the longest path that a target accepts, greedily or by thresholds
    accept   the same of chains, by a greedy target
    move     keys and values of an accepted path to where its sequence has them

Node 0 of a tree is its root, the last token that is certain; each other node's parent comes before it. So a path is a
set of bits in the order of its nodes, and one of 64 nodes fits a register pair: a warp looks at all nodes side by side,
each two apart in a lane, and finds the nodes above each in as many steps as the depth has bits.

Floor: but for `move`, trips to memory, one behind the other: what is asked, what that points to, what is stored. `move`
reads and writes each vector that goes elsewhere once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.tree import accept, build, move, pack, plan, verify
from jitmx.kernels.tree.problem import STEPS, TreeProblem
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Variant


def _tuned(problem: TreeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    return {"pdl": "pdl" in arch.features}


def _kernel(spec: KernelSpec, cases: Callable[[Variant], Iterable[Case]]) -> Kernel:
    def fixed(problem: TreeProblem) -> dict[str, Any]:
        if problem.step != spec.name:
            raise KnobError(f"tree.{spec.name} does not make step={problem.step}", f"use kernel={problem.step}")
        return {}

    return Kernel(
        spec, cases, fixed=fixed, launch=lambda knobs, problem, multiprocessors: Launch(problem.batch), heuristic=_tuned
    )


FAMILY = Family(
    name="tree",
    summary="chains and trees of drafts: built, masked, verified, and their keys and values moved",
    kernels=(
        _kernel(pack.PACK, pack.cases),
        _kernel(plan.PLAN, plan.cases),
        _kernel(build.BUILD, build.cases),
        _kernel(verify.VERIFY, verify.cases),
        _kernel(accept.ACCEPT, accept.cases),
        _kernel(move.MOVE, move.cases),
    ),
    problem=TreeProblem,
    typical=lambda arch: tuple(TreeProblem(step) for step in STEPS),
    benchmark=Benchmark("jitmx.bench.tree", "acceptance of chains and verification of trees", peers=("torch",)),
)
