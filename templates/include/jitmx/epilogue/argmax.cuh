// The index of the largest value of each row of a product, which itself is not written.
//
// A value and its index are ranked in 64 bits: the larger value first, then the lower index, so that a maximum is the
// same in whatever order it is taken. A rank of 0 is that of nothing.
#pragma once
#include "jitmx/pipeline/counters.cuh"

namespace jitmx {

// A NaN comes after every number. Both zeros are one value.
__device__ __forceinline__ u64 ranked(float value, u32 index) {
  const u32 bits = __float_as_uint(value + 0.f);
  const u32 key = value != value ? 0u : bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
  return u64(key) << 32 | (0xFFFFFFFFu - index);
}

__device__ __forceinline__ u64 greater(u64 a, u64 b) { return a > b ? a : b; }

// The greatest among the lanes whose numbers are equal modulo `Classes`.
template <int Classes> __device__ __forceinline__ u64 greatest_of_class(u64 rank) {
#pragma unroll
  for (int step = 16; step >= Classes; step /= 2) rank = greater(rank, __shfl_xor_sync(0xFFFFFFFFu, rank, step));
  return rank;
}

// Merges what the blocks of a launch found, in `workspace`: a counter in 8 bytes, then the rank of each row. All is
// zero before the launch and after it. For one whole warp of each block; lane m < rows has the rank that its block
// found for row m.
__device__ __forceinline__ void merge_ranks(u64 found, int rows, void* workspace, void* indices) {
  const int lane = threadIdx.x % 32;
  u64* const ranks = static_cast<u64*>(workspace) + 1;
  if (lane < rows) atomicMax(ranks + lane, found);
  __syncwarp();
  u32 last = 0;
  if (lane == 0) last = arrive_last(static_cast<u32*>(workspace), gridDim.x);
  last = __shfl_sync(0xFFFFFFFFu, last, 0);
  __syncwarp();  // makes what the counting lane acquired visible to all lanes: a shuffle orders no memory
  if (last == 0u || lane >= rows) return;
  const u64 rank = atomicExch(ranks + lane, 0ull);
  static_cast<long long*>(indices)[lane] = (long long)(0xFFFFFFFFu - u32(rank));
}

}  // namespace jitmx
