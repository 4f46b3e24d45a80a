// The greater of packed halves. A NaN counts only where both are; +0 is greater than -0.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
  u32 out;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ u32 max_fp16x2(u32 a, u32 b) {
  u32 out;
  asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

}  // namespace jitmx
