// The experts of one row, chosen from its logits by one warp. Order and id of a logit in bf16 fit one word together:
// one search of the warp for each choice.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/math/warp.cuh"
#include "jitmx/routing/topk.cuh"

namespace jitmx {

template <class Type> constexpr bool kNarrow = false;
template <> constexpr bool kNarrow<Bf16> = true;

// As choose_experts, of the same numbers.
template <int Experts, int K, bool OverAll, int N = (Experts + 31) / 32>
__device__ __forceinline__ Choice choose_narrow(const float (&logits)[N], int lane) {
  static_assert(K <= 32 && 32 * N >= Experts, "a lane holds each choice, and lanes all logits");
  // The upper half of the key, and below it the id, so that of equal keys the lowest id is the largest word.
  u32 words[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int id = lane * N + j;
    const u32 key = ordered_key(logits[j]), upper = key == kNanKey ? kNanKey : key >> 16;
    words[j] = (id < Experts ? upper : kNoExpertKey) << 16 | u32(0xFFFF - id);
  }
  float all = 0.f, chosen = 0.f, largest = 0.f, value = 0.f;
  u32 id = 0;
#pragma unroll
  for (int s = 0; s < K; ++s) {
    u32 best = words[0];
#pragma unroll
    for (int j = 1; j < N; ++j) best = max(best, words[j]);
    const u32 most = __reduce_max_sync(kFullWarp, best), upper = most >> 16;
    // Of a negative number the lower half of the key is all ones.
    const float found = key_value(upper == kNanKey ? kNanKey : most >> 31 ? upper << 16 : upper << 16 | 0xFFFFu);
    if (s == 0) largest = found;
    chosen += share(found, largest);
    if (lane == s) {
      id = 0xFFFFu - (most & 0xFFFFu);
      value = found;
    }
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (words[j] == most) words[j] = kTakenKey;
  }
  if constexpr (OverAll) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      all += lane * N + j < Experts && logits[j] == logits[j] ? share(logits[j], largest) : 0.f;
  }
  const float whole = OverAll ? warp_sum(all) : chosen;
  return {int(id), __fdiv_rn(share(value, largest), whole)};
}

// The choice from Experts logits of one row in memory, of a type: float, Bf16 or Fp16.
template <class Type, int Experts, int K, bool OverAll>
__device__ __forceinline__ Choice choose_from(const void* row, int lane) {
  constexpr int kEach = (Experts + 31) / 32;
  float logits[kEach];
  if constexpr (sizeof(Type) == 1 && Experts == 128) {  // Bf16 and Fp16 have no members: two bytes each in memory
    struct alignas(8) Four { u32 low, high; };
    const Four four = static_cast<const Four*>(row)[lane];
    logits[0] = Type::low(four.low);
    logits[1] = Type::high(four.low);
    logits[2] = Type::low(four.high);
    logits[3] = Type::high(four.high);
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int at = min(lane * kEach + j, Experts - 1);
      if constexpr (sizeof(Type) == 1)
        logits[j] = Type::widen(static_cast<const u16*>(row)[at]);
      else
        logits[j] = static_cast<const float*>(row)[at];
    }
  }
  if constexpr (kNarrow<Type>) return choose_narrow<Experts, K, OverAll>(logits, lane);
  else return choose_experts<Experts, K, OverAll>(logits, lane);
}

}  // namespace jitmx
