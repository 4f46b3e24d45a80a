// Products of packed MXFP4 weights with MX activations, 16 rows by 64 k by 8 tokens: by block-scaled MMA (SM12x), or by
// its twin, which takes the same registers and selectors, decodes both operands to bf16 and scales the fp32 sum of each
// block.
//
// Scales lie as the instruction wants them. Lane 4 g + t holds, in bytes 0 and 1, those of row g + 8 (t % 2) for both
// blocks of one tile: t / 2 says of which, so that one register serves a pair of tiles ("thread" 0 and 1). A register
// with scales of token g holds the four blocks of both.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/mx/encode.cuh"
#include "jitmx/mxfp4/decode.cuh"

namespace jitmx {

// A word of eight codes in the nibble encoding, from either.
__device__ __forceinline__ u32 to_nibbles(u32 w, Nibble) { return w; }
__device__ __forceinline__ u32 to_nibbles(u32 w, Rotated) {
  u32 p[4];
  Rotated::raw(w, p);
  u32 nibbles = 0u;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    nibbles |= __funnelshift_r(p[i], p[i], 6 - 4 * i & 31) & 0x00070007u << 4 * i |
        p[i] >> (12 - 4 * i) & 0x00080008u << 4 * i;
  return nibbles;
}

// Rows of a tile of weights as the instruction takes them: registers of block 0, then of block 1.
template <class Format> struct RowFragment {
  static constexpr int kBlock = Format::kBits == 4 ? 2 : 4;  // registers a block
  u32 r[2 * kBlock];

  template <class Encoding> __device__ __forceinline__ void set(const Vec4& w) {
    const u32 words[4] =
        {to_nibbles(w.x, Encoding{}), to_nibbles(w.y, Encoding{}), to_nibbles(w.z, Encoding{}),
         to_nibbles(w.w, Encoding{})};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBlock == 2) {
        r[i] = words[i];
      } else {
        // An E2M1 sits in bits 5 to 2 of its byte.
        r[4 * (i / 2) + i % 2] = words[i] << 2 & 0x3C3C3C3Cu;
        r[4 * (i / 2) + 2 + i % 2] = words[i] >> 2 & 0x3C3C3C3Cu;
      }
    }
  }
};

// Registers of a tile that a lane holds of its token's codes, of block 0 and then of block 1.
template <class Format> struct TokenFragment {
  static constexpr int kBlock = Format::kWords;
  u32 r[2 * kBlock];
};

#define JITMX_BLOCK_SCALED_MMA(kind, shape, activation)                                                      \
  asm("mma.sync.aligned.kind::" kind ".m" shape ".row.col.f32.e2m1." activation ".f32.ue8m0 "                \
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, 0};"  \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(rows), "n"(ByteA),             \
        "n"(ThreadA), "r"(tokens), "n"(ByteB))

// The instruction itself.
template <class Format> struct BlockScaled {
  static constexpr int kUnroll = 16;  // columns of tokens
  using RowScales = u32;
  using TokenScales = u32;
  template <int Tile> static __device__ __forceinline__ RowScales rows(u32 held) { return held; }
  static __device__ __forceinline__ TokenScales tokens(u32 held) { return held; }

  // d += W X^T over tile `Tile` of a pair.
  template <int Tile>
  static __device__ __forceinline__ void add(float (&d)[4], const RowFragment<Format>& w,
                                             const TokenFragment<Format>& x, RowScales rows, TokenScales tokens) {
    step<0, Tile, 2 * Tile>(d, w.r, x.r, rows, tokens);
    if constexpr (Format::kBits == 8) step<1, Tile, 2 * Tile + 1>(d, w.r + 4, x.r + 2, rows, tokens);
  }

 private:
  template <int ByteA, int ThreadA, int ByteB>
  static __device__ __forceinline__ void step(float (&d)[4], const u32* a, const u32* b, u32 rows, u32 tokens) {
    if constexpr (Format::kBits == 4)
      JITMX_BLOCK_SCALED_MMA("mxf4.block_scale.scale_vec::2X", "16n8k64", "e2m1");
    else if constexpr (Format::kEmax == 8)
      JITMX_BLOCK_SCALED_MMA("mxf8f6f4.block_scale.scale_vec::1X", "16n8k32", "e4m3");
    else
      JITMX_BLOCK_SCALED_MMA("mxf8f6f4.block_scale.scale_vec::1X", "16n8k32", "e2m3");
  }
};

#undef JITMX_BLOCK_SCALED_MMA

// 2^(byte - 127) as a product of two powers whose exponents differ by one at most, so that no product of two scales
// leaves the range of fp32 unless the result does. Of two that meet, one has its smaller power first.
template <bool SmallFirst> struct SplitScale {
  float first, second;
  __device__ __forceinline__ explicit SplitScale(u32 byte) {
    const u32 half = (byte + 1u) >> 1;
    const float small = bits_to_float((half + 63u) << 23), large = bits_to_float((byte - half + 64u) << 23);
    first = byte == 255u ? bits_to_float(0x7FFFFFFFu) : SmallFirst ? small : large;
    second = SmallFirst ? large : small;
  }
};

// Bytes or nibbles of a register as bf16 fields, which are so many powers of two below the values.
template <class Format> struct Fields;
template <> struct Fields<Mxfp4> {
  static constexpr u32 restore = 0x7E807E80u;  // 2^126
};
template <> struct Fields<Mxfp6> {
  static constexpr u32 restore = 0x7E807E80u;
  static __device__ __forceinline__ u32 even(u32 w) { return merge(w << 10, kSigns, w << 4, 0x01F001F0u); }
  static __device__ __forceinline__ u32 odd(u32 w) { return merge(w << 2, kSigns, w >> 4, 0x01F001F0u); }
};
template <> struct Fields<Mxfp8> {
  static constexpr u32 restore = 0x7B807B80u;  // 2^120
  static __device__ __forceinline__ u32 even(u32 w) { return merge(w << 8, kSigns, w << 4, 0x07F007F0u); }
  static __device__ __forceinline__ u32 odd(u32 w) { return merge(w, kSigns, w >> 4, 0x07F007F0u); }
};
struct ShiftedE2M1 {  // in bits 5 to 2 of a byte
  static constexpr u32 restore = 0x7E807E80u;
  static __device__ __forceinline__ u32 even(u32 w) { return merge(w << 10, kSigns, w << 4, 0x01C001C0u); }
  static __device__ __forceinline__ u32 odd(u32 w) { return merge(w << 2, kSigns, w >> 4, 0x01C001C0u); }
};

// What the instruction does, out of m16n8k16 in bf16: exact products, fp32 sums, one scaling a block.
template <class Format> struct BlockScaledTwin {
  static constexpr int kUnroll = 1;
  struct RowScales {
    u32 of[2];  // rows g and g + 8: bytes 0 and 1
  };
  struct TokenScales {
    u32 of[2];  // tokens 2 t and 2 t + 1: four bytes
  };

  template <int Tile> static __device__ __forceinline__ RowScales rows(u32 held) {
    const u32 from = threadIdx.x % 32 / 4 * 4 + 2 * Tile;
    return {__shfl_sync(0xFFFFFFFFu, held, from), __shfl_sync(0xFFFFFFFFu, held, from + 1)};
  }
  static __device__ __forceinline__ TokenScales tokens(u32 held) {
    const u32 from = threadIdx.x % 4 * 8;
    return {__shfl_sync(0xFFFFFFFFu, held, from), __shfl_sync(0xFFFFFFFFu, held, from + 4)};
  }

  template <int Tile>
  static __device__ __forceinline__ void add(float (&d)[4], const RowFragment<Format>& w,
                                             const TokenFragment<Format>& x, const RowScales& rows,
                                             const TokenScales& tokens) {
    block<0, 2 * Tile>(d, w.r, x.r, rows, tokens);
    block<1, 2 * Tile + 1>(d, w.r + RowFragment<Format>::kBlock, x.r + TokenFragment<Format>::kBlock, rows, tokens);
  }

 private:
  template <int ByteA, int ByteB>
  static __device__ __forceinline__ void block(float (&d)[4], const u32* w, const u32* x, const RowScales& rows,
                                               const TokenScales& tokens) {
    float sum[4] = {};
    if constexpr (Format::kBits == 4) {
      u32 low[4], high[4], b[4];
      decode<Bf16, Nibble>(w[0], Fields<Mxfp4>::restore, low);
      decode<Bf16, Nibble>(w[1], Fields<Mxfp4>::restore, high);
      decode<Bf16, Nibble>(x[0], Fields<Mxfp4>::restore, b);
      Bf16::mma(sum, low[0], high[0], low[1], high[1], b[0], b[1]);
      Bf16::mma(sum, low[2], high[2], low[3], high[3], b[2], b[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        Bf16::mma(sum, even<ShiftedE2M1>(w[2 * i]), even<ShiftedE2M1>(w[2 * i + 1]), odd<ShiftedE2M1>(w[2 * i]),
                  odd<ShiftedE2M1>(w[2 * i + 1]),
                  even<Fields<Format>>(x[i]), odd<Fields<Format>>(x[i]));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitScale<true> a(rows.of[i / 2] >> 8 * ByteA & 0xFFu);
      const SplitScale<false> b(tokens.of[i % 2] >> 8 * ByteB & 0xFFu);
      d[i] = fmaf(sum[i] * (a.first * b.first), a.second * b.second, d[i]);
    }
  }

  template <class F> static __device__ __forceinline__ u32 even(u32 w) {
    return Bf16::multiply(F::even(w), F::restore);
  }
  template <class F> static __device__ __forceinline__ u32 odd(u32 w) { return Bf16::multiply(F::odd(w), F::restore); }
};

}  // namespace jitmx
