// What the kernels of `moe` are launched with.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

struct MoeArguments {
  const void* x;            // [rows, hidden]
  const void* w13;          // packed words, an expert after the other: [2 intermediate, hidden], gate and up rows in turn
  const void* w13_scales;
  const void* w2;           // [hidden, intermediate]
  const void* w2_scales;
  const void* b13;          // [experts, 2 intermediate]
  const void* b2;           // [experts, hidden]
  const int* ids;           // [rows, top]: experts of each row; any that is not in 0 … experts - 1 is skipped;
                            // or one row's router logits, without weights
  const float* weights;     // [rows, top]
  const int* map;           // [map_size], from the ids given to those of the experts at hand, or null
  const int* count;         // rows that count, or null: all
  const void* residual;     // [rows, hidden], added to y, or a pair of them [2, rows, hidden]; or null
  void* y;                  // [rows, hidden], or such a pair
  void* workspace;          // counters, zero before the first launch; then activations
  float alpha, limit;       // of swiglu_oai
  int rows, top, experts, map_size, hidden, intermediate;
};

constexpr int kEntries = 512;  // pairs of a row and an expert

// The counters that start the workspace: rows of tiles of an item's h that are made; blocks that wait for no more of them;
// launches in which all blocks have met; blocks of this launch and the one before that have begun.
struct Counters {
  u32 ready[kEntries];
  u32 done, generation, turn;
};
constexpr int kCounterBytes = 4096;
static_assert(sizeof(Counters) <= kCounterBytes, "the activations follow");

// h of each entry, in the order of the items, with its weight.
__device__ __forceinline__ u16* hidden_rows(const MoeArguments& args) {
  return reinterpret_cast<u16*>(static_cast<u8*>(args.workspace) + kCounterBytes);
}

}  // namespace jitmx
