// Products of a warpgroup (wgmma, sm_90a): D[64, N] += A[64, k] B[k, N], sums in fp32. k is 32 bytes: 16 values of bf16
// and fp16, 32 of e4m3. A comes from registers, as m16n8k16 takes it for each warp's 16 rows, or from shared memory; B
// lies in shared memory as rows of N, k side by side, both by descriptors of matrix_descriptor. All four warps execute
// each together.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/mx/minifloat.cuh"

namespace jitmx {

// Products with N columns, 8 to 256 by 8. `d` has N / 2 sums of each lane, or more, of which the first are added to.
template <int N> struct Wgmma;

template <class T> constexpr int kWgmmaType = -1;
template <> constexpr int kWgmmaType<Bf16> = 0;
template <> constexpr int kWgmmaType<Fp16> = 1;
template <> constexpr int kWgmmaType<E4M3> = 2;

// Lists of operands: sums as they are named in the text of an instruction, and as what they are bound to.
#define JITMX_NAMES_8 "%0, %1, %2, %3"
#define JITMX_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define JITMX_NAMES_16 JITMX_NAMES_8 ", %4, %5, %6, %7"
#define JITMX_SUMS_16 JITMX_SUMS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define JITMX_NAMES_24 JITMX_NAMES_16 ", %8, %9, %10, %11"
#define JITMX_SUMS_24 JITMX_SUMS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define JITMX_NAMES_32 JITMX_NAMES_24 ", %12, %13, %14, %15"
#define JITMX_SUMS_32 JITMX_SUMS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define JITMX_NAMES_40 JITMX_NAMES_32 ", %16, %17, %18, %19"
#define JITMX_SUMS_40 JITMX_SUMS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define JITMX_NAMES_48 JITMX_NAMES_40 ", %20, %21, %22, %23"
#define JITMX_SUMS_48 JITMX_SUMS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define JITMX_NAMES_56 JITMX_NAMES_48 ", %24, %25, %26, %27"
#define JITMX_SUMS_56 JITMX_SUMS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define JITMX_NAMES_64 JITMX_NAMES_56 ", %28, %29, %30, %31"
#define JITMX_SUMS_64 JITMX_SUMS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define JITMX_NAMES_72 JITMX_NAMES_64 ", %32, %33, %34, %35"
#define JITMX_SUMS_72 JITMX_SUMS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define JITMX_NAMES_80 JITMX_NAMES_72 ", %36, %37, %38, %39"
#define JITMX_SUMS_80 JITMX_SUMS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define JITMX_NAMES_88 JITMX_NAMES_80 ", %40, %41, %42, %43"
#define JITMX_SUMS_88 JITMX_SUMS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define JITMX_NAMES_96 JITMX_NAMES_88 ", %44, %45, %46, %47"
#define JITMX_SUMS_96 JITMX_SUMS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define JITMX_NAMES_104 JITMX_NAMES_96 ", %48, %49, %50, %51"
#define JITMX_SUMS_104 JITMX_SUMS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define JITMX_NAMES_112 JITMX_NAMES_104 ", %52, %53, %54, %55"
#define JITMX_SUMS_112 JITMX_SUMS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define JITMX_NAMES_120 JITMX_NAMES_112 ", %56, %57, %58, %59"
#define JITMX_SUMS_120 JITMX_SUMS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define JITMX_NAMES_128 JITMX_NAMES_120 ", %60, %61, %62, %63"
#define JITMX_SUMS_128 JITMX_SUMS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define JITMX_NAMES_136 JITMX_NAMES_128 ", %64, %65, %66, %67"
#define JITMX_SUMS_136 JITMX_SUMS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define JITMX_NAMES_144 JITMX_NAMES_136 ", %68, %69, %70, %71"
#define JITMX_SUMS_144 JITMX_SUMS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define JITMX_NAMES_152 JITMX_NAMES_144 ", %72, %73, %74, %75"
#define JITMX_SUMS_152 JITMX_SUMS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define JITMX_NAMES_160 JITMX_NAMES_152 ", %76, %77, %78, %79"
#define JITMX_SUMS_160 JITMX_SUMS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define JITMX_NAMES_168 JITMX_NAMES_160 ", %80, %81, %82, %83"
#define JITMX_SUMS_168 JITMX_SUMS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define JITMX_NAMES_176 JITMX_NAMES_168 ", %84, %85, %86, %87"
#define JITMX_SUMS_176 JITMX_SUMS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define JITMX_NAMES_184 JITMX_NAMES_176 ", %88, %89, %90, %91"
#define JITMX_SUMS_184 JITMX_SUMS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define JITMX_NAMES_192 JITMX_NAMES_184 ", %92, %93, %94, %95"
#define JITMX_SUMS_192 JITMX_SUMS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define JITMX_NAMES_200 JITMX_NAMES_192 ", %96, %97, %98, %99"
#define JITMX_SUMS_200 JITMX_SUMS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define JITMX_NAMES_208 JITMX_NAMES_200 ", %100, %101, %102, %103"
#define JITMX_SUMS_208 JITMX_SUMS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define JITMX_NAMES_216 JITMX_NAMES_208 ", %104, %105, %106, %107"
#define JITMX_SUMS_216 JITMX_SUMS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define JITMX_NAMES_224 JITMX_NAMES_216 ", %108, %109, %110, %111"
#define JITMX_SUMS_224 JITMX_SUMS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define JITMX_NAMES_232 JITMX_NAMES_224 ", %112, %113, %114, %115"
#define JITMX_SUMS_232 JITMX_SUMS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define JITMX_NAMES_240 JITMX_NAMES_232 ", %116, %117, %118, %119"
#define JITMX_SUMS_240 JITMX_SUMS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define JITMX_NAMES_248 JITMX_NAMES_240 ", %120, %121, %122, %123"
#define JITMX_SUMS_248 JITMX_SUMS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define JITMX_NAMES_256 JITMX_NAMES_248 ", %124, %125, %126, %127"
#define JITMX_SUMS_256 JITMX_SUMS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define JITMX_PRODUCT(N, kind, a, rest) \
  "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" #N kind " {" JITMX_NAMES_##N "}, " a ", add, 1, 1" rest ";\n}\n"
#define JITMX_REGISTERS(N, kind, a0, a1, a2, a3, b, rest) \
  asm volatile(JITMX_PRODUCT(N, kind, "{" a0 ", " a1 ", " a2 ", " a3 "}, " b, rest) \
               : JITMX_SUMS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_matrix))
#define JITMX_SHARED(N, kind, a, b, rest) \
  asm volatile(JITMX_PRODUCT(N, kind, a ", " b, rest) : JITMX_SUMS_##N : "l"(a_matrix), "l"(b_matrix))

// i0 to i4: how the operands behind the sums are named.
#define JITMX_WGMMA(N, i0, i1, i2, i3, i4)                                                                        \
  template <> struct Wgmma<N> {                                                                                   \
    template <class T, int Sums>                                                                                  \
    static __device__ __forceinline__ void from_registers(float (&d)[Sums], const u32* a, u64 b_matrix) {         \
      static_assert(2 * Sums >= N && kWgmmaType<T> >= 0, "sums for all columns, of a type that there is");        \
      if constexpr (kWgmmaType<T> == 0)                                                                           \
        JITMX_REGISTERS(N, "k16.f32.bf16.bf16", i0, i1, i2, i3, i4, ", 0");                                       \
      else if constexpr (kWgmmaType<T> == 1)                                                                      \
        JITMX_REGISTERS(N, "k16.f32.f16.f16", i0, i1, i2, i3, i4, ", 0");                                         \
      else                                                                                                        \
        JITMX_REGISTERS(N, "k32.f32.e4m3.e4m3", i0, i1, i2, i3, i4, "");                                          \
    }                                                                                                             \
    template <class T, int Sums>                                                                                  \
    static __device__ __forceinline__ void from_shared(float (&d)[Sums], u64 a_matrix, u64 b_matrix) {            \
      static_assert(2 * Sums >= N && kWgmmaType<T> >= 0, "sums for all columns, of a type that there is");        \
      if constexpr (kWgmmaType<T> == 0)                                                                           \
        JITMX_SHARED(N, "k16.f32.bf16.bf16", i0, i1, ", 0, 0");                                                   \
      else if constexpr (kWgmmaType<T> == 1)                                                                      \
        JITMX_SHARED(N, "k16.f32.f16.f16", i0, i1, ", 0, 0");                                                     \
      else                                                                                                        \
        JITMX_SHARED(N, "k32.f32.e4m3.e4m3", i0, i1, "");                                                         \
    }                                                                                                             \
  }

JITMX_WGMMA(8, "%4", "%5", "%6", "%7", "%8");
JITMX_WGMMA(16, "%8", "%9", "%10", "%11", "%12");
JITMX_WGMMA(24, "%12", "%13", "%14", "%15", "%16");
JITMX_WGMMA(32, "%16", "%17", "%18", "%19", "%20");
JITMX_WGMMA(40, "%20", "%21", "%22", "%23", "%24");
JITMX_WGMMA(48, "%24", "%25", "%26", "%27", "%28");
JITMX_WGMMA(56, "%28", "%29", "%30", "%31", "%32");
JITMX_WGMMA(64, "%32", "%33", "%34", "%35", "%36");
JITMX_WGMMA(72, "%36", "%37", "%38", "%39", "%40");
JITMX_WGMMA(80, "%40", "%41", "%42", "%43", "%44");
JITMX_WGMMA(88, "%44", "%45", "%46", "%47", "%48");
JITMX_WGMMA(96, "%48", "%49", "%50", "%51", "%52");
JITMX_WGMMA(104, "%52", "%53", "%54", "%55", "%56");
JITMX_WGMMA(112, "%56", "%57", "%58", "%59", "%60");
JITMX_WGMMA(120, "%60", "%61", "%62", "%63", "%64");
JITMX_WGMMA(128, "%64", "%65", "%66", "%67", "%68");
JITMX_WGMMA(136, "%68", "%69", "%70", "%71", "%72");
JITMX_WGMMA(144, "%72", "%73", "%74", "%75", "%76");
JITMX_WGMMA(152, "%76", "%77", "%78", "%79", "%80");
JITMX_WGMMA(160, "%80", "%81", "%82", "%83", "%84");
JITMX_WGMMA(168, "%84", "%85", "%86", "%87", "%88");
JITMX_WGMMA(176, "%88", "%89", "%90", "%91", "%92");
JITMX_WGMMA(184, "%92", "%93", "%94", "%95", "%96");
JITMX_WGMMA(192, "%96", "%97", "%98", "%99", "%100");
JITMX_WGMMA(200, "%100", "%101", "%102", "%103", "%104");
JITMX_WGMMA(208, "%104", "%105", "%106", "%107", "%108");
JITMX_WGMMA(216, "%108", "%109", "%110", "%111", "%112");
JITMX_WGMMA(224, "%112", "%113", "%114", "%115", "%116");
JITMX_WGMMA(232, "%116", "%117", "%118", "%119", "%120");
JITMX_WGMMA(240, "%120", "%121", "%122", "%123", "%124");
JITMX_WGMMA(248, "%124", "%125", "%126", "%127", "%128");
JITMX_WGMMA(256, "%128", "%129", "%130", "%131", "%132");

#undef JITMX_WGMMA
#undef JITMX_SHARED
#undef JITMX_REGISTERS
#undef JITMX_PRODUCT
#undef JITMX_NAMES_8
#undef JITMX_SUMS_8
#undef JITMX_NAMES_16
#undef JITMX_SUMS_16
#undef JITMX_NAMES_24
#undef JITMX_SUMS_24
#undef JITMX_NAMES_32
#undef JITMX_SUMS_32
#undef JITMX_NAMES_40
#undef JITMX_SUMS_40
#undef JITMX_NAMES_48
#undef JITMX_SUMS_48
#undef JITMX_NAMES_56
#undef JITMX_SUMS_56
#undef JITMX_NAMES_64
#undef JITMX_SUMS_64
#undef JITMX_NAMES_72
#undef JITMX_SUMS_72
#undef JITMX_NAMES_80
#undef JITMX_SUMS_80
#undef JITMX_NAMES_88
#undef JITMX_SUMS_88
#undef JITMX_NAMES_96
#undef JITMX_SUMS_96
#undef JITMX_NAMES_104
#undef JITMX_SUMS_104
#undef JITMX_NAMES_112
#undef JITMX_SUMS_112
#undef JITMX_NAMES_120
#undef JITMX_SUMS_120
#undef JITMX_NAMES_128
#undef JITMX_SUMS_128
#undef JITMX_NAMES_136
#undef JITMX_SUMS_136
#undef JITMX_NAMES_144
#undef JITMX_SUMS_144
#undef JITMX_NAMES_152
#undef JITMX_SUMS_152
#undef JITMX_NAMES_160
#undef JITMX_SUMS_160
#undef JITMX_NAMES_168
#undef JITMX_SUMS_168
#undef JITMX_NAMES_176
#undef JITMX_SUMS_176
#undef JITMX_NAMES_184
#undef JITMX_SUMS_184
#undef JITMX_NAMES_192
#undef JITMX_SUMS_192
#undef JITMX_NAMES_200
#undef JITMX_SUMS_200
#undef JITMX_NAMES_208
#undef JITMX_SUMS_208
#undef JITMX_NAMES_216
#undef JITMX_SUMS_216
#undef JITMX_NAMES_224
#undef JITMX_SUMS_224
#undef JITMX_NAMES_232
#undef JITMX_SUMS_232
#undef JITMX_NAMES_240
#undef JITMX_SUMS_240
#undef JITMX_NAMES_248
#undef JITMX_SUMS_248
#undef JITMX_NAMES_256
#undef JITMX_SUMS_256

// The same over Steps steps of 32 bytes of k, of rows of 128 bytes in shared memory. Sums for more than 256 columns are
// in two halves, and a product of more columns than one half is two.
template <class T, int N, int Steps, int Sums>
__device__ __forceinline__ void wgmma_steps(float (&d)[Sums], const u32 (&a)[4 * Steps], u64 b_matrix) {
  constexpr int kFirst = Sums <= 128 ? 2 * Sums : Sums;  // columns
  if constexpr (N <= kFirst) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) Wgmma<N>::template from_registers<T>(d, a + 4 * i, b_matrix + 2 * i);
  } else {
    auto& second = reinterpret_cast<float (&)[Sums - kFirst / 2]>(d[kFirst / 2]);
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
      Wgmma<kFirst>::template from_registers<T>(d, a + 4 * i, b_matrix + 2 * i);
      Wgmma<N - kFirst>::template from_registers<T>(second, a + 4 * i, b_matrix + 2 * i + kFirst * (128 / 16));
    }
  }
}

}  // namespace jitmx
