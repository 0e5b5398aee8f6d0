// The gradients of attention, for one level of instructions: blocks of keys meet blocks of queries, and
// the weights of each pair of blocks are computed again.
//
// The products of a pair of blocks are a struct: `start` names a block of keys and values, `read` the
// queries, `score` computes scores [rows, kKeys] and the gradient of the weights, and `add` adds the
// products of the weights, and of the gradient of the scores, to the gradients.
#pragma once

#include "biases.h"

namespace ed {
namespace {

// Products of float32 numbers.
struct PlainGradients {
  explicit PlainGradients(const Attend& p)
      : p_(p), k_(p.key_dim), v_(p.value_dim), q_(p.key_dim), d_out_(p.value_dim),
        k_turned_(p.key_dim), v_turned_(p.value_dim) {}

  void start(const Place& block) {
    keys_ = block.count;
    k_.read(p_, p_.keys, block), k_turned_.of(k_, keys_);
    v_.read(p_, p_.values, block), v_turned_.of(v_, keys_);
  }

  void read(int64_t head, int64_t token, int64_t rows) {
    rows_ = rows;
    q_.read_tokens(p_.q, p_.q_is_bfloat16, p_.heads, head, token, rows);
    d_out_.read_tokens(p_.d_out, p_.q_is_bfloat16, p_.heads, head, token, rows);
  }

  void score(float* scores, float* d_weights) {
    accumulate<FloatWords>(q_.rows[0], q_.stride, 1, rows_, k_turned_.pointers(), p_.key_dim, kKeys,
                           scores, kKeys, false);
    accumulate<FloatWords>(d_out_.rows[0], d_out_.stride, 1, rows_, v_turned_.pointers(),
                           p_.value_dim, kKeys, d_weights, kKeys, false);
  }

  void add(const float* weights, const float* d_scores, float* d_q, float* d_k, float* d_v) {
    accumulate<FloatWords>(weights, 1, kKeys, keys_, d_out_.rows, rows_, v_.width, d_v, v_.width);
    accumulate<FloatWords>(d_scores, 1, kKeys, keys_, q_.rows, rows_, k_.width, d_k, k_.width);
    accumulate<FloatWords>(d_scores, kKeys, 1, rows_, k_.rows, keys_, k_.width, d_q, k_.width);
  }

 private:
  const Attend& p_;
  int64_t keys_ = 0, rows_ = 0;
  Block k_, v_, q_, d_out_;
  Turned k_turned_, v_turned_;
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16 numbers, summed in float32.
struct PairGradients {
  static bool take(const Attend& p) {
    return in_pairs(p) && p.value_dim % 8 == 0;
  }

  explicit PairGradients(const Attend& p)
      : p_(p), k_turned_(p.key_dim / 2), v_turned_(p.value_dim / 2), k_(p.key_dim), q_(p.key_dim),
        d_out_(p.value_dim), halves_(kQueries * kKeys / 2) {}

  void start(const Place& block) {
    keys_ = block.count;
    const uint16_t *k[kKeys], *v[kKeys];
    find(p_, p_.keys, block, k), find(p_, p_.values, block, v);
    k_turned_.of(k, p_.key_dim / 2, keys_), v_turned_.of(v, p_.value_dim / 2, keys_);
    k_.of(k, keys_);
  }

  void read(int64_t head, int64_t token, int64_t rows) {
    rows_ = rows;
    q_words_ = pair(p_.q, p_.key_dim, head, token, q_);
    d_out_words_ = pair(p_.d_out, p_.value_dim, head, token, d_out_);
  }

  void score(float* scores, float* d_weights) {
    const int64_t of_k = p_.key_dim / 2, of_v = p_.value_dim / 2;
    accumulate<PairWords>(q_words_, p_.heads * of_k, 1, rows_, k_turned_.pointers(), of_k, kKeys,
                         scores, kKeys, false);
    accumulate<PairWords>(d_out_words_, p_.heads * of_v, 1, rows_, v_turned_.pointers(), of_v, kKeys,
                         d_weights, kKeys, false);
  }

  void add(const float* weights, const float* d_scores, float* d_q, float* d_k, float* d_v) {
    const int64_t width = whole_vectors(p_.key_dim), v_width = whole_vectors(p_.value_dim);
    const int64_t pairs = (rows_ + 1) / 2;
    round_in_pairs(weights, rows_, halves_.data);
    accumulate<PairWords>(halves_.data, 1, kKeys, keys_, d_out_.pairs, pairs, v_width, d_v, v_width);
    round_in_pairs(d_scores, rows_, halves_.data);
    accumulate<PairWords>(halves_.data, 1, kKeys, keys_, q_.pairs, pairs, width, d_k, width);
    round_all(d_scores, rows_ * kKeys, halves_.data);
    accumulate<PairWords>(halves_.data, kKeys / 2, 1, rows_, k_.pairs, (keys_ + 1) / 2, width, d_q,
                          width);
  }

 private:
  // Pair the tokens of one head of q, or of an array that lies as q does; return where they lie.
  const float* pair(const void* from, int64_t dim, int64_t head, int64_t token, PairedRows& to) const {
    const uint16_t* found[kQueries];
    for (int64_t i = 0; i < rows_; ++i)
      found[i] = static_cast<const uint16_t*>(from) + ((token + i) * p_.heads + head) * dim;
    to.of(found, rows_);
    return reinterpret_cast<const float*>(found[0]);
  }

  const Attend& p_;
  int64_t keys_ = 0, rows_ = 0;
  const float *q_words_ = nullptr, *d_out_words_ = nullptr;
  Turned k_turned_, v_turned_;
  PairedRows k_, q_, d_out_;
  Scratch halves_;
};
#endif

// A query of a block.
struct Query {
  int64_t row, head, place;  // place: index among all queries of the row
  int64_t index;             // in its block
  float lse, shared;
};

// Make the weights of the scores [kKeys] of a query, and the gradient of its scores of `d`, the gradient
// of its weights. `d_distance` has the biases of all query heads of the key head.
inline void differentiate(const Attend& p, const Query& of, const Tokens& queries, const Tokens& keys,
                          const uint32_t* places, Seen what, float* scores, float* d,
                          float* d_distance) {
  // The slope of the cap is kept in `slopes`: masked scores have none.
  alignas(64) float slopes[kKeys], factors[kKeys];
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    Vec score = load(scores + j) * p.scale, slope = broadcast(p.scale);
    if (p.soft_cap != 0) {
      Vec t = squash(score * (1 / p.soft_cap));
      score = p.soft_cap * t, slope = p.scale * (1.0f - t * t);
    }
    store(scores + j, score), store(slopes + j, slope);
  }
  add_biases(p, of.head, queries, of.index, keys, scores);
  if (what == Seen::kSome) mask(p, queries, of.index, keys, scores);
  for (int64_t j = keys.count; j < kKeys; ++j) scores[j] = kNothing;
  // A query that sees nothing has no weights.
  const float lse = of.lse == kNothing ? -kNothing : of.lse;
  if (p.drop_below > 0) {
    factors_of(p, of.row, of.head, of.place, places, factors);
    for (int64_t j = 0; j < kKeys; j += kLanes) store(d + j, load(d + j) * load(factors + j));
  }
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    Vec weight = exponential(load(scores + j) - lse);
    store(scores + j, weight);
    store(d + j, weight * (load(d + j) - of.shared));
  }
  if (p.by_distance) {
    const int64_t of_group = of.head % (p.heads / p.groups);
    add_slopes(d, p.reach, queries, of.index, keys, d_distance + of_group * (2 * p.reach + 1));
  }
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    store(d + j, load(d + j) * load(slopes + j));
    if (p.drop_below > 0) store(scores + j, load(scores + j) * load(factors + j));
  }
}

// Write or add rows of `from` [count, width] to rows of `to`, which are `stride` numbers apart.
inline void put_rows(const float* from, int64_t width, int64_t count, int64_t dim, bool add, float* to,
                     int64_t stride) {
  for (int64_t i = 0; i < count; ++i, from += width, to += stride)
    for (int64_t c = 0; c < dim; ++c) to[c] = add ? to[c] + from[c] : from[c];
}

template <typename Products>
void backward_by(const Attend& p, int64_t row, int64_t group, int64_t first_key, int64_t last_key,
                 float* d_q, float* d_distance) {
  const int64_t repeat = p.heads / p.groups;
  const int64_t width = whole_vectors(p.key_dim), v_width = whole_vectors(p.value_dim);
  Products products(p);
  Scratch d_queries(p.queries * width), d_keys(kKeys * width), d_values(kKeys * v_width);
  Scratch scores(kQueries * kKeys), d_scores(kQueries * kKeys);
  alignas(64) uint32_t places[kKeys];
  Tokens queries, keys;
  for (int64_t head = group * repeat; head < (group + 1) * repeat; ++head) {
    std::memset(d_queries.data, 0, p.queries * width * sizeof(float));
    for (int64_t at = first_key; at < last_key; at += kKeys) {
      const int64_t n = least(kKeys, last_key - at), slot = row * p.slots + at;
      keys.read(p.k_segments, p.k_index, slot, at, n);
      if (p.drop_below > 0) hash_places(p, at, places);
      std::memset(d_keys.data, 0, kKeys * width * sizeof(float));
      std::memset(d_values.data, 0, kKeys * v_width * sizeof(float));
      bool started = false;
      for (int64_t first = 0; first < p.queries; first += kQueries) {
        const int64_t rows = least(kQueries, p.queries - first), token = row * p.queries + first;
        queries.read(p.q_segments, p.q_index, token, first, rows);
        const Seen what = seen(p, queries, keys);
        if (what == Seen::kNone) continue;
        if (!started) products.start({row, group, at, n, 0}), started = true;
        products.read(head, token, rows);
        products.score(scores.data, d_scores.data);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t of = (token + r) * p.heads + head;
          const Query query{row, head, first + r, r, p.lse[of], p.shared[of]};
          differentiate(p, query, queries, keys, places, what, scores.data + r * kKeys,
                        d_scores.data + r * kKeys, d_distance);
        }
        products.add(scores.data, d_scores.data, d_queries.data + first * width, d_keys.data,
                     d_values.data);
      }
      const bool add = head > group * repeat;
      put_rows(d_keys.data, width, n, p.key_dim, add, p.d_k + (slot * p.groups + group) * p.key_dim,
               p.groups * p.key_dim);
      put_rows(d_values.data, v_width, n, p.value_dim, add,
               p.d_v + (slot * p.groups + group) * p.value_dim, p.groups * p.value_dim);
    }
    put_rows(d_queries.data, width, p.queries, p.key_dim, false,
             d_q + (row * p.queries * p.heads + head) * p.key_dim, p.heads * p.key_dim);
  }
}

void backward(const Attend& p, int64_t row, int64_t group, int64_t first_key, int64_t last_key,
              float* d_q, float* d_distance) {
#if defined(__AVX512BF16__)
  if (PairGradients::take(p))
    return backward_by<PairGradients>(p, row, group, first_key, last_key, d_q, d_distance);
#endif
  backward_by<PlainGradients>(p, row, group, first_key, last_key, d_q, d_distance);
}

}  // namespace
}  // namespace ed
