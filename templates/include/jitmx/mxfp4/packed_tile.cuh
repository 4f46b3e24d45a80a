// A lane's share of a packed tile (16 rows by 64 k), and the A fragments of m16n8k16 that it makes: rows g and g + 8,
// four pairs each of a block of 32, in the order in which X lies in memory.
#pragma once
#include "jitmx/mx/mxfp8.cuh"
#include "jitmx/mxfp4/decode.cuh"

namespace jitmx {

// A fragments of a block: two steps of k16, four registers each.
struct Fragments { u32 a[8]; };

template <class T, class Encoding> struct Mxfp4Tile {
  static constexpr int kVectors = 1;  // of 512 bytes a tile
  static constexpr u32 kRestore = Field<T>::restore;
  template <int Index> static __device__ __forceinline__ u32 folded(u32 scales) { return folded_scale<Index>(scales); }

  // Block I (0, 1) of the tile; `low` and `high` multiply rows g and g + 8.
  template <int I> static __device__ __forceinline__ Fragments fragments(const Vec4 (&v)[1], u32 low, u32 high) {
    u32 p[4], q[4];
    decode<T, Encoding>(I == 0 ? v[0].x : v[0].z, low, p);
    decode<T, Encoding>(I == 0 ? v[0].y : v[0].w, high, q);
    return {{p[0], q[0], p[1], q[1], p[2], q[2], p[3], q[3]}};
  }
};

template <class T> struct Mxfp8Tile {
  static constexpr int kVectors = 2;
  static constexpr u32 kRestore = E4M3Field<T>::restore;
  template <int Index> static __device__ __forceinline__ u32 folded(u32 scales) {
    return folded_scale_e4m3<Index>(scales);
  }

  template <int I> static __device__ __forceinline__ Fragments fragments(const Vec4 (&v)[2], u32 low, u32 high) {
    Fragments f;
    decode_e4m3<T>(v[I].x, low, f.a[0], f.a[2]);
    decode_e4m3<T>(v[I].y, low, f.a[4], f.a[6]);
    decode_e4m3<T>(v[I].z, high, f.a[1], f.a[3]);
    decode_e4m3<T>(v[I].w, high, f.a[5], f.a[7]);
    return f;
  }
};

// Fragments of a tile times its scales, which are folded into the multiplication that decoding needs anyway.
template <class Packed> struct FoldedScales {
  using Tile = Packed;
  static constexpr bool kFolded = true;
  template <int I> static __device__ __forceinline__ Fragments fragments(const Vec4 (&v)[Tile::kVectors], u32 scales) {
    return Tile::template fragments<I>(v, Tile::template folded<I>(scales), Tile::template folded<I + 2>(scales));
  }
};

// Fragments without them: scales multiply the sum over a block of 32, in fp32, exact for any scale byte.
template <class Packed> struct ScaledSums {
  using Tile = Packed;
  static constexpr bool kFolded = false;
  template <int I> static __device__ __forceinline__ Fragments fragments(const Vec4 (&v)[Tile::kVectors], u32) {
    return Tile::template fragments<I>(v, Tile::kRestore, Tile::kRestore);
  }
};

}  // namespace jitmx
