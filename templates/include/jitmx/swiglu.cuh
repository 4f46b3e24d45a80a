// What makes a row of h of its gate and its up. A NaN comes through.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

__device__ __forceinline__ float least(float a, float b) {
  float out;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}
__device__ __forceinline__ float most(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// x sigmoid(x a). Where the power is a subnormal it counts as zero beside the one.
__device__ __forceinline__ float swish(float x, float a) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * a * x));
  return __fdividef(x, 1.f + power);
}

__device__ __forceinline__ float silu(float gate, float up) { return up * swish(gate, 1.f); }

// The clamped one of gpt-oss.
__device__ __forceinline__ float swiglu_oai(float gate, float up, float alpha, float limit) {
  return (most(least(up, limit), -limit) + 1.f) * swish(least(gate, limit), alpha);
}

}  // namespace jitmx
