// Biases of scores by the distance of query and key, for one level of instructions.
#pragma once

#include "blocks.h"

namespace ed {
namespace {

// Where the biases of query i and the keys of a block lie in a table, if the keys are consecutive
// and none of them is beyond the reach; else null.
inline const float* run_of(const float* of_head, int64_t reach, const Tokens& q, int64_t i,
                           const Tokens& k) {
  int64_t first = int64_t{k.place[0]} - q.place[i];
  return k.consecutive && first >= -reach && first + kKeys - 1 <= reach ? of_head + reach + first
                                                                        : nullptr;
}

// The index of the bias of a distance.
inline int64_t index_of(int64_t reach, int32_t query, int32_t key) {
  int64_t ahead = int64_t{key} - query;
  return reach + (ahead > reach ? reach : ahead < -reach ? -reach : ahead);
}

// Add the biases of a table to the scores [kKeys] of one query.
inline void add_table(const float* of_head, int64_t reach, const Tokens& q, int64_t i,
                     const Tokens& k, float* scores) {
  if (const float* run = run_of(of_head, reach, q, i, k)) {
    for (int64_t j = 0; j < kKeys; j += kLanes) store(scores + j, load(scores + j) + load(run + j));
    return;
  }
  for (int64_t j = 0; j < kKeys; ++j) scores[j] += of_head[index_of(reach, q.place[i], k.place[j])];
}

// Add ALiBi to the scores [kKeys] of one query.
inline void add_alibi(const Attend& p, float slope, const Tokens& q, int64_t i, const Tokens& k,
                      float* scores) {
  int32_t query = q.place[i];
  for (int64_t j = 0; j < kKeys; ++j) {
    float bias = slope * static_cast<float>(k.place[j] - query);
    if (p.alibi_rounded) {
      float product = slope * static_cast<float>(k.place[j]);
      bias += widen(narrow(product)) - product;
    }
    scores[j] += bias * p.alibi_factor;
  }
}

// Add the biases of a head to the scores [kKeys] of one query.
inline void add_biases(const Attend& p, int64_t head, const Tokens& q, int64_t i, const Tokens& k,
                       float* scores) {
  if (p.by_distance)
    add_table(p.by_distance + head * (2 * p.reach + 1), p.reach, q, i, k, scores);
  if (p.slopes) add_alibi(p, p.slopes[head], q, i, k, scores);
}

// Add the slopes [kKeys] of the scores of one query to the gradient of a table.
inline void add_slopes(const float* slopes, int64_t reach, const Tokens& q, int64_t i,
                       const Tokens& k, float* d_distance) {
  if (const float* run = run_of(d_distance, reach, q, i, k)) {
    float* to = d_distance + (run - d_distance);
    for (int64_t j = 0; j < kKeys; j += kLanes) store(to + j, load(to + j) + load(slopes + j));
    return;
  }
  for (int64_t j = 0; j < kKeys; ++j)
    d_distance[index_of(reach, q.place[i], k.place[j])] += slopes[j];
}

}  // namespace
}  // namespace ed
