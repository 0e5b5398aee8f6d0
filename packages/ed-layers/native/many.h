// The product of many rows with a matrix of numbers, for one level of instructions.
//
// A tile of the matrix first becomes a panel with all inputs, or as many as the second cache holds.
// This takes a hundredth of the time of a product of a hundred rows. Each block of rows then goes over
// the inputs of the panel with its sums in registers. Every sum has the order of `in_blocks` of
// columns.h.
#pragma once

#include "small_panels.h"
#include "tiles.h"

namespace ed {
namespace {

constexpr int64_t kPanelWords = 1 << 16;  // of four bytes: a panel stays in the second cache

#if defined(__AMX_BF16__)
// The same for AMX: rows in blocks of two tiles. The panel has zeros up to whole tiles of inputs.
struct TileWords {
  using Number = uint16_t;
  static constexpr int64_t kBlockRows = 2 * kTileRows;
  struct Rows {
    int64_t value;
  };

  ~TileWords() { release_tiles(); }

  static void fill(const Product& p, int64_t i, int64_t k, int64_t column, int64_t count,
                   float* panel) {
    PairWords::fill(p, i, k, column, count, panel);
    end_with_zeros((k + 1) / 2, panel);
  }

  static const float* stored(const Product&, const float* words, int64_t k, int64_t count,
                             float* panel) {
    if (k % kTileInputs == 0) return words;
    for (int64_t word = 0; word < k / 2; ++word)
      std::memcpy(panel + word * kTile, words + word * kTile, count * sizeof(float));
    end_with_zeros(k / 2, panel);
    return panel;
  }

  static void end_with_zeros(int64_t words, float* panel) {
    const int64_t in_tile = kTileInputs / 2, all = (words + in_tile - 1) / in_tile * in_tile;
    std::memset(panel + words * kTile, 0, (all - words) * kTile * sizeof(float));
  }

  template <typename F>
  void blocks(int64_t rows, const F& f) {
    for (int64_t row = 0; row < rows; row += kBlockRows) {
      const int64_t count = least(kBlockRows, rows - row);
      if (count != shaped) TileShapes(count).use(), shaped = count;
      f(Rows{count}, row);
    }
  }

  int64_t shaped = 0;  // rows of the present shapes
};

template <bool across>
void multiply(TileWords::Rows rows, TileWords&, const uint16_t* x, int64_t x_stride,
                     const float* panel, int64_t inputs, int64_t outputs, float* sums, bool first) {
  multiply_tiles(x, x_stride, rows.value, panel, inputs, outputs, sums, first);
}
#endif

// sums [R, kTile] += R rows of x times a panel, or =.
template <bool across, int R, typename Words>
void multiply(Count<R>, Words&, const typename Words::Number* x, int64_t x_stride,
              const float* panel, int64_t inputs, int64_t outputs, float* sums, bool first) {
  auto some = [&](auto vectors, int64_t c) __attribute__((always_inline)) {
    multiply_panel<Words, R, decltype(vectors)::value, across>(x, x_stride, panel + c, kTile, inputs,
                                                               sums + c, kTile, first);
  };
  // Half a panel may end where the matrix ends.
  for (int64_t c = 0; c < outputs; c += kBlock)
    outputs - c > kBlock / 2 ? some(Count<kVectors>(), c) : some(Count<kVectors / 2>(), c);
}

// Where a panel comes from: `inputs` inputs from `i` on, and `outputs` outputs from `column` on.
struct PanelPlace {
  int64_t i, inputs, column, outputs;

  // Fetch part `part` of `parts` of these numbers, which lie far apart in memory.
  void fetch(const Product& p, int64_t part, int64_t parts) const {
    if (p.in_panels) {
      const int64_t words = inputs / inputs_of_word(p);
      const float* from = stored_words(p, i, column);
      for (int64_t word = words * part / parts; word < words * (part + 1) / parts; ++word)
        for (int64_t c = 0; c < outputs; c += 16) prefetch(from + word * kTile + c);
      return;
    }
    const int64_t size = p.format == Format::kFloat32 ? 4 : 2;
    const int64_t runs = p.transposed ? outputs : inputs, of_run = p.transposed ? inputs : outputs;
    const int64_t stride = p.transposed ? p.inputs : p.outputs;
    const int64_t first = p.transposed ? column * stride + i : i * stride + column;
    for (int64_t j = runs * part / parts; j < runs * (part + 1) / parts; ++j)
      for (int64_t byte = 0; byte < of_run * size; byte += 64)
        prefetch(static_cast<const char*>(p.w) + (first + j * stride) * size + byte);
  }
};

// All rows of x with the outputs [first, last). While the last rows are multiplied by a panel, the
// numbers of the next one are fetched: earlier, the rows of x would displace them.
template <typename Words, bool across = false>
void with_panels(const Product& p, const typename Words::Number* x, int64_t first, int64_t last) {
  constexpr int64_t in_word = 4 / sizeof(*x), most_inputs = kPanelWords / kTile * in_word;
  const int64_t blocks = (p.inputs + most_inputs - 1) / most_inputs;
  const int64_t block = (p.inputs + blocks * 32 - 1) / (blocks * 32) * 32;
  Scratch panel(block / in_word * kTile), sums(p.rows * kTile);
  std::memset(panel.data, 0, block / in_word * kTile * sizeof(float));
  auto place_of = [&](int64_t i, int64_t column) {
    const int64_t before = p.in_panels ? column % kTile : 0;
    return PanelPlace{i, least(block, p.inputs - i), column, least(kTile - before, last - column)};
  };
  const int64_t row_step = across ? in_word : p.inputs;
  const int64_t word_step = across ? p.x_rows * in_word : in_word;
  const int64_t row_parts = (p.rows + Words::kBlockRows - 1) / Words::kBlockRows;
  const int64_t parts = least(24, row_parts);
  Words words;
  PanelPlace next = place_of(0, first);
  next.fetch(p, 0, 1);
  for (bool more = true; more;) {
    const auto [i, k, column, count] = next;
    const float* words_of_panel = panel_of<Words>(p, i, k, column, count, panel.data);
    const bool complete = i + k == p.inputs;
    more = !complete || column + count < last;
    if (more) next = complete ? place_of(0, column + count) : place_of(i + k, column);
    int64_t part = parts - row_parts;
    words.blocks(p.rows, [&, i = i, k = k, column = column, count = count](auto r, int64_t row) {
      if (more && part >= 0) next.fetch(p, part, parts);
      ++part;
      multiply<across>(r, words, x + row * row_step + i / in_word * word_step,
                       across ? word_step : row_step, words_of_panel, k, count,
                       sums.data + row * kTile,
                       i == 0);
      if (!complete) return;
      for (int64_t one = row; one < row + r.value; ++one)
        write(p, one, column, sums.data + one * kTile, count);
    });
  }
}

// Compute the outputs if this form is the fastest, and return whether.
bool by_panels(const Product& p, int64_t first, int64_t last) {
  if (p.inputs == 0 || !(p.format == Format::kFloat32 || p.format == Format::kBfloat16)) return false;
  const bool few = p.rows < many_rows(p) && !p.x_across;
  if (few && (p.rows <= kStreamedRows || p.transposed || p.format == Format::kFloat32))
    return false;
#if defined(__AVX512BF16__)
  if (p.x_is_bfloat16 && p.format == Format::kBfloat16) {
    auto* numbers = static_cast<const uint16_t*>(p.x);
#if defined(__AMX_BF16__)
    if (p.rows >= (p.transposed ? many_rows(p) : kTileRows) && !p.fixed && !p.x_across) {
      with_panels<TileWords>(p, numbers, first, last);
      return true;
    }
#endif
    (few          ? with_small_panels<PairWords>
     : p.x_across ? with_panels<PairWords, true>
                  : with_panels<PairWords, false>)(p, numbers, first, last);
    return true;
  }
#endif
  if (p.x_across) {
    with_panels<FloatWords, true>(p, static_cast<const float*>(p.x), first, last);
  } else {
    WideRows wide(p);
    (few ? with_small_panels<FloatWords> : with_panels<FloatWords, false>)(p, wide.x, first, last);
  }
  return true;
}

}  // namespace
}  // namespace ed
