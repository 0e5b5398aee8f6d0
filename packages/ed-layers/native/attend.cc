// Attention as XLA calls it: checks the arrays, shares out the work.
#include <vector>

#include "library.h"

namespace {

using ed::wrong;
using Numbers = ffi::AnyBuffer;
using Floats = ffi::Buffer<ffi::F32, 1>;
using Ints = ffi::Buffer<ffi::S32, 1>;
using Table = ffi::Buffer<ffi::S32, 2>;
using OfHeads = ffi::Buffer<ffi::F32, 3>;  // [batch, queries, heads]

// q [.., heads, key_dim] and the result, whose last axis is value_dim.
ffi::Error queries(ed::Attend& p, Numbers q, Numbers out) {
  auto shape = q.dimensions();
  size_t rank = shape.size();
  if ((q.element_type() != ffi::F32 && q.element_type() != ffi::BF16) ||
      out.element_type() != q.element_type())
    return wrong("attention: q and the result should be both float32, or both bfloat16");
  if (rank < 3 || out.dimensions().size() != rank) return wrong("attention: q has too few axes");
  p.q = q.untyped_data(), p.q_is_bfloat16 = q.element_type() == ffi::BF16;
  p.heads = shape[rank - 2], p.key_dim = shape[rank - 1];
  p.value_dim = out.dimensions()[rank - 1];
  p.out = out.untyped_data();
  return ffi::Error::Success();
}

// How numbers are stored; codes need scales [.., groups of numbers, slots].
ffi::Error stored(ed::Slots& s, Numbers from, Numbers scale) {
  s.data = from.untyped_data();
  switch (from.element_type()) {
    case ffi::F32: s.kind = ed::Stored::kFloat32; break;
    case ffi::BF16: s.kind = ed::Stored::kBfloat16; break;
    case ffi::S8: s.kind = ed::Stored::kInt8; break;
    case ffi::F8E4M3FN: s.kind = ed::Stored::kFp8; break;
    default: return wrong("attention: keys and values should be float32, bfloat16, int8 or fp8");
  }
  if (s.kind == ed::Stored::kFloat32 || s.kind == ed::Stored::kBfloat16)
    return ffi::Error::Success();
  if (scale.element_type() != ffi::F32 ||
      scale.dimensions().size() != from.dimensions().size())
    return wrong("attention: codes should have float32 scales of as many axes");
  s.scale = reinterpret_cast<const float*>(scale.untyped_data());
  return ffi::Error::Success();
}

// The sizes of an array without its axis of layers, which it may lack.
std::vector<int64_t> sizes(Numbers array, size_t axes) {
  auto all = array.dimensions();
  if (all.size() < axes || all.size() > axes + 1) return {};
  return std::vector<int64_t>(all.end() - axes, all.end());
}

// The number of layers, if there is an axis of them.
int64_t layers(Numbers array, size_t axes) {
  return array.dimensions().size() > axes ? array.dimensions()[0] : 1;
}

// Skip the layers before `layer` of arrays [layers, ...].
void in_layer(ed::Slots& s, Numbers from, Numbers scale, int64_t layer) {
  if (layer == 0) return;
  int64_t count = from.element_count() / from.dimensions()[0];
  int64_t width = s.kind == ed::Stored::kFloat32 ? 4 : s.kind == ed::Stored::kBfloat16 ? 2 : 1;
  s.data = static_cast<const char*>(s.data) + layer * count * width;
  if (s.scale) s.scale += layer * (scale.element_count() / scale.dimensions()[0]);
}

void masked(ed::Attend& p, Table q_segments, Table q_index, Table k_segments, Table k_index) {
  p.q_segments = q_segments.typed_data(), p.q_index = q_index.typed_data();
  p.k_segments = k_segments.typed_data(), p.k_index = k_index.typed_data();
}

bool of_shape(Table table, int64_t rows, int64_t columns) {
  return table.dimensions()[0] == rows && table.dimensions()[1] == columns;
}

// Window and chunk, and what the attributes are.
ffi::Error scored(ed::Attend& p, Ints limits, float scale, float soft_cap, bool causal) {
  if (limits.element_count() != 2) return wrong("attention: limits are a window and a chunk");
  p.window = limits.typed_data()[0], p.chunk = limits.typed_data()[1];
  p.scale = scale, p.soft_cap = soft_cap, p.causal = causal;
  return ffi::Error::Success();
}

ffi::Error with_sinks(ed::Attend& p, Floats sinks) {
  int64_t count = sinks.element_count();
  if (count != 0 && count != p.heads) return wrong("attention: one sink for each head, or none");
  p.sinks = count == 0 ? nullptr : sinks.typed_data();
  return ffi::Error::Success();
}

void run(ffi::ThreadPool pool, const ed::Attend& p) {
  const ed::Attention& attention = ed::level().attention;
  struct Task {
    int64_t row, first, last;
  };
  std::vector<Task> tasks;
  int64_t share = attention.queries_of_task(p);
  for (int64_t row = 0; row < p.rows; ++row) {
    int64_t count = p.first_query ? p.first_query[row + 1] - p.first_query[row] : p.queries;
    for (int64_t first = 0; first < count; first += share)
      tasks.push_back({row, first, std::min(count, first + share)});
  }
  auto one = [&](int64_t i) {
    // The last queries see most: they come first.
    const Task& task = tasks[tasks.size() - 1 - i / p.groups];
    attention.forward(p, task.row, i % p.groups, task.first, task.last);
  };
  ed::parallel(pool, tasks.size() * p.groups, one);
}

// Keys and values [b, t, g, k] of the same call, as they are projected.
ffi::Error projected(ed::Attend& p, Numbers q, Numbers k, Numbers v, Numbers out) {
  if (ffi::Error error = queries(p, q, out); error.failure()) return error;
  auto shape = k.dimensions(), values = v.dimensions();
  if (q.dimensions().size() != 4 || shape.size() != 4 || values.size() != 4)
    return wrong("attention: q, k and v should have four axes");
  if (ffi::Error error = stored(p.keys, k, k); error.failure()) return error;
  if (ffi::Error error = stored(p.values, v, v); error.failure()) return error;
  p.batch = p.rows = q.dimensions()[0], p.queries = q.dimensions()[1];
  p.slots = shape[1], p.groups = shape[2];
  if (shape[0] != p.batch || p.groups == 0 || p.heads % p.groups || shape[3] != p.key_dim ||
      values[0] != p.batch || values[1] != p.slots || values[2] != p.groups ||
      values[3] != p.value_dim || p.keys.scale || p.values.scale)
    return wrong("attention: the shapes of q, k and v do not fit");
  for (ed::Slots* s : {&p.keys, &p.values}) {
    s->head = s == &p.keys ? p.key_dim : p.value_dim;
    s->slot = p.groups * s->head, s->row = p.slots * s->slot;
  }
  return ffi::Error::Success();
}

ffi::Error attention(ffi::ThreadPool pool, Numbers q, Numbers k, Numbers v, Table q_segments,
                     Table q_index, Table k_segments, Table k_index, Ints limits,
                     ffi::Result<Numbers> out, ffi::Result<OfHeads> lse,
                     float scale, float soft_cap, bool causal) {
  ed::Attend p{};
  if (ffi::Error error = projected(p, q, k, v, *out); error.failure()) return error;
  if (ffi::Error error = scored(p, limits, scale, soft_cap, causal); error.failure()) return error;
  if (!of_shape(q_segments, p.batch, p.queries) || !of_shape(k_segments, p.batch, p.slots) ||
      !of_shape(q_index, p.batch, p.queries) || !of_shape(k_index, p.batch, p.slots))
    return wrong("attention: the mask is of other queries or keys");
  masked(p, q_segments, q_index, k_segments, k_index);
  p.lse = lse->typed_data();
  run(pool, p);
  return ffi::Error::Success();
}

ffi::Error attention_back(ffi::ThreadPool pool, Numbers q, Numbers k, Numbers v, Table q_segments,
                          Table q_index, Table k_segments, Table k_index, Ints limits,
                          OfHeads lse, OfHeads shared,
                          Numbers d_out, ffi::Result<Numbers> d_q,
                          ffi::Result<Numbers> d_k,
                          ffi::Result<Numbers> d_v, float scale, float soft_cap,
                          bool causal) {
  ed::Attend p{};
  if (ffi::Error error = projected(p, q, k, v, d_out); error.failure()) return error;
  if (ffi::Error error = scored(p, limits, scale, soft_cap, causal); error.failure()) return error;
  if (p.q_is_bfloat16 || p.keys.kind != ed::Stored::kFloat32 ||
      p.values.kind != ed::Stored::kFloat32)
    return wrong("attention: gradients are of float32");
  masked(p, q_segments, q_index, k_segments, k_index);
  p.lse = lse.typed_data(), p.shared = shared.typed_data(), p.d_out = static_cast<const float*>(p.out);
  p.d_q = static_cast<float*>(d_q->untyped_data());
  float* d_keys = static_cast<float*>(d_k->untyped_data());
  float* d_values = static_cast<float*>(d_v->untyped_data());
  // Each query head has its part of the gradients of the key head that it shares; in order.
  int64_t repeat = p.heads / p.groups;
  int64_t of_keys = p.slots * p.key_dim, of_values = p.slots * p.value_dim;
  std::unique_ptr<float[]> parts(new float[p.batch * p.heads * (of_keys + of_values)]);
  ed::parallel(pool, p.batch * p.heads, [&](int64_t i) {
    float* part = parts.get() + i * (of_keys + of_values);
    ed::level().attention.backward(p, i / p.heads, i % p.heads, part, part + of_keys);
  });
  ed::parallel(pool, p.batch * p.groups, [&](int64_t i) {
    int64_t row = i / p.groups, group = i % p.groups;
    for (int64_t t = 0; t < p.slots; ++t)
      for (bool value : {false, true}) {
        int64_t dim = value ? p.value_dim : p.key_dim;
        float* to = (value ? d_values : d_keys) + ((row * p.slots + t) * p.groups + group) * dim;
        const float* from = parts.get() + (row * p.heads + group * repeat) * (of_keys + of_values) +
                            (value ? of_keys : 0) + t * dim;
        std::memcpy(to, from, dim * sizeof(float));
        for (int64_t r = 1; r < repeat; ++r)
          for (int64_t c = 0; c < dim; ++c) to[c] += from[r * (of_keys + of_values) + c];
      }
  });
  return ffi::Error::Success();
}

// Over a contiguous cache: keys and values [layers, b, g, t, k], scales [layers, b, g, n, t], or
// without the first axis. (A reshape that adds one would make XLA copy the cache.)
ffi::Error attention_cached(ffi::ThreadPool pool, Numbers q, Numbers k, Numbers v, Numbers k_scale,
                            Numbers v_scale, Ints layer, Table q_segments, Table q_index,
                            Table k_segments, Table k_index, Ints limits, Floats sinks,
                            ffi::Result<Numbers> out, float scale, float soft_cap, bool causal) {
  ed::Attend p{};
  if (ffi::Error error = queries(p, q, *out); error.failure()) return error;
  if (ffi::Error error = scored(p, limits, scale, soft_cap, causal); error.failure()) return error;
  if (ffi::Error error = with_sinks(p, sinks); error.failure()) return error;
  auto shape = sizes(k, 4);
  if (q.dimensions().size() != 4 || shape.empty())
    return wrong("attention: q should have four axes, keys and values four or five");
  p.batch = p.rows = q.dimensions()[0], p.queries = q.dimensions()[1];
  p.groups = shape[1], p.slots = shape[2];
  int64_t at = layer.element_count() == 1 ? layer.typed_data()[0] : -1, count = layers(k, 4);
  if (at < 0 || at >= count) return wrong("attention: the cache has no such layer");
  bool fits = shape[0] == p.batch && p.groups && p.heads % p.groups == 0;
  for (bool value : {false, true}) {
    Numbers from = value ? v : k, scales = value ? v_scale : k_scale;
    ed::Slots& s = value ? p.values : p.keys;
    if (ffi::Error error = stored(s, from, scales); error.failure()) return error;
    s.slot = value ? p.value_dim : p.key_dim;
    s.head = p.slots * s.slot, s.row = p.groups * s.head;
    fits = fits && layers(from, 4) == count &&
           sizes(from, 4) == std::vector<int64_t>{p.batch, p.groups, p.slots, s.slot};
    if (s.scale) {
      auto of = sizes(scales, 4);
      if (of.empty() || of[2] < 1) return wrong("attention: the scales do not fit the cache");
      s.scale_groups = of[2], s.scale_slot = 1, s.scale_group = p.slots;
      s.scale_head = s.scale_groups * p.slots, s.scale_row = p.groups * s.scale_head;
      fits = fits && layers(scales, 4) == count && of[0] == p.batch && of[1] == p.groups &&
             of[3] == p.slots && s.slot % of[2] == 0;
    }
    in_layer(s, from, scales, at);
  }
  fits = fits && of_shape(q_segments, p.batch, p.queries) && of_shape(q_index, p.batch, p.queries) &&
         of_shape(k_segments, p.batch, p.slots) && of_shape(k_index, p.batch, p.slots);
  if (!fits) return wrong("attention: the shapes of q, the cache and the mask do not fit");
  masked(p, q_segments, q_index, k_segments, k_index);
  run(pool, p);
  return ffi::Error::Success();
}

// Over pages [layers, P, page_size, g, 2, k], scales [layers, P, g, 2, n, page_size], or without the
// first axis; or with one entry in place of two, whose first numbers are the values. q [T, heads, k],
// all in order.
ffi::Error attention_paged(ffi::ThreadPool pool, Numbers q, Numbers pool_of_pages, Numbers scales,
                           Ints layer, Ints first_query, Ints lengths, Ints used, Table pages,
                           Ints limits, Floats sinks, ffi::Result<Numbers> out, float scale,
                           float soft_cap) {
  ed::Attend p{};
  if (ffi::Error error = queries(p, q, *out); error.failure()) return error;
  if (ffi::Error error = scored(p, limits, scale, soft_cap, true); error.failure()) return error;
  if (ffi::Error error = with_sinks(p, sinks); error.failure()) return error;
  auto shape = sizes(pool_of_pages, 5);
  if (q.dimensions().size() != 3 || shape.empty())
    return wrong("attention: q should have three axes, the pool of pages five or six");
  int64_t tokens = q.dimensions()[0], ways = shape[3], width = shape[4];
  int64_t at = layer.element_count() == 1 ? layer.typed_data()[0] : -1;
  p.batch = pages.dimensions()[0], p.pages_of_row = pages.dimensions()[1];
  p.page_size = shape[1], p.groups = shape[2];
  if (at < 0 || at >= layers(pool_of_pages, 5)) return wrong("attention: the pool has no such layer");
  if (p.groups == 0 || p.heads % p.groups || ways < 1 || ways > 2 || p.key_dim > width ||
      p.value_dim > width || (int64_t)first_query.element_count() != p.batch + 1 ||
      (int64_t)lengths.element_count() != p.batch || used.element_count() != 1)
    return wrong("attention: the shapes of q, the pool and the batch do not fit");
  for (bool value : {false, true}) {
    ed::Slots& s = value ? p.values : p.keys;
    if (ffi::Error error = stored(s, pool_of_pages, scales); error.failure()) return error;
    s.head = ways * width, s.slot = p.groups * s.head, s.row = p.page_size * s.slot;
    if (s.scale) {
      auto of = sizes(scales, 5);
      if (of.empty() || layers(scales, 5) != layers(pool_of_pages, 5) || of[0] != shape[0] ||
          of[1] != p.groups || of[2] != ways || of[3] < 1 || of[4] != p.page_size ||
          width % of[3] || p.key_dim != width || p.value_dim != width)
        return wrong("attention: the scales do not fit the pool");
      s.scale_groups = of[3], s.scale_slot = 1, s.scale_group = p.page_size;
      s.scale_head = ways * of[3] * p.page_size, s.scale_row = p.groups * s.scale_head;
    }
    in_layer(s, pool_of_pages, scales, at);
    if (value && ways == 2) {
      int64_t size = s.kind == ed::Stored::kFloat32 ? 4 : s.kind == ed::Stored::kBfloat16 ? 2 : 1;
      s.data = static_cast<const char*>(s.data) + width * size;
      if (s.scale) s.scale += s.scale_groups * p.page_size;
    }
  }
  int64_t rows = used.typed_data()[0], most = p.pages_of_row * p.page_size;
  p.rows = std::max<int64_t>(0, std::min(rows, p.batch));
  p.first_query = first_query.typed_data(), p.lengths = lengths.typed_data();
  p.pages = pages.typed_data();
  std::memset(p.out, 0, out->size_bytes());  // tokens of padding
  for (int64_t row = 0; row < p.rows; ++row) {
    int64_t first = p.first_query[row], count = p.first_query[row + 1] - first;
    if (first < 0 || count < 0 || first + count > tokens || p.lengths[row] < count ||
        p.lengths[row] > most)
      return wrong("attention: a sequence has tokens or pages beyond the batch's");
    // Pages before the first query's window may have been given back: they are not read.
    int64_t place = p.lengths[row] - count, begin = 0;
    if (p.window > 0) begin = std::max<int64_t>(begin, place - p.window + 1);
    if (p.chunk > 0) begin = std::max<int64_t>(begin, place / p.chunk * p.chunk);
    for (int64_t i = begin / p.page_size; i * p.page_size < p.lengths[row] && count > 0; ++i) {
      int32_t page = p.pages[row * p.pages_of_row + i];
      if (page < 0 || page >= shape[0])
        return wrong("attention: a sequence has a page that the pool lacks");
    }
  }
  run(pool, p);
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
                                  .Ret<Numbers>()
                                  .Ret<OfHeads>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("causal"));

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
                                  .Arg<OfHeads>()
                                  .Arg<OfHeads>()
                                  .Arg<Numbers>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("causal"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_attention_cached, attention_cached,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Ints>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Ret<Numbers>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("causal"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_attention_paged, attention_paged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Ret<Numbers>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap"));

#pragma GCC visibility pop
