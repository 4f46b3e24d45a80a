// Products of a warpgroup whose weights are MXFP4 and come with the activations: a stage has `Depth` steps of 64 k of
// both, loaded by tensor copies. Each lane decodes its share of a packed tile in registers.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/mma/wgmma.cuh"
#include "jitmx/mma/wgmma_product.cuh"
#include "jitmx/mxfp4/layout.cuh"
#include "jitmx/mxfp4/packed_tile.cuh"
#include "jitmx/pipeline/state.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/convert.cuh"
#include "jitmx/ptx/mbarrier.cuh"
#include "jitmx/ptx/shared.cuh"

namespace jitmx {

// Where a warp stands in a ring of stages, each of Depth steps: activations, StepBytes a step; codes of Warps rows of
// tiles, [warp][step][512 bytes]; their scales, [warp][step][32 bytes].
template <int Stages, int Depth, int StepBytes, int Warps> class StagedTiles {
 public:
  // A lane's share of a tile.
  struct Tile {
    Vec4 words;
    u32 scales;
  };

  __device__ __forceinline__ StagedTiles(const u8* x, const u8* codes, const u8* scales, const u64* full,
                                         const u64* empty, int warp, int lane)
      : image_(matrix_descriptor(shared_address(x))), full_(shared_address(full)), empty_(shared_address(empty)),
        codes_(shared_address(codes) + warp * (Depth * kTileBytes) + lane * 16),
        scales_(shared_address(scales) + warp * (Depth * kScaleBytes) + lane / 4 * 4) {}

  __device__ __forceinline__ void wait() const { mbarrier_wait(full_ + state_.stage * 8, state_.parity()); }

  // Of the current stage: descriptor of the activations of its first step, and the tile of a step.
  __device__ __forceinline__ u64 matrix() const { return image_ + state_.stage * (Depth * StepBytes / 16); }
  __device__ __forceinline__ Tile tile(int step) const {
    return {load_shared(codes_ + state_.stage * (Warps * Depth * kTileBytes) + step * kTileBytes),
            load_shared_word(scales_ + state_.stage * (Warps * Depth * kScaleBytes) + step * kScaleBytes)};
  }

  __device__ __forceinline__ void advance() { state_.advance(); }

  // A whole warp: the stage before the current one has been read.
  __device__ __forceinline__ void release(int lane) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty_ + (state_.stage == 0 ? Stages - 1 : state_.stage - 1) * 8);
  }

 private:
  u64 image_;
  u32 full_, empty_, codes_, scales_;
  PipelineState<Stages> state_;
};

// Products in bf16: what decoding makes of a tile, and how a step's products read it. Scales are folded into the
// multiplication of decoding, which reads one half of a register that has those of both rows.
template <class Encoding> struct Bf16Steps {
  using Operand = Fragments[2];  // of both blocks of a tile: rows g (low) and g + 8 (high)

  // Where the activations of step i of a stage lie, in units of a descriptor.
  template <int StepBytes> static constexpr u32 offset(int i) { return i * (StepBytes / 16); }

  template <class Tile> __device__ __forceinline__ void decode(const Tile& tile, Operand& a) const {
    block<0>(tile, a[0]);
    block<1>(tile, a[1]);
  }
  template <int N, int Count>
  __device__ __forceinline__ void multiply(float (&sums)[Count], const Operand& a, u64 x) const {
    wgmma_steps<Bf16, N, 2>(sums, a[0].a, x);
    wgmma_steps<Bf16, N, 2>(sums, a[1].a, x + 4);
  }
  __device__ __forceinline__ void fence(const Operand& a) const {
    fence_operand(a[0].a);
    fence_operand(a[1].a);
  }

 private:
  template <int I, class Tile> static __device__ __forceinline__ void block(const Tile& tile, Fragments& a) {
    const Vec4 words[1] = {tile.words};
    const u32 folded = folded_rows<I>(tile.scales);
    a = Mxfp4Tile<Bf16, Encoding>::template fragments<I>(words, both_low(folded), both_high(folded));
  }
};

// Adds the products of `steps` steps of 64 k to `sums`. While those of a step are in flight, the next is decoded into
// the other fragments; a tile is read a step ahead. N: rows of X, columns of the products; StepBytes of them a step;
// Turn: steps of an iteration of the loop, whole stages. No product is in flight between iterations or in the last,
// partial one: ptxas else lets none overlap with anything, some releases with few registers, some with many.
template <int N, int Depth, int Turn, int StepBytes, int Count, class Operand, class Products, class Ring>
__device__ __forceinline__ void multiply_staged(float (&sums)[Count], Operand (&a)[2], const Products& products,
                                                int steps, Ring& ring, int lane) {
  static_assert(Turn % Depth == 0, "a turn has whole stages");
  ring.wait();
  auto tile = ring.tile(0);
  u64 x = ring.matrix();
  int left = steps;
  // Step i of an iteration, the last of its stage or not; products in flight complete as the next ones are issued.
  const auto step = [&](int i, bool last, bool overlapped) {
    const auto now = tile;
    const u64 here = x + Products::template offset<StepBytes>(i % Depth);
    products.decode(now, a[i % 2]);
    if (!last) tile = ring.tile(i % Depth + 1);
    wgmma_fence();
    products.template multiply<N>(sums, a[i % 2], here);
    wgmma_commit();
    if (overlapped) {
      wgmma_wait<1>();
      products.fence(a[1 - i % 2]);
    } else {
      wgmma_wait<0>();
      products.fence(a[i % 2]);
    }
    if (i % Depth == 0 && (i > 0 || left != steps)) ring.release(lane);
    if (last) {
      ring.advance();
      x = ring.matrix();
      if (left > i + 1) {
        ring.wait();
        tile = ring.tile(0);
      }
    }
  };
#pragma unroll 1
  for (; left >= Turn; left -= Turn) {
#pragma unroll
    for (int i = 0; i < Turn; ++i) step(i, i % Depth == Depth - 1, i + 1 < Turn);
  }
#pragma unroll
  for (int i = 0; i + 1 < Turn; ++i)
    if (i < left) step(i, i % Depth == Depth - 1 || i + 1 == left, false);
  fence_operand(sums);
  ring.release(lane);
}

}  // namespace jitmx
