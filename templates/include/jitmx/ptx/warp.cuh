// What a warp does as one: an elected lane, and registers that warpgroups hand over (sm_90 and newer).
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// True in one lane of a warp, the same every time, without a register that holds the lane's number.
__device__ __forceinline__ bool elected() {
  u32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen));
  return chosen != 0u;
}

// Gives registers back to the block's pool, or takes them from it: a multiple of 8, all warps of a warpgroup alike.
template <int Registers> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(Registers));
}
template <int Registers> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(Registers));
}

}  // namespace jitmx
