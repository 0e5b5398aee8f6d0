// Backward pass of attention, for one level. The kernel computes the weights of each pair of a key
// block and a query block again.
//
// A `Products` struct computes the products of such a pair. `start` sets the block of keys and
// values, and `read` sets the queries. `score` computes scores [rows, kBlockKeys] and the gradient
// of the weights. `add` adds the products of the weights and of the score gradients to the
// gradients.
#pragma once

#include "attention_bias.h"

namespace ed {
namespace {

// Products of float32 numbers.
struct Float32Gradients {
  explicit Float32Gradients(const AttentionArgs& p)
      : p_(p),
        k_(p.key_dim),
        v_(p.value_dim),
        q_(p.key_dim),
        d_out_(p.value_dim),
        k_transposed_(p.key_dim),
        v_transposed_(p.value_dim) {}

  void start(const SlotRange& block) {
    keys_ = block.count;
    k_.read(p_, p_.keys, block), k_transposed_.assign(k_, keys_);
    v_.read(p_, p_.values, block), v_transposed_.assign(v_, keys_);
  }

  void read(int64_t head, int64_t token, int64_t rows) {
    rows_ = rows;
    q_.read_tokens(p_.q, p_.q_is_bfloat16, p_.heads, head, token, rows);
    d_out_.read_tokens(p_.d_out, p_.q_is_bfloat16, p_.heads, head, token, rows);
  }

  void score(float* scores, float* d_weights) {
    accumulate<Float32Words>(q_.rows[0], q_.stride, 1, rows_, k_transposed_.pointers(), p_.key_dim,
                             kBlockKeys, scores, kBlockKeys, false);
    accumulate<Float32Words>(d_out_.rows[0], d_out_.stride, 1, rows_, v_transposed_.pointers(),
                             p_.value_dim, kBlockKeys, d_weights, kBlockKeys, false);
  }

  void add(const float* weights, const float* d_scores, float* d_q, float* d_k, float* d_v) {
    accumulate<Float32Words>(weights, 1, kBlockKeys, keys_, d_out_.rows, rows_, v_.width, d_v,
                             v_.width);
    accumulate<Float32Words>(d_scores, 1, kBlockKeys, keys_, q_.rows, rows_, k_.width, d_k,
                             k_.width);
    accumulate<Float32Words>(d_scores, kBlockKeys, 1, rows_, k_.rows, keys_, k_.width, d_q,
                             k_.width);
  }

 private:
  const AttentionArgs& p_;
  int64_t keys_ = 0, rows_ = 0;
  Block k_, v_, q_, d_out_;
  TransposedRows k_transposed_, v_transposed_;
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16 numbers, summed in float32.
struct Bf16Gradients {
  static bool supports(const AttentionArgs& p) {
    return uses_bf16_pairs(p) && p.value_dim % 8 == 0;
  }

  explicit Bf16Gradients(const AttentionArgs& p)
      : p_(p),
        k_transposed_(p.key_dim / 2),
        v_transposed_(p.value_dim / 2),
        k_(p.key_dim),
        q_(p.key_dim),
        d_out_(p.value_dim),
        rounded_(kBlockQueries * kBlockKeys / 2) {}

  void start(const SlotRange& block) {
    keys_ = block.count;
    const uint16_t *k[kBlockKeys], *v[kBlockKeys];
    locate_rows(p_, p_.keys, block, k), locate_rows(p_, p_.values, block, v);
    k_transposed_.assign(k, p_.key_dim / 2, keys_),
        v_transposed_.assign(v, p_.value_dim / 2, keys_);
    k_.assign(k, keys_);
  }

  void read(int64_t head, int64_t token, int64_t rows) {
    rows_ = rows;
    q_words_ = pair_tokens(p_.q, p_.key_dim, head, token, q_);
    d_out_words_ = pair_tokens(p_.d_out, p_.value_dim, head, token, d_out_);
  }

  void score(float* scores, float* d_weights) {
    const int64_t k_words = p_.key_dim / 2, v_words = p_.value_dim / 2;
    accumulate<Bf16PairWords>(q_words_, p_.heads * k_words, 1, rows_, k_transposed_.pointers(),
                              k_words, kBlockKeys, scores, kBlockKeys, false);
    accumulate<Bf16PairWords>(d_out_words_, p_.heads * v_words, 1, rows_, v_transposed_.pointers(),
                              v_words, kBlockKeys, d_weights, kBlockKeys, false);
  }

  void add(const float* weights, const float* d_scores, float* d_q, float* d_k, float* d_v) {
    const int64_t width = round_up_lanes(p_.key_dim), v_width = round_up_lanes(p_.value_dim);
    const int64_t pairs = (rows_ + 1) / 2;
    round_to_bf16_pairs(weights, rows_, rounded_.data);
    accumulate<Bf16PairWords>(rounded_.data, 1, kBlockKeys, keys_, d_out_.pairs, pairs, v_width,
                              d_v, v_width);
    round_to_bf16_pairs(d_scores, rows_, rounded_.data);
    accumulate<Bf16PairWords>(rounded_.data, 1, kBlockKeys, keys_, q_.pairs, pairs, width, d_k,
                              width);
    round_to_bf16(d_scores, rows_ * kBlockKeys, rounded_.data);
    accumulate<Bf16PairWords>(rounded_.data, kBlockKeys / 2, 1, rows_, k_.pairs, (keys_ + 1) / 2,
                              width, d_q, width);
  }

 private:
  // Pair the tokens of one head of q, or of an array with the layout of q. Return the address of
  // the first token.
  const float* pair_tokens(const void* from, int64_t dim, int64_t head, int64_t token,
                           Bf16PairRows& to) const {
    const uint16_t* token_rows[kBlockQueries];
    for (int64_t i = 0; i < rows_; ++i)
      token_rows[i] = static_cast<const uint16_t*>(from) + ((token + i) * p_.heads + head) * dim;
    to.assign(token_rows, rows_);
    return reinterpret_cast<const float*>(token_rows[0]);
  }

  const AttentionArgs& p_;
  int64_t keys_ = 0, rows_ = 0;
  const float *q_words_ = nullptr, *d_out_words_ = nullptr;
  TransposedRows k_transposed_, v_transposed_;
  Bf16PairRows k_, q_, d_out_;
  Scratch rounded_;
};
#endif

// A query of a block.
struct QueryRow {
  int64_t row, head, position;  // position: index among all queries of the row
  int64_t index;                // in its block
  float lse, shared;
};

// Replace the scores [kBlockKeys] of a query by its weights, and `d`, the gradient of the weights,
// by the gradient of the scores. `d_distance_bias` has the biases of all query heads of the key
// head.
inline void differentiate_scores(const AttentionArgs& p, const QueryRow& query,
                                 const TokenBlock& queries, const TokenBlock& keys,
                                 const uint32_t* position_hashes, Visibility visibility,
                                 float* scores, float* d, float* d_distance_bias) {
  // `slopes` has the derivative of the soft cap. Masked scores have none.
  alignas(64) float slopes[kBlockKeys], factors[kBlockKeys];
  for (int64_t j = 0; j < kBlockKeys; j += kLanes) {
    Vec score = load(scores + j) * p.scale, slope = broadcast(p.scale);
    if (p.soft_cap != 0) {
      Vec t = vec_tanh(score * (1 / p.soft_cap));
      score = p.soft_cap * t, slope = p.scale * (1.0f - t * t);
    }
    store(scores + j, score), store(slopes + j, slope);
  }
  add_biases(p, query.head, queries, query.index, keys, scores);
  if (visibility == Visibility::kStep) mask_scores(p, queries, query.index, keys, scores);
  for (int64_t j = keys.count; j < kBlockKeys; ++j) scores[j] = kMinusInfinity;
  // A query without visible keys has no weights.
  const float lse = query.lse == kMinusInfinity ? -kMinusInfinity : query.lse;
  if (p.drop_threshold > 0) {
    compute_dropout_factors(p, query.row, query.head, query.position, position_hashes, factors);
    for (int64_t j = 0; j < kBlockKeys; j += kLanes) store(d + j, load(d + j) * load(factors + j));
  }
  for (int64_t j = 0; j < kBlockKeys; j += kLanes) {
    Vec weight = vec_exp(load(scores + j) - lse);
    store(scores + j, weight);
    store(d + j, weight * (load(d + j) - query.shared));
  }
  if (p.distance_bias) {
    const int64_t group_head = query.head % (p.heads / p.groups);
    add_table_gradient(d, p.max_distance, queries, query.index, keys,
                       d_distance_bias + group_head * (2 * p.max_distance + 1));
  }
  for (int64_t j = 0; j < kBlockKeys; j += kLanes) {
    store(d + j, load(d + j) * load(slopes + j));
    if (p.drop_threshold > 0) store(scores + j, load(scores + j) * load(factors + j));
  }
}

// Store or add rows of `from` [count, width] to rows of `to` with a stride of `stride` numbers.
inline void store_rows(const float* from, int64_t width, int64_t count, int64_t dim, bool add,
                       float* to, int64_t stride) {
  for (int64_t i = 0; i < count; ++i, from += width, to += stride)
    for (int64_t c = 0; c < dim; ++c) to[c] = add ? to[c] + from[c] : from[c];
}

template <typename Products>
void attend_backward(const AttentionArgs& p, int64_t row, int64_t group, int64_t first_key,
                     int64_t last_key, float* d_q, float* d_distance_bias) {
  const int64_t repeat = p.heads / p.groups;
  const int64_t width = round_up_lanes(p.key_dim), v_width = round_up_lanes(p.value_dim);
  Products products(p);
  Scratch d_queries(p.queries * width), d_keys(kBlockKeys * width), d_values(kBlockKeys * v_width);
  Scratch scores(kBlockQueries * kBlockKeys), d_scores(kBlockQueries * kBlockKeys);
  alignas(64) uint32_t position_hashes[kBlockKeys];
  TokenBlock queries, keys;
  for (int64_t head = group * repeat; head < (group + 1) * repeat; ++head) {
    std::memset(d_queries.data, 0, p.queries * width * sizeof(float));
    for (int64_t at = first_key; at < last_key; at += kBlockKeys) {
      const int64_t n = min_int(kBlockKeys, last_key - at), slot = row * p.slots + at;
      keys.read(p.k_segments, p.k_index, slot, at, n);
      if (p.drop_threshold > 0) hash_positions(p, at, position_hashes);
      std::memset(d_keys.data, 0, kBlockKeys * width * sizeof(float));
      std::memset(d_values.data, 0, kBlockKeys * v_width * sizeof(float));
      bool started = false;
      for (int64_t first = 0; first < p.queries; first += kBlockQueries) {
        const int64_t rows = min_int(kBlockQueries, p.queries - first),
                      token = row * p.queries + first;
        queries.read(p.q_segments, p.q_index, token, first, rows);
        const Visibility visibility = classify_block(p, queries, keys);
        if (visibility == Visibility::kNone) continue;
        if (!started) products.start({row, group, at, n, 0}), started = true;
        products.read(head, token, rows);
        products.score(scores.data, d_scores.data);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t index = (token + r) * p.heads + head;
          const QueryRow query{row, head, first + r, r, p.lse[index], p.shared[index]};
          differentiate_scores(p, query, queries, keys, position_hashes, visibility,
                               scores.data + r * kBlockKeys, d_scores.data + r * kBlockKeys,
                               d_distance_bias);
        }
        products.add(scores.data, d_scores.data, d_queries.data + first * width, d_keys.data,
                     d_values.data);
      }
      const bool add = head > group * repeat;
      store_rows(d_keys.data, width, n, p.key_dim, add,
                 p.d_k + (slot * p.groups + group) * p.key_dim, p.groups * p.key_dim);
      store_rows(d_values.data, v_width, n, p.value_dim, add,
                 p.d_v + (slot * p.groups + group) * p.value_dim, p.groups * p.value_dim);
    }
    store_rows(d_queries.data, width, p.queries, p.key_dim, false,
               d_q + (row * p.queries * p.heads + head) * p.key_dim, p.heads * p.key_dim);
  }
}

void backward(const AttentionArgs& p, int64_t row, int64_t group, int64_t first_key,
              int64_t last_key, float* d_q, float* d_distance_bias) {
#if defined(__AVX512BF16__)
  if (Bf16Gradients::supports(p))
    return attend_backward<Bf16Gradients>(p, row, group, first_key, last_key, d_q, d_distance_bias);
#endif
  attend_backward<Float32Gradients>(p, row, group, first_key, last_key, d_q, d_distance_bias);
}

}  // namespace
}  // namespace ed
