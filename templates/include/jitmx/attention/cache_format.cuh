// How keys and values lie in shared memory, a token a row, and how fragments of m16n8k16 are read from there.
#pragma once
#include "jitmx/attention/rope.cuh"
#include "jitmx/ptx/matrix.cuh"
#include "jitmx/ptx/shared.cuh"

namespace jitmx {

// Rows of `Bytes`, a multiple of 32: where vector v (16 bytes) of a row lies, so that eight neighbouring rows have the
// same vector in all banks.
template <int Bytes> struct Rows {
  static constexpr int kVectors = Bytes / 16;
  static constexpr int kCycle = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 2;
  static_assert(kVectors % 2 == 0, "rows are whole pairs of vectors");
  static __device__ __forceinline__ u32 at(int row, int v) {
    return u32(row * Bytes + (v ^ (row / (8 / kCycle)) % kCycle) * 16);
  }
};

// 16-bit values, as they are.
template <class T, int D> struct SameFormat {
  using Product = T;  // type of the operands of products
  using Row = Rows<D * 2>;
  static constexpr int kBytes = 2;
  static constexpr int kColumns = 2;  // neighbouring values of the head that a lane has of a pair of column tiles

  // Sixteen keys, and of 16 values of the head: operands b0, b1 of the first eight keys, then of the others.
  struct Keys {
    u32 rows;
    int row, lane;

    __device__ __forceinline__ void load(u32 rows, int row, int lane) { *this = {rows, row, lane}; }
    __device__ __forceinline__ void operands(int step, u32 (&b)[4]) const {
      load_matrices(rows + Row::at(row + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2), b);
    }
  };
  // Of 16 keys and values 32 pair ... of the head: operands of column tiles 4 pair ... 4 pair + 3.
  static __device__ __forceinline__ void values(u32 rows, int row, int pair, int lane, u32 (&b)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_transposed(rows + Row::at(row + lane % 16, 4 * pair + 2 * i + lane / 16), b[i]);
  }
  // Of 16 rows of Q, in the same form.
  static __device__ __forceinline__ void queries(u32 rows, int row, int step, int lane, u32 (&a)[4]) {
    load_matrices(rows + Row::at(row + lane % 16, 2 * step + lane / 16), a);
  }
  // Which value of the head column tile j's elements 2 t and 2 t + 1 are.
  static __device__ __forceinline__ int column(int j, int t, int element) { return 8 * j + 2 * t + element; }

  // What the cache keeps of eight values, and the same in shared memory.
  static __device__ __forceinline__ void store(void* cache, u64 at, u8* rows, int row, int d, const Eight& v, float,
                                               bool kept) {
    const Vec4 stored = rounded<T>(v);
    *reinterpret_cast<Vec4*>(rows + Row::at(row, d / 8)) = stored;
    if (kept) *reinterpret_cast<Vec4*>(static_cast<u16*>(cache) + at) = stored;
  }
};

// E4M3, which products take as fp16: exact. Which k of a product stands for which value of the head is free, so that
// a lane takes its keys by vectors; and columns of V come in pairs, so that bytes are transposed two at a time.
template <int D> struct E4m3Format {
  using Product = Fp16;
  using Row = Rows<D>;
  static constexpr int kBytes = 1;
  static constexpr int kColumns = 4;

  // Steps whose values of a key a lane has side by side: of rows of 64 bytes four, a vector of 16.
  static constexpr int kSteps = D % 64 == 0 ? 4 : 2;

  // Lane 4 g + t has values 4 kSteps t ... of each 16 kSteps of keys g and g + 8.
  struct Keys {
    u32 words[2][D / 16];

    __device__ __forceinline__ void load(u32 rows, int row, int lane) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int first = 0; first < D / 16; first += kSteps) {
          const int byte = first * 16 + lane % 4 * 4 * kSteps;
          const u32 at = rows + Row::at(row + 8 * i + lane / 4, byte / 16) + byte % 16;
          if (kSteps == 4) {
            const Vec4 v = load_shared(at);
            words[i][first] = v.x;
            words[i][first + 1] = v.y;
            words[i][first + 2] = v.z;
            words[i][first + 3] = v.w;
          } else {
            const uint2 v = load_shared_pair(at);
            words[i][first] = v.x;
            words[i][first + 1] = v.y;
          }
        }
    }
    __device__ __forceinline__ void operands(int step, u32 (&b)[4]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[2 * i] = from_e4m3x2(u16(words[i][step]));
        b[2 * i + 1] = from_e4m3x2(u16(words[i][step] >> 16));
      }
    }
  };
  static __device__ __forceinline__ void values(u32 rows, int row, int pair, int lane, u32 (&b)[2][4]) {
    // Matrices of pairs of values: of the first eight keys and the others, of 16 values and the next.
    u32 m[4];
    load_transposed(rows + Row::at(row + lane % 16, 2 * pair + lane / 16), m);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b[i][0] = from_e4m3x2(u16(__byte_perm(m[2 * i], 0u, 0x20)));
      b[i][1] = from_e4m3x2(u16(__byte_perm(m[2 * i + 1], 0u, 0x20)));
      b[i][2] = from_e4m3x2(u16(__byte_perm(m[2 * i], 0u, 0x31)));
      b[i][3] = from_e4m3x2(u16(__byte_perm(m[2 * i + 1], 0u, 0x31)));
    }
  }
  // The same values of 16 rows of Q, in fp16, rows of 2 D bytes.
  static __device__ __forceinline__ void queries(u32 rows, int row, int step, int lane, u32 (&a)[4]) {
    const int byte = 2 * (step / kSteps * kSteps * 16 + lane % 4 * 4 * kSteps + step % kSteps * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 v = load_shared_pair(rows + Rows<D * 2>::at(row + 8 * i + lane / 4, byte / 16) + byte % 16);
      a[i] = v.x;
      a[i + 2] = v.y;
    }
  }
  static __device__ __forceinline__ int column(int j, int t, int element) {
    return j / 2 * 16 + 4 * t + 2 * element + j % 2;
  }

  static __device__ __forceinline__ void store(void* cache, u64 at, u8* rows, int row, int d, const Eight& v,
                                               float scale, bool kept) {
    u32 word[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      word[i] = to_e4m3x2(v.x[4 * i] / scale, v.x[4 * i + 1] / scale) |
                to_e4m3x2(v.x[4 * i + 2] / scale, v.x[4 * i + 3] / scale) << 16;
    *reinterpret_cast<uint2*>(rows + Row::at(row, d / 16) + d % 16) = make_uint2(word[0], word[1]);
    if (kept) *reinterpret_cast<uint2*>(static_cast<u8*>(cache) + at) = make_uint2(word[0], word[1]);
  }
};

}  // namespace jitmx
