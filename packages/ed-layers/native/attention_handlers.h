// Common parts of the attention handlers: queries, storage, masks and the loop over tasks.
#pragma once

#include "handlers.h"

namespace ed {

using AnyArray = ffi::AnyBuffer;
using FloatVector = ffi::Buffer<ffi::F32, 1>;
using IntVector = ffi::Buffer<ffi::S32, 1>;
using IntMatrix = ffi::Buffer<ffi::S32, 2>;
using FloatMatrix = ffi::Buffer<ffi::F32, 2>;  // [heads, distances]
using PerHead = ffi::Buffer<ffi::F32, 3>;      // [batch, queries, heads]

// Window, chunk and scoring of a call.
struct ScoringArgs {
  IntVector limits;
  float scale, soft_cap;
  bool causal, fixed_order;
};

// Biases by distance of a call; empty arrays are none.
struct BiasArgs {
  FloatMatrix distances;
  FloatVector slopes;
  float alibi_factor;
  bool alibi_rounded;
};

// Segments and positions of queries [batch, queries] and keys [batch, slots].
struct MaskArrays {
  IntMatrix q_segments, q_index, k_segments, k_index;
};

// Read q [.., heads, key_dim] and out [.., heads, value_dim] with `rank` axes.
inline bool read_queries(Checks& checks, AttentionArgs& p, AnyArray q, AnyArray out, size_t rank) {
  checks.require_dtype("q", q.element_type(), {ffi::F32, ffi::BF16});
  checks.require_dtype("the result", out.element_type(), {q.element_type()});
  auto shape = q.dimensions(), out_shape = out.dimensions();
  if (!checks.require(
          shape.size() == rank && out_shape.size() == rank,
          rank == 4 ? "q and the result must have 4 axes" : "q and the result must have 3 axes"))
    return false;
  int64_t width = out_shape[rank - 1];
  rank == 4 ? checks.require_shape("the result", out, {shape[0], shape[1], shape[2], width})
            : checks.require_shape("the result", out, {shape[0], shape[1], width});
  p.q = q.untyped_data(), p.q_is_bfloat16 = q.element_type() == ffi::BF16;
  p.heads = shape[rank - 2], p.key_dim = shape[rank - 1], p.value_dim = width;
  p.out = out.untyped_data();
  return checks.require(p.key_dim > 0 && p.value_dim > 0,
                        "a head of queries and a head of values must have at least one number");
}

inline bool read_scoring(Checks& checks, AttentionArgs& p, const ScoringArgs& scored) {
  if (!checks.require_shape("limits", scored.limits, {2})) return false;
  p.window = scored.limits.typed_data()[0], p.chunk = scored.limits.typed_data()[1];
  p.scale = scored.scale, p.soft_cap = scored.soft_cap;
  p.causal = scored.causal, p.fixed_order = scored.fixed_order;
  return true;
}

// Read a table of biases [heads, 2 * reach + 1] and slopes of ALiBi [heads].
inline bool read_biases(Checks& checks, AttentionArgs& p, const BiasArgs& biases) {
  if (biases.distances.element_count() > 0) {
    int64_t count = biases.distances.dimensions()[1];
    p.distance_bias = biases.distances.typed_data(), p.max_distance = count / 2;
    checks.require(count % 2 == 1, "a bias by distance must have an odd number of distances");
    checks.require_shape("the bias by distance", biases.distances, {p.heads, count});
  }
  if (biases.slopes.element_count() > 0) {
    p.slopes = biases.slopes.typed_data();
    p.alibi_factor = biases.alibi_factor, p.alibi_rounded = biases.alibi_rounded;
    checks.require_shape("the slopes of ALiBi", biases.slopes, {p.heads});
  }
  return checks.ok();
}

// Read the seed [2] of dropout; an empty array is no dropout.
inline bool read_dropout(Checks& checks, AttentionArgs& p, IntVector seed, float rate) {
  if (seed.element_count() == 0) return checks.ok();
  if (!checks.require_shape("the seed of dropout", seed, {2}) ||
      !checks.require(rate >= 0 && rate < 1, "the rate of dropout must be at least 0 and below 1"))
    return false;
  for (int i : {0, 1}) p.seed[i] = static_cast<uint32_t>(seed.typed_data()[i]);
  p.keep_scale = 1 / (1 - rate);
  return true;
}

inline bool read_sinks(Checks& checks, AttentionArgs& p, FloatVector sinks) {
  if (sinks.element_count() == 0) return checks.ok();
  p.sinks = sinks.typed_data();
  return checks.require_shape("sinks", sinks, {p.heads});
}

// Check that each key head serves the same number of query heads.
inline bool check_groups(Checks& checks, const AttentionArgs& p) {
  return checks.require(p.groups > 0 ? p.heads % p.groups == 0 : p.heads == 0,
                        "the number of query heads must be a multiple of the number of key heads");
}

inline bool read_mask(Checks& checks, AttentionArgs& p, const MaskArrays& mask) {
  checks.require_shape("q_segments", mask.q_segments, {p.batch, p.queries});
  checks.require_shape("q_index", mask.q_index, {p.batch, p.queries});
  checks.require_shape("k_segments", mask.k_segments, {p.batch, p.slots});
  p.q_segments = mask.q_segments.typed_data(), p.q_index = mask.q_index.typed_data();
  p.k_segments = mask.k_segments.typed_data(), p.k_index = mask.k_index.typed_data();
  return checks.require_shape("k_index", mask.k_index, {p.batch, p.slots});
}

// Read the storage of an array. Codes need float32 scales with as many axes as the codes.
inline bool read_storage(Checks& checks, SlotArray& s, const char* name, AnyArray from,
                         AnyArray scale) {
  checks.require_dtype(name, from.element_type(), {ffi::F32, ffi::BF16, ffi::S8, ffi::F8E4M3FN});
  s.data = from.untyped_data();
  switch (from.element_type()) {
    case ffi::F32:
      s.kind = StorageType::kFloat32;
      return checks.ok();
    case ffi::BF16:
      s.kind = StorageType::kBfloat16;
      return checks.ok();
    case ffi::S8:
      s.kind = StorageType::kInt8;
      break;
    default:
      s.kind = StorageType::kFp8;
  }
  checks.require_dtype("the scales of codes", scale.element_type(), {ffi::F32});
  checks.require(scale.dimensions().size() == from.dimensions().size(),
                 "codes must have scales with as many axes as the codes");
  s.scale = static_cast<const float*>(scale.untyped_data());
  return checks.ok();
}

// Compute every query of every row on the pool's threads.
inline void run_forward(ffi::ThreadPool& pool, const AttentionArgs& p) {
  const AttentionKernels& attention = level().attention;
  struct Task {
    int64_t row, group, first, last;
  };
  // Tasks of one head are consecutive, so its keys and values stay in the second-level cache. The
  // last queries of a row see the most keys, so their tasks are first.
  std::vector<Task> tasks;
  auto count_task_queries = [&](int64_t row) {
    return p.first_query ? p.first_query[row + 1] - p.first_query[row] : p.queries;
  };
  const int64_t block_bytes = attention.get_block_queries(p);
  int64_t blocks = 0, threads = std::max<int64_t>(1, pool.num_threads());
  for (int64_t row = 0; row < p.rows; ++row)
    blocks += p.groups * ((count_task_queries(row) + block_bytes - 1) / block_bytes);
  int64_t share = block_bytes * std::clamp<int64_t>(blocks / (4 * threads), 1, kTaskBlocks);
  for (int64_t row = p.rows - 1; row >= 0; --row) {
    int64_t count = count_task_queries(row), parts = (count + share - 1) / share;
    for (int64_t group = 0; group < p.groups; ++group)
      for (int64_t part = parts; part > 0; --part)
        tasks.push_back({row, group, count * (part - 1) / parts, count * part / parts});
  }
  auto call = [&](auto function, int64_t task) {
    const Task& of = tasks[task];
    function(p, of.row, of.group, of.first, of.last);
  };
  // A thread runs consecutive tasks, because the keys and values of a row's heads are contiguous.
  const int64_t count = tasks.size(),
                most = std::clamp<int64_t>(count / (4 * threads), 1, p.groups);
  const int64_t runs = (count + most - 1) / most;
  auto one = [&](int64_t i) {
    const int64_t first = count * i / runs, last = count * (i + 1) / runs;
    call(attention.prefetch, first);
    for (int64_t task = first; task < last; ++task) {
      if (task + 1 < last) call(attention.prefetch, task + 1);
      call(attention.forward, task);
    }
  };
  parallel_for(pool, runs, one);
}

}  // namespace ed
