// What the kernels of `moe` are launched with.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

constexpr int kEntries = 512;  // pairs of a row and an expert

// The counters that start the workspace: rows of tiles of an item's h that are made; blocks that wait for no more of them;
// launches in which all blocks have met; blocks of this launch and the one before that have begun.
struct Counters {
  u32 ready[kEntries];
  u32 done, generation, turn;
};
constexpr int kCounterBytes = 4096;
static_assert(sizeof(Counters) <= kCounterBytes, "the activations follow");

// h of each entry, in the order of the items, with its weight.
__device__ __forceinline__ u16* hidden_rows(const MoeArguments& args) {
  return reinterpret_cast<u16*>(static_cast<u8*>(args.workspace) + kCounterBytes);
}

}  // namespace jitmx
