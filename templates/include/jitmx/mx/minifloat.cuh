// Encoding fp32 values as small floats with E exponent bits, M mantissa bits and a bias, and back.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

template <int M, int Bias, u32 LargestCode> struct Minifloat {
  // Magnitude bits of the value nearest to `magnitude` >= 0, ties to even, saturating.
  static __device__ __forceinline__ u32 encode(float magnitude) {
    constexpr u32 kShift = 23 - M;
    const float largest = decode_magnitude(LargestCode);
    const float clamped = fminf(magnitude, largest);
    const u32 bits = __float_as_uint(clamped);
    // Normal: rebias the exponent, then round away the mantissa bits that do not fit.
    const u32 normal =
        (bits - (u32(127 - Bias) << 23) + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift;
    // Subnormal: an addend whose last place is the smallest step makes the adder round.
    constexpr u32 kMagic = u32(127 + 24 - Bias - M) << 23;
    const u32 subnormal = __float_as_uint(clamped + bits_to_float(kMagic)) - kMagic;
    return bits < (u32(128 - Bias) << 23) ? subnormal : normal;
  }

  // As encode, of a value scaled by 2^(Bias - 127), which puts the format's subnormals on those of fp32. That scaling
  // is exact for what came from a 16-bit type: its bits end well above the last place.
  static __device__ __forceinline__ u32 encode_scaled(float scaled) {
    constexpr u32 kShift = 23 - M;
    const u32 bits = __float_as_uint(scaled);
    return min((bits + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift, LargestCode);
  }
  static __device__ __forceinline__ float to_scaled(float value) { return value * bits_to_float(u32(Bias) << 23); }

  // The value of magnitude bits, exact: fp32 subnormals take the place of the format's own.
  static __device__ __forceinline__ float decode_magnitude(u32 code) {
    return bits_to_float(code << (23 - M)) * bits_to_float(u32(254 - Bias) << 23);
  }
};

using E2M1 = Minifloat<1, 1, 7>;
using E2M3 = Minifloat<3, 1, 31>;
using E3M2 = Minifloat<2, 3, 31>;
using E4M3 = Minifloat<3, 7, 126>;

}  // namespace jitmx
