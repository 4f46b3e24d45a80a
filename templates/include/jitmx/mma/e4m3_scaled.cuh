// What block-scaled MMA does (block_scaled.cuh) for activations in E4M3, by m16n8k32 in E4M3 (from sm_89 on): E2M1 is
// an E4M3 number of another bias, and one product makes the sum of a block.
#pragma once
#include "jitmx/mma/block_scaled.cuh"

namespace jitmx {

template <class Format> struct BlockScaledE4M3 : BlockScaledTwin<Format> {
  static_assert(Format::kBits == 8 && Format::kEmax == 8, "codes of X are E4M3");
  using Twin = BlockScaledTwin<Format>;
  using typename Twin::RowScales;
  using typename Twin::TokenScales;

  template <int Tile>
  static __device__ __forceinline__ void add(float (&d)[4], const RowFragment<Format>& w,
                                             const TokenFragment<Format>& x, const RowScales& rows,
                                             const TokenScales& tokens) {
    block<2 * Tile>(d, w.r, x.r, rows.of[0] & 0xFFu, rows.of[1] & 0xFFu, tokens);
    block<2 * Tile + 1>(d, w.r + 4, x.r + 2, rows.of[0] >> 8 & 0xFFu, rows.of[1] >> 8 & 0xFFu, tokens);
  }

 private:
  static constexpr float kRestore = 64.f;  // 2^(7 - 1): what the biases of E4M3 and E2M1 differ by

  // An E2M1 in bits 5 to 2 of each byte: exponent and mantissa are where those of an E4M3 end, the sign is not.
  static __device__ __forceinline__ u32 widened(u32 w) { return w & 0x1C1C1C1Cu | (w & 0x20202020u) << 2; }

  template <int ByteB>
  static __device__ __forceinline__ void block(float (&d)[4], const u32* w, const u32* x, u32 low, u32 high,
                                               const TokenScales& tokens) {
    float sum[4] = {};
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(widened(w[0])), "r"(widened(w[1])), "r"(widened(w[2])), "r"(widened(w[3])), "r"(x[0]), "r"(x[1]));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitScale<true> a(i < 2 ? low : high);
      const SplitScale<false> b(tokens.of[i % 2] >> 8 * ByteB & 0xFFu);
      d[i] = fmaf(sum[i] * kRestore * (a.first * b.first), a.second * b.second, d[i]);
    }
  }
};

}  // namespace jitmx
