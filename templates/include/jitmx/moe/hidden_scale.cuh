// The scale of h in E4M3, where the activation bounds it.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// What clamped SwiGLU is multiplied by before it is rounded to E4M3: the largest power of two that keeps (limit + 1)
// times the larger of `limit` and what a negative gate can come to, 0.2785 / alpha, within 448.
__device__ __forceinline__ float hidden_multiplier(float alpha, float limit) {
  const float largest = (limit + 1.f) * fmaxf(limit, __fdiv_rn(0.2785f, alpha));
  return bits_to_float(__float_as_uint(__fdiv_rn(448.f, largest)) & 0x7F800000u);
}

}  // namespace jitmx
