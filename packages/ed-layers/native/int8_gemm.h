// Product of int8 rows with codes of 8 or 4 bits, for one level. Sums are exact in 32 bits over
// each block of inputs of a group.
//
// `quantize_row` quantizes the rows once for all tasks; each group has a scale. With four-bit
// codes, a byte has an even and an odd input, and the even inputs are stored before the odd ones.
// One instruction multiplies and adds four codes along the inputs, so the kernel first packs a tile
// of the matrix into quads of codes. Few rows need no quads: see int8_gemv.h, and
// int8_gemm_transposed.h for a transposed matrix.
#pragma once

#include "quantize_rows.h"

namespace ed {
namespace {

constexpr int64_t kBlockQuads = kBlockInputs / 4;

// Interleave four rows of bytes [kTile] to quads [kTile, 4].
ED_INLINE void interleave(const uint8_t* const* rows, uint8_t* to) {
#if defined(__AVX512BW__)
  __m512i r[4];
  for (int j = 0; j < 4; ++j) r[j] = _mm512_loadu_si512(rows[j]);
  __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
  __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  // Quarter l of v[q] has the columns from 16 l + 4 q on; transposed, quarter q of vector l.
  __m512i v[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c),
                  _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)};
  __m512i e = _mm512_shuffle_i32x4(v[0], v[1], 0x44), f = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
  __m512i g = _mm512_shuffle_i32x4(v[0], v[1], 0xee), h = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
  _mm512_store_si512(to, _mm512_shuffle_i32x4(e, f, 0x88));
  _mm512_store_si512(to + 64, _mm512_shuffle_i32x4(e, f, 0xdd));
  _mm512_store_si512(to + 128, _mm512_shuffle_i32x4(g, h, 0x88));
  _mm512_store_si512(to + 192, _mm512_shuffle_i32x4(g, h, 0xdd));
#else
  for (int64_t c = 0; c < kTile; ++c)
    for (int j = 0; j < 4; ++j) to[4 * c + j] = rows[j][c];
#endif
}

// Pack the codes of inputs [i, i + k) and `count` outputs from `column` on into quads [kBlockQuads,
// kTile, 4]. With four bits, the even inputs are first, and the odd inputs start in the middle.
// Other quads have any value, because the numbers of x are zero there. The next tile starts `ahead`
// bytes after this one.
void pack_quads(const Gemm& p, int64_t i, int64_t k, int64_t column, int64_t count, int64_t ahead,
                uint8_t* panel) {
  bool four_bits = p.format == Format::kFourBits;
  int64_t first = four_bits ? i / 2 : i, bytes = four_bits ? (k + 1) / 2 : k;
  auto* w = static_cast<const uint8_t*>(p.w);
  int64_t quads = (bytes + 3) / 4;
  if (p.transposed) {
    int64_t stride = four_bits ? p.inputs / 2 : p.inputs;
    for (int64_t c = 0; c < count; ++c) {
      const uint8_t* from = w + (column + c) * stride + first;
      for (int64_t n = 0; n < bytes / 4; ++n)
        std::memcpy(panel + (n * kTile + c) * 4, from + 4 * n, 4);
      if (bytes % 4) {
        uint8_t last[4] = {};
        std::memcpy(last, from + bytes / 4 * 4, bytes % 4);
        std::memcpy(panel + (bytes / 4 * kTile + c) * 4, last, 4);
      }
    }
  } else {
    alignas(64) uint8_t copies[4][kTile] = {};
    for (int64_t n = 0; n < quads; ++n) {
      const uint8_t* rows[4];
      for (int64_t j = 0; j < 4; ++j) {
        rows[j] = copies[j];
        if (4 * n + j >= bytes) continue;  // any value
        const uint8_t* from = w + (first + 4 * n + j) * p.outputs + column;
        if (count < kTile)
          std::memcpy(copies[j], from, count);
        else
          rows[j] = from, prefetch(from + ahead);
      }
      interleave(rows, panel + n * 4 * kTile);
    }
  }
  int64_t vectors = quads * 4 * kTile / (kLanes * 4);
  auto* at = reinterpret_cast<char*>(panel);
  for (int64_t v = 0; v < vectors; ++v, at += sizeof(Ints)) {
    Ints codes = load_ints(at);
    if (four_bits) {
      Ints odd = (codes >> 4) & 0x0f0f0f0f;
      std::memcpy(at + kBlockQuads / 2 * 4 * kTile, &odd, sizeof odd);
      codes &= 0x0f0f0f0f;
    } else if (kBias) {
      codes ^= static_cast<int32_t>(0x80808080u);
    }
    std::memcpy(at, &codes, sizeof codes);
  }
}

// to += (sum - zero * sum of the row) * scale * scale of the row, for the outputs of a vector.
ED_INLINE void add_scaled(Ints int_sum, float row_scale, float row_sum, const float* scale,
                          const float* zero, float* to) {
  Vec sum = convert_to_float(int_sum);
  if (zero != nullptr) sum -= load(zero) * broadcast(row_sum);
  store(to, load(to) + sum * (broadcast(row_scale) * load(scale)));
}

// AVX2 has no instruction that multiplies and adds four bytes. One instruction multiplies and adds
// two numbers of 16 bits.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define ED_INT16_PAIRS 1
using LhsElement = int16_t;
#else
#define ED_INT16_PAIRS 0
using LhsElement = int8_t;
#endif

// R rows of x in a block of inputs, in the layout that the loops below read.
template <int R>
struct LhsBlock {
  LhsBlock(const Gemm& p, const QuantBlocks& blocks, int64_t row, int64_t block)
      : stride(blocks.block_count * blocks.block_bytes),
        odd_offset(blocks.part_bytes),
        scales(p.row_scale + row * blocks.groups + block / blocks.per_group),
        groups(blocks.groups),
        row_sums(p.row_sums + row * blocks.block_count + block),
        block_count(blocks.block_count) {
    const int8_t* from = p.x_int8 + row * stride + block * blocks.block_bytes;
#if ED_INT16_PAIRS
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < blocks.block_bytes; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i*)(from + r * stride + i));
        _mm256_store_si256((__m256i*)(copies + r * kBlockInputs + i), _mm256_cvtepi8_epi16(bytes));
      }
    x_int8 = copies, stride = kBlockInputs;
#else
    x_int8 = from;
#endif
  }

  const LhsElement* x_int8;  // of the first row; `stride` is the distance of rows
  int64_t stride;
  const int64_t odd_offset;   // distance from even inputs to odd inputs
  const float* const scales;  // of the rows, with a stride of `groups`
  const int64_t groups;
  const int32_t* const row_sums;  // of the rows, with a stride of `block_count`
  const int64_t block_count;
#if ED_INT16_PAIRS
  alignas(32) int16_t copies[R * kBlockInputs];
#endif
};

#if ED_INT16_PAIRS
// acc [R] += the sums of kLanes outputs over `quads` quads of inputs.
template <int R, int V, int lines>
ED_INLINE void dot_quads(const LhsElement* x, int64_t x_stride, const uint8_t* w, int64_t quads,
                         Ints (*acc)[V], int c, const char* next) {
  // Two lanes for each output: the sum of the first two and of the last two inputs of every quad.
  __m256i low[R] = {}, high[R] = {};
  for (int64_t n = 0; n < quads; ++n) {
    auto* codes = (const __m128i*)(w + (n * kTile + c * kLanes) * 4);
    __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes));
    __m256i last = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes + 1));
    ED_UNROLL
    for (int l = 0; l < lines; ++l) prefetch(next + n * 4 * kTile + l * 64);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      int64_t four;
      std::memcpy(&four, x + r * x_stride + 4 * n, 8);
      __m256i x_int8 = _mm256_set1_epi64x(four);
      low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(first, x_int8));
      high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(last, x_int8));
      // Without this barrier, the compiler starts all products first and spills registers.
      asm volatile("" : "+x"(low[r]), "+x"(high[r]));
    }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    acc[r][c] += (Ints)_mm256_permute4x64_epi64(_mm256_hadd_epi32(low[r], high[r]), 0xd8);
}
#endif

// sums [R, V vectors] += scale * (acc - zero * sums of x) * scale of each row.
template <int R, int V>
ED_INLINE void add_block(const LhsBlock<R>& x, const Ints (*acc)[V], const float* scale,
                         const float* zero, float* sums, int64_t sums_stride) {
  ED_UNROLL
  for (int r = 0; r < R; ++r) {
    float row_scale = x.scales[r * x.groups];
    float row_sum = x.row_sums[r * x.block_count];
    ED_UNROLL
    for (int c = 0; c < V; ++c)
      add_scaled(acc[r][c], row_scale, row_sum, scale + c * kLanes, zero ? zero + c * kLanes : zero,
                 sums + r * sums_stride + c * kLanes);
  }
}

// sums [R, V vectors] += scale * (x * w - zero * sums of x) * scale of each row. `stored`: the
// codes are unchanged; otherwise `pack_quads` added kBias. `lines` cache lines of each quad are
// prefetched from `next` on.
template <int R, int V = kVectors, bool stored = false, int lines = 0>
void multiply_int8_block(const LhsBlock<R>& lhs, int64_t codes_per_byte, int64_t bytes,
                         const uint8_t* w, const float* scale, const float* zero, float* sums,
                         int64_t sums_stride, const char* next = nullptr) {
  int bias = codes_per_byte == 1 ? kBias : 0;
  Ints acc[R][V];
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < V; ++c) acc[r][c] = Ints{} - bias * lhs.row_sums[r * lhs.block_count];
  for (int64_t part = 0; part < codes_per_byte; ++part) {
    const LhsElement* x = lhs.x_int8 + part * lhs.odd_offset;
    const uint8_t* panel = w + part * (kBlockQuads / 2) * 4 * kTile;
    int64_t quads = (bytes + 3) / 4;
#if ED_INT16_PAIRS
    dot_quads<R, V, lines>(x, lhs.stride, panel, quads, acc, 0, next);
    ED_UNROLL
    for (int c = 1; c < V; ++c) dot_quads<R, V, 0>(x, lhs.stride, panel, quads, acc, c, nullptr);
#else
    for (int64_t n = 0; n < quads; ++n) {
      Ints column[V];
      ED_UNROLL
      for (int c = 0; c < V; ++c) {
        column[c] = load_ints(panel + (n * kTile + c * kLanes) * 4);
        if (stored && kBias) column[c] ^= static_cast<int32_t>(0x80808080u);
      }
      ED_UNROLL
      for (int l = 0; l < lines; ++l) prefetch(next + n * 4 * kTile + l * 64);
      ED_UNROLL
      for (int r = 0; r < R; ++r) {
        int32_t number;
        std::memcpy(&number, x + r * lhs.stride + 4 * n, 4);
        ED_UNROLL
        for (int c = 0; c < V; ++c) acc[r][c] = dot_bytes(acc[r][c], column[c], number);
      }
    }
#endif
  }
  add_block<R, V>(lhs, acc, scale, zero, sums, sums_stride);
}

// The outputs [first, last), for any number of rows, by tiles of quads.
void int8_gemm_tiles(const Gemm& p, int64_t first, int64_t last) {
  int64_t width = (last - first + kTile - 1) / kTile * kTile;
  Scratch sums(p.rows * width), panel(kBlockInputs * kTile / 4);
  std::memset(sums.data, 0, p.rows * width * sizeof(float));
  auto* w = reinterpret_cast<uint8_t*>(panel.data);
  TileParams scale_params, zero_params;
  QuantBlocks blocks(p);
  for (int64_t block = 0; block < blocks.block_count; ++block) {
    int64_t group = block / blocks.per_group,
            group_offset = block % blocks.per_group * kBlockInputs;
    int64_t k = min_int(kBlockInputs, p.group - group_offset);
    for (int64_t column = first; column < last; column += kTile) {
      int64_t count = min_int(kTile, last - column);
      // Few rows take little time between tiles, whose rows are strided in memory.
      int64_t next_block = k / blocks.codes_per_byte * p.outputs - (column - first);
      int64_t ahead = column + kTile < last ? kTile : next_block;
      pack_quads(p, group * p.group + group_offset, k, column, count, ahead, w);
      const float* scale = scale_params.get(p, p.scale, group, column, count);
      const float* zero = zero_params.get(p, p.zero, group, column, count);
      for_row_blocks<kRows>(p.rows, [&](auto r, int64_t row) {
        LhsBlock<decltype(r)::value> lhs(p, blocks, row, block);
        for (int64_t c = 0; c < count; c += kBlock)
          multiply_int8_block<decltype(r)::value>(
              lhs, blocks.codes_per_byte, k / blocks.codes_per_byte, w + 4 * c, scale + c,
              zero ? zero + c : zero, sums.data + row * width + column - first + c, width);
      });
    }
  }
  for (int64_t r = 0; r < p.rows; ++r)
    write_outputs(p, r, first, sums.data + r * width, last - first);
}

}  // namespace
}  // namespace ed
