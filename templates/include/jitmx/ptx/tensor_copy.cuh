// Bulk tensor copies (sm_90 and newer): boxes of a matrix in device memory, as a map of the host's describes it.
#pragma once
#include "jitmx/ptx/tensor_map.cuh"
#include "jitmx/types.cuh"

namespace jitmx {

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// The box whose first element is that of a column and a row; what lies outside the matrix becomes zero.
__device__ __forceinline__ void tensor_copy(u32 destination, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(destination), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

}  // namespace jitmx
