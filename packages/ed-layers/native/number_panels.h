// Products with numbers in panels, for one level of instructions: the matrix lies in the order in
// which it is multiplied, so memory is read in long runs, and nothing is brought into another order.
//
// A panel has kTile outputs of all inputs, input after input, in words of four bytes: a float32, or a
// pair of bfloat16 inputs. Every sum has the order of `in_blocks` of columns.h.
#pragma once

#include "many.h"

namespace ed {
namespace {

// sums [R, P, kTile] = R rows of x times P panels, V vectors of each: memory is read faster in
// several runs than in one. `halves`: x has single inputs, and words have pairs of them.
template <typename Words, int R, int P, int V, bool halves>
void multiply_runs(const Product& p, const typename Words::Number* x, int64_t column, float* sums) {
  constexpr int64_t in_word = (halves ? 8 : 4) / sizeof(*x);
  constexpr int64_t kFetched = 2048 / sizeof(float);  // words that a run is fetched ahead
  const int64_t panel = p.inputs / in_word * kTile;
  const float* w = stored_words(p, 0, column);
  Vec acc[R][P][V] = {};
  for (int64_t i = 0; i < p.inputs; i += in_word, w += kTile) {
    Vec even[R], odd[R];
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      float numbers[2];
      std::memcpy(numbers, x + r * p.inputs + i, halves ? 8 : 4);
      even[r] = broadcast_bits(numbers[0]), odd[r] = broadcast_bits(numbers[halves]);
    }
    ED_UNROLL
    for (int q = 0; q < P; ++q)
      ED_UNROLL
      for (int c = 0; c < V; ++c) {
        const float* from = w + q * panel + c * kLanes;
        if (c * kLanes % 16 == 0) prefetch(from + kFetched);
        const Vec words = load(from);
        ED_UNROLL
        for (int r = 0; r < R; ++r) {
          acc[r][q][c] = Words::add(acc[r][q][c], even[r], halves ? even_half(words) : words);
          if (halves) acc[r][q][c] = Words::add(acc[r][q][c], odd[r], odd_half(words));
        }
      }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int q = 0; q < P; ++q)
      ED_UNROLL
      for (int c = 0; c < V; ++c) store(sums + (r * P + q) * kTile + c * kLanes, acc[r][q][c]);
}

// Rows of x for which runs are read: their sums fill the registers.
constexpr int kRunRows = kLanes == 16 ? 4 : 1;

// R rows of x with the outputs [first, last), which are whole halves of panels.
template <int R, typename Words, bool halves>
void in_runs(const Product& p, const typename Words::Number* x, int64_t first, int64_t last) {
  constexpr int kAll = kTile / kLanes, kPanels = kLanes == 16 ? 4 / R : 1;
  alignas(64) float sums[R * kPanels * kTile];
  auto some = [&](auto panels, auto vectors) {
    constexpr int P = decltype(panels)::value, V = decltype(vectors)::value;
    constexpr int64_t count = (P - 1) * kTile + V * kLanes;
    multiply_runs<Words, R, P, V, halves>(p, x, first, sums);
    for (int r = 0; r < R; ++r) write(p, r, first, sums + r * P * kTile, count);
    first += count;
  };
  while (first < last) {
    const int64_t panels = first % kTile ? 0 : (last - first) / kTile;
    if (panels >= kPanels)
      some(Count<kPanels>(), Count<kAll>());
    else if (panels > 0)
      some(Count<1>(), Count<kAll>());
    else
      some(Count<1>(), Count<kAll / 2>());
  }
}

// All rows of x with the outputs [first, last), by parts of panels that stay in the first cache.
// While all rows are multiplied by one part, the next one is fetched.
template <typename Words>
void in_parts(const Product& p, const typename Words::Number* x, int64_t first, int64_t last) {
  constexpr int64_t in_word = 4 / sizeof(*x), most_inputs = kSmallPanelWords * in_word;
  const int64_t row_parts = (p.rows + kRows - 1) / kRows;
  Scratch sums(p.rows * kTile), panel(kSmallPanelWords * kTile);
  for (int64_t end; first < last; first = end) {
    end = least(last, (first / kTile + 1) * kTile);
    const int64_t count = end - first;
    for (int64_t i = 0, k; i < p.inputs; i += k) {
      k = least(most_inputs, p.inputs - i);
      const float* w = panel_of<Words>(p, i, k, first, count, panel.data);
      const int64_t next_words = k / inputs_of_word(p);
      int64_t part = 0, fetched = 0;
      row_blocks<kRows>(p.rows, [&](auto r, int64_t row) {
        const int64_t to = next_words * ++part / row_parts;
        const auto* next = reinterpret_cast<const char*>(stored_words(p, i + k, first) + fetched * kTile);
        const FetchedTile<kTile * sizeof(float) / 64> fetch{next, kTile * sizeof(float), to - fetched};
        over_blocks(count, [&](auto v, int64_t c) {
          multiply_panel<Words, decltype(r)::value, decltype(v)::value>(
              x + row * p.inputs + i, p.inputs, w + c, kTile, k, sums.data + row * kTile + c, kTile,
              i == 0, fetch);
        });
        fetched = to;
      });
    }
    for (int64_t row = 0; row < p.rows; ++row) write(p, row, first, sums.data + row * kTile, count);
  }
}

template <typename Words>
void by_number_panels(const Product& p, const typename Words::Number* x, int64_t first, int64_t last) {
  if (p.rows >= many_rows(p)) return with_panels<Words, false>(p, x, first, last);
  if (p.rows > kRunRows) return in_parts<Words>(p, x, first, last);
  row_blocks<kRunRows>(p.rows, [&](auto r, int64_t) {
    constexpr int R = decltype(r)::value;
    if (sizeof(*x) == 4 && p.format == Format::kBfloat16)
      in_runs<R, Words, sizeof(*x) == 4>(p, x, first, last);
    else
      in_runs<R, Words, false>(p, x, first, last);
  });
}

// The outputs [first, last) of numbers in panels.
void number_panels(const Product& p, int64_t first, int64_t last) {
#if defined(__AVX512BF16__)
  if (p.x_is_bfloat16 && p.format == Format::kBfloat16) {
    auto* x = static_cast<const uint16_t*>(p.x);
#if defined(__AMX_BF16__)
    if (p.rows >= kTileRows && !p.fixed) return with_panels<TileWords>(p, x, first, last);
#endif
    return by_number_panels<PairWords>(p, x, first, last);
  }
#endif
  WideRows wide(p);
  by_number_panels<FloatWords>(p, wide.x, first, last);
}

}  // namespace
}  // namespace ed
