// Values in device memory that carry their own readiness: what is zero has not been written. A zero is written as -0, which
// adds and multiplies as it does.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

__device__ __forceinline__ void post(u16* to, u16 bf16) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;"
               :: "l"(__cvta_generic_to_global(to)), "h"(bf16 == 0 ? u16(0x8000u) : bf16) : "memory");
}
__device__ __forceinline__ void post(float* to, float value) {
  const u32 bits = __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;"
               :: "l"(__cvta_generic_to_global(to)), "r"(bits == 0u ? 0x80000000u : bits) : "memory");
}

__device__ __forceinline__ Vec4 look(const Vec4* at) {
  Vec4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(__cvta_generic_to_global(at)) : "memory");
  return v;
}

__device__ __forceinline__ void clear(Vec4* at) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %1, %1, %1};" :: "l"(__cvta_generic_to_global(at)), "r"(0u) : "memory");
}

// Whether one of the values is not there: of 16 bits each, or of 32.
__device__ __forceinline__ bool lacks_half(const Vec4& v) {
  const u32 x = (v.x - 0x00010001u) & ~v.x, y = (v.y - 0x00010001u) & ~v.y;
  const u32 z = (v.z - 0x00010001u) & ~v.z, w = (v.w - 0x00010001u) & ~v.w;
  return ((x | y | z | w) & 0x80008000u) != 0u;
}
__device__ __forceinline__ bool lacks_word(const Vec4& v) { return v.x == 0u || v.y == 0u || v.z == 0u || v.w == 0u; }

// Whether this launch is an even or an odd one; each of its blocks asks once. `turn` starts at zero.
__device__ __forceinline__ u32 take_turn(u32* turn, u32 blocks) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before) : "l"(__cvta_generic_to_global(turn)), "r"(2u * blocks - 1u) : "memory");
  return before >= blocks;
}

}  // namespace jitmx
