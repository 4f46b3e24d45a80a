// Integer types, a vector of 16 bytes, and bits of words. No CUDA header is needed.
#pragma once

namespace jitmx {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(16) Vec4 { u32 x, y, z, w; };

static_assert(sizeof(u64) == 8 && sizeof(Vec4) == 16, "sizes that hosts and layouts rely on");

__device__ __forceinline__ float bits_to_float(u32 bits) { return __uint_as_float(bits); }

// Where a and b hold bits under mask and ~mask.
__device__ __forceinline__ u32 merge(u32 a, u32 mask_a, u32 b, u32 mask_b) { return (a & mask_a) | (b & mask_b); }

}  // namespace jitmx
