// Bytes of two registers.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Byte i is that of `low` (0 … 3) or `high` (4 … 7) which nibble i of the selector's lower half names; a nibble of 8
// and more fills byte i with the sign of that byte.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selector) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

}  // namespace jitmx
