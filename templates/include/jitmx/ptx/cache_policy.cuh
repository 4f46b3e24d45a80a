// How long the L2 keeps lines (sm_80 and newer).
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Lines that are the first to go. Not volatile: it is made once, before a loop.
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace jitmx
