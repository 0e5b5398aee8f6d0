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
constexpr int kRowsOfW = 4;  // divides kTile

inline float number(float x) { return x; }
inline float number(uint16_t x) { return widen(x); }

// Fetches what follows in the matrix, some lines at each call.
struct Following {
  ED_INLINE void operator()() {
    for (int64_t line = 0; line < lines; ++line) prefetch(at + line * 64);
    at += lines * 64;
  }
  const char* at;
  const int64_t lines;
};

// sums [R, kTile], of which Q columns = the products of R rows of x with Q rows of w.
template <int R, int Q, typename W>
void dots(const float* x, const W* w, int64_t inputs, float* sums, Following following) {
  Vec acc[R][Q] = {};
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    following();
    Vec right[Q];
    ED_UNROLL
    for (int q = 0; q < Q; ++q) right[q] = load_numbers(w + q * inputs + i);
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
    totals<Q>(acc[r], to);
    for (int64_t j = i; j < inputs; ++j)
      for (int q = 0; q < Q; ++q) to[q] += x[r * inputs + j] * number(w[q * inputs + j]);
  }
}

#if defined(__AVX512BF16__)
// The same of bfloat16 numbers.
template <int R, int Q, typename W>
void dots(const uint16_t* x, const W* w, int64_t inputs, float* sums, Following following) {
  Vec acc[R][Q] = {};
  auto add = [&](int64_t i, __mmask32 mask) __attribute__((always_inline)) {
    following();
    __m512i right[Q];
    ED_UNROLL
    for (int q = 0; q < Q; ++q) right[q] = _mm512_maskz_loadu_epi16(mask, w + q * inputs + i);
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
  for (int r = 0; r < R; ++r) totals<Q>(acc[r], sums + r * kTile);
}
#endif

// All rows of x with the rows [first, last) of the matrix, which begin at w. Sums of a tile are kept
// together: rows of y may be so far apart that they fall on the same places of a cache.
template <typename X, typename W>
void with_rows(const Product& p, const X* x, const W* w, int64_t first, int64_t last) {
  Scratch tile(p.rows * kTile);
  // While all rows of x are multiplied by some rows of w, as many rows of w are fetched.
  constexpr int64_t kStep = sizeof(*x) == 2 ? 2 * kLanes : kLanes;
  const int64_t blocks = (p.rows + kRowsOfX - 1) / kRowsOfX;
  const int64_t lines = most(1, kRowsOfW * kStep * sizeof(W) / 64 / blocks);
  const int64_t steps = (p.inputs + kStep - 1) / kStep;
  for (; first < last; first += kTile, w += kTile * p.inputs) {
    int64_t count = least(kTile, last - first);
    for (int64_t at = 0; at < count;) {
      bool whole = count - at >= kRowsOfW;
      const W* rows_of_w = w + at * p.inputs;
      Following following{reinterpret_cast<const char*>(rows_of_w + kRowsOfW * p.inputs), lines};
      row_blocks<kRowsOfX>(p.rows, [&](auto r, int64_t row) {
        constexpr int R = decltype(r)::value;
        const X* rows_of_x = x + row * p.inputs;
        float* sums = tile.data + row * kTile + at;
        if (whole)
          dots<R, kRowsOfW, W>(rows_of_x, rows_of_w, p.inputs, sums, following);
        else
          dots<R, 1, W>(rows_of_x, rows_of_w, p.inputs, sums, following);
        following.at += steps * lines * 64;
      });
      at += whole ? kRowsOfW : 1;
    }
    for (int64_t row = 0; row < p.rows; ++row)
      write(p, row, first, tile.data + row * kTile, count);
  }
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
