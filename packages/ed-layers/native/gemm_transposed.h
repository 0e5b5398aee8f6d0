// Product with a transposed matrix [outputs, inputs], for one level.
//
// An output is a dot product of two contiguous rows. The kernel multiplies several rows of x and w
// together, so each loaded number is used several times. Each lane has a separate sum; the kernel
// adds the lanes at the end. Rows of codes are dequantized first, some rows at a time.
#pragma once

#include "gemm.h"

namespace ed {
namespace {

constexpr int kXRows = kLanes == 16 ? 4 : 2;  // rows of x of a block
constexpr int kWRows = 4;                     // rows of w of a block; divides kTile
constexpr int64_t kRunBlocks =
    3;  // of rows of x: from more blocks on, memory bandwidth is not the limit

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return widen(x); }

// Prefetch of the next rows of some streams of the matrix.
struct RowPrefetch {
  ED_INLINE void operator()(int64_t byte) const {
    for (int64_t run = 0; run < runs; ++run) prefetch(from + run * stride + byte);
  }
  const char* from;
  int64_t stride, runs;
};

// Store the lane sums of Q outputs with a stride of `w_step` outputs.
template <int Q, int w_step>
ED_INLINE void store_sums(const Vec* sums, float* to) {
  float totals[Q];
  reduce_sums<Q>(sums, totals);
  ED_UNROLL
  for (int q = 0; q < Q; ++q) to[q * w_step] = totals[q];
}

// sums [R, kTile], Q columns = the products of R rows of x with Q rows of w with a stride of
// `w_step` rows.
template <int R, int Q, int w_step, typename W>
void dot_rows(const float* x, const W* w, int64_t inputs, float* sums, RowPrefetch prefetch_rows) {
  Vec acc[R][Q] = {};
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    prefetch_rows(i * sizeof(W));
    Vec w_lanes[Q];
    ED_UNROLL
    for (int q = 0; q < Q; ++q) w_lanes[q] = load_elements(w + q * w_step * inputs + i);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec x_lanes = load(x + r * inputs + i);
      ED_UNROLL
      for (int q = 0; q < Q; ++q) acc[r][q] += x_lanes * w_lanes[q];
    }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r) {
    float* to = sums + r * kTile;
    store_sums<Q, w_step>(acc[r], to);
    for (int64_t j = i; j < inputs; ++j)
      for (int q = 0; q < Q; ++q)
        to[q * w_step] += x[r * inputs + j] * to_float(w[q * w_step * inputs + j]);
  }
}

#if defined(__AVX512BF16__)
// The same of bfloat16 numbers.
template <int R, int Q, int w_step, typename W>
void dot_rows(const uint16_t* x, const W* w, int64_t inputs, float* sums,
              RowPrefetch prefetch_rows) {
  Vec acc[R][Q] = {};
  auto add = [&](int64_t i, __mmask32 mask) __attribute__((always_inline)) {
    prefetch_rows(i * sizeof(W));
    __m512i w_lanes[Q];
    ED_UNROLL
    for (int q = 0; q < Q; ++q)
      w_lanes[q] = _mm512_maskz_loadu_epi16(mask, w + q * w_step * inputs + i);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      __m512i x_lanes = _mm512_maskz_loadu_epi16(mask, x + r * inputs + i);
      ED_UNROLL
      for (int q = 0; q < Q; ++q)
        acc[r][q] =
            (Vec)_mm512_dpbf16_ps((__m512)acc[r][q], (__m512bh)x_lanes, (__m512bh)w_lanes[q]);
    }
  };
  int64_t i = 0;
  for (; i + 32 <= inputs; i += 32) add(i, ~0u);
  if (i < inputs) add(i, (1u << (inputs - i)) - 1);
  ED_UNROLL
  for (int r = 0; r < R; ++r) store_sums<Q, w_step>(acc[r], sums + r * kTile);
}
#endif

// All rows of x with the rows [first, last) of the matrix, which start at w. A scratch tile has the
// sums, because rows of y can conflict in the cache.
template <int w_step, typename X, typename W>
void gemm_transposed_runs(const Gemm& p, const X* x, const W* w, int64_t first, int64_t last) {
  Scratch tile(p.rows * kTile);
  const int64_t blocks = (p.rows + kXRows - 1) / kXRows;
  const int64_t runs = (kWRows + blocks - 1) / blocks, prefetch_steps = w_step > 1 ? 1 : 2;
  for (; first < last; first += kTile, w += kTile * p.inputs) {
    const int64_t count = min_int(kTile, last - first);
    const bool full_tile = count == kTile;
    const int64_t step = full_tile && w_step == 1 ? kWRows : 1;
    for (int64_t at = 0; at < (full_tile && w_step > 1 ? w_step : count); at += step) {
      const W* rows_of_w = w + at * p.inputs;
      // Prefetch as many rows of w as are multiplied with all rows of x.
      const int64_t stride = w_step * p.inputs;
      int64_t run = 0;
      for_row_blocks<kXRows>(p.rows, [&](auto r, int64_t row) {
        constexpr int R = decltype(r)::value;
        const W* next = rows_of_w + prefetch_steps * step * p.inputs + run % kWRows * stride;
        const RowPrefetch prefetch_rows{reinterpret_cast<const char*>(next),
                                        stride * static_cast<int64_t>(sizeof(W)), runs};
        run += runs;
        const X* rows_of_x = x + row * p.inputs;
        float* sums = tile.data + row * kTile + at;
        if (full_tile)
          dot_rows<R, kWRows, w_step>(rows_of_x, rows_of_w, p.inputs, sums, prefetch_rows);
        else
          dot_rows<R, 1, w_step>(rows_of_x, rows_of_w, p.inputs, sums, prefetch_rows);
      });
    }
    for (int64_t row = 0; row < p.rows; ++row)
      write_outputs(p, row, first, tile.data + row * kTile, count);
  }
}

// Several streams use more memory bandwidth than one. With many rows of x, bandwidth is not the
// limit, and distant rows of w would conflict in the first-level cache.
template <typename X, typename W>
void gemm_transposed_as(const Gemm& p, const X* x, const W* w, int64_t first, int64_t last) {
  (p.rows <= kXRows * kRunBlocks ? gemm_transposed_runs<kTile / kWRows, X, W>
                                 : gemm_transposed_runs<1, X, W>)(p, x, w, first, last);
}

// Dequantize one row of codes.
void dequantize_row(const Gemm& p, int64_t output, float* to) {
  bool half = p.format == Format::kFourBits;
  auto* codes = static_cast<const uint8_t*>(p.w) + output * (half ? p.inputs / 2 : p.inputs);
  for (int64_t i = 0; i < p.inputs; i += p.group) {
    float scale = read_group_param(p, p.scale, i / p.group, output);
    float zero = p.zero.data ? read_group_param(p, p.zero, i / p.group, output) : 0;
    int64_t j = i, end = i + p.group;
    if (half) {
      // Each byte has the even input first, then the odd one.
      for (; j + 2 * kLanes <= end; j += 2 * kLanes) {
        Ints nibbles = load_bytes(codes + j / 2);
        Vec even = (look_up(p.table, nibbles) - zero) * scale;
        Vec odd = (look_up(p.table, nibbles >> 4) - zero) * scale;
        store(to + j, interleave_lanes(even, odd, Constant<0>()));
        store(to + j + kLanes, interleave_lanes(even, odd, Constant<1>()));
      }
      for (; j < end; ++j) to[j] = (p.table[(codes[j / 2] >> (j % 2 * 4)) & 15] - zero) * scale;
    } else {
      bool fp8 = p.format == Format::kFp8;
      auto* full_tile = reinterpret_cast<const int8_t*>(codes);
      for (; j + kLanes <= end; j += kLanes) {
        Vec level = fp8 ? load_fp8(codes + j) : load_elements(full_tile + j);
        store(to + j, (level - zero) * scale);
      }
      for (; j < end; ++j) to[j] = ((fp8 ? convert_fp8(codes[j]) : full_tile[j]) - zero) * scale;
    }
  }
}

void gemm_transposed(const Gemm& p, int64_t first, int64_t last) {
  if (!p.fixed_order && try_gemm_panels(p, first, last)) return;
  int64_t at = first * p.inputs;
#if defined(__AVX512BF16__)
  if (p.x_is_bfloat16 && p.format == Format::kBfloat16)
    return gemm_transposed_as(p, static_cast<const uint16_t*>(p.x),
                              static_cast<const uint16_t*>(p.w) + at, first, last);
#endif
  Float32Rows wide(p);
  if (p.format == Format::kFloat32) {
    gemm_transposed_as(p, wide.x, static_cast<const float*>(p.w) + at, first, last);
  } else if (p.format == Format::kBfloat16) {
    gemm_transposed_as(p, wide.x, static_cast<const uint16_t*>(p.w) + at, first, last);
  } else {
    Scratch weights(kTile * p.inputs);
    for (int64_t tile = first; tile < last; tile += kTile) {
      int64_t count = min_int(kTile, last - tile);
      for (int64_t c = 0; c < count; ++c) dequantize_row(p, tile + c, weights.data + c * p.inputs);
      gemm_transposed_as(p, wide.x, weights.data, tile, tile + count);
    }
  }
}

}  // namespace
}  // namespace ed
