// Cache-blocked product with a matrix [inputs, outputs] of any weight format, for one level.
//
// A task has some columns of the matrix and processes the inputs in blocks. Few rows dequantize the
// weights in registers (`WeightBlock`). For more rows, the kernel first dequantizes a tile of kTile
// columns into a float32 panel in the first-level cache. So each weight is read from memory once,
// and a new format needs only a case of `WeightBlock`.
#pragma once

#include "operands.h"

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

// Return the prefetch distance of a block of rows: the rows that are read during one memory
// latency.
inline int64_t get_prefetch_rows(int64_t rows, int64_t row_bytes) {
  constexpr int64_t kPrefetch = 8192;
  return rows * max_int(1, kPrefetch / (rows * row_bytes));
}

// A block of columns of the matrix in one format. Rows of a panel have the constant stride
// `panel_stride` and are not prefetched; 0: the stride is `stride`.
template <Format format, bool has_zero, int64_t panel_stride = 0>
struct WeightBlock {
  const void* w;   // at input 0
  int64_t stride;  // between inputs; four bits: between pairs of inputs
  const float* table;
  const float* zero;

  // Load V vectors of input i, whose parity is known.
  template <int parity, int V>
  ED_INLINE void get(int64_t i, Vec* row, bool prefetches) const {
    if (panel_stride > 0) prefetches = false;
    int64_t at = (format == Format::kFourBits ? i / 2 : i) * (panel_stride ? panel_stride : stride);
    ED_UNROLL
    for (int c = 0; c < V; ++c, at += kLanes) {
      if constexpr (format == Format::kFloat32) {
        auto* from = static_cast<const float*>(w) + at;
        row[c] = load(from);
        if (prefetches) prefetch(from + kTile);
      } else if constexpr (format == Format::kBfloat16) {
        auto* from = static_cast<const uint16_t*>(w) + at;
        row[c] = load_elements(from);
        if (prefetches && c % 2 == 0) prefetch(from + 2 * kTile);
      } else {
        auto* from = static_cast<const uint8_t*>(w) + at;
        if (prefetches && c == 0 && parity == 0) prefetch(from + 4 * kTile);
        if (prefetches && c == 0 && parity == 1 && format != Format::kFourBits)
          prefetch(from + 4 * kTile);
        if constexpr (format == Format::kInt8) {
          row[c] = load_elements(reinterpret_cast<const int8_t*>(from));
        } else if constexpr (format == Format::kFp8) {
          row[c] = load_fp8(from);
        } else {
          Ints pairs = load_bytes(from);
          row[c] = look_up(table, parity ? pairs >> 4 : pairs);
        }
      }
      if constexpr (has_zero) row[c] -= load(zero + c * kLanes);
    }
  }

  // Return the block that starts `c` columns later.
  ED_INLINE WeightBlock skip(int64_t c) const {
    constexpr int64_t size = format == Format::kFloat32 ? 4 : format == Format::kBfloat16 ? 2 : 1;
    return {static_cast<const char*>(w) + c * size, stride, table, zero ? zero + c : zero};
  }
};

// sums [R, V vectors] += x [R, k] * w [k, V vectors], times the scales of the columns if there are
// scales.
template <int R, int V, typename W>
void multiply(const float* x, int64_t x_stride, const W w, int64_t k, const float* scale,
              float* sums, int64_t sums_stride, bool prefetches) {
  Vec acc[R][V] = {};
  if (scale == nullptr) {
    ED_UNROLL
    for (int r = 0; r < R; ++r)
      ED_UNROLL
      for (int c = 0; c < V; ++c) acc[r][c] = load(sums + r * sums_stride + c * kLanes);
  }
  auto add = [&](auto parity, int64_t i) __attribute__((always_inline)) {
    Vec row[V];
    w.template get<decltype(parity)::value, V>(i, row, prefetches);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec number = broadcast(x[r * x_stride + i]);
      ED_UNROLL
      for (int c = 0; c < V; ++c) acc[r][c] += number * row[c];
    }
  };
  int64_t i = 0;
  for (; i + 1 < k; i += 2) add(Constant<0>(), i), add(Constant<1>(), i + 1);
  if (i < k) add(Constant<0>(), i);
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < V; ++c) {
      float* to = sums + r * sums_stride + c * kLanes;
      if (scale != nullptr) acc[r][c] = load(to) + acc[r][c] * load(scale + c * kLanes);
      store(to, acc[r][c]);
    }
}

// Call `f(Constant<vectors>, first column)` for blocks of `count` columns, a multiple of kLanes.
template <typename F>
ED_INLINE void for_column_blocks(int64_t count, const F& f) {
  int64_t c = 0;
  for (; c + kBlock <= count; c += kBlock) f(Constant<kVectors>(), c);
  for (; c < count; c += kLanes) f(Constant<1>(), c);
}

// sums [rows, columns] += x [rows, k] * w [k, columns], times the scales of the columns if there are
// scales. All formats share the instances for panels.
template <typename W>
ED_NOINLINE void multiply_tile(const float* x, int64_t x_stride, int64_t rows, const W& w,
                               int64_t columns, int64_t k, const float* scale, float* sums,
                               int64_t sums_stride, bool prefetches) {
  for_row_blocks<kRows>(rows, [&](auto r, int64_t row) {
    for_column_blocks(columns, [&](auto v, int64_t c) {
      multiply<decltype(r)::value, decltype(v)::value>(
          x + row * x_stride, x_stride, w.skip(c), k, scale ? scale + c : scale,
          sums + row * sums_stride + c, sums_stride, prefetches && (row == 0 || rows <= 8));
    });
  });
}

#if defined(__AVX512BF16__)
// The permutation that interleaves the lower halves of two rows of 32 numbers.
inline __m512i get_pair_order() {
  return _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                          6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
}

// Interleave the numbers of two rows: [count, 2], padded with zeros to a multiple of 32. A null row
// has zeros.
ED_INLINE void interleave_rows(const uint16_t* even, const uint16_t* odd, int64_t count,
                               uint16_t* to) {
  const __m512i low = get_pair_order();
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

// Convert inputs [i, i + k) and `count` columns to float32 [k, kTile], before zero and scale.
// Columns from `count` on are zeros.
void unpack_partial_tile(const Gemm& p, int64_t i, int64_t k, int64_t column, int64_t count,
                         float* panel) {
  std::memset(panel, 0, k * kTile * sizeof(float));
  for (int64_t j = i; j < i + k; ++j, panel += kTile) {
    int64_t at = (p.format == Format::kFourBits ? j / 2 : j) * p.outputs + column;
    auto* bytes = static_cast<const uint8_t*>(p.w) + at;
    for (int64_t c = 0; c < count; ++c) {
      switch (p.format) {
        case Format::kFloat32:
          panel[c] = static_cast<const float*>(p.w)[at + c];
          break;
        case Format::kBfloat16:
          panel[c] = widen(static_cast<const uint16_t*>(p.w)[at + c]);
          break;
        case Format::kInt8:
          panel[c] = static_cast<int8_t>(bytes[c]);
          break;
        case Format::kFp8:
          panel[c] = convert_fp8(bytes[c]);
          break;
        case Format::kFourBits:
          panel[c] = p.table[(bytes[c] >> (j % 2 * 4)) & 15];
          break;
      }
    }
  }
}

// The largest number of rows of a task. Few rows stream long parts of each row of the matrix. Many
// rows keep sums and panels in the second-level cache.
constexpr int64_t kMaxTaskRows = 192;

template <Format format, bool has_zero>
struct FormatKernel {
  static constexpr bool codes = format != Format::kFloat32 && format != Format::kBfloat16;
  using Float32Weights = WeightBlock<Format::kFloat32, false, kTile>;
  using Float32Panel = WeightBlock<Format::kFloat32, has_zero, kTile>;

  static int64_t get_block_inputs(const Gemm& p, int64_t rows, int64_t i) {
    if (codes)
      return get_block_codes(p, i, kCodes);  // a fixed order of sums for all numbers of rows
    return min_int(rows <= 8 ? 16 : 64, p.inputs - i);
  }

  // The sums of rows [row, row + rows) and columns [first, last).
  static void run(const Gemm& p, const float* x, int64_t row, int64_t rows, int64_t first,
                  int64_t last, float* sums, float* panel) {
    int64_t width = (last - first + kTile - 1) / kTile * kTile;
    TileParams scale_params, zero_params;
    int64_t k;
    for (int64_t i = 0; i < p.inputs; i += k) {
      k = get_block_inputs(p, rows, i);
      const float* numbers = x + row * p.inputs + i;
      for (int64_t column = first; column < last; column += kTile) {
        int64_t count = min_int(kTile, last - column);
        float* tile = sums + (column - first);
        const float *scale = nullptr, *zero = nullptr;
        if constexpr (codes) {
          scale = scale_params.get(p, p.scale, i / p.group, column, count);
          zero = zero_params.get(p, p.zero, i / p.group, column, count);
        }
        const WeightBlock<format, has_zero> weights{locate_input(p, i, column), p.outputs, p.table,
                                                    zero};
        if (count % kLanes != 0) {
          unpack_partial_tile(p, i, k, column, count, panel);
          multiply_tile(numbers, p.inputs, rows, Float32Panel{panel, kTile, nullptr, zero}, kTile,
                        k, scale, tile, width, false);
        } else if (rows <= kRows || format == Format::kFloat32) {
          multiply_tile(numbers, p.inputs, rows, weights, count, k, scale, tile, width, true);
        } else {
          for_column_blocks(count, [&](auto v, int64_t c) {
            unpack<decltype(v)::value>(weights.skip(c), k, panel + c);
          });
          multiply_tile(numbers, p.inputs, rows, Float32Weights{panel, kTile, nullptr, nullptr},
                        count, k, scale, tile, width, false);
        }
      }
    }
  }

  static const void* locate_input(const Gemm& p, int64_t i, int64_t column) {
    constexpr int64_t size = format == Format::kFloat32 ? 4 : format == Format::kBfloat16 ? 2 : 1;
    int64_t at = (format == Format::kFourBits ? i / 2 : i) * p.outputs + column;
    return static_cast<const char*>(p.w) + at * size;
  }

  // Convert V vectors of columns to float32.
  template <int V>
  static void unpack(const WeightBlock<format, has_zero> w, int64_t k, float* panel) {
    Vec row[V];
    auto store_row = [&](int64_t i) __attribute__((always_inline)) {
      ED_UNROLL
      for (int c = 0; c < V; ++c) store(panel + i * kTile + c * kLanes, row[c]);
    };
    int64_t i = 0;
    for (; i + 1 < k; i += 2) {
      w.template get<0, V>(i, row, true), store_row(i);
      w.template get<1, V>(i + 1, row, true), store_row(i + 1);
    }
    if (i < k) w.template get<0, V>(i, row, true), store_row(i);
  }
};

// Call `f` with the kernel of the product's format; whether its codes have a zero is a constant.
template <typename F>
void dispatch_format(const Gemm& p, const F& f) {
  switch (p.format) {
    case Format::kFloat32:
      return f(FormatKernel<Format::kFloat32, false>());
    case Format::kBfloat16:
      return f(FormatKernel<Format::kBfloat16, false>());
    case Format::kFp8:
      return f(FormatKernel<Format::kFp8, false>());
    case Format::kInt8:
      if (p.zero.data) return f(FormatKernel<Format::kInt8, true>());
      return f(FormatKernel<Format::kInt8, false>());
    case Format::kFourBits:
      if (p.zero.data) return f(FormatKernel<Format::kFourBits, true>());
      return f(FormatKernel<Format::kFourBits, false>());
  }
}

void gemm_blocked(const Gemm& p, int64_t first, int64_t last) {
  int64_t width = (last - first + kTile - 1) / kTile * kTile;
  Scratch sums(min_int(p.rows, kMaxTaskRows) * width), panel(128 * kTile);
  Float32Rows wide(p);
  for (int64_t row = 0; row < p.rows; row += kMaxTaskRows) {
    int64_t rows = min_int(kMaxTaskRows, p.rows - row);
    std::memset(sums.data, 0, rows * width * sizeof(float));
    dispatch_format(
        p, [&](auto part) { part.run(p, wide.x, row, rows, first, last, sums.data, panel.data); });
    for (int64_t r = 0; r < rows; ++r)
      write_outputs(p, row + r, first, sums.data + r * width, last - first);
  }
}

}  // namespace
}  // namespace ed
