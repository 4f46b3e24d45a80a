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

  // Values `d` ... of a row that `row(i)` finds in part i, of parts `first`, `first` + step ...; `AtOnce` are on
  // their way at a time.
  template <int D, int AtOnce, class Find>
  __device__ __forceinline__ void add(const Find& row, int first, int step, int parts, int d) {
    int i = first;  // there is one at least
#pragma unroll 1
    do {
      float2 weights[AtOnce];  // what a part's powers are relative to, and their sum
      float4 v[AtOnce];
#pragma unroll
      for (int j = 0; j < AtOnce; ++j) {
        weights[j] = {minus_infinity(), 0.0f};
        v[j] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (i + j * step < parts) {
          const float* const from = row(i + j * step);
          weights[j] = *reinterpret_cast<const float2*>(from + D);
          v[j] = *reinterpret_cast<const float4*>(from + d);
        }
      }
      const float before = most;
#pragma unroll
      for (int j = 0; j < AtOnce; ++j) most = fmaxf(most, weights[j].x);
      const float base = base_of(most);
      scale(exp2_fast(before - base));
#pragma unroll
      for (int j = 0; j < AtOnce; ++j) {
        const float weight = exp2_fast(weights[j].x - base);
        sum = fmaf(weight, weights[j].y, sum);
        out.x = fmaf(weight, v[j].x, out.x);
        out.y = fmaf(weight, v[j].y, out.y);
        out.z = fmaf(weight, v[j].z, out.z);
        out.w = fmaf(weight, v[j].w, out.w);
      }
      i += step * AtOnce;
    } while (i < parts);
  }

  // A sink, a logit in base 2 without a value, joins; once a row.
  __device__ __forceinline__ void join(float sink) {
    const float before = most;
    most = fmaxf(most, sink);
    const float base = base_of(most);
    scale(exp2_fast(before - base));
    sum += exp2_fast(sink - base);
  }

  __device__ __forceinline__ void scale(float by) {
    sum *= by;
    out.x *= by;
    out.y *= by;
    out.z *= by;
    out.w *= by;
  }

  // What values are multiplied by at the end; 0 for a row that saw nothing.
  __device__ __forceinline__ float factor(float scale) const { return sum == 0.0f ? 0.0f : __fdividef(scale, sum); }
};

}  // namespace jitmx
