// Products of a warpgroup (wgmma, sm_90a) beyond those of wgmma_product.cuh: whose sums begin anew, and whose B lies
// with its columns side by side in shared memory. 32, 64 or 128 columns, bf16 or fp16.
#pragma once
#include "jitmx/mma/wgmma_product.cuh"

namespace jitmx {

#define JITMX_NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JITMX_NAMES_64 \
  JITMX_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JITMX_NAMES_128 \
  JITMX_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JITMX_SUMS_4(how, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define JITMX_SUMS_16(how, i) \
  JITMX_SUMS_4(how, i), JITMX_SUMS_4(how, i + 4), JITMX_SUMS_4(how, i + 8), JITMX_SUMS_4(how, i + 12)
#define JITMX_SUMS_32(how) JITMX_SUMS_16(how, 0)
#define JITMX_SUMS_64(how) JITMX_SUMS_32(how), JITMX_SUMS_16(how, 16)
#define JITMX_SUMS_128(how) JITMX_SUMS_64(how), JITMX_SUMS_16(how, 32), JITMX_SUMS_16(how, 48)

template <int N> struct WgmmaAttention;

// i0 to i4: how the operands behind the sums are named.
#define JITMX_TEXT(N, kind, compare, a, rest) \
  "{\n.reg .pred add;\nsetp." compare ".u32 add, 0, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" #N kind " {" JITMX_NAMES_##N "}, " a ", add, 1, 1" rest ";\n}\n"
#define JITMX_FIRST(N, kind, i0, i1) \
  asm volatile(JITMX_TEXT(N, kind, "ne", i0 ", " i1, ", 0, 0") \
               : JITMX_SUMS_##N("=f") : "l"(a_matrix), "l"(b_matrix))
#define JITMX_TRANSPOSED(N, kind, i0, i1, i2, i3, i4) \
  asm volatile(JITMX_TEXT(N, kind, "eq", "{" i0 ", " i1 ", " i2 ", " i3 "}, " i4, ", 1") \
               : JITMX_SUMS_##N("+f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_matrix))
#define JITMX_WGMMA_ATTENTION(N, i0, i1, i2, i3, i4) \
  template <> struct WgmmaAttention<N> { \
    /* D = A B, both by descriptors of matrix_descriptor. */ \
    template <class T> static __device__ __forceinline__ void first(float (&d)[N / 2], u64 a_matrix, u64 b_matrix) {  \
      if constexpr (kWgmmaType<T> == 0) \
        JITMX_FIRST(N, "k16.f32.bf16.bf16", i0, i1); \
      else \
        JITMX_FIRST(N, "k16.f32.f16.f16", i0, i1); \
    } \
    /* D += A B, A from registers, B by transposed_descriptor. */ \
    template <class T> \
    static __device__ __forceinline__ void transposed(float (&d)[N / 2], const u32 (&a)[4], u64 b_matrix) { \
      if constexpr (kWgmmaType<T> == 0) \
        JITMX_TRANSPOSED(N, "k16.f32.bf16.bf16", i0, i1, i2, i3, i4); \
      else \
        JITMX_TRANSPOSED(N, "k16.f32.f16.f16", i0, i1, i2, i3, i4); \
    } \
  }

JITMX_WGMMA_ATTENTION(32, "%16", "%17", "%18", "%19", "%20");
JITMX_WGMMA_ATTENTION(64, "%32", "%33", "%34", "%35", "%36");
JITMX_WGMMA_ATTENTION(128, "%64", "%65", "%66", "%67", "%68");

#undef JITMX_WGMMA_ATTENTION
#undef JITMX_TRANSPOSED
#undef JITMX_FIRST
#undef JITMX_TEXT
#undef JITMX_SUMS_128
#undef JITMX_SUMS_64
#undef JITMX_SUMS_32
#undef JITMX_SUMS_16
#undef JITMX_SUMS_4
#undef JITMX_NAMES_128
#undef JITMX_NAMES_64
#undef JITMX_NAMES_32

// Descriptor of a matrix whose k lie in rows of 128 bytes, 64 columns side by side, with the 128-byte swizzle; the next
// 64 columns are `panel` bytes on.
__device__ __forceinline__ u64 transposed_descriptor(u32 address, u32 panel) {
  return u64(1) << 62 | u64(1024 / 16) << 32 | u64(panel / 16) << 16 | (address & 0x3FFFFu) / 16;
}

}  // namespace jitmx
