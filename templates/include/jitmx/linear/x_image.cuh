// X permuted to the order of packed weights, once a launch and by all blocks together: an image in the workspace, from
// which a stage is one bulk copy. All blocks must be resident at once: they wait for the parts that others permute.
#pragma once
#include "jitmx/math/warp.cuh"
#include "jitmx/moe/workspace.cuh"
#include "jitmx/pipeline/counters.cuh"
#include "jitmx/ptx/atomic.cuh"
#include "jitmx/ptx/fence.cuh"
#include "jitmx/ptx/global.cuh"

namespace jitmx {

// The workspace: a counter of blocks that are done, for each span of each tile of rows a counter of units that are
// arranged, and after room for the most of those the image [tile of rows][steps][Tokens rows of 128 bytes]: k in the
// order that W has (docs/packed-layout.md), swizzled as wgmma reads it.
template <int Tokens> class XImage {
  static constexpr int kUnit = 16;   // rows of X that a warp arranges at once, 64 k of each
  static constexpr int kParts = Tokens / kUnit;
  static constexpr int kSpans = 8;   // counters of a tile of rows, an eighth of k each
  static constexpr int kCounterBytes = 8192;

 public:
  static constexpr int kStepBytes = Tokens * 128;

  // X [rows, k]; blocks begin with the first `first` of its `tiles` tiles of rows.
  __device__ __forceinline__ XImage(const void* x, int rows, int k, void* workspace, int tiles, int first)
      : x_(static_cast<const Vec4*>(x)), rows_(rows), k_(k), steps_((k + 63) / 64), tiles_(tiles), first_(first),
        span_((steps_ + kSpans - 1) / kSpans), done_(static_cast<u32*>(workspace)),
        bytes_(static_cast<u8*>(workspace) + kCounterBytes) {}

  __device__ __forceinline__ const u8* tile(int token) const { return bytes_ + u64(token) * steps_ * kStepBytes; }

  // Units of what blocks begin with, and of all.
  __device__ __forceinline__ int first_units() const { return first_ * steps_ * kParts; }
  __device__ __forceinline__ int units() const { return tiles_ * steps_ * kParts; }

  // Arranges Count units of 16 rows by 64 k, `stride` apart, those before `end`.
  template <int Count> __device__ __forceinline__ void arrange(int unit, int stride, int end, int lane) const {
    Vec4 v[Count][kUnit / 4];
#pragma unroll
    for (int j = 0; j < Count; ++j) {
      const Place place(*this, unit + j * stride, lane);
      const Vec4* const from = x_ + u64(place.m) * (k_ / 8) + place.column / 8;
#pragma unroll
      for (int i = 0; i < kUnit / 4; ++i)
        v[j][i] = unit + j * stride < end && place.m + 4 * i < rows_ && place.column < k_
            ? load_once(from + i * (k_ / 2))
                                                                                         : Vec4{0u, 0u, 0u, 0u};
    }
#pragma unroll
    for (int j = 0; j < Count; ++j) {
      if (unit + j * stride >= end) break;
      const Place place(*this, unit + j * stride, lane);
      u8* const to = bytes_ + (u64(place.token) * steps_ + place.step) * kStepBytes + place.row * 128;
#pragma unroll
      for (int i = 0; i < kUnit / 4; ++i) {
        exchange_in_quad(v[j][i], lane);
        *reinterpret_cast<Vec4*>(to + i * 512 + (lane % 8 ^ (place.row + 4 * i) % 8) * 16) = v[j][i];
      }
      __syncwarp();
      if (lane == 0) add_release(done_ + 1 + place.token * kSpans + place.step / span_, 1u);
    }
  }

  __device__ __forceinline__ bool opens_span(int step) const { return step % span_ == 0; }

  // Waits until the span of a tile of rows that holds `step` is arranged.
  __device__ __forceinline__ void wait(int token, int step) const {
    const u32 wanted = min(span_, steps_ - step / span_ * span_) * kParts;
    while (load_acquire(done_ + 1 + token * kSpans + step / span_) < wanted) {
    }
    async_proxy_fence();
  }

  // After the last use by this block: the last block of all clears the counters for the next launch.
  __device__ __forceinline__ void finish() const {
    if (arrive_last(done_, gridDim.x))
#pragma unroll 1
      for (int i = 0; i < tiles_ * kSpans; ++i) done_[1 + i] = 0u;
  }

 private:
  // Where a lane finds its part of a unit: tile of rows, step, row in the tile; row of X and column. Units of the tiles
  // that blocks begin with come first, by rising step, and after them those of one tile after another.
  struct Place {
    int token, step, row, m, column;
    __device__ __forceinline__ Place(const XImage& image, int unit, int lane) {
      if (unit < image.first_units()) {
        step = unit / (image.first_ * kParts);
        token = unit % (image.first_ * kParts) / kParts;
      } else {
        token = unit / (image.steps_ * kParts);
        step = unit % (image.steps_ * kParts) / kParts;
      }
      row = unit % kParts * kUnit + lane / 8;
      m = token * Tokens + row;
      column = step * 64 + lane % 8 * 8;
    }
  };

  const Vec4* x_;
  int rows_, k_, steps_, tiles_, first_;
  int span_;  // steps
  u32* done_;
  u8* bytes_;
};

}  // namespace jitmx
