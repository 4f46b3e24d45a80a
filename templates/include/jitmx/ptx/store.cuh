// Stores to global memory in one instruction. The compiler takes that of a struct apart into words where it steps the
// address through a loop.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ void store_vector(Vec4* address, const Vec4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_vector(uint2* address, const uint2& v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(address), "r"(v.x), "r"(v.y) : "memory");
}

}  // namespace jitmx
