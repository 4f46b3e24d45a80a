// Stages rows of X in shared memory: a slice of k, padded with zeros to whole tiles.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/math/warp.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/async_copy.cuh"
#include "jitmx/ptx/global.cuh"

namespace jitmx {

// RMSNorm of X while it is staged: x g, rounded once, and sums of x^2, by whose root a product of x g is divided.
template <class T> __device__ __forceinline__ u32 weighted(u32 x, u32 g) {
  return u32(T::round(T::low(x) * T::low(g))) | u32(T::round(T::high(x) * T::high(g))) << 16;
}

template <class T> __device__ __forceinline__ Vec4 weighted(const Vec4& x, const Vec4& g) {
  return Vec4{weighted<T>(x.x, g.x), weighted<T>(x.y, g.y), weighted<T>(x.z, g.z), weighted<T>(x.w, g.w)};
}

// Sum of the squares of 8 values.
template <class T> __device__ __forceinline__ float squares(const Vec4& v) {
  const u32 pair[4] = {v.x, v.y, v.z, v.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum = fmaf(T::high(pair[i]), T::high(pair[i]), fmaf(T::low(pair[i]), T::low(pair[i]), sum));
  return sum;
}

// Zeros in rows `from` to kRows: results of their columns are never stored.
template <int kRows, int kThreads> __device__ __forceinline__ void clear_rows(u8* x, int pitch, int from) {
#pragma unroll 1
  for (int i = from * (pitch / 16) + threadIdx.x; i < kRows * (pitch / 16); i += kThreads)
    reinterpret_cast<Vec4*>(x)[i] = Vec4{0u, 0u, 0u, 0u};
}

// Values are stored as they are, or, raised, as 2^64 times them: bf16 below 2^63 whose products are to stay normal.
template <class T, bool kRaised> class StagedX {
 public:
  // X has rows of k values, of which the block takes `tiles` times 64 from tile `first` of k on; a staged row takes
  // `pitch` bytes.
  __device__ __forceinline__ StagedX(const void* x, int k, int first, int tiles, u8* to, int pitch)
      : filled_(k / 8), first_(first), count_(tiles * 8), pitch_(pitch), x_(static_cast<const Vec4*>(x) + first * 8),
        to_(reinterpret_cast<Vec4*>(to)) {}

  // Rows of X, at most kM of them; copies that are not raised are still in flight when this returns. then() is called
  // once, as soon as this thread's first loads are.
  template <int kM, int kThreads, class Then> __device__ __forceinline__ void stage(int rows, Then then) {
    if constexpr (kM == 1) {
#pragma unroll 1
      for (int v = threadIdx.x; v < count_; v += kThreads)
        if constexpr (kRaised)
          *place(0, v) = staged(read(0, v, rows));
        else
          copy_16_or_zero(shared_address(place(0, v)), x_ + (inside(v) ? v : 0), inside(v));
      then();
    } else {
      bool first = true;
      int row = threadIdx.x / count_, v = threadIdx.x - row * count_;
      const auto advance = [&] {
        v += kThreads;
        while (v >= count_) {
          v -= count_;
          ++row;
        }
      };
#pragma unroll 1
      while (row < rows) {
        if constexpr (kRaised) {
          // Several at a time, so that their latencies overlap.
          constexpr int kBatch = kM <= 2 ? 2 : 4;
          Vec4 batch[kBatch];
          Vec4* places[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            places[i] = row < rows ? place(row, v) : nullptr;
            batch[i] = read(row, v, rows);
            advance();
          }
          if (first) then();
          first = false;
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
            if (places[i] != nullptr) *places[i] = staged(batch[i]);
        } else {
          copy_16_or_zero(shared_address(place(row, v)), x_ + (inside(v) ? (u64)row * filled_ + v : 0), inside(v));
          advance();
        }
      }
      if (first) then();
    }
  }

  // Rows of X times the weight of their norm. A warp takes pieces of rows, 32 vectors each, and leaves their sums of
  // squares in piece_sums [rows][pieces].
  template <int kM, int kWarps>
  __device__ __forceinline__ void stage_weighted(int rows, const void* norm, float* piece_sums, int pieces) {
    const int lane = threadIdx.x % 32;
    const Vec4* const weight = static_cast<const Vec4*>(norm) + first_ * 8;
    const int present = kM == 1 ? 1 : rows;
    int row = 0, piece = threadIdx.x / 32;
    const auto settle = [&] {
      if constexpr (kM == 1) {
        row = piece >= pieces;
      } else {
        while (piece >= pieces) {
          piece -= pieces;
          ++row;
        }
      }
    };
    settle();
#pragma unroll 1
    while (row < present) {
      // Several at a time, so that their latencies overlap.
      constexpr int kBatch = kM == 1 ? 1 : kM == 2 ? 2 : 4;
      Vec4 batch[kBatch], weights[kBatch];
      int taken[kBatch], at[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        taken[i] = row;
        at[i] = piece * 32 + lane;
        const bool there = row < present && at[i] < count_ && inside(at[i]);
        batch[i] = there ? load_once(x_ + (u64)row * filled_ + at[i]) : Vec4{0u, 0u, 0u, 0u};
        weights[i] = there ? weight[at[i]] : Vec4{0u, 0u, 0u, 0u};
        piece += kWarps;
        settle();
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (taken[i] >= present) break;
        if (at[i] < count_) *place(taken[i], at[i]) = staged(weighted<T>(batch[i], weights[i]));
        const float sum = warp_sum(squares<T>(batch[i]));
        if (lane == 0) piece_sums[taken[i] * pieces + at[i] / 32] = sum;
      }
    }
  }

 private:
  __device__ __forceinline__ bool inside(int v) const { return first_ * 8 + v < filled_; }
  __device__ __forceinline__ Vec4* place(int row, int v) const { return to_ + row * (pitch_ / 16) + v; }
  __device__ __forceinline__ Vec4 read(int row, int v, int rows) const {
    return row < rows && inside(v) ? load_once(x_ + (u64)row * filled_ + v) : Vec4{0u, 0u, 0u, 0u};
  }
  static __device__ __forceinline__ Vec4 staged(const Vec4& b) {
    if constexpr (kRaised)
      return raised<T>(b);
    else
      return b;
  }

  int filled_, first_, count_, pitch_;  // vectors of a row, tiles, vectors, bytes
  const Vec4* x_;
  Vec4* to_;
};

}  // namespace jitmx
