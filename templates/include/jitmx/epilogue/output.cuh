// Output of linear products, and what is added to it.
#pragma once

namespace jitmx {

struct Output {
  const void* bias;         // [n]
  const void* residual;     // [rows, n]
  const void* residual_lo;  // [rows, n]: the low part of a residual that is a pair
  void* y;                  // [rows, n], of a pair [2, rows, n]
  int rows, n;
};

}  // namespace jitmx
