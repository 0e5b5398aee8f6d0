// The product in whole numbers: rows of x in 8 bits by codes of 8 or 4 bits, summed exactly in 32
// bits over each block of inputs of a group, for one level of instructions.
//
// The rows are rounded once for all tasks (`round_row`): each group has a scale. Of codes of four
// bits, which have an even and an odd input in a byte, even inputs come before odd ones. Four codes
// that lie along the inputs are multiplied and added by one instruction, so a tile of the matrix is
// made of such fours first. Few rows need none: whole_few.h, and whole_rows.h where the matrix lies
// transposed.
#pragma once

#include "round.h"

namespace ed {
namespace {

constexpr int64_t kFours = kWhole / 4;

// Four rows of bytes [kTile] as fours [kTile, 4].
ED_INLINE void interleave(const uint8_t* const* rows, uint8_t* to) {
#if defined(__AVX512BW__)
  __m512i r[4];
  for (int j = 0; j < 4; ++j) r[j] = _mm512_loadu_si512(rows[j]);
  __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
  __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  // Quarter l of v[q] has the columns from 16 l + 4 q on: turned, quarter q of vector l.
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

// Codes of inputs [i, i + k) and `count` outputs from `column` on as fours [kFours, kTile, 4]; of
// four bits the even inputs, and from the middle on the odd ones. What is beyond is any number: the
// numbers of x are zero there. The tile that is needed next lies `ahead` bytes behind this one.
void fours(const Product& p, int64_t i, int64_t k, int64_t column, int64_t count, int64_t ahead,
           uint8_t* panel) {
  bool half = p.format == Format::kFourBits;
  int64_t first = half ? i / 2 : i, bytes = half ? (k + 1) / 2 : k;
  auto* w = static_cast<const uint8_t*>(p.w);
  int64_t fours = (bytes + 3) / 4;
  if (p.transposed) {
    int64_t stride = half ? p.inputs / 2 : p.inputs;
    for (int64_t c = 0; c < count; ++c) {
      const uint8_t* from = w + (column + c) * stride + first;
      for (int64_t n = 0; n < bytes / 4; ++n) std::memcpy(panel + (n * kTile + c) * 4, from + 4 * n, 4);
      if (bytes % 4) {
        uint8_t last[4] = {};
        std::memcpy(last, from + bytes / 4 * 4, bytes % 4);
        std::memcpy(panel + (bytes / 4 * kTile + c) * 4, last, 4);
      }
    }
  } else {
    alignas(64) uint8_t copies[4][kTile] = {};
    for (int64_t n = 0; n < fours; ++n) {
      const uint8_t* rows[4];
      for (int64_t j = 0; j < 4; ++j) {
        rows[j] = copies[j];
        if (4 * n + j >= bytes) continue;  // whatever was there
        const uint8_t* from = w + (first + 4 * n + j) * p.outputs + column;
        if (count < kTile)
          std::memcpy(copies[j], from, count);
        else
          rows[j] = from, prefetch(from + ahead);
      }
      interleave(rows, panel + n * 4 * kTile);
    }
  }
  int64_t vectors = fours * 4 * kTile / (kLanes * 4);
  auto* at = reinterpret_cast<char*>(panel);
  for (int64_t v = 0; v < vectors; ++v, at += sizeof(Ints)) {
    Ints codes = load_ints(at);
    if (half) {
      Ints odd = (codes >> 4) & 0x0f0f0f0f;
      std::memcpy(at + kFours / 2 * 4 * kTile, &odd, sizeof odd);
      codes &= 0x0f0f0f0f;
    } else if (kBias) {
      codes ^= static_cast<int32_t>(0x80808080u);
    }
    std::memcpy(at, &codes, sizeof codes);
  }
}

// to += (sum - zero * sum of the row) * scale * scale of the row, for the outputs of a vector.
ED_INLINE void add_scaled(Ints whole_sum, float of_row, float of_zero, const float* scale,
                          const float* zero, float* to) {
  Vec sum = to_numbers(whole_sum);
  if (zero != nullptr) sum -= load(zero) * broadcast(of_zero);
  store(to, load(to) + sum * (broadcast(of_row) * load(scale)));
}

// AVX2 has no instruction that multiplies and adds four bytes, but one for two numbers of 16 bits.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define ED_PAIRS 1
using Number = int16_t;
#else
#define ED_PAIRS 0
using Number = int8_t;
#endif

// The numbers of R rows of x in a block of inputs, as the sums below read them.
template <int R>
struct BlockOfRows {
  BlockOfRows(const Product& p, const Blocks& blocks, int64_t row, int64_t block)
      : stride(blocks.all * blocks.of_block),
        to_odd(blocks.of_part),
        scales(p.row_scale + row * blocks.groups + block / blocks.count),
        groups(blocks.groups),
        row_sums(p.row_sums + row * blocks.all + block),
        all(blocks.all) {
    const int8_t* from = p.numbers + row * stride + block * blocks.of_block;
#if ED_PAIRS
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < blocks.of_block; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i*)(from + r * stride + i));
        _mm256_store_si256((__m256i*)(copies + r * kWhole + i), _mm256_cvtepi8_epi16(bytes));
      }
    numbers = copies, stride = kWhole;
#else
    numbers = from;
#endif
  }

  const Number* numbers;  // of the first row; `stride` lie between two rows
  int64_t stride;
  const int64_t to_odd;  // the numbers of odd inputs lie so far behind those of even ones
  const float* const scales;  // of the rows, each `groups` behind the one before
  const int64_t groups;
  const int32_t* const row_sums;  // of the rows, each `all` behind the one before
  const int64_t all;
#if ED_PAIRS
  alignas(32) int16_t copies[R * kWhole];
#endif
};

#if ED_PAIRS
// acc [R] += the sums of kLanes outputs over `fours` fours of inputs.
template <int R, int V, int lines>
ED_INLINE void add_fours(const Number* x, int64_t x_stride, const uint8_t* w, int64_t fours,
                         Ints (*acc)[V], int c, const char* next) {
  // Two lanes for each output: the sum of the first and of the last two inputs of every four.
  __m256i low[R] = {}, high[R] = {};
  for (int64_t n = 0; n < fours; ++n) {
    auto* codes = (const __m128i*)(w + (n * kTile + c * kLanes) * 4);
    __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes));
    __m256i last = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes + 1));
    ED_UNROLL
    for (int l = 0; l < lines; ++l) prefetch(next + n * 4 * kTile + l * 64);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      int64_t four;
      std::memcpy(&four, x + r * x_stride + 4 * n, 8);
      __m256i numbers = _mm256_set1_epi64x(four);
      low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(first, numbers));
      high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(last, numbers));
      // Otherwise the compiler begins all products first, for which registers do not suffice.
      asm volatile("" : "+x"(low[r]), "+x"(high[r]));
    }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    acc[r][c] += (Ints)_mm256_permute4x64_epi64(_mm256_hadd_epi32(low[r], high[r]), 0xd8);
}
#endif

// sums [R, V vectors] += scale * (acc - zero * sums of numbers) * scale of each row.
template <int R, int V>
ED_INLINE void add_block(const BlockOfRows<R>& x, const Ints (*acc)[V], const float* scale,
                         const float* zero, float* sums, int64_t sums_stride) {
  ED_UNROLL
  for (int r = 0; r < R; ++r) {
    float of_row = x.scales[r * x.groups];
    float of_zero = x.row_sums[r * x.all];
    ED_UNROLL
    for (int c = 0; c < V; ++c)
      add_scaled(acc[r][c], of_row, of_zero, scale + c * kLanes, zero ? zero + c * kLanes : zero,
                 sums + r * sums_stride + c * kLanes);
  }
}

// sums [R, V vectors] += scale * (numbers times w - zero * sums of numbers) * scale of each row. The
// codes have `halves`, and are `stored` as they are, or biased by `fours`. Of each four, `lines` are
// fetched from `next` on.
template <int R, int V = kVectors, bool stored = false, int lines = 0>
void multiply_whole(const BlockOfRows<R>& of_rows, int64_t halves, int64_t bytes, const uint8_t* w,
                    const float* scale, const float* zero, float* sums, int64_t sums_stride,
                    const char* next = nullptr) {
  int bias = halves == 1 ? kBias : 0;
  Ints acc[R][V];
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < V; ++c) acc[r][c] = Ints{} - bias * of_rows.row_sums[r * of_rows.all];
  for (int64_t half = 0; half < halves; ++half) {
    const Number* x = of_rows.numbers + half * of_rows.to_odd;
    const uint8_t* panel = w + half * (kFours / 2) * 4 * kTile;
    int64_t fours = (bytes + 3) / 4;
#if ED_PAIRS
    add_fours<R, V, lines>(x, of_rows.stride, panel, fours, acc, 0, next);
    ED_UNROLL
    for (int c = 1; c < V; ++c)
      add_fours<R, V, 0>(x, of_rows.stride, panel, fours, acc, c, nullptr);
#else
    for (int64_t n = 0; n < fours; ++n) {
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
        std::memcpy(&number, x + r * of_rows.stride + 4 * n, 4);
        ED_UNROLL
        for (int c = 0; c < V; ++c) acc[r][c] = dot_of_bytes(acc[r][c], column[c], number);
      }
    }
#endif
  }
  add_block<R, V>(of_rows, acc, scale, zero, sums, sums_stride);
}

// The outputs [first, last), for any number of rows: tiles of the matrix as fours.
void whole_in_tiles(const Product& p, int64_t first, int64_t last) {
  int64_t width = (last - first + kTile - 1) / kTile * kTile;
  Scratch sums(p.rows * width), panel(kWhole * kTile / 4);
  std::memset(sums.data, 0, p.rows * width * sizeof(float));
  auto* w = reinterpret_cast<uint8_t*>(panel.data);
  TileNumbers of_scale, of_zero;
  Blocks blocks(p);
  for (int64_t block = 0; block < blocks.all; ++block) {
    int64_t group = block / blocks.count, in_group = block % blocks.count * kWhole;
    int64_t k = least(kWhole, p.group - in_group);
    for (int64_t column = first; column < last; column += kTile) {
      int64_t count = least(kTile, last - column);
      // Few rows leave little time between tiles, whose rows lie far apart in memory.
      int64_t next_block = k / blocks.halves * p.outputs - (column - first);
      int64_t ahead = column + kTile < last ? kTile : next_block;
      fours(p, group * p.group + in_group, k, column, count, ahead, w);
      const float* scale = of_scale.get(p, p.scale, group, column, count);
      const float* zero = of_zero.get(p, p.zero, group, column, count);
      row_blocks<kRows>(p.rows, [&](auto r, int64_t row) {
        BlockOfRows<decltype(r)::value> of_rows(p, blocks, row, block);
        for (int64_t c = 0; c < count; c += kBlock)
          multiply_whole<decltype(r)::value>(of_rows, blocks.halves, k / blocks.halves, w + 4 * c,
                                             scale + c, zero ? zero + c : zero,
                                             sums.data + row * width + column - first + c, width);
      });
    }
  }
  for (int64_t r = 0; r < p.rows; ++r) write(p, r, first, sums.data + r * width, last - first);
}

}  // namespace
}  // namespace ed
