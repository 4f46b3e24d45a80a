// Copies from global to shared memory that run beside computation: bulk copies that complete on an mbarrier (sm_90 and
// newer), and cp.async in commit groups.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers known to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" :: "r"(barrier), "r"(parity) : "memory");
}

// `bytes`, source and destination are multiples of 16.
__device__ __forceinline__ void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_16(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)) : "memory");
}

// As copy_16, or 16 zero bytes where `inside` is false; the source is not read then.
__device__ __forceinline__ void copy_16_or_zero(u32 destination, const void* source, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of the newest groups are under way.
template <int Pending> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

}  // namespace jitmx
