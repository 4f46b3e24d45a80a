// Epilogue of a tile of an expert's rows: bias, router weight and activation, then rows of bf16 in shared memory, and
// from there vectors of eight features. For kernels that hold sums as m16n8 leaves them, W on the side of 16.
#pragma once
#include "jitmx/epilogue/activation.cuh"
#include "jitmx/epilogue/output.cuh"
#include "jitmx/math/scalar.cuh"
#include "jitmx/pipeline/mailbox.cuh"
#include "jitmx/ptx/atomic.cuh"
#include "jitmx/ptx/matrix.cuh"

namespace jitmx {

// Inputs of the epilogue beside sums, and its output.
struct TileOutput {
  const void* bias;      // [experts, n]
  const int* pairs;      // [pairs]: row * top + slot, by expert
  const float* weights;  // [pairs], in the order of rows and slots
  void* y;
  float alpha, limit;    // of SwigluOai
  int n, top;
};

enum class WeightOn { Input, Output };                      // of the layer; on its input it multiplies W13 x
enum class Result { Hidden, Ordered, Atomic };              // rows of h by expert; parts of y by pair; sums added to y

template <int kTileN, int kTileM, int kThreads, Result kResult, Activation kActivation, WeightOn kWeight, bool kBias>
class TileRows {
 public:
  static constexpr bool kGated = is_gated(kActivation);
  static constexpr bool kOnProduct = kResult == Result::Hidden && kWeight == WeightOn::Input;
  static constexpr bool kOnSum = kResult != Result::Hidden && kWeight == WeightOn::Output;
  static constexpr int kFeatures = kGated ? kTileN / 2 : kTileN;
  static constexpr int kPitch = kFeatures * 2 + 16;  // 16 bytes more keep writing a row free of bank conflicts
  static constexpr int kVectors = kFeatures / 8;

  // The tile: rows `first` to `first` + `count` of those by expert, and rows of W from `first_row` on, 16 a tile of W.
  // `shared`: kTileM * (kPitch + 8) bytes, of which lists take the last 8 kTileM.
  __device__ __forceinline__ TileRows(const TileOutput& out, u8* shared, int expert, int first, u32 count,
                                      int first_row)
      : out_(out), rows_(shared), places_(reinterpret_cast<int*>(shared + kTileM * kPitch)),
        weights_(reinterpret_cast<float*>(places_ + kTileM)), expert_(expert), first_(first), count_(count),
            first_row_(first_row) {}

  // First feature of the block, and how many there are in all.
  __device__ __forceinline__ int first_feature() const { return first_row_ * (kGated ? 8 : 16); }
  __device__ __forceinline__ int features() const { return kGated ? out_.n / 2 : out_.n; }

  // Takes a warp's sums: `row` is the first of its rows of W in the block, 16 a tile of W, `column` the first of its
  // rows of x. Ends with a barrier of the block.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void put(int row, int column, const float (&sums)[kRows][kColumns][4]) {
    if constexpr (kResult != Result::Hidden || kOnProduct) look_up();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int down = (row + r) * 16;
      float low = 0.f, high = 0.f;
      if constexpr (kBias) {
        const int n = first_row_ * 16 + down + g;
        const u16* const bias = static_cast<const u16*>(out_.bias) + u64(expert_) * out_.n;
        if (n < out_.n) low = Bf16::widen(bias[n]);
        if (n + 8 < out_.n) high = Bf16::widen(bias[n + 8]);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int first = column + c * 8;
        const float* const weights = weights_ + first + t * 2;
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y[i] = sums[r][c][i];
          if constexpr (kOnProduct) y[i] *= weights[i % 2];
          if constexpr (kBias) y[i] += i < 2 ? low : high;
          if constexpr (kOnSum) y[i] *= weights[i % 2];
        }
        if constexpr (kGated) {
          // Even g holds gate rows, the next g the up rows: of two rows of x each takes one.
          const bool odd = g % 2;
          const float got = __shfl_xor_sync(0xFFFFFFFFu, odd ? y[0] : y[1], 4),
              got_high = __shfl_xor_sync(0xFFFFFFFFu, odd ? y[2] : y[3], 4);
          u16* const to = reinterpret_cast<u16*>(rows_ + (first + t * 2 + g % 2) * kPitch) + down / 2 + g / 2;
          to[0] = Bf16::round(activate<kActivation>(odd ? got : y[0], odd ? y[1] : got, out_.alpha, out_.limit));
          to[4] = Bf16::round(
                              activate<kActivation>(odd ? got_high : y[2], odd ? y[3] : got_high, out_.alpha,
                                                    out_.limit));
        } else {
          u8* const to = rows_ + (first + g) * kPitch + down * 2 + t * 4;
          *reinterpret_cast<u32*>(to) =
              transpose(Bf16::round_pair(activate<kActivation>(y[0]), activate<kActivation>(y[1])));
          *reinterpret_cast<u32*>(to + 16) =
              transpose(Bf16::round_pair(activate<kActivation>(y[2]), activate<kActivation>(y[3])));
        }
      }
    }
    __syncthreads();
  }

  // Calls take(row, v, vector) for every vector of eight features, each in one thread. Where there are vectors for
  // whole warps, all threads of a warp call it or none.
  template <class Take> __device__ __forceinline__ void each_vector(Take take) const {
#pragma unroll 2
    for (int j = 0; j < kTileM * kVectors; j += kThreads) {
      const u32 row = (j + threadIdx.x) / kVectors, v = (j + threadIdx.x) % kVectors;
      if (kTileM * kVectors % kThreads != 0 && row >= kTileM) break;
      take(row, v, *reinterpret_cast<const Vec4*>(rows_ + row * kPitch + v * 16));
    }
  }

  // Copies rows to where they belong, or adds them to what is there; those past the last are not, nor features past the
  // last. There are whole vectors, for sizes are multiples of 32.
  __device__ __forceinline__ void copy_out() const {
    each_vector([&](u32 row, u32 v, const Vec4& eight) {
      const int n = first_feature() + v * 8;
      if (row >= count_ || n >= features()) return;
      u64 place = first_ + row;
      if constexpr (kResult == Result::Ordered) place = u32(places_[row]);
      if constexpr (kResult == Result::Atomic) place = u32(places_[row]) / u32(out_.top);
      u16* const to = static_cast<u16*>(out_.y) + place * features() + n;
      if constexpr (kResult == Result::Atomic)
        add_bf16(to, eight);
      else
        *reinterpret_cast<Vec4*>(to) = eight;
    });
  }

 private:
  // Which pairs the rows are, and their router weights.
  __device__ __forceinline__ void look_up() {
    if (threadIdx.x < kTileM) {
      const int pair = out_.pairs[first_ + min(threadIdx.x, count_ - 1)];
      places_[threadIdx.x] = pair;
      weights_[threadIdx.x] = out_.weights[pair];
    }
    __syncthreads();
  }

  TileOutput out_;
  u8* rows_;
  int* places_;
  float* weights_;
  int expert_, first_;
  u32 count_;
  int first_row_;
};

}  // namespace jitmx
