// Vectors of float32 of the width that the level of instructions has. Every function here is
// internal to its translation unit: the same source is compiled for several levels.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "product.h"

// Before loops over accumulators: left as loops, they would keep them in memory.
#define ED_UNROLL _Pragma("GCC unroll 16")

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline Vec broadcast(float x) { return x - Vec{}; }

inline float widen(uint16_t bfloat16) {
  uint32_t bits = uint32_t{bfloat16} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? static_cast<uint16_t>(rounded) : static_cast<uint16_t>((bits >> 16) | 0x40);
}

// Templates of the standard library would be shared between levels by the linker, and run on a
// processor that lacks the instructions they were compiled with: so these are our own.
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Columns of a matrix in memory are read in runs: what comes next of a row is asked for early.
inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }

template <int R>
struct Count {
  static constexpr int value = R;
};

struct Scratch {
  explicit Scratch(int64_t numbers)
      : data(static_cast<float*>(std::aligned_alloc(64, (numbers * 4 + 63) / 64 * 64))) {}
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data); }
  float* const data;
};

// Run `f(Count<R>, first row)` over blocks of at most `most` rows, as equal as can be.
template <int R, typename F>
void one_block(int64_t count, int64_t row, const F& f) {
  if constexpr (R > 0) {
    if (count == R) return f(Count<R>(), row);
    one_block<R - 1>(count, row, f);
  }
}

template <int most, typename F>
void row_blocks(int64_t rows, const F& f) {
  int64_t blocks = (rows + most - 1) / most;
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t row = rows * b / blocks;
    one_block<most>(rows * (b + 1) / blocks - row, row, f);
  }
}

// Store `count` sums of one row of y.
inline void write(const ed::Product& p, int64_t row, int64_t column, const float* sums,
                  int64_t count) {
  int64_t at = row * p.outputs + column;
  if (!p.x_is_bfloat16) {
    std::memcpy(static_cast<float*>(p.y) + at, sums, count * sizeof(float));
    return;
  }
  auto* to = static_cast<uint16_t*>(p.y) + at;
  for (int64_t c = 0; c < count; ++c) to[c] = narrow(sums[c]);
}

// The rows of a product as float32: the product's own, or a copy of bfloat16 rows.
struct WideRows {
  explicit WideRows(const ed::Product& p) : copy(p.x_is_bfloat16 ? p.rows * p.inputs : 0) {
    x = p.x_is_bfloat16 ? copy.data : static_cast<const float*>(p.x);
    if (!p.x_is_bfloat16) return;
    auto* numbers = static_cast<const uint16_t*>(p.x);
    for (int64_t i = 0; i < p.rows * p.inputs; ++i) copy.data[i] = widen(numbers[i]);
  }
  Scratch copy;
  const float* x;
};

}  // namespace
