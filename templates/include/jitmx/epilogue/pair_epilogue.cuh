// Epilogue where Y is a hi/lo pair (epilogue/residual_pair.cuh): its low part lies after the first tensor, that of the
// residual at `residual_lo`.
#pragma once
#include "jitmx/epilogue/output.cuh"

namespace jitmx {

template <class T, bool kNorm, bool kBias, bool kResidual, int kM> struct PairEpilogue {
  Output out;

  // Arguments are those of SumEpilogue::store; there are no ranks.
  template <class Normalizer>
  __device__ __forceinline__ void store(int n, int m, const float4& sum, Normalizer normalizer, u64 (&)[2]) const {
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i += kM > 1 ? 1 : 2) one(n + i / 2 * 8, m + i % 2, values[i], normalizer);
  }

  // The residual of the sums that go with n and m, zero past the last: for kernels that prefetch it before the sums are
  // complete.
  __device__ __forceinline__ float4 residual(int n, int m) const {
    float values[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i += kM > 1 ? 1 : 2)
      if (inside(n + i / 2 * 8, m + i % 2)) values[i] = residual_at((u64)(m + i % 2) * out.n + n + i / 2 * 8);
    return make_float4(values[0], values[1], values[2], values[3]);
  }

 private:
  __device__ __forceinline__ bool inside(int n, int m) const { return n < out.n && (m == 0 || m < out.rows); }
  __device__ __forceinline__ float residual_at(u64 at) const {
    return T::widen(static_cast<const u16*>(out.residual)[at]) + T::widen(static_cast<const u16*>(out.residual_lo)[at]);
  }
  template <class Normalizer>
  __device__ __forceinline__ void one(int n, int m, float value, Normalizer normalizer) const {
    if (!inside(n, m)) return;
    const u64 at = (u64)m * out.n + n;
    if constexpr (kNorm) value *= normalizer(m);
    if constexpr (kBias) value += T::widen(static_cast<const u16*>(out.bias)[n]);
    if constexpr (kResidual) value += residual_at(at);
    u16* const y = static_cast<u16*>(out.y) + at;
    const u16 kept = T::round(value);
    y[0] = kept;
    y[(u64)out.rows * out.n] = T::round(value - T::widen(kept));
  }
};

}  // namespace jitmx
