// What becomes of complete sums where Y is a pair (residual_pair.cuh): its second tensor lies behind the first, and that of the
// residual where `spare` says.
#pragma once
#include "jitmx/ptx.cuh"
#include "jitmx/scalar.cuh"

namespace jitmx {

template <class T, bool kNorm, bool kBias, bool kResidual, int kM> struct PairEpilogue {
  const LinearArguments& args;

  // Arguments are those of SumEpilogue::store; there are no ranks.
  template <class Normalizer>
  __device__ __forceinline__ void store(int n, int m, const float4& sum, Normalizer normalizer, u64 (&)[2]) const {
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i += kM > 1 ? 1 : 2) one(n + i / 2 * 8, m + i % 2, values[i], normalizer);
  }

  // What is added to the sums that go with n and m, zero past the last: for those who ask for it before they have the sums.
  __device__ __forceinline__ float4 residual(int n, int m) const {
    float values[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i += kM > 1 ? 1 : 2)
      if (inside(n + i / 2 * 8, m + i % 2)) values[i] = carried((u64)(m + i % 2) * args.n + n + i / 2 * 8);
    return make_float4(values[0], values[1], values[2], values[3]);
  }

 private:
  __device__ __forceinline__ bool inside(int n, int m) const { return n < args.n && (m == 0 || m < args.rows); }
  __device__ __forceinline__ float carried(u64 at) const {
    return T::widen(static_cast<const u16*>(args.residual)[at]) + T::widen(static_cast<const u16*>(args.residual_lo)[at]);
  }
  template <class Normalizer>
  __device__ __forceinline__ void one(int n, int m, float value, Normalizer normalizer) const {
    if (!inside(n, m)) return;
    const u64 at = (u64)m * args.n + n;
    if constexpr (kNorm) value *= normalizer(m);
    if constexpr (kBias) value += T::widen(static_cast<const u16*>(args.bias)[n]);
    if constexpr (kResidual) value += carried(at);
    u16* const y = static_cast<u16*>(args.y) + at;
    const u16 kept = T::round(value);
    y[0] = kept;
    y[(u64)args.rows * args.n] = T::round(value - T::widen(kept));
  }
};

}  // namespace jitmx
