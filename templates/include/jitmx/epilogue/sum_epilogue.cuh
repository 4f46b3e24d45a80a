// Epilogue of complete sums: normalizer, bias and residual, and then Y or the rank of each row's largest value.
#pragma once
#include "jitmx/epilogue/argmax.cuh"
#include "jitmx/epilogue/output.cuh"

namespace jitmx {

template <class T, bool kNorm, bool kBias, bool kResidual, bool kArgmax, int kM> struct SumEpilogue {
  Output out;

  // Rows `n` and `n` + 8 of W, for rows m and m + 1 of X, whose greatest ranks so far are `best`; normalizer(m) is the
  // factor that a sum of row m of X times its norm weight still lacks.
  template <class Normalizer>
  __device__ __forceinline__ void store(int n, int m, const float4& sum, Normalizer normalizer, u64 (&best)[2]) const {
    one(n, m, sum.x, normalizer, best[0]);
    one(n + 8, m, sum.z, normalizer, best[0]);
    if constexpr (kM > 1) {
      one(n, m + 1, sum.y, normalizer, best[1]);
      one(n + 8, m + 1, sum.w, normalizer, best[1]);
    }
  }

 private:
  template <class Normalizer>
  __device__ __forceinline__ void one(int n, int m, float value, Normalizer normalizer, u64& best) const {
    if (n < out.n && (m == 0 || m < out.rows)) {
      if constexpr (kNorm) value *= normalizer(m);
      if constexpr (kBias) value += T::widen(static_cast<const u16*>(out.bias)[n]);
      if constexpr (kResidual) value += T::widen(static_cast<const u16*>(out.residual)[(u64)m * out.n + n]);
      if constexpr (kArgmax)
        best = greater(best, ranked(value, n));
      else
        static_cast<u16*>(out.y)[(u64)m * out.n + n] = T::round(value);
    }
  }
};

}  // namespace jitmx
