// From accumulators of m16n8k16, whose pairs run along tokens, to pairs that run along features, as Y lies in memory.
#pragma once
#include "jitmx/scalar.cuh"

namespace jitmx {

// Two values rounded to T: `low` in the low half.
template <class T> __device__ __forceinline__ u32 round_pair(float low, float high);
template <> __device__ __forceinline__ u32 round_pair<Bf16>(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
template <> __device__ __forceinline__ u32 round_pair<Fp16>(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// The 8 x 8 matrix of 16-bit elements that a warp holds, lane 4 g + t elements 2 t and 2 t + 1 of row g, transposed.
__device__ __forceinline__ u32 transpose(u32 pair) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

}  // namespace jitmx
