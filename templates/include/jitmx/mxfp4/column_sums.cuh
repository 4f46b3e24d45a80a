// Packed tiles in registers, decoded, and their sums with columns of X, by m16n8k16.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/mxfp4/decode.cuh"
#include "jitmx/mxfp4/packed_tile.cuh"
#include "jitmx/ptx/convert.cuh"

namespace jitmx {

// What scales multiply.
enum class Scaling {
  fold,  // codes, as they are decoded
  halves,  // the same; the scales of two rows lie in the halves of a register, which the multiplication reads apart
  post,  // sums of blocks
  bare,  // sums of blocks, of codes that are not brought to their exponent
};

template <class T> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<Bf16> = true;

// A tile's fragments: rows g and g + 8, both blocks.
template <class T, class Encoding, Scaling kScaling> struct DecodedTile {
  u32 low[2][4], high[2][4];
  u32 scales;

  __device__ __forceinline__ void decode(const Vec4& w, u32 bytes) {
    if constexpr (kScaling == Scaling::halves) {
      const u32 first = folded_rows<0>(bytes), second = folded_rows<1>(bytes);
      word(w.x, both_low(first), low[0]);
      word(w.y, both_high(first), high[0]);
      word(w.z, both_low(second), low[1]);
      word(w.w, both_high(second), high[1]);
    } else if constexpr (kScaling == Scaling::fold) {
      word(w.x, folded_scale<0>(bytes), low[0]);
      word(w.y, folded_scale<2>(bytes), high[0]);
      word(w.z, folded_scale<1>(bytes), low[1]);
      word(w.w, folded_scale<3>(bytes), high[1]);
    } else {
      word(w.x, Field<T>::restore, low[0]);
      word(w.y, Field<T>::restore, high[0]);
      word(w.z, Field<T>::restore, low[1]);
      word(w.w, Field<T>::restore, high[1]);
      scales = bytes;
    }
  }

  // Block I alone, of scales in halves.
  template <int I> static __device__ __forceinline__ Fragments fragments(const Vec4& w, u32 bytes) {
    const u32 pair = folded_rows<I>(bytes);
    u32 p[4], q[4];
    word(I == 0 ? w.x : w.z, both_low(pair), p);
    word(I == 0 ? w.y : w.w, both_high(pair), q);
    return {{p[0], q[0], p[1], q[1], p[2], q[2], p[3], q[3]}};
  }

 private:
  static __device__ __forceinline__ void word(u32 w, u32 multiplier, u32 (&pairs)[4]) {
    if constexpr (kScaling == Scaling::bare)
      Encoding::fields(w, pairs, T{});
    else
      jitmx::decode<T, Encoding>(w, multiplier, pairs);
  }
};

// As FoldedScales, with the scales of two rows in the halves of a register.
template <class T, class Encoding> struct HalvedScales {
  using Tile = Mxfp4Tile<T, Encoding>;
  static constexpr bool kFolded = true;
  template <int I> static __device__ __forceinline__ Fragments fragments(const Vec4 (&v)[1], u32 scales) {
    return DecodedTile<T, Encoding, Scaling::halves>::template fragments<I>(v[0], scales);
  }
};

// Sums of 16 rows of W by at most kM rows of X, in the fragments of m16n8k16: element i is row g + 8 (i / 2), column
// 2 t + i % 2. kFull: scale bytes are any, 0 and NaN included, not just 2 to 128.
template <class T, class Encoding, Scaling kScaling, bool kFull, int kM> class ColumnSums {
 public:
  using Tile = DecodedTile<T, Encoding, kScaling>;
  static constexpr bool kFolded = kScaling == Scaling::fold || kScaling == Scaling::halves;
  static constexpr int kColumns = (kM + 7) / 8;  // columns of MMA, 8 rows of X each

  // Columns 0 to 3 of X^T hold the first block of a tile and columns 4 to 7 the second one, so that one scale a row
  // suffices for a lane. Results of a block in the columns of the other are never read.
  static constexpr bool kSplit = !kFolded && kM <= 4;

  // x: where this lane's X of the tile lies; `pitch` bytes on is the next row.
  __device__ __forceinline__ void add(const Tile& w, const u8* x, int pitch, int t) {
    if constexpr (kSplit) {
      const Vec4 both = *reinterpret_cast<const Vec4*>(x);
      float d[4] = {}, e[4] = {}, low, high;
      multiply<0>(d, w, both);
      multiply<1>(e, w, both);
      block_scales(w.scales, t >> 1, low, high);
      scaled(sum_[0], d, low, high);
      scaled(sum_[1], e, low, high);
    } else {
      float low0, low1, high0, high1;
      if constexpr (!kFolded) {
        block_scales(w.scales, 0, low0, high0);
        block_scales(w.scales, 1, low1, high1);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const Vec4 a = *reinterpret_cast<const Vec4*>(x + c * 8 * pitch),
            b = *reinterpret_cast<const Vec4*>(x + c * 8 * pitch + 64);
        if constexpr (kFolded) {
          multiply<0>(sum_[c], w, a);
          multiply<1>(sum_[kPair ? c + 1 : c], w, b);
        } else {
          float d[4] = {}, e[4] = {};
          multiply<0>(d, w, a);
          scaled(sum_[c], d, low0, high0);
          multiply<1>(e, w, b);
          scaled(sum_[c], e, low1, high1);
        }
      }
    }
  }

  // Completes the sums; lanes whose t is below those of `kHolders` have them.
  __device__ __forceinline__ void finish(int t) {
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < 4; i += kStep) {
        const float mine = t < 2 ? sum_[0][i] : sum_[1][i];
        sum_[0][i] = mine + __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
      }
    } else if constexpr (kPair) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum_[0][i] += sum_[1][i];
    }
  }

  __device__ __forceinline__ float4 column(int c) const {
    return float4{sum_[c][0], sum_[c][1], sum_[c][2], sum_[c][3]};
  }

 private:
  static constexpr bool kPair = kFolded && kColumns == 1;  // a sum a block: two chains of MMA
  // of one row of X, every second element counts
  static constexpr int kStep = kM == 1 ? 2 : 1;

  // What fields lack: 2^126 in bf16, of which X has 2^64 already, and 2^14 in fp16.
  static constexpr u32 kRestore = kIsBf16<T> ? 62 : 14;

  // Scales of rows g and g + 8 for block `index` of a tile; of bare codes with normal scales, times 2^kRestore.
  static __device__ __forceinline__ void block_scales(u32 bytes, u32 index, float& low, float& high) {
    if constexpr (kFull) {
      low = scale<0>(__byte_perm(bytes, 0u, 0x4440 + index));
      high = scale<0>(__byte_perm(bytes, 0u, 0x4442 + index));
    } else {
      u32 pair = __byte_perm(bytes, 0u, 0x4240 + index * 0x0101) * 128u;
      if constexpr (kScaling == Scaling::bare) pair = Bf16::multiply(pair, (127 + kRestore) * 0x00800080u);
      low = Bf16::low(pair);
      high = Bf16::high(pair);
    }
  }

  template <int Block> static __device__ __forceinline__ void multiply(float (&d)[4], const Tile& w, const Vec4& x) {
    const u32(&a)[4] = w.low[Block];
    const u32(&b)[4] = w.high[Block];
    T::mma(d, a[0], b[0], a[1], b[1], x.x, x.y);
    T::mma(d, a[2], b[2], a[3], b[3], x.z, x.w);
  }

  static __device__ __forceinline__ void scaled(float (&sum)[4], const float (&d)[4], float low, float high) {
    constexpr bool kLacks = kScaling == Scaling::bare && kFull;
#pragma unroll
    for (int i = 0; i < 4; i += kStep)
      sum[i] = fmaf(i < 2 ? low : high, kLacks ? d[i] * bits_to_float((127 + kRestore) << 23) : d[i], sum[i]);
  }

  float sum_[kSplit || kPair ? 2 : kColumns][4] = {};
};

}  // namespace jitmx
