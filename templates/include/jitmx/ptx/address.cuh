// Addresses in the state spaces of shared and global memory.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }
__device__ __forceinline__ const u8* shared_pointer(u32 address) {
  return static_cast<const u8*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ u64 global_address(const void* pointer) { return __cvta_generic_to_global(pointer); }

}  // namespace jitmx
