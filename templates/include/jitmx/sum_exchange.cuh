// How warps and blocks bring their sums together: each keeps four floats a lane, in the fragments of m16n8k16.
#pragma once
#include "jitmx/cluster.cuh"

namespace jitmx {

__device__ __forceinline__ void plus(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

// To be true in one lane of a warp, the same every time, without a register that holds the lane's number (sm_90 and newer).
__device__ __forceinline__ bool elected() {
  u32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen));
  return chosen != 0u;
}

}  // namespace jitmx
