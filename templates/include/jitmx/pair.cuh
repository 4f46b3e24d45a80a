// Clusters of two blocks (sm_90 and newer): what one block does to the other's shared memory.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

// All threads of both blocks meet.
__device__ __forceinline__ void pair_meets() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where `address`, in this block's shared memory, lies in that of the block with this rank.
__device__ __forceinline__ u32 address_in(u32 rank, u32 address) {
  u32 out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}

// Stores four values at an address in the other block, and counts their bytes at an mbarrier there.
__device__ __forceinline__ void send(u32 address, float a, float b, float c, float d, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(address), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}

// Arrives at an mbarrier in the other block: what this thread has read there may be overwritten.
__device__ __forceinline__ void arrive_there(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

}  // namespace jitmx
