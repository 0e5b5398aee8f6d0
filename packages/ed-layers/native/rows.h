// The product with a matrix that lies transposed, [outputs, inputs], for one level of instructions.
//
// An output is a product of two runs of memory. Some rows of x and of w are taken together, so that
// a number that was loaded is used several times. Lanes are sums of their own, added at the end. Rows
// of codes are made plain numbers first, a few at a time.
#pragma once

#include "many.h"

namespace ed {
namespace {

constexpr int kRowsOfX = kLanes == 16 ? 4 : 2;  // taken together
constexpr int kRowsOfW = 4;  // taken together, divides kTile
constexpr int64_t kBlocksOfRuns = 3;  // of rows of x: with more of them, memory is not the limit

inline float number(float x) { return x; }
inline float number(uint16_t x) { return widen(x); }

// Fetches the next rows of some runs of the matrix.
struct NextRows {
  ED_INLINE void operator()(int64_t byte) const {
    for (int64_t run = 0; run < runs; ++run) prefetch(from + run * stride + byte);
  }
  const char* from;
  int64_t stride, runs;
};

// Write the totals of Q sums, `apart` outputs apart.
template <int Q, int apart>
ED_INLINE void put_totals(const Vec* sums, float* to) {
  float all[Q];
  totals<Q>(sums, all);
  ED_UNROLL
  for (int q = 0; q < Q; ++q) to[q * apart] = all[q];
}

// sums [R, kTile], of which Q columns = the products of R rows of x with Q rows of w, which lie
// `apart` rows apart.
template <int R, int Q, int apart, typename W>
void dots(const float* x, const W* w, int64_t inputs, float* sums, NextRows fetch) {
  Vec acc[R][Q] = {};
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    fetch(i * sizeof(W));
    Vec right[Q];
    ED_UNROLL
    for (int q = 0; q < Q; ++q) right[q] = load_numbers(w + q * apart * inputs + i);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec left = load(x + r * inputs + i);
      ED_UNROLL
      for (int q = 0; q < Q; ++q) acc[r][q] += left * right[q];
    }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r) {
    float* to = sums + r * kTile;
    put_totals<Q, apart>(acc[r], to);
    for (int64_t j = i; j < inputs; ++j)
      for (int q = 0; q < Q; ++q)
        to[q * apart] += x[r * inputs + j] * number(w[q * apart * inputs + j]);
  }
}

#if defined(__AVX512BF16__)
// The same of bfloat16 numbers.
template <int R, int Q, int apart, typename W>
void dots(const uint16_t* x, const W* w, int64_t inputs, float* sums, NextRows fetch) {
  Vec acc[R][Q] = {};
  auto add = [&](int64_t i, __mmask32 mask) __attribute__((always_inline)) {
    fetch(i * sizeof(W));
    __m512i right[Q];
    ED_UNROLL
    for (int q = 0; q < Q; ++q)
      right[q] = _mm512_maskz_loadu_epi16(mask, w + q * apart * inputs + i);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      __m512i left = _mm512_maskz_loadu_epi16(mask, x + r * inputs + i);
      ED_UNROLL
      for (int q = 0; q < Q; ++q)
        acc[r][q] =
            (Vec)_mm512_dpbf16_ps((__m512)acc[r][q], (__m512bh)left, (__m512bh)right[q]);
    }
  };
  int64_t i = 0;
  for (; i + 32 <= inputs; i += 32) add(i, ~0u);
  if (i < inputs) add(i, (1u << (inputs - i)) - 1);
  ED_UNROLL
  for (int r = 0; r < R; ++r) put_totals<Q, apart>(acc[r], sums + r * kTile);
}
#endif

// All rows of x with the rows [first, last) of the matrix, which begin at w. Sums of a tile are kept
// together: rows of y may be so far apart that they fall on the same places of a cache.
template <int apart, typename X, typename W>
void by_runs(const Product& p, const X* x, const W* w, int64_t first, int64_t last) {
  Scratch tile(p.rows * kTile);
  const int64_t blocks = (p.rows + kRowsOfX - 1) / kRowsOfX;
  const int64_t runs = (kRowsOfW + blocks - 1) / blocks, ahead = apart > 1 ? 1 : 2;
  for (; first < last; first += kTile, w += kTile * p.inputs) {
    const int64_t count = least(kTile, last - first);
    const bool whole = count == kTile;
    const int64_t step = whole && apart == 1 ? kRowsOfW : 1;
    for (int64_t at = 0; at < (whole && apart > 1 ? apart : count); at += step) {
      const W* rows_of_w = w + at * p.inputs;
      // While all rows of x are multiplied by some rows of w, as many rows of w are fetched.
      const int64_t stride = apart * p.inputs;
      int64_t run = 0;
      row_blocks<kRowsOfX>(p.rows, [&](auto r, int64_t row) {
        constexpr int R = decltype(r)::value;
        const W* next = rows_of_w + ahead * step * p.inputs + run % kRowsOfW * stride;
        const NextRows fetch{reinterpret_cast<const char*>(next),
                             stride * static_cast<int64_t>(sizeof(W)), runs};
        run += runs;
        const X* rows_of_x = x + row * p.inputs;
        float* sums = tile.data + row * kTile + at;
        if (whole)
          dots<R, kRowsOfW, apart>(rows_of_x, rows_of_w, p.inputs, sums, fetch);
        else
          dots<R, 1, apart>(rows_of_x, rows_of_w, p.inputs, sums, fetch);
      });
    }
    for (int64_t row = 0; row < p.rows; ++row)
      write(p, row, first, tile.data + row * kTile, count);
  }
}

// Memory is read faster in several runs. Where x has many rows, memory is not the limit, and rows of w
// that are far apart would displace each other in the first cache.
template <typename X, typename W>
void with_rows(const Product& p, const X* x, const W* w, int64_t first, int64_t last) {
  (p.rows <= kRowsOfX * kBlocksOfRuns ? by_runs<kTile / kRowsOfW, X, W>
                                      : by_runs<1, X, W>)(p, x, w, first, last);
}

// One row of codes as numbers.
void decode_row(const Product& p, int64_t output, float* to) {
  bool half = p.format == Format::kFourBits;
  auto* codes = static_cast<const uint8_t*>(p.w) + output * (half ? p.inputs / 2 : p.inputs);
  for (int64_t i = 0; i < p.inputs; i += p.group) {
    float scale = of_group(p, p.scale, i / p.group, output);
    float zero = p.zero.data ? of_group(p, p.zero, i / p.group, output) : 0;
    int64_t j = i, end = i + p.group;
    if (half) {
      // Of each byte the even input, then the odd one.
      for (; j + 2 * kLanes <= end; j += 2 * kLanes) {
        Ints both = load_bytes(codes + j / 2);
        Vec even = (look_up(p.table, both) - zero) * scale;
        Vec odd = (look_up(p.table, both >> 4) - zero) * scale;
        store(to + j, in_turns(even, odd, Count<0>()));
        store(to + j + kLanes, in_turns(even, odd, Count<1>()));
      }
      for (; j < end; ++j)
        to[j] = (p.table[(codes[j / 2] >> (j % 2 * 4)) & 15] - zero) * scale;
    } else {
      bool fp8 = p.format == Format::kFp8;
      auto* whole = reinterpret_cast<const int8_t*>(codes);
      for (; j + kLanes <= end; j += kLanes) {
        Vec level = fp8 ? load_fp8(codes + j) : load_numbers(whole + j);
        store(to + j, (level - zero) * scale);
      }
      for (; j < end; ++j) to[j] = ((fp8 ? from_fp8(codes[j]) : whole[j]) - zero) * scale;
    }
  }
}

void rows(const Product& p, int64_t first, int64_t last) {
  if (!p.fixed && by_panels(p, first, last)) return;
  int64_t at = first * p.inputs;
#if defined(__AVX512BF16__)
  if (p.x_is_bfloat16 && p.format == Format::kBfloat16)
    return with_rows(p, static_cast<const uint16_t*>(p.x), static_cast<const uint16_t*>(p.w) + at,
                     first, last);
#endif
  WideRows wide(p);
  if (p.format == Format::kFloat32) {
    with_rows(p, wide.x, static_cast<const float*>(p.w) + at, first, last);
  } else if (p.format == Format::kBfloat16) {
    with_rows(p, wide.x, static_cast<const uint16_t*>(p.w) + at, first, last);
  } else {
    Scratch numbers(kTile * p.inputs);
    for (int64_t tile = first; tile < last; tile += kTile) {
      int64_t count = least(kTile, last - tile);
      for (int64_t c = 0; c < count; ++c) decode_row(p, tile + c, numbers.data + c * p.inputs);
      with_rows(p, wide.x, numbers.data, tile, tile + count);
    }
  }
}

}  // namespace
}  // namespace ed
