"""How fast the simulator runs, in thread-instructions a second, on one core.

    python scripts/bench_sim.py [--only TEXT] [--profile NAME]

`alu` is integer and float arithmetic in a loop, `memory` loads and stores through shared memory with a barrier a round.
The others are the largest case of every kernel of every family, for sm_90a. Translation is not counted. CPU time tells
more than wall time where others use the machine.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import time
from collections.abc import Callable, Iterator

import numpy as np

from jitmx import kernels
from jitmx.arch import Arch, parse
from jitmx.dispatch.choose import default_variants
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import Report, simulate
from jitmx.sim.memory import Memory
from jitmx.sim.verify import launch
from jitmx.toolchain import nvrtc

_HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.shared .align 16 .b8 tile[8192];
.visible .entry k(.param .u64 out)
{
.reg .pred p<4>;
.reg .b32 r<16>;
.reg .f32 f<8>;
.reg .b64 d<8>;
ld.param.u64 d0, [out];
mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x; mov.u32 r2, %ntid.x; mad.lo.u32 r3, r1, r2, r0;
mov.u32 r4, 0; mov.b32 f0, r3; mov.b32 f1, 0f3F800001;
shl.b32 r8, r0, 4; mov.u32 r9, tile; add.u32 r8, r8, r9; xor.b32 r10, r8, 512;
$loop:
"""
_TAIL = """
add.u32 r4, r4, 1; setp.lt.u32 p0, r4, {rounds}; @p0 bra $loop;
add.u32 r5, r5, r6; mov.b32 r6, f0; add.u32 r5, r5, r6;
mul.wide.u32 d1, r3, 4; add.s64 d1, d0, d1; st.global.u32 [d1], r5;
ret;
}
"""
_ALU = """
add.u32 r5, r4, r3; xor.b32 r6, r5, r3; shl.b32 r7, r6, 3; and.b32 r7, r7, 0xFFFF; mad.lo.u32 r5, r7, r6, r5;
setp.gt.u32 p1, r5, r6; selp.b32 r6, r5, r6, p1; lop3.b32 r6, r6, r5, r7, 0x96; add.f32 f0, f0, f1; mul.f32 f0, f0, f1;
"""
_MEMORY = """
mov.u32 r5, r4; mov.u32 r6, r3;
st.shared.v4.u32 [r8], {r5, r6, r5, r6}; bar.sync 0; ld.shared.v4.u32 {r5, r6, r7, r11}, [r10]; bar.sync 0;
"""


def synthetic(body: str, rounds: int, grid: int) -> Report:
    """A loop of `body` with 256 threads a block."""
    memory = Memory()
    out = memory.allocate(grid * 256 * 4)
    source = _HEAD + body + _TAIL.replace("{rounds}", str(rounds))
    return simulate(source, (grid, 1, 1), (256, 1, 1), out.to_bytes(8, "little"), memory)


def kernels_of(arch: Arch) -> Iterator[tuple[str, Variant]]:
    """Every kernel of every family: its first default variant on `arch`, and linear's by rows where these differ."""
    for family in kernels.families():
        chosen = {variant.spec.name: variant for variant in reversed(default_variants(family, arch))}
        for spec in kernels.family(family).specs:
            by_rows = (1, 8) if family == "linear" and spec.name in ("gemv", "stream") else ()
            for m in by_rows:
                yield f"{family} {spec.name} m={m}", spec.variant(arch, m=m)
            if not by_rows:
                yield f"{family} {spec.name}", chosen.get(spec.name) or spec.variant(arch)


def largest(variant: Variant) -> Callable[[], Report]:
    """The largest case of a variant, over and over."""
    ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))
    cases = kernels.family(variant.spec.family).cases(variant)
    case = max(cases, key=lambda c: sum(np.size(getattr(a, "data", 0)) for a in c.values.values()))
    return lambda: launch(case, variant, ptx)[0]


def measure(name: str, body: Callable[[], Report]) -> float:
    """Print how fast a benchmark runs, the best of three; in millions of thread-instructions a CPU second."""
    report = body()
    wall = cpu = float("inf")
    for _ in range(3):
        started, spent = time.perf_counter(), time.process_time()
        body()
        cpu = min(cpu, time.process_time() - spent)
        wall = min(wall, time.perf_counter() - started)
    count = report.thread_instructions
    print(
        f"{name:24} {count:12,} thread-instructions  CPU {1e3 * cpu:8.1f} ms {count / cpu / 1e6:7.1f} M/s  "
        f"wall {1e3 * wall:8.1f} ms {count / wall / 1e6:7.1f} M/s",
        flush=True,
    )
    return count / cpu / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", metavar="NAME", help="print where the time of one benchmark goes")
    parser.add_argument("--only", metavar="TEXT", default="", help="only benchmarks with this in their name")
    options = parser.parse_args()
    benchmarks: list[tuple[str, Callable[[], Callable[[], Report]]]] = [
        ("alu", lambda: lambda: synthetic(_ALU, 300, 8)),
        ("alu, one block", lambda: lambda: synthetic(_ALU, 300, 1)),
        ("memory", lambda: lambda: synthetic(_MEMORY, 200, 8)),
        ("memory, one block", lambda: lambda: synthetic(_MEMORY, 200, 1)),
    ]
    for name, variant in kernels_of(parse("sm_90a")):
        benchmarks.append((name, functools.partial(largest, variant)))
    rates: dict[str, float] = {}
    for name, make in benchmarks:
        if options.profile not in (None, name) or options.only not in name:
            continue
        body = make()
        rates[name] = measure(name, body)
        if options.profile:
            with cProfile.Profile() as profile:
                body()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if rates:
        slowest = min(rates, key=lambda name: rates[name])
        print(f"slowest: {slowest}, {rates[slowest]:.1f} M/s of CPU time")


if __name__ == "__main__":
    main()
