// Product of 16 or more int8 rows with packed quads of codes by AMX. Sums of a block of inputs are
// exact, so they equal those of `multiply_int8_block` of int8_gemm.h.
#pragma once

#include "amx_tiles.h"
#include "int8_gemm.h"

#if defined(__AMX_INT8__)
namespace ed {
namespace {

constexpr int64_t kTileBytes = 64;  // inputs of a tile of x

// sums += x * w, for signed bytes.
template <int sums, int x, int w>
ED_INLINE void multiply_int8_tile() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(w));
}

class AmxInt8Gemm {
 public:
  ~AmxInt8Gemm() {
    if (config_rows_) release_tiles();
  }

  // sums [rows, kTile] += scale * (x * codes - zero * sums of x) * scale of each row, for the rows
  // from `row` on and the outputs [first, last), half of a tile or a full tile. `quads` has `bytes`
  // inputs of 8-bit codes. With four bits, it has the even inputs, and from kBlockQuads / 2 on the
  // odd inputs.
  void add(const Gemm& p, int64_t row, int64_t rows, int64_t block, const uint8_t* quads,
           int64_t bytes, int64_t first, int64_t last, const float* scale, const float* zero,
           float* sums) {
    const QuantBlocks blocks(p);
    const int64_t groups = blocks.groups, block_count = blocks.block_count;
    const int64_t full_bytes = bytes / kTileBytes * kTileBytes;
    const uint8_t* half_quads[2] = {quads, quads + kBlockQuads / 2 * 4 * kTile};
    for (int64_t half = 0; half < blocks.codes_per_byte && full_bytes < bytes; ++half) {
      std::memset(rest_[half], 0, sizeof rest_[half]);
      std::memcpy(rest_[half], half_quads[half] + full_bytes * kTile, (bytes - full_bytes) * kTile);
    }
    for (int64_t at = 0; at < rows; at += 2 * kTileRows) {
      const int64_t count = min_int(2 * kTileRows, rows - at);
      if (count != config_rows_) TileConfig(count).use(), config_rows_ = count;
      const int8_t* x = p.x_int8 + ((row + at) * block_count + block) * blocks.block_bytes;
      for (int64_t c = first; c < last; c += kTile / 2)
        multiply(x, block_count * blocks.block_bytes, count > kTileRows, blocks, half_quads, bytes,
                 full_bytes, c);
      for (int64_t r = 0; r < count; ++r) {
        const float row_scale = p.row_scale[(row + at + r) * groups + block / blocks.per_group];
        const float row_sum = p.row_sums[(row + at + r) * block_count + block];
        for (int64_t c = first; c < last; c += kLanes)
          add_scaled(load_ints(acc_ + r * kTile + c), row_scale, row_sum, scale + c,
                     zero ? zero + c : zero, sums + (at + r) * kTile + c);
      }
    }
  }

 private:
  // acc = one or two tiles of rows of x times the codes of half a panel, from output `c` on.
  void multiply(const int8_t* x, int64_t x_stride, bool both, const QuantBlocks& blocks,
                const uint8_t* const* half_quads, int64_t bytes, int64_t full_bytes, int64_t c) {
    constexpr int64_t row_bytes = kTile * 4;
    clear_tile<0>(), clear_tile<1>();
    if (both) clear_tile<2>(), clear_tile<3>();
    for (int64_t half = 0; half < blocks.codes_per_byte; ++half)
      for (int64_t i = 0; i < bytes; i += kTileBytes) {
        const uint8_t* w = (i < full_bytes ? half_quads[half] + i * kTile : rest_[half]) + 4 * c;
        const int8_t* x_tile = x + half * blocks.part_bytes + i;
        load_tile<6>(w, row_bytes), load_tile<7>(w + 64, row_bytes);
        load_tile<4>(x_tile, x_stride);
        multiply_int8_tile<0, 4, 6>(), multiply_int8_tile<1, 4, 7>();
        if (!both) continue;
        load_tile<5>(x_tile + kTileRows * x_stride, x_stride);
        multiply_int8_tile<2, 5, 6>(), multiply_int8_tile<3, 5, 7>();
      }
    int32_t *upper = acc_ + c, *lower = upper + kTileRows * kTile;
    store_tile<0>(upper, row_bytes), store_tile<1>(upper + 16, row_bytes);
    if (both) store_tile<2>(lower, row_bytes), store_tile<3>(lower + 16, row_bytes);
  }

  int64_t config_rows_ = 0;  // rows of the loaded tile configuration
  alignas(64) int32_t acc_[2 * kTileRows * kTile];
  alignas(64) uint8_t rest_[2][kTileBytes * kTile];  // quads after the last full tile
};

}  // namespace
}  // namespace ed
#endif
