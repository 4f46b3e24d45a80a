// Counters in device memory: blocks of a launch wait for each other, and the last to arrive learns that it is the last.
#pragma once
#include "jitmx/ptx/atomic.cuh"

namespace jitmx {

// Counts an arrival at a counter of `blocks` and returns whether it was the last one, which leaves the counter at zero
// for the next launch. What this thread and, before a barrier, its block have written is then visible to the last
// arrival.
__device__ __forceinline__ bool arrive_last(u32* counter, u32 blocks) {
  return increment_acq_rel(counter, blocks) == blocks - 1u;
}

// Whether this launch is an even or an odd one; each of its blocks asks once. `turn` starts at zero.
__device__ __forceinline__ u32 take_turn(u32* turn, u32 blocks) {
  return increment_relaxed(turn, 2u * blocks) >= blocks;
}

}  // namespace jitmx
