// A ring in shared memory through which one warp streams whole rows of packed tiles.
#pragma once
#include "jitmx/mxfp4/layout.cuh"
#include "jitmx/pipeline/state.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/async_copy.cuh"
#include "jitmx/ptx/bulk_copy.cuh"
#include "jitmx/ptx/mbarrier.cuh"

namespace jitmx {

// Mbarriers of the stages of a warp's ring, where its copies are bulk copies.
template <int kStages, bool kBulk> __device__ __forceinline__ void start_chunks(u32 full) {
  if constexpr (kBulk) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) mbarrier_init(full + 8 * i, 1);
      mbarrier_init_fence();
    }
    __syncwarp();
  }
}

// Waits for the next chunk.
template <bool kBulk, int kStages>
__device__ __forceinline__ void wait_chunk(u32 full, const PipelineState<kStages>& state) {
  if constexpr (kBulk) {
    mbarrier_wait(full + 8 * state.stage, state.parity());
  } else {
    copy_wait<kStages - 1>();
    __syncwarp();
  }
}

// Each of kStages stages holds a chunk: kChunk tiles of each of kRows rows of tiles, codes first, then scales. Copies
// are bulk copies that complete on an mbarrier a stage (kBulk), or cp.async.
template <int kRows, int kChunk, int kStages, bool kBulk> class WeightRing {
 public:
  static constexpr int kChunkTiles = kRows * kChunk;

  // What the warp reads: `remaining` tiles of each tile row of its groups, from tile `first` of tile row `row` on.
  __device__ __forceinline__ WeightRing(const void* weight, const void* scales, u8* ring, u64* full, int tile_rows,
                                        int tiles_k, int row, int remaining, int first = 0)
      : codes_(static_cast<const u8*>(weight)), scales_(static_cast<const u8*>(scales)), ring_(shared_address(ring)),
        full_(shared_address(full)), lane_(threadIdx.x % 32), tile_rows_(tile_rows), tiles_k_(tiles_k), row_(row),
        left_(tiles_k - first), remaining_(remaining), tile_(u32(row) * tiles_k + first) {
    start_chunks<kStages, kBulk>(full_);
  }

  // Starts the copy of the next chunk, if there is one, into a stage that every lane has read.
  __device__ __forceinline__ void fetch(int stage) {
    if (remaining_ > 0) {
      const int tiles = min(remaining_, kChunk);
      const u32 to = ring_ + stage * kChunkTiles * (kTileBytes + kScaleBytes);
      if constexpr (kBulk)
        if (lane_ == 0) mbarrier_expect(full_ + 8 * stage, tiles * kRows * (kTileBytes + kScaleBytes));
      if constexpr (kRows == 1) {
        copy(to, 0, tile_, tiles, stage);  // the next row of tiles follows in memory
        tile_ += tiles;
      } else {
#pragma unroll 1
        for (int at = 0; at < tiles;) {
          const int run = min(left_, tiles - at);
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            copy(to, r * kChunk + at, tile_ + (row_ + r < tile_rows_ ? r * tiles_k_ : 0), run, stage);
          at += run;
          tile_ += run;
          left_ -= run;
          if (left_ == 0) {
            left_ = tiles_k_;
            tile_ += (kRows - 1) * tiles_k_;
            row_ += kRows;
          }
        }
      }
      remaining_ -= tiles;
    }
    if constexpr (!kBulk) copy_commit();
  }

  __device__ __forceinline__ void wait(const PipelineState<kStages>& state) { wait_chunk<kBulk>(full_, state); }

 private:
  // `tiles` tiles from `tile` on, to place `slot` of the chunk at `to`.
  __device__ __forceinline__ void copy(u32 to, int slot, u32 tile, int tiles, int stage) {
    const u8* const codes = codes_ + (u64)tile * kTileBytes;
    const u8* const scales = scales_ + (u64)tile * kScaleBytes;
    const u32 to_codes = to + slot * kTileBytes, to_scales = to + kChunkTiles * kTileBytes + slot * kScaleBytes;
    if constexpr (kBulk) {
      if (lane_ == 0) {
        bulk_copy_evict_first(to_codes, codes, tiles * kTileBytes, full_ + 8 * stage);
        bulk_copy_evict_first(to_scales, scales, tiles * kScaleBytes, full_ + 8 * stage);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < tiles; ++i)
        copy_16(to_codes + i * kTileBytes + lane_ * 16, codes + i * kTileBytes + lane_ * 16);
#pragma unroll 1
      for (int i = lane_; i < tiles * 2; i += 32) copy_16(to_scales + i * 16, scales + i * 16);
    }
  }

  const u8 *codes_, *scales_;
  u32 ring_, full_;
  int lane_, tile_rows_, tiles_k_, row_, left_, remaining_;
  u32 tile_;
};

}  // namespace jitmx
