// MXFP8 weights in registers: one 32-bit word holds four E4M3 codes of one row, k = 0…3, even k in the low half-word
// and odd k in the high one; the upper byte of a half-word is pair 0 (k = 0, 1), the lower one pair 1 (k = 2, 3).
//
// A masked field is value * 2^-120 in bf16 (2^-8 in fp16), subnormals included; the multiplication that undoes this is
// exact. 7 integer instructions a word. The codes 0x7F and 0xFF (NaN) do not occur: packing gives their block a NaN
// scale.
#pragma once
#include "jitmx/math/scalar.cuh"

namespace jitmx {

template <class T> struct E4M3Field;
template <> struct E4M3Field<Bf16> {
  static constexpr u32 magnitude = 0x07F007F0u;
  static constexpr u32 restore = 0x7B807B80u;  // 2^120
  static constexpr int right = 4, left = 4;    // from the upper and the lower byte to the place of the field
};
template <> struct E4M3Field<Fp16> {
  static constexpr u32 magnitude = 0x3F803F80u;
  static constexpr u32 restore = 0x5C005C00u;  // 2^8
  static constexpr int right = 1, left = 7;
};

// The four values of a word as two pairs of T, times `multiplier` in both halves.
template <class T> __device__ __forceinline__ void decode_e4m3(u32 word, u32 multiplier, u32& first, u32& second) {
  using F = E4M3Field<T>;
  first = T::multiply(merge(word, 0x80008000u, word >> F::right, F::magnitude), multiplier);
  second = T::multiply(merge(word << 8, 0x80008000u, word << F::left, F::magnitude), multiplier);
}

// E8M0 byte `Index` of `bytes` as the multiplier of bf16 fields, scale * 2^120: exact for bytes 10 to 134, with which
// multiplier and products are normal bf16 numbers.
template <int Index> __device__ __forceinline__ u32 folded_scale_e4m3(u32 bytes) {
  return __byte_perm(bytes, 0u, 0x4040 + Index * 0x0101) * 128u + 120u * 0x00800080u;
}

}  // namespace jitmx
