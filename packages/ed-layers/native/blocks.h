// What attention is made of, for one level of instructions: small products, blocks of keys as plain
// numbers, and who sees whom.
#pragma once

#include "panel_words.h"

namespace ed {
namespace {

constexpr int64_t kQueries = 64;     // rows of a block of queries
constexpr int64_t kFewQueries = 8;   // up to here keys are read where they lie
constexpr float kNothing = -__builtin_inff();

inline int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// to [R, C vectors] += a [R, k] times the rows b[0], b[1] .. [C vectors] from `column` on, or = without
// `add`. a and b have words, such as FloatWords.
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

// to [rows, width] += a [rows, k], strided, times rows b, or = without `add`; width is whole vectors.
template <typename Words>
void accumulate(const float* a, int64_t a_row, int64_t a_step, int64_t rows,
                const float* const* b, int64_t k, int64_t width, float* to, int64_t stride,
                bool add = true) {
  row_blocks<kRows>(rows, [&](auto r, int64_t at) {
    constexpr int R = decltype(r)::value;
    const float* own = a + at * a_row;
    float* sums = to + at * stride;
    int64_t c = 0;
    for (; c + kBlock <= width; c += kBlock)
      accumulate_block<Words, R, kVectors>(own, a_row, a_step, b, c, k, sums, stride, add);
    for (; c < width; c += kLanes)
      accumulate_block<Words, R, 1>(own, a_row, a_step, b, c, k, sums, stride, add);
  });
}

// Slots [first, first + count) of a row and head. Slot `first + skipped` takes the place of the
// slots before: no query sees these.
struct Place {
  // The number at which slot `first + i` begins, and the index of its row or page.
  struct At {
    int64_t number, row, slot;
  };
  // Call `f(i, At)` for the slots that are read, in order.
  template <typename F>
  ED_INLINE void each(const Attend& p, const Slots& from, const F& f) const {
    int64_t i = most(0, skipped), slot = first + i;
    if (!p.pages) {
      for (; i < count; ++i, ++slot)
        f(i, At{row * from.row + head * from.head + slot * from.slot, row, slot});
      return;
    }
    const int32_t* page = p.pages + row * p.pages_of_row + slot / p.page_size;
    for (slot %= p.page_size; i < count; slot = 0, ++page) {
      const int64_t numbers = *page * from.row + head * from.head;
      for (; slot < p.page_size && i < count; ++i, ++slot)
        f(i, At{numbers + slot * from.slot, *page, slot});
    }
  }

  int64_t row, head, first, count, skipped;
};

// Fetch what a block needs of keys or values, `dim` numbers of each slot, before it is read.
inline void fetch(const Attend& p, const Slots& from, int64_t dim, const Place& place) {
  const int64_t size = bytes_of(from.kind);
  place.each(p, from, [&](int64_t, const Place::At& at) {
    const char* numbers = static_cast<const char*>(from.data) + at.number * size;
    for (int64_t byte = 0; byte < dim * size; byte += 64) prefetch(numbers + byte);
  });
}

inline void fetch(const Attend& p, const Place& place) {
  fetch(p, p.keys, p.key_dim, place), fetch(p, p.values, p.value_dim, place);
}

// Rows of numbers, [count][whole vectors of `dim`]: where they lie, or copies.
struct Block {
  explicit Block(int64_t dim) : dim(dim), width(whole_vectors(dim)), copies(kKeys * width) {}

  void read(const Attend& p, const Slots& from, const Place& place) {
    place.each(p, from, [&](int64_t i, const Place::At& of) {
      const auto [at, at_row, slot] = of;
      rows[i] = copies.data + i * width;
      float* to = copies.data + i * width;
      if (from.kind == Stored::kFloat32) {
        auto* numbers = static_cast<const float*>(from.data) + at;
        if (width == dim) {
          rows[i] = numbers;
          return;
        }
        std::memcpy(to, numbers, dim * sizeof(float));
      } else if (from.kind == Stored::kBfloat16) {
        convert(static_cast<const uint16_t*>(from.data) + at, to, dim, 1,
                [](uint16_t x) { return widen(x); });
      } else {
        const float* scale = from.scale + at_row * from.scale_row + place.head * from.scale_head +
                             slot * from.scale_slot;
        int64_t size = dim / from.scale_groups;
        for (int64_t n = 0; n < from.scale_groups; ++n, scale += from.scale_group) {
          if (from.kind == Stored::kInt8)
            convert(static_cast<const int8_t*>(from.data) + at + n * size, to + n * size, size,
                    *scale, [](int8_t x) { return float(x); });
          else
            for (int64_t c = n * size; c < (n + 1) * size; ++c)
              to[c] = from_fp8(static_cast<const uint8_t*>(from.data)[at + c]) * *scale;
        }
      }
      for (int64_t c = dim; c < width; ++c) to[c] = 0;
    });
    for (int64_t i = 0; i < place.skipped; ++i) rows[i] = rows[place.skipped];
  }

  // Tokens of one head of q, or of an array that lies as q does.
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
        convert(static_cast<const uint16_t*>(from) + at, to, dim, 1, [](uint16_t x) { return widen(x); });
      else
        std::memcpy(to, numbers, dim * sizeof(float));
    }
  }

  template <typename T, typename F>
  static void convert(const T* from, float* to, int64_t count, float scale, const F& one) {
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) store(to + c, load_numbers(from + c) * scale);
    for (; c < count; ++c) to[c] = one(from[c]) * scale;
  }

  int64_t dim, width;
  int64_t stride = 0;  // numbers from token to token
  Scratch copies;
  const float* rows[kKeys];
};

#if defined(__AVX512BF16__)
// Whether queries, keys and values are bfloat16 numbers, whose pairs can be multiplied.
inline bool in_pairs(const Attend& p) {
  return p.q_is_bfloat16 && p.keys.kind == Stored::kBfloat16 && p.values.kind == Stored::kBfloat16 &&
         p.key_dim % 8 == 0;
}

// Where the bfloat16 rows of a block lie.
inline void find(const Attend& p, const Slots& from, const Place& place, const uint16_t** rows) {
  auto* numbers = static_cast<const uint16_t*>(from.data);
  place.each(p, from, [&](int64_t i, const Place::At& at) { rows[i] = numbers + at.number; });
  for (int64_t i = 0; i < place.skipped; ++i) rows[i] = rows[place.skipped];
}

// Rows of bfloat16 numbers in pairs, [pairs][whole vectors of `dim`, 2], with pointers to the pairs.
struct PairedRows {
  explicit PairedRows(int64_t dim) : dim(dim), width((dim + 31) / 32 * 32), words(kKeys / 2 * width) {
    for (int64_t i = 0; i < kKeys / 2; ++i) pairs[i] = words.data + i * width;
  }

  void of(const uint16_t* const* rows, int64_t count) {
    for (int64_t i = 0; i < count; i += 2)
      pair_rows(rows[i], i + 1 < count ? rows[i + 1] : nullptr, dim,
                reinterpret_cast<uint16_t*>(words.data + i / 2 * width));
  }

  int64_t dim, width;
  Scratch words;
  const float* pairs[kKeys / 2];
};

// Round `count` numbers to bfloat16; `count` is a multiple of 32.
inline void round_all(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 32)
    _mm512_storeu_si512(to + i / 2, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + i + 16),
                                                                 (__m512)load(from + i)));
}

// Round rows [rows, kKeys] to bfloat16, in pairs: [rows / 2, kKeys, 2]. An odd last row is paired with
// zeros.
inline void round_in_pairs(const float* from, int64_t rows, float* to) {
  auto rounded = [](const float* numbers) {
    return _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)load(numbers)));
  };
  for (int64_t r = 0; r < rows; r += 2, from += 2 * kKeys, to += kKeys)
    for (int64_t j = 0; j < kKeys; j += 16) {
      const __m512i odd = r + 1 < rows ? rounded(from + kKeys + j) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + j, _mm512_permutex2var_epi16(rounded(from + j), pair_order(), odd));
    }
}
#endif

typedef float Four __attribute__((vector_size(16)));

// The rows of a block turned: [dim][kKeys], with pointers to them.
struct Turned {
  explicit Turned(int64_t dim) : panel(whole_vectors(dim) * kKeys), rows(dim * 2) {
    for (int64_t i = 0; i < dim; ++i) pointers()[i] = panel.data + i * kKeys;
  }
  const float** pointers() { return reinterpret_cast<const float**>(rows.data); }

  // What is beyond `count` is zero.
  void of(const Block& block, int64_t count) { of(block.rows, block.width, count); }

  // The same of rows of `width` words of four bytes, a multiple of four: float32, or pairs of bfloat16.
  template <typename T>
  void of(const T* const* block, int64_t width, int64_t count) {
    alignas(64) static const float zeros[16] = {};
    for (int64_t key = 0; key < kKeys; key += 4)
      for (int64_t i = 0; i < width; i += 4) {
        Four r[4];
        for (int64_t j = 0; j < 4; ++j)
          std::memcpy(&r[j], key + j < count ? words(block[key + j]) + i : zeros, 16);
        Four a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
        Four b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
        Four c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
        Four d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
        Four turned[4] = {__builtin_shufflevector(a, c, 0, 1, 4, 5),
                          __builtin_shufflevector(a, c, 2, 3, 6, 7),
                          __builtin_shufflevector(b, d, 0, 1, 4, 5),
                          __builtin_shufflevector(b, d, 2, 3, 6, 7)};
        for (int64_t j = 0; j < 4; ++j) std::memcpy(panel.data + (i + j) * kKeys + key, &turned[j], 16);
      }
  }

  Scratch panel, rows;

 private:
  template <typename T>
  static const float* words(const T* row) {
    return reinterpret_cast<const float*>(row);
  }
};

// Segments and indices of some tokens, and their bounds among those that are no padding.
struct Tokens {
  void read(const int32_t* segments, const int32_t* index, int64_t from, int64_t first, int64_t n) {
    count = n;
    low = low_segment = INT32_MAX, high = high_segment = -1;
    for (int64_t i = 0; i < n; ++i) segment[i] = segments ? segments[from + i] : 1;
    for (int64_t i = 0; i < n; ++i)
      place[i] = index ? index[from + i] : static_cast<int32_t>(first + i);
    int32_t none = 0;  // tokens that are padding; no branch, so that vectors can be used
    for (int64_t i = 0; i < n; ++i) {
      int32_t s = segment[i], at = place[i], least_s = s ? s : INT32_MAX, least_at = s ? at : INT32_MAX;
      int32_t most_s = s ? s : -1, most_at = s ? at : -1;
      none += s == 0;
      low = least_at < low ? least_at : low, high = most_at > high ? most_at : high;
      low_segment = least_s < low_segment ? least_s : low_segment;
      high_segment = most_s > high_segment ? most_s : high_segment;
    }
    padding = none > 0;
    int32_t apart = 0;
    for (int64_t i = 1; i < n; ++i) apart |= static_cast<int32_t>(int64_t{place[i]} - place[i - 1]) ^ 1;
    consecutive = apart == 0;
    for (int64_t i = n; i < kKeys; ++i) segment[i] = place[i] = 0;
  }
  int64_t count;
  int32_t segment[kKeys], place[kKeys];
  int32_t low, high, low_segment, high_segment;
  bool padding, consecutive;
};

enum class Seen { kNone, kSome, kAll };

// How much of a block of keys the queries of a block see.
inline Seen seen(const Attend& p, const Tokens& q, const Tokens& k) {
  int64_t q_low = q.low, q_high = q.high, k_low = k.low, k_high = k.high;
  if (q_high < 0 || k_high < 0) return Seen::kNone;
  if (k.low_segment > q.high_segment || k.high_segment < q.low_segment) return Seen::kNone;
  bool all = !q.padding && !k.padding && k.count == kKeys && k.low_segment == k.high_segment &&
             q.low_segment == q.high_segment && k.low_segment == q.low_segment;
  if (p.causal) {
    if (k_low > q_high) return Seen::kNone;
    all = all && k_high <= q_low;
  }
  if (p.window > 0) {
    if (q_low - k_high >= p.window || (!p.causal && k_low - q_high >= p.window)) return Seen::kNone;
    all = all && q_high - k_low < p.window && (p.causal || k_high - q_low < p.window);
  }
  if (p.chunk > 0) {
    if (q_high / p.chunk < k_low / p.chunk || k_high / p.chunk < q_low / p.chunk) return Seen::kNone;
    all = all && q_low / p.chunk == q_high / p.chunk && k_low / p.chunk == k_high / p.chunk;
  }
  return all ? Seen::kAll : Seen::kSome;
}

ED_INLINE uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Factors [kKeys] of the weights of one query: 0 if dropped, else p.keep. `places` are the hashes
// of the keys' places.
inline void factors_of(const Attend& p, int64_t row, int64_t head, int64_t query,
                       const uint32_t* places, float* factors) {
  uint32_t x = p.seed[0];
  const int64_t coordinates[] = {row, head, query};
  for (int64_t coordinate : coordinates)
    x = mixed(x ^ static_cast<uint32_t>(coordinate) * 0x9e3779b1u);
  uint32_t limit = static_cast<uint32_t>(p.drop_below);
  for (int64_t j = 0; j < kKeys; ++j) factors[j] = mixed(x ^ places[j]) >= limit ? p.keep : 0.0f;
}

// The hashes of the places of a block of keys.
inline void hash_places(const Attend& p, int64_t first, uint32_t* places) {
  for (int64_t j = 0; j < kKeys; ++j)
    places[j] = mixed(static_cast<uint32_t>(first + j) * 0x85ebca77u ^ p.seed[1]);
}

// Scores [kKeys] of one query, where it may not attend: -inf.
inline void mask(const Attend& p, const Tokens& q, int64_t i, const Tokens& k, float* scores) {
  int32_t segment = q.segment[i], at = q.place[i], window = p.window, chunk = p.chunk;
  bool any = segment != 0;
  for (int64_t j = 0; j < kKeys; ++j) {
    int32_t apart = at - k.place[j];
    bool ok = any & (k.segment[j] == segment);
    if (p.causal) ok = ok & (apart >= 0);
    if (window > 0) ok = ok & (apart < window) & (p.causal | (-apart < window));
    scores[j] = ok ? scores[j] : kNothing;
  }
  if (chunk > 0)
    for (int64_t j = 0; j < k.count; ++j)
      if (k.place[j] / chunk != at / chunk) scores[j] = kNothing;
}

}  // namespace
}  // namespace ed
