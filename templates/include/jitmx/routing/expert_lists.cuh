// Lists for grouped products: for each expert its pairs (token, slot) in the order of the tokens, where each expert's
// list starts, and a schedule of tiles of rows. Counting sorts without atomics on positions: the same input gives the
// same lists.
#pragma once
#include "jitmx/math/warp.cuh"
#include "jitmx/moe/tile_rows.cuh"
#include "jitmx/ptx/address.cuh"
#include "jitmx/ptx/cluster.cuh"

namespace jitmx {

// Lists are written through a kernel's arguments, which have, as `lists`,
//   int* pairs      [tokens * k]: token * k + slot, by expert; -1 past the last
//   int* offsets    [local + 1]: where each expert's list starts
//   Vec4* schedule  [capacity]: expert, first row, rows, number among its expert's tiles; expert -1 past the last
//   int* tiles      [1]: how many
//   int local, capacity

constexpr u32 kAbsent = 0xFFFFFFFFu;  // the local id of an expert that is not here

// What an expert map says, where it is an id of a local expert.
__device__ __forceinline__ u32 local_or_absent(int mapped, int local) {
  return u32(mapped) < u32(local) ? u32(mapped) : kAbsent;
}

// f(i) for i < count, by Threads threads; count is at most Most.
template <int Threads, int Most, class F> __device__ __forceinline__ void share_out(int count, int thread, F f) {
  if constexpr (Most <= Threads) {
    if (thread < count) f(thread);
  } else {
#pragma unroll 1
    for (int i = thread; i < count; i += Threads) f(i);
  }
}

// Lists of at most 32 pairs by one block. `ids` are local ids in shared memory, known to all threads and filled up with
// kAbsent to a multiple of eight. The first warp does the pairs while threads from the last on do the offsets.
template <int TileRows, int Threads, int Experts, class Lists>
__device__ __forceinline__ void list_few(const Lists& lists, const u32* ids, int count, int thread) {
  const Vec4* const fours = reinterpret_cast<const Vec4*>(ids);
  share_out<Threads, Experts + 1>(lists.local + 1, Threads - 1 - thread, [&](u32 e) {
    int before = 0;
#pragma unroll 1
    for (int j = 0; j < count; j += 8) {
      const Vec4 a = fours[j / 4], b = fours[j / 4 + 1];
      before += (a.x < e) + (a.y < e) + (a.z < e) + (a.w < e) + (b.x < e) + (b.y < e) + (b.z < e) + (b.w < e);
    }
    lists.offsets[e] = before;
  });
  if (thread >= 32) return;
  const u32 mine = thread < count ? ids[thread] : kAbsent;
  int position = 0, rank = 0, rows = 0;
#pragma unroll 1
  for (int j = 0; j < count; j += 8) {
    const Vec4 a = fours[j / 4], b = fours[j / 4 + 1];
    const u32 others[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool same = others[i] == mine, earlier = same && j + i < thread;
      position += others[i] < mine || earlier;
      rank += earlier;
      rows += same;
    }
  }
  const bool present = mine != kAbsent;
  if (thread < count) lists.pairs[position] = present ? thread : -1;
  const bool starts = present && rank % TileRows == 0;
  const u32 all = __reduce_or_sync(kFullWarp, starts ? 1u << position : 0u);
  const int tiles = __popc(all);
  if (starts)
    lists.schedule[__popc(all & ((1u << position) - 1u))] =
        {mine, u32(position), u32(min(rows - rank, TileRows)), u32(rank / TileRows)};
  if (tiles + thread < lists.capacity) lists.schedule[tiles + thread] = {kAbsent, 0u, 0u, 0u};
  if (thread == 0) *lists.tiles = tiles;
}

// Lists of `count` pairs by one block, or by a cluster of `Blocks`, of which this one is `rank`. local_id(pair) is
// asked at most twice for each pair. `scratch` holds (warps, by fours, + 4) * local + 2 words; all threads of the block
// have finished with it.
template <int TileRows, int Threads, int Experts, int Blocks, class Lists, class LocalId>
__device__ __forceinline__ void list_many(const Lists& lists, int count, u32* scratch, int thread, int rank,
                                          LocalId local_id) {
  static_assert(Threads % 32 == 0 && Experts <= 512, "the search below takes steps of 256 and less");
  constexpr int warps = Threads / 32;
  const int lane = thread % 32, warp = thread / 32, local = lists.local;
  // Each warp has a run of pairs of its own, in the order of ranks and warps.
  const int span = ((count + Blocks * warps - 1) / (Blocks * warps) + 31) / 32 * 32;
  const int start = (rank * warps + warp) * span, end = min(start + span, count);
  const int left = span ? (count - rank * warps * span + span - 1) / span : 0;
  // of counts: warps of this block that have pairs, by fours
  const int rows = (left > 0 ? min(left, warps) + 3 : 0) / 4 * 4;
  u32* const counts = scratch;
  u32* const totals = counts + (warps + 3) / 4 * 4 * local;
  u32* const before = totals + local;
  u32* const first = before + local;
  u32* const first_tile = first + local + 1;

  share_out<Threads, Experts>(local, thread, [&](int e) {
#pragma unroll 1
    for (int w = 0; w < rows; ++w) counts[w * local + e] = 0u;
  });
  __syncthreads();
  const u32 early = start + lane < end ? local_id(start + lane) : kAbsent;
  if (early != kAbsent) atomicAdd(counts + warp * local + early, 1u);
#pragma unroll 1
  for (int p = start + lane + 32; p < end; p += 32) {
    const u32 e = local_id(p);
    if (e != kAbsent) atomicAdd(counts + warp * local + e, 1u);
  }
  __syncthreads();
  share_out<Threads, Experts>(local, thread, [&](int e) {
    u32 sum = 0u;
#pragma unroll 1
    for (int w = 0; w < rows; w += 4) {
      u32 here[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) here[i] = counts[(w + i) * local + e];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        counts[(w + i) * local + e] = sum;
        sum += here[i];
      }
    }
    totals[e] = sum;
    before[e] = 0u;
  });
  if constexpr (Blocks > 1) {
    cluster_arrive_release();
    cluster_wait();
    share_out<Threads, Experts>(local, thread, [&](int e) {
      u32 sum = 0u, ahead = 0u;
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
        const u32 there = load_remote_word(cluster_address(shared_address(totals + e), b));
        ahead += b < rank ? there : 0u;
        sum += there;
      }
      before[e] = ahead;
      first[e] = sum;
    });
    // The others may read totals until they arrive again; nobody writes it any more.
    cluster_arrive_relaxed();
  }
  u32* const sums = Blocks > 1 ? first : totals;
  __syncthreads();

  if (warp == 0) {
    const int each = (local + 31) / 32, from = min(lane * each, local), to = min(from + each, local);
    u32 rows = 0u, tiles = 0u;
#pragma unroll 1
    for (int e = from; e < to; ++e) {
      rows += sums[e];
      tiles += (sums[e] + TileRows - 1) / TileRows;
    }
    u32 row = rows, tile = tiles;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const u32 more_rows = __shfl_up_sync(kFullWarp, row, step), more_tiles = __shfl_up_sync(kFullWarp, tile, step);
      if (lane >= step) {
        row += more_rows;
        tile += more_tiles;
      }
    }
    if (lane == 31) {
      first[local] = row;
      first_tile[local] = tile;
    }
    row -= rows;
    tile -= tiles;
#pragma unroll 1
    for (int e = from; e < to; ++e) {
      const u32 here = sums[e];
      first[e] = row;
      first_tile[e] = tile;
      row += here;
      tile += (here + TileRows - 1) / TileRows;
    }
  }
  __syncthreads();

#pragma unroll 1
  for (int p = start; p < end; p += 32) {
    const u32 e = p == start ? early : p + lane < end ? local_id(p + lane) : kAbsent;
    const u32 same = __match_any_sync(kFullWarp, e);
    const u32 earlier = __popc(same & ((1u << lane) - 1u));
    u32* const next = counts + warp * local + e;
    if (e != kAbsent) lists.pairs[first[e] + before[e] + *next + earlier] = p + lane;
    __syncwarp();
    if (e != kAbsent && earlier == 0) *next += __popc(same);
    __syncwarp();
  }

  const int worker = rank * Threads + thread, workers = Blocks * Threads;
  share_out<Blocks * Threads, Experts + 1>(local + 1, worker, [&](int e) { lists.offsets[e] = first[e]; });
#pragma unroll 1
  for (int i = first[local] + worker; i < count; i += workers) lists.pairs[i] = -1;
  const int tiles = first_tile[local];
#pragma unroll 1
  for (int i = worker; i < lists.capacity; i += workers) {
    Vec4 entry = {kAbsent, 0u, 0u, 0u};
    if (i < tiles) {
      int low = 0;  // the last expert whose first tile is not after i: those without rows start where the next does
#pragma unroll
      for (int step = 256; step; step >>= 1)
        if (step < Experts && low + step < local && first_tile[low + step] <= u32(i)) low += step;
      const u32 number = i - first_tile[low], row = first[low] + number * TileRows;
      entry = {u32(low), row, min(first[low + 1] - row, u32(TileRows)), number};
    }
    lists.schedule[i] = entry;
  }
  if (worker == 0) *lists.tiles = tiles;
  if constexpr (Blocks > 1) cluster_wait();
}

}  // namespace jitmx
