// What an E4M3 cache takes beside the conversions of pairs: four codes at once, and fp16 that stays finite.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Four values of their codes, in the order of bytes: of the lower two, then of the others.
__device__ __forceinline__ void from_e4m3x4(u32 codes, u32& low, u32& high) {
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// Those beyond the largest finite value, infinity too, become that.
__device__ __forceinline__ u32 to_finite_fp16x2(float low, float high) {
  u32 out;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

}  // namespace jitmx
