// Parts of attention, for one level: small products, blocks of keys and values, and masks.
#pragma once

#include "panels.h"

namespace ed {
namespace {

constexpr int64_t kBlockQueries = 64;  // rows of a block of queries
constexpr int64_t kFewQueries = 8;     // up to this number of rows, keys are read in place
constexpr float kMinusInfinity = -__builtin_inff();

inline int64_t round_up_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// to [R, C vectors] += a [R, k] times the rows b[0], b[1] .. [C vectors] from `column` on; =
// without `add`. a and b have words, such as Float32Words.
template <typename Words, int R, int C>
void accumulate_block(const float* a, int64_t a_row, int64_t a_step, const float* const* b,
                      int64_t column, int64_t k, float* to, int64_t stride, bool add) {
  Vec acc[R][C];
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < C; ++c)
      acc[r][c] = add ? load(to + r * stride + column + c * kLanes) : Vec{};
  for (int64_t i = 0; i < k; ++i) {
    const float* from = b[i] + column;
    Vec row[C];
    ED_UNROLL
    for (int c = 0; c < C; ++c) row[c] = load(from + c * kLanes);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec word = broadcast_bits(a[r * a_row + i * a_step]);
      ED_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = Words::add(acc[r][c], word, row[c]);
    }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < C; ++c) store(to + r * stride + column + c * kLanes, acc[r][c]);
}

// to [rows, width] += a [rows, k], strided, times rows b; = without `add`. The width is a multiple
// of kLanes.
template <typename Words>
ED_NOINLINE void accumulate(const float* a, int64_t a_row, int64_t a_step, int64_t rows,
                            const float* const* b, int64_t k, int64_t width, float* to,
                            int64_t stride, bool add = true) {
  for_row_blocks<kRows>(rows, [&](auto r, int64_t at) {
    constexpr int R = decltype(r)::value;
    const float* a_rows = a + at * a_row;
    float* sums = to + at * stride;
    int64_t c = 0;
    for (; c + kBlock <= width; c += kBlock)
      accumulate_block<Words, R, kVectors>(a_rows, a_row, a_step, b, c, k, sums, stride, add);
    for (; c < width; c += kLanes)
      accumulate_block<Words, R, 1>(a_rows, a_row, a_step, b, c, k, sums, stride, add);
  });
}

// Slots [first, first + count) of a row and head. Slot `first + skipped` replaces the slots before
// it, which no query sees.
struct SlotRange {
  // The index of the first number of slot `first + i`, and the index of its row or page.
  struct Position {
    int64_t number, row, slot;
  };
  // Call `f(i, Position)` for each slot that is read, in order.
  template <typename F>
  ED_INLINE void for_slots(const AttentionArgs& p, const SlotArray& from, const F& f) const {
    int64_t i = max_int(0, skipped), slot = first + i;
    if (!p.pages) {
      for (; i < count; ++i, ++slot)
        f(i, Position{row * from.row + head * from.head + slot * from.slot, row, slot});
      return;
    }
    const int32_t* page = p.pages + row * p.pages_of_row + slot / p.page_size;
    for (slot %= p.page_size; i < count; slot = 0, ++page) {
      const int64_t numbers = *page * from.row + head * from.head;
      for (; slot < p.page_size && i < count; ++i, ++slot)
        f(i, Position{numbers + slot * from.slot, *page, slot});
    }
  }

  int64_t row, head, first, count, skipped;
};

// Prefetch the keys or values of a block, `dim` numbers of each slot.
inline void prefetch_kv(const AttentionArgs& p, const SlotArray& from, int64_t dim,
                        const SlotRange& range) {
  const int64_t size = get_byte_width(from.kind);
  range.for_slots(p, from, [&](int64_t, const SlotRange::Position& at) {
    const char* numbers = static_cast<const char*>(from.data) + at.number * size;
    for (int64_t byte = 0; byte < dim * size; byte += 64) prefetch(numbers + byte);
  });
}

inline void prefetch_kv(const AttentionArgs& p, const SlotRange& range) {
  prefetch_kv(p, p.keys, p.key_dim, range), prefetch_kv(p, p.values, p.value_dim, range);
}

// Rows of float32 numbers, [count][`dim` rounded up to vectors]: in place, or copies.
struct Block {
  explicit Block(int64_t dim) : dim(dim), width(round_up_lanes(dim)), copies(kBlockKeys * width) {}

  void read(const AttentionArgs& p, const SlotArray& from, const SlotRange& range) {
    range.for_slots(p, from, [&](int64_t i, const SlotRange::Position& position) {
      const auto [at, page, slot] = position;
      rows[i] = copies.data + i * width;
      float* to = copies.data + i * width;
      if (from.kind == StorageType::kFloat32) {
        auto* numbers = static_cast<const float*>(from.data) + at;
        if (width == dim) {
          rows[i] = numbers;
          return;
        }
        std::memcpy(to, numbers, dim * sizeof(float));
      } else if (from.kind == StorageType::kBfloat16) {
        convert(static_cast<const uint16_t*>(from.data) + at, to, dim, 1,
                [](uint16_t x) { return widen(x); });
      } else {
        const float* scale = from.scale + page * from.scale_row + range.head * from.scale_head +
                             slot * from.scale_slot;
        int64_t size = dim / from.scale_groups;
        for (int64_t n = 0; n < from.scale_groups; ++n, scale += from.scale_group) {
          if (from.kind == StorageType::kInt8)
            convert(static_cast<const int8_t*>(from.data) + at + n * size, to + n * size, size,
                    *scale, [](int8_t x) { return float(x); });
          else
            for (int64_t c = n * size; c < (n + 1) * size; ++c)
              to[c] = convert_fp8(static_cast<const uint8_t*>(from.data)[at + c]) * *scale;
        }
      }
      for (int64_t c = dim; c < width; ++c) to[c] = 0;
    });
    for (int64_t i = 0; i < range.skipped; ++i) rows[i] = rows[range.skipped];
  }

  // Read tokens of one head of q, or of an array with the layout of q.
  void read_tokens(const void* from, bool is_bfloat16, int64_t heads, int64_t head, int64_t first,
                   int64_t count) {
    const bool in_place = !is_bfloat16 && width == dim;
    stride = in_place ? heads * dim : width;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = ((first + i) * heads + head) * dim;
      auto* numbers = static_cast<const float*>(from) + at;
      rows[i] = numbers;
      if (in_place) continue;
      float* to = copies.data + i * width;
      rows[i] = to;
      std::memset(to, 0, width * sizeof(float));
      if (is_bfloat16)
        convert(static_cast<const uint16_t*>(from) + at, to, dim, 1,
                [](uint16_t x) { return widen(x); });
      else
        std::memcpy(to, numbers, dim * sizeof(float));
    }
  }

  template <typename T, typename F>
  static void convert(const T* from, float* to, int64_t count, float scale, const F& convert_one) {
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) store(to + c, load_elements(from + c) * scale);
    for (; c < count; ++c) to[c] = convert_one(from[c]) * scale;
  }

  int64_t dim, width;
  int64_t stride = 0;  // numbers from token to token
  Scratch copies;
  const float* rows[kBlockKeys];
};

#if defined(__AVX512BF16__)
// Return whether queries, keys and values are bfloat16 numbers that can be multiplied in pairs.
inline bool uses_bf16_pairs(const AttentionArgs& p) {
  return p.q_is_bfloat16 && p.keys.kind == StorageType::kBfloat16 &&
         p.values.kind == StorageType::kBfloat16 && p.key_dim % 8 == 0;
}

// Locate the bfloat16 rows of a block.
inline void locate_rows(const AttentionArgs& p, const SlotArray& from, const SlotRange& range,
                        const uint16_t** rows) {
  auto* numbers = static_cast<const uint16_t*>(from.data);
  range.for_slots(p, from,
                  [&](int64_t i, const SlotRange::Position& at) { rows[i] = numbers + at.number; });
  for (int64_t i = 0; i < range.skipped; ++i) rows[i] = rows[range.skipped];
}

// Rows of bfloat16 numbers in pairs, [pairs][`dim` rounded up to vectors, 2], with pointers to the
// pairs.
struct Bf16PairRows {
  explicit Bf16PairRows(int64_t dim)
      : dim(dim), width((dim + 31) / 32 * 32), words(kBlockKeys / 2 * width) {
    for (int64_t i = 0; i < kBlockKeys / 2; ++i) pairs[i] = words.data + i * width;
  }

  void assign(const uint16_t* const* rows, int64_t count) {
    for (int64_t i = 0; i < count; i += 2)
      interleave_rows(rows[i], i + 1 < count ? rows[i + 1] : nullptr, dim,
                      reinterpret_cast<uint16_t*>(words.data + i / 2 * width));
  }

  int64_t dim, width;
  Scratch words;
  const float* pairs[kBlockKeys / 2];
};

// Round `count` numbers to bfloat16; `count` is a multiple of 32.
inline void round_to_bf16(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 32)
    _mm512_storeu_si512(to + i / 2, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + i + 16),
                                                                 (__m512)load(from + i)));
}

// Round rows [rows, kBlockKeys] to bfloat16 pairs, [rows / 2, kBlockKeys, 2]. An odd last row is
// paired with zeros.
inline void round_to_bf16_pairs(const float* from, int64_t rows, float* to) {
  auto rounded = [](const float* numbers) {
    return _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)load(numbers)));
  };
  for (int64_t r = 0; r < rows; r += 2, from += 2 * kBlockKeys, to += kBlockKeys)
    for (int64_t j = 0; j < kBlockKeys; j += 16) {
      const __m512i odd = r + 1 < rows ? rounded(from + kBlockKeys + j) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + j,
                          _mm512_permutex2var_epi16(rounded(from + j), get_pair_order(), odd));
    }
}
#endif

typedef float Vec4 __attribute__((vector_size(16)));

// The transpose of the rows of a block, [dim][kBlockKeys], with pointers to its rows.
struct TransposedRows {
  explicit TransposedRows(int64_t dim) : panel(round_up_lanes(dim) * kBlockKeys), rows(dim * 2) {
    for (int64_t i = 0; i < dim; ++i) pointers()[i] = panel.data + i * kBlockKeys;
  }
  const float** pointers() { return reinterpret_cast<const float**>(rows.data); }

  // Columns from `count` on are zero.
  void assign(const Block& block, int64_t count) { assign(block.rows, block.width, count); }

  // The same for rows of `width` words of four bytes, a multiple of four: float32, or pairs of
  // bfloat16.
  template <typename T>
  void assign(const T* const* block, int64_t width, int64_t count) {
    alignas(64) static const float zeros[16] = {};
    for (int64_t key = 0; key < kBlockKeys; key += 4)
      for (int64_t i = 0; i < width; i += 4) {
        Vec4 r[4];
        for (int64_t j = 0; j < 4; ++j)
          std::memcpy(&r[j], key + j < count ? words(block[key + j]) + i : zeros, 16);
        Vec4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
        Vec4 b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
        Vec4 c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
        Vec4 d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
        Vec4 columns[4] = {
            __builtin_shufflevector(a, c, 0, 1, 4, 5), __builtin_shufflevector(a, c, 2, 3, 6, 7),
            __builtin_shufflevector(b, d, 0, 1, 4, 5), __builtin_shufflevector(b, d, 2, 3, 6, 7)};
        for (int64_t j = 0; j < 4; ++j)
          std::memcpy(panel.data + (i + j) * kBlockKeys + key, &columns[j], 16);
      }
  }

  Scratch panel, rows;

 private:
  template <typename T>
  static const float* words(const T* row) {
    return reinterpret_cast<const float*>(row);
  }
};

// Segments and positions of some tokens, and their bounds among the tokens without padding.
struct TokenBlock {
  void read(const int32_t* segments, const int32_t* index, int64_t from, int64_t first, int64_t n) {
    count = n;
    low = low_segment = INT32_MAX, high = high_segment = -1;
    for (int64_t i = 0; i < n; ++i) segment[i] = segments ? segments[from + i] : 1;
    for (int64_t i = 0; i < n; ++i)
      position[i] = index ? index[from + i] : static_cast<int32_t>(first + i);
    int32_t none = 0;  // number of padding tokens; no branch, so the compiler can use vectors
    for (int64_t i = 0; i < n; ++i) {
      int32_t s = segment[i], at = position[i], min_segment = s ? s : INT32_MAX,
              min_position = s ? at : INT32_MAX;
      int32_t max_segment = s ? s : -1, max_position = s ? at : -1;
      none += s == 0;
      low = min_position < low ? min_position : low,
      high = max_position > high ? max_position : high;
      low_segment = min_segment < low_segment ? min_segment : low_segment;
      high_segment = max_segment > high_segment ? max_segment : high_segment;
    }
    padding = none > 0;
    int32_t distance = 0;
    for (int64_t i = 1; i < n; ++i)
      distance |= static_cast<int32_t>(int64_t{position[i]} - position[i - 1]) ^ 1;
    consecutive = distance == 0;
    for (int64_t i = n; i < kBlockKeys; ++i) segment[i] = position[i] = 0;
  }
  int64_t count;
  int32_t segment[kBlockKeys], position[kBlockKeys];
  int32_t low, high, low_segment, high_segment;
  bool padding, consecutive;
};

enum class Visibility { kNone, kStep, kAll };

// Return whether the queries of a block see none, some or all keys of a block.
inline Visibility classify_block(const AttentionArgs& p, const TokenBlock& q, const TokenBlock& k) {
  int64_t q_low = q.low, q_high = q.high, k_low = k.low, k_high = k.high;
  if (q_high < 0 || k_high < 0) return Visibility::kNone;
  if (k.low_segment > q.high_segment || k.high_segment < q.low_segment) return Visibility::kNone;
  bool all = !q.padding && !k.padding && k.count == kBlockKeys && k.low_segment == k.high_segment &&
             q.low_segment == q.high_segment && k.low_segment == q.low_segment;
  if (p.causal) {
    if (k_low > q_high) return Visibility::kNone;
    all = all && k_high <= q_low;
  }
  if (p.window > 0) {
    if (q_low - k_high >= p.window || (!p.causal && k_low - q_high >= p.window))
      return Visibility::kNone;
    all = all && q_high - k_low < p.window && (p.causal || k_high - q_low < p.window);
  }
  if (p.chunk > 0) {
    if (q_high / p.chunk < k_low / p.chunk || k_high / p.chunk < q_low / p.chunk)
      return Visibility::kNone;
    all = all && q_low / p.chunk == q_high / p.chunk && k_low / p.chunk == k_high / p.chunk;
  }
  return all ? Visibility::kAll : Visibility::kStep;
}

ED_INLINE uint32_t mix_hash(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Compute the factors [kBlockKeys] of the weights of one query: 0 if dropped, else p.keep_scale.
// `position_hashes` has the hashes of the key positions.
inline void compute_dropout_factors(const AttentionArgs& p, int64_t row, int64_t head,
                                    int64_t query, const uint32_t* position_hashes,
                                    float* factors) {
  uint32_t x = p.seed[0];
  const int64_t coordinates[] = {row, head, query};
  for (int64_t coordinate : coordinates)
    x = mix_hash(x ^ static_cast<uint32_t>(coordinate) * 0x9e3779b1u);
  uint32_t limit = static_cast<uint32_t>(p.drop_threshold);
  for (int64_t j = 0; j < kBlockKeys; ++j)
    factors[j] = mix_hash(x ^ position_hashes[j]) >= limit ? p.keep_scale : 0.0f;
}

// Compute the hashes of the positions of a block of keys.
inline void hash_positions(const AttentionArgs& p, int64_t first, uint32_t* position_hashes) {
  for (int64_t j = 0; j < kBlockKeys; ++j)
    position_hashes[j] = mix_hash(static_cast<uint32_t>(first + j) * 0x85ebca77u ^ p.seed[1]);
}

// Set the scores [kBlockKeys] of one query to -inf where it may not attend.
inline void mask_scores(const AttentionArgs& p, const TokenBlock& q, int64_t i, const TokenBlock& k,
                        float* scores) {
  int32_t segment = q.segment[i], at = q.position[i], window = p.window, chunk = p.chunk;
  bool any = segment != 0;
  for (int64_t j = 0; j < kBlockKeys; ++j) {
    int32_t distance = at - k.position[j];
    bool ok = any & (k.segment[j] == segment);
    if (p.causal) ok = ok & (distance >= 0);
    if (window > 0) ok = ok & (distance < window) & (p.causal | (-distance < window));
    scores[j] = ok ? scores[j] : kMinusInfinity;
  }
  if (chunk > 0)
    for (int64_t j = 0; j < k.count; ++j)
      if (k.position[j] / chunk != at / chunk) scores[j] = kMinusInfinity;
}

}  // namespace
}  // namespace ed
