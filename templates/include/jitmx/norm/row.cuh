// RMSNorm of a row of 16-bit values by a block: in fp32, rounded once.
#pragma once
#include "jitmx/math/vector.cuh"
#include "jitmx/math/warp.cuh"
#include "jitmx/ptx/global.cuh"

namespace jitmx {

// The vectors of 8 values of a row, or of its weight, that a thread has; zeros past the end.
template <u32 kThreads, u32 kVectors> struct RowVectors {
  static constexpr u32 kWarps = kThreads / 32;
  static_assert(kWarps % 4 == 0, "sums of warps are read four at a time");

  Vec4 v[kVectors];

  // Not through .nc: ptxas puts such loads off until behind the wait for the previous kernel.
  static __device__ __forceinline__ RowVectors load(const Vec4* row, u32 vectors) {
    RowVectors out;
#pragma unroll
    for (u32 i = 0; i < kVectors; ++i) {
      const u32 at = threadIdx.x + i * kThreads;
      out.v[i] = load_or_zero(row + at, at < vectors);
    }
    return out;
  }

  // Of its values.
  template <class T> __device__ __forceinline__ float squares() const {
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (u32 i = 0; i < kVectors; ++i) {
      const u32 values[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        even = fmaf(T::low(values[j]), T::low(values[j]), even);
        odd = fmaf(T::high(values[j]), T::high(values[j]), odd);
      }
    }
    return even + odd;
  }

  // The sum of what the block's threads have, by way of `sums`, of which no thread may still be reading.
  static __device__ __forceinline__ float block_sum(float mine, float (&sums)[kWarps]) {
    const float warps = warp_sum(mine);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = warps;
    __syncthreads();
    float4 all = {};
#pragma unroll
    for (u32 i = 0; i < kWarps / 4; ++i) plus(all, reinterpret_cast<const float4*>(sums)[i]);
    return all.x + all.y + (all.z + all.w);
  }

  // Writes x times scale times weight.
  template <class T>
  static __device__ __forceinline__ void write(Vec4* row, u32 vectors, const RowVectors& x, const RowVectors& weight,
                                               float scale) {
#pragma unroll
    for (u32 i = 0; i < kVectors; ++i) {
      const u32 at = threadIdx.x + i * kThreads;
      const Vec4 out{normalized<T>(x.v[i].x, weight.v[i].x, scale), normalized<T>(x.v[i].y, weight.v[i].y, scale),
                     normalized<T>(x.v[i].z, weight.v[i].z, scale), normalized<T>(x.v[i].w, weight.v[i].w, scale)};
      if (at < vectors) row[at] = out;
    }
  }

 private:
  // Of a pair. Scaled first: the sum of huge squares is infinite and the scale 0 then, which times infinity would be no
  // number.
  template <class T> static __device__ __forceinline__ u32 normalized(u32 x, u32 weight, float scale) {
    return T::round_pair(T::low(x) * scale * T::low(weight), T::high(x) * scale * T::high(weight));
  }
};

}  // namespace jitmx
