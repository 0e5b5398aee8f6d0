// The product of many bfloat16 rows with a panel by AMX, for the level that has it.
//
// A tile register has 16 rows of 64 bytes. A tile of x has 16 rows and 32 inputs, as they lie in
// memory; a tile of the panel has 16 pairs of inputs and 16 outputs; a tile of sums has 16 rows and 16
// outputs. Two tiles of x and two of the panel make four tiles of sums.
//
// A sum adds 32 inputs at a time, so its order is not that of `in_blocks` of columns.h: products whose
// sums have one order (`Product::fixed`) do not come here.
#pragma once

#include "columns.h"

#if defined(__AMX_BF16__)
namespace ed {
namespace {

constexpr int64_t kTileRows = 16, kTileInputs = 32;

// The instructions. The compiler's own functions for them do not state that they read memory.
template <int tile>
ED_INLINE void load_tile(const void* from, int64_t bytes_of_row) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(bytes_of_row), "i"(tile) : "memory");
}

template <int tile>
ED_INLINE void store_tile(void* to, int64_t bytes_of_row) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(bytes_of_row), "i"(tile) : "memory");
}

template <int tile>
ED_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// sums += x times w.
template <int sums, int x, int w>
ED_INLINE void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(w));
}

ED_INLINE void release_tiles() { asm volatile("tilerelease"); }

// The shapes of all tiles: 0 to 3 sums, 4 and 5 x, 6 and 7 the panel.
struct TileShapes {
  // Of `rows` rows of x, at most two tiles.
  explicit TileShapes(int64_t rows) {
    const int64_t upper = least(rows, kTileRows), lower = rows - upper;
    const int64_t rows_of[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; ++tile) {
      this->rows[tile] = static_cast<uint8_t>(rows_of[tile]);
      bytes[tile] = rows_of[tile] ? 64 : 0;
    }
  }
  void use() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }

  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// x with zeros behind its last inputs: 32 inputs of at most 32 rows.
struct LastInputs {
  void read(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t inputs) {
    std::memset(numbers, 0, sizeof numbers);
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(numbers + r * kTileInputs, x + r * x_stride, inputs * sizeof(uint16_t));
  }
  alignas(64) uint16_t numbers[2 * kTileRows * kTileInputs];
};

// sums [rows, kTile] += x [rows, inputs] times a panel, or = if the inputs are the first ones. The
// shapes are those of `rows`. The panel has zeros behind its last inputs, up to whole tiles.
inline void multiply_tiles(const uint16_t* x, int64_t x_stride, int64_t rows, const float* panel,
                           int64_t inputs, int64_t outputs, float* sums, bool first) {
  constexpr int64_t sums_bytes = kTile * sizeof(float);
  const bool both = rows > kTileRows;
  const int64_t whole = inputs / kTileInputs * kTileInputs;
  LastInputs rest;
  if (whole < inputs) rest.read(x + whole, x_stride, rows, inputs - whole);
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
      const bool last = i == whole;
      const uint16_t* own = last ? rest.numbers : x + i;
      const int64_t stride = last ? kTileInputs : x_stride;
      load_tile<6>(w, sums_bytes), load_tile<7>(w + 16, sums_bytes);
      load_tile<4>(own, stride * 2);
      multiply_tile<0, 4, 6>(), multiply_tile<1, 4, 7>();
      if (!both) continue;
      load_tile<5>(own + kTileRows * stride, stride * 2);
      multiply_tile<2, 5, 6>(), multiply_tile<3, 5, 7>();
    }
    store_tile<0>(sums + c, sums_bytes), store_tile<1>(sums + c + 16, sums_bytes);
    if (both) store_tile<2>(lower + c, sums_bytes), store_tile<3>(lower + c + 16, sums_bytes);
  }
}

}  // namespace
}  // namespace ed
#endif
