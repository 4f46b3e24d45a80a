// Epilogue of interleaved gate and up rows of W: a gate row is 8 above its up row, in one tile, so that a lane has
// both, and the two give one feature of Y.
#pragma once
#include "jitmx/epilogue/activation.cuh"
#include "jitmx/epilogue/output.cuh"

namespace jitmx {

template <class T, bool kNorm, int kM> struct SwigluEpilogue {
  Output out;

  // Arguments are those of SumEpilogue::store; there are no ranks.
  template <class Normalizer>
  __device__ __forceinline__ void store(int n, int m, const float4& sum, Normalizer normalizer, u64 (&)[2]) const {
    one(n, m, sum.x, sum.z, normalizer);
    if constexpr (kM > 1) one(n, m + 1, sum.y, sum.w, normalizer);
  }

 private:
  template <class Normalizer>
  __device__ __forceinline__ void one(int n, int m, float gate, float up, Normalizer normalizer) const {
    if (n < out.n && (m == 0 || m < out.rows)) {
      if constexpr (kNorm) {
        const float factor = normalizer(m);
        gate *= factor;
        up *= factor;
      }
      const u64 at = (u64)m * (out.n / 2) + n / 16 * 8 + n % 16;
      static_cast<u16*>(out.y)[at] = T::round(activate<Activation::Silu>(gate, up, 0.f, 0.f));
    }
  }
};

}  // namespace jitmx
