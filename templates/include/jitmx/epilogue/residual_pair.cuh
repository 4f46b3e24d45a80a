// A residual stream of pairs: a value rounded to 16 bits, and what that rounding lost, rounded to 16 bits as well. Both
// together hold twice the bits of one; each is a tensor of its own, so that whoever wants a rounded stream reads the
// first.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// What two values lost when they were rounded to `kept`.
template <class T> __device__ __forceinline__ u32 lost_pair(float low, float high, u32 kept) {
  return T::round_pair(low - T::low(kept), high - T::high(kept));
}

}  // namespace jitmx
