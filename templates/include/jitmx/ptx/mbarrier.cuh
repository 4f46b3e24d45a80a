// mbarriers in shared memory: arrivals, bytes of copies in flight, and phases that threads wait for.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers known to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives; the phase ends no sooner than so many bytes have been copied.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Arrives at an mbarrier of this block; earlier writes of the thread are visible to threads that have waited.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives at an mbarrier of another block of the cluster: what this thread has read there may be overwritten.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives once the copies (cp.async) that this thread has started are done.
__device__ __forceinline__ void mbarrier_arrive_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

// Whether the phase with this parity is over.
__device__ __forceinline__ bool mbarrier_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0u;
}

// Waits until the phase with this parity is over.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
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

// The same by a whole converged warp, which the compiler can then rely on (sm_90 and newer).
__device__ __forceinline__ void mbarrier_wait_together(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "vote.sync.all.pred done, done, 0xFFFFFFFF;\n"
      "@!done bra.uni again;\n"
      "}\n" :: "r"(barrier), "r"(parity) : "memory");
}

}  // namespace jitmx
