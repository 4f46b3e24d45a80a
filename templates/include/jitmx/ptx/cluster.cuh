// Clusters of blocks (sm_90 and newer): rank, barrier in two halves, and the shared memory of other blocks.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives at the barrier of the cluster, which cluster_wait ends. Nothing but initialised mbarriers becomes known by
// it: a release would make the arrival wait for every store in flight.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// The same; what this thread stored before is known past the barrier, and what it was to load is.
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where `address`, in this block's shared memory, lies in that of the block with this rank.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
  u32 out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}

// Stores 16 bytes to a block of the cluster, and counts them at an mbarrier of that block. Both addresses are those of
// cluster_address.
__device__ __forceinline__ void store_remote(u32 address, float a, float b, float c, float d, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(address), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void store_remote(u32 address, float value, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               :: "r"(address), "f"(value), "r"(barrier) : "memory");
}

// A word, a float and 16 bytes of a block of the cluster; `address` is that of cluster_address.
__device__ __forceinline__ u32 load_remote_word(u32 address) {
  u32 out;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
  return out;
}
__device__ __forceinline__ float load_remote_float(u32 address) {
  float out;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(out) : "r"(address) : "memory");
  return out;
}
__device__ __forceinline__ float4 load_remote_float4(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

}  // namespace jitmx
