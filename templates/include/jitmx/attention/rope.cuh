// Rotary embedding of vectors of eight values.
#pragma once
#include "jitmx/math/scalar.cuh"

namespace jitmx {

// Eight values of a head in fp32.
struct Eight {
  float x[8];
};

template <class T> __device__ __forceinline__ Eight widened(const Vec4& v) {
  return {{T::low(v.x), T::high(v.x), T::low(v.y), T::high(v.y), T::low(v.z), T::high(v.z), T::low(v.w), T::high(v.w)}};
}
template <class T> __device__ __forceinline__ Vec4 rounded(const Eight& v) {
  return {T::round_pair(v.x[0], v.x[1]), T::round_pair(v.x[2], v.x[3]), T::round_pair(v.x[4], v.x[5]),
          T::round_pair(v.x[6], v.x[7])};
}

// `Count` numbers of a table, whose elements are T or, for void, float, as they lie there: half the registers, and they
// are widened while the values that they rotate are in flight. The address is a multiple of their bytes.
template <class T, int Count> struct TableRow {
  uint2 words[Count / 4];

  __device__ __forceinline__ void load(const void* table, u64 at) {
    const uint2* const source = reinterpret_cast<const uint2*>(static_cast<const u16*>(table) + at);
#pragma unroll
    for (int i = 0; i < Count / 4; ++i) words[i] = __ldg(source + i);
  }
  __device__ __forceinline__ float operator[](int i) const {
    const u32 pair = i / 2 % 2 ? words[i / 4].y : words[i / 4].x;
    return i % 2 ? T::high(pair) : T::low(pair);
  }
};
template <int Count> struct TableRow<void, Count> {
  float values[Count];

  __device__ __forceinline__ void load(const void* table, u64 at) {
    const float* const source = static_cast<const float*>(table) + at;
#pragma unroll
    for (int i = 0; i < Count; i += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(source + i));
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ float operator[](int i) const { return values[i]; }
};

struct NoRope {
  static constexpr bool kRotates = false;
  struct Angles {};
  static __device__ __forceinline__ Angles angles(const void*, long long, int) { return {}; }
  // What else of the head a vector is rotated with: where it starts, or -1.
  static __device__ __forceinline__ int partner(int) { return -1; }
  static __device__ __forceinline__ void rotate(Eight&, const Eight&, const Angles&, int) {}
};

// The first `Rotary` values of a head in two halves, each value with the one at the same place of the other half.
template <class Table, int Rotary> struct Neox {
  static constexpr bool kRotates = true;
  static constexpr int kHalf = Rotary / 2;
  struct Angles {
    TableRow<Table, 8> cos, sin;
  };
  // Of the eight values from `d` on, for a token at `position`.
  static __device__ __forceinline__ Angles angles(const void* table, long long position, int d) {
    Angles found = {};
    if (d < Rotary) {
      const u64 at = u64(position) * Rotary + u32(d < kHalf ? d : d - kHalf);
      found.cos.load(table, at);
      found.sin.load(table, at + kHalf);
    }
    return found;
  }
  static __device__ __forceinline__ int partner(int d) { return d >= Rotary ? -1 : d < kHalf ? d + kHalf : d - kHalf; }
  static __device__ __forceinline__ void rotate(Eight& v, const Eight& other, const Angles& angles, int d) {
    if (d >= Rotary) return;
    const float sign = d < kHalf ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] = fmaf(sign * other.x[i], angles.sin[i], v.x[i] * angles.cos[i]);
  }
};

// The same of neighbours.
template <class Table, int Rotary> struct Interleaved {
  static constexpr bool kRotates = true;
  struct Angles {
    TableRow<Table, 4> cos, sin;
  };
  static __device__ __forceinline__ Angles angles(const void* table, long long position, int d) {
    Angles found = {};
    if (d < Rotary) {
      const u64 at = u64(position) * Rotary + u32(d) / 2u;
      found.cos.load(table, at);
      found.sin.load(table, at + Rotary / 2);
    }
    return found;
  }
  static __device__ __forceinline__ int partner(int) { return -1; }
  static __device__ __forceinline__ void rotate(Eight& v, const Eight&, const Angles& angles, int d) {
    if (d >= Rotary) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = v.x[2 * i], b = v.x[2 * i + 1];
      v.x[2 * i] = fmaf(-b, angles.sin[i], a * angles.cos[i]);
      v.x[2 * i + 1] = fmaf(a, angles.sin[i], b * angles.cos[i]);
    }
  }
};

// Eight values of a head from `d` on, behind the embedding.
template <class T, class Rope>
__device__ __forceinline__ Vec4 rotated(const u16* head, int d, const typename Rope::Angles& angles) {
  const Vec4 own = *reinterpret_cast<const Vec4*>(head + d);
  if constexpr (!Rope::kRotates) return own;
  const int partner = Rope::partner(d);
  Eight v = widened<T>(own), other{};
  if (partner >= 0) other = widened<T>(*reinterpret_cast<const Vec4*>(head + partner));
  Rope::rotate(v, other, angles, d);
  return rounded<T>(v);
}

}  // namespace jitmx
