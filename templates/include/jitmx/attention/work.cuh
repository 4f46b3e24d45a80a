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

// All blocks share all rounds evenly, whatever the requests' lengths: block b takes [b T / B, (b + 1) T / B) of them.
// Each warp finds out by itself.
template <int Keys, int MostQueries, bool Append, bool Windowed> class EvenRounds {
 public:
  __device__ __forceinline__ EvenRounds(const int* seq_lens, const int* query_start, int window, int requests,
                                        int kv_heads, int lane)
      : seq_lens_(seq_lens), query_start_(query_start), window_(window), requests_(requests), kv_heads_(kv_heads) {
    for (int i = 0; i < requests; i += 32) {
      const int rounds = rounds_of(i + lane);
      int sum = rounds;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
      total_ += sum;
    }
    blocks_ = int(min((long long)gridDim.x, (total_ + kLeastRounds<Keys> - 1) / kLeastRounds<Keys>));
    if (int(blockIdx.x) >= blocks_) return;
    at_ = start_of(blockIdx.x);
    end_ = start_of(blockIdx.x + 1);
    long long before = 0;
    for (int i = 0; i < requests; i += 32) {
      const int rounds = rounds_of(i + lane);
      int sum = rounds;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += other;
      }
      const u32 past = __ballot_sync(kFullWarp, before + sum > at_);
      if (past != 0u) {
        const int found = __ffs(int(past)) - 1;
        request_ = i + found;
        before_ = before + __shfl_sync(kFullWarp, sum - rounds, found);
        return;
      }
      before += __shfl_sync(kFullWarp, sum, 31);
    }
  }

  __device__ __forceinline__ bool next(Work& work) {
    if (at_ >= end_) return false;
    Request request = request_of<Append, Windowed>(seq_lens_, query_start_, request_, window_);
    int rounds = of(request);
    while (at_ >= before_ + (long long)rounds * kv_heads_) {  // requests without new tokens have none
      before_ += (long long)rounds * kv_heads_;
      request = request_of<Append, Windowed>(seq_lens_, query_start_, ++request_, window_);
      rounds = of(request);
    }
    work.request = request;
    work.total = rounds;
    work.head = int((at_ - before_) / rounds);
    const long long own = before_ + (long long)work.head * rounds;
    work.begin = int(at_ - own);
    work.end = int(min(end_ - own, (long long)rounds));
    work.first = block_of(own);
    work.last = block_of(own + rounds - 1);
    at_ = own + work.end;
    return true;
  }

 private:
  __device__ __forceinline__ int of(const Request& request) const {
    return request.queries < 1 || request.queries > MostQueries ? 0 : request.rounds(Keys);
  }
  __device__ __forceinline__ int rounds_of(int index) const {
    if (index >= requests_) return 0;
    return of(request_of<Append, Windowed>(seq_lens_, query_start_, index, window_)) * kv_heads_;
  }
  __device__ __forceinline__ long long start_of(u32 block) const { return total_ * block / blocks_; }
  // The last block that starts at a round or before it.
  __device__ __forceinline__ int block_of(long long round) const {
    return int(((round + 1) * blocks_ + total_ - 1) / total_) - 1;
  }

  const int* seq_lens_;
  const int* query_start_;
  int window_, requests_, kv_heads_;
  int blocks_ = 0, request_ = 0;
  long long total_ = 0, before_ = 0, at_ = 0, end_ = 0;
};

// `parts` blocks a (request, KV head), of which the first ones have an even share of its rounds each, and the others
// nothing where there are too few.
template <int Keys, int MostQueries, bool Append, bool Windowed> class FixedParts {
 public:
  __device__ __forceinline__ FixedParts(const int* seq_lens, const int* query_start, int window, int parts,
                                        int kv_heads) {
    const int item = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts;
    work_.request = request_of<Append, Windowed>(seq_lens, query_start, item / kv_heads, window);
    work_.head = item % kv_heads;
    work_.total = work_.request.rounds(Keys);
    const int used = min(parts, (work_.total + kLeastRounds<Keys> - 1) / kLeastRounds<Keys>);
    work_.begin = int((long long)work_.total * part / used);
    work_.end = int((long long)work_.total * (part + 1) / used);
    work_.first = 0;
    work_.last = used - 1;
    left_ = part < used && work_.request.queries >= 1 && work_.request.queries <= MostQueries;
  }

  __device__ __forceinline__ bool next(Work& work) {
    work = work_;
    const bool found = left_;
    left_ = false;
    return found;
  }

 private:
  Work work_;
  bool left_;
};

}  // namespace jitmx
