// Where a value is made.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// A value that is there from here on: the compiler makes it no later than it has others in their order.
__device__ __forceinline__ void hold(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void hold(u32& x) { asm volatile("" : "+r"(x)); }

}  // namespace jitmx
