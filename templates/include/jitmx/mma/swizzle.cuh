// Rows of 128 bytes, 64 values of 16 bits, in shared memory: the swizzle that ldmatrix reads without bank conflicts,
// which is the 128-byte swizzle of wgmma and tensor copies.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Where vector v (16 bytes) of a row lies: the eight lanes that read the same vector of eight neighbouring rows touch
// every bank once.
__device__ __forceinline__ u32 swizzled(int row, int v) { return row * 128 + ((v ^ row % 8) * 16); }

}  // namespace jitmx
