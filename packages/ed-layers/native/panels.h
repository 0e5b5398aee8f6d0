// Products with a matrix in panels, for one level of instructions.
//
// A panel has kTile outputs of all inputs, in the order in which a product reads them: a row of
// kTile numbers for each input, or, of codes of 8 bits, kTile fours of inputs. So a matrix is read in
// one long run, and the lines of the next block are fetched evenly while a block is multiplied.
// Every sum has the order of `in_blocks` of columns.h, or of `whole_in_tiles` of whole.h.
#pragma once

#include "whole.h"

namespace ed {
namespace {

constexpr int64_t kPanelInputs = 64;  // inputs of a block of numbers: two fit the first cache

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

// sums [R, kBlock] += x [R, k] * w [k, kBlock], where the rows of w lie kTile numbers apart; or = if
// the inputs are the `first` ones.
template <int R, int lines>
void multiply_panel(const float* x, int64_t x_stride, const float* w, int64_t k, float* sums,
                    bool first, const char* next) {
  Vec acc[R][kVectors] = {};
  if (!first) {
    ED_UNROLL
    for (int r = 0; r < R; ++r)
      ED_UNROLL
      for (int c = 0; c < kVectors; ++c) acc[r][c] = load(sums + r * kTile + c * kLanes);
  }
  for (int64_t i = 0; i < k; ++i) {
    Vec row[kVectors];
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c) row[c] = load(w + i * kTile + c * kLanes);
    ED_UNROLL
    for (int l = 0; l < lines; ++l) prefetch(next + (i * lines + l) * 64);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec number = broadcast(x[r * x_stride + i]);
      ED_UNROLL
      for (int c = 0; c < kVectors; ++c) acc[r][c] += number * row[c];
    }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c) store(sums + r * kTile + c * kLanes, acc[r][c]);
}

// The outputs [first, last) of numbers, which are whole panels [inputs, kTile].
void panels(const Product& p, int64_t first, int64_t last) {
  Scratch sums(least(p.rows, kMostRows) * kTile);
  WideRows wide(p);
  for (int64_t row = 0; row < p.rows; row += kMostRows) {
    int64_t rows = least(kMostRows, p.rows - row);
    int64_t passes = (rows + kRows - 1) / kRows * (kTile / kBlock);
    for (int64_t column = first; column < last; column += kTile) {
      auto* w = static_cast<const float*>(p.w) + column * p.inputs;
      for (int64_t i = 0; i < p.inputs; i += kPanelInputs) {
        int64_t k = least(kPanelInputs, p.inputs - i), pass = 0;
        NextBlock next{reinterpret_cast<const char*>(w + (i + k) * kTile), k, passes};
        row_blocks<kRows>(rows, [&](auto r, int64_t at) {
          for (int64_t c = 0; c < kTile; c += kBlock)
            next.part(pass++, [&](auto lines, const char* from) __attribute__((always_inline)) {
              multiply_panel<decltype(r)::value, decltype(lines)::value>(
                  wide.x + (row + at) * p.inputs + i, p.inputs, w + i * kTile + c, k,
                  sums.data + at * kTile + c, i == 0, from);
            });
        });
      }
      for (int64_t r = 0; r < rows; ++r) write(p, row + r, column, sums.data + r * kTile, kTile);
    }
  }
}

// The outputs [first, last) of codes of 8 bits, which are whole panels of fours [inputs / 4, kTile,
// 4], by rows in 8 bits. Groups have a multiple of four inputs.
void whole_panels(const Product& p, int64_t first, int64_t last) {
  Scratch sums(least(p.rows, kMostRows) * kTile);
  TileNumbers of_scale, of_zero;
  Blocks blocks(p);
  for (int64_t row = 0; row < p.rows; row += kMostRows) {
    int64_t rows = least(kMostRows, p.rows - row);
    int64_t passes = (rows + kRows - 1) / kRows * (kTile / kBlock);
    for (int64_t column = first; column < last; column += kTile) {
      std::memset(sums.data, 0, rows * kTile * sizeof(float));
      auto* w = static_cast<const uint8_t*>(p.w) + column * p.inputs;
      for (int64_t block = 0; block < p.inputs / p.group * blocks.count; ++block) {
        int64_t group = block / blocks.count, in_group = block % blocks.count * kWhole;
        int64_t k = least(kWhole, p.group - in_group), pass = 0;
        const float* scale = of_scale.get(p, p.scale, group, column, kTile);
        const float* zero = of_zero.get(p, p.zero, group, column, kTile);
        NextBlock next{reinterpret_cast<const char*>(w + k * kTile), k / 4, passes};
        row_blocks<kRows>(rows, [&](auto r, int64_t at) {
          BlockOfRows<decltype(r)::value> of_rows(p, row + at, block);
          for (int64_t c = 0; c < kTile; c += kBlock)
            next.part(pass++, [&](auto lines, const char* from) __attribute__((always_inline)) {
              multiply_whole<decltype(r)::value, true, decltype(lines)::value>(
                  p, of_rows, row + at, block, k, w + 4 * c, scale + c, zero ? zero + c : zero,
                  sums.data + at * kTile + c, kTile, from);
            });
        });
        w += k * kTile;
      }
      for (int64_t r = 0; r < rows; ++r) write(p, row + r, column, sums.data + r * kTile, kTile);
    }
  }
}

}  // namespace
}  // namespace ed
