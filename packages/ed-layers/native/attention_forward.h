// Forward pass of attention, for one level: block by block with an online softmax (FlashAttention,
// Dao et al. 2022), so no [queries, slots] array exists. A block of queries has all heads that
// share a key head. Blocks of keys that no query of the block sees are skipped.
#pragma once

#include "attention_backward.h"
#include "attention_bias.h"
#include "attention_products.h"
#include "online_softmax.h"

namespace ed {
namespace {

int64_t get_block_queries(const AttentionArgs& p) {
  return max_int(1, kBlockQueries / (p.heads / p.groups));
}

// Multiply scores [rows, kBlockKeys] by a factor.
inline void scale_scores(float* scores, int64_t rows, float factor) {
  for (int64_t i = 0; i < rows * kBlockKeys; i += kLanes)
    store(scores + i, load(scores + i) * factor);
}

// Return the number of slots of a row without the trailing slots that have no segment. No query
// sees those.
inline int64_t count_used_slots(const int32_t* segments, int64_t slots) {
  for (; slots >= kBlockKeys; slots -= kBlockKeys) {
    int32_t any = 0;
    for (int64_t i = slots - kBlockKeys; i < slots; ++i) any |= segments[i];
    if (any) break;
  }
  while (slots > 0 && segments[slots - 1] == 0) --slots;
  return slots;
}

// The range of slots that the queries [first, last) of a row can see.
struct KeyRange {
  KeyRange(const AttentionArgs& p, int64_t row, int64_t first, int64_t last) {
    end = p.lengths ? p.lengths[row] : p.slots;
    if (p.k_segments) end = count_used_slots(p.k_segments + row * p.slots, end);
    if (!p.lengths) return;
    first_position = end - (p.first_query[row + 1] - p.first_query[row]) + first;
    end = min_int(end, first_position + last - first);
    if (p.window > 0) begin = max_int(0, first_position - p.window + 1);
    if (p.chunk > 0) begin = max_int(begin, first_position / p.chunk * p.chunk);
    unread = begin;  // earlier pages may be free
    if (p.fixed_order) begin = begin / kBlockKeys * kBlockKeys;
  }

  // Return the block of keys that starts at slot `at`.
  SlotRange block(int64_t row, int64_t group, int64_t at) const {
    return {row, group, at, min_int(kBlockKeys, end - at), unread - at};
  }

  int64_t first_position = 0, begin = 0, unread = 0, end;
};

// Return whether loading keys and values takes longer than the computation. Such blocks are
// prefetched.
inline bool is_memory_bound(const AttentionArgs& p, int64_t queries) {
  return queries * (p.heads / p.groups) <= kFewQueries;
}

// Prefetch the first block of a task of `forward`.
void prefetch_first_block(const AttentionArgs& p, int64_t row, int64_t group, int64_t first,
                          int64_t last) {
  if (!is_memory_bound(p, last - first)) return;
  const KeyRange range(p, row, first, last);
  if (range.begin < range.end) prefetch_kv(p, range.block(row, group, range.begin));
}

// Attention of queries [first, last) of a row, for the heads that share key head `group`. Each
// block of keys is multiplied with all blocks of queries, at most kTaskBlocks.
template <typename Products>
void attend_forward(const AttentionArgs& p, int64_t row, int64_t group, int64_t first,
                    int64_t last) {
  int64_t repeat = p.heads / p.groups, count = last - first, block_size = get_block_queries(p);
  int64_t token = (p.first_query ? p.first_query[row] : row * p.queries) + first;
  const KeyRange range(p, row, first, last);
  // Block b has the queries from `starts[b]` on, and its rows start at `b * stride`.
  const int64_t blocks = (count + block_size - 1) / block_size;
  const int64_t stride = round_up_lanes(min_int(count, block_size) * repeat);
  TokenBlock queries[kTaskBlocks], keys;
  int64_t starts[kTaskBlocks + 1];
  Products products(p, blocks * stride, stride);
  OnlineSoftmax softmax(blocks * stride);
  float *max_score = softmax.max_score, *sum = softmax.sum;
  const int64_t out_width = products.out_width;
  Scratch out(blocks * stride * out_width), scores(stride * kBlockKeys);
  alignas(64) uint32_t position_hashes[kBlockKeys];
  alignas(64) float factors[kBlockKeys];
  std::memset(out.data, 0, blocks * stride * out_width * sizeof(float));
  for (int64_t b = 0; b <= blocks; ++b) starts[b] = count * b / blocks;
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t at = first + starts[b];
    queries[b].read(p.q_segments, p.q_index, row * p.queries + at, range.first_position + starts[b],
                    starts[b + 1] - starts[b]);
    for (int64_t r = 0; r < queries[b].count * repeat; ++r)
      products.read_query(
          b * stride + r,
          ((token + starts[b] + r / repeat) * p.heads + group * repeat + r % repeat) * p.key_dim);
  }
  // The softmax applies the factor of the scores unless another step needs the scaled scores.
  const bool scaled = p.soft_cap != 0 || p.distance_bias || p.slopes;
  for (int64_t at = range.begin; at < range.end; at += kBlockKeys) {
    const SlotRange block = range.block(row, group, at);
    const int64_t n = block.count, next = at + kBlockKeys;
    keys.read(p.k_segments, p.k_index, row * p.slots + at, at, n);
    products.start(block);
    if (next < range.end && is_memory_bound(p, count))
      prefetch_kv(p, range.block(row, group, next));
    if (p.drop_threshold > 0) hash_positions(p, at, position_hashes);
    for (int64_t b = 0; b < blocks; ++b) {
      const TokenBlock& block_queries = queries[b];
      int64_t rows = block_queries.count * repeat;
      float* block_out = out.data + b * stride * out_width;
      Visibility visibility = classify_block(p, block_queries, keys);
      if (visibility == Visibility::kNone) continue;
      products.score(b * stride, rows, scores.data);
      if (scaled && products.score_factor != 1)
        scale_scores(scores.data, rows, products.score_factor);
      if (scaled || visibility == Visibility::kStep || n < kBlockKeys)
        for (int64_t r = 0; r < rows; ++r) {
          float* row_scores = scores.data + r * kBlockKeys;
          if (p.soft_cap != 0)
            for (int64_t j = 0; j < kBlockKeys; j += kLanes)
              store(row_scores + j, p.soft_cap * vec_tanh(load(row_scores + j) * (1 / p.soft_cap)));
          add_biases(p, group * repeat + r % repeat, block_queries, r / repeat, keys, row_scores);
          if (visibility == Visibility::kStep)
            mask_scores(p, block_queries, r / repeat, keys, row_scores);
          for (int64_t j = n; j < kBlockKeys; ++j) row_scores[j] = kMinusInfinity;
        }
      softmax.update<Products::rounds_weights>(b * stride, rows, scaled ? 1 : products.score_factor,
                                               scores.data, block_out, out_width);
      if (p.drop_threshold > 0)
        for (int64_t r = 0; r < rows; ++r) {
          int64_t query = first + starts[b] + r / repeat;
          compute_dropout_factors(p, row, group * repeat + r % repeat, query, position_hashes,
                                  factors);
          float* row_scores = scores.data + r * kBlockKeys;
          for (int64_t j = 0; j < kBlockKeys; j += kLanes)
            store(row_scores + j, load(row_scores + j) * load(factors + j));
        }
      products.add_values(rows, scores.data, block_out);
    }
  }
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t i = 0; i < queries[b].count * repeat; ++i) {
      int64_t r = b * stride + i, head = group * repeat + i % repeat;
      int64_t to = (token + starts[b] + i / repeat) * p.heads + head;
      bool none = max_score[r] == kMinusInfinity && sum[r] == 0;
      float factor = none ? 0 : 1 / sum[r];
      if (p.sinks && !none) {
        // The sink may be the largest score. Subtract the larger value, so no exponential
        // overflows.
        float sink = p.sinks[head], max_total = sink > max_score[r] ? sink : max_score[r];
        float keys = vec_exp(broadcast(max_score[r] - max_total))[0];
        factor = keys / (sum[r] * keys + vec_exp(broadcast(sink - max_total))[0]);
      }
      if (p.lse) p.lse[to] = none ? kMinusInfinity : max_score[r] + __builtin_logf(sum[r]);
      for (int64_t c = 0; c < p.value_dim; ++c) {
        float number = out.data[r * out_width + c] * factor;
        if (p.q_is_bfloat16)
          static_cast<uint16_t*>(p.out)[to * p.value_dim + c] = narrow(number);
        else
          static_cast<float*>(p.out)[to * p.value_dim + c] = number;
      }
    }
}

void forward(const AttentionArgs& p, int64_t row, int64_t group, int64_t first, int64_t last) {
#if defined(__AVX512BF16__)
  if (Bf16Products::supports(p)) return attend_forward<Bf16Products>(p, row, group, first, last);
#endif
  attend_forward<Float32Products>(p, row, group, first, last);
}

constexpr AttentionKernels kAttentionKernels = {get_block_queries, prefetch_first_block, forward,
                                                backward};

}  // namespace
}  // namespace ed
