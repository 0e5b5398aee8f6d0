// The product of many rows with a matrix of numbers, for one level of instructions.
//
// A tile of the matrix first becomes a panel: the numbers of kTile outputs, input after input, in the
// order in which they are multiplied: a matrix that lies transposed is turned. This takes a hundredth
// of the time of a product of a hundred rows. Each block of rows then goes over all inputs of the panel with its sums in registers.
// Every sum has the order of `in_blocks` of columns.h.
#pragma once

#include "columns.h"
#include "tiles.h"
#include "turn.h"

namespace ed {
namespace {

constexpr int64_t kPanelWords = 1 << 16;  // of four bytes: a panel stays in the second cache

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
};
#endif

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
    const int64_t words = (k + 1) / 2, all = (k + kTileInputs - 1) / kTileInputs * kTileInputs / 2;
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

// sums [R, kTile], at columns of one block, += R rows of x times `inputs` inputs of a panel; or = if
// the inputs are the first ones. `x_stride` is between rows, or between words if x lies across.
template <typename Words, int R, bool across>
void multiply_panel(const typename Words::Number* x, int64_t x_stride, const float* panel,
                    int64_t inputs, float* sums, bool first) {
  constexpr int64_t in_word = 4 / sizeof(*x);
  Vec acc[R][kVectors] = {};
  if (!first) {
    ED_UNROLL
    for (int r = 0; r < R; ++r)
      ED_UNROLL
      for (int c = 0; c < kVectors; ++c) acc[r][c] = load(sums + r * kTile + c * kLanes);
  }
  auto add = [&](int64_t word, int bytes) __attribute__((always_inline)) {
    Vec row[kVectors];
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c) row[c] = load(panel + word * kTile + c * kLanes);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      float numbers = 0;
      const int64_t at = across ? word * x_stride + r * in_word : r * x_stride + word * in_word;
      std::memcpy(&numbers, x + at, bytes);
      Vec all = broadcast_bits(numbers);
      ED_UNROLL
      for (int c = 0; c < kVectors; ++c) acc[r][c] = Words::add(acc[r][c], all, row[c]);
    }
  };
  int64_t word = 0;
  for (; word < inputs / in_word; ++word) add(word, 4);
  if (in_word > 1 && inputs % in_word) add(word, sizeof(*x));
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c) store(sums + r * kTile + c * kLanes, acc[r][c]);
}

// sums [R, kTile] += R rows of x times a panel, or =.
template <bool across, int R, typename Words>
void multiply(Count<R>, Words&, const typename Words::Number* x, int64_t x_stride,
              const float* panel, int64_t inputs, int64_t outputs, float* sums, bool first) {
  for (int64_t c = 0; c < outputs; c += kBlock)
    multiply_panel<Words, R, across>(x, x_stride, panel + c, inputs, sums + c, first);
}

// Where a panel comes from: `inputs` inputs from `i` on, and `outputs` outputs from `column` on.
struct PanelPlace {
  int64_t i, inputs, column, outputs;

  // Fetch part `part` of `parts` of these numbers, which lie far apart in memory.
  void fetch(const Product& p, int64_t part, int64_t parts) const {
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
    return PanelPlace{i, least(block, p.inputs - i), column, least(kTile, last - column)};
  };
  const int64_t row_step = across ? in_word : p.inputs, word_step = across ? p.x_rows * in_word : in_word;
  const int64_t row_parts = (p.rows + Words::kBlockRows - 1) / Words::kBlockRows;
  const int64_t parts = least(24, row_parts);
  Words words;
  PanelPlace next = place_of(0, first);
  next.fetch(p, 0, 1);
  for (bool more = true; more;) {
    const auto [i, k, column, count] = next;
    Words::fill(p, i, k, column, count, panel.data);
    const bool complete = i + k == p.inputs;
    more = !complete || column + kTile < last;
    if (more) next = complete ? place_of(0, column + kTile) : place_of(i + k, column);
    int64_t part = parts - row_parts;
    words.blocks(p.rows, [&, i = i, k = k, column = column, count = count](auto r, int64_t row) {
      if (more && part >= 0) next.fetch(p, part, parts);
      ++part;
      multiply<across>(r, words, x + row * row_step + i / in_word * word_step,
                       across ? word_step : row_step, panel.data, k, count, sums.data + row * kTile,
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
#if defined(__AVX512BF16__)
  const bool pairs = p.x_is_bfloat16 && p.format == Format::kBfloat16;
  auto* numbers = static_cast<const uint16_t*>(p.x);
#endif
#if defined(__AMX_BF16__)
  if (pairs && p.rows >= (p.transposed ? kManyRows : kTileRows) && !p.fixed && !p.x_across) {
    with_panels<TileWords>(p, numbers, first, last);
    return true;
  }
#endif
  if (p.rows < kManyRows && !p.x_across) return false;
#if defined(__AVX512BF16__)
  if (pairs) {
    (p.x_across ? with_panels<PairWords, true> : with_panels<PairWords, false>)(p, numbers, first, last);
    return true;
  }
#endif
  if (p.x_across) {
    with_panels<FloatWords, true>(p, static_cast<const float*>(p.x), first, last);
  } else {
    WideRows wide(p);
    with_panels<FloatWords, false>(p, wide.x, first, last);
  }
  return true;
}

}  // namespace
}  // namespace ed
