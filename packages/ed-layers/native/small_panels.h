// The product of a number of rows with a matrix of numbers [inputs, outputs], for one level of
// instructions: more rows than memory limits, and fewer than fill the time of a large panel (many.h).
//
// Every sum has the order of `in_blocks` of columns.h.
#pragma once

#include "panel_words.h"

namespace ed {
namespace {

constexpr int64_t kSmallPanelWords = 32;  // of an output: a panel stays in the first cache
constexpr int64_t kStreamedRows = 8;  // as many rows are faster in stream.h

// Fetches the first `count` inputs of a tile of the matrix, one for each word that is multiplied.
template <int lines>
struct FetchedTile {
  ED_INLINE void operator()(int64_t word) const {
    if (word >= count) return;
    ED_UNROLL
    for (int line = 0; line < lines; ++line) prefetch(from + word * stride + line * 64);
  }
  const char* from;
  int64_t stride, count;
};

// A block of inputs of some rows, row behind row: in x, rows may be so far apart that they fall on
// the same places of a cache.
template <typename Number>
struct RowBlock {
  RowBlock(int64_t rows, int64_t inputs) : copy(rows * inputs), stride(inputs) {}
  void read(const Number* x, int64_t x_stride, int64_t rows, int64_t inputs) {
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(numbers() + r * stride, x + r * x_stride, inputs * sizeof(Number));
  }
  Number* numbers() { return reinterpret_cast<Number*>(copy.data); }
  Scratch copy;
  const int64_t stride;
};

// All rows of x with the outputs [first, last), by panels that stay in the first cache. While all
// rows are multiplied by one panel, the numbers of the next one are fetched.
template <typename Words>
void with_small_panels(const Product& p, const typename Words::Number* x, int64_t first,
                       int64_t last) {
  constexpr int64_t in_word = 4 / sizeof(*x), most_inputs = kSmallPanelWords * in_word;
  const int64_t width = (last - first + kTile - 1) / kTile * kTile;
  const int64_t row_parts = (p.rows + kRows - 1) / kRows;
  const int64_t size = p.format == Format::kFloat32 ? 4 : 2, stride = p.outputs * size;
  Scratch sums(p.rows * width), panel(kSmallPanelWords * kTile);
  RowBlock<typename Words::Number> rows(p.rows, most_inputs);
  std::memset(panel.data, 0, kSmallPanelWords * kTile * sizeof(float));
  for (int64_t i = 0; i < p.inputs; i += most_inputs) {
    const int64_t k = least(most_inputs, p.inputs - i);
    rows.read(x + i, p.inputs, p.rows, k);
    for (int64_t column = first; column < last; column += kTile) {
      const int64_t count = least(kTile, last - column);
      Words::fill(p, i, k, column, count, panel.data);
      const bool at_end = column + kTile >= last;
      const int64_t next_i = at_end ? i + k : i, next_column = at_end ? first : column + kTile;
      const char* next = static_cast<const char*>(p.w) + next_i * stride + next_column * size;
      const int64_t next_k = least(most_inputs, p.inputs - next_i);
      int64_t fetched = 0, part = 0;
      row_blocks<kRows>(p.rows, [&](auto r, int64_t row) {
        const int64_t to = next_k * ++part / row_parts;
        const FetchedTile<kTile * sizeof(*x) / 64> fetch{next + fetched * stride, stride,
                                                         to - fetched};
        over_blocks(count, [&](auto v, int64_t c) {
          multiply_panel<Words, decltype(r)::value, decltype(v)::value>(
              rows.numbers() + row * rows.stride, rows.stride, panel.data + c, kTile, k,
              sums.data + row * width + column - first + c, width, i == 0, fetch);
        });
        fetched = to;
      });
    }
  }
  for (int64_t row = 0; row < p.rows; ++row)
    write(p, row, first, sums.data + row * width, last - first);
}

}  // namespace
}  // namespace ed
