// Product of many bfloat16 rows with a panel by AMX.
//
// A tile register has 16 rows of 64 bytes. A tile of x has 16 rows and 32 inputs in the layout of
// x. A tile of the panel has 16 pairs of inputs and 16 outputs. A tile of sums has 16 rows and 16
// outputs. Two tiles of x and two tiles of the panel produce four tiles of sums.
//
// The instruction adds 32 inputs to a sum, so the order differs from `gemm_blocked` of
// gemm_blocked.h. Products with `Gemm::fixed_order` do not use AMX.
#pragma once

#include "gemm_blocked.h"

#if defined(__AMX_BF16__)
namespace ed {
namespace {

constexpr int64_t kTileRows = 16, kTileInputs = 32;

// The instructions. The compiler's intrinsics do not declare that they read memory.
template <int tile>
ED_INLINE void load_tile(const void* from, int64_t bytes_of_row) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(bytes_of_row), "i"(tile)
               : "memory");
}

template <int tile>
ED_INLINE void store_tile(void* to, int64_t bytes_of_row) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(to), "r"(bytes_of_row), "i"(tile)
               : "memory");
}

template <int tile>
ED_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// sums += x * w.
template <int sums, int x, int w>
ED_INLINE void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(w));
}

ED_INLINE void release_tiles() { asm volatile("tilerelease"); }

// The configuration of all tiles: 0 to 3 are sums, 4 and 5 are x, 6 and 7 are the panel.
struct TileConfig {
  // For `rows` rows of x, at most two tiles.
  explicit TileConfig(int64_t rows) {
    const int64_t upper = min_int(rows, kTileRows), lower = rows - upper;
    const int64_t tile_rows[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; ++tile) {
      this->rows[tile] = static_cast<uint8_t>(tile_rows[tile]);
      bytes[tile] = tile_rows[tile] ? 64 : 0;
    }
  }
  void use() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }

  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// The last inputs of x, padded with zeros: 32 inputs of at most 32 rows.
struct PaddedInputs {
  void read(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t inputs) {
    std::memset(numbers, 0, sizeof numbers);
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(numbers + r * kTileInputs, x + r * x_stride, inputs * sizeof(uint16_t));
  }
  alignas(64) uint16_t numbers[2 * kTileRows * kTileInputs];
};

// sums [rows, kTile] += x [rows, inputs] times a panel; = if `first`. The configuration for `rows`
// must be loaded. The panel is padded with zeros to full tiles.
inline void multiply_tiles(const uint16_t* x, int64_t x_stride, int64_t rows, const float* panel,
                           int64_t inputs, int64_t outputs, float* sums, bool first) {
  constexpr int64_t sums_bytes = kTile * sizeof(float);
  const bool both = rows > kTileRows;
  const int64_t full_inputs = inputs / kTileInputs * kTileInputs;
  PaddedInputs padded;
  if (full_inputs < inputs) padded.read(x + full_inputs, x_stride, rows, inputs - full_inputs);
  for (int64_t c = 0; c < outputs; c += 32) {
    float* lower = sums + kTileRows * kTile;
    if (first) {
      clear_tile<0>(), clear_tile<1>();
      if (both) clear_tile<2>(), clear_tile<3>();
    } else {
      load_tile<0>(sums + c, sums_bytes), load_tile<1>(sums + c + 16, sums_bytes);
      if (both) load_tile<2>(lower + c, sums_bytes), load_tile<3>(lower + c + 16, sums_bytes);
    }
    for (int64_t i = 0; i < inputs; i += kTileInputs) {
      const float* w = panel + i / 2 * kTile + c;
      const bool last = i == full_inputs;
      const uint16_t* x_tile = last ? padded.numbers : x + i;
      const int64_t stride = last ? kTileInputs : x_stride;
      load_tile<6>(w, sums_bytes), load_tile<7>(w + 16, sums_bytes);
      load_tile<4>(x_tile, stride * 2);
      multiply_tile<0, 4, 6>(), multiply_tile<1, 4, 7>();
      if (!both) continue;
      load_tile<5>(x_tile + kTileRows * stride, stride * 2);
      multiply_tile<2, 5, 6>(), multiply_tile<3, 5, 7>();
    }
    store_tile<0>(sums + c, sums_bytes), store_tile<1>(sums + c + 16, sums_bytes);
    if (both) store_tile<2>(lower + c, sums_bytes), store_tile<3>(lower + c + 16, sums_bytes);
  }
}

}  // namespace
}  // namespace ed
#endif
