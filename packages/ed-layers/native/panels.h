// Products with codes in panels, for one level of instructions.
//
// A panel has kTile outputs of all inputs, in the order in which a product reads them: fours of
// bytes. A byte has one code of 8 bits, or two of four bits, the even input in the lower half. So a
// matrix is read in one long run, and the lines of the next block are fetched evenly while a block is
// multiplied. Every sum has the order of `whole_in_tiles` of whole.h.
#pragma once

#include "whole.h"
#include "whole_tiles.h"

namespace ed {
namespace {

// Fetches the next block of a panel, in as many parts as the block is gone over.
struct NextBlock {
  // Call `f(Count<lines of 64 bytes for each `step`>, where they begin)` for the part `pass`.
  template <typename F>
  ED_INLINE void part(int64_t pass, const F& f) const {
    if (passes == 1) return f(Count<4>(), from);
    if (passes < 4 && pass < 2) return f(Count<2>(), from + pass * steps * 128);
    if (passes >= 4 && pass < 4) return f(Count<1>(), from + pass * steps * 64);
    f(Count<0>(), from);
  }

  const char* from;  // four lines for each of `steps` rows or fours
  int64_t steps, passes;
};

#if !ED_PAIRS
// The product of a block of codes of four bits: see `multiply_whole`, whose sums these are.
template <int R, int lines>
void multiply_half(const BlockOfRows<R>& of_rows, int64_t bytes, const uint8_t* w,
                   const float* scale, const float* zero, float* sums, int64_t sums_stride,
                   const char* next) {
  Ints acc[R][kVectors] = {};
  for (int64_t n = 0; n < bytes / 4; ++n) {
    Ints even[kVectors], odd[kVectors];
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      Ints both = load_ints(w + (n * kTile + c * kLanes) * 4);
      even[c] = both & 0x0f0f0f0f, odd[c] = (both >> 4) & 0x0f0f0f0f;
    }
    ED_UNROLL
    for (int l = 0; l < lines; ++l) prefetch(next + (n * lines + l) * 64);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      const int8_t* x = of_rows.numbers + r * of_rows.stride + 4 * n;
      int32_t of_even, of_odd;
      std::memcpy(&of_even, x, 4), std::memcpy(&of_odd, x + of_rows.to_odd, 4);
      ED_UNROLL
      for (int c = 0; c < kVectors; ++c) {
        acc[r][c] = dot_of_bytes(acc[r][c], even[c], of_even);
        acc[r][c] = dot_of_bytes(acc[r][c], odd[c], of_odd);
      }
    }
  }
  add_block<R>(of_rows, acc, scale, zero, sums, sums_stride);
}
#endif

// Fours of bytes with two codes as fours of even codes, and from kFours / 2 on those of odd ones.
inline void part_halves(const uint8_t* w, int64_t bytes, uint8_t* fours) {
  for (int64_t i = 0; i < bytes * kTile; i += kLanes * 4) {
    Ints both = load_ints(w + i);
    Ints even = both & 0x0f0f0f0f, odd = (both >> 4) & 0x0f0f0f0f;
    std::memcpy(fours + i, &even, sizeof even);
    std::memcpy(fours + kFours / 2 * 4 * kTile + i, &odd, sizeof odd);
  }
}

// The outputs [first, last) of codes, which are whole panels of fours [bytes of an output / 4, kTile,
// 4], by rows in 8 bits. Groups have whole fours.
void whole_panels(const Product& p, int64_t first, int64_t last) {
  TileNumbers of_scale, of_zero;
  Blocks blocks(p);
#if defined(__AMX_INT8__)
  WholeTiles tiles;
  const bool in_tiles = p.rows >= kTileRows;
#else
  const bool in_tiles = false;
#endif
  const bool half = blocks.halves == 2, parted = half && (ED_PAIRS || in_tiles);
  Scratch sums(least(p.rows, kMostRows) * kTile), scratch(parted ? kWhole * kTile / 4 : 0);
  auto* fours = reinterpret_cast<uint8_t*>(scratch.data);
  for (int64_t row = 0; row < p.rows; row += kMostRows) {
    int64_t rows = least(kMostRows, p.rows - row);
    int64_t passes = (rows + kRows - 1) / kRows * (kTile / kBlock);
    for (int64_t column = first; column < last; column += kTile) {
      std::memset(sums.data, 0, rows * kTile * sizeof(float));
      auto* w = static_cast<const uint8_t*>(p.w) + column * (p.inputs / blocks.halves);
      for (int64_t block = 0; block < blocks.all; ++block) {
        int64_t group = block / blocks.count, in_group = block % blocks.count * kWhole;
        int64_t bytes = least(kWhole, p.group - in_group) / blocks.halves, pass = 0;
        const float* scale = of_scale.get(p, p.scale, group, column, kTile);
        const float* zero = of_zero.get(p, p.zero, group, column, kTile);
        if (parted) part_halves(w, bytes, fours);
#if defined(__AMX_INT8__)
        if (in_tiles) {
          tiles.add(p, row, rows, block, parted ? fours : w, bytes, scale, zero, sums.data);
          w += bytes * kTile;
          continue;
        }
#endif
        NextBlock next{reinterpret_cast<const char*>(w + bytes * kTile), bytes / 4, passes};
        row_blocks<kRows>(rows, [&](auto r, int64_t at) {
          constexpr int R = decltype(r)::value;
          BlockOfRows<R> of_rows(p, blocks, row + at, block);
          for (int64_t c = 0; c < kTile; c += kBlock)
            next.part(pass++, [&](auto lines, const char* from) __attribute__((always_inline)) {
              constexpr int L = decltype(lines)::value;
              const float* own_zero = zero ? zero + c : zero;
              float* to = sums.data + at * kTile + c;
#if ED_PAIRS
              if (half)
                return multiply_whole<R, false, L>(of_rows, 2, bytes, fours + 4 * c, scale + c,
                                                   own_zero, to, kTile, from);
#else
              if (half)
                return multiply_half<R, L>(of_rows, bytes, w + 4 * c, scale + c, own_zero, to,
                                           kTile, from);
#endif
              multiply_whole<R, true, L>(of_rows, 1, bytes, w + 4 * c, scale + c, own_zero, to,
                                         kTile, from);
            });
        });
        w += bytes * kTile;
      }
      for (int64_t r = 0; r < rows; ++r) write(p, row + r, column, sums.data + r * kTile, kTile);
    }
  }
}

}  // namespace
}  // namespace ed
