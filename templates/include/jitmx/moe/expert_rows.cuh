// How activations lie between the kernels of `moe` that multiply by wgmma.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

constexpr int kLineBytes = 128;  // 64 k of a row

// Counters of the launches of a layer: items that blocks have taken, of either product; behind them, for a launch of
// both products, warps that have stored their part of h of a tile of the schedule, by tile.
constexpr int kTileCounters = 2;

// Activations of all pairs, an expert after the other, those of one [steps of 64 k][rows][128 bytes], zero past k: the
// rows of a tile are, step by step, one run of bytes. k is in the order that packed weights have
// (docs/packed-layout.md), and lines are swizzled as wgmma reads them, from the expert's first row on.
struct ExpertRows {
  u64 first;  // pair
  int rows, steps;

  __device__ __forceinline__ ExpertRows(u64 first, int rows, int k) : first(first), rows(rows), steps((k + 63) / 64) {}
  __device__ __forceinline__ ExpertRows(const int* offsets, int expert, int k)
      : ExpertRows(u64(offsets[expert]), offsets[expert + 1] - offsets[expert], k) {}

  // Byte at which the line of a row starts.
  __device__ __forceinline__ u64 line(int step, int row) const {
    return (first * steps + u64(step) * rows + row) * kLineBytes;
  }
  // Byte of a vector of the line: 0 … 3 of the first block of 32 k, 4 … 7 of the second.
  __device__ __forceinline__ u64 vector(int step, int row, int vector) const {
    return line(step, row) + (vector ^ row % 8) * 16;
  }
};

}  // namespace jitmx
