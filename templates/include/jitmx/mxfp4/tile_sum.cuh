// Sums of packed tiles times 8 columns of activations, with m16n8k16.
#pragma once
#include "jitmx/mxfp4/decode.cuh"

namespace jitmx {

struct alignas(16) Quad { float v[4]; };

// Rows g and g + 8 of W against x^T; element i of a sum is row g + 8 (i / 2), column 2 t + i % 2. Scales are folded
// into the multiplication that decoding needs anyway (Folded), or multiply the sum over a block of 32 in fp32, exact
// for any byte.
template <class T, class Encoding, bool Folded> class TileSum {
 public:
  __device__ __forceinline__ void add(const Vec4& w, u32 scales, const Vec4& x0, const Vec4& x1) {
    block<0>(w.x, w.y, scales, x0);
    block<1>(w.z, w.w, scales, x1);
  }
  __device__ __forceinline__ Quad total() const {
    Quad out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.v[i] = sum_[0][i] + sum_[1][i];
    return out;
  }

 private:
  // Block I of a tile. Each has its own sum, so that two chains of MMA are in flight.
  template <int I> __device__ __forceinline__ void block(u32 low, u32 high, u32 scales, const Vec4& x) {
    u32 a[4], b[4];
    if constexpr (Folded) {
      decode<T, Encoding>(low, folded_scale<I>(scales), a);
      decode<T, Encoding>(high, folded_scale<I + 2>(scales), b);
      T::mma(sum_[I], a[0], b[0], a[1], b[1], x.x, x.y);
      T::mma(sum_[I], a[2], b[2], a[3], b[3], x.z, x.w);
    } else {
      decode<T, Encoding>(low, Field<T>::restore, a);
      decode<T, Encoding>(high, Field<T>::restore, b);
      float d[4] = {};
      T::mma(d, a[0], b[0], a[1], b[1], x.x, x.y);
      T::mma(d, a[2], b[2], a[3], b[3], x.z, x.w);
      const float low_scale = scale<I>(scales), high_scale = scale<I + 2>(scales);
      sum_[I][0] = fmaf(low_scale, d[0], sum_[I][0]);
      sum_[I][1] = fmaf(low_scale, d[1], sum_[I][1]);
      sum_[I][2] = fmaf(high_scale, d[2], sum_[I][2]);
      sum_[I][3] = fmaf(high_scale, d[3], sum_[I][3]);
    }
  }

 protected:
  float sum_[2][4] = {};
};

}  // namespace jitmx
