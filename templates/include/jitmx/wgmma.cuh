// Products of a warpgroup (wgmma, sm_90a), what they read, and where their sums go.
#pragma once
#include "jitmx/async_copy.cuh"

namespace jitmx {

// Registers that the warpgroup wrote are ready for the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Pending` of the newest groups of products are under way.
template <int Pending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Pending) : "memory");
}

// Keeps what products under way read in its registers up to here.
template <int Count> __device__ __forceinline__ void hold(u32 (&fragment)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" :: "r"(fragment[i]) : "memory");
}

// Sums are complete from here on, not before.
template <int Count> __device__ __forceinline__ void complete(float (&sums)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
}

// Descriptor of a K-major matrix with the 128-byte swizzle: rows of 128 bytes, eight to an atom of 1024 bytes.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
  return u64(1) << 62 | u64(1024 / 16) << 32 | u64(1) << 16 | (address & 0x3FFFFu) / 16;
}

// What was written through the generic proxy, and is known to this thread, becomes visible to bulk copies that follow.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Gives registers back to the block's pool, or takes them from it: a multiple of 8, all warps of a warpgroup alike.
template <int Registers> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(Registers));
}
template <int Registers> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(Registers));
}

// Adds one to a counter in device memory; what this thread and, before a barrier, its warp have written is known to
// whoever reads the counter by `counted` after that.
__device__ __forceinline__ void count_one(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(__cvta_generic_to_global(counter)) : "memory");
}
__device__ __forceinline__ u32 counted(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(counter)) : "memory");
  return value;
}

// Four 8 x 8 matrices of 16-bit elements; register i of lane 4 g + t holds elements 2 t and 2 t + 1 of row g of matrix i.
// In shared memory they lie transposed: lane 8 i + r gives the address of column r of matrix i, 16 bytes.
__device__ __forceinline__ void store_transposed(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 address, u32 (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void copy_4(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(destination), "l"(__cvta_generic_to_global(source)) : "memory");
}

__device__ __forceinline__ Vec4 load_shared(u32 address) {
  Vec4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// Element j of lane i of each quad becomes element i of lane j.
__device__ __forceinline__ void exchange_in_quad(Vec4& v, int lane) {
  const bool odd = lane & 1, high = lane & 2;
  u32 a = __shfl_xor_sync(0xFFFFFFFFu, odd ? v.x : v.y, 1);
  u32 b = __shfl_xor_sync(0xFFFFFFFFu, odd ? v.z : v.w, 1);
  v = odd ? Vec4{a, v.y, b, v.w} : Vec4{v.x, a, v.z, b};
  a = __shfl_xor_sync(0xFFFFFFFFu, high ? v.x : v.z, 2);
  b = __shfl_xor_sync(0xFFFFFFFFu, high ? v.y : v.w, 2);
  v = high ? Vec4{a, b, v.z, v.w} : Vec4{v.x, v.y, a, b};
}

}  // namespace jitmx
