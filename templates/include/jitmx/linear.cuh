// What every kernel of `linear` is launched with.
#pragma once

namespace jitmx {

struct LinearArguments {
  const void* x;         // [rows, k]
  const void* weight;    // packed words
  const void* scales;    // packed scales
  const void* bias;      // [n]
  const void* residual;  // [rows, n]
  const void* norm;      // [k]
  void* y;               // [rows, n], or int64 [rows] with argmax
  void* workspace;       // zero before the first launch
  void* spare;           // null
  float epsilon;         // of the norm
  int rows, n, k;
};

}  // namespace jitmx
