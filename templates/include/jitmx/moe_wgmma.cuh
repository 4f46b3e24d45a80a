// What the products of `moe` by wgmma are launched with.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

struct ExpertArguments {
  const void* x;         // of gather [rows, k]; of the products the activations, as ExpertRows lays them out
  const void* weight;    // packed words, an expert after the other: [n, k]
  const void* scales;
  const void* bias;      // [experts, n]
  const int* pairs;      // [pairs]: row * top + slot, by expert
  const int* offsets;    // [experts + 1]: where each expert's pairs start
  const int* schedule;   // [tiles, 4]: expert or -1, first of `pairs`, how many, which of its expert's tiles
  const float* weights;  // [pairs], in the order of rows and slots
  void* y;               // of gather and of the first product ExpertRows; of the second [pairs, n], by row and slot
  u32* counters;         // [2]: items that blocks have taken, of either product; gather clears them
  float alpha, limit;    // of swiglu_oai
  int top, n, k, tiles;
};

}  // namespace jitmx
