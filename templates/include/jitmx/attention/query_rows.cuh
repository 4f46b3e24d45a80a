// Loads the rows of Q of a block to shared memory.
#pragma once
#include "jitmx/attention/cache_format.cuh"

namespace jitmx {

// Q of all rows of a tile, rotated, goes to `to`, where Place::at says; rows of no token are 0. `Clamped`: in fp16,
// within its range.
template <class T, bool Clamped, class Rope, class Place, int D, int Rows, int Threads, class Arguments, class Tile>
__device__ __forceinline__ void bring_queries(const Arguments& args, const Tile& tile, u8* to, int thread) {
  constexpr int kVectors = D / 8;
  static_assert(Rows * kVectors % Threads == 0, "threads take the same number of vectors");
#pragma unroll 4
  for (int n = 0; n < Rows * kVectors / Threads; ++n) {
    const int i = n * Threads + thread, row = i / kVectors, d = i % kVectors * 8, token = tile.token(row);
    Vec4 v{};
    if (tile.has(row) && tile.end > 0) {  // not of padding
      const long long at = tile.request.first + token;
      const u16* const head = static_cast<const u16*>(args.q) + at * args.q_stride + tile.query_head(row) * D;
      long long position = 0;
      if constexpr (Rope::kRotates)
        position = args.positions != nullptr ? __ldg(args.positions + at) : tile.request.old + token;
      v = rotated<T, Rope>(head, d, Rope::angles(args.rope, position, d));
      if constexpr (Clamped) v = as_operand<T>(v);
    }
    *reinterpret_cast<Vec4*>(to + Place::at(row, d / 8)) = v;
  }
}

}  // namespace jitmx
