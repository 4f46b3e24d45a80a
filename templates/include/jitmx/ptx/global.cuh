// Loads of global memory with hints for the caches, and prefetches.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Streaming read of data that no one writes during the launch: past L1, with the neighbouring sectors prefetched to L2.
__device__ __forceinline__ Vec4 load_stream(const Vec4* address) {
  Vec4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}
// The same, or zeros where `inside` is false; the address is not read then. It is issued where it is written: ptxas
// moves loads through .nc behind griddepcontrol.wait.
__device__ __forceinline__ Vec4 load_stream_or_zero(const Vec4* address, bool inside) {
  Vec4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(address), "r"(u32(inside)));
  return v;
}

// As load_stream, of data that an earlier kernel of the stream may still have been writing when this one started.
__device__ __forceinline__ Vec4 load_once(const Vec4* address) {
  Vec4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
  return v;
}

// Data of an earlier kernel that several blocks read, or zeros where `inside` is false; the address is not read then.
__device__ __forceinline__ Vec4 load_or_zero(const Vec4* address, bool inside) {
  Vec4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(address), "r"(u32(inside)) : "memory");
  return v;
}

// Two bytes of data that no one writes during the launch.
__device__ __forceinline__ u32 load_two(const void* address) {
  u16 v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(address));
  return v;
}

// Has the line at an address brought to the L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(__cvta_generic_to_global(address)));
}

}  // namespace jitmx
