// Score biases by the distance of query and key, for one level.
#pragma once

#include "attention_blocks.h"

namespace ed {
namespace {

// Return the biases of query i for a block of consecutive keys, or null if a distance is clamped.
inline const float* find_bias_run(const float* head_bias, int64_t max_distance, const TokenBlock& q,
                                  int64_t i, const TokenBlock& k) {
  int64_t first = int64_t{k.position[0]} - q.position[i];
  return k.consecutive && first >= -max_distance && first + kBlockKeys - 1 <= max_distance
             ? head_bias + max_distance + first
             : nullptr;
}

// Return the index of a distance in the table.
inline int64_t get_bias_index(int64_t max_distance, int32_t query, int32_t key) {
  int64_t distance = int64_t{key} - query;
  return max_distance + (distance > max_distance    ? max_distance
                         : distance < -max_distance ? -max_distance
                                                    : distance);
}

// Add the biases of a table to the scores [kBlockKeys] of one query.
inline void add_table(const float* head_bias, int64_t max_distance, const TokenBlock& q, int64_t i,
                      const TokenBlock& k, float* scores) {
  if (const float* bias_run = find_bias_run(head_bias, max_distance, q, i, k)) {
    for (int64_t j = 0; j < kBlockKeys; j += kLanes)
      store(scores + j, load(scores + j) + load(bias_run + j));
    return;
  }
  for (int64_t j = 0; j < kBlockKeys; ++j)
    scores[j] += head_bias[get_bias_index(max_distance, q.position[i], k.position[j])];
}

// Add ALiBi to the scores [kBlockKeys] of one query.
inline void add_alibi(const AttentionArgs& p, float slope, const TokenBlock& q, int64_t i,
                      const TokenBlock& k, float* scores) {
  int32_t query = q.position[i];
  for (int64_t j = 0; j < kBlockKeys; ++j) {
    float bias = slope * static_cast<float>(k.position[j] - query);
    if (p.alibi_rounded) {
      float product = slope * static_cast<float>(k.position[j]);
      bias += widen(narrow(product)) - product;
    }
    scores[j] += bias * p.alibi_factor;
  }
}

// Add the biases of a head to the scores [kBlockKeys] of one query.
inline void add_biases(const AttentionArgs& p, int64_t head, const TokenBlock& q, int64_t i,
                       const TokenBlock& k, float* scores) {
  if (p.distance_bias)
    add_table(p.distance_bias + head * (2 * p.max_distance + 1), p.max_distance, q, i, k, scores);
  if (p.slopes) add_alibi(p, p.slopes[head], q, i, k, scores);
}

// Add the score gradients [kBlockKeys] of one query to the gradient of a table.
inline void add_table_gradient(const float* slopes, int64_t max_distance, const TokenBlock& q,
                               int64_t i, const TokenBlock& k, float* d_distance_bias) {
  if (const float* bias_run = find_bias_run(d_distance_bias, max_distance, q, i, k)) {
    float* to = d_distance_bias + (bias_run - d_distance_bias);
    for (int64_t j = 0; j < kBlockKeys; j += kLanes) store(to + j, load(to + j) + load(slopes + j));
    return;
  }
  for (int64_t j = 0; j < kBlockKeys; ++j)
    d_distance_bias[get_bias_index(max_distance, q.position[i], k.position[j])] += slopes[j];
}

}  // namespace
}  // namespace ed
