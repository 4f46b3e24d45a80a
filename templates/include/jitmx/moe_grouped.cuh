// What the kernels of `moe` for many rows are launched with: a product for each expert, and the sum over a row's
// experts.
#pragma once

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

}  // namespace jitmx
