"""Kernels that run one litmus test many times: an instance for each lane, with words of its own.

A group of blocks holds the threads of a program, each of them a warp whose lanes are 32 instances. In each round the
warps of a group meet, wait for a random while, and run the operations on the words of new instances.
"""

from __future__ import annotations

from litmus import Op, Program
from litmus_ptx import UNSET, instruction, shape, warps

ENTRY = "litmus"
LANES = 32
WAITS = 64  # turns of the longest wait, some ten cycles each

_KERNEL = """
typedef unsigned u32;
typedef unsigned long long u64;
__device__ __forceinline__ u32 mixed(u32 x) {{
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; return x ^ (x >> 16);
}}
__device__ __forceinline__ void wait(u32 turns) {{
  // A clock that the loop depends on, as ptxas drops a loop without effect.
  for (u32 k = 0, now = 0; k < turns && now != 1u; ++k) {{
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now) :: "memory");
  }}
}}
// Words of location l: words[l * tries * spread + instance * spread]; results of register k: results[k * tries + ...].
extern "C" __global__ void {cluster} __launch_bounds__({threads}) litmus(
    u32* words, u32* results, u32* meeting, u32 rounds, u32 spread, u32 warm, u32 seed) {{
  const u32 group = blockIdx.x / {span}u, block = blockIdx.x % {span}u, groups = gridDim.x / {span}u;
  const u32 warp = threadIdx.x / 32u, lane = threadIdx.x % 32u, tries = rounds * groups * 32u;
  u32 role = {roles}u;
  {choose}
  if (role == {roles}u) {{ return; }}
  u32* counter = meeting + group * 32u;
  for (u32 round = 0; round < rounds; ++round) {{
    const u32 instance = (round * groups + group) * 32u + lane;
    const u32 chance = mixed(seed ^ mixed(round * 64u + role) ^ mixed(group));
    {addresses}
    u32 touched = 0u;
    if (warm) {{  // lines that are in a cache near may be read from there
      u32 word;
      {touch}
    }}
    __syncwarp();
    if (lane == 0u) {{
      asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
      u32 met = 0u;
      // Given up after a while, so that no mistake can hang the card.
      for (u32 turn = 0; turn < 20000u && met < {roles}u * (round + 1u); ++turn) {{
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(met) : "l"(counter) : "memory");
      }}
    }}
    __syncwarp();
    // All lanes together in half of the rounds, each for itself in the others. Words are small: nothing is added, but
    // ptxas must keep the loads.
    wait((chance & 1u ? chance >> 8 : mixed(chance ^ lane)) % {waits}u + (touched >> 24));
    {values}
    switch (role) {{
    {cases}
    }}
    __syncwarp();
  }}
}}
"""


def _asm(op: Op, names: dict[str, str], block_threads: int) -> str:
    if op.kind == "bar":
        return f'__syncwarp(); asm volatile("bar.sync 0, {block_threads};" ::: "memory");'
    if op.kind == "fence":
        return f'asm volatile("{instruction(op, "", "", ())}" ::: "memory");'
    count = 1 if op.register else 0
    places = tuple(f"%{count + 1 + k}" for k in range(len(op.values)))
    text = instruction(op, "%0" if op.register else "", f"%{count}", places)
    outs = f'"=r"({names[op.register]})' if op.register else ""
    values = [names[item] if isinstance(item, str) else f"{item}u" for item in op.values]
    ins = ", ".join([f'"l"(at_{op.location})', *(f'"r"({value})' for value in values)])
    line = f'asm volatile("{text}" : {outs} : {ins} : "memory");'
    return f"if ({names[op.guard[0]]} == {op.guard[1]}u) {{ {line} }}" if op.guard else line


def source(program: Program) -> str:
    """The CUDA source of a program's kernel.

    Raises:
        ValueError: an operation that polls, which lanes of one warp must not do for each other.
    """
    if any(op.until is not None for thread in program.threads for op in thread):
        raise ValueError(f"{program} polls")
    span, threads = shape(program)
    names = {name: f"value_{name}" for name in program.registers}
    cases = []
    for t, thread in enumerate(program.threads):
        lines = [_asm(op, names, 32 * program.blocks.count(program.blocks[t])) for op in thread]
        for op in thread:
            if op.register:
                at = program.registers.index(op.register)
                lines.append(f"results[{at}u * tries + instance] = {names[op.register]};")
        cases.append(f"case {t}u: {{\n      " + "\n      ".join(lines) + "\n      break; }")
    placed = enumerate(zip(program.blocks, warps(program), strict=True))
    return _KERNEL.format(
        cluster=f"__cluster_dims__({program.cluster}, 1, 1)" if program.cluster > 1 else "",
        threads=threads,
        span=span,
        roles=len(program.threads),
        waits=WAITS,
        choose="\n  ".join(f"if (block == {b}u && warp == {w}u) {{ role = {t}u; }}" for t, (b, w) in placed),
        addresses="\n    ".join(
            f"u32* at_{name} = words + ({k}ull * tries + instance) * spread;"
            for k, name in enumerate(program.locations)
        ),
        touch="\n      ".join(
            f'asm volatile("ld.weak.global.u32 %0, [%1];" : "=r"(word) : "l"(at_{name}) : "memory"); touched |= word;'
            for name in program.locations
        ),
        values="\n    ".join(f"u32 {name} = {UNSET:#x}u;" for name in names.values()),
        cases="\n    ".join(cases),
    )
