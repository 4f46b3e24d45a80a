// Bulk copies from global to shared memory, which complete on an mbarrier, and to the L2 (sm_90 and newer).
#pragma once
#include "jitmx/ptx/cache_policy.cuh"
#include "jitmx/types.cuh"

namespace jitmx {

// `bytes`, source and destination are multiples of 16.
__device__ __forceinline__ void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier) : "memory");
}

// The same, of memory that is not read again soon: lines that are make no room for it.
__device__ __forceinline__ void bulk_copy_evict_first(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
               "%4;"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier), "l"(evict_first())
               : "memory");
}

// Prefetches memory, at an address of global_address, to the L2; both are multiples of 16.
__device__ __forceinline__ void bulk_prefetch(u64 address, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(address), "r"(bytes) : "memory");
}

}  // namespace jitmx
