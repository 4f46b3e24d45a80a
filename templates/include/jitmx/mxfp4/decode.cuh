// MXFP4 weights in registers: one 32-bit word holds eight E2M1 codes of one row, k = 0…7; pair i is k = 2i (low half of
// a register) and 2i + 1 (high half), the order in which activations lie in memory.
//
// Both encodings keep even k in the low half-word and odd k in the high one, so that masking a shifted word yields a
// pair. docs/packed-layout.md draws them.
//   nibble   pair i in bits 4i…4i+3 of each half: what block-scaled MMA (SM12x) takes as it is. 15 integer
//            instructions a word.
//   rotated  sign and magnitude of a pair are in their bf16 places after one rotation, by 4, 10 and 14 bits for pairs
//            1, 2 and 3; those of pair 0 after `w ^ w << 8`, since no four such patterns fit a half-word. 8 integer
//            instructions a word.
//
// A masked field is value * 2^-126 in bf16 (2^-14 in fp16); the multiplication that undoes this is exact.
#pragma once
#include "jitmx/math/scalar.cuh"

namespace jitmx {

template <class T> struct Field;
template <> struct Field<Bf16> {
  static constexpr u32 magnitude = 0x01C001C0u;
  static constexpr u32 restore = 0x7E807E80u;  // 2^126
};
template <> struct Field<Fp16> {
  static constexpr u32 magnitude = 0x0E000E00u;
  static constexpr u32 restore = 0x74007400u;  // 2^14
};
constexpr u32 kSigns = 0x80008000u;

struct Nibble {
  static __device__ __forceinline__ void fields(u32 w, u32 (&p)[4], Bf16) {
    constexpr u32 m = Field<Bf16>::magnitude;
    p[0] = merge(w << 12, kSigns, w << 6, m);
    p[1] = merge(w << 8, kSigns, w << 2, m);
    p[2] = merge(w << 4, kSigns, w >> 2, m);
    p[3] = merge(w, kSigns, w >> 6, m);
  }
  static __device__ __forceinline__ void fields(u32 w, u32 (&p)[4], Fp16) {
    constexpr u32 m = Field<Fp16>::magnitude;
    p[0] = merge(w << 12, kSigns, w << 9, m);
    p[1] = merge(w << 8, kSigns, w << 5, m);
    p[2] = merge(w << 4, kSigns, w << 1, m);
    p[3] = merge(w, kSigns, w >> 3, m);
  }
};

struct Rotated {
  // The word with a pair in its places in bf16, among bits of others.
  static __device__ __forceinline__ void raw(u32 w, u32 (&p)[4]) {
    p[0] = w ^ w << 8;
    p[1] = w << 4;
    p[2] = __funnelshift_l(w, w, 10);
    p[3] = __funnelshift_l(w, w, 14);
  }
  static __device__ __forceinline__ void fields(u32 w, u32 (&p)[4], Bf16) {
    raw(w, p);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] &= Field<Bf16>::magnitude | kSigns;
  }
  static __device__ __forceinline__ void fields(u32 w, u32 (&p)[4], Fp16) {
    raw(w, p);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = merge(p[i], kSigns, p[i] << 3, Field<Fp16>::magnitude);
  }
};

// The eight values of a word as four pairs of T, times `multiplier` in both halves. Without a scale the multiplier is
// Field<T>::restore, and the pairs are exact.
template <class T, class Encoding> __device__ __forceinline__ void decode(u32 word, u32 multiplier, u32 (&pairs)[4]) {
  Encoding::fields(word, pairs, T{});
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = T::multiply(pairs[i], multiplier);
}

// E8M0 byte `Index` of `bytes` as fp32, 0 (2^-127, an fp32 subnormal) and 255 (NaN) included.
template <int Index> __device__ __forceinline__ float scale(u32 bytes) {
  const u32 bits = (Index == 3 ? bytes >> 1 : bytes << (23 - 8 * Index)) & 0x7F800000u;
  return bits_to_float(bits == 0u ? 0x00400000u : bits == 0x7F800000u ? 0x7FFFFFFFu : bits);
}

// E8M0 byte `Index` of `bytes` as the multiplier of bf16 fields, scale * 2^126. For bytes 2 to 128 (scales 2^-125 to 2)
// the multiplier and every product of it with a field are normal bf16 numbers, so that decoding stays exact.
template <int Index> __device__ __forceinline__ u32 folded_scale(u32 bytes) {
  return __byte_perm(bytes, 0u, 0x4040 + Index * 0x0101) * 128u + 126u * 0x00800080u;
}

// The same of rows g and g + 8 in block I, each in a half of the register.
template <int I> __device__ __forceinline__ u32 folded_rows(u32 bytes) {
  const u32 raised = bytes + 0x7E7E7E7Eu;  // bytes up to 128 stay bytes
  return (I == 0 ? raised * 128u : raised >> 1) & 0x7F807F80u;
}

}  // namespace jitmx
