// What an E4M3 cache takes beside the conversions of pairs: four codes at once, and fp16 that stays finite.
#pragma once
#include "jitmx/ptx/convert.cuh"

namespace jitmx {

// Four values from their codes, in the order of bytes: of the lower two, then of the others. A conversion reads either
// half of a register directly if the half is an operand of its own.
__device__ __forceinline__ void from_e4m3x4(u32 codes, u32& low, u32& high) {
  u16 first, second;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(first), "=h"(second) : "r"(codes));
  low = from_e4m3x2(first);
  high = from_e4m3x2(second);
}

// Those beyond the largest finite value, infinity too, become that.
__device__ __forceinline__ u32 to_finite_fp16x2(float low, float high) {
  u32 out;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

}  // namespace jitmx
