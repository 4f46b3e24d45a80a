// Work split of a product: tiles, item by item and row by row, are divided among blocks, and in a block among warps.
#pragma once
#include "jitmx/types.cuh"

namespace jitmx {

// A contiguous range of tiles, numbered over all items.
struct Span {
  u32 begin, end;
  __device__ __forceinline__ bool empty() const { return begin == end; }
};

// `total` in `parts` spans that differ by one at most; the first ones are the longer ones.
struct EvenSplit {
  u32 base, more;

  __device__ __forceinline__ EvenSplit(u32 total, u32 parts) : base(total / parts), more(total - base * parts) {}
  __device__ __forceinline__ u32 begin(u32 part) const { return part * base + min(part, more); }
  __device__ __forceinline__ Span span(u32 part, u32 offset = 0u) const {
    return {offset + begin(part), offset + begin(part + 1u)};
  }
  // The end of the span that holds `at`.
  __device__ __forceinline__ u32 end_around(u32 at) const {
    const u32 longer = more * (base + 1u);
    return begin((at < longer ? at / (base + 1u) : more + (at - longer) / base) + 1u);
  }
};

// The tiles of one product: each item has `rows` rows of `tiles` tiles. Blocks take whole rows, or, where sums of a row
// may come from two blocks, equal numbers of tiles.
template <bool kCut> class ProductSplit {
 public:
  __device__ __forceinline__ ProductSplit(int items, int rows, int tiles, int blocks)
      : tiles_(u32(tiles)), cut_(kCut && u32(items) * u32(rows) >= u32(blocks)),
        split_(u32(items) * u32(rows) * (cut_ ? tiles_ : 1u), u32(blocks)) {}

  __device__ __forceinline__ Span block(u32 block) const {
    const Span span = split_.span(block);
    return cut_ ? span : Span{span.begin * tiles_, span.end * tiles_};
  }
  // Whether two blocks share the row that starts with tile `first`.
  __device__ __forceinline__ bool shared(u32 first) const { return cut_ && split_.end_around(first) < first + tiles_; }

 private:
  u32 tiles_;
  bool cut_;
  EvenSplit split_;
};

}  // namespace jitmx
