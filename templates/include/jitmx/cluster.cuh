// Clusters of blocks (sm_90 and newer): rank, barrier in two halves, and stores to another block's shared memory that
// report to an mbarrier there.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster arrive and wait. Nothing but initialised mbarriers becomes known by it: a release would make
// the arrival wait for every store under way.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where `address`, in this block's shared memory, lies in that of the block with this rank.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
  u32 out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}

// Stores 16 bytes to a block of the cluster, and counts them at an mbarrier of that block.
__device__ __forceinline__ void store_remote(u32 address, float a, float b, float c, float d, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(address), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void store_remote(u32 address, float value, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               :: "r"(address), "f"(value), "r"(barrier) : "memory");
}

// Arrives at an mbarrier of this block; what the thread wrote before is known to whoever has waited.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

}  // namespace jitmx
