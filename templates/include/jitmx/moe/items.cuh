// Which rows go to which expert, found by every block for itself from the ids on the device.
#pragma once
#include "jitmx/moe/workspace.cuh"

namespace jitmx {

// `Routed` is whatever has the members of a launch's arguments: ids and weights [rows, top] of experts; a map
// [map_size], or null, from ids to those of local experts, of which there are `experts`; and count, of valid rows, or
// null.

// In shared memory. An entry is a pair of a row and one of its experts; entries are in the order of experts, those of
// one expert in the order of rows, and up to so many consecutive ones of an expert are an item.
struct alignas(16) Items {
  int id[kEntries];  // of an expert; -1 where there is none
  float weight[kEntries];
  u16 entry[kEntries];      // by position in that order; bit 15 where an item starts
  u16 token[kEntries];      // by position
  u16 expert[kEntries];     // by item
  u16 start[kEntries + 2];  // position of an item's first row; the end of the last
  int count;

  // Positions of an item's rows: from start[item] on.
  __device__ __forceinline__ int columns(int item) const { return start[item + 1] - start[item]; }
  __device__ __forceinline__ float weight_at(int position) const { return weight[entry[position] & 0x7FFFu]; }
};

// Finds the items in ids: experts in order, the entries of each in theirs, so that all blocks agree and no timing
// counts.
template <int kColumns, int kThreads, class Routed>
__device__ __forceinline__ void find_items(const Routed& routed, Items& found) {
  const int entries = routed.rows * routed.top;
  const int counted = routed.count ? min(max(*routed.count, 0), routed.rows) * routed.top : entries;
#pragma unroll 1
  for (int i = threadIdx.x; i < (entries + 3) / 4 * 4; i += kThreads) {
    int id = i < counted ? routed.ids[i] : -1;
    if (i < counted) found.weight[i] = routed.weights[i];
    if (routed.map) id = u32(id) < u32(routed.map_size) ? routed.map[id] : -1;
    found.id[i] = u32(id) < u32(routed.experts) ? id : -1;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < entries; i += kThreads) {
    const int id = found.id[i];
    if (id < 0) continue;
    int before = 0, rank = 0;
#pragma unroll 1
    for (int j = 0; j < entries; j += 4) {
      const Vec4 four = *reinterpret_cast<const Vec4*>(found.id + j);
      const int others[4] = {int(four.x), int(four.y), int(four.z), int(four.w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        before += u32(others[e]) < u32(id);
        rank += others[e] == id && j + e < i;
      }
    }
    found.entry[before + rank] = u16(i | (rank % kColumns == 0 ? 0x8000 : 0));
    found.token[before + rank] = u16(i / routed.top);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int total = 0, items = 0;
#pragma unroll 1
    for (int i = lane; i < (entries + 31) / 32 * 32; i += 32)
      total += __popc(__ballot_sync(0xFFFFFFFFu, i < entries && found.id[i] >= 0));
#pragma unroll 1
    for (int p = lane; p < (total + 31) / 32 * 32; p += 32) {
      const u32 entry = p < total ? found.entry[p] : 0u;
      const bool starts = entry >> 15;
      const u32 all = __ballot_sync(0xFFFFFFFFu, starts);
      if (starts) {
        const int item = items + __popc(all & ((1u << lane) - 1u));
        found.start[item] = u16(p);
        found.expert[item] = u16(found.id[entry & 0x7FFFu]);
      }
      items += __popc(all);
    }
    if (lane == 0) {
      found.start[items] = u16(total);
      found.count = items;
    }
  }
  __syncthreads();
}

// The same for at most 32 entries, by a warp for itself: a lane each.
struct FewItems {
  int id, position, item;  // of this lane's entry: its expert, its place among all, and its item
  float weight;
  bool valid, starts;  // whether it has an expert, and is the first of its item
  int count, total;    // items, and entries with an expert

  // The expert of an item, the same item in all lanes.
  __device__ __forceinline__ u32 expert(int wanted) const {
    const u32 first = __ballot_sync(0xFFFFFFFFu, starts && item == wanted);
    return u32(__shfl_sync(0xFFFFFFFFu, id, first ? __ffs(int(first)) - 1 : 0));
  }

  template <class Routed> __device__ __forceinline__ void store(const Routed& routed, Items& found) const {
    const int lane = threadIdx.x % 32;
    if (valid) {
      found.id[lane] = id;
      found.weight[lane] = weight;
      found.entry[position] = u16(lane | (starts ? 0x8000 : 0));
      found.token[position] = u16(lane / routed.top);
    }
    if (starts) {
      found.expert[item] = u16(id);
      found.start[item] = u16(position);
    }
    if (lane == 0) {
      found.start[count] = u16(total);
      found.count = count;
    }
  }
};

template <int kColumns, class Routed> __device__ __forceinline__ FewItems find_few_items(const Routed& routed) {
  FewItems few;
  const int entries = routed.rows * routed.top, lane = threadIdx.x % 32;
  const bool counts = lane < (routed.count ? min(max(*routed.count, 0), routed.rows) * routed.top : entries);
  int id = counts ? routed.ids[lane] : -1;
  few.weight = counts ? routed.weights[lane] : 0.f;
  if (routed.map) id = u32(id) < u32(routed.map_size) ? routed.map[id] : -1;
  few.valid = u32(id) < u32(routed.experts);
  id = few.id = few.valid ? id : routed.experts;  // behind all others
  int position = 0, rank = 0, item = 0;
#pragma unroll 4
  for (int i = 0; i < entries; ++i) {
    const int other = __shfl_sync(0xFFFFFFFFu, id, i);
    position += other < id || (other == id && i < lane);
    rank += other == id && i < lane;
  }
  few.position = position;
  few.starts = few.valid && rank % kColumns == 0;
  const int start = few.starts ? position : 32;
#pragma unroll 4
  for (int i = 0; i < entries; ++i) item += __shfl_sync(0xFFFFFFFFu, start, i) < position;
  few.item = item;
  few.count = __popc(__ballot_sync(0xFFFFFFFFu, few.starts));
  few.total = __popc(__ballot_sync(0xFFFFFFFFu, few.valid));
  return few;
}

}  // namespace jitmx
