// The product in whole numbers by AMX, for the level that has it: 16 or more rows in 8 bits by codes in
// fours. Sums of a block of inputs are exact, so they are those of `multiply_whole` of whole.h.
#pragma once

#include "tiles.h"
#include "whole.h"

#if defined(__AMX_INT8__)
namespace ed {
namespace {

constexpr int64_t kTileBytes = 64;  // inputs of a tile of x

// sums += x times w, of bytes with a sign.
template <int sums, int x, int w>
ED_INLINE void multiply_tile_of_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(w));
}

class WholeTiles {
 public:
  ~WholeTiles() {
    if (shaped_) release_tiles();
  }

  // sums [rows, kTile] += scale * (numbers times codes - zero * sums of numbers) * scale of each row,
  // for the rows from `row` on and the outputs [first, last), half of a tile or all. `fours` has
  // `bytes` inputs of codes of 8 bits; or, of four bits, the even inputs, and from kFours / 2 on the
  // odd ones.
  void add(const Product& p, int64_t row, int64_t rows, int64_t block, const uint8_t* fours,
           int64_t bytes, int64_t first, int64_t last, const float* scale, const float* zero,
           float* sums) {
    const Blocks blocks(p);
    const int64_t groups = blocks.groups, all = blocks.all;
    const int64_t whole = bytes / kTileBytes * kTileBytes;
    const uint8_t* of_half[2] = {fours, fours + kFours / 2 * 4 * kTile};
    for (int64_t half = 0; half < blocks.halves && whole < bytes; ++half) {
      std::memset(rest_[half], 0, sizeof rest_[half]);
      std::memcpy(rest_[half], of_half[half] + whole * kTile, (bytes - whole) * kTile);
    }
    for (int64_t at = 0; at < rows; at += 2 * kTileRows) {
      const int64_t count = least(2 * kTileRows, rows - at);
      if (count != shaped_) TileShapes(count).use(), shaped_ = count;
      const int8_t* x = p.numbers + ((row + at) * all + block) * blocks.of_block;
      for (int64_t c = first; c < last; c += kTile / 2)
        multiply(x, all * blocks.of_block, count > kTileRows, blocks, of_half, bytes, whole, c);
      for (int64_t r = 0; r < count; ++r) {
        const float of_row = p.row_scale[(row + at + r) * groups + block / blocks.count];
        const float of_zero = p.row_sums[(row + at + r) * all + block];
        for (int64_t c = first; c < last; c += kLanes)
          add_scaled(load_ints(acc_ + r * kTile + c), of_row, of_zero, scale + c,
                     zero ? zero + c : zero, sums + (at + r) * kTile + c);
      }
    }
  }

 private:
  // acc = one or two tiles of rows of x times the codes of half a panel, from output `c` on.
  void multiply(const int8_t* x, int64_t x_stride, bool both, const Blocks& blocks,
                const uint8_t* const* of_half, int64_t bytes, int64_t whole, int64_t c) {
    constexpr int64_t row_bytes = kTile * 4;
    clear_tile<0>(), clear_tile<1>();
    if (both) clear_tile<2>(), clear_tile<3>();
    for (int64_t half = 0; half < blocks.halves; ++half)
      for (int64_t i = 0; i < bytes; i += kTileBytes) {
        const uint8_t* w = (i < whole ? of_half[half] + i * kTile : rest_[half]) + 4 * c;
        const int8_t* own = x + half * blocks.of_part + i;
        load_tile<6>(w, row_bytes), load_tile<7>(w + 64, row_bytes);
        load_tile<4>(own, x_stride);
        multiply_tile_of_bytes<0, 4, 6>(), multiply_tile_of_bytes<1, 4, 7>();
        if (!both) continue;
        load_tile<5>(own + kTileRows * x_stride, x_stride);
        multiply_tile_of_bytes<2, 5, 6>(), multiply_tile_of_bytes<3, 5, 7>();
      }
    int32_t *upper = acc_ + c, *lower = upper + kTileRows * kTile;
    store_tile<0>(upper, row_bytes), store_tile<1>(upper + 16, row_bytes);
    if (both) store_tile<2>(lower, row_bytes), store_tile<3>(lower + 16, row_bytes);
  }

  int64_t shaped_ = 0;  // rows of the present shapes
  alignas(64) int32_t acc_[2 * kTileRows * kTile];
  alignas(64) uint8_t rest_[2][kTileBytes * kTile];  // fours behind the last whole tile
};

}  // namespace
}  // namespace ed
#endif
