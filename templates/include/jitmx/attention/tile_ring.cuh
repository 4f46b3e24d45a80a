// Tiles of keys and values of a paged cache, streamed through a ring in shared memory that all warps of a block read.
#pragma once
#include "jitmx/ptx/async_copy.cuh"
#include "jitmx/types.cuh"

namespace jitmx {

// Of `Keys` tokens from `begin` on, up to `end`: what lies beyond counts 0 times, must not be NaN, and is not read. A
// warp copies 16 tokens at a time, which lie in one page.
template <class Format, int Keys, int Stages, int Warps, int Page> class TileRing {
  using Row = typename Format::Row;
  static constexpr int kVectors = Row::kVectors, kCopies = 16 * kVectors / 32;
  static constexpr int kPieces = Keys / 16;                // of 16 tokens
  static constexpr bool kHalves = Warps >= 2 * kPieces;    // a warp takes the keys or the values of a piece
  static constexpr int kRounds = kHalves ? 1 : (kPieces + Warps - 1) / Warps;
  static constexpr bool kWhole = 32 % kVectors == 0;  // a copy of a warp is of whole tokens
  static_assert(Keys % 16 == 0 && Page % 16 == 0 && 16 * kVectors % 32 == 0, "a piece is whole copies of a warp");

 public:
  static constexpr int kTileBytes = Keys * kVectors * 16, kStageBytes = 2 * kTileBytes;

  template <class Arguments>
  __device__ __forceinline__ TileRing(const Arguments& args, int request, int head, int begin, int end, u32 ring,
                                      int warp, int lane)
      : pages_(args.block_table + request * args.table_stride), block_stride_(args.block_stride * Format::kBytes),
        token_stride_(u32(args.token_stride) * Format::kBytes), ring_(ring), lane_(lane), begin_(begin), end_(end),
        piece_(kHalves ? warp % kPieces : warp), idle_(kHalves && warp >= 2 * kPieces) {
    const u8* const keys = static_cast<const u8*>(args.k_cache) + head * args.head_stride * Format::kBytes;
    const u8* const values = static_cast<const u8*>(args.v_cache) + head * args.head_stride * Format::kBytes;
    const bool takes_values = kHalves && warp >= kPieces;
    from_[0] = takes_values ? values : keys;
    if constexpr (!kHalves) from_[1] = values;
    at_ = takes_values ? kTileBytes : 0;
    if constexpr (kWhole) {  // where the lane's vector of the first copy comes from, and goes
      const u32 row = lane / kVectors, vector = lane % kVectors;
#pragma unroll
      for (const u8*& from : from_) from += row * token_stride_ + vector * 16;
      at_ += Row::at(row, vector);
    }
    find(0);
  }

  __device__ __forceinline__ int steps() const { return (end_ - begin_ + Keys - 1) / Keys; }
  __device__ __forceinline__ int token(int step) const { return begin_ + step * Keys; }
  __device__ __forceinline__ u32 keys(int slot) const { return ring_ + u32(slot * kStageBytes); }
  __device__ __forceinline__ u32 values(int slot) const { return keys(slot) + kTileBytes; }

  // Starts the copies of a step, if there is one; called for steps in order.
  __device__ __forceinline__ void start(int step, int slot) {
    if (token(step) < end_) {
      long long from[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i)
        from[i] = page_[i] * block_stride_ + u32(first(step, i)) % Page * u64(token_stride_);
      find(step + 1);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (kRounds * Warps > kPieces && !kHalves && piece_ + i * Warps >= kPieces) break;
        const int left = end_ - first(step, i);
        if (kHalves && Warps > 2 * kPieces && idle_) break;
        const u32 to = keys(slot) + at_ + Row::at(16 * (piece_ + i * Warps), 0);
        copy(from_[0] + from[i], to, left);
        if constexpr (!kHalves) copy(from_[1] + from[i], to + kTileBytes, left);
      }
    }
    copy_commit();
  }

 private:
  __device__ __forceinline__ int first(int step, int i) const { return token(step) + 16 * (piece_ + i * Warps); }

  // Loads the pages of a step, one ahead.
  __device__ __forceinline__ void find(int step) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) page_[i] = first(step, i) < end_ ? __ldg(pages_ + first(step, i) / Page) : 0;
  }

  // 16 tokens, of which `left` are there.
  __device__ __forceinline__ void copy(const u8* from, u32 to, int left) const {
    if constexpr (kWhole) {
      constexpr int kStep = 32 / kVectors;  // tokens of a copy
      left -= int(lane_) / kVectors;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        copy_16_part(Row::below(to, i * kStep), from, i * kStep < left ? 16 : 0);
        from += kStep * token_stride_;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const u32 index = i * 32 + lane_, row = index / kVectors, vector = index % kVectors;
        copy_16_part(to + Row::at(row, vector), from + (row * token_stride_ + vector * 16), int(row) < left ? 16 : 0);
      }
    }
  }

  const u8* from_[kHalves ? 1 : 2];  // keys or values, or both
  const int* pages_;
  long long block_stride_;
  u32 token_stride_, ring_, at_, lane_;  // 16 tokens lie within 2 GiB
  int begin_, end_, piece_;
  bool idle_;
  int page_[kRounds];
};

}  // namespace jitmx
