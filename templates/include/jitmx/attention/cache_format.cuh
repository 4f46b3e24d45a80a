// How keys and values lie in shared memory, a token a row, and how fragments of m16n8k16 are read from there.
#pragma once
#include "jitmx/attention/rope.cuh"
#include "jitmx/math/divisor.cuh"
#include "jitmx/math/warp.cuh"
#include "jitmx/ptx/e4m3.cuh"
#include "jitmx/ptx/matrix.cuh"
#include "jitmx/ptx/shared.cuh"

namespace jitmx {

// Rows of `Bytes`, a multiple of 32: where vector v (16 bytes) of a row lies, so that eight neighbouring rows have the
// same vector in all banks.
template <int Bytes> struct Rows {
  static constexpr int kVectors = Bytes / 16;
  static constexpr int kCycle = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 2;
  static_assert(kVectors % 2 == 0, "rows are whole pairs of vectors");
  static __device__ __forceinline__ u32 at(u32 row, u32 v) {
    return row * Bytes + (v ^ row / (8 / kCycle) % kCycle) * 16;
  }
  // From the address of a vector of the first rows, a power of two, to that of a row `rows` on, a multiple of it.
  static __device__ __forceinline__ u32 below(u32 address, int rows) {
    return (address ^ u32(rows / (8 / kCycle) % kCycle * 16)) + u32(rows * Bytes);
  }
  // From the address of a vector, in rows that begin at a multiple of 128 bytes, to that of the one which has the bits
  // of `v` too, and is `rows` later, a multiple of 8: by constants, where the compiler would take addresses anew.
  static __device__ __forceinline__ u32 from(u32 address, int rows, int v) {
    return (address ^ u32(v % kCycle * 16)) + u32(v / kCycle * kCycle * 16 + rows * Bytes);
  }
};

// 16-bit values, as they are.
template <class T, int D> struct SameFormat {
  using Product = T;  // type of the operands of products
  using Row = Rows<D * 2>;
  static constexpr int kBytes = 2;

  // Of 16 keys and 16 values of the head: operands b0, b1 of the first eight keys, then of the others.
  static __device__ __forceinline__ void keys(u32 rows, int row, int step, int lane, u32 (&b)[4]) {
    load_matrices(Row::from(rows + Row::at(lane % 8 + lane / 16 * 8, lane / 8 % 2), row, 2 * step), b);
  }
  // Of 16 keys and values 16 step ... of the head: operands of column tiles 2 step and 2 step + 1.
  static __device__ __forceinline__ void values(u32 rows, int row, int step, int lane, u32 (&b)[4]) {
    load_transposed(Row::from(rows + Row::at(lane % 16, lane / 16), row, 2 * step), b);
  }
  // Sixteen keys, whose operands a step at a time takes.
  struct Keys {
    u32 rows;
    int row, lane;

    __device__ __forceinline__ void load(u32 rows, int row, int lane) { *this = {rows, row, lane}; }
    __device__ __forceinline__ void operands(int step, u32 (&b)[4]) const { keys(rows, row, step, lane, b); }
  };
  // Of 16 keys and values 32 pair ... of the head: operands of column tiles 4 pair ... 4 pair + 3.
  static __device__ __forceinline__ void values(u32 rows, int row, int pair, int lane, u32 (&b)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_transposed(Row::from(rows + Row::at(lane % 16, lane / 16), row, 4 * pair + 2 * i), b[i]);
  }
  // Of 16 rows of Q, in the same form.
  static __device__ __forceinline__ void queries(u32 rows, int row, int step, int lane, u32 (&a)[4]) {
    load_matrices(Row::from(rows + Row::at(lane % 16, lane / 16), row, 2 * step), a);
  }
  // Q of a block as rows, for the operands above.
  struct Queries {
    static __device__ __forceinline__ u32 at(int row, int d) { return Rows<D * 2>::at(row, d / 8); }
    static __device__ __forceinline__ void store(u8* to, const Vec4& v) { *reinterpret_cast<Vec4*>(to) = v; }
    static __device__ __forceinline__ void load(u32 rows, int row, int step, int lane, u32 (&a)[4]) {
      queries(rows, row, step, lane, a);
    }
  };
  // Which value of the head column tile j's elements 2 t and 2 t + 1 are.
  static __device__ __forceinline__ int column(int j, int t, int element) { return 8 * j + 2 * t + element; }
  static constexpr int kSpread = 8;  // words between rows of sums, of which four rows are written at a time

  // What the cache keeps of eight values of T, where it lies there and in shared memory.
  using Stored = Vec4;
  template <class> static __device__ __forceinline__ Stored stored(const Vec4& v, const Divisor&) { return v; }
  static __device__ __forceinline__ Stored* in_cache(void* cache, u64 at) {
    return reinterpret_cast<Stored*>(static_cast<u16*>(cache) + at);
  }
  static __device__ __forceinline__ Stored* in_row(u8* rows, int row, int d) {
    return reinterpret_cast<Stored*>(rows + Row::at(row, d / 8));
  }

  // Elements 2 half and 2 half + 1 of all column tiles times `factor` go to a row of Out, of lane t of each quad.
  template <class Out>
  static __device__ __forceinline__ void write(u16* row, bool there, int t, const float (&sums)[D / 8][4], int half,
                                               float factor) {
#pragma unroll
    for (int j = 0; j < D / 8; j += 4) {
      const auto pair = [&](int i) {
        return Out::round_pair(sums[j + i][2 * half] * factor, sums[j + i][2 * half + 1] * factor);
      };
      Vec4 v = {pair(0), pair(1), pair(2), pair(3)};
      exchange_in_quad(v, t);
      if (there) *reinterpret_cast<Vec4*>(row + 8 * (j + t)) = v;
    }
  }
};

// E4M3, which products take as fp16: exact. Which k of a product stands for which value of the head is free, so that
// a lane takes its keys by vectors; and columns of V come in pairs, so that bytes are transposed two at a time.
template <int D> struct E4m3Format {
  using Product = Fp16;
  using Row = Rows<D>;
  static constexpr int kBytes = 1;

  // Steps whose values of a key a lane has side by side: of rows of 64 bytes four, a vector of 16. Lane 4 g + t has
  // values 4 kSteps t ... of each 16 kSteps of key g, four of them a step.
  static constexpr int kSteps = D % 64 == 0 ? 4 : 2;
  static __device__ __forceinline__ int byte(int step, int lane) {
    return step / kSteps * kSteps * 16 + lane % 4 * 4 * kSteps + step % kSteps * 4;
  }

  static __device__ __forceinline__ void keys(u32 rows, int row, int step, int lane, u32 (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = byte(step, lane);
      operands(load_shared_word(rows + Row::at(row + 8 * i + lane / 4, at / 16) + at % 16), b[2 * i], b[2 * i + 1]);
    }
  }
  // Sixteen keys by vectors of all steps, and their operands a step at a time.
  struct Keys {
    u32 words[2][D / 16];

    __device__ __forceinline__ void load(u32 rows, int row, int lane) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int first = 0; first < D / 16; first += kSteps) {
          const int at = byte(first, lane);
          const u32 from = rows + Row::at(row + 8 * i + lane / 4, at / 16) + at % 16;
          if constexpr (kSteps == 4) {
            const Vec4 v = load_shared(from);
            words[i][first] = v.x;
            words[i][first + 1] = v.y;
            words[i][first + 2] = v.z;
            words[i][first + 3] = v.w;
          } else {
            const uint2 v = load_shared_pair(from);
            words[i][first] = v.x;
            words[i][first + 1] = v.y;
          }
        }
    }
    __device__ __forceinline__ void operands(int step, u32 (&b)[4]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) E4m3Format::operands(words[i][step], b[2 * i], b[2 * i + 1]);
    }
  };
  static __device__ __forceinline__ void operands(u32 codes, u32& b0, u32& b1) {
    from_e4m3x4(codes, b0, b1);
  }
  static __device__ __forceinline__ void values(u32 rows, int row, int pair, int lane, u32 (&b)[2][4]) {
    // Matrices of pairs of values: of the first eight keys and the others, of 16 values, a vector, and of the next.
    u32 m[4];
    load_transposed(Row::from(rows + Row::at(lane % 16, lane / 16), row, 2 * pair), m);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        from_e4m3x4(__byte_perm(m[2 * i + half], 0u, 0x3120), b[i][half], b[i][2 + half]);
  }
  // The same values of 16 rows of Q, in fp16, rows of 2 D bytes.
  static __device__ __forceinline__ void queries(u32 rows, int row, int step, int lane, u32 (&a)[4]) {
    const int at = 2 * byte(step, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 v = load_shared_pair(rows + Rows<D * 2>::at(row + 8 * i + lane / 4, at / 16) + at % 16);
      a[i] = v.x;
      a[i + 2] = v.y;
    }
  }
  // The same as operands lie in registers, 16 bytes a lane, step and 16 rows: eight values from `d` on, a multiple of
  // eight, are two words of a step and two of the next.
  struct Queries {
    static __device__ __forceinline__ u32 at(int row, int d) {
      const int step = d / (16 * kSteps) * kSteps + d / 4 % kSteps, lane = row % 8 * 4 + d / (4 * kSteps) % 4;
      return row / 16 * (D * 32) + step * 512 + lane * 16 + row % 16 / 8 * 4;
    }
    static __device__ __forceinline__ void store(u8* to, const Vec4& v) {
      u32* const words = reinterpret_cast<u32*>(to);
      words[0] = v.x;
      words[2] = v.y;
      words[128] = v.z;
      words[130] = v.w;
    }
    static __device__ __forceinline__ void load(u32 rows, int row, int step, int lane, u32 (&a)[4]) {
      const Vec4 v = load_shared(rows + row * (D * 2) + step * 512 + lane * 16);
      a[0] = v.x;
      a[1] = v.y;
      a[2] = v.z;
      a[3] = v.w;
    }
  };
  static __device__ __forceinline__ int column(int j, int t, int element) {
    return j / 2 * 16 + 4 * t + 2 * element + j % 2;
  }
  static constexpr int kSpread = 16;  // words between rows of sums, of which two rows are written at a time

  using Stored = uint2;
  template <class T> static __device__ __forceinline__ Stored stored(const Vec4& values, const Divisor& scale) {
    const Eight v = widened<T>(values);
    u32 word[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      word[i] = to_e4m3x2(scale(v.x[4 * i]), scale(v.x[4 * i + 1])) |
                to_e4m3x2(scale(v.x[4 * i + 2]), scale(v.x[4 * i + 3])) << 16;
    return make_uint2(word[0], word[1]);
  }
  static __device__ __forceinline__ Stored* in_cache(void* cache, u64 at) {
    return reinterpret_cast<Stored*>(static_cast<u8*>(cache) + at);
  }
  static __device__ __forceinline__ Stored* in_row(u8* rows, int row, int d) {
    return reinterpret_cast<Stored*>(rows + Row::at(row, d / 16) + d % 16);
  }

  // A lane has four neighbouring values of two column tiles.
  template <class Out>
  static __device__ __forceinline__ void write(u16* row, bool there, int t, const float (&sums)[D / 8][4], int half,
                                               float factor) {
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      const auto pair = [&](int e) { return Out::round_pair(sums[j][e] * factor, sums[j + 1][e] * factor); };
      if (there) *reinterpret_cast<uint2*>(row + 8 * j + 4 * t) = make_uint2(pair(2 * half), pair(2 * half + 1));
    }
  }
};

// Eight values of Q as products take them: fp16 beside E4M3, whose range ends before that of bf16.
template <class T> __device__ __forceinline__ Vec4 as_operand(const Vec4& v) {
  const Eight wide = widened<T>(v);
  return {to_finite_fp16x2(wide.x[0], wide.x[1]), to_finite_fp16x2(wide.x[2], wide.x[3]),
          to_finite_fp16x2(wide.x[4], wide.x[5]), to_finite_fp16x2(wide.x[6], wide.x[7])};
}

}  // namespace jitmx
