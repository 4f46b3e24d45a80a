// What the kernels of `moe` are launched with.
#pragma once

namespace jitmx {

struct MoeArguments {
  const void* x;            // [rows, hidden]
  // packed words, an expert after the other: [2 intermediate, hidden], gate and up rows in turn
  const void* w13;
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

}  // namespace jitmx
