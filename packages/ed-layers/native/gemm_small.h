// Product of 9 or more rows with an unpacked matrix [inputs, outputs], for one level. Fewer rows
// use gemv.h, and more rows use gemm.h.
//
// Every sum has the order of `gemm_blocked` of gemm_blocked.h.
#pragma once

#include "panels.h"

namespace ed {
namespace {

constexpr int64_t kSmallPanelWords =
    32;                           // words of an output: a panel stays in the first-level cache
constexpr int64_t kGemvRows = 8;  // up to this number of rows, gemv.h is faster

// Prefetch of the first `count` inputs of a tile of the matrix, one for each multiplied word.
template <int lines>
struct TilePrefetch {
  ED_INLINE void operator()(int64_t word) const {
    if (word >= count) return;
    ED_UNROLL
    for (int line = 0; line < lines; ++line) prefetch(from + word * stride + line * 64);
  }
  const char* from;
  int64_t stride, count;
};

// A contiguous copy of a block of inputs of some rows. Distant rows of x can conflict in the cache.
template <typename Element>
struct RowCopy {
  RowCopy(int64_t rows, int64_t inputs) : copy(rows * inputs), stride(inputs) {}
  void read(const Element* x, int64_t x_stride, int64_t rows, int64_t inputs) {
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(numbers() + r * stride, x + r * x_stride, inputs * sizeof(Element));
  }
  Element* numbers() { return reinterpret_cast<Element*>(copy.data); }
  Scratch copy;
  const int64_t stride;
};

// All rows of x with the outputs [first, last), by panels that stay in the first-level cache. The
// next panel is prefetched while all rows are multiplied by the current one.
template <typename Words>
void gemm_small_panels(const Gemm& p, const typename Words::Element* x, int64_t first,
                       int64_t last) {
  constexpr int64_t word_inputs = 4 / sizeof(*x), max_inputs = kSmallPanelWords * word_inputs;
  const int64_t width = (last - first + kTile - 1) / kTile * kTile;
  const int64_t row_block_count = (p.rows + kRows - 1) / kRows;
  const int64_t size = p.format == Format::kFloat32 ? 4 : 2, stride = p.outputs * size;
  Scratch sums(p.rows * width), panel(kSmallPanelWords * kTile);
  RowCopy<typename Words::Element> rows(p.rows, max_inputs);
  std::memset(panel.data, 0, kSmallPanelWords * kTile * sizeof(float));
  for (int64_t i = 0; i < p.inputs; i += max_inputs) {
    const int64_t k = min_int(max_inputs, p.inputs - i);
    rows.read(x + i, p.inputs, p.rows, k);
    for (int64_t column = first; column < last; column += kTile) {
      const int64_t count = min_int(kTile, last - column);
      Words::fill(p, i, k, column, count, panel.data);
      const bool at_end = column + kTile >= last;
      const int64_t next_i = at_end ? i + k : i, next_column = at_end ? first : column + kTile;
      const char* next = static_cast<const char*>(p.w) + next_i * stride + next_column * size;
      const int64_t next_k = min_int(max_inputs, p.inputs - next_i);
      int64_t fetched = 0, part = 0;
      for_row_blocks<kRows>(p.rows, [&](auto r, int64_t row) {
        const int64_t to = next_k * ++part / row_block_count;
        const TilePrefetch<kTile * sizeof(*x) / 64> fetch{next + fetched * stride, stride,
                                                          to - fetched};
        for_column_blocks(count, [&](auto v, int64_t c) {
          multiply_panel<Words, decltype(r)::value, decltype(v)::value>(
              rows.numbers() + row * rows.stride, rows.stride, panel.data + c, kTile, k,
              sums.data + row * width + column - first + c, width, i == 0, fetch);
        });
        fetched = to;
      });
    }
  }
  for (int64_t row = 0; row < p.rows; ++row)
    write_outputs(p, row, first, sums.data + row * width, last - first);
}

}  // namespace
}  // namespace ed
