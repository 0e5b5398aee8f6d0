// Attention, for one level of instructions: block by block with a running softmax (FlashAttention,
// Dao et al. 2022), so that no [queries, slots] array exists. A block of queries has all heads that
// share a key head. Blocks of keys that no query of the block sees are left out.
#pragma once

#include "attention_back.h"
#include "biases.h"
#include "block_products.h"
#include "softmax.h"

namespace ed {
namespace {

int64_t queries_of_block(const Attend& p) {
  return most(1, kQueries / (p.heads / p.groups));
}

// Multiply scores [rows, kKeys] by a factor.
inline void scale_scores(float* scores, int64_t rows, float factor) {
  for (int64_t i = 0; i < rows * kKeys; i += kLanes) store(scores + i, load(scores + i) * factor);
}

// The number of slots of a row without those at its end that have no segment: no query sees these.
inline int64_t used_slots(const int32_t* segments, int64_t slots) {
  for (; slots >= kKeys; slots -= kKeys) {
    int32_t any = 0;
    for (int64_t i = slots - kKeys; i < slots; ++i) any |= segments[i];
    if (any) break;
  }
  while (slots > 0 && segments[slots - 1] == 0) --slots;
  return slots;
}

// The slots that queries [first, last) of a row look at: the others lie behind or before all of them.
struct Range {
  Range(const Attend& p, int64_t row, int64_t first, int64_t last) {
    end = p.lengths ? p.lengths[row] : p.slots;
    if (p.k_segments) end = used_slots(p.k_segments + row * p.slots, end);
    if (!p.lengths) return;
    place = end - (p.first_query[row + 1] - p.first_query[row]) + first;
    end = least(end, place + last - first);
    if (p.window > 0) begin = most(0, place - p.window + 1);
    if (p.chunk > 0) begin = most(begin, place / p.chunk * p.chunk);
    unread = begin;  // pages before may be free
    if (p.fixed) begin = begin / kKeys * kKeys;
  }

  // The block of keys from slot `at` on.
  Place block(int64_t row, int64_t group, int64_t at) const {
    return {row, group, at, least(kKeys, end - at), unread - at};
  }

  int64_t place = 0, begin = 0, unread = 0, end;
};

// Whether queries need less time than memory for their keys and values, which are then fetched early.
inline bool waits_for_memory(const Attend& p, int64_t queries) {
  return queries * (p.heads / p.groups) <= kFewQueries;
}

// Fetch the first block of a task of `forward`.
void fetch_first(const Attend& p, int64_t row, int64_t group, int64_t first, int64_t last) {
  if (!waits_for_memory(p, last - first)) return;
  const Range range(p, row, first, last);
  if (range.begin < range.end) fetch(p, range.block(row, group, range.begin));
}

// Attention of queries [first, last) of a row, by the heads that share key head `group`. Each block
// of keys meets all blocks of queries, of which there are at most kBlocksOfTask.
template <typename Products>
void forward_by(const Attend& p, int64_t row, int64_t group, int64_t first, int64_t last) {
  int64_t repeat = p.heads / p.groups, count = last - first, of_block = queries_of_block(p);
  int64_t token = (p.first_query ? p.first_query[row] : row * p.queries) + first;
  const Range range(p, row, first, last);
  // Of block b: queries from `starts[b]` on, and rows from `b * stride` on.
  const int64_t blocks = (count + of_block - 1) / of_block;
  const int64_t stride = whole_vectors(least(count, of_block) * repeat);
  Tokens queries[kBlocksOfTask], keys;
  int64_t starts[kBlocksOfTask + 1];
  Products products(p, blocks * stride, stride);
  RunningSoftmax softmax(blocks * stride);
  float *largest = softmax.largest, *sum = softmax.sum;
  const int64_t out_width = products.out_width;
  Scratch out(blocks * stride * out_width), scores(stride * kKeys);
  alignas(64) uint32_t places[kKeys];
  alignas(64) float factors[kKeys];
  std::memset(out.data, 0, blocks * stride * out_width * sizeof(float));
  for (int64_t b = 0; b <= blocks; ++b) starts[b] = count * b / blocks;
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t at = first + starts[b];
    queries[b].read(p.q_segments, p.q_index, row * p.queries + at, range.place + starts[b],
                    starts[b + 1] - starts[b]);
    for (int64_t r = 0; r < queries[b].count * repeat; ++r)
      products.read_query(b * stride + r, ((token + starts[b] + r / repeat) * p.heads +
                                           group * repeat + r % repeat) * p.key_dim);
  }
  // The factor of scores is left to the softmax where nothing else reads them.
  const bool scaled = p.soft_cap != 0 || p.by_distance || p.slopes;
  for (int64_t at = range.begin; at < range.end; at += kKeys) {
    const Place block = range.block(row, group, at);
    const int64_t n = block.count, next = at + kKeys;
    keys.read(p.k_segments, p.k_index, row * p.slots + at, at, n);
    products.start(block);
    if (next < range.end && waits_for_memory(p, count)) fetch(p, range.block(row, group, next));
    if (p.drop_below > 0) hash_places(p, at, places);
    for (int64_t b = 0; b < blocks; ++b) {
      const Tokens& own_queries = queries[b];
      int64_t rows = own_queries.count * repeat;
      float* own_out = out.data + b * stride * out_width;
      Seen what = seen(p, own_queries, keys);
      if (what == Seen::kNone) continue;
      products.score(b * stride, rows, scores.data);
      if (scaled && products.score_factor != 1)
        scale_scores(scores.data, rows, products.score_factor);
      if (scaled || what == Seen::kSome || n < kKeys)
        for (int64_t r = 0; r < rows; ++r) {
          float* own = scores.data + r * kKeys;
          if (p.soft_cap != 0)
            for (int64_t j = 0; j < kKeys; j += kLanes)
              store(own + j, p.soft_cap * squash(load(own + j) * (1 / p.soft_cap)));
          add_biases(p, group * repeat + r % repeat, own_queries, r / repeat, keys, own);
          if (what == Seen::kSome) mask(p, own_queries, r / repeat, keys, own);
          for (int64_t j = n; j < kKeys; ++j) own[j] = kNothing;
        }
      softmax.weigh<Products::halves>(b * stride, rows, scaled ? 1 : products.score_factor,
                                      scores.data, own_out, out_width);
      if (p.drop_below > 0)
        for (int64_t r = 0; r < rows; ++r) {
          int64_t query = first + starts[b] + r / repeat;
          factors_of(p, row, group * repeat + r % repeat, query, places, factors);
          float* own = scores.data + r * kKeys;
          for (int64_t j = 0; j < kKeys; j += kLanes) store(own + j, load(own + j) * load(factors + j));
        }
      products.add_values(rows, scores.data, own_out);
    }
  }
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t i = 0; i < queries[b].count * repeat; ++i) {
      int64_t r = b * stride + i, head = group * repeat + i % repeat;
      int64_t to = (token + starts[b] + i / repeat) * p.heads + head;
      bool none = largest[r] == kNothing && sum[r] == 0;
      float factor = none ? 0 : 1 / sum[r];
      if (p.sinks && !none) {
        // The sink may be the largest score: subtract the larger one, so that no exponential overflows.
        float sink = p.sinks[head], top = sink > largest[r] ? sink : largest[r];
        float keys = exponential(broadcast(largest[r] - top))[0];
        factor = keys / (sum[r] * keys + exponential(broadcast(sink - top))[0]);
      }
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

void forward(const Attend& p, int64_t row, int64_t group, int64_t first, int64_t last) {
#if defined(__AVX512BF16__)
  if (PairProducts::take(p)) return forward_by<PairProducts>(p, row, group, first, last);
#endif
  forward_by<PlainProducts>(p, row, group, first, last);
}

constexpr Attention attention_of = {queries_of_block, fetch_first, forward, backward};

}  // namespace
}  // namespace ed
