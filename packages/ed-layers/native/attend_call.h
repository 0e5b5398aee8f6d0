// What the handlers of attention share: queries, storage, masks and the loop over tasks.
#pragma once

#include "library.h"

namespace ed {

using Numbers = ffi::AnyBuffer;
using Floats = ffi::Buffer<ffi::F32, 1>;
using Ints = ffi::Buffer<ffi::S32, 1>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Distances = ffi::Buffer<ffi::F32, 2>;  // [heads, distances]
using OfHeads = ffi::Buffer<ffi::F32, 3>;  // [batch, queries, heads]

// Window, chunk and scoring of a call.
struct Scored {
  Ints limits;
  float scale, soft_cap;
  bool causal, fixed;
};

// Biases by distance of a call; empty arrays are none.
struct Biases {
  Distances distances;
  Floats slopes;
  float alibi_factor;
  bool alibi_rounded;
};

// The segments and the order of queries and keys: [batch, queries] and [batch, slots].
struct Mask {
  Table q_segments, q_index, k_segments, k_index;
};

// Read q [.., heads, key_dim] and out [.., heads, value_dim] with `rank` axes.
inline bool read_queries(Checks& checks, Attend& p, Numbers q, Numbers out, size_t rank) {
  checks.dtype("q", q.element_type(), {ffi::F32, ffi::BF16});
  checks.dtype("the result", out.element_type(), {q.element_type()});
  auto shape = q.dimensions(), of_out = out.dimensions();
  if (!checks.that(shape.size() == rank && of_out.size() == rank,
                   rank == 4 ? "q and the result must have 4 axes"
                             : "q and the result must have 3 axes"))
    return false;
  int64_t width = of_out[rank - 1];
  rank == 4 ? checks.shape("the result", out, {shape[0], shape[1], shape[2], width})
            : checks.shape("the result", out, {shape[0], shape[1], width});
  p.q = q.untyped_data(), p.q_is_bfloat16 = q.element_type() == ffi::BF16;
  p.heads = shape[rank - 2], p.key_dim = shape[rank - 1], p.value_dim = width;
  p.out = out.untyped_data();
  return checks.that(p.key_dim > 0 && p.value_dim > 0,
                     "a head of queries and a head of values must have at least one number");
}

inline bool read_scored(Checks& checks, Attend& p, const Scored& scored) {
  if (!checks.shape("limits", scored.limits, {2})) return false;
  p.window = scored.limits.typed_data()[0], p.chunk = scored.limits.typed_data()[1];
  p.scale = scored.scale, p.soft_cap = scored.soft_cap;
  p.causal = scored.causal, p.fixed = scored.fixed;
  return true;
}

// Read a table of biases [heads, 2 * reach + 1] and slopes of ALiBi [heads].
inline bool read_biases(Checks& checks, Attend& p, const Biases& biases) {
  if (biases.distances.element_count() > 0) {
    int64_t count = biases.distances.dimensions()[1];
    p.by_distance = biases.distances.typed_data(), p.reach = count / 2;
    checks.that(count % 2 == 1, "a bias by distance must have an odd number of distances");
    checks.shape("the bias by distance", biases.distances, {p.heads, count});
  }
  if (biases.slopes.element_count() > 0) {
    p.slopes = biases.slopes.typed_data();
    p.alibi_factor = biases.alibi_factor, p.alibi_rounded = biases.alibi_rounded;
    checks.shape("the slopes of ALiBi", biases.slopes, {p.heads});
  }
  return checks.ok();
}

// Read the seed [2] of dropout; an empty array is no dropout.
inline bool read_dropout(Checks& checks, Attend& p, Ints seed, float rate) {
  if (seed.element_count() == 0) return checks.ok();
  if (!checks.shape("the seed of dropout", seed, {2}) ||
      !checks.that(rate >= 0 && rate < 1, "the rate of dropout must be at least 0 and below 1"))
    return false;
  for (int i : {0, 1}) p.seed[i] = static_cast<uint32_t>(seed.typed_data()[i]);
  p.keep = 1 / (1 - rate);
  return true;
}

inline bool read_sinks(Checks& checks, Attend& p, Floats sinks) {
  if (sinks.element_count() == 0) return checks.ok();
  p.sinks = sinks.typed_data();
  return checks.shape("sinks", sinks, {p.heads});
}

// Each key head serves the same number of query heads.
inline bool check_groups(Checks& checks, const Attend& p) {
  return checks.that(p.groups > 0 ? p.heads % p.groups == 0 : p.heads == 0,
                     "the number of query heads must be a multiple of the number of key heads");
}

inline bool read_mask(Checks& checks, Attend& p, const Mask& mask) {
  checks.shape("q_segments", mask.q_segments, {p.batch, p.queries});
  checks.shape("q_index", mask.q_index, {p.batch, p.queries});
  checks.shape("k_segments", mask.k_segments, {p.batch, p.slots});
  p.q_segments = mask.q_segments.typed_data(), p.q_index = mask.q_index.typed_data();
  p.k_segments = mask.k_segments.typed_data(), p.k_index = mask.k_index.typed_data();
  return checks.shape("k_index", mask.k_index, {p.batch, p.slots});
}

// Read how numbers are stored. Codes need float32 scales with as many axes as the codes.
inline bool read_storage(Checks& checks, Slots& s, const char* name, Numbers from, Numbers scale) {
  checks.dtype(name, from.element_type(), {ffi::F32, ffi::BF16, ffi::S8, ffi::F8E4M3FN});
  s.data = from.untyped_data();
  switch (from.element_type()) {
    case ffi::F32: s.kind = Stored::kFloat32; return checks.ok();
    case ffi::BF16: s.kind = Stored::kBfloat16; return checks.ok();
    case ffi::S8: s.kind = Stored::kInt8; break;
    default: s.kind = Stored::kFp8;
  }
  checks.dtype("the scales of codes", scale.element_type(), {ffi::F32});
  checks.that(scale.dimensions().size() == from.dimensions().size(),
              "codes must have scales with as many axes as the codes");
  s.scale = static_cast<const float*>(scale.untyped_data());
  return checks.ok();
}

// Compute every query of every row on the pool's threads.
inline void run(ffi::ThreadPool& pool, const Attend& p) {
  const Attention& attention = level().attention;
  struct Task {
    int64_t row, group, first, last;
  };
  // Tasks of one head follow each other: its keys and values then stay in the second level cache.
  // The last queries of a row see the most keys, so these queries come first.
  std::vector<Task> tasks;
  auto queries_of = [&](int64_t row) {
    return p.first_query ? p.first_query[row + 1] - p.first_query[row] : p.queries;
  };
  const int64_t of_block = attention.queries_of_block(p);
  int64_t blocks = 0, threads = std::max<int64_t>(1, pool.num_threads());
  for (int64_t row = 0; row < p.rows; ++row)
    blocks += p.groups * ((queries_of(row) + of_block - 1) / of_block);
  int64_t share = of_block * std::clamp<int64_t>(blocks / (4 * threads), 1, kBlocksOfTask);
  for (int64_t row = p.rows - 1; row >= 0; --row) {
    int64_t count = queries_of(row), parts = (count + share - 1) / share;
    for (int64_t group = 0; group < p.groups; ++group)
      for (int64_t part = parts; part > 0; --part)
        tasks.push_back({row, group, count * (part - 1) / parts, count * part / parts});
  }
  auto call = [&](auto function, int64_t task) {
    const Task& of = tasks[task];
    function(p, of.row, of.group, of.first, of.last);
  };
  // A thread takes some tasks in turn: the keys and values of the heads of one row lie together.
  const int64_t count = tasks.size(), most = std::clamp<int64_t>(count / (4 * threads), 1, p.groups);
  const int64_t runs = (count + most - 1) / most;
  auto one = [&](int64_t i) {
    const int64_t first = count * i / runs, last = count * (i + 1) / runs;
    call(attention.fetch, first);
    for (int64_t task = first; task < last; ++task) {
      if (task + 1 < last) call(attention.fetch, task + 1);
      call(attention.forward, task);
    }
  };
  parallel(pool, runs, one);
}

}  // namespace ed
