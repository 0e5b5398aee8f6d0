// Attention and rotary positions: the arguments and the kernel table of a level. No dependency on
// XLA.
#pragma once

#include <cstdint>

namespace ed {

// The storage type of keys and values.
enum class StorageType { kFloat32, kBfloat16, kInt8, kFp8 };

constexpr int64_t get_byte_width(StorageType kind) {
  return kind == StorageType::kFloat32 ? 4 : kind == StorageType::kBfloat16 ? 2 : 1;
}

// An array with rows, heads and slots. The numbers of one head and slot are contiguous. Strides are
// counts of numbers.
struct SlotArray {
  const void* data;
  StorageType kind;
  int64_t row, head, slot;
  // Scales of int8 and fp8 codes: one for each head and slot, or one for each of several groups.
  const float* scale;
  int64_t scale_row, scale_head, scale_slot, scale_group, scale_groups;
};

// The arguments of one call: softmax(cap(scale * q k) where allowed) v. Groups of query heads share
// a key head. The slots of a row may be in pages; then `row` is the stride between pages.
struct AttentionArgs {
  const void* q;  // [batch, queries, heads, key_dim], float32 or bfloat16
  bool q_is_bfloat16;
  SlotArray keys, values;
  int64_t batch, queries, heads, groups, slots, key_dim, value_dim;

  // Row b has the queries `first_query[b]` to `first_query[b + 1] - 1` of [.., heads, key_dim];
  // null: every row has `queries` queries.
  const int32_t* first_query;
  int64_t rows;            // number of rows of first_query in use
  const int32_t* lengths;  // for pages: slots of each row, including the queries; null = `slots`
  const int32_t* pages;    // [batch, pages_of_row]; null = no pages
  int64_t page_size, pages_of_row;

  // The mask, as MaskInfo of ed_infra.masks: [batch, queries] and [batch, slots]. Null: the index
  // of a slot is its position, and the queries are the last tokens of their row.
  const int32_t *q_segments, *q_index, *k_segments, *k_index;
  bool causal;
  int32_t window, chunk;  // 0 = none
  // Whether the sums of a query have the same order in every call that reads equal keys. Other
  // queries, pages and the window then change no bit.
  bool fixed_order;

  float scale, soft_cap;  // soft_cap 0 = none
  const float* sinks;     // [heads] or null

  // Biases of the capped scores by distance, which is the position of the key minus the position of
  // the query. The table is [heads, 2 * max_distance + 1]; distances are clamped to [-max_distance,
  // max_distance].
  const float* distance_bias;
  int64_t max_distance;
  // ALiBi: slope [heads] * distance * `alibi_factor`, or null. `alibi_rounded`: the product of the
  // slope and the key position is rounded to bfloat16. See `Alibi` in
  // ed_layers/attention/scoring.py.
  const float* slopes;
  float alibi_factor;
  bool alibi_rounded;

  // Dropout: a weight with a hash below `drop_threshold` becomes zero; other weights are multiplied
  // by `keep_scale`. The hash is the one in ed_layers/attention/scoring.py.
  int64_t drop_threshold;  // 0 = none
  float keep_scale;
  uint32_t seed[2];

  void* out;   // same layout as q, with value_dim
  float* lse;  // [batch, queries, heads] or null; -inf for a query without visible keys

  // Backward pass. Gradients have the layouts of q, k and v. The gradients of q, k and v are
  // float32.
  const void* d_out;    // same layout as `out`
  const float* shared;  // [batch, queries, heads]: sum(d_out * out) - d_lse
  float *d_k, *d_v;
};

// Rotary positions of queries or keys: the first `2 * pairs` numbers of each head are rotated by
// the angles of the token. The rest is copied.
struct RotaryArgs {
  const void* x;  // [tokens, heads, dim], float32 or bfloat16
  bool is_bfloat16;
  void* y;  // same layout as x
  int64_t tokens, heads, dim, pairs;
  const float *cos, *sin;  // [tokens, pairs]
  bool interleaved;        // whether a pair is two neighbours, not one number of each half
  bool inverse;            // rotate by the negative angle
};

constexpr int64_t kBlockKeys = 64;  // slots of a block

// The largest number of query blocks in a task, which share the preparation of keys and values.
constexpr int64_t kTaskBlocks = 6;

struct AttentionKernels {
  // `get_block_queries` returns the number of queries of a block. `forward` computes queries
  // [first, last) of a row over one key head. `prefetch` prefetches the first keys and values of
  // such a task.
  int64_t (*get_block_queries)(const AttentionArgs&);
  void (*prefetch)(const AttentionArgs&, int64_t row, int64_t group, int64_t first, int64_t last);
  void (*forward)(const AttentionArgs&, int64_t row, int64_t group, int64_t first, int64_t last);
  // Gradients of the slots [first, last) of a row and key head. Writes these rows of d_k and d_v
  // and this range's part of the gradient of q. Adds to `d_distance_bias` [query heads of the key
  // head, 2 * max_distance + 1].
  void (*backward)(const AttentionArgs&, int64_t row, int64_t group, int64_t first, int64_t last,
                   float* d_q, float* d_distance_bias);
};

}  // namespace ed
