// Division of many numbers by one.
#pragma once
#include "jitmx/ptx/arithmetic.cuh"
#include "jitmx/ptx/hold.cuh"

namespace jitmx {

// Quotients by `by` > 0, whose reciprocal is a normal number: what a product with the reciprocal is off is taken out of
// it, which leaves the bits that `/` gives but for a last place in 10^7, and those always where they are few.
class Divisor {
 public:
  explicit __device__ __forceinline__ Divisor(float by) : by_(by), inverse_(1.0f / by) {}
  // The reciprocal is taken here, where the compiler would take it on the way to the first quotient.
  __device__ __forceinline__ void prepare() { hold(inverse_); }
  __device__ __forceinline__ float operator()(float x) const {
    const float near = x * inverse_, off = fmaf(near, by_, -x);
    const bool finite = fabsf(near) <= 3.402823466e38f;  // else what it is off is NaN
    return finite ? fmaf(-off, inverse_, near) : near;  // of -0: that
  }

 private:
  float by_, inverse_;
};

}  // namespace jitmx
