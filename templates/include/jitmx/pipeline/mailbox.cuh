// Mailboxes in device memory: a value is its own flag, and zero means not written yet. A zero is written as -0, which
// adds and multiplies alike.
#pragma once
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/atomic.cuh"

namespace jitmx {

__device__ __forceinline__ void post(u16* to, u16 bf16) {
  store_relaxed(global_address(to), bf16 == 0 ? u16(0x8000u) : bf16);
}
__device__ __forceinline__ void post(float* to, float value) {
  const u32 bits = __float_as_uint(value);
  store_relaxed(global_address(to), bits == 0u ? 0x80000000u : bits);
}

// The current content: a float as its bits.
__device__ __forceinline__ Vec4 posted(const Vec4* from) { return load_relaxed(from); }
__device__ __forceinline__ u32 posted(const float* from) { return load_relaxed(reinterpret_cast<const u32*>(from)); }

// Whether one of the values is not written yet: of 16 bits each, or of 32.
__device__ __forceinline__ bool lacks_half(const Vec4& v) {
  const u32 x = (v.x - 0x00010001u) & ~v.x, y = (v.y - 0x00010001u) & ~v.y;
  const u32 z = (v.z - 0x00010001u) & ~v.z, w = (v.w - 0x00010001u) & ~v.w;
  return ((x | y | z | w) & 0x80008000u) != 0u;
}
__device__ __forceinline__ bool lacks_word(const Vec4& v) { return v.x == 0u || v.y == 0u || v.z == 0u || v.w == 0u; }

// Clears it, for a later launch.
__device__ __forceinline__ void clear(Vec4* at) { fill_relaxed(at, 0u); }

// Waits for a value, and clears it. `bits`: what an earlier read found.
__device__ __forceinline__ float take(float* from, u32 bits) {
  while (bits == 0u) bits = posted(from);
  store_relaxed(global_address(from), 0u);
  return __uint_as_float(bits);
}

}  // namespace jitmx
