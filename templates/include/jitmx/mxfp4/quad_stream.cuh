// Weights of a warpgroup's products with activations whose k runs as in memory.
#pragma once
#include "jitmx/mxfp4/natural_k.cuh"
#include "jitmx/mxfp4/weight_stream.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/async_copy.cuh"
#include "jitmx/ptx/convert.cuh"
#include "jitmx/ptx/shared.cuh"

namespace jitmx {

// As WeightStream, but lanes read what their quad has loaded: a slot is the whole warp's. Words keep the order that
// they have in memory but for an exchange within quads (the 64-byte swizzle of tensor copies): copies write whole
// lines, and what lanes read at once, the words of one place in each quad, lies in different banks.
template <class Encoding, int Slots, class Rows> class QuadStream : public WeightStream<Slots, Rows> {
  using Base = WeightStream<Slots, Rows>;

 public:
  struct Tile {
    Vec4 words[4];  // of each lane of the quad
    u32 scales;
  };

  __device__ __forceinline__ QuadStream(const Rows& rows, u8* slots, int lane)
      : Base(rows, slots, lane, lane ^ lane / 8), quad_(shared_address(slots) + lane / 4 * 64 + lane / 8 * 16),
          decoder_(lane % 4) {}

  __device__ __forceinline__ void read(int i, Tile& tile) const {
    copy_wait<Slots - 1>();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < 4; ++s) tile.words[s] = load_shared((quad_ ^ s * 16) + i * kSlotBytes);
    tile.scales = load_shared_word(this->marks_ + i * kSlotBytes);
  }

  template <class, int I> __device__ __forceinline__ void decode(const Tile& tile, u32 (&a)[8]) const {
    // Scales of both rows at once, times 2^126, each in a half that the multiplication reads by itself.
    const u32 raised = tile.scales + 0x7E7E7E7Eu, both = (I == 0 ? raised * 128u : raised >> 1) & 0x7F807F80u;
    const u32 rows[2] = {both_low(both), both_high(both)};
    decoder_.template fragment<I, 0>(tile.words, rows, reinterpret_cast<u32 (&)[4]>(a[0]));
    decoder_.template fragment<I, 1>(tile.words, rows, reinterpret_cast<u32 (&)[4]>(a[4]));
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
