// Which tile of the schedule, and which rows of W, a block of a grouped product works on.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// The work item of a block: a tile of the schedule and `tile_n` rows of W. Items are ordered for reuse in the L2: in a
// group of tiles of the schedule, all of them use a tile of weights before the next one. Tiles of one expert are
// neighbours.
struct GroupedTile {
  int expert;     // -1: there is nothing to do
  int first;      // of `pairs`
  u32 count;      // rows
  int first_row;  // of W, in packed tiles

  // Of `tiles` tiles of the schedule [tiles, 4], `group` reuse a tile of tile_n of the n rows of W.
  __device__ __forceinline__ GroupedTile(const int* schedule, int tiles, int n, int group, int tile_n) {
    const int tiles_n = (n + tile_n - 1) / tile_n;
    const int which = blockIdx.x / (group * tiles_n), within = blockIdx.x % (group * tiles_n);
    const int size = min(group, tiles - which * group);
    const int* const entry = schedule + (which * group + within % size) * 4;
    expert = entry[0];
    first = entry[1];
    count = u32(entry[2]);
    first_row = within / size * (tile_n / 16);
  }
};

}  // namespace jitmx
