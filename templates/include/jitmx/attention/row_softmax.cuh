// Softmax of the rows of a warp, tile of keys by tile of keys, and the values that it weighs.
#pragma once
#include "jitmx/attention/softmax.cuh"
#include "jitmx/math/warp.cuh"

namespace jitmx {

// Of a lane's columns, 2 t and 2 t + 1 of each eight, those below `limit`: two bits of each eight.
template <int Columns> __device__ __forceinline__ u32 columns_below(int limit, int t) {
  static_assert(Columns <= 128, "two bits for each eight in a word");
  const int there = min(max(limit, 0), Columns);
  return u32((1ull << (there / 8 * 2 + min(max(there % 8 - 2 * t, 0), 2))) - 1ull);
}

// Rows g and g + 8 of each tile of 16 (lane 4 g + t): values weighed by powers relative to `base`, and the sum of this
// lane's powers. The base follows the largest logit, in base 2, only where that has grown by more than kSlack since:
// powers stay far from their type's end, and sums are rarely scaled anew.
template <int Tiles, int D> struct RowSoftmax {
  static constexpr float kSlack = 8.0f;
  template <int Keys> using Scores = float[Tiles][Keys / 8][4];

  float out[Tiles][D / 8][4] = {};
  float base[Tiles][2], sum[Tiles][2] = {};

  __device__ __forceinline__ RowSoftmax() {
#pragma unroll
    for (int m = 0; m < Tiles; ++m) base[m][0] = base[m][1] = minus_infinity();
  }

  // Hides keys that are later than a row's token `own`, or no longer in its window; `first` is the tile's first key.
  template <bool Windowed, int Eights>
  static __device__ __forceinline__ void hide(float (&s)[Tiles][Eights][4], const int (&own)[Tiles][2], int first,
                                              int window, int t) {
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int after = own[m][half] + 1 - first;
        u32 seen = columns_below<8 * Eights>(after, t);
        if (Windowed) seen &= ~columns_below<8 * Eights>(after - window, t);
#pragma unroll
        for (int j = 0; j < Eights; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(seen >> (2 * j + e) & 1u)) s[m][j][2 * half + e] = minus_infinity();
      }
  }

  // The largest logit of each row in this lane. Of one half, here and below, rows g + 8 are never read.
  template <class Logit, int Eights>
  static __device__ __forceinline__ void largest(const float (&s)[Tiles][Eights][4], const Logit& logit,
                                                 float (&most)[Tiles][2], int halves = 2) {
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half >= halves) break;
        float found = s[m][0][2 * half];
#pragma unroll
        for (int j = 0; j < Eights; ++j) found = fmaxf(found, fmaxf(s[m][j][2 * half], s[m][j][2 * half + 1]));
        most[m][half] = logit.scaled(found);
      }
  }

  // Takes the largest logits of the first tile, by lanes: nothing is weighed yet.
  __device__ __forceinline__ void begin(const float (&most)[Tiles][2], int halves = 2) {
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (half < halves) base[m][half] = of_quad(most[m][half]);
  }
  // The same of another tile. True where the base of a row of the warp has to follow: sums of powers
  // are then scaled anew, and weighed values are to be, by `factors`.
  __device__ __forceinline__ bool raise(const float (&most)[Tiles][2], float (&factors)[Tiles][2], int halves = 2) {
    bool grown = false;
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
      grown |= most[m][0] > base[m][0] + kSlack || (halves > 1 && most[m][1] > base[m][1] + kSlack);
    if (!__any_sync(kFullWarp, grown)) return false;
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors[m][half] = 1.0f;
        if (half >= halves) break;
        const float largest = of_quad(most[m][half]);
        const float next = largest > base[m][half] + kSlack ? largest : base[m][half];
        factors[m][half] = exp2_fast(base[m][half] - base_of(next));
        base[m][half] = next;
        sum[m][half] *= factors[m][half];
      }
    return true;
  }
  __device__ __forceinline__ void scale(const float (&factors)[Tiles][2]) {
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
      for (int j = 0; j < D / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][j][e] *= factors[m][e / 2];
  }

  // Logits become powers, which join the sum.
  template <class Logit, int Eights>
  __device__ __forceinline__ void power(float (&s)[Tiles][Eights][4], const Logit& logit, int halves = 2) {
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half >= halves) break;
        const float relative = base_of(base[m][half]);
#pragma unroll
        for (int j = 0; j < Eights; ++j)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s[m][j][e] = exp2_fast(logit.above(s[m][j][e], relative));
            sum[m][half] += s[m][j][e];
          }
      }
  }

 private:
  static __device__ __forceinline__ float of_quad(float most) {
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
    return fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
  }
};

// Sinks of query heads: none, fp32, or T.
struct NoSink {};
struct Fp32Sink {
  static __device__ __forceinline__ float load(const void* sinks, int head) {
    return __ldg(static_cast<const float*>(sinks) + head);
  }
};
template <class T> struct SinkOf {
  static __device__ __forceinline__ float load(const void* sinks, int head) {
    return T::widen(__ldg(static_cast<const u16*>(sinks) + head));
  }
};

// What values of a row are multiplied by at the end, where the sink joins: `base` and `sum` are those of the whole row.
template <class Sink>
__device__ __forceinline__ float row_factor(const void* sinks, int head, float base, float sum, float v_scale) {
  Merged merged;
  merged.most = base;
  merged.sum = sum;
  merged.out.x = 1.0f;
  merged.join(Sink::load(sinks, head) * kLog2E);
  return merged.factor(v_scale) * merged.out.x;
}
template <>
__device__ __forceinline__ float row_factor<NoSink>(const void*, int, float, float sum, float v_scale) {
  return sum == 0.0f ? 0.0f : __fdividef(v_scale, sum);
}

}  // namespace jitmx
