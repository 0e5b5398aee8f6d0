// The product with a matrix [inputs, outputs], for one level of instructions.
//
// A task has some columns of the matrix, and goes over the inputs in blocks. Few rows read the
// weights where they lie, in whatever format: `Weights` makes vectors of numbers of them. For more
// rows a tile of kTile columns is made of plain numbers first ("panel", in the first level cache).
// So each weight is read from memory once, and a format needs no more than a case of `Weights`.
#pragma once

#include "groups.h"

namespace ed {
namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 4;  // of a column block: kRows * kVectors accumulators fill the registers
constexpr int kRows = 6;
#elif defined(__AVX2__)
constexpr int kVectors = 2;
constexpr int kRows = 6;
#else
constexpr int kVectors = 2;
constexpr int kRows = 4;
#endif
constexpr int kBlock = kVectors * kLanes;  // columns of a block; divides kTile
constexpr int64_t kCodes = 64;             // inputs of a block of codes

// How many rows ahead of a block of rows to fetch: what is read in the time that memory takes.
inline int64_t rows_ahead(int64_t rows, int64_t bytes_of_row) {
  constexpr int64_t kFetched = 8192;
  return rows * most(1, kFetched / (rows * bytes_of_row));
}

// A block of columns of the matrix in one format.
template <Format format, bool has_zero>
struct Weights {
  const void* w;   // of input 0
  int64_t stride;  // between inputs; of four bits: between pairs of inputs
  const float* table;
  const float* zero;

  // V vectors of input i, whose parity is known.
  template <int parity, int V>
  ED_INLINE void get(int64_t i, Vec* row, bool far) const {
    int64_t at = (format == Format::kFourBits ? i / 2 : i) * stride;
    ED_UNROLL
    for (int c = 0; c < V; ++c, at += kLanes) {
      if constexpr (format == Format::kFloat32) {
        auto* from = static_cast<const float*>(w) + at;
        row[c] = load(from);
        if (far) prefetch(from + kTile);
      } else if constexpr (format == Format::kBfloat16) {
        auto* from = static_cast<const uint16_t*>(w) + at;
        row[c] = load_numbers(from);
        if (far && c % 2 == 0) prefetch(from + 2 * kTile);
      } else {
        auto* from = static_cast<const uint8_t*>(w) + at;
        if (far && c == 0 && parity == 0) prefetch(from + 4 * kTile);
        if (far && c == 0 && parity == 1 && format != Format::kFourBits) prefetch(from + 4 * kTile);
        if constexpr (format == Format::kInt8) {
          row[c] = load_numbers(reinterpret_cast<const int8_t*>(from));
        } else if constexpr (format == Format::kFp8) {
          row[c] = load_fp8(from);
        } else {
          Ints both = load_bytes(from);
          row[c] = look_up(table, parity ? both >> 4 : both);
        }
      }
      if constexpr (has_zero) row[c] -= load(zero + c * kLanes);
    }
  }
};

// sums [R, V vectors] += x [R, k] * w [k, V vectors], times the scales of the columns if there are
// any.
template <int R, int V, typename W>
void multiply(const float* x, int64_t x_stride, const W w, int64_t k, const float* scale,
              float* sums, int64_t sums_stride, bool far) {
  Vec acc[R][V] = {};
  if (scale == nullptr) {
    ED_UNROLL
    for (int r = 0; r < R; ++r)
      ED_UNROLL
      for (int c = 0; c < V; ++c) acc[r][c] = load(sums + r * sums_stride + c * kLanes);
  }
  auto add = [&](auto parity, int64_t i) __attribute__((always_inline)) {
    Vec row[V];
    w.template get<decltype(parity)::value, V>(i, row, far);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec number = broadcast(x[r * x_stride + i]);
      ED_UNROLL
      for (int c = 0; c < V; ++c) acc[r][c] += number * row[c];
    }
  };
  int64_t i = 0;
  for (; i + 1 < k; i += 2) add(Count<0>(), i), add(Count<1>(), i + 1);
  if (i < k) add(Count<0>(), i);
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < V; ++c) {
      float* to = sums + r * sums_stride + c * kLanes;
      if (scale != nullptr) acc[r][c] = load(to) + acc[r][c] * load(scale + c * kLanes);
      store(to, acc[r][c]);
    }
}

#if defined(__AVX512BF16__)
// Which of 32 numbers each of two rows has go side by side, for the lower half of them.
inline __m512i pair_order() {
  return _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                          6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
}

// Write the numbers of two rows side by side: [count, 2], up to a multiple of 32 with zeros. A row
// that is null has zeros.
ED_INLINE void pair_rows(const uint16_t* even, const uint16_t* odd, int64_t count, uint16_t* to) {
  const __m512i low = pair_order();
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t c = 0; c < count; c += 32) {
    __mmask32 mask = count - c >= 32 ? ~0u : (1u << (count - c)) - 1;
    __m512i a = even ? _mm512_maskz_loadu_epi16(mask, even + c) : _mm512_setzero_si512();
    __m512i b = odd ? _mm512_maskz_loadu_epi16(mask, odd + c) : _mm512_setzero_si512();
    _mm512_storeu_si512(to + 2 * c, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(to + 2 * c + 32, _mm512_permutex2var_epi16(a, high, b));
  }
}
#endif

// Numbers of inputs [i, i + k) and `count` columns as float32 [k, kTile], before zero and scale;
// columns beyond are zeros.
void unpack_tail(const Product& p, int64_t i, int64_t k, int64_t column, int64_t count,
                 float* panel) {
  std::memset(panel, 0, k * kTile * sizeof(float));
  for (int64_t j = i; j < i + k; ++j, panel += kTile) {
    int64_t at = (p.format == Format::kFourBits ? j / 2 : j) * p.outputs + column;
    auto* bytes = static_cast<const uint8_t*>(p.w) + at;
    for (int64_t c = 0; c < count; ++c) {
      switch (p.format) {
        case Format::kFloat32: panel[c] = static_cast<const float*>(p.w)[at + c]; break;
        case Format::kBfloat16: panel[c] = widen(static_cast<const uint16_t*>(p.w)[at + c]); break;
        case Format::kInt8: panel[c] = static_cast<int8_t>(bytes[c]); break;
        case Format::kFp8: panel[c] = from_fp8(bytes[c]); break;
        case Format::kFourBits: panel[c] = p.table[(bytes[c] >> (j % 2 * 4)) & 15]; break;
      }
    }
  }
}

// Call `f(Count<vectors>, first column)` for blocks of `count` columns, which are whole vectors.
template <typename F>
ED_INLINE void over_blocks(int64_t count, const F& f) {
  int64_t c = 0;
  for (; c + kBlock <= count; c += kBlock) f(Count<kVectors>(), c);
  for (; c < count; c += kLanes) f(Count<1>(), c);
}

// Rows and columns of a task, and inputs of a block: few rows stream long runs of each row of the
// matrix; many rows keep sums and panels in the second level cache.
constexpr int64_t kMostRows = 192;

template <Format format, bool has_zero>
struct Part {
  static constexpr bool codes = format != Format::kFloat32 && format != Format::kBfloat16;
  using Plain = Weights<Format::kFloat32, false>;
  using Panel = Weights<Format::kFloat32, has_zero>;

  static int64_t inputs_of_block(const Product& p, int64_t rows, int64_t i) {
    if (codes) return codes_of_block(p, i, kCodes);  // one order, however many rows
    return least(rows <= 8 ? 16 : 64, p.inputs - i);
  }

  // The sums of rows [row, row + rows) and columns [first, last).
  static void run(const Product& p, const float* x, int64_t row, int64_t rows, int64_t first,
                  int64_t last, float* sums, float* panel) {
    int64_t width = (last - first + kTile - 1) / kTile * kTile;
    TileNumbers of_scale, of_zero;
    int64_t k;
    for (int64_t i = 0; i < p.inputs; i += k) {
      k = inputs_of_block(p, rows, i);
      const float* numbers = x + row * p.inputs + i;
      for (int64_t column = first; column < last; column += kTile) {
        int64_t count = least(kTile, last - column);
        float* tile = sums + (column - first);
        const float *scale = nullptr, *zero = nullptr;
        if constexpr (codes) {
          scale = of_scale.get(p, p.scale, i / p.group, column, count);
          zero = of_zero.get(p, p.zero, i / p.group, column, count);
        }
        // Blocks of `all` columns, the last of them narrow.
        auto by = [&](auto weights, int64_t all, bool far) __attribute__((always_inline)) {
          row_blocks<kRows>(rows, [&](auto r, int64_t at) {
            auto block = [&](auto v, int64_t c) {
              multiply<decltype(r)::value, decltype(v)::value>(
                  numbers + at * p.inputs, p.inputs, weights(c), k, scale ? scale + c : scale,
                  tile + at * width + c, width, far && (at == 0 || rows <= 8));
            };
            over_blocks(all, block);
          });
        };
        auto where_it_lies = [&](int64_t c) {
          return Weights<format, has_zero>{at_input(p, i, column + c), p.outputs, p.table,
                                           zero ? zero + c : zero};
        };
        if (count % kLanes != 0) {
          unpack_tail(p, i, k, column, count, panel);
          by([&](int64_t c) { return Panel{panel + c, kTile, nullptr, zero ? zero + c : zero}; },
             kTile, false);
        } else if (rows <= kRows || format == Format::kFloat32) {
          by(where_it_lies, count, true);
        } else {
          over_blocks(count, [&](auto v, int64_t c) {
            unpack<decltype(v)::value>(where_it_lies(c), k, panel + c);
          });
          by([&](int64_t c) { return Plain{panel + c, kTile, nullptr, nullptr}; }, count, false);
        }
      }
    }
  }

  static const void* at_input(const Product& p, int64_t i, int64_t column) {
    constexpr int64_t size = format == Format::kFloat32 ? 4 : format == Format::kBfloat16 ? 2 : 1;
    int64_t at = (format == Format::kFourBits ? i / 2 : i) * p.outputs + column;
    return static_cast<const char*>(p.w) + at * size;
  }

  // V vectors of columns as plain numbers.
  template <int V>
  static void unpack(const Weights<format, has_zero> w, int64_t k, float* panel) {
    Vec row[V];
    auto keep = [&](int64_t i) __attribute__((always_inline)) {
      ED_UNROLL
      for (int c = 0; c < V; ++c) store(panel + i * kTile + c * kLanes, row[c]);
    };
    int64_t i = 0;
    for (; i + 1 < k; i += 2) {
      w.template get<0, V>(i, row, true), keep(i);
      w.template get<1, V>(i + 1, row, true), keep(i + 1);
    }
    if (i < k) w.template get<0, V>(i, row, true), keep(i);
  }
};

// Call `f` with the format of a product, and whether its codes have a zero, as constants.
template <typename F>
void of_format(const Product& p, const F& f) {
  switch (p.format) {
    case Format::kFloat32: return f(Part<Format::kFloat32, false>());
    case Format::kBfloat16: return f(Part<Format::kBfloat16, false>());
    case Format::kFp8: return f(Part<Format::kFp8, false>());
    case Format::kInt8:
      if (p.zero.data) return f(Part<Format::kInt8, true>());
      return f(Part<Format::kInt8, false>());
    case Format::kFourBits:
      if (p.zero.data) return f(Part<Format::kFourBits, true>());
      return f(Part<Format::kFourBits, false>());
  }
}

void in_blocks(const Product& p, int64_t first, int64_t last) {
  int64_t width = (last - first + kTile - 1) / kTile * kTile;
  Scratch sums(least(p.rows, kMostRows) * width), panel(128 * kTile);
  WideRows wide(p);
  for (int64_t row = 0; row < p.rows; row += kMostRows) {
    int64_t rows = least(kMostRows, p.rows - row);
    std::memset(sums.data, 0, rows * width * sizeof(float));
    of_format(p, [&](auto part) {
      part.run(p, wide.x, row, rows, first, last, sums.data, panel.data);
    });
    for (int64_t r = 0; r < rows; ++r)
      write(p, row + r, first, sums.data + r * width, last - first);
  }
}

}  // namespace
}  // namespace ed
