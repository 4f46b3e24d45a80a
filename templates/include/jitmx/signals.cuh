// Signals between threads: arrivals at mbarriers of the block, and counters in device memory that blocks wait for.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

__device__ __forceinline__ void signal(u32 barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}\n" :: "r"(barrier) : "memory");
}

// Arrives once the copies (cp.async) that this thread has started are done.
__device__ __forceinline__ void signal_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

// As mbarrier_wait, on chips of every generation.
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
      "@!done bra again;\n"
      "}\n" :: "r"(barrier), "r"(parity) : "memory");
}

// Adds to `counter`, and makes known what this thread and, before a barrier, its warp have written.
__device__ __forceinline__ void release(u32* counter, u32 count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;"
               :: "l"(__cvta_generic_to_global(counter)), "r"(count) : "memory");
}

__device__ __forceinline__ u32 acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value) : "l"(__cvta_generic_to_global(counter)) : "memory");
  return value;
}

}  // namespace jitmx
