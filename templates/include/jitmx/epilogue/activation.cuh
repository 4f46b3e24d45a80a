// Activations: a value of h from the products with W13, gate and up, or up alone. A NaN is passed on.
#pragma once
#include "jitmx/ptx/arithmetic.cuh"

namespace jitmx {

// up, max(up, 0)^2, up gate sigmoid(gate), and gpt-oss's clamped one.
enum class Activation { Plain, Relu2, Silu, SwigluOai };

constexpr bool is_gated(Activation activation) {
  return activation == Activation::Silu || activation == Activation::SwigluOai;
}

// x sigmoid(x a). Where the power is a subnormal it counts as zero beside the one.
__device__ __forceinline__ float swish(float x, float a) {
  return __fdividef(x, 1.f + exp2_fast(-1.4426950408889634f * a * x));
}

// h of a gate and an up; `alpha` and `limit` are those of SwigluOai.
template <Activation kActivation>
__device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
  static_assert(is_gated(kActivation), "takes no gate");
  if constexpr (kActivation == Activation::SwigluOai)
    return (max_nan(min_nan(up, limit), -limit) + 1.f) * swish(min_nan(gate, limit), alpha);
  else
    return up * swish(gate, 1.f);
}

// h of an up without a gate.
template <Activation kActivation> __device__ __forceinline__ float activate(float up) {
  static_assert(!is_gated(kActivation), "takes a gate");
  if constexpr (kActivation == Activation::Relu2) return up < 0.f ? 0.f : up * up;
  return up;
}

}  // namespace jitmx
