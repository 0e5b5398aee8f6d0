// The product with a matrix that lies transposed, [outputs, inputs], for one level of instructions.
//
// An output is a product of two runs of memory. Some rows of x and of w are taken together, so that
// a number that was loaded is used several times. Lanes are sums of their own, added at the end.
#pragma once

#include "product.h"
#include "simd.h"

namespace ed {
namespace {

constexpr int kRowsOfX = 2;  // taken together
constexpr int kRowsOfW = kLanes == 16 ? 8 : 4;  // divides kTile

inline Vec load_numbers(const float* from) { return load(from); }
inline float number(float x) { return x; }
inline float number(uint16_t x) { return widen(x); }

inline Vec load_numbers(const uint16_t* from) {
#if defined(__AVX512F__)
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__AVX2__)
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
  Vec v;
  for (int l = 0; l < kLanes; ++l) v[l] = widen(from[l]);
  return v;
#endif
}

inline float total(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int l = 0; l < n; ++l) v[l] += v[l + n];
  return v[0];
#endif
}

// sums [R, kTile], of which Q columns = the products of R rows of x with Q rows of w.
template <int R, int Q, typename W>
void dots(const float* x, const W* w, int64_t inputs, float* sums) {
  Vec acc[R][Q] = {};
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
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
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int q = 0; q < Q; ++q) {
      float sum = total(acc[r][q]);
      for (int64_t j = i; j < inputs; ++j) sum += x[r * inputs + j] * number(w[q * inputs + j]);
      sums[r * kTile + q] = sum;
    }
}

#if defined(__AVX512BF16__)
// The same of bfloat16 numbers.
template <int R, int Q, typename W>
void dots(const uint16_t* x, const W* w, int64_t inputs, float* sums) {
  __m512 acc[R][Q] = {};
  auto add = [&](int64_t i, __mmask32 mask) __attribute__((always_inline)) {
    __m512i right[Q];
    ED_UNROLL
    for (int q = 0; q < Q; ++q) right[q] = _mm512_maskz_loadu_epi16(mask, w + q * inputs + i);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      __m512i left = _mm512_maskz_loadu_epi16(mask, x + r * inputs + i);
      ED_UNROLL
      for (int q = 0; q < Q; ++q)
        acc[r][q] = _mm512_dpbf16_ps(acc[r][q], (__m512bh)left, (__m512bh)right[q]);
    }
  };
  int64_t i = 0;
  for (; i + 32 <= inputs; i += 32) add(i, ~0u);
  if (i < inputs) add(i, (1u << (inputs - i)) - 1);
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int q = 0; q < Q; ++q) sums[r * kTile + q] = _mm512_reduce_add_ps(acc[r][q]);
}
#endif

// All rows of x with the rows [first, last) of w. Sums of a tile are kept together: rows of y may
// be so far apart that they fall on the same places of a cache.
template <typename X, typename W>
void with_rows(const Product& p, const X* x, const W* w, int64_t first, int64_t last) {
  Scratch tile(p.rows * kTile);
  for (; first < last; first += kTile) {
    int64_t count = least(kTile, last - first);
    for (int64_t at = 0; at < count;) {
      bool whole = count - at >= kRowsOfW;
      const W* rows_of_w = w + (first + at) * p.inputs;
      row_blocks<kRowsOfX>(p.rows, [&](auto r, int64_t row) {
        constexpr int R = decltype(r)::value;
        const X* rows_of_x = x + row * p.inputs;
        float* sums = tile.data + row * kTile + at;
        if (whole)
          dots<R, kRowsOfW, W>(rows_of_x, rows_of_w, p.inputs, sums);
        else
          dots<R, 1, W>(rows_of_x, rows_of_w, p.inputs, sums);
      });
      at += whole ? kRowsOfW : 1;
    }
    for (int64_t row = 0; row < p.rows; ++row)
      write(p, row, first, tile.data + row * kTile, count);
  }
}

void rows(const Product& p, int64_t first, int64_t last) {
#if defined(__AVX512BF16__)
  if (p.x_is_bfloat16 && p.format == Format::kBfloat16)
    return with_rows(p, static_cast<const uint16_t*>(p.x), static_cast<const uint16_t*>(p.w), first,
                     last);
#endif
  WideRows wide(p);
  if (p.format == Format::kBfloat16)
    with_rows(p, wide.x, static_cast<const uint16_t*>(p.w), first, last);
  else
    with_rows(p, wide.x, static_cast<const float*>(p.w), first, last);
}

}  // namespace
}  // namespace ed
