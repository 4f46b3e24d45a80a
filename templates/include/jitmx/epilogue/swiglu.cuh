// What makes a row of h of its gate and its up. A NaN comes through.
#pragma once
#include "jitmx/ptx/arithmetic.cuh"

namespace jitmx {

// x sigmoid(x a). Where the power is a subnormal it counts as zero beside the one.
__device__ __forceinline__ float swish(float x, float a) {
  return __fdividef(x, 1.f + exp2_fast(-1.4426950408889634f * a * x));
}

__device__ __forceinline__ float silu(float gate, float up) { return up * swish(gate, 1.f); }

// The clamped one of gpt-oss.
__device__ __forceinline__ float swiglu_oai(float gate, float up, float alpha, float limit) {
  return (max_nan(min_nan(up, limit), -limit) + 1.f) * swish(min_nan(gate, limit), alpha);
}

}  // namespace jitmx
