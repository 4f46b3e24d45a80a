// h between the two products of `moe.scaled`: rows by expert, in codes of an MX format and in the order in which the second
// product's MMA take them. A row is chunks of 128 features; behind all rows lie their scales, four bytes a chunk. Blocks past
// the last feature are never written, and never read.
#pragma once
#include "jitmx/async_copy.cuh"
#include "jitmx/scaled_product.cuh"

namespace jitmx {

template <class Format> class HiddenRows {
 public:
  using Layout = ChunkLayout<Format>;
  static constexpr int kBlocks = 2 * Layout::kTiles, kChunkFeatures = 32 * kBlocks;

  // Of so many pairs of a row of x and an expert.
  __device__ __forceinline__ HiddenRows(void* memory, int pairs, int features)
      : chunks_((features + kChunkFeatures - 1) / kChunkFeatures), codes_(static_cast<u8*>(memory)),
        scales_(codes_ + u64(pairs) * chunks_ * Layout::kBytes) {}

  __device__ __forceinline__ u8* codes(int row, int chunk) const { return codes_ + (u64(row) * chunks_ + chunk) * Layout::kBytes; }
  __device__ __forceinline__ u8* scales(int row, int chunk) const { return scales_ + (u64(row) * chunks_ + chunk) * kBlocks; }
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

// Starts to copy `Size` bytes to shared memory, of which all but the first `bytes` are zero and not read.
template <int Size> __device__ __forceinline__ void copy_part(u32 destination, const void* source, int bytes) {
  if constexpr (Size == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(destination), "l"(__cvta_generic_to_global(source)), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(destination), "l"(__cvta_generic_to_global(source)), "n"(Size), "r"(bytes) : "memory");
}

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
      const int blocks = row < count_ ? min(max(left - int(segment) * Layout::kSegmentBlocks, 0), Layout::kSegmentBlocks) : 0;
      copy_part<16>(shared_address(stage.codes + Product::Stage::place(row, segment, at % 4)),
                    codes_ + (row * u32(chunks_) + chunk) * Layout::kBytes + at * 16, blocks * Format::kWords * 4);
    }
    if (threadIdx.x < kRows)
      copy_part<4>(shared_address(stage.scales + threadIdx.x), scales_ + (threadIdx.x * u32(chunks_) + chunk) * kBlocks,
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
