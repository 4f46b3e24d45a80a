// Packed MXFP4 weights in memory (docs/packed-layout.md): tiles of 16 rows by 64 k, row of tiles after row of tiles.
#pragma once

namespace jitmx {

constexpr int kTileBytes = 512;   // codes of a tile: 16 bytes of each lane
// scales of a tile: 4 bytes of each quad, those of its rows g and g + 8 and both blocks
constexpr int kScaleBytes = 32;

}  // namespace jitmx
