// What an engine asks of a tree of drafts: masks, depths, positions, links and paths, by one warp.
#pragma once
#include "jitmx/tree/paths.cuh"

namespace jitmx {

// Where it goes, of one request.
struct TreePlan {
  u32* mask;             // [nodes, words]
  int* depth;            // [nodes]
  long long* positions;  // [nodes]
  int* first_child;      // [nodes]
  int* next_sibling;     // [nodes]
  int* paths;            // [nodes, levels]
};

__device__ __forceinline__ TreePlan at_request(const TreePlan& plan, u32 request, u32 nodes, u32 words, u32 levels) {
  const u64 first = u64(request) * nodes;
  return {plan.mask + first * words, plan.depth + first, plan.positions + first, plan.first_child + first,
          plan.next_sibling + first, plan.paths + first * levels};
}

// `children` is scratch memory; `start` the position of the root.
__device__ __forceinline__ void write_plan(const TreePlan& plan, const LanePaths& found, u32 (&children)[64][2],
                                           long long start, u32 nodes, u32 words, u32 levels, u32 lane) {
#pragma unroll
  for (u32 h = 0; h < 2; ++h) children[lane + 32 * h][0] = children[lane + 32 * h][1] = 0;
  __syncwarp();
#pragma unroll
  for (u32 h = 0; h < 2; ++h)
    if (found.parent[h] >= 0) atomicOr(&children[found.parent[h]][h], 1u << lane);
  __syncwarp();
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    const u32 i = lane + 32 * h;
    if (i >= nodes) break;
    const u64 path = found.path[h];
    const int depth = __popcll(path) - 1;
    plan.mask[u64(i) * words] = u32(path);
    plan.mask[u64(i) * words + words - 1u] = u32(path >> 32 * (words - 1u));
    plan.depth[i] = depth;
    plan.positions[i] = start + max(depth, 0);
    const u64 own = u64(children[i][1]) << 32 | children[i][0];
    plan.first_child[i] = __ffsll((long long)own) - 1;
    u64 later = 0;  // siblings behind this one
    if (found.parent[h] >= 0) {
      const u32 parent = u32(found.parent[h]);
      later = (u64(children[parent][1]) << 32 | children[parent][0]) >> i >> 1 << i << 1;
    }
    plan.next_sibling[i] = __ffsll((long long)later) - 1;
    u64 left = path;
    u32 d = 0;
#pragma unroll 1
    do {
      plan.paths[u64(i) * levels + d] = __ffsll((long long)left) - 1;
      left &= left - 1ull;
    } while (++d < levels);
  }
}

}  // namespace jitmx
