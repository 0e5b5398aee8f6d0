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

// Add up the gradients of one key head and row, of which each query head has a part, in order.
void add_parts(const ed::Attend& p, int64_t row, int64_t group, const float* parts, float* d_keys,
               float* d_values) {
  int64_t repeat = p.heads / p.groups, of_keys = p.slots * p.key_dim;
  int64_t of_part = of_keys + p.slots * p.value_dim;
  const float* own = parts + (row * p.heads + group * repeat) * of_part;
  for (int64_t t = 0; t < p.slots; ++t)
    for (bool value : {false, true}) {
      int64_t dim = value ? p.value_dim : p.key_dim;
      float* to = (value ? d_values : d_keys) + ((row * p.slots + t) * p.groups + group) * dim;
      const float* from = own + (value ? of_keys : 0) + t * dim;
      std::memcpy(to, from, dim * sizeof(float));
      for (int64_t r = 1; r < repeat; ++r)
        for (int64_t c = 0; c < dim; ++c) to[c] += from[r * of_part + c];
    }
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
  const char* names[] = {"q", "k", "v", "d_q", "d_k", "d_v"};
  Numbers all[] = {q, k, v, *d_q, *d_k, *d_v};
  for (int i = 0; i < 6; ++i) checks.dtype(names[i], all[i].element_type(), {ffi::F32});
  if (!checks.ok()) return checks.error();
  p.lse = lse.typed_data(), p.shared = shared.typed_data();
  p.d_out = static_cast<const float*>(p.out);
  p.d_q = static_cast<float*>(d_q->untyped_data());
  float* d_keys = static_cast<float*>(d_k->untyped_data());
  float* d_values = static_cast<float*>(d_v->untyped_data());
  if (p.heads == 0) {
    std::memset(d_keys, 0, d_k->size_bytes()), std::memset(d_values, 0, d_v->size_bytes());
    std::memset(d_distances->typed_data(), 0, d_distances->size_bytes());
    return ffi::Error::Success();
  }
  int64_t of_keys = p.slots * p.key_dim, of_part = of_keys + p.slots * p.value_dim;
  int64_t count = p.by_distance ? 2 * p.reach + 1 : 0;  // distances
  std::unique_ptr<float[]> parts(new (std::nothrow) float[p.batch * p.heads * of_part]);
  std::unique_ptr<float[]> of_biases(new (std::nothrow) float[p.batch * p.heads * count]());
  if (!parts || !of_biases)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "attention backward: there is no memory for the gradients of all heads");
  ed::parallel(pool, p.batch * p.heads, [&](int64_t i) {
    float* part = parts.get() + i * of_part;
    ed::level().attention.backward(p, i / p.heads, i % p.heads, part, part + of_keys,
                                   of_biases.get() + i * count);
  });
  float* d_bias = d_distances->typed_data();
  std::memset(d_bias, 0, d_distances->size_bytes());
  for (int64_t row = 0; row < p.batch; ++row)
    for (int64_t i = 0; i < p.heads * count; ++i) d_bias[i] += of_biases[row * p.heads * count + i];
  ed::parallel(pool, p.batch * p.groups, [&](int64_t i) {
    add_parts(p, i / p.groups, i % p.groups, parts.get(), d_keys, d_values);
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
