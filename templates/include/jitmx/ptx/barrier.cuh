// Named barriers of the block; `id` 1 to 15 (0 is __syncthreads).
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Barrier among `threads` threads.
__device__ __forceinline__ void barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// Arrives at one, and goes on.
template <int Id, int Threads> __device__ __forceinline__ void barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" :: "n"(Id), "n"(Threads) : "memory");
}

}  // namespace jitmx
