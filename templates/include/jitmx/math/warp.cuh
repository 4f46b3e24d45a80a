// Reductions and transposes over the lanes of a warp, by shuffles.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

constexpr u32 kFullWarp = 0xFFFFFFFFu;

// A value that is the same in all lanes: the compiler keeps it in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kFullWarp, value, 0); }

// Sum over the lanes of a warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

// Sum over the lanes of a quad, in every lane.
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(kFullWarp, value, 1);
  return value + __shfl_xor_sync(kFullWarp, value, 2);
}

// Element j of lane i of each quad becomes element i of lane j.
__device__ __forceinline__ void exchange_in_quad(Vec4& v, int lane) {
  const bool odd = lane & 1, high = lane & 2;
  u32 a = __shfl_xor_sync(kFullWarp, odd ? v.x : v.y, 1);
  u32 b = __shfl_xor_sync(kFullWarp, odd ? v.z : v.w, 1);
  v = odd ? Vec4{a, v.y, b, v.w} : Vec4{v.x, a, v.z, b};
  a = __shfl_xor_sync(kFullWarp, high ? v.x : v.z, 2);
  b = __shfl_xor_sync(kFullWarp, high ? v.y : v.w, 2);
  v = high ? Vec4{a, b, v.z, v.w} : Vec4{v.x, v.y, a, b};
}

}  // namespace jitmx
