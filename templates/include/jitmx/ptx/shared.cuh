// Loads and stores of shared memory by their address, which the compiler keeps in their order.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ Vec4 load_shared(u32 address) {
  Vec4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared_pair(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float load_shared_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_shared_float4(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_word(u32 address, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

// Adds one to a word and returns what it was.
__device__ __forceinline__ u32 increment_shared(u32 address) {
  u32 before;
  asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(address) : "memory");
  return before;
}

// Of the shared memory that a launch asks for.
__device__ __forceinline__ u32 dynamic_shared_bytes() {
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

}  // namespace jitmx
