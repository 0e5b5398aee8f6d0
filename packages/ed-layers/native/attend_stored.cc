// Attention over a contiguous cache and over pages as XLA calls it: checks the buffers, shares out
// the work.
#include <vector>

#include "attend_call.h"

namespace {

using ed::Distances, ed::Floats, ed::Ints, ed::Mask, ed::Numbers, ed::Table;
using Shape = ffi::Span<const int64_t>;

// An array that may have an axis of layers before its own axes.
struct Layered {
  Layered(Numbers array, size_t axes)
      : all(array.dimensions()), known(all.size() == axes || all.size() == axes + 1),
        has_axis(all.size() == axes + 1) {}
  int64_t layers() const { return has_axis ? all[0] : 1; }
  int64_t operator[](size_t axis) const { return all[axis + has_axis]; }  // without layers

  // Numbers of one layer.
  int64_t count() const {
    int64_t numbers = 1;
    for (size_t axis = has_axis; axis < all.size(); ++axis) numbers *= all[axis];
    return numbers;
  }

  // Require the sizes of the axes behind the layers.
  bool shape(ed::Checks& checks, const char* name, Numbers array, int64_t layers,
             std::initializer_list<int64_t> sizes) const {
    bool same = known && this->layers() == layers &&
                std::equal(sizes.begin(), sizes.end(), all.end() - sizes.size());
    if (!same)
      checks.refuse(std::string(name) + " has shape " + ed::text_of(array.dimensions()) +
                    ", the call requires " + ed::text_of(sizes) + " in each of " +
                    std::to_string(layers) + " layers");
    return checks.ok();
  }

  Shape all;
  bool known, has_axis;
};

// Skip the layers before `layer`.
void skip_layers(ed::Slots& s, const Layered& numbers, const Layered& scales, int64_t layer) {
  if (layer == 0) return;
  s.data = static_cast<const char*>(s.data) + layer * numbers.count() * ed::bytes_of(s.kind);
  if (s.scale) s.scale += layer * scales.count();
}

// The index of the layer, which must be below `layers`.
int64_t layer_of(ed::Checks& checks, Ints layer, int64_t layers) {
  if (!checks.shape("layer", layer, {1})) return 0;
  int64_t at = layer.typed_data()[0];
  checks.that(at >= 0 && at < layers, "the cache has no layer of this index");
  return checks.ok() ? at : 0;
}

// Keys and values [layers, b, g, t, k], scales [layers, b, g, n, t], or without the axis of layers.
// A reshape that adds the axis would make XLA copy the cache.
ffi::Error attention_cached(ffi::ThreadPool pool, Numbers q, Numbers k, Numbers v, Numbers k_scale,
                            Numbers v_scale, Ints layer, Table q_segments, Table q_index,
                            Table k_segments, Table k_index, Ints limits, Floats sinks,
                            Distances distances, Floats slopes, ffi::Result<Numbers> out,
                            float scale, float soft_cap, float alibi_factor, bool alibi_rounded,
                            bool causal, bool fixed) {
  ed::Checks checks("attention over a cache");
  ed::Attend p{};
  Layered shape(k, 4);
  if (!ed::read_queries(checks, p, q, *out, 4) ||
      !ed::read_scored(checks, p, {limits, scale, soft_cap, causal, fixed}) ||
      !ed::read_sinks(checks, p, sinks) ||
      !ed::read_biases(checks, p, {distances, slopes, alibi_factor, alibi_rounded}) ||
      !checks.that(shape.known, "keys must have 4 axes, or 5 with layers"))
    return checks.error();
  p.batch = p.rows = q.dimensions()[0], p.queries = q.dimensions()[1];
  p.groups = shape[1], p.slots = shape[2];
  ed::check_groups(checks, p);
  int64_t at = layer_of(checks, layer, shape.layers());
  for (bool value : {false, true}) {
    Numbers from = value ? v : k, scales = value ? v_scale : k_scale;
    const char* name = value ? "values" : "keys";
    ed::Slots& s = value ? p.values : p.keys;
    Layered numbers(from, 4), of(scales, 4);
    s.slot = value ? p.value_dim : p.key_dim;
    s.head = p.slots * s.slot, s.row = p.groups * s.head;
    numbers.shape(checks, name, from, shape.layers(), {p.batch, p.groups, p.slots, s.slot});
    if (!ed::read_storage(checks, s, name, from, scales)) return checks.error();
    if (s.scale) {
      s.scale_groups = of[2], s.scale_slot = 1, s.scale_group = p.slots;
      s.scale_head = s.scale_groups * p.slots, s.scale_row = p.groups * s.scale_head;
      of.shape(checks, value ? "the scales of values" : "the scales of keys", scales,
               shape.layers(), {p.batch, p.groups, s.scale_groups, p.slots});
      checks.that(s.scale_groups > 0 && s.slot % s.scale_groups == 0,
                  "the number of scales must divide the numbers of a head");
    }
    if (checks.ok()) skip_layers(s, numbers, of, at);
  }
  if (!ed::read_mask(checks, p, {q_segments, q_index, k_segments, k_index})) return checks.error();
  if (out->element_count() > 0) ed::run(pool, p);
  return ffi::Error::Success();
}

// The sequences of a flat batch: offsets of their tokens [n + 1], lengths [n], how many are in use
// [1], and pages [n, pages of a sequence].
struct Sequences {
  Ints first_query, lengths, used;
  Table pages;
};

// Read the sequences; every page that a query reads must be in the pool.
bool read_sequences(ed::Checks& checks, ed::Attend& p, const Sequences& of, int64_t tokens,
                    int64_t pages_of_pool) {
  p.batch = of.pages.dimensions()[0], p.pages_of_row = of.pages.dimensions()[1];
  checks.shape("the offsets of queries", of.first_query, {p.batch + 1});
  checks.shape("the lengths", of.lengths, {p.batch});
  if (!checks.shape("the number of sequences", of.used, {1})) return false;
  p.rows = std::max<int64_t>(0, std::min<int64_t>(of.used.typed_data()[0], p.batch));
  p.first_query = of.first_query.typed_data(), p.lengths = of.lengths.typed_data();
  p.pages = of.pages.typed_data();
  int64_t most = p.pages_of_row * p.page_size;
  for (int64_t row = 0; row < p.rows; ++row) {
    int64_t first = p.first_query[row], count = p.first_query[row + 1] - first;
    int64_t length = p.lengths[row];
    if (!checks.that(first >= 0 && count >= 0 && first + count <= tokens && length >= count &&
                         length <= most,
                     "a sequence has tokens or pages beyond those of the batch"))
      return false;
    // Pages before the first query's window may be free again. The kernel does not read them.
    int64_t place = length - count, begin = 0;
    if (p.window > 0) begin = std::max<int64_t>(begin, place - p.window + 1);
    if (p.chunk > 0) begin = std::max<int64_t>(begin, place / p.chunk * p.chunk);
    for (int64_t i = begin / p.page_size; i * p.page_size < length && count > 0; ++i) {
      int32_t page = p.pages[row * p.pages_of_row + i];
      if (!checks.that(page >= 0 && page < pages_of_pool, "a sequence has a page beyond the pool"))
        return false;
    }
  }
  return true;
}

// Pages [layers, P, page_size, g, 2, k], scales [layers, P, g, 2, n, page_size], or without the
// axis of layers. One entry in place of two holds keys, whose first numbers are the values. q is
// [T, heads, k].
ffi::Error attention_paged(ffi::ThreadPool pool, Numbers q, Numbers pool_of_pages, Numbers scales,
                           Ints layer, Ints first_query, Ints lengths, Ints used, Table pages,
                           Ints limits, Floats sinks, Distances distances, Floats slopes,
                           ffi::Result<Numbers> out, float scale, float soft_cap,
                           float alibi_factor, bool alibi_rounded, bool fixed) {
  ed::Checks checks("attention over pages");
  ed::Attend p{};
  Layered shape(pool_of_pages, 5), of(scales, 5);
  if (!ed::read_queries(checks, p, q, *out, 3) ||
      !ed::read_scored(checks, p, {limits, scale, soft_cap, true, fixed}) ||
      !ed::read_sinks(checks, p, sinks) ||
      !ed::read_biases(checks, p, {distances, slopes, alibi_factor, alibi_rounded}) ||
      !checks.that(shape.known, "the pool of pages must have 5 axes, or 6 with layers"))
    return checks.error();
  int64_t ways = shape[3], width = shape[4];
  p.page_size = shape[1], p.groups = shape[2];
  ed::check_groups(checks, p);
  checks.that(p.page_size > 0, "a page must have at least one slot");
  checks.that(ways == 1 || ways == 2, "a page must have keys, or keys and values");
  checks.that(p.key_dim <= width && p.value_dim <= width,
              "a head of the pool must be as wide as a head of queries and of the result");
  int64_t at = layer_of(checks, layer, shape.layers());
  for (bool value : {false, true}) {
    ed::Slots& s = value ? p.values : p.keys;
    if (!ed::read_storage(checks, s, "the pool", pool_of_pages, scales)) return checks.error();
    s.head = ways * width, s.slot = p.groups * s.head, s.row = p.page_size * s.slot;
    if (s.scale) {
      s.scale_groups = of[3], s.scale_slot = 1, s.scale_group = p.page_size;
      s.scale_head = ways * s.scale_groups * p.page_size, s.scale_row = p.groups * s.scale_head;
      of.shape(checks, "the scales of the pool", scales, shape.layers(),
               {shape[0], p.groups, ways, s.scale_groups, p.page_size});
      checks.that(s.scale_groups > 0 && width % s.scale_groups == 0 && p.key_dim == width &&
                      p.value_dim == width,
                  "pages of codes must be as wide as a head, and have scales that divide the head");
    }
    if (!checks.ok()) return checks.error();
    skip_layers(s, shape, of, at);
    if (value && ways == 2) {
      s.data = static_cast<const char*>(s.data) + width * ed::bytes_of(s.kind);
      if (s.scale) s.scale += s.scale_groups * p.page_size;
    }
  }
  if (!read_sequences(checks, p, {first_query, lengths, used, pages}, q.dimensions()[0], shape[0]))
    return checks.error();
  std::memset(p.out, 0, out->size_bytes());  // tokens of padding
  if (out->element_count() > 0) ed::run(pool, p);
  return ffi::Error::Success();
}

}  // namespace

// What the library exports.
#pragma GCC visibility push(default)

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
                                  .Arg<Distances>()
                                  .Arg<Floats>()
                                  .Ret<Numbers>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("alibi_factor")
                                  .Attr<bool>("alibi_rounded")
                                  .Attr<bool>("causal")
                                  .Attr<bool>("fixed"));

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
                                  .Arg<Distances>()
                                  .Arg<Floats>()
                                  .Ret<Numbers>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("alibi_factor")
                                  .Attr<bool>("alibi_rounded")
                                  .Attr<bool>("fixed"));

#pragma GCC visibility pop
