// What the kernels of `moe` for many rows are launched with: a product for each expert, and the sum over a row's experts.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

// What a block works on: a tile of the schedule and `tile_n` rows of W, in an order that keeps what neighbours in time read in
// the L2: within a group of tiles of the schedule, all of them take a tile of weights before the next one's turn. Tiles of one
// expert are neighbours.
struct GroupedTile {
  int expert;     // -1: there is nothing to do
  int first;      // of `pairs`
  u32 count;      // rows
  int first_row;  // of W, in packed tiles

  __device__ __forceinline__ GroupedTile(const GroupedArguments& args, int group, int tile_n) {
    const int tiles_n = (args.n + tile_n - 1) / tile_n;
    const int which = blockIdx.x / (group * tiles_n), within = blockIdx.x % (group * tiles_n);
    const int size = min(group, args.tiles - which * group);
    const int* const entry = args.schedule + (which * group + within % size) * 4;
    expert = entry[0];
    first = entry[1];
    count = u32(entry[2]);
    first_row = within / size * (tile_n / 16);
  }
};

}  // namespace jitmx
