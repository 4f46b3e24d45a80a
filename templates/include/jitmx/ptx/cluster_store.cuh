// Stores to the shared memory of another block of the cluster, which its barrier makes known (sm_90 and newer).
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// `address` is that of cluster_address.
__device__ __forceinline__ void store_remote_word(u32 address, u64 value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" :: "r"(address), "l"(value) : "memory");
}

}  // namespace jitmx
