// Products of a warpgroup (wgmma, sm_90a), what they read, and where their sums go.
#pragma once
#include "jitmx/ptx/convert.cuh"

namespace jitmx {

// Registers that the warpgroup wrote are ready for the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Pending` of the newest groups of products are in flight.
template <int Pending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Pending) : "memory");
}

// The same, which compilers do not take for the wait of the other side of a branch, and so leave where it is.
template <int Pending> __device__ __forceinline__ void wgmma_wait_apart() {
  asm volatile("wgmma.wait_group.sync.aligned  %0;" :: "n"(Pending) : "memory");
}

// Keeps the operands of products in flight in their registers up to here.
template <int Count> __device__ __forceinline__ void fence_operand(const u32 (&fragment)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" :: "r"(fragment[i]) : "memory");
}

// Sums are complete from here on, not before.
template <int Count> __device__ __forceinline__ void fence_operand(float (&sums)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
}

// Descriptor of a K-major matrix with the 128-byte swizzle: rows of 128 bytes, eight to an atom of 1024 bytes.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
  return u64(1) << 62 | u64(1024 / 16) << 32 | u64(1) << 16 | (address & 0x3FFFFu) / 16;
}

// That of what lies `bytes` on: addresses fill the low half, whose 14 bits hold all of shared memory.
__device__ __forceinline__ u64 further(u64 descriptor, u32 bytes) {
  return join(u32(descriptor) + bytes / 16, u32(matrix_descriptor(0u) >> 32));
}

}  // namespace jitmx
