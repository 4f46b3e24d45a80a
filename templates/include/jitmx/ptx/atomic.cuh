// Global memory that blocks share while they run: loads and stores with an order, and atomic additions.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}
__device__ __forceinline__ u32 load_relaxed(const u32* address) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}
__device__ __forceinline__ Vec4 load_relaxed(const Vec4* address) {
  Vec4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(__cvta_generic_to_global(address)) : "memory");
  return v;
}

// `address` is one of global_address.
__device__ __forceinline__ void store_relaxed(u64 address, u16 value) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" :: "l"(address), "h"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(u64 address, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(address), "r"(value) : "memory");
}
// Four times the same word.
__device__ __forceinline__ void fill_relaxed(Vec4* address, u32 word) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %1, %1, %1};"
               :: "l"(__cvta_generic_to_global(address)), "r"(word) : "memory");
}

// Adds to a word, after all that this thread and, before a barrier, its block have written.
__device__ __forceinline__ void add_release(u32* address, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;"
               :: "l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

// Adds one to a word that counts modulo `count`; returns what it was.
__device__ __forceinline__ u32 increment_acq_rel(u32* address, u32 count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before) : "l"(__cvta_generic_to_global(address)), "r"(count - 1u) : "memory");
  return before;
}
__device__ __forceinline__ u32 increment_relaxed(u32* address, u32 count) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before) : "l"(__cvta_generic_to_global(address)), "r"(count - 1u) : "memory");
  return before;
}

// Adds eight values in bf16 to those at `address`, each rounded; the order of additions is unspecified.
__device__ __forceinline__ void add_bf16(void* address, const Vec4& v) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};"
               :: "l"(__cvta_generic_to_global(address)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace jitmx
