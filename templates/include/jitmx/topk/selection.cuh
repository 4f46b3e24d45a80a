// The greatest of a block's ranks: 64 bits each, no two alike but for 0, which is nothing (`ranked` in
// epilogue/argmax.cuh).
//
// Threads hold ranks in registers. A list in shared memory gathers those that may be among the k greatest: all at or
// above a threshold that k of them reach. A first one is the k-th of the greatest of 128 groups; where more reach it
// than the list holds, a search by halves finds a higher one. What is left is put in order by counting for each how
// many are greater.
#pragma once
#include "jitmx/math/warp.cuh"

namespace jitmx {

constexpr u32 kGroups = 128;
constexpr u32 kMostChosen = 64;

template <u32 Threads> struct Selection {
  static constexpr u32 kMost = Threads < 512 ? Threads : 512;  // entries of the list: one a thread at most
  static_assert(Threads % 32 == 0 && Threads >= kGroups && Threads <= 1024, "a group is some lanes of a warp");
  static_assert(kMost >= 2 * kMostChosen, "the list holds what is chosen and what may be");
  u64 groups[kGroups];
  u64 list[kMost];
  u64 threshold;
  u32 count;  // of ranks that reach the threshold; those beyond kMost are not in the list
};

// Adds those of a thread's ranks that are at or above `floor`.
template <u32 Threads, u32 Count>
__device__ __forceinline__ void gather_ranks(Selection<Threads>& s, const u64 (&ranks)[Count], u64 floor) {
  u32 reach = 0;
#pragma unroll
  for (u32 i = 0; i < Count; ++i) reach += ranks[i] >= floor;
  if (reach == 0u) return;
  u32 at = atomicAdd(&s.count, reach);
#pragma unroll
  for (u32 i = 0; i < Count; ++i) {
    if (ranks[i] < floor) continue;
    if (at < Selection<Threads>::kMost) s.list[at] = ranks[i];
    ++at;
  }
}

// The list becomes those of all threads' ranks that reach a threshold which k of them reach, where there are so many.
// For all threads of the block; begins and ends with a barrier. The previous list is overwritten.
//
// Args:
//   floor: 1 or more; what is below it is not among the k greatest.
template <u32 Threads, u32 Count>
__device__ __forceinline__ void select_ranks(Selection<Threads>& s, const u64 (&ranks)[Count], u32 k, u64 floor) {
  constexpr u32 kWarps = Threads / 32, kOfWarp = kGroups / kWarps, kMost = Selection<Threads>::kMost;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 most = 0;
#pragma unroll
  for (u32 i = 0; i < Count; ++i) most = ranks[i] > most ? ranks[i] : most;
#pragma unroll
  for (u32 step = 16; step >= kOfWarp; step /= 2) {
    const u64 other = __shfl_xor_sync(kFullWarp, most, step);
    most = other > most ? other : most;
  }
  __syncthreads();
  if (lane < kOfWarp) s.groups[warp * kOfWarp + lane] = most;
  if (threadIdx.x == 0) {
    s.threshold = floor;
    s.count = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (u32 i = warp; i < kGroups; i += kWarps) {
    const u64 group = s.groups[i];
    u32 greater = 0;
#pragma unroll
    for (u32 j = 0; j < kGroups; j += 32) greater += s.groups[j + lane] > group;
    greater = __reduce_add_sync(kFullWarp, greater);
    if (lane == 0 && greater == k - 1u && group > floor) s.threshold = group;
  }
  __syncthreads();
  u64 low = s.threshold, high = ~0ull;  // k reach the one, where there are so many, and fewer than k the other
#pragma unroll 1
  while (true) {
    gather_ranks(s, ranks, low);
    __syncthreads();
    u32 count = s.count;
    if (count <= kMost) break;
    // More than the list holds: the threshold goes up, by halves, until they do not.
#pragma unroll 1
    while (count > kMost) {
      const u64 middle = low + (high - low) / 2;
      u32 reach = 0;
#pragma unroll
      for (u32 i = 0; i < Count; ++i) reach += ranks[i] >= middle;
      reach = __reduce_add_sync(kFullWarp, reach);
      __syncthreads();
      if (threadIdx.x == 0) s.count = 0;
      __syncthreads();
      if (lane == 0) atomicAdd(&s.count, reach);
      __syncthreads();
      if (s.count < k) {
        high = middle;
      } else {
        low = middle;
        count = s.count;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      s.threshold = low;
      s.count = 0;
    }
    __syncthreads();
  }
}

// Calls `put` with the place and the rank of the k greatest of the list, in a thread each. For all threads, behind a
// barrier.
template <u32 Threads, class Put>
__device__ __forceinline__ void put_in_order(const Selection<Threads>& s, u32 k, const Put& put) {
  const u32 count = s.count;
  if (threadIdx.x >= count) return;
  const u64 rank = s.list[threadIdx.x];
  u32 greater = 0;
#pragma unroll 8
  for (u32 j = 0; j < count; ++j) greater += s.list[j] > rank;  // the same of all lanes: one trip of a warp
  if (greater < k) put(greater, rank);
}

}  // namespace jitmx
