// Product of int8 rows with a transposed matrix [outputs, inputs], for one level. An output is a
// dot product of two contiguous rows, so no codes are interleaved.
#pragma once

#include "int8_gemm_packed.h"
#include "int8_gemv.h"

namespace ed {
namespace {

constexpr int kOutputsAtOnce = 4;

// acc [R, q] += a vector of codes of output q times R rows of x. The odd inputs follow after
// `odd_offset` bytes.
template <int R, int Q, bool four_bits>
ED_INLINE void add_codes(Ints codes, int q, const int8_t* x, int64_t x_stride, int64_t odd_offset,
                         Ints (*acc)[Q]) {
  Ints odd = (codes >> 4) & 0x0f0f0f0f;
  if (four_bits) codes &= 0x0f0f0f0f;
  if (!four_bits && kBias) codes ^= static_cast<int32_t>(0x80808080u);
  ED_UNROLL
  for (int r = 0; r < R; ++r) {
    const int8_t* x_int8 = x + r * x_stride;
    acc[r][q] = dot_bytes(acc[r][q], codes, load_ints(x_int8));
    if (four_bits) acc[r][q] = dot_bytes(acc[r][q], odd, load_ints(x_int8 + odd_offset));
  }
}

// acc [R, Q] += the products of R rows of x with Q rows of codes, over one block of inputs.
template <int R, int Q, bool four_bits>
ED_INLINE void dot_byte_rows(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t w_stride,
                             int64_t bytes, int64_t odd_offset, Ints (*acc)[Q]) {
  constexpr int64_t kBytes = kLanes * 4;
  auto add = [&](int64_t i, const uint8_t* from, int64_t stride) __attribute__((always_inline)) {
    ED_UNROLL
    for (int q = 0; q < Q; ++q)
      add_codes<R, Q, four_bits>(load_ints(from + q * stride), q, x + i, x_stride, odd_offset, acc);
  };
  int64_t i = 0;
  for (; i + kBytes <= bytes; i += kBytes) add(i, w + i, w_stride);
  if (i == bytes) return;
  alignas(64) uint8_t padded[Q][kBytes] = {};  // x is zero there
  for (int q = 0; q < Q; ++q) std::memcpy(padded[q], w + q * w_stride + i, bytes - i);
  add(i, padded[0], kBytes);
}

#if defined(__AVX512F__)
// Sum each quarter of the lanes of four vectors.
ED_INLINE __m512i sum_quarters(const Ints* v) {
  auto a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
  __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

ED_INLINE void store_quad(int32_t* to, __m128i x_int8) { std::memcpy(to, &x_int8, 16); }
#endif

// Sum each of P equal parts of the lanes of Q vectors; part j is stored at to + j * stride.
template <int Q, int P>
ED_INLINE void reduce_int_sums(const Ints* v, int32_t* to, int64_t stride) {
#if defined(__AVX512F__)
  if constexpr (Q == 4) {
    __m512i sums = sum_quarters(v);
    if (P < 4) sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0xb1));
    if (P < 2) sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0x4e));
    store_quad(to, _mm512_castsi512_si128(sums));
    if (P > 1) store_quad(to + stride, _mm512_extracti32x4_epi32(sums, P == 2 ? 2 : 1));
    if (P > 2) store_quad(to + 2 * stride, _mm512_extracti32x4_epi32(sums, 2));
    if (P > 2) store_quad(to + 3 * stride, _mm512_extracti32x4_epi32(sums, 3));
    return;
  }
#endif
  for (int j = 0; j < P; ++j)
    for (int q = 0; q < Q; ++q) {
      int32_t sum = 0;
      for (int l = 0; l < kLanes / P; ++l) sum += v[q][kLanes / P * j + l];
      to[j * stride + q] = sum;
    }
}

// A block of inputs by Q outputs, for R rows.
template <int R, int Q, bool four_bits>
void dot_block(const Gemm& p, int64_t row, int64_t block, int64_t output, int32_t* to) {
  QuantBlocks blocks(p);
  int64_t all = blocks.block_count, stride = p.inputs / blocks.codes_per_byte;
  int64_t group_offset = block % blocks.per_group * kBlockInputs;
  int64_t first = block / blocks.per_group * p.group + group_offset;
  int64_t bytes = (min_int(kBlockInputs, p.group - group_offset) + blocks.codes_per_byte - 1) /
                  blocks.codes_per_byte;
  auto* w = static_cast<const uint8_t*>(p.w) + output * stride + first / blocks.codes_per_byte;
  Ints acc[R][Q] = {};
  dot_byte_rows<R, Q, four_bits>(p.x_int8 + (row * all + block) * blocks.block_bytes,
                                 all * blocks.block_bytes, w, stride, bytes, blocks.part_bytes,
                                 acc);
  ED_UNROLL
  for (int r = 0; r < R; ++r) reduce_int_sums<Q, 1>(acc[r], to + r * kTile, 0);
}

// Groups of few codes: P groups are in a vector. Computes their sums [P, kInt8GemvRows, kTile],
// from `group` on.
template <int R, int P, bool four_bits>
void dot_groups(const Gemm& p, int64_t row, int64_t group, int64_t column, int64_t count,
                int32_t* to) {
  constexpr int64_t kBytes = kLanes * 4, kPart = kBytes / P;
  const QuantBlocks blocks(p);
  int64_t groups = blocks.groups, valid_groups = min_int(P, groups - group);
  int64_t stride = groups * kPart;
  alignas(64) int8_t x[2][R][kBytes] = {};  // zero for groups beyond the last one
  for (int r = 0; r < R; ++r)
    for (int64_t j = 0; j < valid_groups; ++j) {
      const int8_t* from = p.x_int8 + ((row + r) * groups + group + j) * blocks.block_bytes;
      std::memcpy(x[0][r] + j * kPart, from, kPart);
      if (four_bits) std::memcpy(x[1][r] + j * kPart, from + blocks.part_bytes, kPart);
    }
  auto* w = static_cast<const uint8_t*>(p.w) + column * stride + group * kPart;
  auto all = [&](auto codes_at) __attribute__((always_inline)) {
    for (int64_t c = 0; c < count; c += 4) {
      Ints acc[R][4] = {};
      ED_UNROLL
      for (int q = 0; q < 4; ++q) {
        const uint8_t* from = w + min_int(c + q, count - 1) * stride;
        prefetch(from + kTile * stride);
        add_codes<R, 4, four_bits>(codes_at(from), q, x[0][0], kBytes, R * kBytes, acc);
      }
      ED_UNROLL
      for (int r = 0; r < R; ++r)
        reduce_int_sums<4, P>(acc[r], to + r * kTile + c, kInt8GemvRows * kTile);
    }
  };
  if (valid_groups == P) return all([](const uint8_t* from) { return load_ints(from); });
  all([&](const uint8_t* from) {
    alignas(64) uint8_t padded[kBytes] = {};
    std::memcpy(padded, from, valid_groups * kPart);
    return load_ints(padded);
  });
}

// Few rows of x. P groups of codes fill a vector; P = 1: a block of inputs fills one or more
// vectors.
template <int P, bool four_bits>
void int8_gemm_rows(const Gemm& p, int64_t first, int64_t last) {
  QuantBlocks blocks(p);
  int64_t groups = blocks.groups, all = blocks.block_count;
  TileParams scale_params, zero_params;
  alignas(64) int32_t int_sums[P * kInt8GemvRows * kTile] = {};
  alignas(64) float sums[kInt8GemvRows * kTile];
  for (int64_t column = first; column < last; column += kTile) {
    int64_t count = min_int(kTile, last - column);
    std::memset(sums, 0, sizeof sums);
    for (int64_t block = 0; block < all; ++block) {
      if (block % P == 0)
        for_row_blocks<4>(p.rows, [&](auto r, int64_t row) {
          constexpr int R = decltype(r)::value;
          int32_t* to = int_sums + row * kTile;
          if constexpr (P > 1) return dot_groups<R, P, four_bits>(p, row, block, column, count, to);
          auto dot_outputs = [&](auto q, int64_t c) {
            constexpr int Q = decltype(q)::value;
            dot_block<R, Q, four_bits>(p, row, block, column + c, to + c);
          };
          int64_t c = 0;
          for (; c + kOutputsAtOnce <= count; c += kOutputsAtOnce)
            dot_outputs(Constant<kOutputsAtOnce>(), c);
          for (; c < count; ++c) dot_outputs(Constant<1>(), c);
        });
      int64_t group = block / blocks.per_group;
      const float* scale = scale_params.get(p, p.scale, group, column, count);
      const float* zero = zero_params.get(p, p.zero, group, column, count);
      for (int64_t row = 0; row < p.rows; ++row) {
        float row_scale = p.row_scale[row * groups + group];
        int32_t row_sum = p.row_sums[row * all + block];
        Ints bias = Ints{} + (four_bits ? 0 : kBias) * row_sum;
        const int32_t* from = int_sums + (block % P * kInt8GemvRows + row) * kTile;
        for (int64_t v = 0; v < kTile; v += kLanes)
          add_scaled(load_ints(from + v) - bias, row_scale, row_sum, scale + v,
                     zero ? zero + v : zero, sums + row * kTile + v);
      }
    }
    for (int64_t row = 0; row < p.rows; ++row)
      write_outputs(p, row, column, sums + row * kTile, count);
  }
}

// Select the kernel of few rows for the size of groups; null = none.
template <bool four_bits>
GemmKernel select_int8_kernel(const Gemm& p) {
  int64_t bytes = p.group / (four_bits ? 2 : 1);
  if (bytes >= kLanes * 4) return int8_gemm_rows<1, four_bits>;
  if (bytes == kLanes * 2) return int8_gemm_rows<2, four_bits>;
  if (bytes == kLanes) return int8_gemm_rows<4, four_bits>;
  return nullptr;
}

// Product of int8 rows. Sums are exact within a block of inputs, and all kernels scale the blocks
// in the same order, so all kernels return equal numbers.
void int8_gemm(const Gemm& p, int64_t first, int64_t last) {
  if (p.packed) return int8_gemm_packed(p, first, last);
  if (p.transposed && p.rows <= kInt8GemvRows) {
    bool four_bits = p.format == Format::kFourBits;
    if (auto kernel = four_bits ? select_int8_kernel<true>(p) : select_int8_kernel<false>(p))
      return kernel(p, first, last);
  }
  int64_t count = !p.transposed && fits_int8_gemv(p) ? (last - first) / kTile * kTile : 0;
  if (count > 0) int8_gemv(p, first, count);
  if (first + count < last) int8_gemm_tiles(p, first + count, last);
}

}  // namespace
}  // namespace ed
