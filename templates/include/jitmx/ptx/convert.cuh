// Conversions between fp32 and narrow floats, and halves of registers.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ u16 to_bf16(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}
__device__ __forceinline__ u16 to_fp16(float value) {
  u16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}
__device__ __forceinline__ float from_fp16(u16 value) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
}

// Two values, `low` in the low half.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ u32 to_fp16x2(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// Codes of two values, that of `low` in the low byte (sm_89 and newer; E2M3 on sm_120a).
__device__ __forceinline__ u32 to_e4m3x2(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ __forceinline__ u32 to_e2m3x2(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e2m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
// Two values of their codes, that of the low byte in the low half (sm_89 and newer).
__device__ __forceinline__ u32 from_e4m3x2(u16 codes) {
  u32 values;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(values) : "h"(codes));
  return values;
}
// Codes of eight values in the order of their nibbles (sm_120a).
__device__ __forceinline__ u32 to_e2m1x8(const float (&x)[8]) {
  u32 codes;
  asm("{\n"
      ".reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d};\n"
      "}\n"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return codes;
}

// One half of a register in both.
__device__ __forceinline__ u32 both_low(u32 pair) {
  u32 out;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}\n" : "=r"(out) : "r"(pair));
  return out;
}
__device__ __forceinline__ u32 both_high(u32 pair) {
  u32 out;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}\n" : "=r"(out) : "r"(pair));
  return out;
}

// A word of 64 bits of its halves.
__device__ __forceinline__ u64 join(u32 low, u32 high) {
  u64 out;
  asm("mov.b64 %0, {%1, %2};" : "=l"(out) : "r"(low), "r"(high));
  return out;
}

}  // namespace jitmx
