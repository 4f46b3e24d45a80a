// Products in E4M3 of weights that come with the activations (staged_tiles.cuh): a line of these is 128 k, two steps.
#pragma once
#include "jitmx/mma/wgmma.cuh"
#include "jitmx/mma/wgmma_product.cuh"
#include "jitmx/mxfp4/e4m3_decode.cuh"
#include "jitmx/mxfp4/staged_tiles.cuh"

namespace jitmx {

template <class Encoding, bool Wide> class E4m3Steps {
 public:
  using Operand = u32[8];  // of both blocks of a tile: rows g and g + 8 of each half of its k

  // `low`, `high`: the least scales of rows g and g + 8 in this pass.
  __device__ __forceinline__ E4m3Steps(u32 low, u32 high) : tables_(low, high) {}

  template <int StepBytes> static constexpr u32 offset(int i) { return i / 2 * (2 * StepBytes / 16) + i % 2 * 4; }

  template <class Tile> __device__ __forceinline__ void decode(const Tile& tile, Operand& a) const {
    tables_.template decode<Encoding>(tile, a);
  }
  template <int N, int Count>
  __device__ __forceinline__ void multiply(float (&sums)[Count], const Operand& a, u64 x) const {
    wgmma_steps<E4M3, N, 2>(sums, a, x);
  }
  __device__ __forceinline__ void fence(const Operand& a) const { fence_operand(a); }

 private:
  RowTables<Wide> tables_;
};

}  // namespace jitmx
