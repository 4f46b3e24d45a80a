// Streams packed tiles of items to one warp, through a ring of bulk copies that it fills and reads by itself.
#pragma once
#include "jitmx/moe/items.cuh"
#include "jitmx/moe/work_split.cuh"
#include "jitmx/mxfp4/layout.cuh"
#include "jitmx/pipeline/mailbox.cuh"
#include "jitmx/pipeline/state.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/bulk_copy.cuh"
#include "jitmx/ptx/mbarrier.cuh"

namespace jitmx {

// One of the two products.
struct Product {
  const u8 *codes, *scales;
  const u16* bias;
  int rows, tiles, k;  // rows of tiles of an expert; tiles, and values, of a row
  __device__ __forceinline__ u32 size() const { return u32(rows) * u32(tiles); }
};

// Both of a layer, of whatever has the members of a launch's arguments: w13, w13_scales, b13, w2, w2_scales, b2, hidden
// and intermediate.
template <class Layer> __device__ __forceinline__ Product first_product(const Layer& layer) {
  return {static_cast<const u8*>(layer.w13), static_cast<const u8*>(layer.w13_scales),
          static_cast<const u16*>(layer.b13), layer.intermediate / 8, (layer.hidden + 63) / 64, layer.hidden};
}
template <class Layer> __device__ __forceinline__ Product second_product(const Layer& layer) {
  return {static_cast<const u8*>(layer.w2), static_cast<const u8*>(layer.w2_scales), static_cast<const u16*>(layer.b2),
          (layer.hidden + 15) / 16, (layer.intermediate + 63) / 64, layer.intermediate};
}

// Bulk copies are fastest between addresses that are alike modulo 128: codes start there, scales in steps of 32 bytes.
template <int kWarps, int kChunk, int kStages> struct RingBytes {
  alignas(128) u8 codes[kWarps][kStages][kChunk * kTileBytes];
  alignas(128) u8 scales[kWarps][kStages][(kChunk * kScaleBytes + 96 + 127) / 128 * 128];
};

// Both spans of a warp pass through its ring. A chunk, which is a stage, ends at a multiple of kChunk tiles of its
// item, so that rows of as many tiles end with a chunk, and at the end of the item or the span.
template <class Layer, int kWarps, int kChunk, int kStages> class Ring {
 public:
  using Bytes = RingBytes<kWarps, kChunk, kStages>;

  // `full`: a barrier a stage, of this warp. expert_of: gives the expert of an item.
  template <class ExpertOf>
  __device__ __forceinline__ Ring(const Layer& layer, Bytes& bytes, u64* full,
                                  const Items& items, u32 warp,
                                  const Span& up,
                                  const Span& down, const ExpertOf& expert_of)
      : layer_(layer), items_(items), codes_(shared_address(bytes.codes[warp])),
          scales_(shared_address(bytes.scales[warp])),
        full_(shared_address(full)), span_(up), down_(down) {
    take(first_product(layer));
    follow(expert_of);
  }

  // Starts the copies of as many chunks as there is room for.
  template <class ExpertOf> __device__ __forceinline__ void start(const ExpertOf& expert_of) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) fetch(i, expert_of);
  }

  // The next `tiles` tiles are those of an item, from its tile `within` on, which is `tile` of all experts.
  __device__ __forceinline__ void begin(u32 tile, u32 within, int tiles) {
    next_ = tile;
    behind_ = tiles;
    read_most_ = first_most(within);
  }
  // Tiles left in the current chunk; where there are none, the next chunk is to be waited for and opened.
  __device__ __forceinline__ int ready() const { return ready_; }
  __device__ __forceinline__ void wait() const { mbarrier_wait(full_ + state_.stage * 8u, state_.parity); }
  __device__ __forceinline__ void open() {
    ready_ = min(read_most_, behind_);
    read_most_ = kChunk;
    const int lane = threadIdx.x % 32;
    code_ = codes_ + state_.stage * u32(sizeof(Bytes::codes[0][0])) + lane * 16;
    scale_ = scales_ + state_.stage * u32(sizeof(Bytes::scales[0][0])) + next_ % 4u * kScaleBytes + lane / 4 * 4;
    next_ += ready_;
    behind_ -= ready_;
  }
  // In shared memory: this lane's words of the current tile, and the scales of its rows.
  __device__ __forceinline__ u32 code() const { return code_; }
  __device__ __forceinline__ u32 scale() const { return scale_; }
  // This lane has read so many tiles.
  __device__ __forceinline__ void pass(int tiles) {
    code_ += tiles * kTileBytes;
    scale_ += tiles * kScaleBytes;
    ready_ -= tiles;
    if (ready_ > 0) return;
    __syncwarp();
    fetch(state_.stage, [&](u32 item) { return u32(items_.expert[item]); });
    state_.advance();
  }

 private:
  static __device__ __forceinline__ int first_most(u32 within) { return kChunk - int(within % kChunk); }
  __device__ __forceinline__ void take(const Product& product) {
    product_codes_ = product.codes;
    product_scales_ = product.scales;
    size_ = product.size();
  }
  // Goes on with the next item, of this span or the second one.
  template <class ExpertOf> __device__ __forceinline__ void follow(const ExpertOf& expert_of) {
    if (span_.empty()) {
      span_ = down_;
      down_.begin = down_.end;
      take(second_product(layer_));
    }
    const u32 item = span_.begin / size_, within = span_.begin - item * size_;
    left_ = int(min(span_.end - span_.begin, size_ - within));
    most_ = first_most(within);
    if (left_ > 0) tile_ = expert_of(item) * size_ + within;
    span_.begin += left_;
  }
  template <class ExpertOf> __device__ __forceinline__ void fetch(u32 stage, const ExpertOf& expert_of) {
    if (left_ == 0) return;
    const int tiles = min(most_, left_);
    most_ = kChunk;
    if (threadIdx.x % 32 == 0) {
      const u32 full = full_ + stage * 8u;
      mbarrier_expect(full, tiles * (kTileBytes + kScaleBytes));
      bulk_copy_evict_first(codes_ + stage * u32(sizeof(Bytes::codes[0][0])),
                            product_codes_ + u64(tile_) * kTileBytes, tiles * kTileBytes, full);
      bulk_copy_evict_first(scales_ + stage * u32(sizeof(Bytes::scales[0][0])) + tile_ % 4u * kScaleBytes,
                            product_scales_ + u64(tile_) * kScaleBytes, tiles * kScaleBytes, full);
    }
    tile_ += tiles;
    left_ -= tiles;
    if (left_ == 0) follow(expert_of);
  }

  const Layer& layer_;
  const Items& items_;
  u32 codes_, scales_, full_;  // of the first stage
  // Fetching: what is left of the item, of the span after it, and the other span.
  const u8 *product_codes_, *product_scales_;
  u32 size_, tile_ = 0;
  int left_, most_;  // most_: of the next chunk
  Span span_, down_;
  // Reading: tiles left in the current chunk, and those of its item after that.
  u32 code_ = 0, scale_ = 0;
  int ready_ = 0, behind_ = 0, read_most_ = kChunk;
  u32 next_ = 0;
  PipelinePhase<kStages> state_;
};

}  // namespace jitmx
