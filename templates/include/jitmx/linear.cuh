// What every kernel of `linear` is launched with.
#pragma once
#include "jitmx/linear/next_weight.cuh"

namespace jitmx {

struct LinearArguments {
  const void* x;         // [rows, k]
  const void* weight;    // packed words
  const void* scales;    // packed scales
  const void* bias;      // [n]
  const void* residual;  // [rows, n]
  const void* norm;      // [k]
  void* y;               // [rows, n], a pair of them [2, rows, n], or int64 [rows] with argmax
  void* workspace;       // zero before the first launch
  void* spare;           // of a residual that is a pair, its second tensor
  float epsilon;         // of the norm
  int rows, n, k;
  NextWeight next;       // of a later launch
};

}  // namespace jitmx
