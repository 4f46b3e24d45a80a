// A tile of a product by m16n8k16: packed weights and rows of X in stages of shared memory, sums in registers.
#pragma once
#include "jitmx/mxfp4/decode.cuh"
#include "jitmx/mxfp4/layout.cuh"
#include "jitmx/mxfp4/packed_tile.cuh"

namespace jitmx {

// A block makes kTileN features of kTileM rows of X out of stages of kTileK, by kWarpsN x kWarpsM warps side by side.
// Decoder: how packed tiles become fragments, FoldedScales say. A stage holds X, then words, then scales of weights.
template <class T, class Decoder, int kTileN, int kTileM, int kTileK, int kWarpsN, int kWarpsM> struct TileProduct {
  static_assert(kTileN % (16 * kWarpsN) == 0 && kTileM % (8 * kWarpsM) == 0 && kTileK % 64 == 0,
                "warps hold whole tiles of a product");
  using Tile = typename Decoder::Tile;
  static constexpr int kRowTiles = kTileN / 16, kTilesK = kTileK / 64;  // packed tiles of a stage
  static constexpr int kRows = kRowTiles / kWarpsN;                     // packed tiles of a warp
  static constexpr int kColumns = kTileM / 8 / kWarpsM;                 // columns of 8 rows of X of a warp
  static constexpr int kMost = kRows < 8 ? 8 / kRows : 1;  // columns whose MMA lie between two on one sum
  static constexpr int kAtOnce = kColumns < kMost ? kColumns : kMost;

  static constexpr int kPitch = kTileK * 2;                       // bytes, a row of X
  static constexpr int kWordBytes = kTileBytes * Tile::kVectors;  // codes of a packed tile
  static constexpr int kStageX = kTileM * kPitch, kStageWords = kRowTiles * kTilesK * kWordBytes;
  static constexpr int kStageBytes = kStageX + kStageWords + kRowTiles * kTilesK * kScaleBytes;

  // Vector `v` of a row of X in a stage. Rows of odd number swap their halves of 64 bytes: the eight lanes that read
  // together, a half of two neighbouring rows, then touch every bank once.
  static __device__ __forceinline__ u32 place_x(int row, int v) {
    return row * kPitch + ((v ^ (row % 2 * 4)) * 16);
  }

  // A fragments of a block of 32 k for each packed tile of a warp, and its scales.
  struct Block {
    Fragments f[kRows];
    u32 scales[kRows];
  };

  // Block I of a k64: `words` and `scales` are those of this lane in the warp's first tile.
  template <int I> static __device__ __forceinline__ Block decoded(const u8* words, const u8* scales) {
    Block block;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Vec4 v[Tile::kVectors];
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i)
        v[i] = reinterpret_cast<const Vec4*>(words + r * kTilesK * kWordBytes)[i * 32];
      const u32 s = block.scales[r] = reinterpret_cast<const u32*>(scales + r * kTilesK * kScaleBytes)[0];
      block.f[r] = Decoder::template fragments<I>(v, s);
    }
    return block;
  }

  using Sums = float[kRows][kColumns][4];

  // Adds the products of block I: `x` is this lane's vector of it in the first column.
  template <int I> static __device__ __forceinline__ void multiply(Sums& sums, const Block& block, const u8* x) {
#pragma unroll
    for (int first = 0; first < kColumns; first += kAtOnce) {
      Vec4 v[kAtOnce];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c)
        if (first + c < kColumns) v[c] = *reinterpret_cast<const Vec4*>(x + (first + c) * 8 * kPitch);
      if constexpr (Decoder::kFolded) {
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int c = 0; c < kAtOnce; ++c)
#pragma unroll
            for (int r = 0; r < kRows; ++r)
              if (first + c < kColumns) {
                const u32* const a = block.f[r].a + 4 * step;
                T::mma(sums[r][first + c], a[0], a[1], a[2], a[3], step == 0 ? v[c].x : v[c].z,
                       step == 0 ? v[c].y : v[c].w);
              }
      } else {
        // Scales multiply the sum over a block of 32, in fp32: any scale byte is exact.
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float low = scale<I>(block.scales[r]), high = scale<I + 2>(block.scales[r]);
          const u32* const a = block.f[r].a;
#pragma unroll
          for (int c = 0; c < kAtOnce; ++c)
            if (first + c < kColumns) {
              float d[4] = {};
              T::mma(d, a[0], a[1], a[2], a[3], v[c].x, v[c].y);
              T::mma(d, a[4], a[5], a[6], a[7], v[c].z, v[c].w);
              float(&sum)[4] = sums[r][first + c];
              sum[0] = fmaf(low, d[0], sum[0]);
              sum[1] = fmaf(low, d[1], sum[1]);
              sum[2] = fmaf(high, d[2], sum[2]);
              sum[3] = fmaf(high, d[3], sum[3]);
            }
        }
      }
    }
  }
};

}  // namespace jitmx
