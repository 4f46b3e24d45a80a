// h between the two products of `moe.scaled`: rows by expert, in codes of an MX format and in the order in which the
// second product's MMA take them. A row is chunks of 128 features; behind all rows lie their scales, four bytes a
// chunk. Blocks past the last feature are never written, and never read.
#pragma once
#include "jitmx/mma/scaled_product.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/async_copy.cuh"

namespace jitmx {

template <class Format> class HiddenRows {
 public:
  using Layout = ChunkLayout<Format>;
  static constexpr int kBlocks = 2 * Layout::kTiles, kChunkFeatures = 32 * kBlocks;

  // Of so many pairs of a row of x and an expert.
  __device__ __forceinline__ HiddenRows(void* memory, int pairs, int features)
      : chunks_((features + kChunkFeatures - 1) / kChunkFeatures), codes_(static_cast<u8*>(memory)),
        scales_(codes_ + u64(pairs) * chunks_ * Layout::kBytes) {}

  __device__ __forceinline__ u8* codes(int row, int chunk) const {
    return codes_ + (u64(row) * chunks_ + chunk) * Layout::kBytes;
  }
  __device__ __forceinline__ u8* scales(int row, int chunk) const {
    return scales_ + (u64(row) * chunks_ + chunk) * kBlocks;
  }
  __device__ __forceinline__ int chunks() const { return chunks_; }

  // Eight codes from `feature` on, and the scale of their block.
  __device__ __forceinline__ void store(int row, int feature, const u32 (&words)[Format::kWords], u32 scale) const {
    const int chunk = feature / kChunkFeatures, block = feature % kChunkFeatures / 32, t = feature % 32 / 8;
    Layout::store(reinterpret_cast<Vec4*>(codes(row, chunk)) + block / Layout::kSegmentBlocks * 4 + t, block, words);
    if (t == 0) scales(row, chunk)[block] = u8(scale);
  }

 private:
  int chunks_;
  u8 *codes_, *scales_;
};

// Copies chunks of a tile's rows into stages of `Product`, zeros for rows and blocks that are not there.
template <class Product, class Format> class HiddenCopy {
 public:
  // The tile: rows `first` to `first` + `count`, of so many blocks of 32 features.
  __device__ __forceinline__ HiddenCopy(const HiddenRows<Format>& h, int first, u32 count, int blocks)
      : codes_(h.codes(first, 0)), scales_(h.scales(first, 0)), chunks_(h.chunks()), count_(count), blocks_(blocks) {}

  __device__ __forceinline__ void start(typename Product::Stage& stage, int chunk) const {
    const int left = blocks_ - chunk * kBlocks;  // from this chunk on
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const u32 v = threadIdx.x + i * Product::kThreads, row = v / kAcross, at = v % kAcross, segment = at / 4;
      if (kVectors % Product::kThreads != 0 && v >= kVectors) break;
      const int blocks = row < count_
          ? min(max(left - int(segment) * Layout::kSegmentBlocks, 0), Layout::kSegmentBlocks) : 0;
      copy_16_part(shared_address(stage.codes + Product::Stage::place(row, segment, at % 4)),
                   codes_ + u64(row * u32(chunks_) + chunk) * Layout::kBytes + at * 16, blocks * Format::kWords * 4);
    }
    if (threadIdx.x < kRows)
      copy_4_part(shared_address(stage.scales + threadIdx.x),
                  scales_ + u64(threadIdx.x * u32(chunks_) + chunk) * kBlocks,
                  threadIdx.x < count_ ? min(max(left, 0), kBlocks) : 0);
  }

 private:
  using Layout = ChunkLayout<Format>;
  static constexpr int kBlocks = HiddenRows<Format>::kBlocks;
  static constexpr int kRows = Product::kVectors / Product::kTokenVectors;  // of the tile
  static constexpr int kAcross = Layout::kSegments * 4;                     // vectors of 16 bytes of a row
  static constexpr int kVectors = kRows * kAcross, kShare = (kVectors + Product::kThreads - 1) / Product::kThreads;

  const u8 *codes_, *scales_;
  int chunks_;
  u32 count_;
  int blocks_;
};

}  // namespace jitmx
