// Descriptors of the rings in shared memory: of rows of tiles, and of rows of activations.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Describes a stage of the ring.
struct Step {
  // tiles; from bit 14: columns (none ends the stream); from 18: where scales start; from 20: place of activations
  u32 what;

  __device__ __forceinline__ Step(int tiles, int columns, u32 shift, int place)
      : what(u32(tiles) | u32(columns) << 14 | shift / 32 << 18 | u32(place) << 20) {}
  __device__ __forceinline__ int tiles() const { return int(what & 0x3FFFu); }
  __device__ __forceinline__ int columns() const { return int(what >> 14 & 0xFu); }
  __device__ __forceinline__ int shift() const { return int(what >> 13 & 0x60u); }
  __device__ __forceinline__ int place() const { return int(what >> 20); }
};

// Activations lie in a ring of rows, which items take one after the other, a row a column. Where the row is and how
// often the ring went round before it; rows are counted modulo two rounds.
template <int kInputs> struct Place {
  int row;
  u32 odd;
  __device__ __forceinline__ explicit Place(int count) : row(count), odd(0) {
    if (row >= 2 * kInputs) row -= 2 * kInputs;
    if (row >= kInputs) {
      row -= kInputs;
      odd = 1;
    }
  }
};

}  // namespace jitmx
