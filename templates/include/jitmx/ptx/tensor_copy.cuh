// Bulk tensor copies (sm_90 and newer): boxes of a tensor in device memory, as a map of the host's describes it.
#pragma once
#include "jitmx/ptx/cache_policy.cuh"
#include "jitmx/ptx/tensor_map.cuh"
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// The box whose first element lies at these coordinates, from the innermost; what lies outside the tensor becomes zero.
__device__ __forceinline__ void tensor_copy(u32 destination, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(destination), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void tensor_copy(u32 destination, const TensorMap& map, int x, int y, int z, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%2, %3, %4}], [%5];"
               :: "r"(destination), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}

// The same, of memory that is not read again soon: lines that are make no room for it.
__device__ __forceinline__ void tensor_copy_evict_first(u32 destination, const TensorMap& map, int x, int y, int z,
                                                        u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%2, %3, %4}], [%5], %6;"
               :: "r"(destination), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(evict_first()) : "memory");
}

__device__ __forceinline__ void tensor_copy(u32 destination, const TensorMap& map, int x, int y, int z, int w,
                                            u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%2, %3, %4, %5}], [%6];"
               :: "r"(destination), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier) : "memory");
}

}  // namespace jitmx
