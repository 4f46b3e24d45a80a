// bf16 and fp16 as storage types: pairs in one register, conversion to and from fp32.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

struct Bf16 {
  static __device__ __forceinline__ float low(u32 pair) { return bits_to_float(pair << 16); }
  static __device__ __forceinline__ float high(u32 pair) { return bits_to_float(pair & 0xFFFF0000u); }
  static __device__ __forceinline__ float widen(u16 value) { return bits_to_float(u32(value) << 16); }
  static __device__ __forceinline__ u16 round(float value) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
  }
  // a * b, exact where the product is. An fma with -0 keeps the sign of zero, and sm_80 has no mul.bf16x2.
  static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
    return out;
  }
  // D = A B + D, m16n8k16.
  static __device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

struct Fp16 {
  static __device__ __forceinline__ float widen(u16 value) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
    return out;
  }
  static __device__ __forceinline__ float low(u32 pair) { return widen(u16(pair & 0xFFFFu)); }
  static __device__ __forceinline__ float high(u32 pair) { return widen(u16(pair >> 16)); }
  static __device__ __forceinline__ u16 round(float value) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
  }
  static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  static __device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

}  // namespace jitmx
