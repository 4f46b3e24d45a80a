// Counters in device memory by which the last of some blocks learns that it is the last.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

// Counts an arrival at a counter of `blocks` and returns whether it was the last one, which leaves the counter at zero for
// the next launch. What this thread and, before a barrier, its block have written is then known to the last arrival.
__device__ __forceinline__ bool arrive_last(u32* counter, u32 blocks) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before) : "l"(__cvta_generic_to_global(counter)), "r"(blocks - 1u) : "memory");
  return before == blocks - 1u;
}

}  // namespace jitmx
