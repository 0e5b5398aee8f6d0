// The product of few rows with numbers [inputs, outputs], for one level of instructions.
//
// Memory is the limit here, and it is read fastest in long runs: so many inputs are taken at once,
// each a run of its own, and sums go to the first level cache in between. Every sum is taken in the
// order that `in_blocks` of columns.h has.
#pragma once

#include "number_panels.h"

namespace ed {
namespace {

// sums [R, width] += x [R, inputs] * w, `count` columns from `first` on, which are whole vectors.
template <int R, typename T>
void stream(const Product& p, const float* x, int64_t first, int64_t count, float* sums,
            int64_t width) {
  auto some = [&](auto inputs, int64_t i) __attribute__((always_inline)) {
    constexpr int kInputs = decltype(inputs)::value;
    const T* w = static_cast<const T*>(p.w) + i * p.outputs + first;
    const int64_t ahead = rows_ahead(kInputs, sizeof(T) * count) * p.outputs;
    for (int64_t c = 0; c < count; c += kLanes) {
      Vec acc[R];
      ED_UNROLL
      for (int r = 0; r < R; ++r) acc[r] = load(sums + r * width + c);
      ED_UNROLL
      for (int j = 0; j < kInputs; ++j) {
        const T* from = w + j * p.outputs + c;
        Vec row = load_numbers(from);
        prefetch(from + ahead);
        ED_UNROLL
        for (int r = 0; r < R; ++r) acc[r] += broadcast(x[r * p.inputs + i + j]) * row;
      }
      ED_UNROLL
      for (int r = 0; r < R; ++r) store(sums + r * width + c, acc[r]);
    }
  };
  int64_t i = 0;
  for (; i + 16 <= p.inputs; i += 16) some(Count<16>(), i);
  for (; i < p.inputs; ++i) some(Count<1>(), i);
}

#if defined(__AVX512BF16__)
// The same of bfloat16 numbers, any count: pairs of inputs are brought side by side.
template <int R>
void stream_pairs(const Product& p, int64_t row, int64_t first, int64_t count, float* sums,
                  int64_t width) {
  const __m512i low = pair_order();
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  auto* x = static_cast<const uint16_t*>(p.x) + row * p.inputs;
  auto some = [&](auto pairs, int64_t i, bool odd) __attribute__((always_inline)) {
    auto* w = static_cast<const uint16_t*>(p.w) + i * p.outputs + first;
    const int64_t ahead = rows_ahead(2 * decltype(pairs)::value, 2 * count) * p.outputs;
    for (int64_t c = 0; c < count; c += 32) {
      __mmask32 mask = count - c >= 32 ? ~0u : (1u << (count - c)) - 1;
      __m512 acc[R][2];
      ED_UNROLL
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half)
          acc[r][half] = _mm512_loadu_ps(sums + r * width + c + half * kLanes);
      ED_UNROLL
      for (int j = 0; j < decltype(pairs)::value; ++j) {
        const uint16_t* from = w + 2 * j * p.outputs + c;
        __m512i even = _mm512_maskz_loadu_epi16(mask, from);
        __m512i next = _mm512_maskz_loadu_epi16(odd ? 0 : mask, from + (odd ? 0 : p.outputs));
        prefetch(from + ahead), prefetch(from + ahead + p.outputs);
        __m512bh left = (__m512bh)_mm512_permutex2var_epi16(even, low, next);
        __m512bh right = (__m512bh)_mm512_permutex2var_epi16(even, high, next);
        ED_UNROLL
        for (int r = 0; r < R; ++r) {
          int32_t pair = 0;
          std::memcpy(&pair, x + r * p.inputs + i + 2 * j, odd ? 2 : 4);
          __m512bh numbers = (__m512bh)_mm512_set1_epi32(pair);
          acc[r][0] = _mm512_dpbf16_ps(acc[r][0], numbers, left);
          acc[r][1] = _mm512_dpbf16_ps(acc[r][1], numbers, right);
        }
      }
      ED_UNROLL
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half)
          _mm512_storeu_ps(sums + r * width + c + half * kLanes, acc[r][half]);
    }
  };
  int64_t i = 0;
  constexpr int kPairs = R == 1 ? 4 : 8;
  for (; i + 2 * kPairs <= p.inputs; i += 2 * kPairs) some(Count<kPairs>(), i, false);
  for (; i + 2 <= p.inputs; i += 2) some(Count<1>(), i, false);
  if (i < p.inputs) some(Count<1>(), i, true);
}
#endif

// Compute outputs from `first` on as far as they can be streamed, and return the next one.
int64_t streamed(const Product& p, int64_t first, int64_t last) {
  bool wide = p.format == Format::kFloat32;
#if defined(__AVX512BF16__)
  bool pairs = !wide && p.x_is_bfloat16;
#else
  bool pairs = false;
#endif
  if (p.rows > kStreamedRows || !(wide || p.format == Format::kBfloat16)) return first;
  int64_t width = (last - first + kTile - 1) / kTile * kTile;
  int64_t count = pairs ? last - first : (last - first) / kLanes * kLanes;
  if (count == 0) return first;
  Scratch sums(p.rows * width);
  std::memset(sums.data, 0, p.rows * width * sizeof(float));
#if defined(__AVX512BF16__)
  if (pairs)
    row_blocks<kStreamedRows>(p.rows, [&](auto r, int64_t row) {
      stream_pairs<decltype(r)::value>(p, row, first, count, sums.data + row * width, width);
    });
#endif
  if (!pairs) row_blocks<kStreamedRows>(p.rows, [&](auto r, int64_t) {
    constexpr int R = decltype(r)::value;
    WideRows rows(p);
    if (wide)
      stream<R, float>(p, rows.x, first, count, sums.data, width);
    else
      stream<R, uint16_t>(p, rows.x, first, count, sums.data, width);
  });
  for (int64_t r = 0; r < p.rows; ++r) write(p, r, first, sums.data + r * width, count);
  return first + count;
}

void columns(const Product& p, int64_t first, int64_t last) {
  if (p.in_panels) return number_panels(p, first, last);
  if (by_panels(p, first, last)) return;
  first = streamed(p, first, last);
  if (first < last) in_blocks(p, first, last);
}

}  // namespace
}  // namespace ed
