// Copies of all threads of a block from global memory to stages in shared memory (cp.async).
#pragma once
#include "jitmx/ptx/async_copy.cuh"

namespace jitmx {

// Copies a [Rows][Bytes] part of a stage by kThreads threads. A thread copies 16 bytes at the same place of every
// kStep-th row, or at several where a row has more than there are threads. Offsets of a thread stay as they are from
// stage to stage, the base moves: a copy that is still to be issued holds up no register that would change.
template <int kThreads, int Rows, int Bytes> class StageCopy {
 public:
  // offset(row): byte of a row in the first stage after `source`; `bytes`: how many of each there are, after which come
  // zeros.
  template <class Offset>
  __device__ __forceinline__ StageCopy(const void* source, int bytes, Offset offset)
      : row_(threadIdx.x / kAcross), place_(threadIdx.x % kAcross * 16), base_(static_cast<const u8*>(source)),
        left_(bytes) {
#pragma unroll
    for (int j = 0; j < kDown; ++j) offset_[j] = offset(row_ + j * kStep) + place_;
  }

  // `pitch`: bytes from a row to the next; `rows`: how many there are, of which the last stands in for those past it.
  __device__ __forceinline__ StageCopy(const void* source, u32 pitch, int rows, int bytes)
      : row_(threadIdx.x / kAcross), place_(threadIdx.x % kAcross * 16), base_(static_cast<const u8*>(source)),
        left_(bytes) {
#pragma unroll
    for (int j = 0; j < kDown; ++j) offset_[j] = u32(min(row_ + j * kStep, rows - 1)) * pitch + place_;
  }

  // Starts copying the next stage to where place(row, byte) says.
  template <class Place> __device__ __forceinline__ void start(Place place) {
#pragma unroll
    for (int across = 0; across < Bytes; across += kAcross * 16) {
      const bool inside = place_ + across < left_;
#pragma unroll
      for (int j = 0; j < kDown; ++j)
        if ((j + 1) * kStep <= Rows || row_ + j * kStep < Rows)
          copy_16_or_zero(place(row_ + j * kStep, place_ + across), base_ + across + offset_[j], inside);
    }
    base_ += Bytes;
    left_ -= Bytes;
  }

 private:
  // Threads that share a row: as many as vectors, or the power of two that divides the threads of the block.
  static constexpr int kVectors = Bytes / 16, kPower = kThreads & -kThreads;
  static constexpr int kAcross = kVectors < kPower ? kVectors : kPower;
  static constexpr int kStep = kThreads / kAcross, kDown = (Rows + kStep - 1) / kStep;
  static_assert(Bytes % 16 == 0 && kVectors % kAcross == 0 && kThreads % kAcross == 0, "threads share rows evenly");
  int row_, place_;
  const u8* base_;
  int left_;
  u32 offset_[kDown];
};

}  // namespace jitmx
