// A residual stream of hi/lo pairs: a value rounded to 16 bits, and its low part, the rounding error, which is rounded
// to 16 bits as well. Both together hold twice the bits of one; each is a tensor of its own, so that a reader of the
// rounded stream needs the first only.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Low parts of two values that were rounded to `kept`.
template <class T> __device__ __forceinline__ u32 low_parts(float low, float high, u32 kept) {
  return T::round_pair(low - T::low(kept), high - T::high(kept));
}

}  // namespace jitmx
