// Product of few int8 rows, for one level. Memory bandwidth is the limit, and long sequential reads
// are the fastest. So the sums of a block of inputs stay in the first-level cache.
#pragma once

#include "int8_gemm.h"

namespace ed {
namespace {

constexpr int64_t kInt8GemvRows = 8;

// sums [R, count] = the products of one block of inputs with full tiles of outputs from `first` on.
template <int R, bool four_bits>
void sum_block(const Gemm& p, int64_t row, int64_t block, int64_t first, int64_t count,
               int32_t* sums) {
  QuantBlocks blocks(p);
  int64_t group = block / blocks.per_group, group_offset = block % blocks.per_group * kBlockInputs;
  int64_t block_count = blocks.block_count;
  int64_t bytes = min_int(kBlockInputs, p.group - group_offset) / blocks.codes_per_byte;
  const int8_t* x = p.x_int8 + (row * block_count + block) * blocks.block_bytes;
  auto* w = static_cast<const uint8_t*>(p.w) +
            (group * p.group + group_offset) / blocks.codes_per_byte * p.outputs + first;
  for (int r = 0; r < R; ++r) {
    int32_t bias = four_bits ? 0 : kBias * p.row_sums[(row + r) * block_count + block];
    for (int64_t c = 0; c < count; ++c) sums[r * count + c] = -bias;
  }
  auto sum_quads = [&](auto quad_count, int64_t n) __attribute__((always_inline)) {
    constexpr int N = decltype(quad_count)::value;  // quads of inputs per iteration
    const int64_t ahead = get_prefetch_rows(4 * N, count) * p.outputs;
    int32_t x_quads[2][R][N];  // of x; also of odd inputs if a byte has two codes
    ED_UNROLL
    for (int r = 0; r < R; ++r)
      ED_UNROLL
      for (int j = 0; j < N; ++j) {
        const int8_t* from = x + r * block_count * blocks.block_bytes + 4 * (n + j);
        std::memcpy(&x_quads[0][r][j], from, 4);
        if (four_bits) std::memcpy(&x_quads[1][r][j], from + blocks.part_bytes, 4);
      }
    for (int64_t c = 0; c < count; c += kTile) {
      alignas(64) uint8_t quads[N][4 * kTile];
      ED_UNROLL
      for (int j = 0; j < N; ++j) {
        const uint8_t* rows[4];
        for (int i = 0; i < 4; ++i) {
          rows[i] = w + (4 * (n + j) + i) * p.outputs + c;
          prefetch(rows[i] + ahead);
        }
        interleave(rows, quads[j]);
      }
      for (int64_t v = 0; v < kTile; v += kLanes) {
        int32_t* to = sums + c + v;
        Ints acc[R];
        ED_UNROLL
        for (int r = 0; r < R; ++r) acc[r] = load_ints(to + r * count);
        ED_UNROLL
        for (int j = 0; j < N; ++j) {
          Ints codes = load_ints(quads[j] + 4 * v);
          Ints odd = (codes >> 4) & 0x0f0f0f0f;
          if (four_bits) codes &= 0x0f0f0f0f;
          if (!four_bits && kBias) codes ^= static_cast<int32_t>(0x80808080u);
          ED_UNROLL
          for (int r = 0; r < R; ++r) {
            acc[r] = dot_bytes(acc[r], codes, x_quads[0][r][j]);
            if (four_bits) acc[r] = dot_bytes(acc[r], odd, x_quads[1][r][j]);
          }
        }
        ED_UNROLL
        for (int r = 0; r < R; ++r) std::memcpy(to + r * count, &acc[r], sizeof acc[r]);
      }
    }
  };
  int64_t n = 0;
  for (; n + 4 <= bytes / 4; n += 4) sum_quads(Constant<4>(), n);
  for (; n < bytes / 4; ++n) sum_quads(Constant<1>(), n);
}

// Return whether the rows are few, and blocks of inputs are full quads.
inline bool fits_int8_gemv(const Gemm& p) {
  return p.rows <= kInt8GemvRows && p.group % (4 * QuantBlocks(p).codes_per_byte) == 0;
}

// Prefetch the parameters of a group, if the group exists.
inline void prefetch_params(const Gemm& p, const GroupParams& x_quads, int64_t group, int64_t first,
                            int64_t count) {
  if (x_quads.data == nullptr || group * p.group >= p.inputs) return;
  int64_t byte_width = get_byte_width(x_quads.kind);
  auto* from = static_cast<const char*>(x_quads.data) + (group * p.outputs + first) * byte_width;
  for (int64_t i = 0; i < count * byte_width; i += 64) prefetch(from + i);
}

// Full tiles of outputs from `first` on.
void int8_gemv(const Gemm& p, int64_t first, int64_t count) {
  QuantBlocks blocks(p);
  int64_t groups = blocks.groups, block_count = blocks.block_count;
  Scratch sums(p.rows * count), scratch(p.rows * count);
  std::memset(sums.data, 0, p.rows * count * sizeof(float));
  auto* int_sums = reinterpret_cast<int32_t*>(scratch.data);
  TileParams scale_params, zero_params;
  for (int64_t block = 0; block < block_count; ++block) {
    int64_t group = block / blocks.per_group;
    prefetch_params(p, p.scale, group + 2, first, count);
    prefetch_params(p, p.zero, group + 2, first, count);
    for_row_blocks<4>(p.rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      auto* to = int_sums + row * count;
      if (blocks.codes_per_byte == 2)
        sum_block<R, true>(p, row, block, first, count, to);
      else
        sum_block<R, false>(p, row, block, first, count, to);
    });
    for (int64_t c = 0; c < count; c += kTile) {
      const float* scale = scale_params.get(p, p.scale, group, first + c, kTile);
      const float* zero = zero_params.get(p, p.zero, group, first + c, kTile);
      for (int64_t row = 0; row < p.rows; ++row) {
        float row_scale = p.row_scale[row * groups + group];
        float row_sum = p.row_sums[row * block_count + block];
        for (int64_t v = 0; v < kTile; v += kLanes) {
          int64_t at = row * count + c + v;
          add_scaled(load_ints(int_sums + at), row_scale, row_sum, scale + v,
                     zero ? zero + v : zero, sums.data + at);
        }
      }
    }
  }
  for (int64_t r = 0; r < p.rows; ++r) write_outputs(p, r, first, sums.data + r * count, count);
}

}  // namespace
}  // namespace ed
