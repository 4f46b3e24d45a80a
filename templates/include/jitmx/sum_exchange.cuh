// How warps and blocks bring their sums together: each keeps four floats a lane, in the fragments of m16n8k16.
#pragma once
#include "jitmx/cluster.cuh"

namespace jitmx {

__device__ __forceinline__ void plus(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

// Arrives at the barrier of the cluster, which cluster_wait ends: what this thread stored before is known past it, and what it
// was to load is.
__device__ __forceinline__ void cluster_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// 16 bytes of a block of the cluster; `address` is that of cluster_address.
__device__ __forceinline__ float4 load_remote(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

// To be true in one lane of a warp, the same every time, without a register that holds the lane's number (sm_90 and newer).
__device__ __forceinline__ bool elected() {
  u32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen));
  return chosen != 0u;
}

}  // namespace jitmx
