// The product in whole numbers for few rows, for one level of instructions: memory is the limit, and
// read fastest in long runs. So the sums of a block of inputs stay in the first level cache.
#pragma once

#include "whole.h"

namespace ed {
namespace {

constexpr int64_t kFewRows = 8;

// sums [R, count] = the products of one block of inputs with whole tiles of outputs from `first` on.
template <int R, bool half>
void block_of_few(const Product& p, int64_t row, int64_t block, int64_t first, int64_t count,
                  int32_t* sums) {
  Blocks blocks(p);
  int64_t group = block / blocks.count, in_group = block % blocks.count * kWhole;
  int64_t all = blocks.all;
  int64_t bytes = least(kWhole, p.group - in_group) / blocks.halves;
  const int8_t* x = p.numbers + (row * all + block) * blocks.of_block;
  auto* w = static_cast<const uint8_t*>(p.w) +
            (group * p.group + in_group) / blocks.halves * p.outputs + first;
  for (int r = 0; r < R; ++r) {
    int32_t bias = half ? 0 : kBias * p.row_sums[(row + r) * all + block];
    for (int64_t c = 0; c < count; ++c) sums[r * count + c] = -bias;
  }
  auto some = [&](auto many, int64_t n) __attribute__((always_inline)) {
    constexpr int N = decltype(many)::value;  // fours of inputs at once
    const int64_t ahead = rows_ahead(4 * N, count) * p.outputs;
    int32_t numbers[2][R][N];                 // of x; of odd inputs, too, if a byte has two codes
    ED_UNROLL
    for (int r = 0; r < R; ++r)
      ED_UNROLL
      for (int j = 0; j < N; ++j) {
        const int8_t* from = x + r * all * blocks.of_block + 4 * (n + j);
        std::memcpy(&numbers[0][r][j], from, 4);
        if (half) std::memcpy(&numbers[1][r][j], from + blocks.of_part, 4);
      }
    for (int64_t c = 0; c < count; c += kTile) {
      alignas(64) uint8_t fours[N][4 * kTile];
      ED_UNROLL
      for (int j = 0; j < N; ++j) {
        const uint8_t* rows[4];
        for (int i = 0; i < 4; ++i) {
          rows[i] = w + (4 * (n + j) + i) * p.outputs + c;
          prefetch(rows[i] + ahead);
        }
        interleave(rows, fours[j]);
      }
      for (int64_t v = 0; v < kTile; v += kLanes) {
        int32_t* to = sums + c + v;
        Ints acc[R];
        ED_UNROLL
        for (int r = 0; r < R; ++r) acc[r] = load_ints(to + r * count);
        ED_UNROLL
        for (int j = 0; j < N; ++j) {
          Ints codes = load_ints(fours[j] + 4 * v);
          Ints odd = (codes >> 4) & 0x0f0f0f0f;
          if (half) codes &= 0x0f0f0f0f;
          if (!half && kBias) codes ^= static_cast<int32_t>(0x80808080u);
          ED_UNROLL
          for (int r = 0; r < R; ++r) {
            acc[r] = dot_of_bytes(acc[r], codes, numbers[0][r][j]);
            if (half) acc[r] = dot_of_bytes(acc[r], odd, numbers[1][r][j]);
          }
        }
        ED_UNROLL
        for (int r = 0; r < R; ++r) std::memcpy(to + r * count, &acc[r], sizeof acc[r]);
      }
    }
  };
  int64_t n = 0;
  for (; n + 4 <= bytes / 4; n += 4) some(Count<4>(), n);
  for (; n < bytes / 4; ++n) some(Count<1>(), n);
}

// Whether the rows are few enough, and blocks of inputs whole fours.
inline bool whole_of_few(const Product& p) {
  return p.rows <= kFewRows && p.group % (4 * Blocks(p).halves) == 0;
}

// Ask early for the numbers of a group, if there is such a group.
inline void fetch_ahead(const Product& p, const OfGroups& numbers, int64_t group, int64_t first,
                        int64_t count) {
  if (numbers.data == nullptr || group * p.group >= p.inputs) return;
  int64_t width = bytes_of(numbers.kind);
  auto* from = static_cast<const char*>(numbers.data) + (group * p.outputs + first) * width;
  for (int64_t i = 0; i < count * width; i += 64) prefetch(from + i);
}

// Whole tiles of outputs from `first` on.
void whole_in_runs(const Product& p, int64_t first, int64_t count) {
  Blocks blocks(p);
  int64_t groups = blocks.groups, all = blocks.all;
  Scratch sums(p.rows * count), scratch(p.rows * count);
  std::memset(sums.data, 0, p.rows * count * sizeof(float));
  auto* whole_sums = reinterpret_cast<int32_t*>(scratch.data);
  TileNumbers of_scale, of_zero;
  for (int64_t block = 0; block < all; ++block) {
    int64_t group = block / blocks.count;
    fetch_ahead(p, p.scale, group + 2, first, count);
    fetch_ahead(p, p.zero, group + 2, first, count);
    row_blocks<4>(p.rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      auto* to = whole_sums + row * count;
      if (blocks.halves == 2)
        block_of_few<R, true>(p, row, block, first, count, to);
      else
        block_of_few<R, false>(p, row, block, first, count, to);
    });
    for (int64_t c = 0; c < count; c += kTile) {
      const float* scale = of_scale.get(p, p.scale, group, first + c, kTile);
      const float* zero = of_zero.get(p, p.zero, group, first + c, kTile);
      for (int64_t row = 0; row < p.rows; ++row) {
        float of_row = p.row_scale[row * groups + group];
        float of_sum = p.row_sums[row * all + block];
        for (int64_t v = 0; v < kTile; v += kLanes) {
          int64_t at = row * count + c + v;
          add_scaled(load_ints(whole_sums + at), of_row, of_sum, scale + v, zero ? zero + v : zero,
                     sums.data + at);
        }
      }
    }
  }
  for (int64_t r = 0; r < p.rows; ++r) write(p, r, first, sums.data + r * count, count);
}

}  // namespace
}  // namespace ed
