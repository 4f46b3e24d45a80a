// Weights of a warpgroup's products with activations whose k runs as in memory.
#pragma once
#include "jitmx/natural_k.cuh"
#include "jitmx/wgmma_weights.cuh"

namespace jitmx {

// As WeightStream, but lanes read what their quad has loaded: a slot is the whole warp's. In it lie side by side the words of
// those lanes that have the same place in their quads: what lanes read at once is 128 bytes without a gap.
template <class Encoding, int Slots, class Rows> class QuadStream : public WeightStream<Slots, Rows> {
  using Base = WeightStream<Slots, Rows>;

 public:
  struct Tile {
    Vec4 words[4];  // of each lane of the quad
    u32 scales;
  };

  __device__ __forceinline__ QuadStream(const Rows& rows, u8* slots, int lane)
      : Base(rows, slots, lane, lane % 4 * 8 + lane / 4), quad_(shared_address(slots) + lane / 4 * 16), decoder_(lane % 4) {}

  __device__ __forceinline__ void read(int i, Tile& tile) const {
    copy_wait<Slots - 1>();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < 4; ++s) tile.words[s] = load_shared(quad_ + i * kSlotBytes + s * 128);
    tile.scales = load_shared_word(this->marks_ + i * kSlotBytes);
  }

  template <class, int I> __device__ __forceinline__ void decode(const Tile& tile, u32 (&a)[8]) const {
    decoder_.template fragments<I>(tile.words, tile.scales, a);
  }

  __device__ __forceinline__ void load(int i) const {
    __syncwarp();
    Base::load(i);
  }

 private:
  u32 quad_;
  NaturalDecoder<Encoding> decoder_;
};

}  // namespace jitmx
