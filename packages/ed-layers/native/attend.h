// Attention on a CPU, and what turns its queries and keys: the arguments, and the functions of one
// level. Nothing depends on XLA.
#pragma once

#include <cstdint>

namespace ed {

// How keys and values are stored.
enum class Stored { kFloat32, kBfloat16, kInt8, kFp8 };

constexpr int64_t bytes_of(Stored kind) {
  return kind == Stored::kFloat32 ? 4 : kind == Stored::kBfloat16 ? 2 : 1;
}

// Numbers of rows, heads and slots; the numbers of one head and slot lie together. Strides are in
// numbers.
struct Slots {
  const void* data;
  Stored kind;
  int64_t row, head, slot;
  // Of codes: a scale for each head and slot, or one for each of several groups of its numbers.
  const float* scale;
  int64_t scale_row, scale_head, scale_slot, scale_group, scale_groups;
};

// One call: softmax(cap(scale * q k) where allowed) v, the heads of q in groups that share a head
// of k and v. Slots of one row may lie in pages: then `row` is the stride of pages.
struct Attend {
  const void* q;  // [batch, queries, heads, key_dim], float32 or bfloat16
  bool q_is_bfloat16;
  Slots keys, values;
  int64_t batch, queries, heads, groups, slots, key_dim, value_dim;

  // Of row b: query i is token `first_query[b] + i` of [.., heads, key_dim], and there are
  // `first_query[b + 1] - first_query[b]`; null = `queries` for each.
  const int32_t* first_query;
  int64_t rows;             // of first_query that are in use
  const int32_t* lengths;   // of pages: slots of each row, queries included; null = `slots`
  const int32_t* pages;     // [batch, pages_of_row]; null = no pages
  int64_t page_size, pages_of_row;

  // Who may attend to whom: as MaskInfo of ed_infra.masks. [batch, queries] and [batch, slots];
  // null = a slot's index is its place, the queries are the last tokens of their row.
  const int32_t *q_segments, *q_index, *k_segments, *k_index;
  bool causal;
  int32_t window, chunk;  // 0 = none
  // Whether the sums of a query have one order in every call that reads equal keys: the other
  // queries, the pages and the window then change no bit.
  bool fixed;

  float scale, soft_cap;  // soft_cap 0 = none
  const float* sinks;     // [heads] or null

  // Biases of the capped scores by the distance: the place of the key minus that of the query.
  // A table of distances, which are limited to [-reach, reach]: [heads, 2 * reach + 1], or null.
  const float* by_distance;
  int64_t reach;
  // ALiBi: slope [heads] times distance, times `alibi_factor`, or null. `alibi_rounded`: the slope
  // times the place of the key is rounded to bfloat16. See `Alibi` in ed_layers/attention/scoring.py.
  const float* slopes;
  float alibi_factor;
  bool alibi_rounded;

  // Dropout: a weight whose hash is below `drop_below` is dropped, the others times `keep`. The
  // hash is that of `kept` in ed_layers/attention/scoring.py.
  int64_t drop_below;  // 0 = none
  float keep;
  uint32_t seed[2];

  void* out;   // as q, with value_dim
  float* lse;  // [batch, queries, heads] or null; -inf for a query that sees nothing

  // Of the backward pass. Gradients lie as q, k and v do; those of q, k and v are float32.
  const void* d_out;    // as `out`
  const float* shared;  // [batch, queries, heads]: sum(d_out * out) - d_lse
  float *d_k, *d_v;
};

// Queries or keys before attention: the first `2 * pairs` numbers of each head are turned by the
// angles of its token, the rest stay as they are.
struct Rotary {
  const void* x;  // [tokens, heads, dim], float32 or bfloat16
  bool is_bfloat16;
  void* y;  // as x
  int64_t tokens, heads, dim, pairs;
  const float *cos, *sin;  // [tokens, pairs]
  bool neighbours;         // a pair is two neighbours, else one number of each half
  bool back;               // turn by the negative angle
};

constexpr int64_t kKeys = 64;  // slots of a block

// Blocks of queries that a task has at most: they share the preparation of keys and values.
constexpr int64_t kBlocksOfTask = 6;

struct Attention {
  // Queries of a block, and the attention of queries [first, last) of a row over a key head, whose
  // first keys and values `fetch` brings near while something else is computed.
  int64_t (*queries_of_block)(const Attend&);
  void (*fetch)(const Attend&, int64_t row, int64_t group, int64_t first, int64_t last);
  void (*forward)(const Attend&, int64_t row, int64_t group, int64_t first, int64_t last);
  // Gradients by slots [first, last) of a row and key head: the rows of these slots of d_k and d_v, and
  // their part of the gradient of q, which lies as q. Their part [query heads of the key head, 2 * reach
  // + 1] of the gradient of the bias by distance is added to `d_distance`.
  void (*backward)(const Attend&, int64_t row, int64_t group, int64_t first, int64_t last, float* d_q,
                   float* d_distance);
};

}  // namespace ed
