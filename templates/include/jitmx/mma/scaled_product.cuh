// Products of packed MXFP4 weights with activations of MX formats, for kernels whose blocks make kTileN features of
// kTileM tokens with kWarpsN x kWarpsM warps side by side, in chunks of two tiles (128 k).
//
// Codes and scales of a chunk of activations lie in shared memory, in the order of the MMA's fragments; weights go from
// global memory to registers and bypass shared memory.
#pragma once
#include "jitmx/mma/block_scaled.cuh"
#include "jitmx/mx/encode.cuh"
#include "jitmx/ptx/global.cuh"

namespace jitmx {

// Where codes lie that four neighbouring lanes made of a block of 32, in shared memory as in global: a chunk of a token
// is kSegments times 64 bytes, of which each lane t of a fragment finds 16 together. They hold both blocks of a tile,
// and then those of the next where codes are short.
template <class Format> struct ChunkLayout {
  // of k: one register of scales of W, and one of X, serves both
  static constexpr int kTiles = 2;
  static constexpr int kSegments = kTiles * Format::kBits / 8;  // a tile, or two of 4-bit codes
  static constexpr int kSegmentTiles = 8 / Format::kBits;
  static constexpr int kSegmentBlocks = 2 * kSegmentTiles;
  static constexpr int kBytes = kSegments * 64;

  // Stores a lane's codes of a block of the chunk into the 16 bytes of their segment.
  static __device__ __forceinline__ void store(Vec4* segment_of_lane, int block, const u32 (&words)[Format::kWords]) {
    u32* const to = reinterpret_cast<u32*>(segment_of_lane) + block % kSegmentBlocks * Format::kWords;
    if constexpr (Format::kWords == 2)
      *reinterpret_cast<u64*>(to) = (u64)words[1] << 32 | words[0];
    else
      *to = words[0];
  }
};

template <class Format, class Encoding, class Atom, int kTileN, int kTileM, int kWarpsN, int kWarpsM>
struct ScaledProduct {
  using Layout = ChunkLayout<Format>;
  static constexpr int kThreads = kWarpsN * kWarpsM * 32;
  static constexpr int kRows = kTileN / 16 / kWarpsN;     // row tiles of 16 features a warp
  static constexpr int kColumns = kTileM / 8 / kWarpsM;  // column tiles of 8 tokens a warp
  static constexpr int kChunk = Layout::kTiles;

  static constexpr int kTokenVectors = kChunk * 8;  // vectors of 8 values of X that a chunk takes of one token
  static constexpr int kVectors = kTileM * kTokenVectors;
  static constexpr int kShare = (kVectors + kThreads - 1) / kThreads;  // of them a thread
  static constexpr int kSegments = Layout::kSegments, kSegmentTiles = Layout::kSegmentTiles;

  static_assert(kTileN % (16 * kWarpsN) == 0 && kTileM % (8 * kWarpsM) == 0, "warps hold whole tiles of a product");

  static __device__ __forceinline__ int chunks(int tiles_k) { return (tiles_k + kChunk - 1) / kChunk; }
  // Of a warp's features, in tiles of 16, and of its tokens, within the block.
  static __device__ __forceinline__ int first_row(int warp) { return warp / kWarpsM * kRows; }
  static __device__ __forceinline__ int first_column(int warp) { return warp % kWarpsM * (kColumns * 8); }

  // Codes and scales of a chunk of X. Segments of odd tokens change places with their neighbours, so that eight lanes,
  // of two tokens, read all 32 banks.
  struct Stage {
    Vec4 codes[kTileM * kSegments * 4];
    u32 scales[kTileM];  // four blocks each

    static __device__ __forceinline__ int place(int token, int segment, int t) {
      return (token * kSegments + (kSegments > 1 ? segment ^ (token & 1) : segment)) * 4 + t;
    }
  };

  // The share of a thread of the vectors of a chunk of X: read from global memory, then quantized into a stage. Of
  // vector i, of a token of the block, Source says whether there is such a token (has) and where its row starts (row).
  template <class T, ScaleRule kRule, bool kNative, class Source> class Activations {
   public:
    __device__ __forceinline__ Activations(const Source& source, int k, int first, int last, int warp)
        : source_(source), warp_(warp), next_(first * kTokenVectors), end_(min(k / 8, last * kTokenVectors)) {}

    // Vector i of the chunk after the one read last; zeros beyond X and beyond the slice.
    __device__ __forceinline__ void read(int i) {
      const int v = index(i), token = v / kTokenVectors, at = next_ + v % kTokenVectors;
      held_[i] = Vec4{0u, 0u, 0u, 0u};
      if ((kVectors % kThreads == 0 || v < kVectors) && source_.has(i, token) && at < end_)
        held_[i] = load_once(source_.row(i, token) + at);
    }
    __device__ __forceinline__ void advance() { next_ += kTokenVectors; }

    __device__ __forceinline__ void quantize(int i, Stage& stage) const {
      if (kVectors % kThreads != 0 && warp_ * 32 + i * kThreads >= kVectors) return;  // a multiple of 32 vectors in all
      const int v = index(i);
      u32 words[Format::kWords];
      const u32 scale = quantize_eight<Format, T, kRule, kNative>(held_[i], words);
      const int token = v / kTokenVectors, block = v % kTokenVectors / 4, t = v % 4;
      Layout::store(stage.codes + Stage::place(token, block / Layout::kSegmentBlocks, t), block, words);
      if (t == 0) reinterpret_cast<u8*>(stage.scales)[token * 4 + block] = u8(scale);
    }

    static __device__ __forceinline__ int index(int i) { return threadIdx.x + i * kThreads; }

   private:
    Source source_;
    int warp_, next_, end_;
    Vec4 held_[kShare];
  };

  // A warp's rows of a chunk of W, and their scales as block_scaled.cuh wants them. What lies past the last row or the
  // last tile is read from there instead: X is zero beyond k, and sums of rows that are not there are never stored.
  class Weights {
   public:
    // `words`, `scales`: of a matrix of so many rows of tiles, of which the warp's first is `row`.
    __device__ __forceinline__ Weights(const void* words, const void* scales, int rows, int row, int tiles_k, int lane)
        : words_(static_cast<const Vec4*>(words) + lane),
          scales_(static_cast<const u8*>(scales) + lane / 4 * 4 + lane % 2 * 2), pair_(lane % 4 / 2),
              last_(tiles_k - 1) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) tile_[r] = min(row + r, rows - 1) * tiles_k;
    }

    __device__ __forceinline__ void read(int chunk) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        scale_[r] = load_two(scales_ + (u64)(tile_[r] + min(chunk * kChunk + pair_, last_)) * 32);
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
          held_[r][i] = load_stream(words_ + (u64)(tile_[r] + min(chunk * kChunk + i, last_)) * 32);
      }
    }

    __device__ __forceinline__ RowFragment<Format> fragment(int r, int i) const {
      RowFragment<Format> out;
      out.template set<Encoding>(held_[r][i]);
      return out;
    }
    __device__ __forceinline__ u32 scales(int r) const { return scale_[r]; }

   private:
    const Vec4* words_;
    const u8* scales_;
    int pair_, last_, tile_[kRows];
    Vec4 held_[kRows][kChunk];
    u32 scale_[kRows];
  };

  using Sums = float[kRows][kColumns][4];

  // Where codes are short and fragments small, one read of a token's codes serves both tiles.
  static constexpr bool kTogether = Format::kBits == 4 && Atom::kUnroll > 1;
  static constexpr int kSteps = Atom::kUnroll == 1 ? 1 : kTogether ? kColumns : 2 * kColumns;

  // Adds the products of the chunk in `now`, with between(0) to between(kSteps - 1), which keep other pipes at work, on
  // the way.
  template <class Between>
  static __device__ __forceinline__ void multiply(Sums& sums, const Weights& weights, const Stage& now, int column,
                                                  int lane, Between between) {
    if constexpr (kTogether) {
      tiles<0, 2>(sums, weights, now, column, lane, between);
    } else if constexpr (kSteps > 1) {
      tiles<0, 1>(sums, weights, now, column, lane, between);
      tiles<1, 1>(sums, weights, now, column, lane, [&](int c) { between(kColumns + c); });
    } else {
      tiles<0, 1>(sums, weights, now, column, lane, [](int) {});
      tiles<1, 1>(sums, weights, now, column, lane, [](int) {});
      between(0);
    }
  }

 private:
  // Tiles [First, First + Count) of the chunk in `now`. After column c comes between(c).
  template <int First, int Count, class Between>
  static __device__ __forceinline__ void tiles(Sums& sums, const Weights& weights, const Stage& now, int column,
                                               int lane, Between between) {
    const int g = lane / 4, t = lane % 4;
    RowFragment<Format> w[Count][kRows];
    typename Atom::RowScales rows[Count][kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      w[0][r] = weights.fragment(r, First);
      rows[0][r] = Atom::template rows<First>(weights.scales(r));
      if constexpr (Count == 2) {
        w[1][r] = weights.fragment(r, 1);
        rows[1][r] = Atom::template rows<1>(weights.scales(r));
      }
    }
    // Where not all is unrolled, the first column's sums move to the end each time round, so that registers have fixed
    // names.
    constexpr bool kTurns = kColumns > Atom::kUnroll;
#pragma unroll (kTurns ? Atom::kUnroll : kColumns)
    for (int c = 0; c < kColumns; ++c) {
      const int token = column + c * 8 + g;
      const Vec4 v = now.codes[Stage::place(token, First / kSegmentTiles, t)];
      const typename Atom::TokenScales tokens = Atom::tokens(now.scales[token]);
      TokenFragment<Format> x[Count];
      if constexpr (Format::kWords == 2)
        x[0] = {{v.x, v.y, v.z, v.w}};
      else
        x[0] = {{First == 0 ? v.x : v.z, First == 0 ? v.y : v.w}};
      if constexpr (Count == 2) x[1] = {{v.z, v.w}};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float(&sum)[4] = sums[r][kTurns ? 0 : c];
        float d[4] = {sum[0], sum[1], sum[2], sum[3]};
        Atom::template add<First>(d, w[0][r], x[0], rows[0][r], tokens);
        if constexpr (Count == 2) Atom::template add<1>(d, w[1][r], x[1], rows[1][r], tokens);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kTurns) {
#pragma unroll
            for (int other = 0; other + 1 < kColumns; ++other) sums[r][other][i] = sums[r][other + 1][i];
          }
          sums[r][kTurns ? kColumns - 1 : c][i] = d[i];
        }
      }
      between(c);
    }
  }
};

}  // namespace jitmx
