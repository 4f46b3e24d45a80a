// What the kernels of `moe` for many rows are launched with: a product for each expert, and the sum over a row's experts.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

struct GroupedArguments {
  const void* x;         // [rows, k]; of the second product h [pairs, k], by expert; of combine parts [pairs, n]
  const void* weight;    // packed words, an expert after the other: [n, k]
  const void* scales;
  const void* bias;      // [experts, n]
  const int* pairs;      // [pairs]: row * top + slot, by expert
  const int* schedule;   // [tiles, 4]: expert or -1, first of `pairs`, how many, which of its expert's tiles
  const float* weights;  // [pairs], in the order of rows and slots
  const int* ids;        // [pairs], in that order: experts, any that is not in 0 … experts - 1 is skipped
  const int* map;        // [map_size], from ids to the experts at hand, or null
  void* y;
  float alpha, limit;    // of swiglu_oai
  int rows, top, experts, map_size, n, k, tiles;
};

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
