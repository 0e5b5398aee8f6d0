// Panels of a matrix and the micro-kernel that multiplies rows with a panel, for one level.
//
// A panel has the numbers of kTile outputs, one input after the other, in words of four bytes. This
// is the order of the multiplication. Packing transposes a transposed matrix. A matrix may be
// packed already.
#pragma once

#include "gemm_blocked.h"
#include "transpose.h"

namespace ed {
namespace {

// Blocks of kRows rows with the sums in registers.
struct RegisterBlocks {
  static constexpr int64_t kBlockRows = kRows;
  template <typename F>
  void blocks(int64_t rows, const F& f) {
    for_row_blocks<kRows>(rows, f);
  }
};

// Transpose `count` rows of words, which `get(row, word)` returns, into a panel.
template <typename Get>
ED_INLINE void transpose_panel(int64_t count, int64_t words, float* panel, const Get& get) {
  auto store_words = [&](int64_t word, int64_t row, Vec numbers) {
    store(panel + word * kTile + row, numbers);
  };
  for (int64_t word = 0; word < words; word += kLanes)
    for (int64_t row = 0; row < count; row += kLanes)
      transpose_block(row, count, word, words, get, store_words);
}

// Packed weights: the inputs of a word, and the words from input `i` and output `column` on.
inline int64_t get_word_inputs(const Gemm& p) { return p.format == Format::kBfloat16 ? 2 : 1; }

inline const float* locate_words(const Gemm& p, int64_t i, int64_t column) {
  const int64_t word_inputs = get_word_inputs(p), panel_column = column % kTile;
  return static_cast<const float*>(p.w) + (column - panel_column) * (p.inputs / word_inputs) +
         i / word_inputs * kTile + panel_column;
}

// The even or odd numbers of bfloat16 pairs.
inline Vec get_even_half(Vec pairs) { return (Vec)((Ints)pairs << 16); }
inline Vec get_odd_half(Vec pairs) { return (Vec)((Ints)pairs & ~0xffff); }

// Words of x and of a panel: one float32 input.
struct Float32Words : RegisterBlocks {
  using Element = float;
  static ED_INLINE Vec add(Vec sum, Vec x, Vec w) { return sum + x * w; }

  // Pack `k` inputs from `i` on and `count` outputs from `column` on.
  static void fill(const Gemm& p, int64_t i, int64_t k, int64_t column, int64_t count,
                   float* panel) {
    if (p.transposed)
      return p.format == Format::kFloat32
                 ? fill_transposed<float>(p, i, k, column, count, panel)
                 : fill_transposed<uint16_t>(p, i, k, column, count, panel);
    if (count % kLanes != 0) return unpack_partial_tile(p, i, k, column, count, panel);
    if (p.format == Format::kFloat32)
      copy(static_cast<const float*>(p.w) + i * p.outputs + column, p.outputs, k, count, panel);
    else
      copy(static_cast<const uint16_t*>(p.w) + i * p.outputs + column, p.outputs, k, count, panel);
  }

  // Return `k` inputs and `count` outputs of packed weights that start at `words`: in place, or
  // widened.
  static const float* unpack_words(const Gemm& p, const float* words, int64_t k, int64_t count,
                                   float* panel) {
    if (p.format == Format::kFloat32) return words;
    for (int64_t j = 0; j < k; j += 2, words += kTile)
      for (int64_t c = 0; c < count; c += kLanes) {
        const Vec pairs = load(words + c);
        store(panel + j * kTile + c, get_even_half(pairs));
        store(panel + (j + 1) * kTile + c, get_odd_half(pairs));
      }
    return panel;
  }

 private:
  template <typename W>
  static void fill_transposed(const Gemm& p, int64_t i, int64_t k, int64_t column, int64_t count,
                              float* panel) {
    auto* w = static_cast<const W*>(p.w) + column * p.inputs + i;
    transpose_panel(count, k, panel, [&](int64_t c, int64_t j) {
      return load_partial(w + c * p.inputs + j, k - j);
    });
  }

  template <typename W>
  static ED_INLINE void copy(const W* w, int64_t stride, int64_t k, int64_t count, float* panel) {
    for (int64_t j = 0; j < k; ++j, w += stride, panel += kTile)
      for (int64_t c = 0; c < count; c += kLanes) store(panel + c, load_elements(w + c));
  }
};

#if defined(__AVX512BF16__)
// Words of x and of a panel: a pair of bfloat16 inputs.
struct Bf16PairWords : RegisterBlocks {
  using Element = uint16_t;
  static ED_INLINE Vec add(Vec sum, Vec x, Vec w) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
  }

  static void fill(const Gemm& p, int64_t i, int64_t k, int64_t column, int64_t count,
                   float* panel) {
    if (p.transposed) {
      auto* w = static_cast<const uint16_t*>(p.w) + column * p.inputs + i;
      return transpose_panel(count, (k + 1) / 2, panel, [&](int64_t c, int64_t pair) {
        return load_partial_bits(w + c * p.inputs + 2 * pair, 2 * (k - 2 * pair));
      });
    }
    auto* w = static_cast<const uint16_t*>(p.w) + i * p.outputs + column;
    for (int64_t j = 0; j < k; j += 2, w += 2 * p.outputs, panel += kTile)
      interleave_rows(w, j + 1 < k ? w + p.outputs : nullptr, count,
                      reinterpret_cast<uint16_t*>(panel));
  }

  static const float* unpack_words(const Gemm&, const float* words, int64_t, int64_t, float*) {
    return words;
  }
};
#endif

// Return the panel of `k` inputs from `i` on and `count` outputs from `column` on: in place, or
// packed into `panel`.
template <typename Words>
const float* get_panel(const Gemm& p, int64_t i, int64_t k, int64_t column, int64_t count,
                       float* panel) {
  if (p.packed) return Words::unpack_words(p, locate_words(p, i, column), k, count, panel);
  Words::fill(p, i, k, column, count, panel);
  return panel;
}

struct NoPrefetch {
  void operator()(int64_t) const {}
};

// sums [R, V vectors] += R rows of x times `inputs` inputs of a panel; = if `first`. `x_stride` is
// the stride of rows, or of words if x is transposed. `prefetch` is called for each word.
template <typename Words, int R, int V, bool pack_lhs = false, typename Prefetch = NoPrefetch>
void multiply_panel(const typename Words::Element* x, int64_t x_stride, const float* panel,
                    int64_t panel_stride, int64_t inputs, float* sums, int64_t sums_stride,
                    bool first, Prefetch fetch = {}) {
  constexpr int64_t word_inputs = 4 / sizeof(*x);
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
      const int64_t at =
          pack_lhs ? word * x_stride + r * word_inputs : r * x_stride + word * word_inputs;
      std::memcpy(&numbers, x + at, bytes);
      Vec x_words = broadcast_bits(numbers);
      ED_UNROLL
      for (int c = 0; c < V; ++c) acc[r][c] = Words::add(acc[r][c], x_words, row[c]);
    }
  };
  int64_t word = 0;
  for (; word < inputs / word_inputs; ++word) add(word, 4);
  if (word_inputs > 1 && inputs % word_inputs) add(word, sizeof(*x));
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < V; ++c) store(sums + r * sums_stride + c * kLanes, acc[r][c]);
}

}  // namespace
}  // namespace ed
