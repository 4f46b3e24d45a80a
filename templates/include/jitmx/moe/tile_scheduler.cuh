// Tile scheduler: assigns the rows of tiles of both products to blocks.
#pragma once

namespace jitmx {

// The rows of tiles of one block, in the order in which it works on them. Rows of first products are assigned round
// robin. The first blocks, which own a row less of y, take part in a round more in every cycle.
template <int kCluster> struct TileScheduler {
  int items, rows13, rows2;
  bool down = false;  // the second product
  int item = 0, row = int(blockIdx.x), number = 0;  // in the cycle

  __device__ __forceinline__ TileScheduler(int items, int rows13, int rows2)
      : items(items), rows13(rows13), rows2(rows2) {
    const int left = rows2 % step();
    light_ = left ? (step() - left) * kCluster : 0;
    // Over as many items as blocks of a cluster, a row more of y is a row of tiles.
    rounds_ = light_ ? max((rows13 * kCluster - light_) / int(gridDim.x), 1) : 1;
    settle();
  }
  __device__ __forceinline__ int first_row() const { return int(gridDim.x - 1 - blockIdx.x) / kCluster; }
  __device__ __forceinline__ int step() const { return int(gridDim.x) / kCluster; }
  __device__ __forceinline__ bool valid() const { return item < items; }
  __device__ __forceinline__ bool same_item(const TileScheduler& other) const {
    return down == other.down && item == other.item;
  }

  __device__ __forceinline__ void next() {
    if (down) {
      row += step();
      if (row >= rows2) {
        row = first_row();
        item += kCluster;
      }
    } else {
      const bool more = int(blockIdx.x) < light_;
      row += int(gridDim.x);
      if (++number == rounds_ + (more ? 1 : 0)) {
        row += more ? light_ - int(gridDim.x) : light_;
        number = 0;
      }
      settle();
    }
  }

 private:
  __device__ __forceinline__ void settle() {
    while (row >= rows13 && item < items) {
      row -= rows13;
      ++item;
    }
    if (item >= items) {
      down = true;
      row = first_row();
      item = row < rows2 ? int(blockIdx.x) % kCluster : items;
    }
  }

  int light_, rounds_;
};

}  // namespace jitmx
