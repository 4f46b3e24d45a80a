// Products of a warpgroup whose weights are MXFP4: each lane copies its own share of a packed tile through shared
// memory, decodes it in registers, and multiplies it by stages of activations that a producer keeps full.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/mma/wgmma.cuh"
#include "jitmx/mma/wgmma_product.cuh"
#include "jitmx/mxfp4/decode.cuh"
#include "jitmx/mxfp4/layout.cuh"
#include "jitmx/pipeline/state.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/async_copy.cuh"
#include "jitmx/ptx/convert.cuh"
#include "jitmx/ptx/mbarrier.cuh"
#include "jitmx/ptx/shared.cuh"

namespace jitmx {

constexpr int kSlotBytes = kTileBytes + 128;  // a tile's codes, and scales of a lane's rows once for every lane

// The fragment of A for block I of a tile: rows g (low) and g + 8 (high). Scales are folded into the multiplication of
// decoding.
template <class Encoding, int I>
__device__ __forceinline__ void decode_block(u32 low, u32 high, u32 scales, u32 (&a)[8]) {
  u32 p[4], q[4];
  decode<Bf16, Encoding>(low, folded_scale<I>(scales), p);
  decode<Bf16, Encoding>(high, folded_scale<I + 2>(scales), q);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = p[i];
    a[2 * i + 1] = q[i];
  }
}

// The tiles of W that one warp reads, through `Slots` slots of each lane's own, loaded that many steps ahead. Where
// they lie `Rows` says: open(codes, scales) sets this lane's addresses in a run of tiles and returns how many there
// are, or 0, and next() goes on to the next run.
template <int Slots, class Rows> class WeightStream {
 public:
  struct Tile {
    Vec4 words;
    u32 scales;
  };

  __device__ __forceinline__ WeightStream(const Rows& rows, u8* slots, int lane)
      : WeightStream(rows, slots, lane, lane) {}

  __device__ __forceinline__ void read(int i, Tile& tile) const {
    copy_wait<Slots - 1>();
    tile.words = load_shared(words_ + i * kSlotBytes);
    tile.scales = load_shared_word(marks_ + i * kSlotBytes);
  }

  template <class Encoding, int I> __device__ __forceinline__ void decode(const Tile& tile, u32 (&a)[8]) const {
    if constexpr (I == 0) decode_block<Encoding, 0>(tile.words.x, tile.words.y, tile.scales, a);
    else decode_block<Encoding, 1>(tile.words.z, tile.words.w, tile.scales, a);
  }

  // Slot i, which has been read, takes tile i of the next `Slots`, if there is one.
  __device__ __forceinline__ void load(int i) const {
    if (i < left_) {
      copy_16(words_ + i * kSlotBytes, codes_ + i * kTileBytes);
      copy_4(marks_ + i * kSlotBytes, scales_ + i * kScaleBytes);
    }
    copy_commit();
  }

  // On to the next `Slots` tiles, after all slots are loaded.
  __device__ __forceinline__ void advance() {
    codes_ += Slots * kTileBytes;
    scales_ += Slots * kScaleBytes;
    left_ -= Slots;
    if (left_ <= 0) {
      rows_.next();
      left_ = rows_.open(codes_, scales_);
    }
  }

 protected:
  // `place` counts this lane's words in a slot.
  __device__ __forceinline__ WeightStream(const Rows& rows, u8* slots, int lane, int place)
      : rows_(rows), words_(shared_address(slots) + place * 16), marks_(shared_address(slots) + kTileBytes + lane * 4) {
    left_ = rows_.open(codes_, scales_);
#pragma unroll
    for (int i = 0; i < Slots; ++i) load(i);
    advance();
  }

  Rows rows_;
  u32 words_, marks_;
  int left_ = 0;
  const u8 *codes_ = nullptr, *scales_ = nullptr;  // a block may have no tile at all
};

// Stages of activations in shared memory, 64 k each: where they and their mbarriers lie, and which one is next.
template <int Stages, int Bytes> class StageRing {
 public:
  static constexpr bool kSpare = false;  // whether there is a dummy mbarrier; the name is part of the PTX

  __device__ __forceinline__ StageRing(const u8* x, const u64* full, const u64* empty)
      : image_(matrix_descriptor(shared_address(x))), full_(shared_address(full)), empty_(shared_address(empty)) {}

  __device__ __forceinline__ u64 matrix() const { return image_ + state_.stage * (Bytes / 16); }
  __device__ __forceinline__ void wait() const { mbarrier_wait(full_ + state_.stage * 8, state_.parity()); }

  // One lane of each warp: products of the stage before the current one have read it.
  __device__ __forceinline__ void release(int lane) const {
    if (lane == 0) mbarrier_arrive(empty_ + (state_.stage == 0 ? Stages - 1 : state_.stage - 1) * 8);
  }

  __device__ __forceinline__ void next() { state_.advance(); }

 private:
  u64 image_;
  u32 full_, empty_;
  PipelineState<Stages> state_;
};

// The same, but addresses of the next stage are incremented, not computed. A dummy mbarrier follows those of empty
// stages: the first step of a run, which has no stage before it to release, arrives there.
template <int Stages, int Bytes> class SteppedRing {
 public:
  static constexpr bool kSpare = true;

  // `empty` follows `full`.
  __device__ __forceinline__ SteppedRing(const u8* x, const u64* full, const u64* empty)
      : image_(u32(matrix_descriptor(shared_address(x)))), full_(shared_address(full)), end_(full_ + Stages * 8),
        past_(shared_address(empty + Stages)), dummy_(past_) {}

  __device__ __forceinline__ u64 matrix() const {
    return join(image_, u32(matrix_descriptor(0u) >> 32));
  }
  __device__ __forceinline__ void wait() const { mbarrier_wait(full_, parity_); }
  __device__ __forceinline__ void release(int lane) {
    if (lane == 0) mbarrier_arrive(past_);
    past_ = dummy_;
  }
  __device__ __forceinline__ void next() {
    past_ = full_ + Stages * 8;
    full_ += 8;
    image_ += Bytes / 16;
    if (full_ == end_) {
      full_ -= Stages * 8;
      image_ -= Stages * (Bytes / 16);
      parity_ ^= 1u;
    }
  }

 private:
  u32 image_;  // low half of a descriptor
  u32 full_, end_, past_, dummy_, parity_ = 0;
};

// Adds the products of `steps` stages to `sums`, with `Buffers` fragments of W, 32 k each: products of all but one are
// in flight. N: rows of X, columns of the products.
template <class Encoding, int Slots, int N, int Buffers, int Count, class Weights, class Stages>
__device__ __forceinline__ void multiply_stages(float (&sums)[Count], u32 (&a)[Buffers][8], int steps, Weights& weights,
                                                Stages& stages, int lane) {
  // Step i of an unrolled group: two fragments; after each, products of the oldest fragment are complete.
  const auto step = [&](int i, bool first) {
    typename Weights::Tile tile;
    weights.read(i, tile);
    u32 (&low)[8] = a[2 * i % Buffers], (&high)[8] = a[(2 * i + 1) % Buffers];
    weights.template decode<Encoding, 0>(tile, low);
    const u64 x = stages.matrix();
    stages.wait();
    wgmma_fence();
    wgmma_steps<Bf16, N, 2>(sums, low, x);
    wgmma_commit();
    wgmma_wait<Buffers - 1>();
    fence_operand(high);
    if (Buffers == 2 && (Stages::kSpare || !first)) stages.release(lane);
    weights.template decode<Encoding, 1>(tile, high);
    weights.load(i);
    wgmma_fence();
    wgmma_steps<Bf16, N, 2>(sums, high, x + 4);
    wgmma_commit();
    wgmma_wait<Buffers - 1>();
    fence_operand(a[(2 * i + 2) % Buffers]);
    if (Buffers == 3 && (Stages::kSpare || !first)) stages.release(lane);
    stages.next();
  };
  int left = steps;
#pragma unroll 1
  for (; left >= Slots; left -= Slots) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) step(i, i == 0 && left == steps);
    weights.advance();
  }
  if (left > 0) {
#pragma unroll
    for (int i = 0; i + 1 < Slots; ++i) {
      if (i < left) step(i, i == 0 && left == steps);
      else weights.load(i);
    }
    weights.load(Slots - 1);
    weights.advance();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Buffers; ++i) fence_operand(a[i]);
  fence_operand(sums);
  stages.release(lane);
}

}  // namespace jitmx
