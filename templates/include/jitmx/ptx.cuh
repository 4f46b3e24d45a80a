// Single PTX instructions as device functions. No CUDA header is needed.
#pragma once

namespace jitmx {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(16) Vec4 { u32 x, y, z, w; };

// Streaming read of data that no one writes during the launch: past L1, with the neighbouring sectors prefetched to L2.
__device__ __forceinline__ Vec4 load_stream(const Vec4* address) {
  Vec4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

// As load_stream, of data that an earlier kernel of the stream may still have been writing when this one started.
__device__ __forceinline__ Vec4 load_once(const Vec4* address) {
  Vec4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ float bits_to_float(u32 bits) { return __uint_as_float(bits); }

// Where a and b hold bits under mask and ~mask.
__device__ __forceinline__ u32 merge(u32 a, u32 mask_a, u32 b, u32 mask_b) { return (a & mask_a) | (b & mask_b); }

// Programmatic dependent launch: let the next kernel of the stream start, and wait until the previous one is done.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Barrier among `threads` threads of the block; `id` 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

}  // namespace jitmx
