// Copies of a thread from global to shared memory that run beside computation, in commit groups (cp.async).
#pragma once
#include "jitmx/ptx/address.cuh"

namespace jitmx {

// Source and destination are multiples of 16.
__device__ __forceinline__ void copy_16(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)) : "memory");
}

// 16 bytes, of which all but the first `bytes` are zero; of the source, an address of global memory, no more are read.
__device__ __forceinline__ void copy_16_part(u32 destination, u64 source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(destination), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_16_part(u32 destination, const void* source, int bytes) {
  copy_16_part(destination, global_address(source), bytes);
}

// As copy_16, or 16 zero bytes where `inside` is false; the source is not read then.
__device__ __forceinline__ void copy_16_or_zero(u32 destination, const void* source, bool inside) {
  copy_16_part(destination, global_address(source), inside ? 16 : 0);
}

__device__ __forceinline__ void copy_4(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)) : "memory");
}

// As copy_16_part, of four bytes.
__device__ __forceinline__ void copy_4_part(u32 destination, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of the newest groups are in flight.
template <int Pending> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

}  // namespace jitmx
