// The product in whole numbers with a matrix that lies transposed, [outputs, inputs], for one level
// of instructions: an output is a product of two runs of memory, and no codes have to change places.
#pragma once

#include "panels.h"
#include "whole_few.h"

namespace ed {
namespace {

constexpr int kOutputsAtOnce = 4;

// acc [R, q] += a vector of codes of output q times the numbers of R rows of x; those of odd inputs
// lie `to_odd` behind.
template <int R, int Q, bool half>
ED_INLINE void add_codes(Ints codes, int q, const int8_t* x, int64_t x_stride, int64_t to_odd,
                         Ints (*acc)[Q]) {
  Ints odd = (codes >> 4) & 0x0f0f0f0f;
  if (half) codes &= 0x0f0f0f0f;
  if (!half && kBias) codes ^= static_cast<int32_t>(0x80808080u);
  ED_UNROLL
  for (int r = 0; r < R; ++r) {
    const int8_t* numbers = x + r * x_stride;
    acc[r][q] = dot_of_bytes(acc[r][q], codes, load_ints(numbers));
    if (half) acc[r][q] = dot_of_bytes(acc[r][q], odd, load_ints(numbers + to_odd));
  }
}

// acc [R, Q] += the products of R rows of x with Q rows of codes, over one block of inputs.
template <int R, int Q, bool half>
ED_INLINE void dots_of_bytes(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t w_stride,
                             int64_t bytes, int64_t to_odd, Ints (*acc)[Q]) {
  constexpr int64_t kBytes = kLanes * 4;
  auto add = [&](int64_t i, const uint8_t* from, int64_t stride) __attribute__((always_inline)) {
    ED_UNROLL
    for (int q = 0; q < Q; ++q)
      add_codes<R, Q, half>(load_ints(from + q * stride), q, x + i, x_stride, to_odd, acc);
  };
  int64_t i = 0;
  for (; i + kBytes <= bytes; i += kBytes) add(i, w + i, w_stride);
  if (i == bytes) return;
  alignas(64) uint8_t rest[Q][kBytes] = {};  // x is zero there
  for (int q = 0; q < Q; ++q) std::memcpy(rest[q], w + q * w_stride + i, bytes - i);
  add(i, rest[0], kBytes);
}

#if defined(__AVX512F__)
// The sums of each quarter of the lanes of four vectors: four of each.
ED_INLINE __m512i totals_of_quarters(const Ints* v) {
  auto a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
  __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

ED_INLINE void store_four(int32_t* to, __m128i numbers) { std::memcpy(to, &numbers, 16); }
#endif

// The sums of each of P equal parts of the lanes of Q vectors: of part j at to + j * stride.
template <int Q, int P>
ED_INLINE void whole_totals(const Ints* v, int32_t* to, int64_t stride) {
#if defined(__AVX512F__)
  if constexpr (Q == 4) {
    __m512i sums = totals_of_quarters(v);
    if (P < 4) sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0xb1));
    if (P < 2) sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0x4e));
    store_four(to, _mm512_castsi512_si128(sums));
    if (P > 1) store_four(to + stride, _mm512_extracti32x4_epi32(sums, P == 2 ? 2 : 1));
    if (P > 2) store_four(to + 2 * stride, _mm512_extracti32x4_epi32(sums, 2));
    if (P > 2) store_four(to + 3 * stride, _mm512_extracti32x4_epi32(sums, 3));
    return;
  }
#endif
  for (int j = 0; j < P; ++j)
    for (int q = 0; q < Q; ++q) {
      int32_t sum = 0;
      for (int l = 0; l < kLanes / P; ++l) sum += v[q][kLanes / P * j + l];
      to[j * stride + q] = sum;
    }
}

// A block of inputs by Q outputs, for R rows.
template <int R, int Q, bool half>
void sums_of_block(const Product& p, int64_t row, int64_t block, int64_t output, int32_t* to) {
  Blocks blocks(p);
  int64_t all = blocks.all, stride = p.inputs / blocks.halves;
  int64_t in_group = block % blocks.count * kWhole;
  int64_t first = block / blocks.count * p.group + in_group;
  int64_t bytes = (least(kWhole, p.group - in_group) + blocks.halves - 1) / blocks.halves;
  auto* w = static_cast<const uint8_t*>(p.w) + output * stride + first / blocks.halves;
  Ints acc[R][Q] = {};
  dots_of_bytes<R, Q, half>(p.numbers + (row * all + block) * blocks.of_block,
                            all * blocks.of_block, w, stride, bytes, blocks.of_part, acc);
  ED_UNROLL
  for (int r = 0; r < R; ++r) whole_totals<Q, 1>(acc[r], to + r * kTile, 0);
}

// Of groups of few codes, P lie in a vector: their sums [P, kFewRows, kTile], from `group` on.
template <int R, int P, bool half>
void sums_of_groups(const Product& p, int64_t row, int64_t group, int64_t column, int64_t count,
                    int32_t* to) {
  constexpr int64_t kBytes = kLanes * 4, kPart = kBytes / P;
  const Blocks blocks(p);
  int64_t groups = blocks.groups, there = least(P, groups - group);
  int64_t stride = groups * kPart;
  alignas(64) int8_t x[2][R][kBytes] = {};  // zero for groups that are not there
  for (int r = 0; r < R; ++r)
    for (int64_t j = 0; j < there; ++j) {
      const int8_t* from = p.numbers + ((row + r) * groups + group + j) * blocks.of_block;
      std::memcpy(x[0][r] + j * kPart, from, kPart);
      if (half) std::memcpy(x[1][r] + j * kPart, from + blocks.of_part, kPart);
    }
  auto* w = static_cast<const uint8_t*>(p.w) + column * stride + group * kPart;
  auto all = [&](auto codes_at) __attribute__((always_inline)) {
    for (int64_t c = 0; c < count; c += 4) {
      Ints acc[R][4] = {};
      ED_UNROLL
      for (int q = 0; q < 4; ++q) {
        const uint8_t* from = w + least(c + q, count - 1) * stride;
        prefetch(from + kTile * stride);
        add_codes<R, 4, half>(codes_at(from), q, x[0][0], kBytes, R * kBytes, acc);
      }
      ED_UNROLL
      for (int r = 0; r < R; ++r)
        whole_totals<4, P>(acc[r], to + r * kTile + c, kFewRows * kTile);
    }
  };
  if (there == P) return all([](const uint8_t* from) { return load_ints(from); });
  all([&](const uint8_t* from) {
    alignas(64) uint8_t rest[kBytes] = {};
    std::memcpy(rest, from, there * kPart);
    return load_ints(rest);
  });
}

// Few rows of x. P groups of codes fill a vector; 1: a block of inputs fills one or more.
template <int P, bool half>
void whole_rows(const Product& p, int64_t first, int64_t last) {
  Blocks blocks(p);
  int64_t groups = blocks.groups, all = blocks.all;
  TileNumbers of_scale, of_zero;
  alignas(64) int32_t whole_sums[P * kFewRows * kTile] = {};
  alignas(64) float sums[kFewRows * kTile];
  for (int64_t column = first; column < last; column += kTile) {
    int64_t count = least(kTile, last - column);
    std::memset(sums, 0, sizeof sums);
    for (int64_t block = 0; block < all; ++block) {
      if (block % P == 0)
        row_blocks<4>(p.rows, [&](auto r, int64_t row) {
          constexpr int R = decltype(r)::value;
          int32_t* to = whole_sums + row * kTile;
          if constexpr (P > 1) return sums_of_groups<R, P, half>(p, row, block, column, count, to);
          auto by = [&](auto q, int64_t c) {
            constexpr int Q = decltype(q)::value;
            sums_of_block<R, Q, half>(p, row, block, column + c, to + c);
          };
          int64_t c = 0;
          for (; c + kOutputsAtOnce <= count; c += kOutputsAtOnce) by(Count<kOutputsAtOnce>(), c);
          for (; c < count; ++c) by(Count<1>(), c);
        });
      int64_t group = block / blocks.count;
      const float* scale = of_scale.get(p, p.scale, group, column, count);
      const float* zero = of_zero.get(p, p.zero, group, column, count);
      for (int64_t row = 0; row < p.rows; ++row) {
        float of_row = p.row_scale[row * groups + group];
        int32_t of_sum = p.row_sums[row * all + block];
        Ints bias = Ints{} + (half ? 0 : kBias) * of_sum;
        const int32_t* from = whole_sums + (block % P * kFewRows + row) * kTile;
        for (int64_t v = 0; v < kTile; v += kLanes)
          add_scaled(load_ints(from + v) - bias, of_row, of_sum, scale + v,
                     zero ? zero + v : zero, sums + row * kTile + v);
      }
    }
    for (int64_t row = 0; row < p.rows; ++row) write(p, row, column, sums + row * kTile, count);
  }
}

// The form of few rows that fits the groups; null = none.
template <bool half>
ProductOfOutputs form_of_rows(const Product& p) {
  int64_t bytes = p.group / (half ? 2 : 1);
  if (bytes >= kLanes * 4) return whole_rows<1, half>;
  if (bytes == kLanes * 2) return whole_rows<2, half>;
  if (bytes == kLanes) return whole_rows<4, half>;
  return nullptr;
}

// The product in whole numbers, whose sums are exact within a block of inputs: so the forms, which
// scale each block in the same order, give the same numbers.
void whole(const Product& p, int64_t first, int64_t last) {
  if (p.in_panels) return whole_panels(p, first, last);
  if (p.transposed && p.rows <= kFewRows) {
    bool half = p.format == Format::kFourBits;
    if (auto form = half ? form_of_rows<true>(p) : form_of_rows<false>(p))
      return form(p, first, last);
  }
  int64_t count = !p.transposed && whole_of_few(p) ? (last - first) / kTile * kTile : 0;
  if (count > 0) whole_in_runs(p, first, count);
  if (first + count < last) whole_in_tiles(p, first + count, last);
}

}  // namespace
}  // namespace ed
