// bf16 and fp16 as storage types: pairs in one register, conversion to and from fp32, products.
#pragma once
#include "jitmx/mma/m16n8k16.cuh"
#include "jitmx/ptx/arithmetic.cuh"
#include "jitmx/ptx/convert.cuh"

namespace jitmx {

struct Bf16 {
  static __device__ __forceinline__ float low(u32 pair) { return bits_to_float(pair << 16); }
  static __device__ __forceinline__ float high(u32 pair) { return bits_to_float(pair & 0xFFFF0000u); }
  static __device__ __forceinline__ float widen(u16 value) { return bits_to_float(u32(value) << 16); }
  static __device__ __forceinline__ u16 round(float value) { return to_bf16(value); }
  // Two values, `first` in the low half.
  static __device__ __forceinline__ u32 round_pair(float first, float second) { return to_bf16x2(first, second); }
  // a * b, exact where the product is. An fma with -0 keeps the sign of zero, and sm_80 has no mul.bf16x2.
  static __device__ __forceinline__ u32 multiply(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000u); }
  // D = A B + D, m16n8k16.
  static __device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_bf16(d, a0, a1, a2, a3, b0, b1);
  }
};

struct Fp16 {
  static __device__ __forceinline__ float widen(u16 value) { return from_fp16(value); }
  static __device__ __forceinline__ float low(u32 pair) { return widen(u16(pair & 0xFFFFu)); }
  static __device__ __forceinline__ float high(u32 pair) { return widen(u16(pair >> 16)); }
  static __device__ __forceinline__ u16 round(float value) { return to_fp16(value); }
  static __device__ __forceinline__ u32 round_pair(float first, float second) { return to_fp16x2(first, second); }
  static __device__ __forceinline__ u32 multiply(u32 a, u32 b) { return multiply_fp16x2(a, b); }
  static __device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_fp16(d, a0, a1, a2, a3, b0, b1);
  }
};

// 2^64 times eight values: bf16 below 2^63 whose products with fields that lack an exponent are to stay normal.
template <class T> __device__ __forceinline__ Vec4 raised(const Vec4& v) {
  constexpr u32 kRaise = 0x5F805F80u;
  return Vec4{T::multiply(v.x, kRaise), T::multiply(v.y, kRaise), T::multiply(v.z, kRaise), T::multiply(v.w, kRaise)};
}

}  // namespace jitmx
