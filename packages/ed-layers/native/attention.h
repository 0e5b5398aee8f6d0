// Attention, for one level of instructions: block by block with a running softmax (FlashAttention,
// Dao et al. 2022), so that no [queries, slots] array exists. A block of queries has all heads that
// share a key head. Blocks of keys that no query of the block sees are left out.
#pragma once

#include "columns.h"

namespace ed {
namespace {

constexpr int64_t kKeys = 64;        // of a block
constexpr int64_t kQueries = 64;     // rows of a block of queries
constexpr int64_t kFewQueries = 8;   // up to here keys are read where they lie
constexpr float kNothing = -__builtin_inff();

// e^x to 2 units in the last place; 0 below -87.
inline Vec exponential(Vec x) {
  Vec least_x = broadcast(-87.0f), y = x < least_x ? least_x : x;
  Vec n = y * 1.44269504f;
  n = (n + 0x1.8p23f) - 0x1.8p23f;
  Vec r = y - n * 0.693145752f;
  r -= n * 1.42860677e-6f;
  Vec p = broadcast(1.9875691e-4f);
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0000001e-1f;
  p = p * r * r + r + 1.0f;
  // The power of two by its exponent's bits. NaN keeps NaN by the product.
  Ints power = __builtin_convertvector(n == n ? n : Vec{}, Ints) + 127;
  Vec result = p * (Vec)(power << 23);
  return x < least_x ? Vec{} : result;
}

// tanh(x) by the exponential of its size; by its series where that would cancel.
inline Vec squash(Vec x) {
  Vec size = x < 0 ? -x : x, capped = size > 10.0f ? broadcast(10.0f) : size;
  Vec t = 1.0f - 2.0f / (exponential(2.0f * capped) + 1.0f);
  Vec s = size * size;
  Vec near = size * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315))));
  t = size < 0.15f ? near : t;
  return x != x ? x : (x < 0 ? -t : t);
}

inline int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// to [R, C vectors] += a [R, k] times the rows b[0], b[1] .. [C vectors] from `column` on.
template <int R, int C>
void accumulate_block(const float* a, int64_t a_row, int64_t a_step, const float* const* b,
                      int64_t column, int64_t k, float* to, int64_t stride) {
  Vec acc[R][C];
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c] = load(to + r * stride + column + c * kLanes);
  for (int64_t i = 0; i < k; ++i) {
    const float* from = b[i] + column;
    Vec row[C];
    ED_UNROLL
    for (int c = 0; c < C; ++c) row[c] = load(from + c * kLanes);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec number = broadcast(a[r * a_row + i * a_step]);
      ED_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] += number * row[c];
    }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int c = 0; c < C; ++c) store(to + r * stride + column + c * kLanes, acc[r][c]);
}

// to [rows, width] += a [rows, k], strided, times rows b; width is whole vectors.
inline void accumulate(const float* a, int64_t a_row, int64_t a_step, int64_t rows,
                       const float* const* b, int64_t k, int64_t width, float* to, int64_t stride) {
  row_blocks<kRows>(rows, [&](auto r, int64_t at) {
    constexpr int R = decltype(r)::value;
    const float* own = a + at * a_row;
    float* sums = to + at * stride;
    int64_t c = 0;
    for (; c + kBlock <= width; c += kBlock)
      accumulate_block<R, kVectors>(own, a_row, a_step, b, c, k, sums, stride);
    for (; c < width; c += kLanes)
      accumulate_block<R, 1>(own, a_row, a_step, b, c, k, sums, stride);
  });
}

// Rows of numbers, [count][whole vectors of `dim`]: where they lie, or copies.
struct Block {
  explicit Block(int64_t dim) : dim(dim), width(whole_vectors(dim)), copies(kKeys * width) {}

  // Slots [first, first + count) of a row and head.
  void read(const Attend& p, const Slots& from, int64_t row, int64_t head, int64_t first,
            int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      int64_t slot = first + i, at_row = row;
      if (p.pages) at_row = p.pages[row * p.pages_of_row + slot / p.page_size], slot %= p.page_size;
      int64_t at = at_row * from.row + head * from.head + slot * from.slot;
      rows[i] = copies.data + i * width;
      float* to = copies.data + i * width;
      if (from.kind == Stored::kFloat32) {
        auto* numbers = static_cast<const float*>(from.data) + at;
        if (width == dim) {
          rows[i] = numbers;
          continue;
        }
        std::memcpy(to, numbers, dim * sizeof(float));
      } else if (from.kind == Stored::kBfloat16) {
        convert(static_cast<const uint16_t*>(from.data) + at, to, dim, 1,
                [](uint16_t x) { return widen(x); });
      } else {
        const float* scale = from.scale + at_row * from.scale_row + head * from.scale_head +
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
    }
  }

  // Tokens of q, or of what lies like it, for one head.
  void read_tokens(const float* from, int64_t heads, int64_t head, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float* numbers = from + ((first + i) * heads + head) * dim;
      rows[i] = numbers;
      if (width == dim) continue;
      rows[i] = copies.data + i * width;
      std::memset(copies.data + i * width, 0, width * sizeof(float));
      std::memcpy(copies.data + i * width, numbers, dim * sizeof(float));
    }
  }

  template <typename T, typename F>
  static void convert(const T* from, float* to, int64_t count, float scale, const F& one) {
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) store(to + c, load_numbers(from + c) * scale);
    for (; c < count; ++c) to[c] = one(from[c]) * scale;
  }

  int64_t dim, width;
  Scratch copies;
  const float* rows[kKeys];
};

typedef float Four __attribute__((vector_size(16)));

// The rows of a block turned: [dim][kKeys], with pointers to them.
struct Turned {
  explicit Turned(int64_t dim) : panel(whole_vectors(dim) * kKeys), rows(dim * 2) {
    for (int64_t i = 0; i < dim; ++i) pointers()[i] = panel.data + i * kKeys;
  }
  const float** pointers() { return reinterpret_cast<const float**>(rows.data); }

  // What is beyond `count` is zero.
  void of(const Block& block, int64_t count) {
    alignas(64) static const float zeros[16] = {};
    for (int64_t key = 0; key < kKeys; key += 4)
      for (int64_t i = 0; i < block.width; i += 4) {
        Four r[4];
        for (int64_t j = 0; j < 4; ++j)
          std::memcpy(&r[j], key + j < count ? block.rows[key + j] + i : zeros, 16);
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
};

// Segments and indices of some tokens, and their bounds among those that are no padding.
struct Tokens {
  void read(const int32_t* segments, const int32_t* index, int64_t from, int64_t first, int64_t n) {
    count = n;
    low = low_segment = INT32_MAX, high = high_segment = -1, padding = false;
    for (int64_t i = 0; i < n; ++i) {
      segment[i] = segments ? segments[from + i] : 1;
      place[i] = index ? index[from + i] : static_cast<int32_t>(first + i);
      if (segment[i] == 0) {
        padding = true;
        continue;
      }
      low = place[i] < low ? place[i] : low, high = place[i] > high ? place[i] : high;
      low_segment = segment[i] < low_segment ? segment[i] : low_segment;
      high_segment = segment[i] > high_segment ? segment[i] : high_segment;
    }
    for (int64_t i = n; i < kKeys; ++i) segment[i] = place[i] = 0;
  }
  int64_t count;
  int32_t segment[kKeys], place[kKeys];
  int32_t low, high, low_segment, high_segment;
  bool padding;
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

int64_t queries_of_task(const Attend& p) {
  return most(1, kQueries / (p.heads / p.groups));
}

// Attention of queries [first, last) of a row, by the heads that share key head `group`.
void forward(const Attend& p, int64_t row, int64_t group, int64_t first, int64_t last) {
  int64_t repeat = p.heads / p.groups, count = last - first, rows = count * repeat;
  int64_t token = (p.first_query ? p.first_query[row] : row * p.queries) + first;
  int64_t slots = p.lengths ? p.lengths[row] : p.slots;
  Tokens queries, keys;
  int64_t place = 0;
  if (p.lengths) place = slots - (p.first_query[row + 1] - p.first_query[row]) + first;
  queries.read(p.q_segments, p.q_index, row * p.queries + first, place, count);
  Block k(p.key_dim), v(p.value_dim);
  Turned turned(p.key_dim);
  int64_t width = k.width, out_width = v.width;
  Scratch q(rows * width), out(rows * out_width), scores(rows * kKeys), of_rows(2 * rows);
  float *largest = of_rows.data, *sum = of_rows.data + rows;
  std::memset(q.data, 0, rows * width * sizeof(float));
  std::memset(out.data, 0, rows * out_width * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    int64_t from = ((token + r / repeat) * p.heads + group * repeat + r % repeat) * p.key_dim;
    for (int64_t c = 0; c < p.key_dim; ++c) {
      float number = p.q_is_bfloat16 ? widen(static_cast<const uint16_t*>(p.q)[from + c])
                                     : static_cast<const float*>(p.q)[from + c];
      q.data[r * width + c] = number * p.scale;
    }
    largest[r] = kNothing, sum[r] = 0;
  }
  int64_t begin = 0;
  if (p.lengths) {  // places in order: what lies behind or before all queries is not looked at
    slots = least(slots, place + count);
    if (p.window > 0) begin = most(0, place - p.window + 1);
    if (p.chunk > 0) begin = most(begin, place / p.chunk * p.chunk);
  }
  for (int64_t at = begin; at < slots; at += kKeys) {
    int64_t n = least(kKeys, slots - at);
    keys.read(p.k_segments, p.k_index, row * p.slots + at, at, n);
    Seen what = seen(p, queries, keys);
    if (what == Seen::kNone) continue;
    k.read(p, p.keys, row, group, at, n);
    std::memset(scores.data, 0, rows * kKeys * sizeof(float));
    if (rows <= kFewQueries) {
      for (int64_t j = 0; j < n; ++j)
        for (int64_t r = 0; r < rows; ++r) {
          Vec dot = {};
          for (int64_t c = 0; c < width; c += kLanes)
            dot += load(q.data + r * width + c) * load(k.rows[j] + c);
          scores.data[r * kKeys + j] = total(dot);
        }
    } else {
      turned.of(k, n);
      accumulate(q.data, width, 1, rows, turned.pointers(), p.key_dim, kKeys, scores.data, kKeys);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* own = scores.data + r * kKeys;
      if (p.soft_cap != 0)
        for (int64_t j = 0; j < kKeys; j += kLanes)
          store(own + j, p.soft_cap * squash(load(own + j) * (1 / p.soft_cap)));
      if (what == Seen::kSome) mask(p, queries, r / repeat, keys, own);
      for (int64_t j = n; j < kKeys; ++j) own[j] = kNothing;
      Vec high = load(own);
      for (int64_t j = kLanes; j < kKeys; j += kLanes) {
        Vec next = load(own + j);
        high = next > high ? next : high;
      }
      float top = largest[r];
      for (int l = 0; l < kLanes; ++l) top = high[l] > top ? high[l] : top;
      if (top == kNothing) {
        // Nothing is seen, or nothing but NaN, which is then the result.
        for (int64_t j = 0; j < n; ++j)
          if (own[j] != own[j]) largest[r] = 0, sum[r] = own[j];
        std::memset(own, 0, kKeys * sizeof(float));
        continue;
      }
      Vec added = {};
      for (int64_t j = 0; j < kKeys; j += kLanes) {
        Vec weight = exponential(load(own + j) - top);
        store(own + j, weight);
        added += weight;
      }
      float shrink = exponential(broadcast(largest[r] - top))[0];
      sum[r] = sum[r] * shrink + total(added);
      if (largest[r] != top)
        for (int64_t c = 0; c < out_width; c += kLanes)
          store(out.data + r * out_width + c, load(out.data + r * out_width + c) * shrink);
      largest[r] = top;
    }
    v.read(p, p.values, row, group, at, n);
    accumulate(scores.data, kKeys, 1, rows, v.rows, n, out_width, out.data, out_width);
  }
  for (int64_t r = 0; r < rows; ++r) {
    int64_t head = group * repeat + r % repeat, to = (token + r / repeat) * p.heads + head;
    bool none = largest[r] == kNothing && sum[r] == 0;
    float all = sum[r];
    if (p.sinks && !none) all += exponential(broadcast(p.sinks[head] - largest[r]))[0];
    float factor = none ? 0 : 1 / all;
    if (p.lse) p.lse[to] = none ? kNothing : largest[r] + __builtin_logf(sum[r]);
    for (int64_t c = 0; c < p.value_dim; ++c) {
      float number = out.data[r * out_width + c] * factor;
      if (p.q_is_bfloat16)
        static_cast<uint16_t*>(p.out)[to * p.value_dim + c] = narrow(number);
      else
        static_cast<float*>(p.out)[to * p.value_dim + c] = number;
    }
  }
}

// Gradients by one query head. Blocks of keys are the outer loop: each is turned once.
void backward(const Attend& p, int64_t row, int64_t head, float* d_k, float* d_v) {
  int64_t group = head / (p.heads / p.groups);
  auto* q_of = static_cast<const float*>(p.q);
  Block k(p.key_dim), v(p.value_dim), q(p.key_dim), d_out(p.value_dim);
  Turned k_turned(p.key_dim), v_turned(p.value_dim);
  int64_t width = k.width, v_width = v.width;
  Scratch d_q(p.queries * width), d_keys(kKeys * width), d_values(kKeys * v_width);
  Scratch weights(kQueries * kKeys), slopes(kQueries * kKeys);
  std::memset(d_q.data, 0, p.queries * width * sizeof(float));
  Tokens queries, keys;
  for (int64_t at = 0; at < p.slots; at += kKeys) {
    int64_t n = least(kKeys, p.slots - at);
    keys.read(p.k_segments, p.k_index, row * p.slots + at, at, n);
    std::memset(d_keys.data, 0, kKeys * width * sizeof(float));
    std::memset(d_values.data, 0, kKeys * v_width * sizeof(float));
    bool is_turned = false;
    for (int64_t first = 0; first < p.queries; first += kQueries) {
      int64_t rows = least(kQueries, p.queries - first), token = row * p.queries + first;
      queries.read(p.q_segments, p.q_index, token, first, rows);
      Seen what = seen(p, queries, keys);
      if (what == Seen::kNone) continue;
      if (!is_turned) {
        k.read(p, p.keys, row, group, at, n), k_turned.of(k, n);
        v.read(p, p.values, row, group, at, n), v_turned.of(v, n);
        is_turned = true;
      }
      q.read_tokens(q_of, p.heads, head, token, rows);
      d_out.read_tokens(p.d_out, p.heads, head, token, rows);
      std::memset(weights.data, 0, rows * kKeys * sizeof(float));
      std::memset(slopes.data, 0, rows * kKeys * sizeof(float));
      // Rows of q and d_out lie apart by all heads, where they were not copied.
      int64_t q_row = q.width == q.dim ? p.heads * q.dim : q.width;
      int64_t o_row = d_out.width == d_out.dim ? p.heads * d_out.dim : d_out.width;
      accumulate(q.rows[0], q_row, 1, rows, k_turned.pointers(), p.key_dim, kKeys, weights.data,
                 kKeys);
      accumulate(d_out.rows[0], o_row, 1, rows, v_turned.pointers(), p.value_dim, kKeys,
                 slopes.data, kKeys);
      for (int64_t r = 0; r < rows; ++r) {
        float lse = p.lse[(token + r) * p.heads + head];
        float shared = p.shared[(token + r) * p.heads + head];
        float *own = weights.data + r * kKeys, *d = slopes.data + r * kKeys;
        // The slope of the cap is kept in `squashed`: masked scores have none.
        alignas(64) float squashed[kKeys];
        for (int64_t j = 0; j < kKeys; j += kLanes) {
          Vec score = load(own + j) * p.scale, slope = broadcast(p.scale);
          if (p.soft_cap != 0) {
            Vec t = squash(score * (1 / p.soft_cap));
            score = p.soft_cap * t, slope = p.scale * (1.0f - t * t);
          }
          store(own + j, score), store(squashed + j, slope);
        }
        if (what == Seen::kSome) mask(p, queries, r, keys, own);
        for (int64_t j = n; j < kKeys; ++j) own[j] = kNothing;
        if (lse == kNothing) lse = __builtin_inff();  // sees nothing: all weights are zero
        for (int64_t j = 0; j < kKeys; j += kLanes) {
          Vec weight = exponential(load(own + j) - lse);
          store(own + j, weight);
          store(d + j, weight * (load(d + j) - shared) * load(squashed + j));
        }
      }
      accumulate(weights.data, 1, kKeys, n, d_out.rows, rows, v_width, d_values.data, v_width);
      accumulate(slopes.data, 1, kKeys, n, q.rows, rows, width, d_keys.data, width);
      accumulate(slopes.data, kKeys, 1, rows, k.rows, n, width, d_q.data + first * width, width);
    }
    for (int64_t j = 0; j < n; ++j) {
      std::memcpy(d_k + (at + j) * p.key_dim, d_keys.data + j * width, p.key_dim * sizeof(float));
      std::memcpy(d_v + (at + j) * p.value_dim, d_values.data + j * v_width,
                  p.value_dim * sizeof(float));
    }
  }
  for (int64_t i = 0; i < p.queries; ++i)
    std::memcpy(p.d_q + ((row * p.queries + i) * p.heads + head) * p.key_dim, d_q.data + i * width,
                p.key_dim * sizeof(float));
}

constexpr Attention attention_of = {queries_of_task, forward, backward};

}  // namespace
}  // namespace ed
