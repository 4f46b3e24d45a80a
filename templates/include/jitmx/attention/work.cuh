// Which part of which (request, KV head) a block works on. Work is counted in rounds: what all warps of a block take of
// the old tokens at a time. Each (request, KV head) has at least one.
#pragma once
#include "jitmx/math/warp.cuh"

namespace jitmx {

// New tokens of a request, how many there are before them, and those that are taken from the cache: from `start`, a
// multiple of 16, up to `end`.
struct Request {
  int index, first, queries, old, start, end;

  __device__ __forceinline__ int rounds(int keys) const { return max(1, (end - start + keys - 1) / keys); }
};

// `Append`: the cache does not have the new tokens yet.
template <bool Append, bool Windowed>
__device__ __forceinline__ Request request_of(const int* seq_lens, const int* query_start, int index, int window) {
  Request found{index, query_start[index], 0, 0, 0, 0};
  const int length = seq_lens[index];
  found.queries = query_start[index + 1] - found.first;
  found.old = max(length - found.queries, 0);
  if (length < found.queries) found.old = -1;  // nothing to attend to: padding
  if (Windowed) found.start = max(found.old - window + 1, 0) / 16 * 16;
  found.end = Append || found.old < 0 ? found.old : length;
  return found;
}

// Rounds [begin, end) of `total` of one (request, KV head), which blocks `first` to `last` share.
struct Work {
  Request request;
  int head, begin, end, total;
  int first, last;

  __device__ __forceinline__ bool newest() const { return end == total; }
};

// What a block is to have at least: merging takes longer than this many old tokens do.
constexpr int kLeastTokens = 256;
template <int Keys> constexpr int kLeastRounds = Keys < kLeastTokens ? kLeastTokens / Keys : 1;

// All blocks share all rounds evenly, whatever the requests' lengths; the first ones have one more where they do not
// divide. All rounds together are fewer than 2^31. Each warp finds out by itself.
template <int Keys, int MostQueries, bool Append, bool Windowed> class EvenRounds {
 public:
  // Asked by a whole warp.
  __device__ __forceinline__ EvenRounds(const int* seq_lens, const int* query_start, int window, int requests,
                                        int kv_heads, int lane) {
    int total = 0;
#pragma unroll 1
    for (int i = 0; i < requests; i += 32) {
      int sum = i + lane < requests ? rounds_of(request(seq_lens, query_start, window, i + lane)) * kv_heads : 0;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
      total += sum;
    }
    const int blocks = min(int(gridDim.x), (total + kLeastRounds<Keys> - 1) / kLeastRounds<Keys>);
    if (int(blockIdx.x) >= blocks) return;
    share_ = total / blocks;
    larger_ = total - share_ * blocks;
    at_ = start_of(int(blockIdx.x));
    end_ = start_of(int(blockIdx.x) + 1);
#pragma unroll 1
    for (int i = 0; i < requests; i += 32) {
      const int rounds =
          i + lane < requests ? rounds_of(request(seq_lens, query_start, window, i + lane)) * kv_heads : 0;
      int sum = rounds;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += other;
      }
      const u32 past = __ballot_sync(kFullWarp, before_ + sum > at_);
      if (past != 0u) {
        const int found = __ffs(int(past)) - 1;
        request_ = i + found;
        before_ += __shfl_sync(kFullWarp, sum - rounds, found);
        return;
      }
      before_ += __shfl_sync(kFullWarp, sum, 31);
    }
  }

  // Asked by one thread.
  __device__ __forceinline__ bool next(const int* seq_lens, const int* query_start, int window, int kv_heads,
                                       Work& work) {
    if (at_ >= end_) return false;
    Request found = request(seq_lens, query_start, window, request_);
    int rounds = rounds_of(found);
    while (at_ >= before_ + rounds * kv_heads) {  // requests without new tokens have none
      before_ += rounds * kv_heads;
      found = request(seq_lens, query_start, window, ++request_);
      rounds = rounds_of(found);
    }
    work.request = found;
    work.total = rounds;
    work.head = (at_ - before_) / rounds;
    const int own = before_ + work.head * rounds;
    work.begin = at_ - own;
    work.end = min(end_ - own, rounds);
    work.first = block_of(own);
    work.last = block_of(own + rounds - 1);
    at_ = own + work.end;
    return true;
  }

 private:
  static __device__ __forceinline__ Request request(const int* seq_lens, const int* query_start, int window,
                                                    int index) {
    return request_of<Append, Windowed>(seq_lens, query_start, index, window);
  }
  static __device__ __forceinline__ int rounds_of(const Request& request) {
    return request.queries < 1 || request.queries > MostQueries ? 0 : request.rounds(Keys);
  }
  __device__ __forceinline__ int start_of(int block) const { return block * share_ + min(block, larger_); }
  __device__ __forceinline__ int block_of(int round) const {
    const int in_larger = larger_ * (share_ + 1);
    return round < in_larger ? round / (share_ + 1) : larger_ + (round - in_larger) / share_;
  }

  int share_ = 0, larger_ = 0, request_ = 0, before_ = 0, at_ = 0, end_ = 0;
};

// The part of this block where `parts` blocks share a (request, KV head): the first ones have an even share of its
// rounds each, the others nothing where there are too few. False: nothing.
template <int Keys, int MostQueries, bool Append, bool Windowed>
__device__ __forceinline__ bool fixed_part(const int* seq_lens, const int* query_start, int window, int parts,
                                           int kv_heads, Work& work) {
  const int item = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts;
  const Request request = request_of<Append, Windowed>(seq_lens, query_start, item / kv_heads, window);
  work.request = request;
  work.head = item % kv_heads;
  work.total = request.rounds(Keys);
  const int used = min(parts, (work.total + kLeastRounds<Keys> - 1) / kLeastRounds<Keys>);
  const int share = work.total / used, larger = work.total % used;
  work.begin = part * share + min(part, larger);
  work.end = work.begin + share + (part < larger);
  work.first = 0;
  work.last = used - 1;
  return part < used && request.queries >= 1 && request.queries <= MostQueries;
}

}  // namespace jitmx
