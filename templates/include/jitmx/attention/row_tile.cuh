// Rows of a block of attention of many new tokens, and the keys that they see.
#pragma once
#include "jitmx/attention/work.cuh"

namespace jitmx {

// Of a (request, KV head): `Rows` neighbouring rows, token x `Group` query heads. Blocks take the last tiles of all
// requests first, which see the most keys; a block whose request has no such tile has none.
template <int Rows, int Group, bool Windowed> struct RowTile {
  Request request;
  int head, first;  // KV head, and first row
  int begin, end;   // of the keys: the first is a multiple of 16, and no row sees one before that
  bool there;

  __device__ __forceinline__ RowTile(const int* seq_lens, const int* query_start, int window, int least, int requests,
                                     int kv_heads) {
    const int items = requests * kv_heads, item = int(blockIdx.x) % items;
    request = request_of<false, Windowed>(seq_lens, query_start, item / kv_heads, window);
    head = item % kv_heads;
    first = ((request.queries * Group + Rows - 1) / Rows - 1 - int(blockIdx.x) / items) * Rows;
    there = first >= 0 && request.queries >= least;
    begin = end = 0;
    if (!there || request.old < 0) return;
    if (Windowed) begin = max(request.old + token(0) - window + 1, 0) / 16 * 16;
    end = position(Rows - 1) + 1;
  }

  __device__ __forceinline__ int token(int row) const { return (first + row) / Group; }
  __device__ __forceinline__ bool has(int row) const { return first + row < request.queries * Group; }
  // Which key a row's token is; of rows without one, the last.
  __device__ __forceinline__ int position(int row) const {
    return request.old + min(token(row), request.queries - 1);
  }
  __device__ __forceinline__ int query_head(int row) const { return head * Group + (first + row) % Group; }
};

}  // namespace jitmx
