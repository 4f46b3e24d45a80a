// The k largest of the logits of one token and their softmax, by one warp.
#pragma once
#include "jitmx/math/warp.cuh"
#include "jitmx/ptx/arithmetic.cuh"

namespace jitmx {

// Keys order logits as unsigned integers: numbers from -inf up, below them NaN, then what is no expert, then what was
// chosen already. No number has a key under 0x007FFFFF.
constexpr u32 kTakenKey = 0u, kNoExpertKey = 1u, kNanKey = 2u;

__device__ __forceinline__ u32 ordered_key(float value) {
  const u32 bits = __float_as_uint(value + 0.f);  // -0 and +0 are equal, and the lower id wins
  const u32 key = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
  return value != value ? kNanKey : key;
}

// The value of a key; a NaN counts as -inf.
__device__ __forceinline__ float key_value(u32 key) {
  const float value = bits_to_float((key & 0x80000000u) ? key & 0x7FFFFFFFu : ~key);
  return key == kNanKey ? bits_to_float(0xFF800000u) : value;
}

// exp(value - largest).
__device__ __forceinline__ float share(float value, float largest) {
  return exp2_fast((value - largest) * 1.4426950408889634f);
}

// What lane s holds after the choice: the expert of rank s and its weight, for s < k.
struct Choice {
  int id;
  float weight;
};

// Lane l has the logits of experts l n ... l n + n - 1, n = ceil(Experts / 32); those past the last expert are never
// read. Equal logits go by ids. Weights are the softmax over the chosen K, or with OverAll over all experts.
template <int Experts, int K, bool OverAll, int N = (Experts + 31) / 32>
__device__ __forceinline__ Choice choose_experts(const float (&logits)[N], int lane) {
  static_assert(K <= 32 && 32 * N >= Experts, "a lane holds each choice, and lanes all logits");
  u32 keys[N];
#pragma unroll
  for (int j = 0; j < N; ++j) keys[j] = lane * N + j < Experts ? ordered_key(logits[j]) : kNoExpertKey;
  float all = 0.f, chosen = 0.f, largest = 0.f, value = 0.f;
  u32 id = 0;
#pragma unroll 1
  for (int s = 0; s < K; ++s) {
    u32 best = keys[0];
    int at = 0;
#pragma unroll
    for (int j = 1; j < N; ++j)
      if (keys[j] > best) {
        best = keys[j];
        at = j;
      }
    const u32 most = __reduce_max_sync(kFullWarp, best);
    // Lanes hold ascending ids, so the lowest id of the largest key is that of the lowest lane that has it.
    const u32 winner = __reduce_min_sync(kFullWarp, best == most ? u32(lane * N + at) : kFullWarp);
    const float found = key_value(most);
    if (s == 0) largest = found;
    chosen += share(found, largest);
    if (lane == s) {
      id = winner;
      value = found;
    }
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (winner == u32(lane * N + j)) keys[j] = kTakenKey;
  }
  if constexpr (OverAll) {
    // Only numbers count: a NaN that was chosen, and what is no expert, have no share.
#pragma unroll
    for (int j = 0; j < N; ++j)
      all += lane * N + j < Experts && logits[j] == logits[j] ? share(logits[j], largest) : 0.f;
  }
  const float whole = OverAll ? warp_sum(all) : chosen;
  return {int(id), __fdiv_rn(share(value, largest), whole)};
}

}  // namespace jitmx
