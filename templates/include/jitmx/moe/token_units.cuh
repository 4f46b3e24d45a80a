// Work split of moe.token, for one row of x: units of the rows of tiles of both products.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// Some tiles of one row of tiles.
struct alignas(8) TokenUnit {
  u32 tile;  // the first of them, among the tiles of its expert
  u32 info;
  __device__ __forceinline__ int row() const { return int(info & 0xFFFFu); }         // of the block: of W13, or pairs
  __device__ __forceinline__ int part() const { return int(info >> 16 & 0x1FFu); }   // of the row
  __device__ __forceinline__ int slot() const { return int(info >> 25 & 0xFu); }
  __device__ __forceinline__ bool down() const { return int(info) < 0; }             // of W2
};

// A row of y in a block: its number among the block's rows, its pairs there, and whether it begins and ends there.
struct TokenRow {
  int row, first, pairs;
  bool begins, ends_elsewhere;
};

// Rows of W13, interleaved over slots, are assigned to blocks round robin. A pair is a row of y and a slot; blocks take
// equal numbers of pairs, the last blocks one more, as the first have more rows of W13.
template <int kHidden_, int kIntermediate_, int kTop_, int kChunk> class TokenSplit {
 public:
  static constexpr int kHidden = kHidden_, kIntermediate = kIntermediate_, kTop = kTop_;
  static constexpr u32 kUpRows = kIntermediate / 8, kUpTiles = (kHidden + 63) / 64, kUpSize = kUpRows * kUpTiles;
  static constexpr u32 kDownRows = (kHidden + 15) / 16, kDownTiles = (kIntermediate + 63) / 64,
      kDownSize = kDownRows * kDownTiles;
  static constexpr int kUpUnits = (kUpTiles + kChunk - 1) / kChunk, kDownUnits = (kDownTiles + kChunk - 1) / kChunk;

  static_assert(kTop <= 16 && kUpUnits <= 512 && kDownUnits <= 512, "slot and part fit their bits of a unit");

  __device__ __forceinline__ TokenSplit()
      : most_up_((kTop * kUpRows + gridDim.x - 1u) / gridDim.x),
          most_down_((kTop * kDownRows + gridDim.x - 1u) / gridDim.x),
        base_(kTop * kDownRows / gridDim.x), shorter_(gridDim.x - (kTop * kDownRows - base_ * gridDim.x)),
        up_((kTop * kUpRows + gridDim.x - 1u - blockIdx.x) / gridDim.x), first_(begin(blockIdx.x)),
        pairs_(begin(blockIdx.x + 1u) - first_) {}

  // Of any block at most: rows of W13, pairs, rows of y, rows that are added (of a residual two, where it is a pair),
  // and units.
  __device__ __forceinline__ int most_up() const { return int(most_up_); }
  __device__ __forceinline__ int most_down() const { return int(most_down_); }
  __device__ __forceinline__ int most_y() const { return int(most_down_ + kTop - 2u) / kTop + 1; }
  __device__ __forceinline__ int most_rows() const { return most_up() + most_down() + 2 * most_y(); }
  __device__ __forceinline__ int most_units() const { return most_up() * kUpUnits + most_down() * kDownUnits; }

  __device__ __forceinline__ int up_rows() const { return int(up_); }
  __device__ __forceinline__ int up_slot(int row) const { return int(blockIdx.x + u32(row) * gridDim.x) % kTop; }
  __device__ __forceinline__ int up_row(int row) const { return int(blockIdx.x + u32(row) * gridDim.x) / kTop; }
  __device__ __forceinline__ int first_pair() const { return int(first_); }
  __device__ __forceinline__ int pairs() const { return int(pairs_); }
  __device__ __forceinline__ int first_y() const { return int(first_) / kTop; }
  __device__ __forceinline__ int y_rows() const {
    return pairs_ == 0u ? 0 : int(first_ + pairs_ - 1u) / kTop - first_y() + 1;
  }
  __device__ __forceinline__ int units() const { return up_rows() * kUpUnits + pairs() * kDownUnits; }

  __device__ __forceinline__ TokenUnit unit(int i) const {
    const int downs = i - up_rows() * kUpUnits;
    if (downs < 0) {
      const int row = i / kUpUnits, part = i - row * kUpUnits;
      return {u32(up_row(row)) * kUpTiles + u32(part * kChunk), packed(row, part, up_slot(row))};
    }
    // Units of the first features of h come first: the last features are still being computed.
    const int part = downs / pairs(), pair = downs - part * pairs(), whole = first_pair() + pair;
    return {u32(whole / kTop) * kDownTiles + u32(part * kChunk), packed(pair, part, whole % kTop) | 0x80000000u};
  }
  // Its first tile, among those of all experts.
  static __device__ __forceinline__ u32 tile_of(const TokenUnit& unit, int expert) {
    return u32(expert) * (unit.down() ? kDownSize : kUpSize) + unit.tile;
  }
  static __device__ __forceinline__ int tiles_of(const TokenUnit& unit) {
    return min(kChunk, int(unit.down() ? kDownTiles : kUpTiles) - unit.part() * kChunk);
  }

  // Pairs that the block has of its row `y`.
  __device__ __forceinline__ int pairs_of(int y) const {
    const int whole = (first_y() + y) * kTop;
    return min(whole + kTop, first_pair() + pairs()) - max(whole, first_pair());
  }
  // The row of y of a pair of the block.
  __device__ __forceinline__ TokenRow y_of(int pair) const {
    const int whole = (first_pair() + pair) / kTop * kTop, begin = max(whole, first_pair());
    const int end = min(whole + kTop, first_pair() + pairs());
    return {whole / kTop - first_y(), begin - first_pair(), end - begin, begin == whole, end < whole + kTop};
  }
  // Whether this block's last row of y continues in `block`, which comes after it.
  __device__ __forceinline__ bool ends_elsewhere(u32 block) const {
    return block < gridDim.x && begin(block) < (first_ + pairs_ + kTop - 1u) / kTop * kTop;
  }

 private:
  static __device__ __forceinline__ u32 packed(int row, int part, int slot) {
    return u32(row) | u32(part) << 16 | u32(slot) << 25;
  }
  __device__ __forceinline__ u32 begin(u32 block) const {
    return block * base_ + u32(max(int(block) - int(shorter_), 0));
  }

  u32 most_up_, most_down_, base_, shorter_;  // shorter_: how many blocks have base_ pairs, not one more
  u32 up_, first_, pairs_;
};

}  // namespace jitmx
