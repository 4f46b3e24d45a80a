// Ids of tokens and positions, which callers keep in 32 or in 64 bits.
#pragma once

namespace jitmx {

__device__ __forceinline__ long long load_id(const void* ids, unsigned long long i, bool wide) {
  return wide ? static_cast<const long long*>(ids)[i] : static_cast<const int*>(ids)[i];
}

}  // namespace jitmx
