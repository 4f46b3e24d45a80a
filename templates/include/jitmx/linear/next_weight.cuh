// Prefetches the weight of a later kernel to the L2, before that kernel starts.
#pragma once
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/bulk_copy.cuh"

namespace jitmx {

// Prefetches this block's share of some memory, by one warp. Does not wait for it to arrive.
__device__ __forceinline__ void bring_to_l2(const void* memory, u32 bytes) {
  constexpr u32 kPiece = 4096;
#pragma unroll 1
  for (u32 at = (threadIdx.x % 32u * gridDim.x + blockIdx.x) * kPiece; at < bytes; at += 32u * gridDim.x * kPiece)
    bulk_prefetch(global_address(static_cast<const u8*>(memory) + at), min(bytes - at, kPiece));
}

}  // namespace jitmx
