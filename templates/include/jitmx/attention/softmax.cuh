// Softmax in base 2: logits from sums of q k, results of parts of the keys as one, and the sink.
#pragma once
#include "jitmx/ptx/arithmetic.cuh"
#include "jitmx/types.cuh"

namespace jitmx {

constexpr float kLog2E = 1.44269504088896341f;

__device__ __forceinline__ float minus_infinity() { return bits_to_float(0xFF800000u); }

// What powers are taken relative to: where there is no key yet they are of -inf, and never of NaN.
__device__ __forceinline__ float base_of(float most) { return most == minus_infinity() ? 0.0f : most; }

// Sums of q k become logits in base 2, `scale` > 0.
template <bool Capped> struct Logits {
  float scale;

  __device__ __forceinline__ Logits(float scale, float) : scale(scale * kLog2E) {}
  static __device__ __forceinline__ float capped(float s) { return s; }
  __device__ __forceinline__ float scaled(float s) const { return s * scale; }
  __device__ __forceinline__ float above(float s, float base) const { return fmaf(s, scale, -base); }
};
// cap * tanh(s * scale / cap), by a power and a reciprocal: tanh.approx has 11 bits.
template <> struct Logits<true> {
  float inner, cap;

  __device__ __forceinline__ Logits(float scale, float cap) : inner(2.0f * kLog2E * scale / cap), cap(cap * kLog2E) {}
  __device__ __forceinline__ float capped(float s) const {
    return cap * (1.0f - __fdividef(2.0f, exp2_fast(inner * s) + 1.0f));
  }
  static __device__ __forceinline__ float scaled(float s) { return s; }
  static __device__ __forceinline__ float above(float s, float base) { return s - base; }
};

// Four values of a row of a result, weighed by powers relative to `most`, and the sum of these. In memory a row is its
// D values, `most` and `sum`.
struct Merged {
  float most = minus_infinity(), sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};

  // Values `d` ... of a row that `row(i)` finds in part i.
  template <int D, class Find> __device__ __forceinline__ void add(const Find& row, int parts, int d) {
#pragma unroll 4
    for (int i = 0; i < parts; ++i) most = fmaxf(most, row(i)[D]);
    const float base = base_of(most);
#pragma unroll 4
    for (int i = 0; i < parts; ++i) {
      const float* const from = row(i);
      const float weight = exp2_fast(from[D] - base);
      const float4 v = *reinterpret_cast<const float4*>(from + d);
      sum = fmaf(weight, from[D + 1], sum);
      out.x = fmaf(weight, v.x, out.x);
      out.y = fmaf(weight, v.y, out.y);
      out.z = fmaf(weight, v.z, out.z);
      out.w = fmaf(weight, v.w, out.w);
    }
  }

  // A sink, a logit in base 2 without a value, joins; once a row.
  __device__ __forceinline__ void join(float sink) {
    const float before = most;
    most = fmaxf(most, sink);
    const float base = base_of(most), share = exp2_fast(before - base);
    sum = fmaf(sum, share, exp2_fast(sink - base));
    out.x *= share;
    out.y *= share;
    out.z *= share;
    out.w *= share;
  }

  // What values are multiplied by at the end; 0 for a row that saw nothing.
  __device__ __forceinline__ float factor(float scale) const { return sum == 0.0f ? 0.0f : __fdividef(scale, sum); }
};

}  // namespace jitmx
