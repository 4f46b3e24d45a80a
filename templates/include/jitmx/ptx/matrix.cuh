// 8 x 8 matrices of 16-bit elements of a warp: register i of lane 4 g + t holds elements 2 t and 2 t + 1 of row g of
// matrix i.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Four matrices; lane 8 i + r gives the address of row r of matrix i, 16 bytes.
__device__ __forceinline__ void load_matrices(u32 address, u32 (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// The same where matrices lie transposed in shared memory: lane 8 i + r gives the address of column r of matrix i.
__device__ __forceinline__ void load_transposed(u32 address, u32 (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_transposed(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory");
}

// A matrix that a warp holds, transposed: from accumulators of m16n8k16, whose pairs run along tokens, to pairs that
// run along features, as Y lies in memory.
__device__ __forceinline__ u32 transpose(u32 pair) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

}  // namespace jitmx
