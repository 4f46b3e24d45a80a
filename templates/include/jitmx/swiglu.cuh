// What makes a row of h of its gate and its up. Comparisons let a NaN through.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

// x sigmoid(x a)
__device__ __forceinline__ float swish(float x, float a) { return __fdividef(x, 1.f + exp2f(-1.4426950408889634f * a * x)); }

__device__ __forceinline__ float silu(float gate, float up) { return up * swish(gate, 1.f); }

// The clamped one of gpt-oss.
__device__ __forceinline__ float swiglu_oai(float gate, float up, float alpha, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1.f) * swish(gate, alpha);
}

}  // namespace jitmx
