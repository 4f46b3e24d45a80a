// What every kernel of `routing` is launched with.
#pragma once
#include "jitmx/routing/expert_lists.cuh"

namespace jitmx {

struct RoutingArguments {
  const void* x;          // [m, h], or logits [m, experts]
  const void* weight;     // [experts, h]
  const void* bias;       // [experts]
  const void* norm;       // [h]
  const int* map;         // [experts]: id to local id, or -1
  int* ids;               // [m, k]; given to the kernel that only sorts
  float* weights;         // [m, k]
  ExpertLists lists;
  void* normalized;       // [m, h]: RMSNorm of x
  void* workspace;        // counters, zero before the first launch, then partial logits
  float epsilon;          // of the norm
  int m, h;
};

}  // namespace jitmx
