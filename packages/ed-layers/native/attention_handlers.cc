// XLA handlers of attention over projected keys and values, forward and backward.
#include <memory>
#include <new>
#include <vector>

#include "attention_handlers.h"

namespace {

using ed::BiasArgs, ed::FloatMatrix, ed::FloatVector, ed::IntVector, ed::MaskArrays, ed::AnyArray,
    ed::PerHead;
using ed::ScoringArgs, ed::IntMatrix;

// Read q [b, s, h, k], keys [b, t, g, k], values [b, t, g, d], the mask and the scoring. `out` is
// the result, or the gradient of the result.
bool read_attention(ed::Checks& checks, ed::AttentionArgs& p, AnyArray q, AnyArray k, AnyArray v,
                    AnyArray out, const MaskArrays& mask, const ScoringArgs& scored) {
  if (!ed::read_queries(checks, p, q, out, 4) || !ed::read_scoring(checks, p, scored)) return false;
  checks.require_dtype("k", k.element_type(), {ffi::F32, ffi::BF16});
  checks.require_dtype("v", v.element_type(), {ffi::F32, ffi::BF16});
  if (!checks.require(k.dimensions().size() == 4, "k must have 4 axes")) return false;
  p.batch = p.rows = q.dimensions()[0], p.queries = q.dimensions()[1];
  p.slots = k.dimensions()[1], p.groups = k.dimensions()[2];
  checks.require_shape("k", k, {p.batch, p.slots, p.groups, p.key_dim});
  checks.require_shape("v", v, {p.batch, p.slots, p.groups, p.value_dim});
  ed::check_groups(checks, p);
  ed::read_storage(checks, p.keys, "k", k, k), ed::read_storage(checks, p.values, "v", v, v);
  for (ed::SlotArray* s : {&p.keys, &p.values}) {
    s->head = s == &p.keys ? p.key_dim : p.value_dim;
    s->slot = p.groups * s->head, s->row = p.slots * s->slot;
  }
  return ed::read_mask(checks, p, mask);
}

// Read the biases by distance and dropout.
bool read_extras(ed::Checks& checks, ed::AttentionArgs& p, const BiasArgs& biases, IntVector seed,
                 float dropout, int64_t drop_threshold) {
  if (!ed::read_biases(checks, p, biases) || !ed::read_dropout(checks, p, seed, dropout))
    return false;
  if (seed.element_count() > 0) p.drop_threshold = drop_threshold;
  return checks.require(drop_threshold >= 0 && drop_threshold <= int64_t{UINT32_MAX},
                        "the limit of dropout must be at least 0 and below 2^32");
}

ffi::Error run_attention(ffi::ThreadPool pool, AnyArray q, AnyArray k, AnyArray v,
                         IntMatrix q_segments, IntMatrix q_index, IntMatrix k_segments,
                         IntMatrix k_index, IntVector limits, FloatMatrix distances,
                         FloatVector slopes, IntVector seed, ffi::Result<AnyArray> out,
                         ffi::Result<PerHead> lse, float scale, float soft_cap, float alibi_factor,
                         bool alibi_rounded, bool causal, float dropout, int64_t drop_threshold,
                         bool fixed_order) {
  ed::Checks checks("attention");
  ed::AttentionArgs p{};
  if (!read_attention(checks, p, q, k, v, *out, {q_segments, q_index, k_segments, k_index},
                      {limits, scale, soft_cap, causal, fixed_order}) ||
      !read_extras(checks, p, {distances, slopes, alibi_factor, alibi_rounded}, seed, dropout,
                   drop_threshold) ||
      !checks.require_shape("lse", *lse, {p.batch, p.queries, p.heads}))
    return checks.error();
  p.lse = lse->typed_data();
  if (out->element_count() > 0) ed::run_forward(pool, p);
  return ffi::Error::Success();
}

ffi::Error run_attention_backward(ffi::ThreadPool pool, AnyArray q, AnyArray k, AnyArray v,
                                  IntMatrix q_segments, IntMatrix q_index, IntMatrix k_segments,
                                  IntMatrix k_index, IntVector limits, FloatMatrix distances,
                                  FloatVector slopes, IntVector seed, PerHead lse, PerHead shared,
                                  AnyArray d_out, ffi::Result<AnyArray> d_q,
                                  ffi::Result<AnyArray> d_k, ffi::Result<AnyArray> d_v,
                                  ffi::Result<FloatMatrix> d_distance_bias, float scale,
                                  float soft_cap, float alibi_factor, bool alibi_rounded,
                                  bool causal, float dropout, int64_t drop_threshold) {
  ed::Checks checks("attention backward");
  ed::AttentionArgs p{};
  if (!read_attention(checks, p, q, k, v, d_out, {q_segments, q_index, k_segments, k_index},
                      {limits, scale, soft_cap, causal, false}) ||
      !read_extras(checks, p, {distances, slopes, alibi_factor, alibi_rounded}, seed, dropout,
                   drop_threshold))
    return checks.error();
  auto bias_shape = distances.dimensions();
  checks.require_shape("d_distances", *d_distance_bias, {bias_shape[0], bias_shape[1]});
  checks.require_shape("lse", lse, {p.batch, p.queries, p.heads});
  checks.require_shape("shared", shared, {p.batch, p.queries, p.heads});
  checks.require_shape("d_q", *d_q, {p.batch, p.queries, p.heads, p.key_dim});
  checks.require_shape("d_k", *d_k, {p.batch, p.slots, p.groups, p.key_dim});
  checks.require_shape("d_v", *d_v, {p.batch, p.slots, p.groups, p.value_dim});
  checks.require_dtype("k", k.element_type(), {q.element_type()});
  checks.require_dtype("v", v.element_type(), {q.element_type()});
  for (const AnyArray& d : {*d_q, *d_k, *d_v})
    checks.require_dtype("a gradient of q, k or v", d.element_type(), {ffi::F32});
  if (!checks.ok()) return checks.error();
  p.lse = lse.typed_data(), p.shared = shared.typed_data(), p.d_out = p.out;
  p.d_k = static_cast<float*>(d_k->untyped_data()),
  p.d_v = static_cast<float*>(d_v->untyped_data());
  auto* d_q_data = static_cast<float*>(d_q->untyped_data());
  float* d_bias_data = d_distance_bias->typed_data();
  std::memset(d_bias_data, 0, d_distance_bias->size_bytes());
  if (q.element_count() == 0 || p.slots == 0) {
    for (const AnyArray& d : {*d_q, *d_k, *d_v}) std::memset(d.untyped_data(), 0, d.size_bytes());
    return ffi::Error::Success();
  }
  // A task is a range of keys of a row and key head. The number of ranges lets all threads finish
  // together, and depends only on the shapes. Every range except the first one has a separate
  // gradient of q.
  constexpr int64_t kTasks = 12, kMaxRanges = 4;
  const int64_t heads = p.batch * p.groups,
                blocks = (p.slots + ed::kBlockKeys - 1) / ed::kBlockKeys;
  const int64_t range_count = std::min((kTasks + heads - 1) / heads, kMaxRanges);
  const int64_t range_slots = (blocks + range_count - 1) / range_count * ed::kBlockKeys;
  const int64_t ranges = (p.slots + range_slots - 1) / range_slots;
  const int64_t size = d_q->element_count(), count = p.distance_bias ? 2 * p.max_distance + 1 : 0;
  std::unique_ptr<float[]> parts(new (std::nothrow) float[(ranges - 1) * size]);
  std::unique_ptr<float[]> bias_parts(
      new (std::nothrow) float[ranges * p.batch * p.heads * count]());
  if (!parts || !bias_parts)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "attention backward: there is no memory for the gradients of all ranges");
  ed::parallel_for(pool, ranges * heads, [&](int64_t task) {
    const int64_t range = task / heads, row = task % heads / p.groups, group = task % p.groups;
    ed::level().attention.backward(p, row, group, range * range_slots,
                                   std::min(p.slots, (range + 1) * range_slots),
                                   range ? parts.get() + (range - 1) * size : d_q_data,
                                   bias_parts.get() + task * (p.heads / p.groups) * count);
  });
  for (int64_t i = 0; i < ranges * p.batch; ++i)
    for (int64_t j = 0; j < p.heads * count; ++j)
      d_bias_data[j] += bias_parts[i * p.heads * count + j];
  constexpr int64_t kChunk = 1 << 15;
  if (ranges > 1)
    ed::parallel_for(pool, (size + kChunk - 1) / kChunk, [&](int64_t chunk) {
      const int64_t last = std::min(size, (chunk + 1) * kChunk);
      for (int64_t range = 1; range < ranges; ++range)
        for (int64_t i = chunk * kChunk; i < last; ++i)
          d_q_data[i] += parts[(range - 1) * size + i];
    });
  return ffi::Error::Success();
}

}  // namespace

// Exported symbols.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_attention, run_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntVector>()
                                  .Arg<FloatMatrix>()
                                  .Arg<FloatVector>()
                                  .Arg<IntVector>()
                                  .Ret<AnyArray>()
                                  .Ret<PerHead>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("alibi_factor")
                                  .Attr<bool>("alibi_rounded")
                                  .Attr<bool>("causal")
                                  .Attr<float>("dropout")
                                  .Attr<int64_t>("drop_below")
                                  .Attr<bool>("fixed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_attention_back, run_attention_backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntVector>()
                                  .Arg<FloatMatrix>()
                                  .Arg<FloatVector>()
                                  .Arg<IntVector>()
                                  .Arg<PerHead>()
                                  .Arg<PerHead>()
                                  .Arg<AnyArray>()
                                  .Ret<AnyArray>()
                                  .Ret<AnyArray>()
                                  .Ret<AnyArray>()
                                  .Ret<FloatMatrix>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("alibi_factor")
                                  .Attr<bool>("alibi_rounded")
                                  .Attr<bool>("causal")
                                  .Attr<float>("dropout")
                                  .Attr<int64_t>("drop_below"));

#pragma GCC visibility pop
