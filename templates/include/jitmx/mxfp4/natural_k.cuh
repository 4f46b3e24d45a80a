// Fragments of A whose k runs as in memory, m64n*k16, from packed tiles: what they multiply needs no order of its own.
//
// A packed word holds eight consecutive k of a row, an octet; lane t of a quad has octet t of a block of 32. The
// product wants pair t (k = 8 s + 2 t and the next) of every octet s in lane t. So each lane reads the words of all
// four lanes of its quad, which takes addresses that are equal within a quad, and of each word its own pair: by shifts
// that depend on the lane.
#pragma once
#include "jitmx/math/scalar.cuh"
#include "jitmx/mxfp4/decode.cuh"

namespace jitmx {

// Brings pair t of a word to its places in bf16, among bits of others.
template <class Encoding> class PairPlace;
template <> class PairPlace<Rotated> {
 public:
  __device__ __forceinline__ explicit PairPlace(int t)
      : rotation_(0x0E0A0400u >> (8 * t)), factor_(t == 0 ? 256u : 0u) {
    asm volatile("" : "+r"(rotation_), "+r"(factor_));  // else the compiler makes them anew for every block
  }
  __device__ __forceinline__ u32 operator()(u32 word) const {
    return (__funnelshift_l(word, word, rotation_) ^ word * factor_) & (Field<Bf16>::magnitude | kSigns);
  }

 private:
  u32 rotation_, factor_;
};
// Of nibbles magnitudes are rotated, and signs multiplied by a power of two.
template <> class PairPlace<Nibble> {
 public:
  __device__ __forceinline__ explicit PairPlace(int t)
      : rotation_(0x1A1E0206u >> (8 * t)), factor_(1u << (12 - 4 * t)) {
    asm volatile("" : "+r"(rotation_), "+r"(factor_));
  }
  __device__ __forceinline__ u32 operator()(u32 word) const {
    return merge(word * factor_, kSigns, __funnelshift_l(word, word, rotation_), Field<Bf16>::magnitude);
  }

 private:
  u32 rotation_, factor_;
};

// Decodes what a lane needs of a block of 32 k by 16 rows.
template <class Encoding> class NaturalDecoder {
 public:
  // `t`: the lane's place in its quad.
  __device__ __forceinline__ explicit NaturalDecoder(int t) : pair_(t) {}

  // What multiplies rows g and g + 8 of block I of a tile; `scales` is the packed word of scales of those rows.
  template <int I> static __device__ __forceinline__ void scale(u32 scales, u32 (&rows)[2]) {
    rows[0] = folded_scale<I>(scales);
    rows[1] = folded_scale<I + 2>(scales);
  }

  // The fragment of step J (k16) of block I: `quad[s]` is the vector of lane s of the quad (rows g and g + 8 of both
  // blocks).
  template <int I, int J>
  __device__ __forceinline__ void fragment(const Vec4 (&quad)[4], const u32 (&rows)[2], u32 (&a)[4]) const {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const Vec4& words = quad[2 * J + s];
      a[2 * s] = Bf16::multiply(pair_(I == 0 ? words.x : words.z), rows[0]);
      a[2 * s + 1] = Bf16::multiply(pair_(I == 0 ? words.y : words.w), rows[1]);
    }
  }

  // Both steps of block I.
  template <int I> __device__ __forceinline__ void fragments(const Vec4 (&quad)[4], u32 scales, u32 (&a)[8]) const {
    u32 rows[2];
    scale<I>(scales, rows);
    fragment<I, 0>(quad, rows, reinterpret_cast<u32 (&)[4]>(a[0]));
    fragment<I, 1>(quad, rows, reinterpret_cast<u32 (&)[4]>(a[4]));
  }

 private:
  PairPlace<Encoding> pair_;  // the lane's of an octet, times 2^-126
};

}  // namespace jitmx
