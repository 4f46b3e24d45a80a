// A ring in shared memory through which one warp streams whole rows of packed tiles, in chunks that each row is a
// multiple of.
#pragma once
#include "jitmx/pipeline/weight_ring.cuh"
#include "jitmx/ptx/warp.cuh"

namespace jitmx {

// Stages, chunks and copies are those of WeightRing. As no chunk has tiles of two rows, copies are of one size and as
// many: a fetch takes a third of the instructions.
template <int kRows, int kChunk, int kStages, bool kBulk> class WholeRing {
 public:
  static constexpr int kCodeBytes = kRows * kChunk * kTileBytes;  // of a stage, whose scales follow
  static constexpr int kStageBytes = kCodeBytes + kRows * kChunk * kScaleBytes;

  // What the warp reads: `groups` groups of kRows rows of tiles, each of `chunks` chunks, from tile row `row` on. All
  // arguments must be uniform over the warp, and known to be so to the compiler.
  __device__ __forceinline__ WholeRing(const void* weight, const void* scales, u8* ring, u64* full, int tile_rows,
                                       int chunks, int row,
                                       int groups)
      : ring_(shared_address(ring)), full_(shared_address(full)), chunks_(chunks), tile_rows_(tile_rows), row_(row),
          left_(chunks),
        remaining_(groups * chunks) {
    const u64 tile = u64(row) * u32(chunks * kChunk);
    codes_ = static_cast<const u8*>(weight) + tile * kTileBytes;
    scales_ = static_cast<const u8*>(scales) + tile * kScaleBytes;
    start_chunks<kStages, kBulk>(full_);
  }

  // Starts the copy of the next chunk, if there is one, into a stage that every lane has read.
  __device__ __forceinline__ void fetch(int stage) {
    if (remaining_ > 0) {
      const u32 to = ring_ + stage * kStageBytes;
      if constexpr (kBulk) {
        if (elected()) {
          mbarrier_expect(full_ + 8 * stage, kStageBytes);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const u64 tiles = apart(r);
            bulk_copy_evict_first(to + r * kChunk * kTileBytes, codes_ + tiles * kTileBytes, kChunk * kTileBytes,
                                  full_ + 8 * stage);
            bulk_copy_evict_first(to + kCodeBytes + r * kChunk * kScaleBytes, scales_ + tiles * kScaleBytes,
                                  kChunk * kScaleBytes, full_ + 8 * stage);
          }
        }
        __syncwarp();
      } else {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const u8 *const codes = codes_ + apart(r) * kTileBytes, *const scales = scales_ + apart(r) * kScaleBytes;
#pragma unroll 1
          for (int i = 0; i < kChunk; ++i)
            copy_16(to + (r * kChunk + i) * kTileBytes + lane * 16, codes + i * kTileBytes + lane * 16);
#pragma unroll 1
          for (int i = lane; i < kChunk * 2; i += 32)
            copy_16(to + kCodeBytes + r * kChunk * kScaleBytes + i * 16, scales + i * 16);
        }
      }
      --remaining_;
      u32 next = kChunk;  // tiles to the next chunk
      if (kRows > 1 && --left_ == 0) {
        left_ = chunks_;
        row_ += kRows;
        next += (kRows - 1) * u32(chunks_ * kChunk);
      }
      codes_ += u64(next) * kTileBytes;
      scales_ += u64(next) * kScaleBytes;
    }
    if constexpr (!kBulk) copy_commit();
  }

  __device__ __forceinline__ void wait(const PipelineState<kStages>& state) { wait_chunk<kBulk>(full_, state); }

 private:
  // Tiles from the first row of the group to row `r`, or to the first again where there are no more.
  __device__ __forceinline__ u64 apart(int r) const {
    return row_ + r < tile_rows_ ? u64(r) * u32(chunks_ * kChunk) : 0;
  }

  const u8 *codes_, *scales_;
  u32 ring_, full_;
  int chunks_, tile_rows_, row_, left_, remaining_;
};

}  // namespace jitmx
