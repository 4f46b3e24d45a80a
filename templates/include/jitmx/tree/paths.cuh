// Paths of a tree of up to 64 nodes, by one warp whose lane l has nodes l and l + 32.
//
// Node 0 is the root, and a node's parent comes before it, so that a path is a set of bits in the order of its nodes.
#pragma once
#include "jitmx/math/warp.cuh"

namespace jitmx {

struct TreePaths {
  u64 path[64];  // bit j: node j is the node itself or above it; 0: the node is padding
  int above[64];
};

// Of a lane's two nodes.
struct LanePaths {
  int parent[2];  // -1: none, the node is the root or padding
  u64 path[2];
};

// Whether node i may have this parent; the root has none, and -1 is a large number.
__device__ __forceinline__ bool fits(int parent, u32 i, u32 nodes) {
  return i < nodes && u32(parent) < i;
}

// Also in `tree` for all lanes. A node without a parent that comes before it, and what is below such a node, is
// padding. Each step doubles how far up a node has looked.
__device__ __forceinline__ LanePaths find_paths(TreePaths& tree, const int (&parents)[2], u32 nodes, u32 lane) {
  LanePaths found;
  int above[2];
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    const u32 i = lane + 32 * h;
    const bool there = fits(parents[h], i, nodes);
    found.parent[h] = above[h] = there ? parents[h] : -1;
    found.path[h] = there || (i == 0u && nodes > 0u) ? 1ull << i : 0ull;
    tree.path[i] = found.path[h];
    tree.above[i] = above[h];
  }
#pragma unroll 1
  while (__any_sync(kFullWarp, above[0] >= 0 || above[1] >= 0)) {
    __syncwarp();
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const u32 from = u32(max(above[h], 0));
      const u64 path = tree.path[from];
      const int next = tree.above[from];
      if (above[h] >= 0) {
        found.path[h] |= path;
        above[h] = next;
      }
    }
    __syncwarp();
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      tree.path[lane + 32 * h] = found.path[h];
      tree.above[lane + 32 * h] = above[h];
    }
  }
#pragma unroll
  for (u32 h = 0; h < 2; ++h)
    if ((found.path[h] & 1ull) == 0ull) {
      found.path[h] = 0;
      found.parent[h] = -1;
    }
  __syncwarp();
#pragma unroll
  for (u32 h = 0; h < 2; ++h) tree.path[lane + 32 * h] = found.path[h];
  __syncwarp();
  return found;
}

}  // namespace jitmx
