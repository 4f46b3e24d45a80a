// MXFP4 weights as E4M3, in registers: E2M1 times a power of two is an E4M3 number, and a normal one for 12 of these.
// So a block's scale, less the least of its row, picks a table of the eight magnitudes, of which PRMT looks four up at
// once.
//
// A word holds eight codes of a row, k = 0 … 7. They become k = 0, 2, 4, 6 in one register and 1, 3, 5, 7 in another:
// what an MMA calls 4t … 4t + 3 and 16 + 4t … 16 + 4t + 3 of 32 k, with activations in that order.
#pragma once
#include "jitmx/mxfp4/decode.cuh"
#include "jitmx/ptx/permute.cuh"

namespace jitmx {

constexpr u32 kBinades = 12;  // scales of a row that one pass over k takes: 2^-5 to 2^6

// Selectors of PRMT for the codes of a word, those of even k in the low half and of odd k in the high one; and the
// codes' signs, bytes of all ones or none, for even and for odd k.
template <class Encoding> struct Selectors;

template <> struct Selectors<Nibble> {
  u32 codes, even, odd;

  __device__ __forceinline__ explicit Selectors(u32 w) : codes(w & 0x77777777u) {
    even = permute(w << 4, w, 0xD9C8u);
    odd = permute(w << 4, w, 0xFBEAu);
  }
};

template <> struct Selectors<Rotated> {
  u32 codes, even, odd;

  __device__ __forceinline__ explicit Selectors(u32 w) {
    u32 p[4];
    Rotated::raw(w, p);
    codes = p[0] >> 6 & 0x00070007u;
    codes |= w << 2 & 0x00700070u;
    codes |= __funnelshift_l(w, w, 12) & 0x07000700u;
    codes |= __funnelshift_l(w, w, 20) & 0x70007000u;
    // Signs of pairs 0 and 1, then of 2 and 3: of even k in the lower bytes.
    const u32 first = permute(p[0], p[1], 0xFBD9u), second = permute(p[2], p[3], 0xFBD9u);
    even = permute(first, second, 0x5410u);
    odd = permute(first, second, 0x7632u);
  }
};

// The magnitudes of a row's blocks as E4M3: those of codes 0 … 3 and 4 … 7 are bytes of two registers, and a binade
// more adds one to each exponent. Zero stays zero, whatever the scale is.
class MagnitudeTable {
 public:
  MagnitudeTable() = default;
  // `base`: the least scale byte of the row in this pass.
  __device__ __forceinline__ explicit MagnitudeTable(u32 base)
      : low_(0x14100800u - base * kStepLow), high_(0x24201C18u - base * kStepHigh) {}

  // The table under byte `Index` of `scales`; with `Wide`, all zeros for scales of other passes.
  template <int Index, bool Wide>
  __device__ __forceinline__ void under(u32 scales, u32 base, u32& low, u32& high) const {
    const u32 byte = permute(scales, 0u, 0x4440u + Index);
    low = byte * kStepLow + low_;
    high = byte * kStepHigh + high_;
    if (Wide && byte - base >= kBinades) low = high = 0u;
  }

 private:
  static constexpr u32 kStepLow = 0x08080800u, kStepHigh = 0x08080808u;
  u32 low_, high_;
};

// Codes of even and odd k of a word, of magnitudes in a table.
template <class Encoding> __device__ __forceinline__ void look_up(u32 word, u32 low, u32 high, u32& even, u32& odd) {
  const Selectors<Encoding> selectors(word);
  even = permute(low, high, selectors.codes) | selectors.even & 0x80808080u;
  odd = permute(low, high, selectors.codes >> 16) | selectors.odd & 0x80808080u;
}

// The tables of this lane's rows g and g + 8, whose least scales are those of `bases`.
template <bool Wide> struct RowTables {
  MagnitudeTable low, high;
  u32 low_base, high_base;

  __device__ __forceinline__ RowTables(u32 low_base, u32 high_base)
      : low(low_base), high(high_base), low_base(low_base), high_base(high_base) {}

  // The fragment of A for a tile: of both blocks, rows g and g + 8 of each half of its k.
  template <class Encoding, class Tile> __device__ __forceinline__ void decode(const Tile& tile, u32 (&a)[8]) const {
    block<Encoding, 0>(tile.words.x, tile.words.y, tile.scales, a);
    block<Encoding, 1>(tile.words.z, tile.words.w, tile.scales, a);
  }

 private:
  template <class Encoding, int I>
  __device__ __forceinline__ void block(u32 word, u32 word_high, u32 scales, u32 (&a)[8]) const {
    u32 l, h;
    low.template under<I, Wide>(scales, low_base, l, h);
    look_up<Encoding>(word, l, h, a[4 * I], a[4 * I + 2]);
    high.template under<I + 2, Wide>(scales, high_base, l, h);
    look_up<Encoding>(word_high, l, h, a[4 * I + 1], a[4 * I + 3]);
  }
};

// What the sums of a row are to be multiplied by whose tables began at `base`: 2^(base + 5 - 127).
__device__ __forceinline__ float row_factor(u32 base) { return bits_to_float((base + 5u) << 23); }

}  // namespace jitmx
