// Vectors of floats.
#pragma once

namespace jitmx {

__device__ __forceinline__ void plus(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

}  // namespace jitmx
