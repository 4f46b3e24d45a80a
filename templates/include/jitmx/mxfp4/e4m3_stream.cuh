// Products of a warpgroup whose weights are MXFP4, at E4M3's rate: as weight_stream.cuh, with stages of activations in
// E4M3, 128 k each, which are two tiles of W.
#pragma once
#include "jitmx/mma/wgmma.cuh"
#include "jitmx/mma/wgmma_product.cuh"
#include "jitmx/mxfp4/e4m3_decode.cuh"
#include "jitmx/mxfp4/weight_stream.cuh"

namespace jitmx {

// Leaves sums where they are.
struct KeptSums {
  template <int Count> __device__ __forceinline__ void settle(float (&)[Count]) const {}
};

// Adds sums to others and restarts from zero: tensor cores drop what is under 2^-13 of the largest term with each
// product of 32 k.
template <int Count> struct PromotedSums {
  float (&total)[Count];

  __device__ __forceinline__ void settle(float (&sums)[Count]) const {
    fence_operand(sums);
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      total[i] += sums[i];
      sums[i] = 0.f;
    }
  }
};

// Adds the products of `tiles` tiles of W to `sums`. N: rows of X, columns of the products. Products of one tile are
// in flight as the next one is decoded; after each `Slots` of them all are done, and `keeper` may take the sums.
template <class Encoding, int Slots, int N, int Count, class Tables, class Weights, class Stages,
          class Keeper = KeptSums>
__device__ __forceinline__ void multiply_e4m3(float (&sums)[Count], u32 (&a)[2][8], const Tables& tables, int tiles,
                                              Weights& weights, Stages& stages, int lane, const Keeper& keeper = {}) {
  static_assert(Slots % 2 == 0, "a stage is two tiles");
  const auto decode = [&](int i) {
    typename Weights::Tile tile;
    weights.read(i, tile);
    tables.template decode<Encoding>(tile, a[i % 2]);
    weights.load(i);
  };
  const auto multiply = [&](int i) {
    const u64 x = stages.matrix() + i % 2 * 4;
    if (i % 2 == 0) stages.wait();
    wgmma_fence();
    wgmma_steps<E4M3, N, 2>(sums, a[i % 2], x);
    wgmma_commit();
  };
  int left = tiles;
#pragma unroll 1
  for (; left >= Slots; left -= Slots) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      decode(i);
      multiply(i);
      wgmma_wait<1>();
      fence_operand(a[(i + 1) % 2]);
      if (i % 2) stages.next();
      else if (i > 0 || left < tiles) stages.release(lane);
    }
    weights.advance();
    fence_operand(a[(Slots - 1) % 2]);
    keeper.settle(sums);
  }
  // The remainder is multiplied without overlap: with only some tiles, operands of the next product would be moved
  // while one is in flight, and then ptxas lets none overlap anywhere.
  if (left > 0) {
#pragma unroll
    for (int i = 0; i + 1 < Slots; ++i) {
      if (i < left) {
        decode(i);
        multiply(i);
        wgmma_wait<0>();
        fence_operand(a[i % 2]);
        if (i % 2) stages.next();
        else if (i > 0 || left < tiles) stages.release(lane);
      } else {
        weights.load(i);
      }
    }
    weights.load(Slots - 1);
    weights.advance();
    if (left % 2) stages.next();
  }
  fence_operand(sums);
  keeper.settle(sums);
  stages.release(lane);
}

}  // namespace jitmx
