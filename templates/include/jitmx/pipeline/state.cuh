// Where a warp stands in a ring of stages in shared memory.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// The next stage, and how often the ring went round before it. A producer waits by mbarrier_wait(empty, parity()) with
// a first round of 1, a consumer by mbarrier_wait(full, parity()) with a first round of 0.
template <int kStages> struct PipelineState {
  static_assert(kStages > 0, "a ring has stages");
  int stage = 0;
  u32 round = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      ++round;
    }
  }
  __device__ __forceinline__ u32 parity() const { return round & 1; }
};

// The same where nothing but the parity of the round counts.
template <int kStages> struct PipelinePhase {
  static_assert(kStages > 0, "a ring has stages");
  u32 stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

}  // namespace jitmx
