// Operations of a whole warp: electing a lane, and setmaxnreg (sm_90 and newer).
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// True in one lane of a warp, the same every time, without a register that holds the lane's number.
__device__ __forceinline__ bool elected() {
  u32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen));
  return chosen != 0u;
}

// Releases registers to the block's pool, or requests more: a multiple of 8, the same in all warps of a warpgroup.
template <int Registers> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(Registers));
}
template <int Registers> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(Registers));
}

}  // namespace jitmx
