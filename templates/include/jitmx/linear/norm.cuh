// RMSNorm of X on its way to shared memory: x g, rounded once, and sums of x^2, by whose root a product of x g is
// divided.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

template <class T> __device__ __forceinline__ u32 weighted(u32 x, u32 g) {
  return u32(T::round(T::low(x) * T::low(g))) | u32(T::round(T::high(x) * T::high(g))) << 16;
}

template <class T> __device__ __forceinline__ Vec4 weighted(const Vec4& x, const Vec4& g) {
  return Vec4{weighted<T>(x.x, g.x), weighted<T>(x.y, g.y), weighted<T>(x.z, g.z), weighted<T>(x.w, g.w)};
}

// Sum of the squares of 8 values.
template <class T> __device__ __forceinline__ float squares(const Vec4& v) {
  const u32 pair[4] = {v.x, v.y, v.z, v.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum = fmaf(T::high(pair[i]), T::high(pair[i]), fmaf(T::low(pair[i]), T::low(pair[i]), sum));
  return sum;
}

}  // namespace jitmx
