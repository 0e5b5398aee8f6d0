// The product with a matrix [inputs, outputs], for one level of instructions.
//
// A task has some columns of the matrix. It goes over the inputs in blocks; of each block it makes
// tiles of kTile columns of plain numbers ("panel", in the first level cache), and multiplies all
// rows by them. Weights that are float32 already are read where they lie. So each weight is read
// from memory once, and a format needs no more than a function that unpacks it.
#pragma once

#include "product.h"
#include "simd.h"

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

// sums [R, kBlock] += x [R, k] * w [k, kBlock].
template <int R>
void multiply(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t k,
              float* sums, int64_t sums_stride, bool far) {
  Vec acc[R][kVectors];
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c) acc[r][c] = load(sums + r * sums_stride + c * kLanes);
  for (int64_t i = 0; i < k; ++i) {
    Vec row[kVectors];
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      row[c] = load(w + i * w_stride + c * kLanes);
      if (far) prefetch(w + i * w_stride + c * kLanes + kTile);
    }
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec number = broadcast(x[r * x_stride + i]);
      ED_UNROLL
      for (int c = 0; c < kVectors; ++c) acc[r][c] += number * row[c];
    }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c) store(sums + r * sums_stride + c * kLanes, acc[r][c]);
}

#if defined(__AVX512BF16__)
// The same of bfloat16 numbers: w has pairs of inputs side by side, [k / 2, kBlock, 2]. An odd k
// has a last input without a partner, whose place in w is zero.
template <int R>
void multiply_pairs(const uint16_t* x, int64_t x_stride, const uint16_t* w, int64_t w_stride,
                    int64_t k, float* sums, int64_t sums_stride) {
  __m512 acc[R][kVectors];
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c)
      acc[r][c] = _mm512_loadu_ps(sums + r * sums_stride + c * kLanes);
  auto add = [&](int64_t i, int bytes) __attribute__((always_inline)) {
    __m512i row[kVectors];
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c)
      row[c] = _mm512_loadu_si512(w + (i / 2) * w_stride + c * 2 * kLanes);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      int32_t pair = 0;
      std::memcpy(&pair, x + r * x_stride + i, bytes);
      __m512i numbers = _mm512_set1_epi32(pair);
      ED_UNROLL
      for (int c = 0; c < kVectors; ++c)
        acc[r][c] = _mm512_dpbf16_ps(acc[r][c], (__m512bh)numbers, (__m512bh)row[c]);
    }
  };
  int64_t i = 0;
  for (; i + 1 < k; i += 2) add(i, 4);
  if (i < k) add(i, 2);
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < kVectors; ++c)
      _mm512_storeu_ps(sums + r * sums_stride + c * kLanes, acc[r][c]);
}
#endif

// `count` codes of one input as numbers, before zero and scale.
inline void decode(const Product& p, int64_t i, int64_t column, int64_t count, float* to) {
  if (p.format == Format::kInt8) {
    auto* w = static_cast<const int8_t*>(p.w) + i * p.outputs + column;
    for (int64_t c = 0; c < count; ++c) to[c] = w[c];
    return;
  }
  auto* w = static_cast<const uint8_t*>(p.w) + (i / 2) * p.outputs + column;
  int shift = (i % 2) * 4;
  int64_t c = 0;
#if defined(__AVX512F__)
  __m512 table = _mm512_loadu_ps(p.table);
  __m128i by = _mm_cvtsi32_si128(shift);
  for (; c + 16 <= count; c += 16) {
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + c)));
    // The table is indexed by the lowest four bits.
    _mm512_storeu_ps(to + c, _mm512_permutexvar_ps(_mm512_srl_epi32(codes, by), table));
  }
#endif
  for (; c < count; ++c) to[c] = p.table[(w[c] >> shift) & 15];
}

// Numbers of inputs [i, i + k) and `count` columns as float32 [k, kTile]; the columns beyond are
// left as they are. Inlined for whole tiles, whose loops then have a known length.
inline __attribute__((always_inline)) void unpack_columns(const Product& p, int64_t i, int64_t k,
                                                          int64_t column, int64_t count,
                                                          float* panel) {
  for (int64_t j = 0; j < k; ++j, ++i, panel += kTile) {
    int64_t at = i * p.outputs + column;
    if (p.format == Format::kFloat32) {
      std::memcpy(panel, static_cast<const float*>(p.w) + at, count * sizeof(float));
    } else if (p.format == Format::kBfloat16) {
      auto* w = static_cast<const uint16_t*>(p.w) + at;
      prefetch(w + 2 * kTile);
      for (int64_t c = 0; c < count; ++c) panel[c] = widen(w[c]);
    } else {
      prefetch(static_cast<const char*>(p.w) + (p.format == Format::kInt8 ? at : at / 2) + 4 * kTile);
      decode(p, i, column, count, panel);
      int64_t of_group = (i / p.group) * p.outputs + column;
      if (p.zero != nullptr)
        for (int64_t c = 0; c < count; ++c) panel[c] -= p.zero[of_group + c];
      for (int64_t c = 0; c < count; ++c) panel[c] *= p.scale[of_group + c];
    }
  }
}

void unpack(const Product& p, int64_t i, int64_t k, int64_t column, int64_t count, float* panel) {
  if (count == kTile)
    unpack_columns(p, i, k, column, kTile, panel);
  else
    unpack_columns(p, i, k, column, count, panel);
}

#if defined(__AVX512BF16__)
// Bfloat16 numbers with pairs of inputs side by side, [(k + 1) / 2, kTile, 2].
void unpack_pairs(const Product& p, int64_t i, int64_t k, int64_t column, int64_t width,
                  uint16_t* panel) {
  auto* w = static_cast<const uint16_t*>(p.w) + i * p.outputs + column;
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t j = 0; j < k; j += 2, w += 2 * p.outputs, panel += 2 * kTile) {
    const uint16_t* next = j + 1 < k ? w + p.outputs : nullptr;
    prefetch(w + 2 * kTile);
    prefetch(w + 2 * kTile + 32);
    if (next) prefetch(next + 2 * kTile), prefetch(next + 2 * kTile + 32);
    for (int64_t c = 0; c < width; c += 32) {
      __mmask32 mask = width - c >= 32 ? ~0u : (1u << (width - c)) - 1;
      __m512i even = _mm512_maskz_loadu_epi16(mask, w + c);
      __m512i odd = next ? _mm512_maskz_loadu_epi16(mask, next + c) : _mm512_setzero_si512();
      _mm512_storeu_si512(panel + 2 * c, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_storeu_si512(panel + 2 * c + 32, _mm512_permutex2var_epi16(even, high, odd));
    }
  }
}
#endif

// What rows and columns of a task, and inputs of a block, are: few rows stream long runs of each
// row of the matrix; many rows keep sums and panels in the second level cache.
constexpr int64_t kMostRows = 192;

int64_t inputs_of_block(int64_t rows) { return rows <= 8 ? 16 : rows <= 64 ? 64 : 128; }

// Rows [row, row + rows) and columns [first, last).
void part(const Product& p, const float* x, int64_t row, int64_t rows, int64_t first, int64_t last,
          float* sums) {
  int64_t width = (last - first + kTile - 1) / kTile * kTile;
  std::memset(sums, 0, rows * width * sizeof(float));
  alignas(64) float panel[128 * kTile];
  std::memset(panel, 0, sizeof panel);
#if defined(__AVX512BF16__)
  bool pairs = p.x_is_bfloat16 && p.format == Format::kBfloat16;
#endif
  int64_t step = inputs_of_block(rows);
  for (int64_t i = 0; i < p.inputs; i += step) {
    int64_t k = least(step, p.inputs - i);
    for (int64_t column = first; column < last; column += kTile) {
      int64_t count = least(kTile, last - column);
      float* tile = sums + (column - first);
#if defined(__AVX512BF16__)
      if (pairs) {
        auto* both = reinterpret_cast<uint16_t*>(panel);
        unpack_pairs(p, i, k, column, count, both);
        auto* numbers = static_cast<const uint16_t*>(p.x) + row * p.inputs + i;
        row_blocks<kRows>(rows, [&](auto r, int64_t at) {
          for (int64_t c = 0; c < count; c += kBlock)
            multiply_pairs<decltype(r)::value>(numbers + at * p.inputs, p.inputs, both + 2 * c, 2 * kTile, k,
                                tile + at * width + c, width);
        });
        continue;
      }
#endif
      const float* w = static_cast<const float*>(p.w) + i * p.outputs + column;
      int64_t stride = p.outputs;
      if (p.format != Format::kFloat32 || count < kTile) {
        unpack(p, i, k, column, count, panel);
        w = panel;
        stride = kTile;
      }
      const float* numbers = x + row * p.inputs + i;
      row_blocks<kRows>(rows, [&](auto r, int64_t at) {
        for (int64_t c = 0; c < count; c += kBlock)
          multiply<decltype(r)::value>(numbers + at * p.inputs, p.inputs, w + c, stride, k, tile + at * width + c,
                                        width, stride != kTile && at == 0);
      });
    }
  }
  for (int64_t r = 0; r < rows; ++r) write(p, row + r, first, sums + r * width, last - first);
}

void columns(const Product& p, int64_t first, int64_t last) {
  int64_t width = (last - first + kTile - 1) / kTile * kTile;
  Scratch sums(least(p.rows, kMostRows) * width);
  WideRows wide(p);
  const float* x = wide.x;
  for (int64_t row = 0; row < p.rows; row += kMostRows)
    part(p, x, row, least(kMostRows, p.rows - row), first, last, sums.data);
}

}  // namespace
}  // namespace ed
