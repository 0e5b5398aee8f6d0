// Panels of a matrix of numbers, and rows times a panel, for one level of instructions.
//
// A panel has the numbers of kTile outputs, input after input, in the order in which they are
// multiplied: words of four bytes. A matrix that lies transposed is turned. A matrix may lie in panels
// already.
#pragma once

#include "columns.h"
#include "turn.h"

namespace ed {
namespace {

// Rows in blocks of kRows, with the sums in vectors.
struct InVectors {
  static constexpr int64_t kBlockRows = kRows;
  template <typename F>
  void blocks(int64_t rows, const F& f) {
    row_blocks<kRows>(rows, f);
  }
};

// A panel of `count` rows of words, which `get(row, word)` returns, turned.
template <typename Get>
ED_INLINE void turn_panel(int64_t count, int64_t words, float* panel, const Get& get) {
  auto put = [&](int64_t word, int64_t row, Vec numbers) { store(panel + word * kTile + row, numbers); };
  for (int64_t word = 0; word < words; word += kLanes)
    for (int64_t row = 0; row < count; row += kLanes) turn_block(row, count, word, words, get, put);
}

// Of a matrix in panels: the inputs of a word, and its words from input `i` and an output on.
inline int64_t inputs_of_word(const Product& p) { return p.format == Format::kBfloat16 ? 2 : 1; }

inline const float* stored_words(const Product& p, int64_t i, int64_t column) {
  const int64_t in_word = inputs_of_word(p), in_panel = column % kTile;
  return static_cast<const float*>(p.w) + (column - in_panel) * (p.inputs / in_word) +
         i / in_word * kTile + in_panel;
}

// The even or the odd ones of pairs of bfloat16 numbers.
inline Vec even_half(Vec pairs) { return (Vec)((Ints)pairs << 16); }
inline Vec odd_half(Vec pairs) { return (Vec)((Ints)pairs & ~0xffff); }

// Numbers of x and of a panel, in words of four bytes: an input as float32.
struct FloatWords : InVectors {
  using Number = float;
  static ED_INLINE Vec add(Vec sum, Vec x, Vec w) { return sum + x * w; }

  // Write `k` inputs from `i` on, and `count` outputs from `column` on.
  static void fill(const Product& p, int64_t i, int64_t k, int64_t column, int64_t count,
                   float* panel) {
    if (p.transposed)
      return p.format == Format::kFloat32 ? turned<float>(p, i, k, column, count, panel)
                                          : turned<uint16_t>(p, i, k, column, count, panel);
    if (count % kLanes != 0) return unpack_tail(p, i, k, column, count, panel);
    if (p.format == Format::kFloat32)
      copy(static_cast<const float*>(p.w) + i * p.outputs + column, p.outputs, k, count, panel);
    else
      copy(static_cast<const uint16_t*>(p.w) + i * p.outputs + column, p.outputs, k, count, panel);
  }

  // Return `k` inputs and `count` outputs of a matrix in panels, which begin at `words`: where they
  // lie, or widened.
  static const float* stored(const Product& p, const float* words, int64_t k, int64_t count,
                             float* panel) {
    if (p.format == Format::kFloat32) return words;
    for (int64_t j = 0; j < k; j += 2, words += kTile)
      for (int64_t c = 0; c < count; c += kLanes) {
        const Vec pairs = load(words + c);
        store(panel + j * kTile + c, even_half(pairs));
        store(panel + (j + 1) * kTile + c, odd_half(pairs));
      }
    return panel;
  }

 private:
  template <typename W>
  static void turned(const Product& p, int64_t i, int64_t k, int64_t column, int64_t count,
                     float* panel) {
    auto* w = static_cast<const W*>(p.w) + column * p.inputs + i;
    turn_panel(count, k, panel, [&](int64_t c, int64_t j) {
      return load_some(w + c * p.inputs + j, k - j);
    });
  }

  template <typename W>
  static ED_INLINE void copy(const W* w, int64_t stride, int64_t k, int64_t count, float* panel) {
    for (int64_t j = 0; j < k; ++j, w += stride, panel += kTile)
      for (int64_t c = 0; c < count; c += kLanes) store(panel + c, load_numbers(w + c));
  }
};

#if defined(__AVX512BF16__)
// A pair of inputs as bfloat16.
struct PairWords : InVectors {
  using Number = uint16_t;
  static ED_INLINE Vec add(Vec sum, Vec x, Vec w) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
  }

  static void fill(const Product& p, int64_t i, int64_t k, int64_t column, int64_t count,
                   float* panel) {
    if (p.transposed) {
      auto* w = static_cast<const uint16_t*>(p.w) + column * p.inputs + i;
      return turn_panel(count, (k + 1) / 2, panel, [&](int64_t c, int64_t pair) {
        return load_bits(w + c * p.inputs + 2 * pair, 2 * (k - 2 * pair));
      });
    }
    auto* w = static_cast<const uint16_t*>(p.w) + i * p.outputs + column;
    for (int64_t j = 0; j < k; j += 2, w += 2 * p.outputs, panel += kTile)
      pair_rows(w, j + 1 < k ? w + p.outputs : nullptr, count, reinterpret_cast<uint16_t*>(panel));
  }

  static const float* stored(const Product&, const float* words, int64_t, int64_t, float*) {
    return words;
  }
};
#endif

// Return the panel of `k` inputs from `i` on and `count` outputs from `column` on: where it lies, or
// made in `panel`.
template <typename Words>
const float* panel_of(const Product& p, int64_t i, int64_t k, int64_t column, int64_t count,
                      float* panel) {
  if (p.in_panels) return Words::stored(p, stored_words(p, i, column), k, count, panel);
  Words::fill(p, i, k, column, count, panel);
  return panel;
}

struct NoFetch {
  void operator()(int64_t) const {}
};

// sums [R, V vectors] += R rows of x times `inputs` inputs of a panel; or = if the inputs are the
// first ones. `x_stride` is between rows, or between words if x lies across. `fetch` is called for
// each word.
template <typename Words, int R, int V, bool across = false, typename Fetch = NoFetch>
void multiply_panel(const typename Words::Number* x, int64_t x_stride, const float* panel,
                    int64_t panel_stride, int64_t inputs, float* sums, int64_t sums_stride,
                    bool first, Fetch fetch = {}) {
  constexpr int64_t in_word = 4 / sizeof(*x);
  Vec acc[R][V] = {};
  if (!first) {
    ED_UNROLL
    for (int r = 0; r < R; ++r)
      ED_UNROLL
      for (int c = 0; c < V; ++c) acc[r][c] = load(sums + r * sums_stride + c * kLanes);
  }
  auto add = [&](int64_t word, int bytes) __attribute__((always_inline)) {
    fetch(word);
    Vec row[V];
    ED_UNROLL
    for (int c = 0; c < V; ++c) row[c] = load(panel + word * panel_stride + c * kLanes);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      float numbers = 0;
      const int64_t at = across ? word * x_stride + r * in_word : r * x_stride + word * in_word;
      std::memcpy(&numbers, x + at, bytes);
      Vec all = broadcast_bits(numbers);
      ED_UNROLL
      for (int c = 0; c < V; ++c) acc[r][c] = Words::add(acc[r][c], all, row[c]);
    }
  };
  int64_t word = 0;
  for (; word < inputs / in_word; ++word) add(word, 4);
  if (in_word > 1 && inputs % in_word) add(word, sizeof(*x));
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < V; ++c) store(sums + r * sums_stride + c * kLanes, acc[r][c]);
}

}  // namespace
}  // namespace ed
