// Attention over projected keys and values as XLA calls it, forward and backward: checks the
// buffers, shares out the work.
#include <memory>
#include <new>
#include <vector>

#include "attend_call.h"

namespace {

using ed::Biases, ed::Distances, ed::Floats, ed::Ints, ed::Mask, ed::Numbers, ed::OfHeads;
using ed::Scored, ed::Table;

// Read q [b, s, h, k], keys [b, t, g, k], values [b, t, g, d], the mask and the scoring. `out` is
// the result, or the gradient of the result.
bool read(ed::Checks& checks, ed::Attend& p, Numbers q, Numbers k, Numbers v, Numbers out,
          const Mask& mask, const Scored& scored) {
  if (!ed::read_queries(checks, p, q, out, 4) || !ed::read_scored(checks, p, scored)) return false;
  checks.dtype("k", k.element_type(), {ffi::F32, ffi::BF16});
  checks.dtype("v", v.element_type(), {ffi::F32, ffi::BF16});
  if (!checks.that(k.dimensions().size() == 4, "k must have 4 axes")) return false;
  p.batch = p.rows = q.dimensions()[0], p.queries = q.dimensions()[1];
  p.slots = k.dimensions()[1], p.groups = k.dimensions()[2];
  checks.shape("k", k, {p.batch, p.slots, p.groups, p.key_dim});
  checks.shape("v", v, {p.batch, p.slots, p.groups, p.value_dim});
  ed::check_groups(checks, p);
  ed::read_storage(checks, p.keys, "k", k, k), ed::read_storage(checks, p.values, "v", v, v);
  for (ed::Slots* s : {&p.keys, &p.values}) {
    s->head = s == &p.keys ? p.key_dim : p.value_dim;
    s->slot = p.groups * s->head, s->row = p.slots * s->slot;
  }
  return ed::read_mask(checks, p, mask);
}

// Read the biases by distance and dropout.
bool read_extras(ed::Checks& checks, ed::Attend& p, const Biases& biases, Ints seed, float dropout,
                 int64_t drop_below) {
  if (!ed::read_biases(checks, p, biases) || !ed::read_dropout(checks, p, seed, dropout))
    return false;
  if (seed.element_count() > 0) p.drop_below = drop_below;
  return checks.that(drop_below >= 0 && drop_below <= int64_t{UINT32_MAX},
                     "the limit of dropout must be at least 0 and below 2^32");
}

ffi::Error attention(ffi::ThreadPool pool, Numbers q, Numbers k, Numbers v, Table q_segments,
                     Table q_index, Table k_segments, Table k_index, Ints limits,
                     Distances distances, Floats slopes, Ints seed, ffi::Result<Numbers> out,
                     ffi::Result<OfHeads> lse, float scale, float soft_cap, float alibi_factor,
                     bool alibi_rounded, bool causal, float dropout, int64_t drop_below,
                     bool fixed) {
  ed::Checks checks("attention");
  ed::Attend p{};
  if (!read(checks, p, q, k, v, *out, {q_segments, q_index, k_segments, k_index},
            {limits, scale, soft_cap, causal, fixed}) ||
      !read_extras(checks, p, {distances, slopes, alibi_factor, alibi_rounded}, seed, dropout,
                   drop_below) ||
      !checks.shape("lse", *lse, {p.batch, p.queries, p.heads}))
    return checks.error();
  p.lse = lse->typed_data();
  if (out->element_count() > 0) ed::run(pool, p);
  return ffi::Error::Success();
}

ffi::Error attention_back(ffi::ThreadPool pool, Numbers q, Numbers k, Numbers v, Table q_segments,
                          Table q_index, Table k_segments, Table k_index, Ints limits,
                          Distances distances, Floats slopes, Ints seed, OfHeads lse,
                          OfHeads shared, Numbers d_out, ffi::Result<Numbers> d_q,
                          ffi::Result<Numbers> d_k, ffi::Result<Numbers> d_v,
                          ffi::Result<Distances> d_distances, float scale, float soft_cap,
                          float alibi_factor, bool alibi_rounded, bool causal, float dropout,
                          int64_t drop_below) {
  ed::Checks checks("attention backward");
  ed::Attend p{};
  if (!read(checks, p, q, k, v, d_out, {q_segments, q_index, k_segments, k_index},
            {limits, scale, soft_cap, causal, false}) ||
      !read_extras(checks, p, {distances, slopes, alibi_factor, alibi_rounded}, seed, dropout,
                   drop_below))
    return checks.error();
  auto of_distances = distances.dimensions();
  checks.shape("d_distances", *d_distances, {of_distances[0], of_distances[1]});
  checks.shape("lse", lse, {p.batch, p.queries, p.heads});
  checks.shape("shared", shared, {p.batch, p.queries, p.heads});
  checks.shape("d_q", *d_q, {p.batch, p.queries, p.heads, p.key_dim});
  checks.shape("d_k", *d_k, {p.batch, p.slots, p.groups, p.key_dim});
  checks.shape("d_v", *d_v, {p.batch, p.slots, p.groups, p.value_dim});
  checks.dtype("k", k.element_type(), {q.element_type()});
  checks.dtype("v", v.element_type(), {q.element_type()});
  for (const Numbers& d : {*d_q, *d_k, *d_v})
    checks.dtype("a gradient of q, k or v", d.element_type(), {ffi::F32});
  if (!checks.ok()) return checks.error();
  p.lse = lse.typed_data(), p.shared = shared.typed_data(), p.d_out = p.out;
  p.d_k = static_cast<float*>(d_k->untyped_data()), p.d_v = static_cast<float*>(d_v->untyped_data());
  auto* of_q = static_cast<float*>(d_q->untyped_data());
  float* d_bias = d_distances->typed_data();
  std::memset(d_bias, 0, d_distances->size_bytes());
  if (q.element_count() == 0 || p.slots == 0) {
    for (const Numbers& d : {*d_q, *d_k, *d_v}) std::memset(d.untyped_data(), 0, d.size_bytes());
    return ffi::Error::Success();
  }
  // A task is a range of keys of a row and key head. Ranges are as many as threads need to finish
  // together, and depend on the shapes alone. All but the first have their own gradient of q.
  constexpr int64_t kTasks = 12, kMostRanges = 4;
  const int64_t heads = p.batch * p.groups, blocks = (p.slots + ed::kKeys - 1) / ed::kKeys;
  const int64_t wanted = std::min((kTasks + heads - 1) / heads, kMostRanges);
  const int64_t share = (blocks + wanted - 1) / wanted * ed::kKeys;
  const int64_t ranges = (p.slots + share - 1) / share;
  const int64_t size = d_q->element_count(), count = p.by_distance ? 2 * p.reach + 1 : 0;
  std::unique_ptr<float[]> parts(new (std::nothrow) float[(ranges - 1) * size]);
  std::unique_ptr<float[]> of_biases(new (std::nothrow) float[ranges * p.batch * p.heads * count]());
  if (!parts || !of_biases)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "attention backward: there is no memory for the gradients of all ranges");
  ed::parallel(pool, ranges * heads, [&](int64_t task) {
    const int64_t range = task / heads, row = task % heads / p.groups, group = task % p.groups;
    ed::level().attention.backward(p, row, group, range * share,
                                   std::min(p.slots, (range + 1) * share),
                                   range ? parts.get() + (range - 1) * size : of_q,
                                   of_biases.get() + task * (p.heads / p.groups) * count);
  });
  for (int64_t i = 0; i < ranges * p.batch; ++i)
    for (int64_t j = 0; j < p.heads * count; ++j)
      d_bias[j] += of_biases[i * p.heads * count + j];
  constexpr int64_t kChunk = 1 << 15;
  if (ranges > 1)
    ed::parallel(pool, (size + kChunk - 1) / kChunk, [&](int64_t chunk) {
      const int64_t last = std::min(size, (chunk + 1) * kChunk);
      for (int64_t range = 1; range < ranges; ++range)
        for (int64_t i = chunk * kChunk; i < last; ++i) of_q[i] += parts[(range - 1) * size + i];
    });
  return ffi::Error::Success();
}

}  // namespace

// What the library exports.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Arg<Distances>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Ret<Numbers>()
                                  .Ret<OfHeads>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("alibi_factor")
                                  .Attr<bool>("alibi_rounded")
                                  .Attr<bool>("causal")
                                  .Attr<float>("dropout")
                                  .Attr<int64_t>("drop_below")
                                  .Attr<bool>("fixed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_attention_back, attention_back,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Arg<Distances>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<OfHeads>()
                                  .Arg<OfHeads>()
                                  .Arg<Numbers>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Ret<Distances>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("alibi_factor")
                                  .Attr<bool>("alibi_rounded")
                                  .Attr<bool>("causal")
                                  .Attr<float>("dropout")
                                  .Attr<int64_t>("drop_below"));

#pragma GCC visibility pop
