// Sixteen-bit values to MX codes, eight at a time, in the order in which block-scaled MMA takes them beside packed
// MXFP4 weights (docs/packed-layout.md): codes of 8 bits as bytes k = 0, 4, 1, 5 and 2, 6, 3, 7 of two words, codes of
// 4 bits as nibbles k = 0, 2, 4, 6, 1, 3, 5, 7 of one. Four neighbouring lanes hold the 32 values that share a scale.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/mx/minifloat.cuh"
#include "jitmx/ptx/convert.cuh"

namespace jitmx {

enum class ScaleRule { Floor, Ceil, Even };

// E8M0 byte for a block whose largest magnitude has these fp32 bits; a NaN or an infinity travels in the scale.
template <ScaleRule Rule, int Emax, int Mantissa> __device__ __forceinline__ u32 scale_byte(u32 bits) {
  constexpr u32 kUp = Rule == ScaleRule::Floor ? 0u : Rule == ScaleRule::Ceil ? 0x007FFFFFu : 1u << (22 - Mantissa);
  const u32 byte = max(int((bits + kUp) >> 23) - Emax, 0);
  return bits >= 0x7F800000u ? 255u : bits == 0u ? 127u : byte;
}

// 2^(127 - scale). Scales that are numbers end at 253.
__device__ __forceinline__ float reciprocal_scale(u32 scale) { return bits_to_float((254u - scale) << 23); }

template <class Element, int SignBit> __device__ __forceinline__ u32 encode_one(float x, float reciprocal) {
  return Element::encode_scaled(Element::to_scaled(fabsf(x) * reciprocal)) | (__float_as_uint(x) >> 31) << SignBit;
}

template <class Element, int SignBit>
__device__ __forceinline__ void encode_bytes(const float (&x)[8], float reciprocal, u32 (&words)[2]) {
  u32 c[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i] = encode_one<Element, SignBit>(x[i], reciprocal);
#pragma unroll
  for (int i = 0; i < 2; ++i) words[i] = c[2 * i] | c[2 * i + 4] << 8 | c[2 * i + 1] << 16 | c[2 * i + 5] << 24;
}

// A format: bits of a code as stored, words that eight take, emax, mantissa bits. `encode` gives the codes of eight
// values of type T under a scale byte; Native says that the target converts by instruction, a pair by `to_pair`.
template <class Element, int SignBit, int Emax, u32 (*to_pair)(float, float)> struct ByteFormat {
  static constexpr int kBits = 8, kWords = 2, kEmax = Emax, kMantissa = 3;

  template <class T, bool Native>
  static __device__ __forceinline__ void encode(const float (&x)[8], u32 scale, u32 (&words)[2]) {
    const float reciprocal = reciprocal_scale(scale);
    if constexpr (Native) {
#pragma unroll
      for (int i = 0; i < 2; ++i) words[i] = to_pair(x[2 * i] * reciprocal, x[2 * i + 4] * reciprocal) |
                                             to_pair(x[2 * i + 1] * reciprocal, x[2 * i + 5] * reciprocal) << 16;
    } else {
      encode_bytes<Element, SignBit>(x, reciprocal, words);
    }
  }
};
struct Mxfp8 : ByteFormat<E4M3, 7, 8, to_e4m3x2> {};
struct Mxfp6 : ByteFormat<E2M3, 5, 2, to_e2m3x2> {};

struct Mxfp4 {
  static constexpr int kBits = 4, kWords = 1, kEmax = 2, kMantissa = 1;

  template <class T, bool Native>
  static __device__ __forceinline__ void encode(const float (&x)[8], u32 scale, u32 (&words)[1]) {
    if constexpr (Native) {
      const float r = reciprocal_scale(scale);
      const float ordered[8] = {x[0] * r, x[2] * r, x[4] * r, x[6] * r, x[1] * r, x[3] * r, x[5] * r, x[7] * r};
      words[0] = to_e2m1x8(ordered);
    } else {
      encode_portably(x, scale, words[0], T{});
    }
  }

 private:
  // Two values a register, as fp16 scaled by 2^-14: there E2M1's subnormals lie on those of fp16, and the 8 bits of a
  // bf16 are kept exactly down to the smallest tie. 2^(127 - scale) 2^-14 is a subnormal for the largest scales.
  static __device__ __forceinline__ void encode_portably(const float (&x)[8], u32 scale, u32& word, Bf16) {
    const float multiplier = bits_to_float(scale < 240u ? (240u - scale) << 23 : 0x00400000u >> (scale - 240u));
    word = 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float odd = x[2 * i + 1] * multiplier, even = x[2 * i] * multiplier;
      const u32 both = to_fp16x2(even, odd);
      const u32 magnitude = __vminu2(both & 0x7FFF7FFFu, 0x0E000E00u);
      const u32 rounded = magnitude + 0x00FF00FFu + ((magnitude >> 9) & 0x00010001u);
      const u32 code = (rounded << 3 & 0x70007000u) | (both & 0x80008000u);  // in the upper four bits of each half
      word |= code >> (12 - 4 * i);
    }
  }

  static __device__ __forceinline__ void encode_portably(const float (&x)[8], u32 scale, u32& word, Fp16) {
    const float reciprocal = reciprocal_scale(scale);
    word = 0u;
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= encode_one<E2M1, 3>(x[i], reciprocal) << (4 * (i / 2) + 16 * (i % 2));
  }
};

// Codes and scale byte of a lane's eight values of a block; its four lanes, one aligned group of the warp, take part
// together.
template <class Format, class T, ScaleRule Rule, bool Native>
__device__ __forceinline__ u32 quantize_eight(const Vec4& v, u32 (&words)[Format::kWords]) {
  // Bits of magnitudes order as the magnitudes do: two to a register.
  const u32 halves =
      __vmaxu2(__vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu), __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu));
  u32 largest = max(halves & 0xFFFFu, halves >> 16);
  largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
  largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
  const u32 scale = scale_byte<Rule, Format::kEmax, Format::kMantissa>(__float_as_uint(T::widen(u16(largest))));
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
  float x[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = T::low(pairs[i]);
    x[2 * i + 1] = T::high(pairs[i]);
  }
  Format::template encode<T, Native>(x, scale, words);
  if (scale == 255u)
#pragma unroll
    for (int i = 0; i < Format::kWords; ++i) words[i] = 0u;
  return scale;
}

}  // namespace jitmx
